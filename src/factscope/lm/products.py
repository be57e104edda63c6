"""Matrix products in single precision on half-precision tensor cores.

A GPU multiplies half-precision numbers some fifteen times as fast as single-precision ones, and
adds the products up in single precision all the same. A single-precision number is nearly the sum
of two halves, x = h + l, so a product is nearly a sum of three:

    x w ≈ h_x h_w + h_x l_w + l_x h_w         22 bits of mantissa, for float32
    x w ≈ h_x h_w                             11 bits, what TF32 keeps, for tf32

Tensor cores cut off where they should round, an error that grows with the length of a sum: the main
term is therefore summed in stretches. An input beyond half precision's range (65504) becomes
infinite and is seen in the result: whoever uses this looks, and falls back.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Float16
from torch import Tensor

__all__ = ["available", "half_product", "split_product"]

LIFT = 64.0
"""Weights are multiplied by this power of two, or their low parts would fall below the range."""
STRETCH = 1600
"""How many products tensor cores may sum before the sum is rounded properly."""
SPARE = 8
"""Columns of ones beside an input, for the bias; kernels like multiples of eight."""

Product = Callable[[Float[Tensor, "*row in"]], Float[Tensor, "*row out"]]


@cache
def available(device: torch.device) -> bool:
    """Whether this torch, on this device, multiplies halves into single precision."""
    ones = torch.ones(16, 16, dtype=torch.half, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        _add_times(total, ones, ones)
        return bool((total == 16 / LIFT).all() and (_times(ones, ones) == 16).all())
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def half_product(weight: Float[Tensor, "in out"], bias: Tensor | None) -> Product:
    """x ↦ x W + b with 11 bits of mantissa. The bias rides along as two more rows of W."""
    depth, width = weight.shape
    factor = torch.zeros(depth + SPARE, width, dtype=torch.half, device=weight.device)
    factor[:depth] = weight
    if bias is not None:
        factor[depth] = bias
        factor[depth + 1] = bias - factor[depth]

    def product(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        halves = torch.empty(len(rows), depth + SPARE, dtype=torch.half, device=x.device)
        halves[:, :depth] = rows
        halves[:, depth:] = 1
        return _times(halves, factor).view(*x.shape[:-1], width)

    return product


def split_product(weight: Float[Tensor, "in out"], bias: Tensor | None) -> Product:
    """x ↦ x W + b with 22 bits of mantissa."""
    high, low = _split(weight * LIFT)
    depth, width = weight.shape

    def product(x: Tensor) -> Tensor:
        main, rest = _split(x.flatten(0, -2))
        rows = len(main)
        total = x.new_zeros(rows, width) if bias is None else bias.expand(rows, -1).clone()
        _add_times(total, rest, high)
        _add_times(total, main, low)
        for i in range(0, depth, STRETCH):
            _add_times(total, main[:, i : i + STRETCH], high[i : i + STRETCH])
        return total.view(*x.shape[:-1], width)

    return product


def _split(x: Float[Tensor, "row column"]) -> tuple[Float16[Tensor, "row column"], Tensor]:
    """The half nearest to each number, and the half nearest to what is left."""
    high = x.half()
    low = torch.empty_like(high)
    torch.sub(x, high, out=low)
    return high, low


MIXED: Any = {"out_dtype": torch.float32}


def _times(a: Tensor, b: Tensor) -> Float[Tensor, "row out"]:
    """a b, summed in single precision; on a CPU the same numbers, slowly."""
    return torch.mm(a, b, **MIXED) if a.is_cuda else a.float() @ b.float()


def _add_times(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b / LIFT to the total."""
    if a.is_cuda:
        torch.addmm(total, a, b, alpha=1 / LIFT, out=total, **MIXED)
    else:
        total.add_(a.float() @ b.float(), alpha=1 / LIFT)
