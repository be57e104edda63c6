"""MEND and KE against slow reference implementations, and their weights files."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from factscope.editing.contexts import TokenBatch, TokenRow, edit_request
from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.editing.hypernet.model import (
    Gate,
    KeNetwork,
    MendNetwork,
    RunningNorm,
    SplitModel,
    changes_applied,
    gradient_factors,
    load_weights,
    pack_weights,
    target_modules,
)
from factscope.editing.per_row import edited
from factscope.editing.settings import Ke, Mend, editor
from factscope.errors import BadEditorWeights, BadFact, BadSetting, DidNotConverge
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from families import FAMILIES
from hypernets import EDITORS, FACTS, factors_of, make_network, tiny_lm, token_batch, weights_of


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def lm(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family."""
    return tiny_lm(request.param)


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny_lm("gpt2")


def autograd(lm: LM, fact: Fact, names: Sequence[str]) -> dict[str, Tensor]:
    """The gradient of a fact's loss by torch, on the whole model, in the paper's orientation."""
    weights = {name: lm.model.get_parameter(name) for name in names}
    for weight in weights.values():
        weight.requires_grad_(True)
    row = edit_request(lm, fact).rows[0]
    logits = lm.model(torch.tensor([row.ids])).logits[0, list(row.positions)]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels))
    gradients = torch.autograd.grad(loss, list(weights.values()))
    for weight in weights.values():
        weight.requires_grad_(False)
    transposed = lm.family.transposed
    return {name: (x.T if transposed else x) for name, x in zip(names, gradients, strict=True)}


def near(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


# ---- gradient factors


def test_gradient_factors_multiply_to_the_gradient(lm: LM) -> None:
    """In a batch of facts; with Conv1D's transposed weights and flattened rows too."""
    split = SplitModel(lm, target_modules(lm, range(lm.n_layers)))
    batch = token_batch(lm, FACTS)
    factors, losses = gradient_factors(split, split.below(batch.ids)[0], batch)
    for i, fact in enumerate(FACTS):
        wanted = autograd(lm, fact, [target.shape.name for target in split.targets])
        for target, some in zip(split.targets, factors, strict=True):
            gradient = some.delta[i].T @ some.x[i]
            assert gradient.shape == (target.shape.values, target.shape.keys)
            assert near(gradient, wanted[target.shape.name], 1e-5), target.shape.name
        one = token_batch(lm, [fact])
        log_probs = one.log_probs(lm, split.below(one.ids)[1])
        assert losses[i].item() == pytest.approx(one.losses(log_probs).item(), rel=1e-5)
    assert all(weight.grad is None for weight in lm.model.parameters())


def test_tokens_without_influence_on_the_loss_are_masked(gpt2: LM) -> None:
    split = SplitModel(gpt2, target_modules(gpt2, (1, 2)))
    factors = factors_of(split, token_batch(gpt2, FACTS))
    last = factors[-1].mask  # of the last layer only the scored positions
    for i, fact in enumerate(FACTS):
        positions = edit_request(gpt2, fact).rows[0].positions
        assert last[i].nonzero()[:, 0].tolist() == list(positions)
        assert not factors[0].mask[i, max(positions) + 1 :].any()


def test_target_modules_are_the_last_mlps(gpt2: LM) -> None:
    assert {target.layer for target in target_modules(gpt2)} == {0, 1, 2}
    names = [x.shape.name.removeprefix("transformer.h.") for x in target_modules(gpt2, (2, 1))]
    assert names == [
        "1.mlp.c_fc.weight", "1.mlp.c_proj.weight", "2.mlp.c_fc.weight", "2.mlp.c_proj.weight",
    ]  # fmt: skip
    with pytest.raises(BadSetting, match=r"layer is 3; .* layers 0 to 2"):
        target_modules(gpt2, (3,))


# ---- reference implementations


def reference_mend(lm: LM, network: MendNetwork, fact: Fact) -> dict[str, Tensor]:
    """MEND token by token: whole forward passes, the formulas as in the paper."""
    row = edit_request(lm, fact).rows[0]
    names = [shape.name for shape in network.weights.shapes]
    modules = {name: lm.model.get_submodule(name.removesuffix(".weight")) for name in names}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, module in modules.items():

        def keep(_: Any, args: Any, output: Tensor, name: str = name) -> Tensor:
            inputs[name] = args[0].detach().reshape(len(row.ids), -1)
            output.retain_grad()
            outputs[name] = output
            return output.clone()  # Falcon adds to it in place

        handles.append(module.register_forward_hook(keep))
    try:
        for name in names:
            lm.model.get_parameter(name).requires_grad_(True)
        logits = lm.model(torch.tensor([row.ids])).logits[0, list(row.positions)]
        torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels)).backward()
    finally:
        for handle in handles:
            handle.remove()
        lm.model.requires_grad_(False)
        lm.model.zero_grad()
    found = {}
    for i, name in enumerate(names):
        gradient: Any = outputs[name].grad
        x_norm, delta_norm = network.norms(i)
        total = torch.zeros(network.weights.shapes[i].values, network.weights.shapes[i].keys)
        for x, delta in zip(inputs[name], gradient.reshape(len(row.ids), -1), strict=True):
            if not delta.any():
                continue
            x_std, delta_std = x_norm.std + 1e-7, delta_norm.std + 1e-7
            h = torch.cat([(x - x_norm.mean) / x_std, (delta - delta_norm.mean) / delta_std])
            number, slot = network.slots[i]
            for layer in network.networks[number]:  # type: ignore
                update = layer.up @ (layer.down @ h) + layer.bias
                update = update * layer.scale[slot] + layer.shift[slot]
                h = h + (update.clamp(min=0) if layer.relu else update)
            x_, delta_ = h[: len(x)], h[len(x) :]
            total -= network.log_edit_lr[i].exp() * torch.outer(delta_, x_)
        found[name] = total.detach()
    return found


def reference_ke(lm: LM, network: KeNetwork, fact: Fact) -> dict[str, Tensor]:
    """KE with the dense gradient, gated entry by entry."""
    names = [shape.name for shape in network.weights.shapes]
    gradients = autograd(lm, fact, names)
    row = edit_request(lm, fact).rows[0]
    embedded = lm.embed(torch.tensor([row.ids]))
    states, _ = network.lstm(torch.nn.functional.layer_norm(embedded, embedded.shape[-1:]))
    half = network.config.lstm_width
    encoded = network.linear(torch.cat([states[0, -1, :half], states[0, 0, half:]])).tanh()
    found = {}
    for i, name in enumerate(names):
        gate: Gate = network.gates[i]  # type: ignore
        keys, values = gate.keys, gate.values
        outputs = gate.outer(gate.inner(encoded).tanh())
        c, r, c_, r_, g = outputs.split([keys, values, keys, values, 1])
        a, b = torch.outer(r.softmax(0), c) * values, torch.outer(r_.softmax(0), c_)
        x_norm, delta_norm = network.norms(i)
        gradient = gradients[name] / (x_norm.rms * delta_norm.rms)
        found[name] = (gate.log_edit_lr.exp() * g.sigmoid() * (gradient * a + b)).detach()
    return found


def reference(lm: LM, network: Any, fact: Fact) -> dict[str, Tensor]:
    if isinstance(network, MendNetwork):
        return reference_mend(lm, network, fact)
    return reference_ke(lm, network, fact)


@pytest.mark.parametrize("method", EDITORS)
def test_edits_equal_the_reference_implementation(lm: LM, method: str) -> None:
    """For every family; facts in a batch, one by one, and all in one edit."""
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    network = make_network(lm, method)
    trained = EDITORS[method](weights=weights_of(lm, network))
    assert isinstance(trained, Editor)
    edits = trained.each(lm, FACTS)
    references = [reference(lm, network, fact) for fact in FACTS]
    for fact, edit, wanted in zip(FACTS, edits, references, strict=True):
        assert (edit.facts, edit.method) == ((fact,), method)
        alone = trained(lm, [fact])
        assert edit.checks is not None
        assert set(edit.changes) == set(wanted)
        for name, change in edit.changes.items():
            assert near(change.matrix(), wanted[name], 1e-4), name
            assert near(alone.changes[name].matrix(), wanted[name], 1e-4), name
    together = trained(lm, FACTS)
    assert together.facts == tuple(FACTS)
    for name, change in together.changes.items():
        total = torch.stack([wanted[name] for wanted in references]).sum(0)
        assert near(change.matrix(), total, 1e-4), name
    for name, weight in lm.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "falcon", "bloom"])
def test_training_gradients_equal_those_of_edited_weights(family: str, method: str) -> None:
    """Losses of facts in a batch, and their gradients for the network's parameters."""
    lm = tiny_lm(family)
    network = make_network(lm, method)
    network.requires_grad_(True)
    split = SplitModel(lm, target_modules(lm, (1, 2)))
    batch = token_batch(lm, FACTS)
    factors = factors_of(split, batch)
    rows = [edit_request(lm, fact).rows[0] for fact in FACTS]
    other = TokenBatch.of([*rows[1:], rows[0]], lm.device, batch.ids.shape[1])

    def gradients(loss: Tensor) -> list[Tensor]:
        parameters = list(network.parameters())
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [
            torch.zeros_like(p) if x is None else x for p, x in zip(parameters, found, strict=True)
        ]

    changes = network(factors, network.encode(lm.embed(batch.ids), batch.lengths))
    states = torch.stack([split.below(x.ids)[0] for x in (batch, other)], 1).flatten(0, 1)
    with changes_applied(split.targets, changes):
        hidden = split.above(states).unflatten(0, (len(FACTS), 2))
    fast = torch.stack(
        [x.losses(x.log_probs(lm, hidden[:, i])) for i, x in enumerate((batch, other))], dim=1
    )
    found = gradients(fast.sum())
    again = network(factors, network.encode(lm.embed(batch.ids), batch.lengths))
    slow = []
    for i in range(len(FACTS)):
        deltas = [change.B[i] @ change.A[i] for change in again]
        weights = {
            target.shape.name: lm.model.get_parameter(target.shape.name)
            + (delta.T if lm.family.transposed else delta)
            for target, delta in zip(split.targets, deltas, strict=True)
        }
        for x in (batch, other):
            one = TokenBatch.of([unpadded(x, i)], lm.device)
            logits = torch.func.functional_call(lm.model, weights, (one.ids,)).logits
            scored = logits[0, one.positions[0]]
            slow.append(torch.nn.functional.cross_entropy(scored, one.labels[0]))
    assert torch.allclose(fast.flatten(), torch.stack(slow), rtol=1e-4)
    for mine, theirs in zip(found, gradients(torch.stack(slow).sum()), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max() + 1e-3))


def unpadded(batch: TokenBatch, i: int) -> TokenRow:
    labels, tokens = int(batch.mask[i].sum()), int(batch.lengths[i])
    return TokenRow(
        ids=tuple(batch.ids[i, :tokens].tolist()),
        positions=tuple(batch.positions[i, :labels].tolist()),
        labels=tuple(batch.labels[i, :labels].tolist()),
    )


def test_edits_of_high_rank_apply_per_row(gpt2: LM) -> None:
    trained = Mend(weights=weights_of(gpt2, make_network(gpt2, "mend")))
    edits = trained.each(gpt2, FACTS)
    ids = torch.tensor([encode(gpt2, FACTS[0].text).ids] * len(edits))
    with edited(gpt2, edits):
        together = gpt2.model(ids).logits
    for edit, logits in zip(edits, together, strict=True):
        with edit.applied(gpt2, force=True):
            assert torch.allclose(gpt2.model(ids[:1]).logits[0], logits, atol=1e-4)


# ---- networks


def test_running_norm_does_not_depend_on_the_batches() -> None:
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1
    norm = RunningNorm(4)
    assert norm.rms == pytest.approx(1.0)
    assert torch.equal(norm.std, torch.ones(4))
    for batch in rows.split([1, 0, 20, 29]):
        norm.update(batch)
    assert torch.allclose(norm.mean, rows.mean(0), atol=1e-5)
    assert torch.allclose(norm.std, rows.std(0), atol=1e-5)
    assert float(norm.rms) == pytest.approx(float(rows.square().mean().sqrt()), rel=1e-4)


def test_untrained_mend_is_a_step_against_the_gradient(gpt2: LM) -> None:
    network = make_network(gpt2, "mend", spread=0.0)
    split, batch = SplitModel(gpt2, target_modules(gpt2, (1, 2))), token_batch(gpt2, FACTS)
    factors = factors_of(split, batch)
    encoded = network.encode(gpt2.embed(batch.ids), batch.lengths)
    for i, change in enumerate(network(factors, encoded)):
        x_norm, delta_norm = network.norms(i)
        mask = factors[i].mask[..., None]
        x, delta = x_norm.normalise(factors[i].x), delta_norm.normalise(factors[i].delta)
        wanted = -1e-2 * (delta * mask).mT @ (x * mask)
        assert torch.allclose(change.B @ change.A, wanted, atol=1e-4)


# ---- facts


def test_a_bad_fact_does_not_stop_the_others(gpt2: LM) -> None:
    trained = Mend(weights=weights_of(gpt2, make_network(gpt2, "mend")), facts_per_pass=2)
    fractions: list[float] = []
    empty = Fact(subject="France", prompt="The capital of {} is", target=" ")
    found = trained.attempt(gpt2, [FACTS[0], empty, *FACTS[1:]], progress=fractions.append)
    assert [isinstance(x, Edit) for x in found] == [True, False, True, True]
    assert sum(fractions) == pytest.approx(1)
    with pytest.raises(BadFact, match="there are no facts"):
        trained(gpt2, [])


def test_an_edit_that_is_not_finite_is_an_error(gpt2: LM) -> None:
    network = make_network(gpt2, "mend")
    network.log_edit_lr.data[0] = float("nan")
    with pytest.raises(DidNotConverge, match=r"Eiffel Tower.*not finite"):
        Mend(weights=weights_of(gpt2, network)).each(gpt2, FACTS[:1])


def test_scale_multiplies_the_edit(gpt2: LM) -> None:
    weights = weights_of(gpt2, make_network(gpt2, "ke"))
    one, half = (Ke(weights=weights, scale=s)(gpt2, FACTS[:1]) for s in (1.0, 0.5))
    for name, change in one.changes.items():
        assert near(half.changes[name].matrix(), change.matrix() / 2, 1e-5)


# ---- weights files


def written(lm: LM, method: str, path: Path, layers: Sequence[int] = (1, 2)) -> Path:
    network = make_network(lm, method, layers)
    path.write_bytes(pack_weights(weights_of(lm, network, data="counterfact")))
    return path


@pytest.mark.parametrize("method", EDITORS)
def test_weights_files_round_trip(gpt2: LM, tmp_path: Path, method: str) -> None:
    path = written(gpt2, method, tmp_path / "w.safetensors")
    state = torch.random.get_rng_state()
    loaded = EDITORS[method].load(path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert loaded.row == f"{method}-cf"
    assert len(loaded.to_dict()["weights_sha256"]) == 64
    direct = EDITORS[method](weights=weights_of(gpt2, make_network(gpt2, method)))
    for one, other in zip(loaded.each(gpt2, FACTS), direct.each(gpt2, FACTS), strict=True):
        for name, change in one.changes.items():
            assert torch.equal(change.matrix(), other.changes[name].matrix())
    assert editor(method, weights=path).to_dict() == loaded.to_dict()
    assert editor(method, weights=str(path)).to_dict() == loaded.to_dict()


def version_1(lm: LM, network: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a file of factscope 0.1.0.dev0."""
    config = asdict(network.config)
    old = {
        "edit_lr": "rate", "hidden_layers": "hidden", "lstm_width": "lstm",
        "condition_width": "condition", "hidden_width": "hidden",
    }  # fmt: skip
    weights = network.weights
    design = {"places": weights.shapes, "layers": weights.layers, "width": weights.hidden_size}
    header = {
        "format": "factscope-hypernetwork 1",
        "method": network.method,
        "model": lm.name,
        "fingerprint": lm.fingerprint,
        "design": {**design, **{old.get(name, name): x for name, x in config.items()}},
        "trained": {"data": "zsre", "step": 7},
    }
    names = (("x_norms", "usual_x"), ("delta_norms", "usual_delta"), (".m2", ".squares"))
    rate = "log_rates" if network.method == "mend" else "log_rate"
    tensors = {}
    for name, tensor in network.state_dict().items():
        for new, was in (*names, ("log_edit_lr", rate)):
            name = name.replace(new, was)
        tensors[name] = tensor.contiguous()
    return header, tensors


@pytest.mark.parametrize("method", EDITORS)
def test_weights_files_of_version_1_are_read(gpt2: LM, tmp_path: Path, method: str) -> None:
    path = tmp_path / "w.safetensors"
    header, tensors = version_1(gpt2, make_network(gpt2, method))
    assert any("usual" in name for name in tensors)
    save_file(tensors, path, {"factscope": json.dumps(header)})
    loaded = EDITORS[method].load(path)
    assert (loaded.row, loaded.trained.training["step"]) == (f"{method}-zsre", 7)
    direct = EDITORS[method](weights=weights_of(gpt2, make_network(gpt2, method)))
    for one, other in zip(loaded.each(gpt2, FACTS), direct.each(gpt2, FACTS), strict=True):
        for name, change in one.changes.items():
            assert torch.equal(change.matrix(), other.changes[name].matrix())
    header["format"] = "factscope-hypernetwork 3"
    save_file(tensors, path, {"factscope": json.dumps(header)})
    with pytest.raises(BadEditorWeights, match=r"has format 3.*reads 1 and 2; update factscope"):
        load_weights(path)


def test_weights_that_cannot_be_used_are_errors(gpt2: LM, tmp_path: Path) -> None:
    path = written(gpt2, "mend", tmp_path / "w.safetensors")
    other = tiny_lm("llama")
    with pytest.raises(BadEditorWeights, match=r"for tiny gpt2.*not for tiny llama.*train mend"):
        Mend.load(path).resolve(other)
    with pytest.raises(BadEditorWeights, match=r"weights of 'mend', not of ke"):
        Ke.load(path)
    with pytest.raises(BadEditorWeights, match="there is no file"):
        Mend.load(tmp_path / "nothing")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BadEditorWeights, match="cannot read"):
        load_weights(path)
    with pytest.raises(BadSetting, match=r"mend needs trained weights.*factscope train mend"):
        Mend()(gpt2, FACTS)


def test_weights_for_other_layers_are_an_error(gpt2: LM, tmp_path: Path) -> None:
    """The model has the right fingerprint, but other weights in the layers that the file names."""
    network = make_network(gpt2, "mend", (0, 1))
    weights = network.weights
    network.weights = replace(weights, layers=(1, 2))
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack_weights(weights_of(gpt2, network)))
    with pytest.raises(BadEditorWeights, match=r"change transformer\.h\.0.*layers 1, 2 have"):
        Mend.load(path).resolve(gpt2)
    network.weights = replace(weights, layers=(1, 7))
    path.write_bytes(pack_weights(weights_of(gpt2, network)))
    with pytest.raises(BadEditorWeights, match=r"layer is 7; .* layers 0 to 2"):
        Mend.load(path).resolve(gpt2)
