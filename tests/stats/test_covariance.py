"""Collecting second moments: equal to a direct sum, sharded, resumed, stopped at convergence."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from factscope.errors import BadRunFolder, BadSetting, BadStats, RunInterrupted
from factscope.lm.forward import mlp_keys
from factscope.lm.load import from_model
from factscope.lm.model import LM
from factscope.stats.covariance import RunningSums, add_products_, collect, find_collected
from factscope.stats.second_moment import (
    direction_difference,
    load_second_moment,
    merge_second_moments,
    save_second_moment,
)
from factscope.stats.settings import StatsSettings
from factscope.stats.text import GeneratedText
from second_moments import LENGTH, random_sequences, relative_difference

from families import tiny, tiny_model
from tokenizers_ import tokenizer


def direct(lm: LM, sequences: Sequence[Sequence[int]], layer: int) -> Tensor:
    """C as a sum over single keys."""
    total, count = torch.zeros(()), 0
    for sequence in sequences:
        for key in mlp_keys(lm, torch.tensor([sequence]), layer)[0]:
            total = total + torch.outer(key, key)
            count += 1
    return total / count


# ---- collecting


def test_collected_moments_equal_a_direct_sum_in_every_family(lm: LM) -> None:
    sequences = random_sequences(7)
    found = collect(lm, [0, 2], sequences, StatsSettings(tokens=10_000, batch_size=3))
    for moment in found:
        assert relative_difference(moment.matrix, direct(lm, sequences, moment.layer)) < 1e-5
        assert torch.equal(moment.matrix, moment.matrix.T)
        assert moment.tokens == 7 * LENGTH
        moment.check(lm, moment.layer)
    assert [moment.layer for moment in found] == [0, 2]


def test_collecting_leaves_the_model_unchanged(lm: LM) -> None:
    ids = torch.tensor(random_sequences(2))
    before = lm.model(ids).logits
    collect(lm, [1], random_sequences(2), StatsSettings(tokens=100))
    assert torch.equal(lm.model(ids).logits, before)


def test_several_layers_in_one_pass_equal_one_layer_at_a_time() -> None:
    lm, sequences = tiny("llama"), random_sequences(6)
    settings = StatsSettings(tokens=1000, batch_size=4)
    for moment in collect(lm, [2, 0, 1, 0], sequences, settings):
        alone = collect(lm, [moment.layer], sequences, settings)[0]
        assert torch.equal(moment.matrix, alone.matrix)
        assert moment.convergence_history == alone.convergence_history


def test_half_precision_keys_are_summed_in_single_precision() -> None:
    lm = from_model(tiny_model("llama").bfloat16(), tokenizer("llama"), check=False)
    sequences = random_sequences(6)
    found = collect(lm, [1], sequences, StatsSettings(tokens=1000))[0]
    keys = mlp_keys(lm, torch.tensor(sequences), 1).flatten(0, 1)
    assert keys.dtype == torch.bfloat16
    assert found.matrix.dtype == torch.float32
    assert relative_difference(found.matrix, keys.float().T @ keys.float() / len(keys)) < 1e-6


@pytest.mark.parametrize("width", [3, 8, 40, 257])
def test_products_of_any_width(width: int) -> None:
    keys = torch.randn(11, width)
    total = torch.zeros(width, width)
    add_products_(total, keys)
    assert relative_difference(total.triu(), (keys.T @ keys).triu()) < 1e-6


def test_collection_stops_at_the_requested_tokens() -> None:
    lm, fractions = tiny("gpt2"), []
    settings = StatsSettings(tokens=3 * LENGTH + 1, batch_size=2)
    found = collect(lm, [1], random_sequences(9), settings, progress=fractions.append)[0]
    assert found.tokens == 4 * LENGTH
    assert len(fractions) == 3
    assert sum(fractions) == pytest.approx(1)
    assert relative_difference(found.matrix, direct(lm, random_sequences(9)[:4], 1)) < 1e-5


def test_sequences_of_different_lengths() -> None:
    lm = tiny("gpt2")
    sequences = [*random_sequences(3), *random_sequences(2, 5), *random_sequences(1)]
    found = collect(lm, [1], sequences, StatsSettings(tokens=1000, batch_size=4))[0]
    assert found.tokens == sum(map(len, sequences))
    assert relative_difference(found.matrix, direct(lm, sequences, 1)) < 1e-5


def test_the_two_halves_are_odd_and_even_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sequences = tiny("gpt2"), random_sequences(9)
    monkeypatch.setattr("factscope.stats.covariance.FIRST_COMPARISON", 16)
    found = collect(lm, [1], sequences, StatsSettings(tokens=1000, batch_size=3))[0]
    odd, even = direct(lm, sequences[1::2], 1), direct(lm, sequences[::2], 1)
    assert [n for n, _ in found.convergence_history] == [24, 48, 72]
    wanted = ((odd - even).norm() / found.matrix.norm()).item()
    assert found.split_half_difference == pytest.approx(wanted, rel=1e-4)


def test_collection_stops_at_convergence() -> None:
    lm, sequences = tiny("gpt2"), random_sequences(800)
    whole = collect(lm, [1], sequences, StatsSettings(tokens=6400, batch_size=10))[0]
    differences = dict(whole.convergence_history)
    aim = (differences[2000] + differences[4000]) / 2
    settings = StatsSettings(tokens=6400, batch_size=10, convergence=aim)
    short = collect(lm, [1], sequences, settings)[0]
    assert 1000 < short.tokens <= 4400
    assert short.split_half_difference is not None
    assert short.split_half_difference <= aim


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_merged_shards_equal_a_single_collection(family: str) -> None:
    lm, sequences = tiny(family), random_sequences(11)

    def collected(shard: str):
        settings = StatsSettings(tokens=9 * LENGTH, shard=shard)
        return collect(lm, [1], sequences, settings, corpus="t")[0]

    whole = collected("1/1")
    merged = merge_second_moments([collected(f"{i}/3") for i in (1, 2, 3)])
    assert merged.tokens == whole.tokens == 9 * LENGTH
    assert relative_difference(merged.matrix, whole.matrix) < 1e-6
    assert merged.corpus == "t, shard 1 of 3; t, shard 2 of 3; t, shard 3 of 3"
    assert merged.split_half_difference is not None


def test_bad_settings_are_refused() -> None:
    lm = tiny("gpt2")
    with pytest.raises(BadSetting, match="layers 0 to 2"):
        collect(lm, [1, 3], random_sequences(1), StatsSettings(tokens=10))
    with pytest.raises(BadSetting, match="tokens is 0"):
        StatsSettings(tokens=0)
    for shard in ("3/2", "0/2", "1", "x"):
        with pytest.raises(BadSetting, match=f"shard is '{shard}'; write 1/4"):
            StatsSettings(shard=shard)
    with pytest.raises(BadStats, match="no tokens"):
        collect(lm, [1], [], StatsSettings(tokens=10))


def test_infinite_keys_are_refused() -> None:
    model = tiny_model("gpt2")
    model.transformer.wte.weight.data[5] = float("inf")
    lm = from_model(model, tokenizer("gpt2"), check=False)
    with pytest.raises(BadStats, match="infinite or NaN"):
        collect(lm, [1], [[5] * LENGTH], StatsSettings(tokens=10))


# ---- resuming


class Killed(Exception):
    pass


def test_a_resumed_collection_is_bit_for_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factscope.stats.covariance.MAX_SAVE_OVERHEAD", 0)
    lm, sequences, path = tiny("llama"), random_sequences(300), tmp_path / "c.partial"
    settings = StatsSettings(tokens=2200, batch_size=3)
    uninterrupted = collect(lm, [0, 2], sequences, settings, corpus="t")

    def interrupted(after: int) -> Iterator[list[int]]:
        yield from sequences[:after]
        raise Killed

    def run(source, **more):
        return collect(
            lm, [0, 2], source, settings, corpus="t", partial=path, save_interval=0.0, **more
        )

    for after in (20, 127, 151):  # the halves are first compared after 126 sequences
        with pytest.raises(Killed):
            run(interrupted(after))
        assert path.is_file()
    fractions: list[float] = []
    resumed = run(sequences, progress=fractions.append)
    assert fractions[0] == pytest.approx(150 * LENGTH / 2200)
    for a, b in zip(resumed, uninterrupted, strict=True):
        assert torch.equal(a.matrix, b.matrix)
        assert (a.convergence_history, a.tokens) == (b.convergence_history, b.tokens)


def test_a_partial_file_of_other_settings_or_another_format_is_refused(tmp_path: Path) -> None:
    lm, path = tiny("gpt2"), tmp_path / "c.partial"

    def run(lm: LM, tokens: int) -> None:
        settings = StatsSettings(tokens=tokens)
        collect(lm, [1], random_sequences(4), settings, partial=path, save_interval=0.0, corpus="t")

    run(lm, 1000)
    with pytest.raises(BadRunFolder, match=r"tokens: 1000 there, 2000 now"):
        run(lm, 2000)
    with pytest.raises(BadRunFolder, match="model"):
        run(tiny("opt"), 1000)
    saved = path.read_bytes()
    path.write_bytes(saved[:100])
    with pytest.raises(BadRunFolder, match="delete it"):
        run(lm, 1000)
    path.write_bytes(saved)
    with safe_open(path, framework="pt") as file:
        state = json.loads(file.metadata()["state"])
    del state["version"]  # as in version 1
    save_file(load_file(path), path, metadata={"state": json.dumps(state)})
    with pytest.raises(BadRunFolder, match="format version 1, not 2"):
        run(lm, 1000)


def test_ctrl_c_saves_the_sums_and_the_collection_resumes(tmp_path: Path) -> None:
    lm, sequences, path = tiny("gpt2"), random_sequences(20), tmp_path / "c.partial"
    settings = StatsSettings(tokens=160, batch_size=2)

    def interrupted() -> Iterator[list[int]]:
        yield from sequences[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(lm, [1], interrupted(), settings, corpus="t", partial=path)
    fractions: list[float] = []
    (resumed,) = collect(
        lm, [1], sequences, settings, corpus="t", partial=path, progress=fractions.append
    )
    assert fractions[0] == pytest.approx(6 * LENGTH / 160)  # all whole batches
    (whole,) = collect(lm, [1], sequences, settings, corpus="t")
    assert torch.equal(resumed.matrix, whole.matrix)


def test_ctrl_c_within_a_batch_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers may have the batch and others not."""
    add, path = RunningSums.add_, tmp_path / "c.partial"

    def interrupted(self: RunningSums, layer: int, keys: Tensor, first: int) -> None:
        add(self, layer, keys, first)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunningSums, "add_", interrupted)
    settings = StatsSettings(tokens=160)
    with pytest.raises(KeyboardInterrupt):
        collect(tiny("gpt2"), [0, 1], random_sequences(20), settings, partial=path)
    assert not path.exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
def test_a_full_disk_interrupts_the_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: object, **more: object) -> None:
        raise error

    path = tmp_path / "c.partial"
    settings = StatsSettings(tokens=160, batch_size=2)

    def run() -> None:
        sequences = random_sequences(20)
        collect(tiny("gpt2"), [1], sequences, settings, partial=path, save_interval=0.0)

    with monkeypatch.context() as patched:
        patched.setattr("factscope.stats.covariance.save_file", full)
        with pytest.raises(RunInterrupted, match=r"c\.partial \(No space left\).*starts again"):
            run()
    assert list(tmp_path.iterdir()) == []
    run()
    monkeypatch.setattr("factscope.stats.covariance.save_file", full)
    monkeypatch.setattr("factscope.stats.covariance._PartialFile.load", lambda self: None)
    with pytest.raises(RunInterrupted, match="the same command resumes"):
        run()


def test_progress_moves_while_the_model_generates_text() -> None:
    source, seen = GeneratedText(lm=tiny("gpt2"), length=LENGTH, batch_size=4), []
    settings = StatsSettings(tokens=6 * LENGTH, batch_size=8)
    collect(source.lm, [1], source, settings, progress=seen.append)
    assert sum(x > 0 for x in seen) >= 2 * (LENGTH - 1)  # two batches, token by token
    assert sum(seen) == pytest.approx(1)


def test_a_finished_collection_is_found_by_its_settings(tmp_path: Path) -> None:
    lm, path = tiny("gpt2"), tmp_path / "m.safetensors"
    settings = StatsSettings(tokens=1000)  # more than the text has
    assert find_collected(path, lm, 1, settings, "t") is None
    (moment,) = collect(lm, [1], random_sequences(20), settings, corpus="t")
    save_second_moment(moment, path)
    found = find_collected(path, lm, 1, settings, "t")
    assert found is not None
    assert torch.equal(found.matrix, moment.matrix)
    assert find_collected(path, lm, 0, settings, "t") is None
    assert find_collected(path, lm, 1, settings, "another text") is None
    assert find_collected(path, tiny("opt"), 1, settings, "t") is None
    for change in ({"tokens": 999}, {"half_precision": True}, {"convergence": 0.1}):
        assert find_collected(path, lm, 1, replace(settings, **change), "t") is None
    (other,) = collect(lm, [1], random_sequences(21), settings, corpus="u")
    assert merge_second_moments([moment, other]).request == ""
    path.write_bytes(b"damaged")
    assert find_collected(path, lm, 1, settings, "t") is None


# ---- movement


def test_the_movement_is_the_direction_difference_between_half_of_the_text_and_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, sequences = tiny("llama"), random_sequences(300)
    monkeypatch.setattr("factscope.stats.covariance.TOKENS_PER_DIMENSION", 0)
    keys = {layer: mlp_keys(lm, torch.tensor(sequences[:3]), layer)[:, -1] for layer in (0, 2)}
    settings = StatsSettings(tokens=2400, batch_size=2, movement=1e-9)
    found = collect(lm, [0, 2], sequences, settings, keys=keys)
    plain = StatsSettings(tokens=10_000)
    for moment in found:
        assert [n for n, _ in moment.movement_history] == [512, 1008, 2000]
        for tokens, movement in moment.movement_history:
            read = sequences[: tokens // LENGTH]
            half, both = (collect(lm, [moment.layer], x, plain)[0] for x in (read[::2], read))
            wanted = direction_difference(half, both, keys[moment.layer], ridge=1e-3)
            assert movement == pytest.approx(wanted, rel=1e-3)
        assert moment.tokens == 2400
        assert moment.movement == moment.movement_history[-1][1]


def test_collection_stops_when_the_movement_of_every_layer_is_within_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, sequences = tiny("llama"), random_sequences(800)
    monkeypatch.setattr("factscope.stats.covariance.TOKENS_PER_DIMENSION", 0)
    keys = {layer: mlp_keys(lm, torch.tensor(sequences[:3]), layer)[:, -1] for layer in (0, 2)}

    def run(**more):
        settings = StatsSettings(tokens=6400, batch_size=10, **more)
        return collect(lm, [0, 2], sequences, settings, keys=keys)

    whole = run(movement=1e-9)
    by_layer = [dict(moment.movement_history) for moment in whole]
    last = max(by_layer[0])
    bound = max(moved[last] for moved in by_layer)
    for moment in run(movement=bound):
        assert moment.tokens == last
        assert moment.movement is not None
        assert moment.movement <= bound
    assert [moment.movement_history for moment in run()] == [(), ()]
    with pytest.raises(BadSetting, match=r"movement is 0\.1; give the keys"):
        collect(lm, [0], sequences, StatsSettings(movement=0.1))


def test_time_ends_a_collection_that_has_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sequences = tiny("gpt2"), random_sequences(400)
    settings = StatsSettings(tokens=3200, batch_size=1)
    found = collect(lm, [1], sequences, settings, out_of_time=lambda: True)[0]
    width = lm.mlp_weight(1).shape[1]
    assert found.tokens == max(1000, 10 * width)


def test_a_resumed_collection_has_the_same_movement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factscope.stats.covariance.MAX_SAVE_OVERHEAD", 0)
    monkeypatch.setattr("factscope.stats.covariance.TOKENS_PER_DIMENSION", 0)
    lm, sequences, path = tiny("llama"), random_sequences(300), tmp_path / "c.partial"
    settings = StatsSettings(tokens=2400, batch_size=3, movement=1e-9)
    keys = {1: mlp_keys(lm, torch.tensor(sequences[:3]), 1)[:, -1]}

    def run(source, **more):
        return collect(lm, [1], source, settings, corpus="t", keys=keys, **more)[0]

    def interrupted() -> Iterator[list[int]]:
        yield from sequences[:200]
        raise Killed

    whole = run(sequences)
    with pytest.raises(Killed):
        run(interrupted(), partial=path, save_interval=0.0)
    resumed = run(sequences, partial=path, save_interval=0.0)
    assert resumed.movement_history == whole.movement_history
    save_second_moment(resumed, tmp_path / "c.safetensors")
    loaded = load_second_moment(tmp_path / "c.safetensors")
    assert loaded.movement_history == whole.movement_history
    assert "moved by" in " ".join(loaded.quality())
