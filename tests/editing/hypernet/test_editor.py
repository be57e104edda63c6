"""MEND and KE: the factors are the gradient, an edit is the plain formula, facts never mix."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing.contexts import edit_request
from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.editing.hypernet.editor import Ke, Mend, told_of
from factscope.editing.hypernet.gradients import (
    SplitModel,
    TokenBatch,
    TokenRow,
    changes_applied,
    gradient_factors,
    last_layers,
    target_modules,
    token_row,
)
from factscope.editing.hypernet.ke import Gate, KeNetwork
from factscope.editing.hypernet.mend import MendNetwork
from factscope.editing.hypernet.model import RunningNorm
from factscope.editing.hypernet.weights import (
    load_weights,
    pack_weights,
)
from factscope.editing.methods import editor
from factscope.editing.per_row import edited
from factscope.errors import BadEditorWeights, BadFact, BadSetting, DidNotConverge
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from families import FAMILIES
from hypernets import EDITORS, FACTS, a_network, lines_of, small, weights_of


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def worded(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family that reads words."""
    return small(request.param)


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return small("gpt2")


def autograd(lm: LM, fact: Fact, names: Sequence[str]) -> dict[str, Tensor]:
    """The gradient of a fact's loss by torch, on the whole model, in the paper's orientation."""
    weights = {name: lm.model.get_parameter(name) for name in names}
    for weight in weights.values():
        weight.requires_grad_(True)
    line = token_row(edit_request(lm, fact))
    logits = lm.model(torch.tensor([line.ids])).logits[0, list(line.reads)]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(line.labels))
    found = torch.autograd.grad(loss, list(weights.values()))
    for weight in weights.values():
        weight.requires_grad_(False)
    turn = lm.family.transposed
    return {name: (x.T if turn else x) for name, x in zip(names, found, strict=True)}


def near(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


# ---- the gradient in factors


def test_the_factors_are_the_gradient(worded: LM) -> None:
    """In a batch, one row a fact; Conv1D's turned weights and flattened rows included."""
    places = target_modules(worded, range(worded.n_layers))
    halves = SplitModel(worded, 0)
    lines = lines_of(worded, FACTS)
    factors, losses = gradient_factors(worded, places, halves, halves.below(lines.ids)[0], lines)
    for i, fact in enumerate(FACTS):
        wanted = autograd(worded, fact, [place.name for place in places])
        for place, some in zip(places, factors, strict=True):
            assert some.gradient()[i].shape == (place.shape[2], place.shape[1])
            assert near(some.gradient()[i], wanted[place.name], 1e-5), place.name
        one = lines_of(worded, [fact])
        logs = one.logs(worded, halves.below(one.ids)[1])
        assert losses[i].item() == pytest.approx(one.losses(logs).item(), rel=1e-5)
    assert all(weight.grad is None for weight in worded.model.parameters())


def test_tokens_that_the_loss_does_not_see_have_no_factor(gpt2: LM) -> None:
    places = target_modules(gpt2, (1, 2))
    halves, lines = SplitModel(gpt2, 1), lines_of(gpt2, FACTS)
    factors, _ = gradient_factors(gpt2, places, halves, halves.below(lines.ids)[0], lines)
    last = factors[-1].real  # of the last layer only what is read
    for i, fact in enumerate(FACTS):
        reads = token_row(edit_request(gpt2, fact)).reads
        assert last[i].nonzero()[:, 0].tolist() == list(reads)
        assert not factors[0].real[i, max(reads) + 1 :].any()


def test_the_edited_places_are_the_last_mlps(gpt2: LM) -> None:
    assert last_layers(gpt2) == (0, 1, 2)
    names = [place.name.removeprefix("transformer.h.") for place in target_modules(gpt2, (2, 1))]
    assert names == [
        "1.mlp.c_fc.weight", "1.mlp.c_proj.weight", "2.mlp.c_fc.weight", "2.mlp.c_proj.weight",
    ]  # fmt: skip
    with pytest.raises(BadSetting, match="layer 3 is out of range"):
        target_modules(gpt2, (3,))


# ---- slow twins


def plain_mend(lm: LM, network: MendNetwork, fact: Fact) -> dict[str, Tensor]:
    """MEND fact by fact, token by token: whole forward passes, the formulas as they are written."""
    line = token_row(edit_request(lm, fact))
    names = [name for name, _, _ in network.design.places]
    modules = {name: lm.model.get_submodule(name.removesuffix(".weight")) for name in names}
    read: dict[str, Tensor] = {}
    put: dict[str, Tensor] = {}
    handles = []
    for name, module in modules.items():

        def keep(_: Any, args: Any, output: Tensor, name: str = name) -> Tensor:
            read[name] = args[0].detach().reshape(len(line.ids), -1)
            output.retain_grad()
            put[name] = output
            return output.clone()  # Falcon adds to it in place

        handles.append(module.register_forward_hook(keep))
    try:
        for name in names:
            lm.model.get_parameter(name).requires_grad_(True)
        logits = lm.model(torch.tensor([line.ids])).logits[0, list(line.reads)]
        torch.nn.functional.cross_entropy(logits, torch.tensor(line.labels)).backward()
    finally:
        for handle in handles:
            handle.remove()
        lm.model.requires_grad_(False)
        lm.model.zero_grad()
    found = {}
    for i, name in enumerate(names):
        slopes: Any = put[name].grad
        usual_x, usual_delta = network.usual(i)
        total = torch.zeros(network.design.places[i][2], network.design.places[i][1])
        for x, delta in zip(read[name], slopes.reshape(len(line.ids), -1), strict=True):
            if not delta.any():
                continue
            spread_x, spread = usual_x.spread + 1e-7, usual_delta.spread + 1e-7
            h = torch.cat([(x - usual_x.mean) / spread_x, (delta - usual_delta.mean) / spread])
            kind, seat = network.seats[i]
            for layer in network.networks[kind]:  # type: ignore
                moved = layer.up @ (layer.down @ h) + layer.bias
                moved = moved * layer.scale[seat] + layer.shift[seat]
                h = h + (moved.clamp(min=0) if layer.cut else moved)
            x_, delta_ = h[: len(x)], h[len(x) :]
            total -= network.log_rates[i].exp() * torch.outer(delta_, x_)
        found[name] = total.detach()
    return found


def plain_ke(lm: LM, network: KeNetwork, fact: Fact) -> dict[str, Tensor]:
    """KE fact by fact: the dense gradient, gated entry by entry."""
    names = [name for name, _, _ in network.design.places]
    gradients = autograd(lm, fact, names)
    line = token_row(edit_request(lm, fact))
    embedded = lm.embed(torch.tensor([line.ids]))
    normed = torch.nn.functional.layer_norm(embedded, embedded.shape[-1:])
    states, _ = network.lstm(normed)
    half = network.design.to_dict()["lstm"]
    ends = torch.cat([states[0, -1, :half], states[0, 0, half:]])
    state = network.linear(ends).tanh()
    found = {}
    for i, name in enumerate(names):
        gate: Gate = network.gates[i]  # type: ignore
        keys, values = gate.keys, gate.values
        said = gate.outer(gate.inner(state).tanh())
        c, r, c_, r_, g = said.split([keys, values, keys, values, 1])
        a, b = torch.outer(r.softmax(0), c) * values, torch.outer(r_.softmax(0), c_)
        usual_x, usual_delta = network.usual(i)
        gradient = gradients[name] / (usual_x.size * usual_delta.size)
        found[name] = (gate.log_rate.exp() * g.sigmoid() * (gradient * a + b)).detach()
    return found


def plainly(lm: LM, network: Any, fact: Fact) -> dict[str, Tensor]:
    if isinstance(network, MendNetwork):
        return plain_mend(lm, network, fact)
    return plain_ke(lm, network, fact)


@pytest.mark.parametrize("method", EDITORS)
def test_an_edit_is_the_plain_formula(worded: LM, method: str) -> None:
    """For every family; many facts in one batch, one by one, and all in one edit."""
    before = {name: weight.clone() for name, weight in worded.model.named_parameters()}
    network = a_network(worded, method)
    learned = EDITORS[method](weights=weights_of(worded, network))
    assert isinstance(learned, Editor)
    edits = learned.each(worded, FACTS)
    wanted = [plainly(worded, network, fact) for fact in FACTS]
    for fact, edit, plain in zip(FACTS, edits, wanted, strict=True):
        assert (edit.facts, edit.method) == ((fact,), method)
        alone = learned(worded, [fact])
        assert edit.checks is not None
        assert set(edit.changes) == set(plain)
        for name, change in edit.changes.items():
            assert near(change.matrix(), plain[name], 1e-4), name
            assert near(alone.changes[name].matrix(), plain[name], 1e-4), name
    together = learned(worded, FACTS)
    assert together.facts == tuple(FACTS)
    for name, change in together.changes.items():
        total = torch.stack([plain[name] for plain in wanted]).sum(0)
        assert near(change.matrix(), total, 1e-4), name
    for name, weight in worded.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "falcon", "bloom"])
def test_learning_sees_the_written_weights(family: str, method: str) -> None:
    """The losses of facts side by side, and their slope in the network, as if weights changed."""
    lm = small(family)
    network = a_network(lm, method)
    network.requires_grad_(True)
    places = target_modules(lm, (1, 2))
    halves, lines = SplitModel(lm, 1), lines_of(lm, FACTS)
    factors, _ = gradient_factors(lm, places, halves, halves.below(lines.ids)[0], lines)
    other = TokenBatch.of([TokenRow(x.ids, x.reads, x.labels) for x in _shifted(lm)], lm.device,
                     lines.ids.shape[1])  # fmt: skip

    def slopes(loss: Tensor) -> list[Tensor]:
        parameters = list(network.parameters())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [
            torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)
        ]

    changes = network(factors, told_of(lm, lines))
    states = torch.stack([halves.below(x.ids)[0] for x in (lines, other)], 1).flatten(0, 1)
    with changes_applied(places, changes):
        hidden = halves.above(states).unflatten(0, (len(FACTS), 2))
    fast = torch.stack(
        [x.losses(x.logs(lm, hidden[:, i])) for i, x in enumerate((lines, other))], dim=1
    )
    told = slopes(fast.sum())
    again = network(factors, told_of(lm, lines))
    slow = []
    for i in range(len(FACTS)):
        written = {
            place.name: lm.model.get_parameter(place.name)
            + (change.matrix()[i].T if lm.family.transposed else change.matrix()[i])
            for place, change in zip(places, again, strict=True)
        }
        for x in (lines, other):
            line = TokenBatch.of([_line(x, i)], lm.device)
            logits = torch.func.functional_call(lm.model, written, (line.ids,)).logits
            reads = logits[0, line.reads[0]]
            slow.append(torch.nn.functional.cross_entropy(reads, line.labels[0]))
    assert torch.allclose(fast.flatten(), torch.stack(slow), rtol=1e-4)
    for mine, theirs in zip(told, slopes(torch.stack(slow).sum()), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max() + 1e-3))


def _shifted(lm: LM) -> list[TokenRow]:
    """Each fact with the prompt of the next."""
    lines = [token_row(edit_request(lm, fact)) for fact in FACTS]
    return [*lines[1:], lines[0]]


def _line(lines: TokenBatch, i: int) -> TokenRow:
    count, length = int(lines.real[i].sum()), int(lines.lengths[i])
    cut = [x[i, :n].tolist() for x, n in ((lines.ids, length), (lines.reads, count),
                                          (lines.labels, count))]  # fmt: skip
    return TokenRow(*map(tuple, cut))  # type: ignore


def test_a_row_sees_its_edit(gpt2: LM) -> None:
    """Edits of many tokens go to rows as their weights would say."""
    learned = Mend(weights=weights_of(gpt2, a_network(gpt2, "mend")))
    edits = learned.each(gpt2, FACTS)
    ids = torch.tensor([encode(gpt2, FACTS[0].text).ids] * len(edits))
    with edited(gpt2, edits):
        together = gpt2.model(ids).logits
    for edit, logits in zip(edits, together, strict=True):
        with edit.applied(gpt2, force=True):
            assert torch.allclose(gpt2.model(ids[:1]).logits[0], logits, atol=1e-4)


# ---- what is usual


def test_usual_is_mean_and_spread_in_whatever_pieces() -> None:
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
    usual = RunningNorm(4)
    assert usual.size == pytest.approx(1.0)
    assert torch.equal(usual.spread, torch.ones(4))
    for piece in rows.split([1, 0, 20, 29]):
        usual.observe(piece)
    assert torch.allclose(usual.mean, rows.mean(0), atol=1e-5)
    assert torch.allclose(usual.spread, rows.std(0), atol=1e-5)
    assert float(usual.size) == pytest.approx(float(rows.square().mean().sqrt()), rel=1e-4)


def test_mend_begins_as_a_step_against_the_gradient(gpt2: LM) -> None:
    network = a_network(gpt2, "mend", spread=0.0)
    places, lines, halves = target_modules(gpt2, (1, 2)), lines_of(gpt2, FACTS), SplitModel(gpt2, 1)
    factors, _ = gradient_factors(gpt2, places, halves, halves.below(lines.ids)[0], lines)
    for i, change in enumerate(network(factors, told_of(gpt2, lines))):
        usual_x, usual_delta = network.usual(i)
        real = factors[i].real[..., None]
        x, delta = usual_x.normed(factors[i].x) * real, usual_delta.normed(factors[i].delta) * real
        assert torch.allclose(change.matrix(), -1e-2 * delta.mT @ x, atol=1e-4)


# ---- many facts, and bad ones


def test_a_fact_that_cannot_be_written_does_not_hold_up_the_others(gpt2: LM) -> None:
    learned = Mend(weights=weights_of(gpt2, a_network(gpt2, "mend")), facts_per_pass=2)
    heard: list[float] = []
    empty = Fact(subject="France", prompt="The capital of {} is", target=" ")
    found = learned.attempt(gpt2, [FACTS[0], empty, *FACTS[1:]], progress=heard.append)
    assert [isinstance(x, Edit) for x in found] == [True, False, True, True]
    assert sum(heard) == pytest.approx(1)
    with pytest.raises(BadFact, match="there are no facts"):
        learned(gpt2, [])


def test_an_edit_that_is_no_number_is_named(gpt2: LM) -> None:
    network = a_network(gpt2, "mend")
    network.log_rates.data[0] = float("nan")
    with pytest.raises(DidNotConverge, match=r"Eiffel Tower.*no number"):
        Mend(weights=weights_of(gpt2, network)).each(gpt2, FACTS[:1])


def test_scale_multiplies(gpt2: LM) -> None:
    weights = weights_of(gpt2, a_network(gpt2, "ke"))
    one, half = (Ke(weights=weights, scale=s)(gpt2, FACTS[:1]) for s in (1.0, 0.5))
    for name, change in one.changes.items():
        assert near(half.changes[name].matrix(), change.matrix() / 2, 1e-5)


# ---- weights as files


def written(lm: LM, method: str, path: Path, layers: Sequence[int] = (1, 2)) -> Path:
    network = a_network(lm, method, layers)
    path.write_bytes(pack_weights(network, lm.name, lm.fingerprint, {"data": "counterfact"}))
    return path


@pytest.mark.parametrize("method", EDITORS)
def test_weights_come_back(gpt2: LM, tmp_path: Path, method: str) -> None:
    path = written(gpt2, method, tmp_path / "w.safetensors")
    state = torch.random.get_rng_state()
    read = EDITORS[method].load(path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert read.row == f"{method}-cf"
    assert len(read.to_dict()["weights_sha256"]) == 64
    direct = EDITORS[method](weights=weights_of(gpt2, a_network(gpt2, method)))
    for one, other in zip(read.each(gpt2, FACTS), direct.each(gpt2, FACTS), strict=True):
        for name, change in one.changes.items():
            assert torch.equal(change.matrix(), other.changes[name].matrix())
    assert editor(method, weights=path).to_dict() == read.to_dict()


def test_weights_that_do_not_fit_are_named(gpt2: LM, tmp_path: Path) -> None:
    path = written(gpt2, "mend", tmp_path / "w.safetensors")
    other = small("llama")
    with pytest.raises(BadEditorWeights, match=r"for tiny gpt2.*not for tiny llama.*train mend"):
        Mend.load(path).resolve(other)
    with pytest.raises(BadEditorWeights, match=r"weights of 'mend', not of ke"):
        Ke.load(path)
    with pytest.raises(BadEditorWeights, match="there is no file"):
        Mend.load(tmp_path / "nothing")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BadEditorWeights, match="cannot be read"):
        load_weights(path)
    with pytest.raises(BadSetting, match=r"mend must be trained first.*factscope train mend"):
        Mend()(gpt2, FACTS)


def test_weights_of_other_layers_are_named(gpt2: LM, tmp_path: Path) -> None:
    """The same model by its fingerprint, but the file's places are not those of its layers."""
    network = a_network(gpt2, "mend", (0, 1))
    design = network.design
    wrong = {**design.to_dict(), "layers": (1, 2)}
    network.design = type(design).from_dict(wrong)
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack_weights(network, gpt2.name, gpt2.fingerprint, {}))
    with pytest.raises(BadEditorWeights, match=r"change transformer\.h\.0.*layers 1, 2 have"):
        Mend.load(path).resolve(gpt2)
    network.design = type(design).from_dict({**design.to_dict(), "layers": (1, 7)})
    path.write_bytes(pack_weights(network, gpt2.name, gpt2.fingerprint, {}))
    with pytest.raises(BadEditorWeights, match="layer 7 is out of range"):
        Mend.load(path).resolve(gpt2)
