"""Tiny random models of every family."""

from typing import Any

import torch
import transformers

from factscope.lm.families import family_of
from factscope.lm.load import from_model
from factscope.lm.model import LM

from tokenizers_ import FAMILIES as STYLES
from tokenizers_ import tokenizer

VOCABULARY = 100
LAYERS = 3
WIDTH = 32

_LLAMA = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_FALCON = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_FALCON |= {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4}),
    "falcon": ("falcon", _FALCON | {"alibi": False, "new_decoder_architecture": False}),
    "falcon, alibi": ("falcon", _FALCON | {"alibi": True}),
    "falcon, new": (
        "falcon",
        _FALCON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gemma": ("gemma", _LLAMA | {"head_dim": 8}),
    "gemma2": ("gemma2", _LLAMA | {"head_dim": 8, "sliding_window": 4}),
    "gemma3_text": ("gemma3_text", _LLAMA | {"head_dim": 8, "sliding_window": 4}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neo": (
        "gpt_neo",
        {
            "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": 4, "window_size": 4,
            "attention_types": [[["global", "local"], 1], [["local"], 1]],
            "max_position_embeddings": 64,
            "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "gpt_neox": ("gpt_neox", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
    "llama": ("llama", _LLAMA),
    "mistral": ("mistral", _LLAMA | {"sliding_window": 4}),
    "olmo2": ("olmo2", _LLAMA),
    "opt": (
        "opt",
        {
            "hidden_size": WIDTH, "ffn_dim": 64, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": WIDTH,
        },
    ),
    "opt, projected": (
        "opt",
        {
            "hidden_size": WIDTH, "ffn_dim": 64, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        },
    ),
    "phi3": ("phi3", _LLAMA),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", _LLAMA | {"head_dim": 8}),
}  # fmt: skip
"""Name → model type, and the configuration that differs from its defaults."""


class NumberTokenizer:
    """Decodes every token as its id."""

    is_fast = True
    bos_token_id, eos_token_id = 1, 2

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def tiny_model(family: str, *, vocabulary: int = VOCABULARY, spread: float = 0.2) -> Any:
    """A model of the family with random weights, large enough for every part to have an effect."""
    kind, settings = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, vocab_size=vocabulary, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=spread)
        model.tie_weights()
    return model.eval().requires_grad_(False)


def tiny_text_lm(
    family: str, *, spread: float, style: str | None = None, dtype: torch.dtype = torch.float32
) -> LM:
    """A tiny LM with a trained tokenizer; by default in the style of its family."""
    tok = tokenizer(style or STYLES[FAMILIES[family][0]])
    model = tiny_model(family, vocabulary=len(tok), spread=spread).to(dtype)
    return from_model(model, tok, name=f"tiny {family}", check=False)


def tiny(family: str) -> LM:
    """A tiny LM without a tokenizer of words."""
    model = tiny_model(family)
    return LM(
        model=model, tokenizer=NumberTokenizer(), family=family_of(model), name=f"tiny {family}"
    )
