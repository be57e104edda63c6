"""The model families: the module names of each one's embedding, blocks, attention, MLP and norm.

A family is an entry in a table, never a branch. `attn_out` and `mlp_out` name the output
projections, which return what the paper calls the contributions a and m of a layer (Gemma 2 and 3
and OLMo 2 apply one more norm before adding them to the residual stream). The MLP's is the W_proj
that ROME edits. Naming the projection instead of the module around it hides that some modules
return tuples and that BLOOM's add the residual themselves.

`lm.check` tests an entry against a model.
"""

from dataclasses import dataclass

from torch import nn

from factscope.errors import UnknownFamily


@dataclass(frozen=True, kw_only=True)
class Family:
    """Module names of a family. Those of attention and MLP are relative to a block."""

    embed: str
    """Token embedding, before positions are added; a corrupted run adds noise to its output."""
    blocks: str
    """List of transformer blocks."""
    attn_in: tuple[str, ...]
    """Projections to queries, keys and values: one module or three."""
    attn_out: str
    """Output projection of the attention: it returns the contribution a."""
    mlp_in: tuple[str, ...]
    """Input projections of the MLP: one module, or two if the MLP is gated."""
    mlp_out: str
    """Output projection of the MLP, W_proj: its input is the key k, its output m."""
    mlp_act: str
    """Activation function of the MLP; in a gated MLP it is applied to the gate."""
    norm: tuple[str, ...]
    """Modules between the last block and the head, in order; those a model lacks are skipped."""
    transposed: bool = False
    """Whether weights are stored as (input, output), as in GPT-2's Conv1D."""
    needs_bos: bool = False
    """Whether to add BOS where the tokenizer does not, as with some GGUF files."""
    supports_packing: bool = True
    """Whether attention depends only on the given mask and positions, so that several segments
    can share a row. GPT-Neo also masks by a key's index in the row."""


QKV = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


def _in(module: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


def _llama(
    *,
    attn_in: tuple[str, ...] = QKV,
    mlp_in: tuple[str, ...] = GATED,
    mlp_act: str = "mlp.act_fn",
    needs_bos: bool = False,
) -> Family:
    """LLaMA's names, which most later families use."""
    return Family(
        embed="model.embed_tokens",
        blocks="model.layers",
        attn_in=_in("self_attn", attn_in),
        attn_out="self_attn.o_proj",
        mlp_in=_in("mlp", mlp_in),
        mlp_out="mlp.down_proj",
        mlp_act=mlp_act,
        norm=("model.norm",),
        needs_bos=needs_bos,
    )


def _gpt2(
    attn_in: tuple[str, ...], attn_out: str, mlp_in: str, mlp_out: str, **flags: bool
) -> Family:
    """GPT-2's names, which GPT-Neo and GPT-J share in part."""
    return Family(
        embed="transformer.wte",
        blocks="transformer.h",
        attn_in=attn_in,
        attn_out=attn_out,
        mlp_in=(mlp_in,),
        mlp_out=mlp_out,
        mlp_act="mlp.act",
        norm=("transformer.ln_f",),
        **flags,
    )


def _bloom(mlp_act: str) -> Family:
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
    "bloom": _bloom("mlp.gelu_impl"),
    "falcon": _bloom("mlp.act"),
    "gemma": _llama(needs_bos=True),
    "gemma2": _llama(needs_bos=True),
    "gemma3_text": _llama(needs_bos=True),
    "gpt2": _gpt2(("attn.c_attn",), "attn.c_proj", "mlp.c_fc", "mlp.c_proj", transposed=True),
    "gpt_neo": _gpt2(
        _in("attn.attention", QKV),
        "attn.attention.out_proj",
        "mlp.c_fc",
        "mlp.c_proj",
        supports_packing=False,
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
    "gptj": _gpt2(_in("attn", QKV), "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
    "llama": _llama(),
    "mistral": _llama(),
    "olmo2": _llama(),
    "opt": Family(
        embed="model.decoder.embed_tokens",
        blocks="model.decoder.layers",
        attn_in=_in("self_attn", QKV),
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
"""Families by `config.model_type`."""


def family_of(model: nn.Module) -> Family:
    """The entry of a model's family."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name not in FAMILIES:
        raise unknown_family(name)
    return FAMILIES[name]


def unknown_family(name: str) -> UnknownFamily:
    """The error for a family without an entry."""
    return UnknownFamily(
        f"the model family {name!r} has no entry in factscope.lm.families.FAMILIES; "
        f"known: {', '.join(sorted(FAMILIES))}. CONTRIBUTING.md says how to add one"
    )
