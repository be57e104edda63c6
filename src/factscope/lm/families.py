"""The model families: the module names of each one's embedding, blocks, attention, MLP and norm.

A family is an entry in a table, never a branch. `attn_out` and `mlp_out` name the output
projections, which return what the paper calls the contributions a and m of a layer (Gemma 2 and 3
and OLMo 2 apply one more norm before adding them to the residual stream). The MLP's is the W_proj
that ROME edits. Naming the projection instead of the module around it hides that some modules
return tuples and that BLOOM's add the residual themselves.

`lm.check` tests an entry against a model.
"""

from dataclasses import dataclass, replace
from typing import Any

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
    mlp_norm: str | None = None
    """Norm that m passes on its way to the hidden state, alone or added to the state before."""
    transposed: bool = False
    """Whether weights are stored as (input, output), as in GPT-2's Conv1D."""
    needs_bos: bool = False
    """Whether to add BOS where the tokenizer does not, as with some GGUF files."""
    supports_packing: bool = True
    """Whether attention depends only on the given mask and positions, so that several segments
    can share a row. GPT-Neo also masks by a key's index in the row."""


LLAMA = Family(
    embed="model.embed_tokens",
    blocks="model.layers",
    attn_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out="self_attn.o_proj",
    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
    mlp_out="mlp.down_proj",
    mlp_act="mlp.act_fn",
    norm=("model.norm",),
)
GPT2 = Family(
    embed="transformer.wte",
    blocks="transformer.h",
    attn_in=("attn.c_attn",),
    attn_out="attn.c_proj",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
    mlp_act="mlp.act",
    norm=("transformer.ln_f",),
    transposed=True,
)
NEOX = Family(
    embed="gpt_neox.embed_in",
    blocks="gpt_neox.layers",
    attn_in=("attention.query_key_value",),
    attn_out="attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
    mlp_act="mlp.act",
    norm=("gpt_neox.final_layer_norm",),
)
FALCON = replace(
    NEOX,
    embed="transformer.word_embeddings",
    blocks="transformer.h",
    attn_in=("self_attention.query_key_value",),
    attn_out="self_attention.dense",
    norm=("transformer.ln_f",),
)

FAMILIES: dict[str, Family] = {
    "bloom": replace(FALCON, mlp_act="mlp.gelu_impl"),
    "falcon": FALCON,
    "gemma": replace(LLAMA, needs_bos=True),
    "gemma2": replace(LLAMA, needs_bos=True, mlp_norm="post_feedforward_layernorm"),
    "gemma3_text": replace(LLAMA, needs_bos=True, mlp_norm="post_feedforward_layernorm"),
    "gpt2": GPT2,
    "gpt_neo": replace(
        GPT2,
        attn_in=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attn_out="attn.attention.out_proj",
        transposed=False,
        supports_packing=False,
    ),
    "gpt_neox": NEOX,
    "gptj": replace(
        GPT2,
        attn_in=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        attn_out="attn.out_proj",
        mlp_in=("mlp.fc_in",),
        mlp_out="mlp.fc_out",
        transposed=False,
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "olmo2": replace(LLAMA, mlp_norm="post_feedforward_layernorm"),
    "opt": Family(
        embed="model.decoder.embed_tokens",
        blocks="model.decoder.layers",
        attn_in=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        attn_out="self_attn.out_proj",
        mlp_in=("fc1",),
        mlp_out="fc2",
        mlp_act="activation_fn",
        norm=("model.decoder.final_layer_norm", "model.decoder.project_out"),
        mlp_norm="final_layer_norm",
    ),
    "phi3": replace(
        LLAMA,
        attn_in=("self_attn.qkv_proj",),
        mlp_in=("mlp.gate_up_proj",),
        mlp_act="mlp.activation_fn",
    ),
    "qwen2": LLAMA,
    "qwen3": LLAMA,
}
"""Families by `config.model_type`."""


def family_of(model: nn.Module) -> Family:
    """The entry of a model's family."""
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if name not in FAMILIES:
        raise unknown_family(name)
    family = FAMILIES[name]
    config: Any = model.config
    if name == "opt" and config.do_layer_norm_before:  # then it is the norm before the MLP
        family = replace(family, mlp_norm=None)
    return family


def unknown_family(name: str) -> UnknownFamily:
    """The error for a family without an entry."""
    return UnknownFamily(
        f"the model family {name!r} has no entry in factscope.lm.families.FAMILIES; "
        f"known: {', '.join(sorted(FAMILIES))}. CONTRIBUTING.md says how to add one"
    )
