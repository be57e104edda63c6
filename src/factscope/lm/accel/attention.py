"""Attention for rows of a few tokens on a GPU.

The usual kernels work on tiles of 64 by 64 tokens and want keys and values end to end: with seven
queries and a past of fifteen tokens nearly all of a tile is empty, and most of the time goes into
copies. Inside `short_attention` the kernels of `lm.short_kernels` are used instead. Where weights
are multiplied in TF32, queries, keys and values are rounded to half precision, which has as many
bits.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NAME", "kernels_here", "multiplies_halves", "short_attention"]

NAME = "sdpa"
"""The attention of transformers that is replaced: its default."""


@dataclass
class Use:
    """Whether our attention can be used here, and whether a model used it."""

    possible: bool
    seen: bool = False


@contextmanager
def short_attention(device: torch.device) -> Iterator[Use]:
    """Inside, models that use transformers' default attention use ours, where that is possible."""
    use = Use(kernels_here(device))
    if not use.possible:
        yield use
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[NAME] = _ours(ALL_ATTENTION_FUNCTIONS[NAME], use)
    try:
        yield use
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]  # back to the library's own


def kernels_here(device: torch.device) -> bool:
    """Whether kernels of our own can run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def multiplies_halves(dtype: torch.dtype) -> bool:
    """Whether numbers of that kind are rounded to half precision here: float32 run as TF32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _ours(usual: Callable[..., Any], use: Use) -> Callable[..., Any]:
    """Our attention in the form that transformers calls, or the usual one where it asks more."""
    from factscope.lm.accel.kernels import attend

    biases: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    def bias_of(mask: Tensor, kind: torch.dtype) -> Tensor:
        key = (mask.data_ptr(), mask.shape, kind)
        if key not in biases:  # with the mask itself, so that its place is not given to another
            biases[key] = (mask, _bias(mask, kind))
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
        slots, dim = query.shape[-2:]
        past: tuple[Tensor, Tensor] | None = getattr(key, "past", None)
        if past is None:  # end to end already: cut apart
            cut = key.shape[2] - slots
            past = (key[:, :, :cut], value[:, :, :cut])
            key, value = key[:, :, cut:], value[:, :, cut:]
        kind = torch.half if multiplies_halves(query.dtype) else query.dtype
        scale = dim**-0.5 if scaling is None else scaling
        bias = bias_of(attention_mask, kind)
        return attend(query, key, value, past[0], past[1], bias, scale), None

    return attention


def _bias(mask: Tensor, kind: torch.dtype) -> Tensor:
    """A mask (True where a slot may look, or numbers to add) as numbers to add."""
    if mask.dtype == torch.bool:
        hidden = torch.finfo(kind).min / 2
        return torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(~mask, hidden)
    return mask.clamp(min=torch.finfo(kind).min / 2).to(kind)
