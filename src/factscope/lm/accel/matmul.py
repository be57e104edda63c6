"""Matrix products in single precision on half-precision tensor cores.

A GPU multiplies half-precision numbers some fifteen times as fast as single-precision ones, and
adds the products up in single precision all the same. A single-precision number is nearly the sum
of two halves, x = h + l, so a product is nearly a sum of three:

    x w ≈ h_x h_w + h_x l_w + l_x h_w         22 bits of mantissa, for float32
    x w ≈ h_x h_w                             11 bits, what TF32 keeps, for tf32

Both can be differentiated by x: the gradient times the same factor turned round. Whoever does so
scales the loss, so that gradients lie well within half precision's range (6e-8 to 65504).

Tensor cores cut off where they should round, an error that grows with the length of a sum: the main
term is therefore summed in stretches. An input beyond half precision's range (65504) becomes
infinite and is seen in the result: whoever uses this looks, and falls back.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Float16
from torch import Tensor, nn

__all__ = ["available", "half_product", "split_product"]

log = logging.getLogger(__name__)

LIFT = 64.0
"""Weights are multiplied by this power of two, or their low parts would fall below the range."""
STRETCH = 1600
"""How many products tensor cores may sum before the sum is rounded properly."""
EVEN = 8
"""Kernels like widths that are multiples of this."""
SPARE = 8
"""Columns of ones beside an input, for the bias."""

Product = Callable[[Float[Tensor, "*row in"]], Float[Tensor, "*row out"]]


@cache
def available(device: torch.device) -> bool:
    """Whether this torch, on this device, multiplies halves into single precision."""
    ones = torch.ones(16, 16, dtype=torch.half, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        _add_times(total, ones, ones)
        right = [total == 16 / LIFT, _times(ones, ones) == 16]
        right.append(_plus_times(total[0], ones, ones) == 32 / LIFT)
        right.append(_plus_times(None, ones, ones) == 16 / LIFT)
        return all(bool(one.all()) for one in right)
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

    fused = _fused(weight.device, depth)

    def product(x: Tensor) -> Tensor:
        halves = _with_ones(x.flatten(0, -2), fused=fused)
        return _times(halves, factor).view(*x.shape[:-1], width)

    def back(slope: Tensor) -> Tensor:
        rows = slope.flatten(0, -2).half()
        return _times(rows, factor[:depth].T).view(*slope.shape[:-1], depth)

    return _differentiable(product, back)


def split_product(weight: Float[Tensor, "in out"], bias: Tensor | None) -> Product:
    """x ↦ x W + b with 22 bits of mantissa. An odd width, as a vocabulary's, is filled up."""
    depth, width = weight.shape
    wide = width + -width % EVEN
    if wide > width:
        weight, bias = _filled(weight, wide), None if bias is None else _filled(bias, wide)
    low_high = torch.cat(_split(weight * LIFT)[::-1])
    low, high = low_high[:depth], low_high[depth:]
    fused = _fused(weight.device, depth) and _fused(weight.device, width)

    def product(x: Tensor) -> Tensor:
        both = _side_by_side(x.flatten(0, -2), depth, fused=fused)
        total = _plus_times(bias, both, low_high)  # the two small terms at once
        for i in range(0, depth, STRETCH):
            end = min(depth, i + STRETCH)
            _add_times(total, both[:, i:end], high[i:end])
        return total[:, :width].unflatten(0, x.shape[:-1])

    def back(slope: Tensor) -> Tensor:
        both = _side_by_side(slope.flatten(0, -2), wide, fused=fused)
        total = _plus_times(None, both[:, wide:], high.T)
        _add_times(total, both[:, :wide], low.T)
        _add_times(total, both[:, :wide], high.T)
        return total.view(*slope.shape[:-1], depth)

    return _differentiable(product, back)


def _filled(x: Float[Tensor, "... column"], wide: int) -> Float[Tensor, "... wide"]:
    """The same with zeros behind."""
    return nn.functional.pad(x, (0, wide - x.shape[-1]))


class _Multiplied(torch.autograd.Function):
    """A product that autograd sees as one step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Product, back: Product) -> Tensor:  # pyright: ignore
        ctx.back = back
        return product(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return ctx.back(slope), None, None


def _differentiable(product: Product, back: Product) -> Product:
    """The product, with its gradient where one is asked for."""

    def either(x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Multiplied.apply(x, product, back)  # pyright: ignore[reportReturnType]
        return product(x)

    return either


def _split(x: Float[Tensor, "row column"]) -> tuple[Float16[Tensor, "row column"], Tensor]:
    """The half nearest to each number, and the half nearest to what is left."""
    high = x.half()
    low = torch.empty_like(high)
    torch.sub(x, high, out=low)
    return high, low


def _side_by_side(
    x: Float[Tensor, "row column"], wide: int, *, fused: bool
) -> Float16[Tensor, "row two_wide"]:
    """The same two halves, beside each other in one matrix, each so wide."""
    rows, columns = x.shape
    both = torch.empty(rows, 2 * wide, dtype=torch.half, device=x.device)
    if fused:
        _halves_into(x, both, low=True)
        return both
    both[:, :columns] = x
    torch.sub(x, both[:, :columns], out=both[:, wide : wide + columns])
    if wide > columns:
        both[:, columns:wide] = both[:, wide + columns :] = 0
    return both


def _with_ones(x: Float[Tensor, "row column"], *, fused: bool) -> Float16[Tensor, "row wider"]:
    """The half nearest to each number, and the ones that the bias is multiplied with."""
    rows, columns = x.shape
    halves = torch.empty(rows, columns + SPARE, dtype=torch.half, device=x.device)
    if fused:
        _halves_into(x, halves, low=False)
    else:
        halves[:, :columns] = x
        halves[:, columns:] = 1
    return halves


def _halves_into(x: Tensor, out: Tensor, *, low: bool) -> None:
    from factscope.lm.accel.kernels import halves_into

    halves_into(x, out, low=low)


@cache
def _fused(device: torch.device, columns: int) -> bool:
    """Whether one kernel cuts rows of that length as several operations do; this compiles it."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    x = torch.linspace(-3, 3, 2 * columns, device=device).view(2, columns)
    x[1, -1] = 1e6  # beyond half precision's range: both must say so
    try:
        wide = columns + -columns % EVEN
        forms = (partial(_side_by_side, wide=wide), _with_ones)
        return all(torch.equal(form(x, fused=True), form(x, fused=False)) for form in forms)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways; torch's operations are always there
        log.info("halves are not cut by one kernel: %s", error)
        return False


MIXED: Any = {"out_dtype": torch.float32}


def _times(a: Tensor, b: Tensor) -> Float[Tensor, "row out"]:
    """a b, summed in single precision; on a CPU the same numbers, slowly."""
    return torch.mm(a, b, **MIXED) if a.is_cuda else a.float() @ b.float()


def _plus_times(bias: Tensor | None, a: Tensor, b: Tensor) -> Float[Tensor, "row out"]:
    """bias + a b / LIFT, in a new matrix."""
    if a.is_cuda:
        unused = bias is None  # with beta = 0 what is added is not read
        added = torch.empty(b.shape[1], device=a.device) if unused else bias
        return torch.addmm(added, a, b, beta=0 if unused else 1, alpha=1 / LIFT, **MIXED)
    product = (a.float() @ b.float()) / LIFT
    return product if bias is None else bias + product


def _add_times(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b / LIFT to the total."""
    if a.is_cuda:
        torch.addmm(total, a, b, alpha=1 / LIFT, out=total, **MIXED)
    else:
        total.add_(a.float() @ b.float(), alpha=1 / LIFT)
