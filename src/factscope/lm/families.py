"""The table of model families: where each keeps its embedding, blocks, MLP and head.

A family is a row, never a branch. Two names of a row carry the method: the *output weights* of
the attention and of the MLP. What such a module returns is what the paper calls the
contribution a or m of its layer (Gemma 2 and 3 and OLMo 2 put one more norm between it and the
residual stream); the MLP's is the W_proj that ROME rewrites. Naming the
output weight rather than the module around it also settles what differs between families:
some modules return tuples, BLOOM's add the residual themselves.
"""

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.errors import BadModelFile, UnknownFamily

if TYPE_CHECKING:
    from factscope.lm.load import LM

__all__ = ["FAMILIES", "Family", "check_family", "family_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family's names."""

    embed: str
    """Token embedding; its output is what a corrupted run disturbs."""
    blocks: str
    """The list of transformer blocks."""
    attn_in: tuple[str, ...]
    """Within a block, what makes queries, keys and values: one module or three."""
    attn_out: str
    """Within a block, the attention's output weight: it returns the contribution a."""
    mlp_in: tuple[str, ...]
    """Within a block, what makes the MLP's keys: one module, or two where one gates the other."""
    mlp_out: str
    """Within a block, the MLP's output weight W_proj: it returns the contribution m."""
    mlp_act: str
    """Within a block, the MLP's nonlinearity; in a gated MLP it sees the gate."""
    norm: tuple[str, ...]
    """What a last state goes through before the head; a name that the model lacks is left out."""
    transposed: bool = False
    """Whether weights are stored as (key, value), as in GPT-2's Conv1D."""
    needs_bos: bool = False
    """Whether a prompt must begin with BOS even if the tokenizer forgets it, as some GGUF do."""
    packs: bool = True
    """Whether attention goes by the given mask and positions alone, so that several stretches of
    a prompt can share one row. GPT-Neo also masks by a key's index in the row."""


QKV = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


def _within(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


def _llama(
    *,
    attn_in: tuple[str, ...] = QKV,
    mlp_in: tuple[str, ...] = GATED,
    mlp_act: str = "mlp.act_fn",
    needs_bos: bool = False,
) -> Family:
    """The names that LLaMA introduced and most later families kept."""
    return Family(
        attn_in=_within("self_attn", *attn_in),
        embed="model.embed_tokens",
        blocks="model.layers",
        attn_out="self_attn.o_proj",
        mlp_in=_within("mlp", *mlp_in),
        mlp_out="mlp.down_proj",
        mlp_act=mlp_act,
        norm=("model.norm",),
        needs_bos=needs_bos,
    )


def _transformer(
    attn_in: tuple[str, ...], attn_out: str, mlp_in: str, mlp_out: str, **fields: bool
) -> Family:
    """The names of GPT-2 and what grew from it."""
    return Family(
        attn_in=attn_in,
        embed="transformer.wte",
        blocks="transformer.h",
        attn_out=attn_out,
        mlp_in=(mlp_in,),
        mlp_out=mlp_out,
        mlp_act="mlp.act",
        norm=("transformer.ln_f",),
        **fields,
    )


def _bigscience(mlp_act: str) -> Family:
    """BLOOM's names, which Falcon shares."""
    return Family(
        embed="transformer.word_embeddings",
        blocks="transformer.h",
        attn_in=("self_attention.query_key_value",),
        attn_out="self_attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        mlp_act=mlp_act,
        norm=("transformer.ln_f",),
    )


FAMILIES: dict[str, Family] = {
    "bloom": _bigscience("mlp.gelu_impl"),
    "falcon": _bigscience("mlp.act"),
    "gemma": _llama(needs_bos=True),
    "gemma2": _llama(needs_bos=True),
    "gemma3_text": _llama(needs_bos=True),
    "gpt2": _transformer(
        ("attn.c_attn",), "attn.c_proj", "mlp.c_fc", "mlp.c_proj", transposed=True
    ),
    "gpt_neo": _transformer(
        _within("attn.attention", *QKV),
        "attn.attention.out_proj",
        "mlp.c_fc",
        "mlp.c_proj",
        packs=False,
    ),
    "gpt_neox": Family(
        embed="gpt_neox.embed_in",
        blocks="gpt_neox.layers",
        attn_in=("attention.query_key_value",),
        attn_out="attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
        mlp_act="mlp.act",
        norm=("gpt_neox.final_layer_norm",),
    ),
    "gptj": _transformer(_within("attn", *QKV), "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    "llama": _llama(),
    "mistral": _llama(),
    "olmo2": _llama(),
    "opt": Family(
        embed="model.decoder.embed_tokens",
        blocks="model.decoder.layers",
        attn_in=_within("self_attn", *QKV),
        attn_out="self_attn.out_proj",
        mlp_in=("fc1",),
        mlp_out="fc2",
        mlp_act="activation_fn",
        norm=("model.decoder.final_layer_norm", "model.decoder.project_out"),
    ),
    "phi3": _llama(attn_in=("qkv_proj",), mlp_in=("gate_up_proj",), mlp_act="mlp.activation_fn"),
    "qwen2": _llama(),
    "qwen3": _llama(),
}
"""`config.model_type` → row."""


def family_of(model: nn.Module) -> Family:
    """The row of a model's family."""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise unknown_family(family)
    return FAMILIES[family]


def unknown_family(family: str) -> UnknownFamily:
    """The error for a family without a row."""
    return UnknownFamily(
        f"the family {family!r} has no row in factscope.lm.families.FAMILIES; "
        f"known: {', '.join(sorted(FAMILIES))}. CONTRIBUTING.md says how to add one"
    )


def check_family(lm: "LM") -> None:
    """Show that the row fits the model, so that a wrong one fails at once and by name.

    The names lead to modules of the right kind; W k is what the output weight returns; the blocks,
    called again one by one, reproduce the run; the last state decodes to the model's own logits.
    """
    from factscope.lm.forward import forward
    from factscope.lm.replay import Replay

    _check_names(lm)
    vocabulary = lm.embed.weight.shape[0]
    ids = torch.arange(1, 9, device=lm.device)[None] * 7919 % vocabulary
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.1
    run = forward(lm, ids, keep=("attn", "mlp"))
    with torch.no_grad():
        logits = lm.model(ids).logits
    _same(lm, "decode", lm.decode(run.states[-1]), logits, tolerance)
    again = run.inputs
    replay = Replay.whole(lm, run)
    for layer in range(lm.n_layers):
        again = replay(layer, again)
        _same(lm, f"blocks.{layer}", again, run.states[layer], tolerance)
    _check_output_weight(lm, ids, run.contributions["mlp"][0], tolerance)
    _check_language(lm)


def _check_names(lm: "LM") -> None:
    """The embedding reads the tokens; the output weights are two, and return a state's width."""
    embed, blocks = (_named(lm, lm.model, part) for part in ("embed", "blocks"))
    if embed is not lm.model.get_input_embeddings():
        raise _misfit(lm, "embed", "is not what reads the tokens")
    if not isinstance(blocks, nn.ModuleList):
        raise _misfit(lm, "blocks", f"is a {type(blocks).__name__}, not a list of blocks")
    first = blocks[0]
    attn_out, mlp_out = (_named(lm, first, part) for part in ("attn_out", "mlp_out"))
    if attn_out is mlp_out:
        raise _misfit(lm, "mlp_out", "is the attention's output weight")
    _named(lm, first, "mlp_act")
    for part in ("attn_in", "mlp_in"):
        for name in getattr(lm.family, part):
            if not hasattr(_submodule(first, name), "weight"):
                raise _misfit(lm, part, f"has no weight at {name}")
    for part, module in (("attn_out", attn_out), ("mlp_out", mlp_out)):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise _misfit(lm, part, "is not a module with a weight matrix")
        if lm.width != weight.shape[1 if lm.family.transposed else 0]:
            raise _misfit(
                lm,
                part,
                f"has a weight of {tuple(weight.shape)}, so that W k is no state of width "
                f"{lm.width}, or `transposed` is wrong",
            )


def _named(lm: "LM", owner: nn.Module, part: str) -> nn.Module:
    try:
        return owner.get_submodule(getattr(lm.family, part))
    except AttributeError as error:
        raise _misfit(lm, part, f"leads nowhere ({error})") from error


def _submodule(owner: nn.Module, name: str) -> nn.Module | None:
    try:
        return owner.get_submodule(name)
    except AttributeError:
        return None


def _misfit(lm: "LM", part: str, what: str) -> BadModelFile:
    return BadModelFile(
        f"{lm.name}: the row {lm.model.config.model_type!r} does not fit: {part} "
        f"({getattr(lm.family, part)}) {what}; see CONTRIBUTING.md on families"
    )


def _check_output_weight(lm: "LM", ids: Tensor, m: Tensor, tolerance: float) -> None:
    """W k + b must be what the MLP's output weight returns."""
    from factscope.lm.forward import mlp_keys

    k = mlp_keys(lm, ids, layer=0)
    W = lm.mlp_weight(0)
    bias = getattr(lm.mlp_out(0), "bias", None)
    value = k @ W.T if bias is None else k @ W.T + bias
    _same(lm, "mlp_out (W k)", value, m, tolerance)


def _same(
    lm: "LM", what: str, found: Float[Tensor, "..."], wanted: Float[Tensor, "..."], tolerance: float
) -> None:
    if found.shape != wanted.shape:
        raise BadModelFile(
            f"{lm.name}: the row {lm.model.config.model_type!r} does not fit: "
            f"{what} has shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        )
    scale = wanted.float().abs().max().item() or 1.0
    gap = (found.to(wanted.device).float() - wanted.float()).abs().max().item() / scale
    if not gap <= tolerance:
        raise BadModelFile(
            f"{lm.name}: the row {lm.model.config.model_type!r} does not fit: {what} differs by "
            f"{gap:.1e} of its size, more than {tolerance:g}; see CONTRIBUTING.md on families"
        )


SANE_TEXT = "The capital of France is Paris, and the capital of Italy is Rome."


def _check_language(lm: "LM") -> None:
    """Warn where plain English is likelier under chance: a tokenizer or BOS that does not fit."""
    from factscope.lm.tokens import encode

    ids = torch.tensor([encode(lm, SANE_TEXT).ids], device=lm.device)
    with torch.no_grad():
        logits = lm.model(ids).logits.float()
    loss = nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:].to(logits.device)).item()
    if loss > math.log(logits.shape[-1]) + 1:
        log.warning(
            "%s finds %r less likely than chance (%.1f nats a token): "
            "is this the model's own tokenizer, and does it need a BOS token?",
            lm.name, SANE_TEXT, loss,
        )  # fmt: skip
