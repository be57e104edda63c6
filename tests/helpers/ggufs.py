"""GGUF files as llama.cpp writes them: a tiny random LLaMA with a tokenizer of `tokenizers_`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tokenizers_ import tokenizer

PRE_TOKENIZERS = {"bloom": "bloom", "gpt2": "gpt-2", "qwen": "qwen2"}
"""Style of a byte-level tokenizer → `tokenizer.ggml.pre`. The other styles are SentencePiece."""


def write_gguf(
    path: Path,
    style: str = "gpt2",
    *,
    pre: str | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF; `pre` and `weights` replace the pre-tokenizer and some weights."""
    backend = json.loads(tokenizer(style).backend_tokenizer.to_str())
    vocabulary: dict[str, int] = backend["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    special = {token["content"] for token in backend["added_tokens"]}
    writer.add_token_list(words)
    if style in PRE_TOKENIZERS:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre or PRE_TOKENIZERS[style])
        writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    else:
        writer.add_tokenizer_model("llama")
        # A token's score is that of the merge which makes it: earlier merges first.
        writer.add_token_scores([-float(i) for i in range(len(words))])
        writer.add_add_space_prefix("gemma" not in style)
    writer.add_token_types([_type(word, special) for word in words])
    for kind in ("bos", "eos"):
        token: Any = getattr(tokenizer(style), f"{kind}_token_id")
        if token is not None:
            getattr(writer, f"add_{kind}_token_id")(token)
    for name, weight in {**gguf_weights(len(words)), **(weights or {})}.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(word: str, special: set[str]) -> gguf.TokenType:
    if word in special:
        return gguf.TokenType.UNKNOWN if word == "<unk>" else gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if word.startswith("<0x") else gguf.TokenType.NORMAL


def gguf_weights(vocabulary: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(scale=0.1, size=shape).astype(np.float32)

    ones = np.ones(16, np.float32)
    weights = {"token_embd.weight": normal(vocabulary, 16), "output_norm.weight": ones}
    for layer in range(2):
        weights |= {
            f"blk.{layer}.{name}.weight": weight
            for name, weight in {
                "attn_norm": ones, "attn_q": normal(16, 16), "attn_k": normal(8, 16),
                "attn_v": normal(8, 16), "attn_output": normal(16, 16), "ffn_norm": ones,
                "ffn_gate": normal(32, 16), "ffn_up": normal(32, 16), "ffn_down": normal(16, 32),
            }.items()
        }  # fmt: skip
    return weights
