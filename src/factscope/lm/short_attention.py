"""Attention for rows of a few tokens on a GPU.

The fused kernels work on tiles of 64 by 64 tokens: with seven queries and twenty keys nearly all
of a tile is empty. Plain batched products are several times as fast there. Where weights are
multiplied in TF32, queries, keys and values are rounded to half precision, which has as many bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["attend", "multiplies_halves", "short_attention"]

NAME = "sdpa"
"""The attention of transformers that is replaced: its default."""


@dataclass
class Use:
    """Whether a model's attention was ours."""

    seen: bool = False


@contextmanager
def short_attention(device: torch.device) -> Iterator[Use]:
    """Inside, models that use transformers' default attention use this one, if on a GPU."""
    use = Use()
    if device.type != "cuda":
        yield use
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = _ours(ALL_ATTENTION_FUNCTIONS[NAME], use)
    try:
        yield use
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]  # back to the library's own


def multiplies_halves(dtype: torch.dtype) -> bool:
    """Whether numbers of that kind are rounded to half precision here: float32 run as TF32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _ours(usual: Callable[..., Any], use: Use) -> Callable[..., Any]:
    """Our attention in the form that transformers calls, or the usual one where it asks more."""
    biases: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    def bias_of(mask: Tensor, rows: int, heads: int, kind: torch.dtype) -> Tensor:
        key = (mask.data_ptr(), mask.shape, kind)
        if key not in biases:  # with the mask itself, so that its place is not given to another
            biases[key] = (mask, _bias(mask, rows, heads, kind))
        return biases[key][1]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        asks_more = more.get("position_bias") is not None or more.get("softcap") is not None
        if attention_mask is None or asks_more:
            return usual(module, query, key, value, attention_mask, scaling=scaling, **more)
        use.seen = True
        kind = torch.half if multiplies_halves(query.dtype) else query.dtype
        rows, heads, _, dim = query.shape
        bias = bias_of(attention_mask, rows, heads, kind)
        scale = dim**-0.5 if scaling is None else scaling
        return attend(query, key, value, bias, scale), None

    return attention


def attend(
    query: Float[Tensor, "row head slot dim"],
    key: Float[Tensor, "row key_head token dim"],
    value: Float[Tensor, "row key_head token dim"],
    bias: Float[Tensor, "row_head slot token"],
    scale: float,
) -> Float[Tensor, "row slot head dim"]:
    """softmax(q kᵀ · scale + bias) v, in the bias's precision."""
    rows, heads, _, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    q, k, v = (_stacked(x, bias.dtype) for x in (query, key, value))
    weights = torch.baddbmm(bias, q, k.mT, alpha=scale).softmax(-1)
    out = torch.bmm(weights, v).unflatten(0, (rows, heads))
    return out.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)


def _bias(mask: Tensor, rows: int, heads: int, kind: torch.dtype) -> Tensor:
    """A mask (True where a slot may look, or a bias) as a bias for each row and head."""
    if mask.dtype == torch.bool:
        hidden = torch.finfo(kind).min / 2
        mask = torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(~mask, hidden)
    return mask.to(kind).expand(rows, heads, -1, -1).flatten(0, 1)


def _stacked(x: Tensor, kind: torch.dtype) -> Tensor:
    """Rows and heads along one axis, in the wanted precision."""
    return x.to(kind, memory_format=torch.contiguous_format).flatten(0, 1)
