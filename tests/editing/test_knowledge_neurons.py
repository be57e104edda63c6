"""Knowledge Neurons: the fast attribution is the plain one, and the edit is what it says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from factscope.editing import neuron_attribution as module
from factscope.editing.edit import Edit, LowRank, load_edit
from factscope.editing.knowledge_neurons import KN, PAPER, select_neurons
from factscope.editing.methods import editor
from factscope.editing.neuron_attribution import MINOR, NeuronPath, Readout, attribute_neurons
from factscope.errors import BadFact, BadSetting, DidNotConverge, OutOfMemory
from factscope.facts import Case, Fact
from factscope.lm.hooks import hook_io
from factscope.lm.model import LM
from factscope.lm.quadrature import quadrature
from factscope.lm.tokens import encode

from families import FAMILIES, reader, tiny

READINGS = [
    Readout(ids=(5, 9, 20, 33, 4), at=4, answer=17),
    Readout(ids=(5, 9, 20, 33, 4), at=4, answer=60),
    Readout(ids=(7, 8, 30), at=2, answer=3),
    Readout(ids=(1, 2, 3, 4, 5, 6, 7), at=5, answer=44),
]
"""Two of one text, and texts of other lengths; the last is read before its end."""

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya", old="Oslo"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano", old="the Nile"),
]
"""The first's old object is what the model says; others have several tokens."""
PREFIXES = ("The Nile flows. ", "Light travels at 100 degrees and so. ")
SMALL = KN(prefixes=PREFIXES, steps=3, tolerance=None, threshold=0.4, share=0.4, most=4)


def small(family: str) -> LM:
    return reader(family, spread=0.2)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def worded(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family that reads words."""
    return small(request.param)


@pytest.fixture(scope="module")
def llama() -> LM:
    return small("llama")


# ---- the plain procedure


def plain_probability(
    lm: LM, reading: Readout, layer: int, share: float, site: str
) -> tuple[Tensor, Tensor, Tensor]:
    """P with a layer's neurons at a share of what they are: one whole pass. Also what they are, and
    the slope of P by them.
    """
    owner: Any = lm.mlp_out(layer) if site == "key" else lm.mlp_act(layer)
    kept: list[Tensor] = []

    def shrink(x: Tensor, output: Tensor) -> Tensor:
        rows = x.reshape(len(reading.ids), -1).clone()
        kept.append(rows[reading.at].detach().clone())
        kept.append((share * rows[reading.at]).detach().requires_grad_())
        rows[reading.at] = kept[1]
        return owner.forward(rows.reshape(x.shape))

    with hook_io((owner, shrink)), torch.enable_grad():
        logits = lm.model(torch.tensor([reading.ids]), use_cache=False).logits
        p = logits[0, reading.at].float().softmax(-1)[reading.answer]
        (slope,) = torch.autograd.grad(p, kept[1])
    return p.detach(), kept[0], slope


def plain_scores(lm: LM, reading: Readout, how: KN) -> tuple[Tensor, Tensor]:
    """IG of every neuron of every layer, and the neurons."""
    shares, weights = (x.tolist() for x in quadrature(how.steps, how.rule))
    scores, neurons = [], []
    for layer in range(lm.n_layers):
        seen = [plain_probability(lm, reading, layer, share, how.site) for share in shares]
        slope = torch.stack([w * s for w, (_, _, s) in zip(weights, seen, strict=True)]).sum(0)
        neurons.append(seen[0][1])
        scores.append(seen[0][1] * slope)
    return torch.stack(scores), torch.stack(neurons)


def plain_neurons(lm: LM, fact: Fact, how: KN, answer: Sequence[int]) -> list[tuple[int, int, int]]:
    """Layer, number and sign of the chosen neurons, best first."""
    contexts = []
    for prefix in ("", *(how.prefixes or ())):
        ids = encode(lm, prefix + fact.text).ids
        texts = [ids] * len(answer)
        if how.reads == "each-token":
            texts = [(*ids, *answer[:i]) for i in range(len(answer))]
        read = [Readout(ids=t, at=len(t) - 1, answer=a) for t, a in zip(texts, answer, strict=True)]
        found = [plain_scores(lm, reading, how) for reading in read]
        contexts.append([torch.stack(x).mean(0) for x in zip(*found, strict=True)])
    count: Counter[tuple[int, int]] = Counter()
    for scores, _ in contexts:
        count.update((i, n) for i, n in (scores > how.threshold * scores.max()).nonzero().tolist())
    mean = torch.stack([scores for scores, _ in contexts]).mean(0)
    value = torch.stack([neurons for _, neurons in contexts]).mean(0)
    enough = [key for key, n in count.items() if n > how.share * len(contexts)]
    enough = enough or [key for key, n in count.items() if n == max(count.values())]
    best = sorted(enough, key=lambda key: (-count[key], -mean[key].item()))[: how.most]
    return [(*key, -1 if how.signed and value[key] < 0 else 1) for key in best]


def plain_edit(lm: LM, fact: Fact, how: KN) -> dict[str, Tensor]:
    """The change of each weight, column by column."""
    prompt = encode(lm, fact.text).ids
    said = int(lm.model(torch.tensor([prompt])).logits[0, -1].argmax())

    def coded(words: str) -> tuple[int, ...]:
        if not how.spaced:
            return encode(lm, words, special=False).ids
        return encode(lm, f"{fact.text} {words}").ids[len(prompt) :]

    assert fact.target is not None
    answer = (said,) if fact.old is None else coded(fact.old)
    head: Any = lm.embed if how.embedding == "input" else lm.model.get_output_embeddings()
    vectors = head.weight.double()
    if vectors.shape[1] != lm.width:  # some OPT
        vectors = vectors @ lm.model.model.decoder.project_out.weight.double()

    def vector(ids: Sequence[int]) -> Tensor:
        rows = vectors[list(ids)]
        return rows.mean(0) if how.tokens == "mean" else rows.sum(0)

    new = vector(coded(fact.target))
    old = vector(answer if how.old == "answer" else [said])
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


@pytest.mark.parametrize("rule", ["radau", "gauss"])
def test_rules_are_exact_for_polynomials(rule: Any) -> None:
    for steps in (2, 3, 6):
        points, weights = quadrature(steps, rule)
        for power in range(2 * steps - 1):
            assert (weights * points**power).sum().item() == pytest.approx(1 / (power + 1))
    assert (points[0] == 0) == (rule == "radau")


def test_equal_steps_have_both_ends() -> None:
    points, weights = quadrature(5, "ends")
    np.testing.assert_allclose(points, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(weights, [0.2] * 5)


@pytest.mark.parametrize("site", ["key", "before"])
def test_attributions_are_the_plain_ones(lm: LM, site: Any) -> None:
    how = KN(steps=3, rule="ends", site=site)
    found = attribute_neurons(lm, READINGS, steps=3, rule="ends", tolerance=None, site=site)
    for i, reading in enumerate(READINGS):
        scores, neurons = plain_scores(lm, reading, how)
        near = 1e-4 * scores.abs().max().item()
        torch.testing.assert_close(found.scores[i], scores, rtol=1e-3, atol=near)
        torch.testing.assert_close(found.neurons[i], neurons, rtol=1e-4, atol=1e-5)
        for layer in range(lm.n_layers):
            ends = [plain_probability(lm, reading, layer, s, site)[0] for s in (1.0, 0.0)]
            gain = (ends[0] - ends[1]).item()
            assert found.gains[i, layer].item() == pytest.approx(gain, rel=1e-3, abs=1e-6)


def test_attributions_add_up_to_what_the_answer_gains(lm: LM) -> None:
    """Within 2 % in each layer that matters: the completeness of integrated gradients."""
    found = attribute_neurons(lm, READINGS)
    gains = found.gains.abs()
    allowed = 0.02 * gains.maximum(MINOR * gains.amax(1, keepdim=True)) + 1e-7
    assert ((found.scores.sum(-1) - found.gains).abs() <= allowed).all()


def test_a_path_that_does_not_add_up_is_looked_at_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm, looks, real = tiny("llama"), [], module._Look.__call__

    def counted(self: Any, pieces: Any, done: Any) -> Any:
        looks.append([(piece.reading, piece.layer, piece.begin, piece.end) for piece in pieces])
        return real(self, pieces, done)

    monkeypatch.setattr(module._Look, "__call__", counted)
    finest = attribute_neurons(lm, READINGS, steps=60, tolerance=None).scores
    assert len(looks) == 1
    rough = attribute_neurons(lm, READINGS, steps=2, tolerance=None).scores
    looks.clear()
    heard: list[float] = []
    found = attribute_neurons(lm, READINGS, steps=2, tolerance=1e-3, progress=heard.append)
    assert len(looks) > 2
    assert sum(heard) == pytest.approx(1)
    assert {piece[2:] for piece in looks[1]} == {(0.0, 0.5), (0.5, 1.0)}
    assert (found.scores - finest).abs().max() < 0.1 * (rough - finest).abs().max()


def test_pieces_and_scarce_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, sizes, heard, real = tiny("gpt2"), [], [], NeuronPath.look
    whole = attribute_neurons(lm, READINGS, steps=3)
    some = attribute_neurons(lm, READINGS, steps=3, facts_per_pass=5)
    torch.testing.assert_close(some.scores, whole.scores, rtol=1e-4, atol=1e-7)
    limit = 9

    def scarce(self: NeuronPath, reading: Tensor, layer: Tensor, share: Tensor) -> Any:
        sizes.append(len(reading))
        if len(reading) > limit:
            raise torch.OutOfMemoryError("no more")
        return real(self, reading, layer, share)

    monkeypatch.setattr(NeuronPath, "look", scarce)
    found = attribute_neurons(lm, READINGS, steps=3, facts_per_pass=36, progress=heard.append)
    assert sizes[:3] == [36, 18, 9]
    assert sum(heard) == pytest.approx(1)
    torch.testing.assert_close(found.scores, whole.scores, rtol=1e-4, atol=1e-7)
    limit = 0
    with pytest.raises(OutOfMemory, match="no more"):
        attribute_neurons(lm, READINGS, steps=3)


# ---- selection


def test_selection_goes_by_share_then_by_score() -> None:
    scores = torch.tensor([[[1.0, 0.5, 0.1, 0.3]], [[0.4, 1.0, 0.1, 0.3]], [[0.9, 1.0, 0.0, 0.2]]])
    chosen, coarse = select_neurons(scores, 0.25, 0.5, None)
    assert coarse[:, 0].tolist() == [
        [True, True, False, True], [True, True, False, True], [True, True, False, False]
    ]  # fmt: skip
    assert chosen.tolist() == [[0, 1], [0, 0], [0, 3]]
    assert select_neurons(scores, 0.25, 0.7, None)[0].tolist() == [[0, 1], [0, 0]]
    assert select_neurons(scores, 0.25, 0.5, 1)[0].tolist() == [[0, 1]]


def test_where_nothing_is_shared_widely_the_widest_is_taken() -> None:
    scores = torch.eye(4)[:, None] + torch.tensor([0.0, 0.0, 0.9, 0.0]) * torch.tensor(
        [[[1.0]], [[1.0]], [[0.0]], [[0.0]]]
    )
    assert select_neurons(scores, 0.5, 0.9, None)[0].tolist() == [[0, 2]]


def test_a_context_without_a_word_for_the_answer_selects_nothing() -> None:
    scores = torch.tensor([[[1.0, 0.5]], [[-1.0, -0.5]]])
    chosen, coarse = select_neurons(scores, 0.2, 0.4, None)
    assert not coarse[1].any()
    assert chosen.tolist() == [[0, 0], [0, 1]]


# ---- the edit


@pytest.mark.parametrize("preset", ["default", "paper"])
def test_an_edit_is_the_plain_one(worded: LM, preset: str) -> None:
    few = {"steps": 3, "threshold": 0.5}
    how = replace(SMALL, prefixes=PREFIXES[:1]) if preset == "default" else replace(PAPER, **few)
    if preset == "paper" and worded.embed.embedding_dim != worded.width:
        with pytest.raises(
            BadSetting, match=r"width 16 .* states have 32; take embedding='output'"
        ):
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
    "before": {"site": "before"},
    "last-position": {"reads": "last-position"},
    "unspaced": {"spaced": False},
    "all": {"most": None, "share": 0.0},
    "one context": {"prefixes": ()},
    "weights": {"new_weight": 3.0, "old_weight": 0.5},
    "said": {"old": "said"},
    "embedding": {"unit": "embedding"},
    "unsigned": {"signed": False},
    "sum": {"tokens": "sum", "unit": "embedding"},
    "input": {"embedding": "input"},
    "ends": {"rule": "ends"},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_does_what_the_plain_procedure_does(llama: LM, setting: str) -> None:
    """In this tiny model the two embeddings differ."""
    lm, how = llama, replace(SMALL, **SETTINGS[setting])
    assert lm.embed.weight is not lm.model.get_output_embeddings().weight
    for fact, edit in zip(FACTS, how.each(lm, FACTS), strict=True):
        same(edit, plain_edit(lm, fact, how))
    if setting in ("all", "one context", "weights", "said", "embedding", "sum", "input"):
        plain, other = (made(lm, FACTS).changes for made in (SMALL, how))
        assert plain.keys() != other.keys() or any(
            not torch.equal(plain[name].matrix(), other[name].matrix()) for name in plain
        ), "the setting makes no difference"


def test_an_edit_says_what_it_is(llama: LM, tmp_path: Any) -> None:
    heard: list[float] = []
    how = replace(SMALL, prefixes=None, prefix_lengths=((4, 2),), tolerance=0.02)
    edit = how(llama, FACTS, progress=heard.append)
    assert sum(heard) == pytest.approx(1)
    assert (edit.method, edit.facts) == ("kn", tuple(FACTS))
    assert (edit.model, edit.fingerprint) == (llama.name, llama.fingerprint)
    assert edit.checks is not None
    assert len(edit.settings["prefixes"]) == 2
    for neurons, coarse, gap in zip(
        *(edit.settings[name] for name in ("neurons", "coarse", "gaps")), strict=True
    ):
        assert 1 <= len(neurons) <= 4
        assert all(0.4 < n["share"] <= 1 for n in neurons)
        assert neurons[0]["attribution"] > 0
        assert len(coarse) == llama.n_layers
        assert sum(coarse) >= len([n for n in neurons if n["share"] == 1])
        assert 0 <= gap < 0.02
    edit.save(tmp_path / "kn.edit")
    kept = load_edit(tmp_path / "kn.edit")
    assert kept.settings["neurons"] == edit.settings["neurons"]
    assert kept.facts == edit.facts
    resolve = how.resolve(llama)
    assert resolve.prefixes == edit.settings["prefixes"]
    same(resolve(llama, FACTS), {n: c.matrix().double() for n, c in edit.changes.items()})


def test_it_does_in_the_weights_what_it_says(llama: LM) -> None:
    """The edited weights differ in the chosen columns, and there only."""
    edit = SMALL(llama, FACTS[:1])
    chosen = {(n["layer"], n["neuron"]) for n in edit.settings["neurons"][0]}
    before = [llama.mlp_weight(i).clone() for i in range(llama.n_layers)]
    with edit.applied(llama, force=True):
        moved = {
            (i, int(n))
            for i in range(llama.n_layers)
            for n in (llama.mlp_weight(i) != before[i]).any(0).nonzero()[:, 0]
        }
    assert moved == chosen


def test_a_case_tells_the_editor_what_is_replaced() -> None:
    fact = Fact(subject="France", prompt="The capital of {} is", target="Rome")
    assert Case(fact=fact, true="Paris").request == replace(fact, old="Paris")
    assert Case(fact=fact).request == fact


# ---- what cannot be done


def test_a_fact_that_cannot_be_written_does_not_hold_up_the_others(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [replace(FACTS[0], target=" "), replace(FACTS[1], old=FACTS[1].target)]
    heard: list[float] = []
    found = SMALL.attempt(llama, [bad[0], FACTS[1], bad[1], FACTS[2]], progress=heard.append)
    assert [type(x) for x in found] == [BadFact, Edit, BadFact, Edit]
    assert "both the old and the new object" in str(found[2])
    assert sum(heard) == pytest.approx(1)
    for edit, fact in zip((found[1], found[3]), FACTS[1:], strict=True):
        assert isinstance(edit, Edit)
        same(edit, plain_edit(llama, fact, SMALL))
    assert SMALL.attempt(llama, []) == []
    with pytest.raises(BadFact, match="no fact"):
        SMALL(llama, [])
    with pytest.raises(BadFact, match="empty"):
        SMALL(llama, [replace(FACTS[1], old=" ")])


def test_no_neuron_that_speaks_for_the_answer_is_told() -> None:
    lm = small("llama")
    for layer in range(lm.n_layers):
        lm.mlp_weight(layer).zero_()
    with pytest.raises(DidNotConverge, match=r"no neuron speaks for 'Oslo' after 'The capital of"):
        SMALL(lm, FACTS[1:2])
    lm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DidNotConverge, match=r"what the model says.*no numbers.*float32"):
        SMALL(lm, FACTS[:1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1}, "steps is 1; a path needs at least two"),
        ({"rule": "gauss"}, "rule is 'gauss', which leaves out"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"threshold": 1.0}, "threshold is 1.0; it must be from 0"),
        ({"share": -0.1}, "share is -0.1"),
        ({"most": 0}, "most is 0"),
        ({"facts_per_pass": 0}, "at_once is 0"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        KN(**settings)


def test_presets() -> None:
    assert editor("kn") == KN()
    assert editor("kn", "paper") == PAPER
    assert editor("kn", "paper", most=3, share=None) == replace(PAPER, most=3)


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
