"""Second moments: solving, merging, files and their lookup."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from factscope.errors import BadStats
from factscope.lm.forward import mlp_keys
from factscope.lm.model import LM
from factscope.stats.covariance import collect
from factscope.stats.second_moment import (
    KIND,
    SHIPPED,
    VERSION,
    SecondMoment,
    cached_path,
    direction_difference,
    find_second_moment,
    load_second_moment,
    merge_second_moments,
    save_second_moment,
)
from factscope.stats.settings import StatsSettings
from factscope.stats.text import token_sequences
from second_moments import random_sequences, relative_difference, second_moment

from families import LAYERS, tiny
from tokenizers_ import TEXT

# ---- solving, merging


def test_solve_equals_a_direct_solve() -> None:
    torch.manual_seed(0)
    root = torch.randn(60, 20)
    c = second_moment(root.T @ root / 60)
    keys = torch.randn(5, 20)
    direct = torch.linalg.solve(c.matrix.double(), keys.double().T).T
    assert relative_difference(c.solve(keys), direct.float()) < 1e-5
    ridged = c.matrix.double() + 0.1 * c.matrix.diagonal().mean() * torch.eye(20).double()
    direct = torch.linalg.solve(ridged, keys.double().T).T
    assert relative_difference(c.solve(keys, ridge=0.1), direct.float()) < 1e-5
    assert c.solve(keys.half()).dtype == torch.float32
    assert c.solve(keys.double()).dtype == torch.float64


def test_the_cholesky_factor_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda m: calls.append(1) or real(m))
    c = second_moment()
    for ridge in (0.0, 0.0, 0.5, 0.5):
        c.solve(torch.ones(1, 4), ridge=ridge)
    assert len(calls) == 2


def test_a_singular_matrix_is_refused() -> None:
    key = torch.randn(1, 20)
    few = second_moment(key.T @ key, tokens=1)
    with pytest.raises(BadStats, match=r"1 tokens for keys of width 20.*more tokens.*ridge"):
        few.solve(key)
    assert few.solve(key, ridge=0.1).isfinite().all()
    with pytest.raises(BadStats, match="cannot be inverted"):
        second_moment(torch.full((4, 4), float("nan"))).solve(torch.ones(1, 4))


def test_statistics_of_another_model_layer_or_width_are_refused() -> None:
    lm = tiny("gpt2")
    mine = collect(lm, [1], random_sequences(2), StatsSettings(tokens=100))[0]
    mine.check(lm, 1)
    with pytest.raises(BadStats, match=r"layer 1 of .*, not of layer 2.*--layers 2"):
        mine.check(lm, 2)
    with pytest.raises(BadStats, match=r"of tiny gpt2 .*not of tiny opt .*factscope stats"):
        mine.check(tiny("opt"), 1)
    with pytest.raises(BadStats, match="width 4"):
        replace(mine, matrix=torch.eye(4)).check(lm, 1)


def test_direction_difference_is_that_of_normalised_solutions() -> None:
    torch.manual_seed(0)
    keys = torch.randn(5, 6)
    one, two = (second_moment(x.T @ x / 50) for x in torch.randn(2, 50, 6))
    differences = []
    for k in keys:
        a, b = (torch.linalg.solve(moment.matrix, k) for moment in (one, two))
        a, b = a / (a @ k), b / (b @ k)
        differences.append(((a - b).norm() / ((a + b) / 2).norm()).item())
    found = direction_difference(one, two, keys)
    assert found == pytest.approx(sorted(differences)[2], rel=1e-4)
    # A common factor does not change an edit.
    scaled = replace(two, matrix=3 * two.matrix)
    assert direction_difference(two, scaled, keys) == pytest.approx(0, abs=1e-5)


def test_merging_weights_by_tokens() -> None:
    one = second_moment(torch.eye(4), tokens=300, corpus="a", convergence_history=((100, 0.5),))
    other = second_moment(3 * torch.eye(4), tokens=100, corpus="b")
    merged = merge_second_moments([one, other])
    assert torch.allclose(merged.matrix, 1.5 * torch.eye(4))
    assert (merged.tokens, merged.corpus) == (400, "a; b")
    assert merged.convergence_history == ((100, 0.5), (400, pytest.approx(2 / 1.5)))
    assert torch.equal(merge_second_moments([one]).matrix, one.matrix)


def test_moments_that_cannot_be_merged() -> None:
    with pytest.raises(BadStats, match="no statistics"):
        merge_second_moments([])
    with pytest.raises(BadStats, match=r"layer 1 of m .* with layer 2"):
        merge_second_moments([second_moment(), second_moment(layer=2)])
    with pytest.raises(BadStats, match="cannot merge"):
        merge_second_moments([second_moment(), second_moment(fingerprint="f" * 63 + "e")])
    with pytest.raises(BadStats, match="given twice"):
        merge_second_moments([second_moment(), second_moment(layer=1, tokens=5), second_moment()])


# ---- files


def estimated(width: int = 40) -> SecondMoment:
    torch.manual_seed(1)
    keys = torch.randn(400, width) * torch.logspace(-2, 1, width)
    history = ((100, 0.25), (400, 0.1))
    return second_moment(
        keys.T @ keys / 400, corpus="ein Text “ü”", convergence_history=history, request="{}"
    )


def test_all_fields_are_saved_and_loaded(tmp_path: Path) -> None:
    before, path = estimated(), tmp_path / "new" / "m.safetensors"
    save_second_moment(before, path)
    after = load_second_moment(path)
    assert torch.equal(after.matrix, before.matrix)
    for name in (
        "layer",
        "tokens",
        "corpus",
        "model",
        "fingerprint",
        "convergence_history",
        "request",
    ):
        assert getattr(after, name) == getattr(before, name)
    assert [file.name for file in path.parent.iterdir()] == ["m.safetensors"]


def test_a_half_precision_file_is_small_and_close(tmp_path: Path) -> None:
    before, path = estimated(300), tmp_path / "m.safetensors"
    save_second_moment(before, path, half_precision=True)
    after = load_second_moment(path)
    assert path.stat().st_size < 300 * 300 * 4 * 0.27 + 1000
    assert torch.equal(after.matrix, after.matrix.T)
    # Every entry is within float16 rounding, although the scales differ by a factor of 1000.
    scales = before.matrix.diagonal().sqrt()
    assert ((after.matrix - before.matrix) / torch.outer(scales, scales)).abs().max() < 2**-11
    assert after.convergence_history == before.convergence_history


def test_a_zero_row_survives_half_precision(tmp_path: Path) -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.0, 2.0]))
    save_second_moment(second_moment(matrix), tmp_path / "m.safetensors", half_precision=True)
    assert torch.allclose(load_second_moment(tmp_path / "m.safetensors").matrix, matrix)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(BadStats, match="no file"):
        load_second_moment(path)
    save_second_moment(estimated(), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadStats, match="cannot read"):
        load_second_moment(path)
    path.write_text("not a safetensors file")
    with pytest.raises(BadStats, match="cannot read"):
        load_second_moment(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(BadStats, match="is not a second moment"):
        load_second_moment(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"kind": KIND, "version": str(VERSION + 1)})
    with pytest.raises(BadStats, match=r"format version '3'.*update"):
        load_second_moment(path)
    save_file({"x": torch.zeros(1)}, path, metadata={"kind": KIND, "version": str(VERSION)})
    with pytest.raises(BadStats, match="cannot read"):
        load_second_moment(path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    path = tmp_path / "m.safetensors"
    save_second_moment(second_moment(torch.diag(torch.tensor([1.0, value]))), path)
    with pytest.raises(BadStats, match=r"m\.safetensors.*the matrix has NaN or infinity"):
        load_second_moment(path)


def test_files_of_format_version_1_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = {
        "kind": KIND, "version": "1", "model": "m", "fingerprint": "f", "layer": "1",
        "corpus": "t", "tokens": "400", "halves": json.dumps([(100, 0.25), (400, 0.1)]),
    }  # fmt: skip
    save_file({"matrix": torch.eye(4)}, path, metadata=header)
    assert load_second_moment(path).convergence_history == ((100, 0.25), (400, 0.1))


# ---- lookup


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_given_files_are_used_before_the_cache(tmp_path: Path, cache: Path) -> None:
    lm = tiny("gpt2")
    assert find_second_moment(lm, 1) is None
    found = collect(lm, [0, 1, 2], random_sequences(3), StatsSettings(tokens=1000), corpus="cached")
    save_second_moment(found[1], cached_path(lm, 1))
    assert cached_path(lm, 1).is_relative_to(cache)
    cached = find_second_moment(lm, 1)
    assert cached is not None
    assert cached.corpus == "cached"
    assert find_second_moment(lm, 2) is None
    folder = tmp_path / "mine"
    for each in found:
        save_second_moment(replace(each, corpus="given"), folder / f"{each.layer}.safetensors")
    for given in ([folder], sorted(folder.iterdir())):
        for layer in range(LAYERS):
            taken = find_second_moment(lm, layer, given)
            assert taken is not None
            assert (taken.layer, taken.corpus) == (layer, "given")


def test_given_files_that_do_not_fit_are_refused(tmp_path: Path, cache: Path) -> None:
    lm, other = tiny("gpt2"), tiny("opt")
    paths = [tmp_path / f"{i}.safetensors" for i in range(2)]
    for path, each in zip(
        paths, collect(lm, [0, 1], random_sequences(3), StatsSettings(tokens=1000)), strict=True
    ):
        save_second_moment(each, path)
    save_second_moment(load_second_moment(paths[1]), cached_path(lm, 1))
    with pytest.raises(BadStats, match=r"of layer 0 of .*not of layer 1"):
        find_second_moment(lm, 1, paths[:1])
    with pytest.raises(BadStats, match="none of the given statistics is of layer 2"):
        find_second_moment(lm, 2, paths)
    with pytest.raises(BadStats, match="none of the given"):
        find_second_moment(other, 1, [tmp_path])
    with pytest.raises(BadStats, match="no file"):
        find_second_moment(lm, 1, [tmp_path / "nowhere.safetensors"])


# ---- the default model


def correlations(matrix: Tensor) -> Tensor:
    """Correlations of the entries of a key, without the diagonal."""
    scales = matrix.diagonal().sqrt()
    return matrix / torch.outer(scales, scales) - torch.eye(len(matrix))


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.cosine_similarity(one.flatten(), other.flatten(), dim=0).item()


@pytest.mark.model
def test_the_shipped_statistics_fit_their_layer(default_model: LM, cache: Path) -> None:
    from factscope.data.readers import everyday_facts

    lm = default_model
    shipped = find_second_moment(lm, 5)
    assert shipped is not None
    assert shipped.tokens >= 190_000
    facts = "\n".join(f"{fact.text} {fact.target}." for fact in everyday_facts())
    texts = list(token_sequences(lm, [TEXT, facts], 256))
    fresh = {each.layer: each for each in collect(lm, [4, 5, 6], texts, StatsSettings(tokens=3000))}
    # 1,617 tokens about capitals and composers are no encyclopaedia: their correlations agree by a
    # cosine of 0.27 (4,096 further tokens of Wikipedia: 0.54), those of other layers by 0.002.
    pattern = correlations(shipped.matrix)
    assert cosine(correlations(fresh[5].matrix), pattern) > 0.2
    # The mean of kᵀ C⁻¹ k is the width where C is right: 1.05 of it here, 1.36 and 1.82 of it for
    # the keys of the layers below and above.
    ratios = {
        layer: shipped.solve(each.matrix).diagonal().mean().item() for layer, each in fresh.items()
    }
    assert ratios[5] == pytest.approx(1.05, abs=0.1)
    for layer in (4, 6):
        assert abs(cosine(correlations(fresh[layer].matrix), pattern)) < 0.01
        assert ratios[layer] > 1.25
    assert shipped.solve(mlp_keys(lm, torch.tensor(texts[:1]), 5)[0]).isfinite().all()


def test_the_shipped_file_is_small() -> None:
    files = list(SHIPPED.glob("*.safetensors"))
    assert files
    assert all(file.stat().st_size <= 2_400_000 for file in files)


def test_paths_may_be_strings(tmp_path: Path) -> None:
    path = str(tmp_path / "m.safetensors")
    save_second_moment(second_moment(), path)
    assert torch.equal(load_second_moment(path).matrix, second_moment().matrix)


def test_a_second_moment_is_short_in_a_terminal_and_a_notebook() -> None:
    moment = second_moment(torch.eye(3), layer=2, tokens=12345, corpus="<text>")
    assert repr(moment) == f"SecondMoment({moment.model}, layer 2: 3 × 3, 12,345 tokens of <text>)"
    assert moment._repr_html_().endswith("tokens of &lt;text&gt;)</code>")
