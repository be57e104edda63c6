"""Check a family's entry against a loaded model, so that a wrong module name fails at load time.

1. Every name refers to a module of the right kind and shape.
2. The last hidden state, decoded, gives the model's logits.
3. The blocks, called one by one, reproduce every layer's hidden states.
4. The MLP's output projection returns W k + b.
5. An English sentence is at least as likely as chance. This check only warns, since the cause is
   the tokenizer, not the entry.
"""

import logging
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.errors import BadModelFile
from factscope.lm.forward import forward, mlp_keys
from factscope.lm.model import LM
from factscope.lm.replay import Replay
from factscope.lm.tokens import encode

log = logging.getLogger(__name__)

SENTENCE = "The capital of France is Paris, and the capital of Italy is Rome."


def check_family(lm: LM) -> None:
    """Raise BadModelFile if the family's entry does not fit the model."""
    _check_modules(lm)
    # Eight tokens, spread over the vocabulary by a prime step.
    ids = torch.arange(1, 9, device=lm.device)[None] * 7919 % lm.embed.weight.shape[0]
    run = forward(lm, ids, keep=("attn", "mlp"))
    with torch.no_grad():
        logits = lm.model(ids).logits
    _check_equal(lm, "decode", lm.decode(run.states[-1]), logits)
    states, replay = run.inputs, Replay.whole(lm, run)
    for layer in range(lm.n_layers):
        states = replay(layer, states)
        _check_equal(lm, f"blocks.{layer}", states, run.states[layer])
    value = mlp_keys(lm, ids, layer=0) @ lm.mlp_weight(0).T
    bias = getattr(lm.mlp_out(0), "bias", None)
    value = value if bias is None else value + bias
    _check_equal(lm, "mlp_out (W k)", value, run.contributions["mlp"][0])
    _warn_if_english_is_unlikely(lm)


def _check_modules(lm: LM) -> None:
    if _module(lm, lm.model, "embed") is not lm.model.get_input_embeddings():
        raise _field_error(lm, "embed", "is not the model's input embedding")
    blocks = _module(lm, lm.model, "blocks")
    if not isinstance(blocks, nn.ModuleList):
        raise _field_error(lm, "blocks", f"is a {type(blocks).__name__}, not a list of blocks")
    block = blocks[0]
    outputs = {field: _module(lm, block, field) for field in ("attn_out", "mlp_out")}
    if outputs["attn_out"] is outputs["mlp_out"]:
        raise _field_error(lm, "mlp_out", "is the attention's output projection")
    _module(lm, block, "mlp_act")
    for field in ("attn_in", "mlp_in"):
        for name in getattr(lm.family, field):
            if not hasattr(_module(lm, block, field, name), "weight"):
                raise _field_error(lm, field, f"has no weight at {name}")
    for field, module in outputs.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise _field_error(lm, field, "is not a module with a weight matrix")
        if lm.width != weight.shape[1 if lm.family.transposed else 0]:
            raise _field_error(
                lm,
                field,
                f"has a weight of shape {tuple(weight.shape)}, whose output is not a hidden state "
                f"of width {lm.width}; or `transposed` is wrong",
            )


def _module(lm: LM, parent: nn.Module, field: str, name: str | None = None) -> nn.Module:
    try:
        return parent.get_submodule(name or getattr(lm.family, field))
    except AttributeError as error:
        raise _field_error(lm, field, f"does not exist ({error})") from error


def _check_equal(
    lm: LM, what: str, actual: Float[Tensor, "..."], expected: Float[Tensor, "..."]
) -> None:
    if actual.shape != expected.shape:
        raise _error(
            lm, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.1
    scale = expected.float().abs().max().item() or 1.0
    gap = (actual.to(expected.device).float() - expected.float()).abs().max().item() / scale
    if not gap <= tolerance:  # also for NaN
        raise _error(lm, f"{what} has a relative error of {gap:.1e}, more than {tolerance:g}")


def _field_error(lm: LM, field: str, problem: str) -> BadModelFile:
    return _error(lm, f"{field} ({getattr(lm.family, field)}) {problem}")


def _error(lm: LM, problem: str) -> BadModelFile:
    return BadModelFile(
        f"{lm.name}: the family {lm.model.config.model_type!r} does not fit: {problem}; "
        "see CONTRIBUTING.md on families"
    )


def _warn_if_english_is_unlikely(lm: LM) -> None:
    ids = torch.tensor([encode(lm, SENTENCE).ids], device=lm.device)
    with torch.no_grad():
        logits = lm.model(ids).logits.float()
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:].to(logits.device)).item()
    if loss > math.log(logits.shape[-1]) + 1:
        log.warning(
            "%s finds %r less likely than chance (%.1f nats per token): "
            "is this the model's own tokenizer, and does it need a BOS token?",
            lm.name, SENTENCE, loss,
        )  # fmt: skip
