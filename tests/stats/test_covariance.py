"""Second moments: collected, kept, found and solved with; on the command line, too."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from factscope.errors import BadRunFolder, BadSetting, BadStats
from factscope.lm.forward import mlp_keys
from factscope.lm.load import from_model
from factscope.lm.model import LM
from factscope.report.figures.training import convergence_figure
from factscope.stats import text as text_module
from factscope.stats.covariance import add_products_, chosen, collect
from factscope.stats.second_moment import (
    KIND,
    SecondMoment,
    cached_path,
    find_moment,
    load_moment,
    merge,
    save_moment,
)
from factscope.stats.text import DataSet, GeneratedText, documents, window_of, windows

from commands import Result, Run, runner, saved_model
from families import LAYERS, VOCABULARY, tiny, tiny_model
from tokenizers_ import TEXT, tokenizer

LENGTH = 8


@pytest.fixture(scope="module")
def words() -> LM:
    """A tiny GPT-2 that reads words."""
    tok = tokenizer("gpt2")
    return from_model(tiny_model("gpt2", vocabulary=len(tok), spread=0.05), tok, check=False)


def random_windows(count: int, length: int = LENGTH, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator).tolist()


def plain(lm: LM, texts: Sequence[Sequence[int]], layer: int) -> Tensor:
    """C as one would first write it."""
    total, count = torch.zeros(()), 0
    for window in texts:
        for key in mlp_keys(lm, torch.tensor([window]), layer)[0]:
            total = total + torch.outer(key, key)
            count += 1
    return total / count


def apart(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def moment(matrix: Tensor | None = None, **fields: Any) -> SecondMoment:
    """A moment made by hand."""
    known: dict[str, Any] = {
        "matrix": torch.eye(4) if matrix is None else matrix,
        "layer": 1, "tokens": 100, "corpus": "a text", "model": "m", "fingerprint": "f" * 64,
    }  # fmt: skip
    return SecondMoment(**{**known, **fields})


# ---- collecting


def test_equals_a_plain_sum_in_every_family(lm: LM) -> None:
    texts = random_windows(7)
    found = collect(lm, [0, 2], texts, tokens=10_000, rows=3)
    for each in found:
        assert apart(each.matrix, plain(lm, texts, each.layer)) < 1e-5
        assert torch.equal(each.matrix, each.matrix.T)
        assert each.tokens == 7 * LENGTH
        each.check(lm, each.layer)
    assert [each.layer for each in found] == [0, 2]


def test_the_model_is_as_before(lm: LM) -> None:
    ids = torch.tensor(random_windows(2))
    before = lm.model(ids).logits
    collect(lm, [1], random_windows(2), tokens=100)
    assert torch.equal(lm.model(ids).logits, before)


def test_several_layers_equal_one_by_one() -> None:
    lm, texts = tiny("llama"), random_windows(6)
    together = collect(lm, [2, 0, 1, 0], texts, tokens=1000, rows=4)
    for each in together:
        alone = collect(lm, [each.layer], texts, tokens=1000, rows=4)[0]
        assert torch.equal(each.matrix, alone.matrix)
        assert each.halves == alone.halves


def test_half_precision_is_summed_in_single() -> None:
    lm = from_model(tiny_model("llama").bfloat16(), tokenizer("llama"), check=False)
    texts = random_windows(6)
    found = collect(lm, [1], texts, tokens=1000)[0]
    keys = mlp_keys(lm, torch.tensor(texts), 1).flatten(0, 1)
    assert keys.dtype == torch.bfloat16
    assert found.matrix.dtype == torch.float32
    assert apart(found.matrix, keys.float().T @ keys.float() / len(keys)) < 1e-6


@pytest.mark.parametrize("width", [3, 8, 40, 257])
def test_products_of_any_width(width: int) -> None:
    keys = torch.randn(11, width)
    total = torch.zeros(width, width)
    add_products_(total, keys)
    assert apart(total.triu(), (keys.T @ keys).triu()) < 1e-6


def test_stops_at_the_tokens_asked_for() -> None:
    lm = tiny("gpt2")
    seen: list[int] = []
    found = collect(
        lm, [1], random_windows(9), tokens=3 * LENGTH + 1, rows=2, progress=seen.append
    )[0]
    assert found.tokens == sum(seen) == 4 * LENGTH
    assert apart(found.matrix, plain(lm, random_windows(9)[:4], 1)) < 1e-5


def test_windows_of_different_lengths() -> None:
    lm = tiny("gpt2")
    texts = [*random_windows(3), *random_windows(2, 5), *random_windows(1)]
    found = collect(lm, [1], texts, tokens=1000, rows=4)[0]
    assert found.tokens == sum(map(len, texts))
    assert apart(found.matrix, plain(lm, texts, 1)) < 1e-5


def test_the_halves_are_odd_and_even_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, texts = tiny("gpt2"), random_windows(9)
    monkeypatch.setattr("factscope.stats.covariance.FIRST_LOOK", 16)
    found = collect(lm, [1], texts, tokens=1000, rows=3)[0]
    odd, even = plain(lm, texts[1::2], 1), plain(lm, texts[::2], 1)
    assert [n for n, _ in found.halves] == [24, 48, 72]
    assert found.gap == pytest.approx(((odd - even).norm() / found.matrix.norm()).item(), rel=1e-4)


def test_stops_when_the_halves_agree() -> None:
    lm, texts = tiny("gpt2"), random_windows(800)
    gaps = dict(collect(lm, [1], texts, tokens=6400, rows=10)[0].halves)
    aim = (gaps[2000] + gaps[4000]) / 2
    short = collect(lm, [1], texts, tokens=6400, rows=10, until=aim)[0]
    assert 1000 < short.tokens <= 4400
    assert short.gap is not None
    assert short.gap <= aim


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_shards_merge_to_the_whole(family: str) -> None:
    lm, texts = tiny(family), random_windows(11)
    whole = collect(lm, [1], texts, tokens=9 * LENGTH, corpus="t")[0]
    parts = [collect(lm, [1], texts, tokens=9 * LENGTH, corpus="t", shard=(i, 3)) for i in range(3)]
    merged = merge([part[0] for part in parts])
    assert merged.tokens == whole.tokens == 9 * LENGTH
    assert apart(merged.matrix, whole.matrix) < 1e-6
    assert merged.corpus == "t, shard 1 of 3; t, shard 2 of 3; t, shard 3 of 3"
    assert merged.gap is not None


def test_refuses_what_cannot_be() -> None:
    lm = tiny("gpt2")
    with pytest.raises(BadSetting, match="layers 0 to 2"):
        collect(lm, [1, 3], random_windows(1), tokens=10)
    with pytest.raises(BadSetting, match="0 tokens"):
        collect(lm, [1], random_windows(1), tokens=0)
    with pytest.raises(BadSetting, match="shard 3 of 2"):
        collect(lm, [1], random_windows(1), tokens=10, shard=(2, 2))
    with pytest.raises(BadStats, match="no tokens"):
        collect(lm, [1], [], tokens=10)


def test_keys_that_are_not_finite() -> None:
    model = tiny_model("gpt2")
    model.transformer.wte.weight.data[5] = float("inf")
    lm = from_model(model, tokenizer("gpt2"), check=False)
    with pytest.raises(BadStats, match="not all finite"):
        collect(lm, [1], [[5] * LENGTH], tokens=10)


# ---- going on


class Killed(Exception):
    pass


def test_a_broken_run_goes_on_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factscope.stats.covariance.SHARE", 0)
    lm, texts, path = tiny("llama"), random_windows(300), tmp_path / "c.partial"
    how: dict[str, Any] = {"tokens": 2200, "rows": 3, "corpus": "t"}
    unbroken = collect(lm, [0, 2], texts, **how)

    def breaks(after: int) -> Iterator[list[int]]:
        for i, window in enumerate(texts):
            if i == after:
                raise Killed
            yield window

    for after in (20, 127, 151):  # 126 windows are the first look at the halves
        with pytest.raises(Killed):
            collect(lm, [0, 2], breaks(after), partial=path, every=0.0, **how)
        assert path.is_file()
    seen: list[int] = []
    resumed = collect(lm, [0, 2], texts, partial=path, every=0.0, progress=seen.append, **how)
    assert seen[0] == 150 * LENGTH
    for one, other in zip(resumed, unbroken, strict=True):
        assert torch.equal(one.matrix, other.matrix)
        assert (one.halves, one.tokens) == (other.halves, other.tokens)


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    lm, path = tiny("gpt2"), tmp_path / "c.partial"
    collect(lm, [1], random_windows(4), tokens=1000, partial=path, every=0.0, corpus="t")
    with pytest.raises(BadRunFolder, match=r"tokens: there 1000, asked 2000"):
        collect(lm, [1], random_windows(4), tokens=2000, partial=path, every=0.0, corpus="t")
    with pytest.raises(BadRunFolder, match="model"):
        collect(tiny("opt"), [1], random_windows(4), tokens=1000, partial=path, corpus="t")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BadRunFolder, match="delete it"):
        collect(lm, [1], random_windows(4), tokens=1000, partial=path, corpus="t")


# ---- solving, merging


def test_solve_equals_a_plain_solve() -> None:
    torch.manual_seed(0)
    root = torch.randn(60, 20)
    c = moment(root.T @ root / 60)
    keys = torch.randn(5, 20)
    plainly = torch.linalg.solve(c.matrix.double(), keys.double().T).T
    assert apart(c.solve(keys), plainly.float()) < 1e-5
    ridged = c.matrix.double() + 0.1 * c.matrix.diagonal().mean() * torch.eye(20).double()
    plainly = torch.linalg.solve(ridged, keys.double().T).T
    assert apart(c.solve(keys, ridge=0.1), plainly.float()) < 1e-5
    assert c.solve(keys.half()).dtype == torch.float32
    assert c.solve(keys.double()).dtype == torch.float64


def test_the_factor_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: calls.append(1) or real(m))
    c = moment()
    for ridge in (0.0, 0.0, 0.5, 0.5):
        c.solve(torch.ones(1, 4), ridge=ridge)
    assert len(calls) == 2


def test_a_singular_matrix_is_refused_by_name() -> None:
    key = torch.randn(1, 20)
    few = moment(key.T @ key, tokens=1)
    with pytest.raises(BadStats, match=r"1 tokens for keys 20 wide.*more tokens.*ridge"):
        few.solve(key)
    assert few.solve(key, ridge=0.1).isfinite().all()
    with pytest.raises(BadStats, match="cannot be inverted"):
        moment(torch.full((4, 4), float("nan"))).solve(torch.ones(1, 4))


def test_other_models_layers_and_widths_are_refused() -> None:
    lm = tiny("gpt2")
    mine = collect(lm, [1], random_windows(2), tokens=100)[0]
    mine.check(lm, 1)
    with pytest.raises(BadStats, match=r"layer 1 of .*, layer 2 is wanted.*--layer 2"):
        mine.check(lm, 2)
    with pytest.raises(BadStats, match=r"of tiny gpt2 .*not of tiny opt .*factscope stats"):
        mine.check(tiny("opt"), 1)
    with pytest.raises(BadStats, match="4 wide"):
        replace(mine, matrix=torch.eye(4)).check(lm, 1)


def test_merging_weighs_by_tokens() -> None:
    one = moment(torch.eye(4), tokens=300, corpus="a", halves=((100, 0.5),))
    other = moment(3 * torch.eye(4), tokens=100, corpus="b")
    merged = merge([one, other])
    assert torch.allclose(merged.matrix, 1.5 * torch.eye(4))
    assert (merged.tokens, merged.corpus) == (400, "a; b")
    assert merged.halves == ((100, 0.5), (400, pytest.approx(2 / 1.5)))
    assert torch.equal(merge([one]).matrix, one.matrix)


def test_what_cannot_be_merged() -> None:
    with pytest.raises(BadStats, match="no statistics"):
        merge([])
    with pytest.raises(BadStats, match=r"layer 1 of m .* with layer 2"):
        merge([moment(), moment(layer=2)])
    with pytest.raises(BadStats, match="cannot merge"):
        merge([moment(), moment(fingerprint="f" * 63 + "e")])
    with pytest.raises(BadStats, match="given twice"):
        merge([moment(), moment(layer=1, tokens=5), moment()])


# ---- files


def made(width: int = 40) -> SecondMoment:
    torch.manual_seed(1)
    keys = torch.randn(400, width) * torch.logspace(-2, 1, width)
    halves = ((100, 0.25), (400, 0.1))
    return moment(keys.T @ keys / 400, corpus="ein Text “ü”", halves=halves)


def test_a_file_holds_everything(tmp_path: Path) -> None:
    before, path = made(), tmp_path / "new" / "m.safetensors"
    save_moment(before, path)
    after = load_moment(path)
    assert torch.equal(after.matrix, before.matrix)
    for name in ("layer", "tokens", "corpus", "model", "fingerprint", "halves"):
        assert getattr(after, name) == getattr(before, name)
    assert [file.name for file in path.parent.iterdir()] == ["m.safetensors"]


def test_a_packed_file_is_small_and_close(tmp_path: Path) -> None:
    before, path = made(300), tmp_path / "m.safetensors"
    save_moment(before, path, packed=True)
    after = load_moment(path)
    assert path.stat().st_size < 300 * 300 * 4 * 0.27 + 1000
    assert torch.equal(after.matrix, after.matrix.T)
    # Entry by entry within the rounding of a half, although the scales differ a thousandfold.
    scales = before.matrix.diagonal().sqrt()
    assert ((after.matrix - before.matrix) / torch.outer(scales, scales)).abs().max() < 2**-11
    assert after.halves == before.halves


def test_a_key_that_is_always_zero_can_be_packed(tmp_path: Path) -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.0, 2.0]))
    save_moment(moment(matrix), tmp_path / "m.safetensors", packed=True)
    assert torch.allclose(load_moment(tmp_path / "m.safetensors").matrix, matrix)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(BadStats, match="no file"):
        load_moment(path)
    save_moment(made(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadStats, match="cannot be read"):
        load_moment(path)
    path.write_text("no such thing")
    with pytest.raises(BadStats, match="cannot be read"):
        load_moment(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(BadStats, match="no second moment"):
        load_moment(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"kind": KIND, "version": "2"})
    with pytest.raises(BadStats, match=r"format '2'.*update"):
        load_moment(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"kind": KIND, "version": "1"})
    with pytest.raises(BadStats, match="cannot be read"):
        load_moment(path)


# ---- finding


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_given_files_then_the_cache_then_nothing(tmp_path: Path, cache: Path) -> None:
    lm = tiny("gpt2")
    assert find_moment(lm, 1) is None
    found = collect(lm, [0, 1, 2], random_windows(3), tokens=1000, corpus="cached")
    save_moment(found[1], cached_path(lm, 1))
    assert cached_path(lm, 1).is_relative_to(cache)
    kept = find_moment(lm, 1)
    assert kept is not None
    assert kept.corpus == "cached"
    assert find_moment(lm, 2) is None
    folder = tmp_path / "mine"
    for each in found:
        save_moment(replace(each, corpus="given"), folder / f"{each.layer}.safetensors")
    for given in ([folder], sorted(folder.iterdir())):
        for layer in range(LAYERS):
            taken = find_moment(lm, layer, given)
            assert taken is not None
            assert (taken.layer, taken.corpus) == (layer, "given")


def test_given_files_that_do_not_fit_are_refused(tmp_path: Path, cache: Path) -> None:
    lm, other = tiny("gpt2"), tiny("opt")
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, each in zip(paths, collect(lm, [0, 1], random_windows(3), tokens=1000), strict=True):
        save_moment(each, path)
    save_moment(load_moment(paths[1]), cached_path(lm, 1))
    with pytest.raises(BadStats, match=r"of layer 0 of .*layer 1 is wanted"):
        find_moment(lm, 1, paths[:1])
    with pytest.raises(BadStats, match="none of the given statistics is of layer 2"):
        find_moment(lm, 2, paths)
    with pytest.raises(BadStats, match="none of the given"):
        find_moment(other, 1, [tmp_path])
    with pytest.raises(BadStats, match="no file"):
        find_moment(lm, 1, [tmp_path / "nowhere.safetensors"])


# ---- text


def test_windows_lose_nothing(words: LM) -> None:
    texts = TEXT.splitlines()
    made = list(windows(words, texts, 16))
    end = words.tokenizer.eos_token_id
    expected: list[int] = []
    for line in texts:
        expected += [end] if expected else []
        expected += words.tokenizer(line)["input_ids"]
    joined = [i for window in made for i in window]
    assert {len(window) for window in made[:-1]} == {16}
    assert joined == expected[: len(joined)]
    assert len(expected) - len(joined) < text_module.TINY


def test_a_short_text_is_one_window(words: LM) -> None:
    assert list(windows(words, ["Paris"], 16)) == [words.tokenizer("Paris")["input_ids"]]
    assert list(windows(words, [], 16)) == []


@pytest.mark.parametrize("style", ["gemma", "llama", "opt"])
def test_every_window_begins_with_bos(style: str) -> None:
    tok = tokenizer(style)
    lm = from_model(tiny_model(style, vocabulary=len(tok)), tok, check=False)
    made = list(windows(lm, TEXT.splitlines(), 16))
    assert all(window[0] == tok.bos_token_id for window in made)
    assert {len(window) for window in made[:-1]} == {16}
    text = lm.tokenizer.decode([i for w in made for i in w[1:]], skip_special_tokens=True)
    assert "Tower" in text


def test_documents_of_files(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    path.write_text("one\nstill one\n\n\n two\n \nthree")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert sorted(documents(path)) == ["one\nstill one", "three", "two"]
    assert list(documents(path, 3)) == list(documents(packed, 3))
    assert {tuple(documents(path, seed)) for seed in range(9)} > {tuple(documents(path, 0))}
    path.write_text("\n\n")
    with pytest.raises(BadSetting, match="holds no text"):
        list(documents(path))
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(BadSetting, match="cannot be read"):
        list(documents(packed))


def test_a_file_too_large_to_hold_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "SHUFFLED", 3)
    (tmp_path / "a.txt").write_text("\n\n".join("abcdefgh"))
    assert list(documents(tmp_path / "a.txt")) == list("abcdefgh")


def test_the_length_of_a_window(words: LM) -> None:
    assert window_of(words) == words.context == 64
    assert window_of(words, 32) == 32
    with pytest.raises(BadSetting, match="2 to 64"):
        window_of(words, 65)
    with pytest.raises(BadSetting, match="2 to 64"):
        window_of(words, 1)


def test_text_that_the_model_writes() -> None:
    lm = tiny("gpt2")
    written = GeneratedText(lm=lm, window=LENGTH, seed=4, rows=3)
    all_ten = list(written.pick(range(10)))
    assert {len(window) for window in all_ten} == {LENGTH}
    assert {window[0] for window in all_ten} == {lm.tokenizer.bos_token_id}
    assert len({tuple(window) for window in all_ten}) == 10
    assert list(written.pick(range(10))) == all_ten
    assert list(chosen(written, 10 * LENGTH, (0, 1), 0)) == all_ten
    assert list(chosen(written, 10 * LENGTH - 1, (1, 3), 1)) == all_ten[1::3][1:]
    assert list(chosen(written, 10 * LENGTH, (0, 1), 7)) == all_ten[7:]
    other = GeneratedText(lm=lm, window=LENGTH, seed=5, rows=3)
    assert list(other.pick(range(10))) != all_ten


def test_a_data_set_by_name() -> None:
    assert DataSet.parse("wikitext") == DataSet(name="wikitext")
    full = DataSet.parse("hf:wikimedia/wikipedia,20231101.en:test#body")
    assert full == DataSet(
        name="wikimedia/wikipedia", config="20231101.en", split="test", column="body"
    )
    assert DataSet.parse(str(full)) == full
    with pytest.raises(BadSetting, match="no name"):
        DataSet.parse(":train")


class Rows(list[dict[str, str]]):
    """What `datasets` streams, as far as we use it."""

    def shuffle(self, *, seed: int, buffer_size: int) -> "Rows":
        return Rows(self[seed:] + self[:seed])


def test_texts_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Rows:
        asked.append((args, kwargs))
        if args[0] == "gone":
            raise ConnectionError("no route")
        if args[0] == "other":
            raise ValueError("Unknown split")
        return Rows([{"text": "one"}, {"text": " "}, {"text": "two"}])

    stub: Any = types.ModuleType("datasets")
    stub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", stub)
    assert list(DataSet.parse("a/b,c").documents(seed=2)) == ["two", "one"]
    assert asked == [(("a/b", "c"), {"split": "train", "streaming": True})]
    with pytest.raises(BadSetting, match="no column 'body'; it has 'text'"):
        list(DataSet.parse("a#body").documents())
    with pytest.raises(Exception, match="could not be fetched"):
        list(DataSet.parse("gone").documents())
    with pytest.raises(BadSetting, match="Unknown split"):
        list(DataSet.parse("other").documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadSetting, match="pip install datasets"):
        list(DataSet.parse("a").documents())


# ---- figure


def test_the_figure_has_a_line_for_each_layer() -> None:
    points = [(1000 * 2**i, 0.5 / 2 ** (i / 2)) for i in range(8)]
    fig = convergence_figure({5: points, 6: points, 7: ()}, "a $model$")
    ax = fig.axes[0]
    assert [line.get_label() for line in ax.lines] == ["layer 5", "layer 6"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    with pytest.raises(BadSetting, match="too short"):
        convergence_figure({5: ()}, "m")


# ---- the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def stats(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:  # fmt: skip
    """`factscope stats` in an empty folder with a text, on the tiny model where it takes one."""
    factscope = runner(tmp_path, cache, monkeypatch, capsys)
    (tmp_path / "t.txt").write_text(TEXT.replace(".\n", ".\n\n"))

    def run(*words: object) -> Result:
        plain = words and words[0] in ("merge", "show", "--help")
        more = () if plain else ("--model", model, "--device", "cpu", "--window", 16)
        return factscope("stats", *words, *more)

    return run


def test_stats_go_to_the_cache(stats: Run, model: Path, cache: Path) -> None:
    from factscope.lm.load import load

    result = stats("--layer", 1, "--text", "t.txt", "--tokens", 400)
    assert result.code == 0, result.err
    found = find_moment(load(model, device="cpu"), 1)
    assert found is not None
    assert found.tokens == 400
    assert found.corpus.startswith("t.txt (sha256 ")
    assert "windows of 16 tokens, seed 0" in found.corpus
    path = cached_path(load(model, device="cpu"), 1)
    assert str(path) in result.out
    assert "400 tokens, gap between halves 0." in result.out
    assert "are few for keys 128 wide" in result.err
    assert [file.name for file in path.parent.iterdir()] == ["layer-01.safetensors"]


def test_stats_of_several_layers_as_json(stats: Run, tmp_path: Path) -> None:
    result = stats(
        "-l", "0-1", "-l", 2, "--text", "t.txt", "--tokens", 320, "-o", "here", "--json",
        "--packed", "--figure", "c.png", "--rows", 4,
    )  # fmt: skip
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert [row["layer"] for row in told] == [0, 1, 2]
    assert [Path(row["file"]).name for row in told] == [f"layer-0{i}.safetensors" for i in range(3)]
    assert {row["tokens"] for row in told} == {320}
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    size = (tmp_path / "here" / "layer-00.safetensors").stat().st_size
    assert size < 128 * 128 * 4 * 0.27 + 1500
    shown = stats("show", *sorted((tmp_path / "here").iterdir()))
    assert shown.code == 0
    assert shown.out.count("128 wide") == 3


def test_shards_on_the_command_line(stats: Run, tmp_path: Path) -> None:
    flags = ("--layer", 1, "--text", "t.txt", "--tokens", 640)
    for i in (1, 2, 3):
        result = stats(*flags, "--shard", f"{i}/3", "-o", "parts")
        assert result.code == 0, result.err
        assert "factscope stats merge" in result.out
    assert stats("collect", *flags, "-o", "whole.safetensors").code == 0
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [
        f"layer-01-shard-{i}-of-3.safetensors" for i in (1, 2, 3)
    ]
    result = stats("merge", *parts, "-o", "merged.safetensors")
    assert result.code == 0, result.err
    merged = load_moment(tmp_path / "merged.safetensors")
    whole = load_moment(tmp_path / "whole.safetensors")
    assert merged.tokens == whole.tokens == 640
    assert apart(merged.matrix, whole.matrix) < 1e-6


def test_without_a_text_the_model_writes(stats: Run, tmp_path: Path) -> None:
    result = stats("--layer", 1, "--tokens", 64, "--seed", 7, "-o", "w.safetensors", "--json")
    assert result.code == 0, result.err
    assert "writes its own text" in result.err
    assert "wrote itself, windows of 16 tokens, seed 7" in json.loads(result.out)[0]["corpus"]


def test_the_help_shows_flags_and_commands(stats: Run) -> None:
    for words in (("--help",), ("collect", "--help"), ()):
        result = stats(*words) if words else stats("--help")
        assert result.code == 0
        assert "--layer" in result.out
    result = stats("--help")
    for word in ("merge", "show", "--until", "--shard", "--text"):
        assert word in result.out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--layer", 9), ("layers [9]", "layers 0 to 2")),
        (("--layer", "x"), ("'x' is no number",)),
        (("--layer", "3-1"), ("run backwards",)),
        (("--layer", 1, "--text", "no.txt"), ("no text file no.txt",)),
        (("--layer", 1, "--dataset", "a", "--text", "t.txt"), ("give one of them",)),
        (("--layer", 1, "--shard", "5/4"), ("'5/4'",)),
        (("--layer", 1, "--out", "m.npz"), ("'m.npz'", ".safetensors")),
        (("--layer", "1-2", "--out", "m.safetensors"), ("give a folder",)),
        (("--layer", 1, "--figure", "f.gif"), ("'f.gif'", ".png")),
    ],
)
def test_mistakes_are_one_message(
    stats: Run, flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    result = stats(*flags)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("factscope:") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def test_mistakes_with_files(stats: Run, tmp_path: Path) -> None:
    for words in (("merge", "t.txt", "-o", "x.safetensors"), ("show", "t.txt")):
        result = stats(*words)
        assert result.code == 2
        assert "cannot be read" in result.err
    save_moment(moment(), tmp_path / "a.safetensors")
    result = stats("merge", "a.safetensors", "a.safetensors", "-o", "b.safetensors")
    assert result.code == 2
    assert "given twice" in result.err


def test_a_missing_layer_is_a_usage_error(stats: Run) -> None:
    result = stats("--tokens", 5)
    assert result.code == 2
    assert "--layer" in result.err


def test_a_killed_command_goes_on(stats: Run, model: Path, tmp_path: Path) -> None:
    flags = ("--layer", 1, "--text", "t.txt", "--tokens", 1500, "--rows", 1)
    assert stats(*flags, "-o", "whole.safetensors").code == 0
    probe = (
        "import sys, time\n"
        "from factscope.stats import collect, partial\n"
        "partial.SHARE, keep = 0, partial.Partial.keep\n"
        "def slow(self, state):\n"
        "    self.due = 0\n"
        "    keep(self, state)\n"
        "    time.sleep(0.05)\n"
        "partial.Partial.keep = slow\n"
        "from factscope.cli.main import main\n"
        "main()\n"
    )
    words = [*flags, "-o", "killed.safetensors", "--model", model, "--device", "cpu"]
    command = [sys.executable, "-c", probe, "stats", *map(str, [*words, "--window", 16])]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path)
    partial = tmp_path / "killed.safetensors.partial"
    for _ in range(6000):
        if partial.is_file() or process.poll() is not None:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert partial.is_file()
    assert not (tmp_path / "killed.safetensors").exists()
    refused = stats(*flags[:4], "--tokens", 1400, "--rows", 1, "-o", "killed.safetensors")
    assert refused.code == 2
    assert "other settings" in refused.err
    assert stats(*flags, "-o", "killed.safetensors").code == 0
    assert not partial.exists()
    killed, whole = (load_moment(tmp_path / f"{x}.safetensors") for x in ("killed", "whole"))
    assert torch.equal(killed.matrix, whole.matrix)
    assert killed.halves == whole.halves


# ---- a command that can be left out


def test_the_first_word_that_is_no_command_means_the_default() -> None:
    import typer
    from typer.testing import CliRunner

    from factscope.cli.group import DefaultGroup

    app = typer.Typer()
    edit = typer.Typer(cls=DefaultGroup, no_args_is_help=True)
    app.add_typer(edit, name="edit")

    @edit.command("make")
    def make(prompt: str, layer: int = 5) -> None:
        typer.echo(f"make {prompt!r} {layer}")

    @edit.command("show")
    def show(file: str) -> None:
        typer.echo(f"show {file!r}")

    @app.command()
    def other() -> None:
        typer.echo("other")

    def said(*words: str) -> str:
        return CliRunner().invoke(app, words, env={"COLUMNS": "120"}).output.strip()

    assert said("edit", "The Eiffel Tower is", "--layer", "3") == "make 'The Eiffel Tower is' 3"
    assert said("edit", "--layer", "3", "show") == "make 'show' 3"
    assert said("edit", "--", "show") == "make 'show' 5"
    assert said("edit", "make", "show") == "make 'show' 5"
    assert said("edit", "show", "a.safetensors") == "show 'a.safetensors'"
    for words in (("edit",), ("edit", "--help")):
        for word in ("--layer", "show", "make"):
            assert word in said(*words)
    assert "--layer" in said("edit", "make", "--help")
    assert "--layer" not in said("edit", "show", "--help")
    assert "No such option" in said("edit", "a prompt", "--layr", "3")


# ---- the default model


def correlations(matrix: Tensor) -> Tensor:
    """How entries of a key go together, without the diagonal."""
    scales = matrix.diagonal().sqrt()
    return matrix / torch.outer(scales, scales) - torch.eye(len(matrix))


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


@pytest.mark.model
def test_the_shipped_statistics_are_those_of_their_layer(default_model: LM, cache: Path) -> None:
    from factscope.data.readers import everyday

    lm = default_model
    shipped = find_moment(lm, 5)
    assert shipped is not None
    assert shipped.tokens >= 190_000
    facts = "\n".join(f"{fact.text} {fact.target}." for fact in everyday())
    texts = list(windows(lm, [TEXT, facts], 256))
    fresh = {each.layer: each for each in collect(lm, [4, 5, 6], texts, tokens=3000)}
    # 1,617 tokens about capitals and composers are no encyclopaedia: their correlations agree by a
    # cosine of 0.27 (4,096 further tokens of Wikipedia: 0.54), those of other layers by 0.002.
    pattern = correlations(shipped.matrix)
    assert cosine(correlations(fresh[5].matrix), pattern) > 0.2
    # The mean of kᵀ C⁻¹ k is the width where C is right: 1.05 of it here, 1.36 and 1.82 of it for
    # the keys of the layers below and above.
    shares = {
        layer: shipped.solve(each.matrix).diagonal().mean().item() for layer, each in fresh.items()
    }
    assert shares[5] == pytest.approx(1.05, abs=0.1)
    for layer in (4, 6):
        assert abs(cosine(correlations(fresh[layer].matrix), pattern)) < 0.01
        assert shares[layer] > 1.25
    assert shipped.solve(mlp_keys(lm, torch.tensor(texts[:1]), 5)[0]).isfinite().all()


def test_the_shipped_file_is_small() -> None:
    from factscope.stats.second_moment import SHIPPED

    files = list(SHIPPED.glob("*.safetensors"))
    assert files
    assert all(file.stat().st_size <= 2_400_000 for file in files)
