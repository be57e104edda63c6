"""Knowledge Neurons: attribution, selection and edits equal a slow reference."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing.contexts import TokenRow
from factscope.editing.edit import Edit, LowRank
from factscope.editing.knowledge_neurons import (
    MIN_GAIN,
    NeuronPaths,
    attribute_neurons,
    select_neurons,
)
from factscope.editing.settings import KN, PAPER_KN, editor
from factscope.errors import BadFact, BadSetting, DidNotConverge, OutOfMemory
from factscope.facts import Case, Fact
from factscope.lm.hooks import hook_io
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.settings import build
from factscope.tracing.gradients import quadrature

from families import FAMILIES, tiny, tiny_text_lm

ROWS = [
    TokenRow((5, 9, 20, 33, 4), (4, 4), (17, 60)),
    TokenRow((7, 8, 30), (2,), (3,)),
    TokenRow((1, 2, 3, 4, 5, 6, 7), (5,), (44,)),
]
"""Rows of different lengths: two labels at one position; and a position before the row's end."""
READOUTS = [
    (row.ids, position, label)
    for row in ROWS
    for position, label in zip(row.positions, row.labels, strict=True)
]

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya", old="Oslo"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano", old="the Nile"),
]
"""The first one's old object is the model's prediction; others have several tokens."""
PREFIXES = ("The Nile flows. ", "Light travels at 100 degrees and so. ")
SMALL = KN(
    prefixes=PREFIXES, steps=3, tolerance=None, threshold=0.4,
    context_fraction=0.4, max_neurons=4,
)  # fmt: skip


def small(family: str) -> LM:
    return tiny_text_lm(family, spread=0.2)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def worded(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family that reads words."""
    return small(request.param)


@pytest.fixture(scope="module")
def llama() -> LM:
    return small("llama")


# ---- the reference

Readout = tuple[Sequence[int], int, int]
"""Token ids, a position, and the token whose probability is read there."""


def plain_probability(
    lm: LM, readout: Readout, layer: int, alpha: float, site: str
) -> tuple[Tensor, Tensor, Tensor]:
    """P with a layer's neurons scaled by alpha, in one whole pass; the neurons; the gradient."""
    ids, position, label = readout
    owner: Any = lm.mlp_out(layer) if site == "key" else lm.mlp_act(layer)
    seen: list[Tensor] = []

    def scale(x: Tensor, output: Tensor) -> Tensor:
        rows = x.reshape(len(ids), -1).clone()
        seen.append(rows[position].detach().clone())
        seen.append((alpha * rows[position]).detach().requires_grad_())
        rows[position] = seen[1]
        return owner.forward(rows.reshape(x.shape))

    with hook_io((owner, scale)), torch.enable_grad():
        logits = lm.model(torch.tensor([ids]), use_cache=False).logits
        p = logits[0, position].float().softmax(-1)[label]
        (gradient,) = torch.autograd.grad(p, seen[1])
    return p.detach(), seen[0], gradient


def plain_scores(lm: LM, readout: Readout, how: KN) -> tuple[Tensor, Tensor]:
    """IG of every neuron of every layer, and the neurons."""
    alphas, weights = (x.tolist() for x in quadrature(how.steps, how.rule))
    scores, neurons = [], []
    for layer in range(lm.n_layers):
        seen = [plain_probability(lm, readout, layer, alpha, how.site) for alpha in alphas]
        gradient = torch.stack([w * g for w, (_, _, g) in zip(weights, seen, strict=True)]).sum(0)
        neurons.append(seen[0][1])
        scores.append(seen[0][1] * gradient)
    return torch.stack(scores), torch.stack(neurons)


def plain_neurons(lm: LM, fact: Fact, how: KN, answer: Sequence[int]) -> list[tuple[int, int, int]]:
    """Layer, number and sign of the selected neurons, best first."""
    contexts = []
    for prefix in ("", *(how.prefixes or ())):
        ids = encode(lm, prefix + fact.text).ids
        texts = [ids] * len(answer)
        if how.objective == "each-token":
            texts = [(*ids, *answer[:i]) for i in range(len(answer))]
        readouts = [(text, len(text) - 1, token) for text, token in zip(texts, answer, strict=True)]
        found = [plain_scores(lm, readout, how) for readout in readouts]
        contexts.append([torch.stack(x).mean(0) for x in zip(*found, strict=True)])
    count: Counter[tuple[int, int]] = Counter()
    for scores, _ in contexts:
        count.update((i, n) for i, n in (scores > how.threshold * scores.max()).nonzero().tolist())
    mean = torch.stack([scores for scores, _ in contexts]).mean(0)
    value = torch.stack([neurons for _, neurons in contexts]).mean(0)
    enough = [key for key, n in count.items() if n > how.context_fraction * len(contexts)]
    enough = enough or [key for key, n in count.items() if n == max(count.values())]
    best = sorted(enough, key=lambda key: (-count[key], -mean[key].item()))[: how.max_neurons]
    return [(*key, -1 if how.signed and value[key] < 0 else 1) for key in best]


def plain_edit(lm: LM, fact: Fact, how: KN) -> dict[str, Tensor]:
    """The change of each weight, column by column."""
    prompt = encode(lm, fact.text).ids
    predicted = int(lm.model(torch.tensor([prompt])).logits[0, -1].argmax())

    def object_ids(text: str) -> tuple[int, ...]:
        if not how.leading_space:
            return encode(lm, text, special=False).ids
        return encode(lm, f"{fact.text} {text}").ids[len(prompt) :]

    assert fact.target is not None
    answer = (predicted,) if fact.old is None else object_ids(fact.old)
    head: Any = lm.embed if how.embedding == "input" else lm.model.get_output_embeddings()
    vectors = head.weight.double()
    if vectors.shape[1] != lm.width:  # some OPT
        vectors = vectors @ lm.model.model.decoder.project_out.weight.double()

    def vector(ids: Sequence[int]) -> Tensor:
        rows = vectors[list(ids)]
        return rows.mean(0) if how.pooling == "mean" else rows.sum(0)

    new = vector(object_ids(fact.target))
    old = vector(answer if how.old == "answer" else [predicted])
    changes: dict[str, Tensor] = {}
    for layer, number, sign in plain_neurons(lm, fact, how, answer):
        weight = lm.mlp_weight(layer).double()
        name = f"{lm.name_of(lm.mlp_out(layer))}.weight"
        delta = changes.setdefault(name, torch.zeros_like(weight))
        for amount, one in ((how.new_weight, new), (-how.old_weight, old)):
            size = weight[:, number].norm() / one.norm() if how.unit == "column" else 1.0
            delta[:, number] += sign * amount * size * one
    return changes


def same(edit: Edit, wanted: dict[str, Tensor]) -> None:
    assert set(edit.changes) == set(wanted)
    for name, delta in wanted.items():
        torch.testing.assert_close(
            edit.changes[name].matrix().double(), delta, rtol=1e-4, atol=1e-6
        )


# ---- attribution


@pytest.mark.parametrize("site", ["key", "pre-activation"])
def test_attributions_equal_the_reference(lm: LM, site: Any) -> None:
    how = KN(steps=3, rule="ends", tolerance=None, site=site)
    found = attribute_neurons(lm, ROWS, how)
    for i, readout in enumerate(READOUTS):
        scores, neurons = plain_scores(lm, readout, how)
        near = 1e-4 * scores.abs().max().item()
        torch.testing.assert_close(found.scores[i], scores, rtol=1e-3, atol=near)
        torch.testing.assert_close(found.neurons[i], neurons, rtol=1e-4, atol=1e-5)
        for layer in range(lm.n_layers):
            ends = [plain_probability(lm, readout, layer, alpha, site)[0] for alpha in (1.0, 0.0)]
            gain = (ends[0] - ends[1]).item()
            assert found.gains[i, layer].item() == pytest.approx(gain, rel=1e-3, abs=1e-6)


def test_attributions_sum_to_the_gain_in_probability(lm: LM) -> None:
    """Completeness of integrated gradients: within 2 % in each layer with a large gain."""
    found = attribute_neurons(lm, ROWS, KN())
    gains = found.gains.abs()
    allowed = 0.02 * gains.maximum(MIN_GAIN * gains.amax(1, keepdim=True)) + 1e-7
    assert ((found.scores.sum(-1) - found.gains).abs() <= allowed).all()


def test_segments_with_a_large_error_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, calls, real = tiny("llama"), [], NeuronPaths.integrate

    def counted(self: Any, segments: Any, *rule: Any) -> Any:
        calls.append([(segment.start, segment.end) for segment in segments])
        return real(self, segments, *rule)

    monkeypatch.setattr(NeuronPaths, "integrate", counted)
    finest = attribute_neurons(lm, ROWS, KN(steps=60, tolerance=None)).scores
    assert len(calls) == 1
    rough = attribute_neurons(lm, ROWS, KN(steps=2, tolerance=None)).scores
    calls.clear()
    reported: list[float] = []
    found = attribute_neurons(lm, ROWS, KN(steps=2, tolerance=1e-3), progress=reported.append)
    assert len(calls) > 2
    assert sum(reported) == pytest.approx(1)
    assert set(calls[1]) == {(0.0, 0.5), (0.5, 1.0)}
    assert (found.scores - finest).abs().max() < 0.1 * (rough - finest).abs().max()


def test_smaller_batches_give_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sizes, reported, real = tiny("gpt2"), [], [], NeuronPaths.evaluate
    whole = attribute_neurons(lm, ROWS, KN(steps=3))
    some = attribute_neurons(lm, ROWS, KN(steps=3), points_per_pass=5)
    torch.testing.assert_close(some.scores, whole.scores, rtol=1e-4, atol=1e-7)
    limit = 9

    def scarce(self: NeuronPaths, readout: Tensor, layer: Tensor, alpha: Tensor) -> Any:
        sizes.append(len(readout))
        if len(readout) > limit:
            raise torch.OutOfMemoryError("no more")
        return real(self, readout, layer, alpha)

    monkeypatch.setattr(NeuronPaths, "evaluate", scarce)
    found = attribute_neurons(lm, ROWS, KN(steps=3), points_per_pass=36, progress=reported.append)
    assert sizes[:3] == [36, 18, 9]
    assert sum(reported) == pytest.approx(1)
    torch.testing.assert_close(found.scores, whole.scores, rtol=1e-4, atol=1e-7)
    limit = 0
    with pytest.raises(OutOfMemory, match="no more"):
        attribute_neurons(lm, ROWS, KN(steps=3))


# ---- selection


def test_selection_sorts_by_contexts_then_by_score() -> None:
    scores = torch.tensor([[[1.0, 0.5, 0.1, 0.3]], [[0.4, 1.0, 0.1, 0.3]], [[0.9, 1.0, 0.0, 0.2]]])
    selected, coarse = select_neurons(scores, 0.25, 0.5, None)
    assert coarse[:, 0].tolist() == [
        [True, True, False, True], [True, True, False, True], [True, True, False, False]
    ]  # fmt: skip
    assert selected.tolist() == [[0, 1], [0, 0], [0, 3]]
    assert select_neurons(scores, 0.25, 0.7, None)[0].tolist() == [[0, 1], [0, 0]]
    assert select_neurons(scores, 0.25, 0.5, 1)[0].tolist() == [[0, 1]]


def test_without_neurons_in_enough_contexts_the_most_frequent_are_selected() -> None:
    scores = torch.eye(4)[:, None] + torch.tensor([0.0, 0.0, 0.9, 0.0]) * torch.tensor(
        [[[1.0]], [[1.0]], [[0.0]], [[0.0]]]
    )
    assert select_neurons(scores, 0.5, 0.9, None)[0].tolist() == [[0, 2]]


def test_a_context_without_positive_scores_selects_nothing() -> None:
    scores = torch.tensor([[[1.0, 0.5]], [[-1.0, -0.5]]])
    selected, coarse = select_neurons(scores, 0.2, 0.4, None)
    assert not coarse[1].any()
    assert selected.tolist() == [[0, 0], [0, 1]]


# ---- the edit


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_edits_equal_the_reference(worded: LM, preset: str) -> None:
    few = {"steps": 3, "threshold": 0.5}
    how = replace(SMALL, prefixes=PREFIXES[:1]) if preset == "default" else replace(PAPER_KN, **few)
    if preset == "paper" and worded.embed.embedding_dim != worded.width:
        with pytest.raises(BadSetting, match=r"width 16 .* states have 32; use output"):
            how(worded, FACTS)
        how = replace(how, embedding="output")
    wanted = [plain_edit(worded, fact, how) for fact in FACTS]
    edits = how.each(worded, FACTS)
    for edit, fact, changes in zip(edits, FACTS, wanted, strict=True):
        assert edit.facts == (fact,)
        same(edit, changes)
        assert all(isinstance(c, LowRank) and c.rank == 1 for c in edit.changes.values())
    together: dict[str, Tensor] = {}
    for changes in wanted:
        for name, delta in changes.items():
            together[name] = together.get(name, 0) + delta
    same(how(worded, FACTS), together)
    same(replace(how, facts_per_pass=3)(worded, FACTS), together)


SETTINGS: dict[str, dict[str, Any]] = {
    "pre-activation": {"site": "pre-activation"},
    "last-position": {"objective": "last-position"},
    "no leading space": {"leading_space": False},
    "all": {"max_neurons": None, "context_fraction": 0.0},
    "one context": {"prefixes": ()},
    "weights": {"new_weight": 3.0, "old_weight": 0.5},
    "predicted": {"old": "predicted"},
    "embedding": {"unit": "embedding"},
    "unsigned": {"signed": False},
    "sum": {"pooling": "sum", "unit": "embedding"},
    "input": {"embedding": "input"},
    "ends": {"rule": "ends"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_equals_the_reference(llama: LM, setting: str) -> None:
    """On a tiny model whose input and output embeddings differ."""
    lm, how = llama, replace(SMALL, **SETTINGS[setting])
    assert lm.embed.weight is not lm.model.get_output_embeddings().weight
    for fact, edit in zip(FACTS, how.each(lm, FACTS), strict=True):
        same(edit, plain_edit(lm, fact, how))
    if setting in ("all", "one context", "weights", "predicted", "embedding", "sum", "input"):
        plain, other = (made(lm, FACTS).changes for made in (SMALL, how))
        assert plain.keys() != other.keys() or any(
            not torch.equal(plain[name].matrix(), other[name].matrix()) for name in plain
        ), "the setting makes no difference"


def test_an_edit_records_its_settings_and_neurons(llama: LM, tmp_path: Any) -> None:
    reported: list[float] = []
    how = replace(SMALL, prefixes=None, prefix_lengths=((4, 2),), tolerance=0.02)
    edit = how(llama, FACTS, progress=reported.append)
    assert sum(reported) == pytest.approx(1)
    assert (edit.method, edit.facts) == ("kn", tuple(FACTS))
    assert (edit.model, edit.fingerprint) == (llama.name, llama.fingerprint)
    assert edit.checks is not None
    assert len(edit.settings["prefixes"]) == 2
    for neurons, coarse, gap in zip(
        *(edit.settings[name] for name in ("neurons", "coarse", "gaps")), strict=True
    ):
        assert 1 <= len(neurons) <= 4
        assert all(0.4 < n["context_fraction"] <= 1 for n in neurons)
        assert neurons[0]["attribution"] > 0
        assert len(coarse) == llama.n_layers
        assert sum(coarse) >= len([n for n in neurons if n["context_fraction"] == 1])
        assert 0 <= gap < 0.02
    edit.save(tmp_path / "kn.edit")
    loaded = Edit.load(tmp_path / "kn.edit")
    assert loaded.settings["neurons"] == edit.settings["neurons"]
    assert loaded.facts == edit.facts
    resolved = how.resolve(llama)
    assert resolved.prefixes == edit.settings["prefixes"]
    same(resolved(llama, FACTS), {n: c.matrix().double() for n, c in edit.changes.items()})


def test_only_columns_of_selected_neurons_change(llama: LM) -> None:
    edit = SMALL(llama, FACTS[:1])
    selected = {(n["layer"], n["neuron"]) for n in edit.settings["neurons"][0]}
    before = [llama.mlp_weight(i).clone() for i in range(llama.n_layers)]
    with edit.applied(llama, force=True):
        changed = {
            (i, int(n))
            for i in range(llama.n_layers)
            for n in (llama.mlp_weight(i) != before[i]).any(0).nonzero()[:, 0]
        }
    assert changed == selected


def test_the_request_of_a_case_has_its_old_object() -> None:
    fact = Fact(subject="France", prompt="The capital of {} is", target="Rome")
    assert Case(fact=fact, true="Paris").request == replace(fact, old="Paris")
    assert Case(fact=fact).request == fact


# ---- errors


def test_a_bad_fact_does_not_affect_the_others(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [replace(FACTS[0], target=" "), replace(FACTS[1], old=FACTS[1].target)]
    reported: list[float] = []
    found = SMALL.attempt(llama, [bad[0], FACTS[1], bad[1], FACTS[2]], progress=reported.append)
    assert [type(x) for x in found] == [BadFact, Edit, BadFact, Edit]
    assert "both the old and the new object" in str(found[2])
    assert sum(reported) == pytest.approx(1)
    for edit, fact in zip((found[1], found[3]), FACTS[1:], strict=True):
        assert isinstance(edit, Edit)
        same(edit, plain_edit(llama, fact, SMALL))
    assert SMALL.attempt(llama, []) == []
    with pytest.raises(BadFact, match="no facts"):
        SMALL(llama, [])
    with pytest.raises(BadFact, match="empty"):
        SMALL(llama, [replace(FACTS[1], old=" ")])


def test_without_positive_or_finite_attributions_an_error_is_raised() -> None:
    lm = small("llama")
    for layer in range(lm.n_layers):
        lm.mlp_weight(layer).zero_()
    with pytest.raises(DidNotConverge, match=r"no neuron adds .* 'Oslo' after 'The capital of"):
        SMALL(lm, FACTS[1:2])
    lm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DidNotConverge, match=r"the model's prediction.*NaN.*float32"):
        SMALL(lm, FACTS[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, "steps is 1; give 2 or more"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"threshold": 1.0}, "threshold is 1.0; "),
        ({"context_fraction": -0.1}, "context_fraction is -0.1"),
        ({"max_neurons": 0}, "max_neurons is 0"),
        ({"facts_per_pass": 0}, "facts_per_pass is 0"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        KN(**settings)


def test_a_rule_without_a_node_at_the_start_is_refused() -> None:
    with pytest.raises(BadSetting, match="rule is 'gauss'; choose from radau"):
        build(KN(), {"rule": "gauss"})


def test_presets() -> None:
    assert editor("kn") == KN()
    assert editor("kn", "paper") == PAPER_KN
    assert editor("kn", "paper", max_neurons=3, threshold=None) == replace(PAPER_KN, max_neurons=3)


# ---- the default model


@pytest.mark.model
def test_the_eiffel_tower_moves_to_rome(default_model: LM) -> None:
    lm, fact = default_model, replace(FACTS[0], old="Paris")
    first = [encode(lm, " " + city, special=False).ids[0] for city in ("Rome", "Paris")]

    def says() -> list[float]:
        with torch.no_grad():
            logits = lm.model(torch.tensor([encode(lm, fact.text).ids])).logits[0, -1]
        return logits.softmax(-1)[first].tolist()

    edit = KN()(lm, [fact])
    assert edit.settings["gaps"][0] < 0.02
    assert len(edit.settings["neurons"][0]) <= 10
    rome, paris = says()
    assert rome < 0.01 < 0.5 < paris
    with edit.applied(lm):
        rome, paris = says()
    assert rome > 0.3 > paris
