"""MEMIT: the update is the direct formula, and the fast method equals weights edited in place."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factscope.editing.contexts import ContextRow, edit_request, kl_row
from factscope.editing.edit import Dense, Edit, LowRank
from factscope.editing.editor import raise_first_error
from factscope.editing.memit import FACTS_PER_PASS, BoundMemit, input_change, memit_update
from factscope.editing.reference import search_delta
from factscope.editing.settings import PAPER_MEMIT, PAPER_SEARCH, Memit, ValueSearch
from factscope.editing.value_search import usual_norm
from factscope.errors import BadEdit, BadFact, BadSetting, DidNotConverge
from factscope.facts import Fact
from factscope.lm.hooks import hook_calls, hook_io, hook_outputs
from factscope.lm.model import LM
from factscope.progress import no_progress
from factscope.stats.second_moment import file_name, save_second_moment

from editing_facts import FACTS, FEW, PREFIXES, random_moment, text_lm
from families import FAMILIES

BAD = replace(FACTS[0], target="")
DEFAULT = Memit()

SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {
        "base": PAPER_MEMIT,
        "search": replace(PAPER_SEARCH, steps=5, lr=0.1),
    },
    "one layer": {"layers": (1,)},
    "all layers": {"layers": (0, 1, 2), "token": "last"},
    "with a gap": {"layers": (0, 2), "token": "last"},
    "after-subject": {"token": "after-subject"},
    "no prefixes": {"prefixes": ()},
    "no prefixes, half bare": {"prefixes": (), "key": "half-bare"},
    "identity": {"second_moment": "identity"},
    "heavy": {"covariance_weight": 1e4},
    "light": {"covariance_weight": 0.1},
    "clamp": {"search": replace(FEW, clamp=0.3)},
    "stop": {"search": replace(FEW, stop_loss=5.0, steps=12)},
}  # fmt: skip


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return text_lm("gpt2")


@pytest.fixture(scope="module")
def gemma2() -> LM:
    """A family with a norm between the MLP output weight and the state."""
    return text_lm("gemma2")


def write_moments(lm: LM, folder: Path) -> None:
    """C of every layer, as files."""
    for layer in range(lm.n_layers):
        save_second_moment(random_moment(lm, layer), folder / file_name(layer))


def memit_on(lm: LM, folder: Path, base: Memit = DEFAULT, **settings: Any) -> Memit:
    """MEMIT with few steps on two layers of a tiny model."""
    write_moments(lm, folder)
    given: dict[str, Any] = {"layers": (0, 1), "covariance_weight": 10.0, "prefixes": PREFIXES}
    given |= {"second_moment": [folder], "search": FEW}
    return replace(base, **{**given, **settings})


# ---- the reference


def reference_memit(bound: BoundMemit, facts: Sequence[Fact]) -> Edit:
    """z of every fact by whole forward passes, then layer by layer in the model's own weights."""
    lm, settings, layers = bound.lm, bound.settings, bound.layers
    requests = [edit_request(lm, fact, bound.prefixes, settings.token) for fact in facts]
    z: list[Tensor] = []
    losses: list[list[float]] = []
    for request in requests:
        last_row = kl_row(lm, request.fact, settings.token, bound.search.kl_position)
        rows = [*request.rows, last_row]
        _, h = key_and_state(lm, rows[0], layers[-1], layers[-1])
        norm = h.norm().item()
        if bound.search.unit == "layer":
            norm = usual_norm(lm, layers[-1], "state", settings.token)
        block, everywhere = lm.blocks[layers[-1]], torch.ones(len(rows))
        delta, steps = search_delta(lm, rows, block, bound.search, norm, everywhere)
        z.append(h + delta)
        losses.append(steps)
    edit = Edit(
        changes={}, model=lm.name, fingerprint=lm.fingerprint, method="reference",
        facts=tuple(facts), settings={"losses": losses},
    )  # fmt: skip
    for n, layer in enumerate(layers):
        with edit.applied(lm, force=True):
            seen = [[key_and_state(lm, row, layer, layers[-1]) for row in r.rows] for r in requests]
        keys = [torch.stack([key for key, _ in mine]) for mine in seen]
        if settings.key == "half-bare" and bound.prefixes:
            keys = [torch.stack([mine[0], mine[1:].mean(0)]) for mine in keys]
        K = torch.stack([mine.mean(0) for mine in keys]).double().T
        h = torch.stack([mine[0][1] for mine in seen])
        R = (torch.stack(z) - h) / (len(layers) - n)
        if norm := lm.mlp_norm(layer):
            with edit.applied(lm, force=True):
                io = [norm_io(lm, r.rows[0], norm) for r in requests]
            x, y = (torch.stack(some) for some in zip(*io, strict=True))
            R = input_change(norm, x, y, R)
        R = R.double().T
        moment = bound.second_moments[n]
        C = torch.eye(len(K), dtype=torch.double) if moment is None else moment.matrix.double()
        if moment is not None:
            C = C + settings.ridge * C.diagonal().mean() * torch.eye(len(C))
        delta = R @ K.T @ torch.linalg.inv(bound.covariance_weight * C + K @ K.T)
        name = lm.name_of(lm.mlp_out(layer)) + ".weight"
        edit = replace(edit, changes={**edit.changes, name: Dense(delta.float())})
    return edit


def key_and_state(lm: LM, row: ContextRow, layer: int, last: int) -> tuple[Tensor, Tensor]:
    """The key at a layer and the state at the last one, at the edit position."""
    seen: list[Tensor] = []
    with (
        hook_calls(
            (lm.mlp_out(layer), lambda args, _: seen.append(args[0].reshape(len(row.ids), -1)))
        ),
        hook_outputs((lm.blocks[last], lambda out: seen.append(out[0].clone()))),
    ):
        lm.model(torch.tensor([row.ids]), use_cache=False)
    return seen[0][row.edit_position], seen[1][row.edit_position]


def norm_io(lm: LM, row: ContextRow, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Input and output of a norm at the edit position."""
    seen: list[Tensor] = []
    with hook_io((norm, lambda x, y: seen.extend((x.clone(), y.clone())))):
        lm.model(torch.tensor([row.ids]), use_cache=False)
    x, y = (part.reshape(len(row.ids), -1)[row.edit_position] for part in seen)
    return x, y


def assert_same(found: Edit, wanted: Edit, tolerance: float = 1e-4) -> None:
    """Equal weight by weight, to within a fraction of the largest entry."""
    assert list(found.changes) == list(wanted.changes)
    for name, change in wanted.changes.items():
        gap = (found.changes[name].matrix() - change.matrix()).abs().max()
        assert gap <= tolerance * change.matrix().abs().max(), name
    for mine, other in zip(found.settings["losses"], wanted.settings["losses"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fast_method_equals_the_reference(family: str, tmp_path: Path) -> None:
    lm = text_lm(family)
    memit = memit_on(lm, tmp_path)
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    together, alone = memit(lm, FACTS), memit(lm, FACTS[1:2])
    assert all(torch.equal(x, before[name]) for name, x in lm.model.named_parameters())
    assert_same(together, reference_memit(memit.bind(lm), FACTS))
    assert_same(alone, reference_memit(memit.bind(lm), FACTS[1:2]))
    assert all(losses[-1] < losses[0] for losses in together.settings["losses"])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_equals_the_reference(
    gemma2: LM, settings: dict[str, Any], tmp_path: Path
) -> None:
    memit = memit_on(gemma2, tmp_path, **settings)
    assert_same(memit(gemma2, FACTS[:2]), reference_memit(memit.bind(gemma2), FACTS[:2]))


# ---- the closed form


@pytest.mark.parametrize("facts", [1, 3, 12])
@pytest.mark.parametrize("weight", [0.5, 15_000.0])
def test_update_is_the_direct_formula(facts: int, weight: float) -> None:
    """R Kᵀ (λC + KKᵀ)⁻¹, here with the facts as columns."""
    draw = torch.Generator().manual_seed(facts)
    noise = torch.randn(40, 9, generator=draw, dtype=torch.double)
    C = noise.T @ noise / 40
    K = torch.randn(9, facts, generator=draw, dtype=torch.double)
    R = torch.randn(6, facts, generator=draw, dtype=torch.double)
    direct = R @ K.T @ torch.linalg.inv(weight * C + K @ K.T)
    change = memit_update(K.T, R.T, torch.linalg.solve(C, K).T, weight)
    assert torch.allclose(change.matrix().double(), direct, rtol=1e-5, atol=1e-6 * direct.norm())


def test_update_is_the_least_squares_optimum() -> None:
    """It minimises ‖Δ K - R‖² + λ tr(Δ C Δᵀ)."""
    draw = torch.Generator().manual_seed(0)
    K, R = torch.randn(9, 3, generator=draw), torch.randn(6, 3, generator=draw)
    C, weight = torch.diag(torch.rand(9, generator=draw) + 0.1), 2.0
    best = memit_update(K.T, R.T, torch.linalg.solve(C, K).T, weight).matrix()

    def cost(delta: Tensor) -> float:
        return ((delta @ K - R).square().sum() + weight * (delta @ C @ delta.T).trace()).item()

    for _ in range(20):
        assert cost(best + 0.1 * torch.randn(6, 9, generator=draw)) > cost(best)


@pytest.mark.parametrize(("facts", "kind"), [(3, LowRank), (4, Dense), (20, Dense)])
def test_update_is_dense_where_that_is_smaller(facts: int, kind: type) -> None:
    """In a 6 × 9 matrix rank three takes 45 numbers, rank four 60, and the whole matrix 54."""
    K, R = torch.randn(facts, 9), torch.randn(facts, 6)
    assert type(memit_update(K, R, K, 1.0)) is kind


def test_more_facts_than_fit_in_one_pass(gpt2: LM, tmp_path: Path) -> None:
    """Enough of them for a dense update of a tiny matrix."""
    cities = ["Paris", "Rome", "Berlin", "Oslo", "Lima", "Cairo"]
    words = ["of", "in", "by", "is", "and", "the"]
    facts = [
        Fact(subject=f"{city} {word}", prompt="{} is", target=cities[i - 1])
        for i, city in enumerate(cities)
        for word in words
    ]
    assert len(facts) > FACTS_PER_PASS
    memit = memit_on(gpt2, tmp_path, prefixes=(), search=replace(FEW, steps=3), facts_per_pass=8)
    edit = memit(gpt2, facts)
    assert all(isinstance(change, Dense) for change in edit.changes.values())
    assert edit.facts == tuple(facts)
    assert_same(edit, reference_memit(memit.bind(gpt2), facts))


# ---- the written value in the state

NORMALISING = ["gemma2", "gemma3_text", "olmo2", "opt, projected"]


def state_and_z(lm: LM, memit: Memit) -> tuple[Tensor, Tensor, Tensor]:
    """The state h before the edit, the edited state, and z, which it should be."""
    bound = memit.bind(lm)
    [value] = raise_first_error(bound.search_values(FACTS[:1], no_progress))
    [edit] = raise_first_error(bound.insert([value], [[0]]))
    with edit.applied(lm, force=True):
        _, state = key_and_state(lm, value.request.rows[0], bound.layers[-1], bound.layers[-1])
    return value.values[0], state, value.values[0] + value.delta


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NORMALISING)))
def test_the_value_arrives_in_the_state(family: str) -> None:
    """The update makes the last edited layer's state z, where λ is small enough to be exact."""
    lm = text_lm(family)
    memit = Memit(layers=(0, 1), covariance_weight=1e-6, prefixes=(), second_moment="identity",
                  search=FEW)  # fmt: skip
    h, state, z = state_and_z(lm, memit)
    assert (state - z).norm() < 1e-3 * (z - h).norm()


@pytest.mark.parametrize("clamp", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("family", NORMALISING)
def test_the_value_arrives_through_a_norm(family: str, clamp: float) -> None:
    """What a norm can give of z arrives: most of it, and nothing overshoots."""
    lm = text_lm(family)
    memit = Memit(layers=(0, 1), covariance_weight=1e-6, prefixes=(), second_moment="identity",
                  search=replace(FEW, clamp=clamp))  # fmt: skip
    h, state, z = state_and_z(lm, memit)
    assert (state - z).norm() < 0.5 * (z - h).norm()


@pytest.mark.parametrize("size", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_input_change_gives_the_nearest_output(kind: Any, size: float) -> None:
    """Against gradient descent on the input, from several starts."""
    draw = torch.Generator().manual_seed(0)
    norm = kind(8, eps=1e-12).double().requires_grad_(False)
    for weight in norm.parameters():
        weight += torch.randn(8, generator=draw)
    x = 5 * torch.randn(2, 8, generator=draw, dtype=torch.double)
    y = norm(x)
    target = y + size * torch.randn(2, 8, generator=draw, dtype=torch.double)
    change = input_change(norm, x, y, target - y)
    found = (norm(x + change.double()) - target).norm(dim=-1)
    if size == 0:
        assert change.abs().max() < 1e-4
    for _ in range(5):
        guess = torch.randn(2, 8, generator=draw, dtype=torch.double).requires_grad_()
        adam = torch.optim.Adam([guess], lr=0.05)
        for _ in range(300):
            adam.zero_grad()
            with torch.enable_grad():
                (norm(guess) - target).square().sum().backward()
            adam.step()
        assert (found <= (norm(guess.detach()) - target).norm(dim=-1) + 1e-4).all()


# ---- many facts


@pytest.mark.parametrize("family", ["gpt2", "falcon, alibi", "opt"])
def test_batched_facts_equal_single_facts(family: str, tmp_path: Path) -> None:
    lm = text_lm(family)
    memit = memit_on(lm, tmp_path)
    for facts_per_pass in (None, 3):
        edits = replace(memit, facts_per_pass=facts_per_pass).each(lm, FACTS)
        for fact, edit in zip(FACTS, edits, strict=True):
            assert edit.facts == (fact,)
            assert_same(edit, memit(lm, [fact]))


def test_a_bad_fact_does_not_stop_the_others(gpt2: LM, tmp_path: Path) -> None:
    memit = memit_on(gpt2, tmp_path)
    results = memit.attempt(gpt2, [FACTS[0], BAD, FACTS[2]])
    assert [type(result).__name__ for result in results] == ["Edit", "BadFact", "Edit"]
    for found, wanted in zip(results[::2], memit.each(gpt2, FACTS[::2]), strict=True):
        assert isinstance(found, Edit)
        assert_same(found, wanted)
    with pytest.raises(BadFact, match="empty"):
        memit.each(gpt2, [FACTS[0], BAD])
    with pytest.raises(BadFact, match="empty"):
        memit(gpt2, [FACTS[0], BAD])


def test_a_search_that_does_not_converge_returns_its_error(gpt2: LM, tmp_path: Path) -> None:
    """A state of the last layer at the subject does not influence the last token."""
    memit = memit_on(gpt2, tmp_path, layers=(1, 2))
    assert {type(result) for result in memit.attempt(gpt2, FACTS)} == {DidNotConverge}
    with pytest.raises(DidNotConverge, match="by step"):
        memit(gpt2, FACTS)


def test_progress_adds_up_to_one(gpt2: LM, tmp_path: Path) -> None:
    fractions: list[float] = []
    memit_on(gpt2, tmp_path).attempt(gpt2, FACTS, progress=fractions.append)
    assert sum(fractions) == pytest.approx(1)
    assert len(fractions) > 3


# ---- the edit


def test_edit_records_its_settings(gpt2: LM, tmp_path: Path) -> None:
    edit = memit_on(gpt2, tmp_path)(gpt2, FACTS[:2])
    assert edit.method == "memit"
    assert edit.facts == tuple(FACTS[:2])
    assert edit.changed_weights == tuple(f"transformer.h.{i}.mlp.c_proj.weight" for i in (0, 1))
    assert (edit.settings["layers"], edit.settings["covariance_weight"]) == ((0, 1), 10.0)
    assert [c["layer"] for c in edit.settings["second_moment"]] == [0, 1]
    assert edit.settings["search"]["steps"] == FEW.steps
    assert all(change.rank == 2 for change in edit.changes.values())
    assert edit.checks is not None
    fractions = [
        change.norm() / gpt2.model.get_parameter(name).norm().item()
        for name, change in edit.changes.items()
    ]
    assert edit.checks.update_norm == pytest.approx(max(fractions), rel=1e-4)
    assert edit.checks.division_factor is None
    assert edit.checks.perplexity_after != edit.checks.perplexity_before


def test_defaults_come_from_the_model(gpt2: LM) -> None:
    bound = Memit(prefixes=(), second_moment="identity").bind(gpt2)
    assert bound.layers == (0, 1)  # the five up to ROME's, here fewer
    assert bound.covariance_weight == 0.1 * gpt2.mlp_weight(0).shape[1]
    assert len(Memit(prefix_lengths=((3, 2),), second_moment="identity").bind(gpt2).prefixes) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": (1, 0)}, r"layers is \(1, 0\); .* in ascending order"),
        ({"layers": (1, 1)}, r"layers is \(1, 1\); .* in ascending order"),
        ({"layers": ()}, "at least one"),
        ({"layers": (1, 3)}, "layer is 3; .* has layers 0 to 2"),
        ({"layers": (-1, 1)}, "layer is -1"),
        ({"layers": (0, 1), "second_moment": "find"}, "no statistics of layer 0"),
    ],
)
def test_errors_name_the_problem(gpt2: LM, settings: dict[str, Any], words: str) -> None:
    memit = Memit(**{"prefixes": (), "second_moment": "identity", **settings})
    with pytest.raises(BadSetting, match=words):
        memit(gpt2, FACTS)
    with pytest.raises(BadSetting, match=words):
        memit.attempt(gpt2, FACTS)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_covariance_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(BadSetting, match=r"covariance_weight is .*; give (more than 0|a number)"):
        Memit(covariance_weight=weight)


def test_an_update_with_nan_does_not_stop_the_others(
    gpt2: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def first_broken(*system: Any) -> Any:
        made.append(memit_update(*system))
        return made[-1] * float("nan") if len(made) == 1 else made[-1]

    monkeypatch.setattr("factscope.editing.memit.memit_update", first_broken)
    memit = Memit(layers=(0, 1), prefixes=(), second_moment="identity", search=FEW)
    broken, *others = memit.attempt(gpt2, FACTS)
    assert isinstance(broken, BadEdit)
    assert "h.0.mlp.c_proj.weight is NaN or infinite" in str(broken)
    assert [len(edit.changes) for edit in others if isinstance(edit, Edit)] == [2, 2]
    for retry in (False, True):
        made.clear()
        with pytest.raises(BadEdit, match="NaN or infinite"):
            replace(memit, search=replace(FEW, retry=retry))(gpt2, FACTS)


def test_no_facts(gpt2: LM, tmp_path: Path) -> None:
    memit = memit_on(gpt2, tmp_path)
    with pytest.raises(BadFact, match="no fact"):
        memit(gpt2, [])
    assert memit.each(gpt2, []) == []


@pytest.mark.model
def test_the_eiffel_tower_moves_to_rome(default_model: LM) -> None:
    from factscope.evaluation.score import Query, score_queries

    fact = replace(FACTS[0], prompt="{} is located in the city of")
    search = ValueSearch(clamp=0.75, steps=8)
    edit = Memit(layers=(5,), covariance_weight=1e3, prefixes=(), search=search)(
        default_model, [fact]
    )
    asked = [fact.text, "The Louvre is located in the city of"]
    after = score_queries(default_model, [Query(text, "Rome", 0) for text in asked], [edit])
    assert after[0].top == " Rome"
    assert after[0].top_probability > 0.9
    assert after[1].top == " Paris"
    assert edit.checks is not None
    assert not edit.checks.complaints()
