"""Split-precision matmul: float32 products on half-precision tensor cores.

A GPU multiplies float16 matrices about fifteen times as fast as float32 ones and accumulates in
float32. A float32 number is nearly the sum of two halves, x = h + l (high and low part), so

    x w ≈ h_x h_w + h_x l_w + l_x h_w         22 bits of mantissa: `split_matmul`, for float32
    x w ≈ h_x h_w                             11 bits, as many as TF32: `half_matmul`

Both are differentiable with respect to x: the gradient is multiplied by the transposed factor.
Gradients must lie within float16's range (6e-8 to 65504), so callers scale the loss.

Tensor cores truncate where they should round, an error that grows with the length of the sum. The
main term is therefore summed in chunks. An input beyond float16's range becomes infinite, which
shows in the result; `accelerated` checks for it and falls back to the model's own layers.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Float16
from torch import Tensor, nn

log = logging.getLogger(__name__)

WEIGHT_SCALE = 64.0
"""Weights are multiplied by this power of two; otherwise their low parts would underflow."""
CHUNK = 1600
"""Length of a sum on tensor cores before it is rounded properly."""
ALIGN = 8
"""Kernels are fastest for widths that are multiples of this."""
BIAS_COLUMNS = 8
"""Columns of ones beside an input, which are multiplied with the bias."""

Matmul = Callable[[Float[Tensor, "*row in"]], Float[Tensor, "*row out"]]


@cache
def supports_mixed(device: torch.device) -> bool:
    """Whether torch multiplies float16 matrices into float32 on this device."""
    ones = torch.ones(16, 16, dtype=torch.half, device=device)
    total = torch.zeros(16, 16, device=device)
    try:
        _add_scaled_(total, ones, ones)
        correct = [total == 16 / WEIGHT_SCALE, _product(ones, ones) == 16]
        correct.append(_biased(total[0], ones, ones) == 32 / WEIGHT_SCALE)
        correct.append(_biased(None, ones, ones) == 16 / WEIGHT_SCALE)
        return all(bool(entries.all()) for entries in correct)
    except (NotImplementedError, RuntimeError, TypeError):
        return False


def half_matmul(weight: Float[Tensor, "in out"], bias: Tensor | None) -> Matmul:
    """x ↦ x W + b with 11 bits of mantissa. The bias is two more rows of W."""
    depth, width = weight.shape
    factor = torch.zeros(depth + BIAS_COLUMNS, width, dtype=torch.half, device=weight.device)
    factor[:depth] = weight
    if bias is not None:  # its high and low part
        factor[depth] = bias
        factor[depth + 1] = bias - factor[depth]
    fused = _fused(weight.device, depth)

    def forward(x: Tensor) -> Tensor:
        halves = _with_ones(x.flatten(0, -2), fused=fused)
        return _product(halves, factor).view(*x.shape[:-1], width)

    def backward(gradient: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2).half()
        return _product(rows, factor[:depth].T).view(*gradient.shape[:-1], depth)

    return _differentiable(forward, backward)


def split_matmul(weight: Float[Tensor, "in out"], bias: Tensor | None) -> Matmul:
    """x ↦ x W + b with 22 bits of mantissa. An odd width, as a vocabulary's, is padded."""
    depth, width = weight.shape
    padded = width + -width % ALIGN
    if padded > width:
        weight = nn.functional.pad(weight, (0, padded - width))
        bias = None if bias is None else nn.functional.pad(bias, (0, padded - width))
    low_high = torch.cat(_split(weight * WEIGHT_SCALE)[::-1])
    low, high = low_high[:depth], low_high[depth:]
    fused = _fused(weight.device, depth) and _fused(weight.device, width)

    def forward(x: Tensor) -> Tensor:
        both = _high_low(x.flatten(0, -2), depth, fused=fused)
        total = _biased(bias, both, low_high)  # (h_x, l_x) · (l_w, h_w): both small terms at once
        for i in range(0, depth, CHUNK):
            end = min(depth, i + CHUNK)
            _add_scaled_(total, both[:, i:end], high[i:end])
        return total[:, :width].unflatten(0, x.shape[:-1])

    def backward(gradient: Tensor) -> Tensor:
        both = _high_low(gradient.flatten(0, -2), padded, fused=fused)
        total = _biased(None, both[:, padded:], high.T)
        _add_scaled_(total, both[:, :padded], low.T)
        _add_scaled_(total, both[:, :padded], high.T)
        return total.view(*gradient.shape[:-1], depth)

    return _differentiable(forward, backward)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to a float32 total.

    Float32 factors are multiplied as torch's matmul precision says. Half-precision factors are
    multiplied as they are where the GPU can: their products are exact in float32.
    """
    if a.dtype != torch.float32 and a.is_cuda and supports_mixed(a.device):
        torch.addmm(total, a, b, out=total, **MIXED)
    else:
        total.addmm_(a.float(), b.float())


class _Matmul(torch.autograd.Function):
    """A product that autograd sees as one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Matmul, backward: Matmul) -> Tensor:  # pyright: ignore
        ctx.input_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return ctx.input_gradient(gradient), None, None


def _differentiable(forward: Matmul, backward: Matmul) -> Matmul:
    """The product, recorded for autograd where a gradient is needed."""

    def matmul(x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return _Matmul.apply(x, forward, backward)  # pyright: ignore[reportReturnType]
        return forward(x)

    return matmul


def _split(x: Float[Tensor, "row column"]) -> tuple[Float16[Tensor, "row column"], Tensor]:
    """The nearest float16 (high part), and the nearest float16 to the remainder (low part)."""
    high = x.half()
    low = torch.empty_like(high)
    torch.sub(x, high, out=low)
    return high, low


def _high_low(
    x: Float[Tensor, "row column"], wide: int, *, fused: bool
) -> Float16[Tensor, "row two_wide"]:
    """High and low parts side by side in one matrix, each padded with zeros to `wide` columns."""
    rows, columns = x.shape
    both = torch.empty(rows, 2 * wide, dtype=torch.half, device=x.device)
    if fused:
        _split_into(x, both, low=True)
        return both
    both[:, :columns] = x
    torch.sub(x, both[:, :columns], out=both[:, wide : wide + columns])
    if wide > columns:
        both[:, columns:wide] = both[:, wide + columns :] = 0
    return both


def _with_ones(x: Float[Tensor, "row column"], *, fused: bool) -> Float16[Tensor, "row wider"]:
    """High parts, with the ones beside them that the bias is multiplied with."""
    rows, columns = x.shape
    halves = torch.empty(rows, columns + BIAS_COLUMNS, dtype=torch.half, device=x.device)
    if fused:
        _split_into(x, halves, low=False)
    else:
        halves[:, :columns] = x
        halves[:, columns:] = 1
    return halves


def _split_into(x: Tensor, out: Tensor, *, low: bool) -> None:
    from factscope.lm.accel.kernels import split_into

    split_into(x, out, low=low)


@cache
def _fused(device: torch.device, columns: int) -> bool:
    """Whether the splitting kernel works for rows of this length; calling this compiles it."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    x = torch.linspace(-3, 3, 2 * columns, device=device).view(2, columns)
    x[1, -1] = 1e6  # beyond float16's range: kernel and torch must both give infinity
    try:
        wide = columns + -columns % ALIGN
        forms = (partial(_high_low, wide=wide), _with_ones)
        return all(torch.equal(form(x, fused=True), form(x, fused=False)) for form in forms)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways; torch's operations always work
        log.info("the splitting kernel is not used: %s", error)
        return False


MIXED: Any = {"out_dtype": torch.float32}


def _product(a: Tensor, b: Tensor) -> Float[Tensor, "row out"]:
    """a b, accumulated in float32; on a CPU the same numbers, slowly."""
    return torch.mm(a, b, **MIXED) if a.is_cuda else a.float() @ b.float()


def _biased(bias: Tensor | None, a: Tensor, b: Tensor) -> Float[Tensor, "row out"]:
    """bias + a b / WEIGHT_SCALE, in a new matrix."""
    if a.is_cuda:
        unused = bias is None  # with beta = 0 the added matrix is not read
        added = torch.empty(b.shape[1], device=a.device) if unused else bias
        return torch.addmm(added, a, b, beta=0 if unused else 1, alpha=1 / WEIGHT_SCALE, **MIXED)
    product = (a.float() @ b.float()) / WEIGHT_SCALE
    return product if bias is None else bias + product


def _add_scaled_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b / WEIGHT_SCALE to the total."""
    if a.is_cuda:
        torch.addmm(total, a, b, alpha=1 / WEIGHT_SCALE, out=total, **MIXED)
    else:
        total.add_(a.float() @ b.float(), alpha=1 / WEIGHT_SCALE)
