"""Blocks made faster for a while, without a change in what they compute.

Two habits of older model code cost a GPU time: GELU spelled out as eight small operations, each of
which reads and writes the block's widest tensor; and GPT-2's weights stored with the other axis
first, for which the fast kernels do not fit. Inside `quick(block)` the former is torch's own fused
function and the latter lie the other way round in memory, with the same numbers and shape.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["quick"]

SPELLED_OUT = ("NewGELUActivation", "FastGELUActivation", "BloomGelu")
"""Modules of transformers that write the tanh form of GELU in single operations."""


@contextmanager
def quick(block: nn.Module) -> Iterator[None]:
    """Run the block's calls faster while inside."""
    with ExitStack() as stack:
        for module in block.modules():
            kind = type(module).__name__
            if kind in SPELLED_OUT:
                stack.enter_context(_fused(module))
            elif kind == "Conv1D":
                stack.enter_context(_turned(module))
        yield


@contextmanager
def _fused(module: Any) -> Iterator[None]:
    module.forward = _gelu
    try:
        yield
    finally:
        del module.forward  # back to the class's own


def _gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


@contextmanager
def _turned(module: Any) -> Iterator[None]:
    weight = module.weight.data
    if weight.is_cuda:
        module.weight.data = weight.T.contiguous().T
    try:
        yield
    finally:
        module.weight.data = weight
