"""Suffix attention: attention for rows of a few tokens on a GPU.

The usual kernels work on tiles of 64 by 64 tokens and need keys and values concatenated. With seven
queries and a past of fifteen tokens nearly all of a tile is empty, and most of the time goes into
copies. Inside `suffix_attention` the kernels of `kernels.py` are used instead. Where weights are
multiplied in TF32, queries, keys and values are rounded to float16, which has as many bits.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)

SDPA = "sdpa"
"""The attention of transformers that is replaced: its default."""


MAX_SLOTS = 64
"""Tokens of a row up to which the kernels are fast in large batches: its scores are one tile."""
MAX_BIASES = 4
"""Masks whose biases are held: a model has one or two, which its layers share."""


@dataclass
class Use:
    """Whether the kernels can run here, and whether the model called them."""

    possible: bool
    called: bool = False


_active: list[Use] = []
"""The active `suffix_attention` contexts."""


@contextmanager
def suffix_attention(device: torch.device) -> Iterator[Use]:
    """Inside, models with transformers' default attention use our kernels, where possible, and a
    replay passes the past's keys and values apart from the new ones (`splits_past`)."""
    use = Use(has_kernels(device))
    if not use.possible:
        yield use
        return
    with with_attention(lambda default: _suffix_attention(default, use)):
        _active.append(use)
        try:
            yield use
        finally:
            _active.pop()


def splits_past() -> bool:
    """Whether attention gets the past's keys and values apart from the new ones."""
    return bool(_active)


def supports_suffix_attention(
    lm: "LM", key: Any, device: torch.device, probe: Callable[[], tuple[Tensor, ...]]
) -> bool:
    """Whether `probe()`, one block's results, is the same with suffix attention; tested once for
    each key.

    This also compiles the kernels, which cannot be done during capture.
    """
    supported: dict[Any, bool] = lm.cache.setdefault("supports suffix attention", {})
    key = (key, torch.get_float32_matmul_precision())
    if key not in supported:
        supported[key] = _agrees(lm.dtype, device, probe)
    return supported[key]


def _agrees(
    dtype: torch.dtype, device: torch.device, probe: Callable[[], tuple[Tensor, ...]]
) -> bool:
    use = Use(possible=False)
    try:
        with suffix_attention(device) as use:
            if not use.possible:
                return False
            actual = probe()
        expected = probe()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways; the default attention always works
        if use.called:
            log.warning("suffix attention failed (%s); the default attention is used", error)
        return False
    exact = dtype == torch.float32 and not rounds_to_half(dtype)
    tolerance = 1e-4 if exact else 3e-2
    gaps = [(x - y).abs().max() / y.abs().max() for x, y in zip(actual, expected, strict=True)]
    agree = all(bool(gap <= tolerance) for gap in gaps)
    if use.called and not agree:
        log.warning(
            "suffix attention is wrong (relative error %s); the default attention is used", gaps
        )
    return use.called and agree


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
            if len(biases) >= MAX_BIASES:
                biases.clear()
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
