"""MEMIT: the spread is the direct formula, and the fast way equals weights written in turn."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing.contexts import ContextRow, EditRequest, edit_request, kl_row, pad_rows
from factscope.editing.edit import Dense, Edit, LowRank
from factscope.editing.memit import FACTS as AT_A_LOOK
from factscope.editing.memit import PAPER, BoundMemit, Memit, spread
from factscope.editing.value_search import ValueSearch
from factscope.errors import BadFact, BadSetting, DidNotConverge
from factscope.facts import Fact
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.lm.model import LM
from factscope.stats.second_moment import SecondMoment, file_name, save_moment

from families import FAMILIES, reader

# Short ways from the subject to the end: some tiny models see four tokens back, and no further.
FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano and the guitar"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
]
BAD = replace(FACTS[0], target="")
PREFIXES = ("The Nile flows. ", "Light travels at 100 degrees and so. ")
FEW = ValueSearch(steps=5, lr=0.1, weight_decay=1e-3, clamp=50.0)
DEFAULT = Memit()

SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {
        "base": PAPER, "search": replace(FEW, kl_position="place", weight_decay_form="paper")
    },
    "one layer": {"layers": (1,)},
    "all layers": {"layers": (0, 1, 2), "token": "last"},
    "with a gap": {"layers": (0, 2), "token": "last"},
    "after-subject": {"token": "after-subject"},
    "no prefixes": {"prefixes": ()},
    "no prefixes, half bare": {"prefixes": (), "key": "half bare"},
    "identity": {"second_moment": "identity"},
    "heavy": {"weight": 1e4},
    "light": {"weight": 0.1},
    "clamp": {"search": replace(FEW, clamp=0.3)},
    "stop": {"search": replace(FEW, stop=5.0, steps=12)},
}  # fmt: skip


def text_lm(family: str) -> LM:
    """A tiny model that reads text."""
    return reader(family, spread=0.3, style="gpt2")


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return text_lm("gpt2")


@pytest.fixture(scope="module")
def gemma2() -> LM:
    """Here a norm stands between the weight and the state."""
    return text_lm("gemma2")


def write_moments(lm: LM, folder: Path) -> None:
    """A well-conditioned C of the right size for every layer."""
    width = lm.mlp_weight(0).shape[1]
    for layer in range(lm.n_layers):
        noise = torch.randn(3 * width, width, generator=torch.Generator().manual_seed(layer))
        moment = SecondMoment(
            matrix=noise.T @ noise / len(noise) + 0.1 * torch.eye(width), layer=layer,
            tokens=3 * width, corpus="noise", model=lm.name, fingerprint=lm.fingerprint,
        )  # fmt: skip
        save_moment(moment, folder / file_name(layer))


def memit_on(lm: LM, folder: Path, base: Memit = DEFAULT, **settings: Any) -> Memit:
    """MEMIT with few steps on two layers of a tiny model."""
    write_moments(lm, folder)
    given: dict[str, Any] = {"layers": (0, 1), "weight": 10.0, "prefixes": PREFIXES}
    given |= {"second_moment": [folder], "search": FEW}
    return replace(base, **{**given, **settings})


# ---- the plain procedure


def plainly(ready: BoundMemit, facts: Sequence[Fact]) -> Edit:
    """z of every fact by whole forward passes, then layer by layer in the model's own weights."""
    lm, memit, layers = ready.lm, ready.memit, ready.layers
    asked = [edit_request(lm, fact, ready.prefixes, memit.token) for fact in facts]
    found = [plain_search(ready, one) for one in asked]
    z = torch.stack([state for state, _ in found]).double()
    edit = Edit(
        changes={}, model=lm.name, fingerprint=lm.fingerprint, method="plain", facts=tuple(facts),
        settings={"losses": [losses for _, losses in found]},
    )  # fmt: skip
    for done, layer in enumerate(layers):
        with edit.applied(lm, force=True):
            seen = [[seen_at(lm, row, layer, layers[-1]) for row in one.rows] for one in asked]
        keys = [torch.stack([key for key, _ in mine]) for mine in seen]
        if memit.key == "half bare" and ready.prefixes:
            keys = [torch.stack([mine[0], mine[1:].mean(0)]) for mine in keys]
        K = torch.stack([mine.mean(0) for mine in keys]).double().T
        now = torch.stack([mine[0][1] for mine in seen]).double()
        R = ((z - now) / (len(layers) - done)).T
        moment = ready.moments[done]
        C = torch.eye(len(K)) if moment is None else moment.matrix
        C = C.double()
        if moment is not None:
            C = C + memit.ridge * C.diagonal().mean() * torch.eye(len(C))
        delta = R @ K.T @ torch.linalg.inv(ready.weight * C + K @ K.T)
        name = lm.name_of(lm.mlp_out(layer)) + ".weight"
        edit = replace(edit, changes={**edit.changes, name: Dense(delta.float())})
    return edit


def seen_at(lm: LM, row: ContextRow, layer: int, last: int) -> tuple[Tensor, Tensor]:
    """The key at a layer and the state at the last, where the fact is written."""
    seen: list[Tensor] = []
    with (
        hook_calls(
            (lm.mlp_out(layer), lambda args, _: seen.append(args[0].reshape(len(row.ids), -1)))
        ),
        hook_outputs((lm.blocks[last], lambda out: seen.append(out[0].clone()))),
    ):
        lm.model(torch.tensor([row.ids]), use_cache=False)
    return seen[0][row.place], seen[1][row.place]


def plain_search(ready: BoundMemit, asked: EditRequest) -> tuple[Tensor, list[float]]:
    """torch's own Adam on δ, the whole model at every step: z, and the losses."""
    lm, search, last = ready.lm, ready.memit.search, ready.layers[-1]
    at_place = search.kl_position == "place"
    rows = [*asked.rows, kl_row(lm, asked.fact, ready.memit.token, at_place=at_place)]
    _, start = seen_at(lm, rows[0], last, last)
    size = start.norm()
    ids, delta = pad_rows(rows, lm.device), torch.zeros(lm.width, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=search.lr)
    at = torch.zeros(*ids.shape, 1)
    at[range(len(rows)), [row.place for row in rows]] = 1
    labels = torch.tensor(asked.target)

    def add(state: Tensor) -> Tensor:
        return state + at * delta

    before: Tensor | None = None
    losses: list[float] = []
    for step in range(search.looks):
        with hook_outputs((lm.blocks[last], add)):
            logs = lm.model(ids, use_cache=False).logits.log_softmax(-1)
        now = logs[-1, rows[-1].reads[0]]
        before = now.detach() if before is None else before
        said = [
            -logs[i, list(row.reads)].gather(1, labels[:, None]).mean()
            for i, row in enumerate(rows[:-1])
        ]
        decay = delta.norm() / size ** (2 if search.weight_decay_form == "paper" else 1)
        essence = (now.exp() * (now - before)).sum()
        loss = torch.stack(said).mean() + search.kl_weight * essence + search.weight_decay * decay
        losses.append(loss.item())
        if losses[-1] < search.stop or step == search.looks - 1:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
        if delta.norm() > search.longest * size:
            with torch.no_grad():
                delta *= search.longest * size / delta.norm()
    return start + delta.detach(), losses


def assert_same(found: Edit, wanted: Edit, tolerance: float = 1e-4) -> None:
    """Equal weight by weight, to within a share of the largest entry."""
    assert list(found.changes) == list(wanted.changes)
    for name, change in wanted.changes.items():
        gap = (found.changes[name].matrix() - change.matrix()).abs().max()
        assert gap <= tolerance * change.matrix().abs().max(), name
    for mine, other in zip(found.settings["losses"], wanted.settings["losses"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_fast_way_equals_the_plain_one(family: str, tmp_path: Path) -> None:
    lm = text_lm(family)
    memit = memit_on(lm, tmp_path)
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    together, alone = memit(lm, FACTS), memit(lm, FACTS[1:2])
    assert all(torch.equal(x, before[name]) for name, x in lm.model.named_parameters())
    assert_same(together, plainly(memit.ready(lm), FACTS))
    assert_same(alone, plainly(memit.ready(lm), FACTS[1:2]))
    assert all(losses[-1] < losses[0] for losses in together.settings["losses"])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_means_the_same_to_both(
    gemma2: LM, settings: dict[str, Any], tmp_path: Path
) -> None:
    memit = memit_on(gemma2, tmp_path, **settings)
    assert_same(memit(gemma2, FACTS[:2]), plainly(memit.ready(gemma2), FACTS[:2]))


# ---- the closed form


@pytest.mark.parametrize("facts", [1, 3, 12])
@pytest.mark.parametrize("weight", [0.5, 15_000.0])
def test_the_spread_is_the_direct_formula(facts: int, weight: float) -> None:
    """R Kᵀ (λC + KKᵀ)⁻¹, here with the facts as columns."""
    draw = torch.Generator().manual_seed(facts)
    noise = torch.randn(40, 9, generator=draw, dtype=torch.double)
    C = noise.T @ noise / 40
    K = torch.randn(9, facts, generator=draw, dtype=torch.double)
    R = torch.randn(6, facts, generator=draw, dtype=torch.double)
    direct = R @ K.T @ torch.linalg.inv(weight * C + K @ K.T)
    change = spread(K.T, R.T, torch.linalg.solve(C, K).T, weight)
    assert torch.allclose(change.matrix().double(), direct, rtol=1e-5, atol=1e-6 * direct.norm())


def test_the_spread_trades_what_is_missing_against_ordinary_keys() -> None:
    """It is the best of all changes: the least ‖Δ K - R‖² + λ tr(Δ C Δᵀ)."""
    draw = torch.Generator().manual_seed(0)
    K, R = torch.randn(9, 3, generator=draw), torch.randn(6, 3, generator=draw)
    C, weight = torch.diag(torch.rand(9, generator=draw) + 0.1), 2.0
    best = spread(K.T, R.T, torch.linalg.solve(C, K).T, weight).matrix()

    def cost(delta: Tensor) -> float:
        return ((delta @ K - R).square().sum() + weight * (delta @ C @ delta.T).trace()).item()

    for _ in range(20):
        assert cost(best + 0.1 * torch.randn(6, 9, generator=draw)) > cost(best)


@pytest.mark.parametrize(("facts", "kind"), [(3, LowRank), (4, Dense), (20, Dense)])
def test_many_facts_make_a_dense_change_where_that_is_smaller(facts: int, kind: type) -> None:
    """In a 6 by 9 matrix three directions are 45 numbers, four are 60, and all are 54."""
    K, R = torch.randn(facts, 9), torch.randn(facts, 6)
    assert type(spread(K, R, K, 1.0)) is kind


def test_more_facts_than_are_looked_at_in_one_pass(gpt2: LM, tmp_path: Path) -> None:
    """Enough of them for a dense change in a tiny matrix."""
    cities = ["Paris", "Rome", "Berlin", "Oslo", "Lima", "Cairo"]
    words = ["of", "in", "by", "is", "and", "the"]
    facts = [
        Fact(subject=f"{city} {word}", prompt="{} is", target=cities[i - 1])
        for i, city in enumerate(cities)
        for word in words
    ]
    assert len(facts) > AT_A_LOOK
    memit = memit_on(gpt2, tmp_path, prefixes=(), search=replace(FEW, steps=3), facts_per_pass=8)
    edit = memit(gpt2, facts)
    assert all(isinstance(change, Dense) for change in edit.changes.values())
    assert edit.facts == tuple(facts)
    assert_same(edit, plainly(memit.ready(gpt2), facts))


# ---- many facts


@pytest.mark.parametrize("family", ["gpt2", "falcon, alibi", "opt"])
def test_each_equals_one_by_one(family: str, tmp_path: Path) -> None:
    lm = text_lm(family)
    memit = memit_on(lm, tmp_path)
    for facts_per_pass in (None, 3):
        edits = replace(memit, facts_per_pass=facts_per_pass).each(lm, FACTS)
        for fact, edit in zip(FACTS, edits, strict=True):
            assert edit.facts == (fact,)
            assert_same(edit, memit(lm, [fact]))


def test_a_fact_that_cannot_be_written_does_not_hold_up_the_others(
    gpt2: LM, tmp_path: Path
) -> None:
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


def test_a_search_that_leads_nowhere_leaves_its_error(gpt2: LM, tmp_path: Path) -> None:
    """Nothing that is added to the last layer at the subject reaches the end."""
    memit = memit_on(gpt2, tmp_path, layers=(1, 2))
    assert {type(result) for result in memit.attempt(gpt2, FACTS)} == {DidNotConverge}
    with pytest.raises(DidNotConverge, match="by step"):
        memit(gpt2, FACTS)


def test_progress_adds_up_to_one(gpt2: LM, tmp_path: Path) -> None:
    shares: list[float] = []
    memit_on(gpt2, tmp_path).attempt(gpt2, FACTS, progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    assert len(shares) > 3


# ---- what comes out


def test_an_edit_says_what_it_is(gpt2: LM, tmp_path: Path) -> None:
    edit = memit_on(gpt2, tmp_path)(gpt2, FACTS[:2])
    assert edit.method == "memit"
    assert edit.facts == tuple(FACTS[:2])
    assert edit.changed_weights == tuple(f"transformer.h.{i}.mlp.c_proj.weight" for i in (0, 1))
    assert (edit.settings["layers"], edit.settings["weight"]) == ((0, 1), 10.0)
    assert [c["layer"] for c in edit.settings["second_moment"]] == [0, 1]
    assert edit.settings["search"]["steps"] == FEW.steps
    assert all(change.rank == 2 for change in edit.changes.values())
    assert edit.checks is not None
    shares = [
        change.norm() / gpt2.model.get_parameter(name).norm().item()
        for name, change in edit.changes.items()
    ]
    assert edit.checks.update_norm == pytest.approx(max(shares), rel=1e-4)
    assert edit.checks.division_factor is None
    assert edit.checks.perplexity_after != edit.checks.perplexity_before


def test_layers_and_weight_come_from_the_model(gpt2: LM) -> None:
    ready = Memit(prefixes=(), second_moment="identity").ready(gpt2)
    assert ready.layers == (0, 1)  # the five up to ROME's, as far as there are any
    assert ready.weight == 15_000.0
    assert len(Memit(prefix_lengths=((3, 2),), second_moment="identity").ready(gpt2).prefixes) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": (1, 0)}, r"layers \(1, 0\) must go upwards"),
        ({"layers": (1, 1)}, r"layers \(1, 1\) must go upwards, each once"),
        ({"layers": ()}, "at least one"),
        ({"layers": (1, 3)}, "layer 3 is out of range.*3 layers, 0 to 2"),
        ({"layers": (-1, 1)}, "layer -1 is out of range"),
        ({"layers": (0, 1), "second_moment": "find"}, "no statistics of layer 0"),
    ],
)
def test_what_cannot_be_done_is_named(gpt2: LM, settings: dict[str, Any], words: str) -> None:
    memit = Memit(**{"prefixes": (), "second_moment": "identity", **settings})
    with pytest.raises(BadSetting, match=words):
        memit(gpt2, FACTS)
    with pytest.raises(BadSetting, match=words):
        memit.attempt(gpt2, FACTS)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_must_be_above_zero(weight: float) -> None:
    with pytest.raises(BadSetting, match=r"weight is .* above 0"):
        Memit(weight=weight)


def test_without_facts_there_is_nothing_to_write(gpt2: LM, tmp_path: Path) -> None:
    memit = memit_on(gpt2, tmp_path)
    with pytest.raises(BadFact, match="no fact"):
        memit(gpt2, [])
    assert memit.each(gpt2, []) == []


@pytest.mark.model
def test_the_eiffel_tower_moves_to_rome(default_model: LM) -> None:
    from factscope.evaluation.score import Query, score_queries

    fact = replace(FACTS[0], prompt="{} is located in the city of")
    search = ValueSearch(clamp=0.75, steps=8)
    edit = Memit(layers=(5,), weight=1e3, prefixes=(), search=search)(default_model, [fact])
    asked = [fact.text, "The Louvre is located in the city of"]
    after = score_queries(default_model, [Query(text, "Rome", 0) for text in asked], [edit])
    assert after[0].first > 0.9
    assert after[1].top == " Paris"
    assert edit.checks is not None
    assert not edit.checks.complaints()
