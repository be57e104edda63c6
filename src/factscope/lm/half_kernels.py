"""Single-precision numbers cut into halves, as one GPU kernel (see `lm.products`).

Needs triton; `lm.products` says the same with several operations of torch where there is none.
"""
# What stands in a kernel is triton's language, which a checker of Python's types cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import inspect
from typing import Any

import triton
import triton.language as tl
from jaxtyping import Float, Float16
from torch import Tensor

__all__ = ["halves_into", "kernel"]

BLOCK = 1024
"""How many numbers of a row one program cuts."""


def kernel(function: Any) -> Any:
    """A function for the GPU: itself, also where a checker of types has wrapped it."""
    return triton.jit(inspect.unwrap(function))


def halves_into(
    x: Float[Tensor, "row column"], out: Float16[Tensor, "row wider"], *, low: bool
) -> None:
    """Write the half nearest to each number, and behind them ones; or, `low`, into the left half of
    each row those and into the right one what is left of each number, with zeros behind."""
    if x.stride(1) != 1:
        x = x.contiguous()
    wide = out.shape[1] // 2 if low else out.shape[1]
    grid = (len(x), triton.cdiv(wide, BLOCK))
    _halves[grid](x, out, x.stride(0), x.shape[1], wide, LOW=low, BLOCK=BLOCK)


@kernel
def _halves(x, out, stride, columns, wide, LOW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * stride + c, mask=c < columns, other=0.0 if LOW else 1.0)
    high = number.to(tl.float16)
    if LOW:
        tl.store(out + row * 2 * wide + c, high, mask=c < wide)
        rest = (number - high.to(tl.float32)).to(tl.float16)
        tl.store(out + row * 2 * wide + wide + c, rest, mask=c < wide)
    else:  # beyond the last number there are ones
        tl.store(out + row * wide + c, high, mask=c < wide)
