"""Suffix attention: attention for rows of a few tokens on a GPU.

The usual kernels work on tiles of 64 by 64 tokens and need keys and values concatenated. With seven
queries and a past of fifteen tokens nearly all of a tile is empty, and most of the time goes into
copies. Inside `suffix_attention` the kernels of `kernels.py` are used instead. Where weights are
multiplied in TF32, queries, keys and values are rounded to float16, which has as many bits.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SDPA = "sdpa"
"""The attention of transformers that is replaced: its default."""


@dataclass
class Use:
    """Whether the kernels can run here, and whether the model called them."""

    possible: bool
    called: bool = False


@contextmanager
def suffix_attention(device: torch.device) -> Iterator[Use]:
    """Inside, models with transformers' default attention use our kernels, where possible."""
    use = Use(has_kernels(device))
    if not use.possible:
        yield use
        return
    with with_attention(lambda default: _suffix_attention(default, use)):
        yield use


@contextmanager
def with_attention(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, transformers' default attention is `make(default)`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[SDPA] = make(ALL_ATTENTION_FUNCTIONS[SDPA])
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[SDPA]  # restores the library's default


def has_kernels(device: torch.device) -> bool:
    """Whether triton kernels can run on a device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def rounds_to_half(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are rounded to float16 here: float32 run as TF32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


def _suffix_attention(default: Callable[..., Any], use: Use) -> Callable[..., Any]:
    """Suffix attention with the signature that transformers calls; unsupported calls go to the
    default."""
    from factscope.lm.accel import kernels

    biases: dict[tuple[int, torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}

    def bias_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
        key = (mask.data_ptr(), mask.shape, dtype)
        if key not in biases:  # hold the mask too, or another tensor could get its address
            biases[key] = (mask, _bias(mask, dtype))
        return biases[key][1]

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, scaling: float | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        unsupported = more.get("position_bias") is not None or more.get("softcap") is not None
        if attention_mask is None or unsupported:
            return default(module, query, key, value, attention_mask, scaling=scaling, **more)
        use.called = True
        slots, dim = query.shape[-2:]
        past: tuple[Tensor, Tensor] | None = getattr(key, "past", None)
        if past is None:  # concatenated already: split
            length = key.shape[2] - slots
            past = (key[:, :, :length], value[:, :, :length])
            key, value = key[:, :, length:], value[:, :, length:]
        dtype = torch.half if rounds_to_half(query.dtype) else query.dtype
        scale = dim**-0.5 if scaling is None else scaling
        bias = bias_of(attention_mask, dtype)
        return kernels.suffix_attention(query, key, value, past[0], past[1], bias, scale), None

    return attention


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask (True where a query sees a key, or numbers to add) as numbers to add."""
    if mask.dtype == torch.bool:
        hidden = torch.finfo(dtype).min / 2
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, hidden)
    return mask.clamp(min=torch.finfo(dtype).min / 2).to(dtype)
