"""Fast linear layers: blocks whose matrix products and GELU run faster, with the same results.

While `fast_blocks` is active, float32 weights on a GPU are multiplied on half-precision tensor
cores (see `matmul`), GPT-2's transposed weights are stored the other way round, half-precision
weights of an odd width (GPT-2's vocabulary of 50,257) are padded, and GELU that older model code
writes as eight small operations is torch's fused function (also on a CPU).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.lm.accel.matmul import ALIGN, half_matmul, split_matmul, supports_mixed

UNFUSED_GELU = ("NewGELUActivation", "FastGELUActivation", "BloomGelu")
"""Modules of transformers that write the tanh form of GELU in single operations."""

LINEAR = ("Linear", "Conv1D")
"""Modules that compute x W + b. Falcon's own class is left out: its output is changed in place."""

Forwards = dict[nn.Module, Callable[..., Any]]
"""Modules, and the functions that replace their `forward`."""


def fast_forwards(part: nn.Module, *, split: bool = True) -> Forwards:
    """Faster `forward` functions of a block's (or the head's) modules.

    Without `split`, float32 weights are not multiplied in half precision.
    """
    forwards = {
        module: _fast_forward(module, split)
        for module in part.modules()
        if "forward" not in vars(module)  # otherwise accelerate has replaced it already
    }
    return {module: forward for module, forward in forwards.items() if forward is not None}


def splits_float32(dtype: torch.dtype) -> bool:
    """Whether weights of this type are multiplied in high and low parts: float32, not TF32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


@contextmanager
def fast_blocks(blocks: Iterable[nn.Module], *, split: bool = True) -> Iterator[None]:
    """Run these blocks faster while inside; copies of all their weights are made at once."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced(fast_forwards(block, split=split)))
        yield


@contextmanager
def fast_blocks_in_turn(blocks: Iterable[nn.Module], *, split: bool = True) -> Iterator[None]:
    """Run these blocks faster while inside, with copies of one block's weights at a time.

    They are made when a block is called and dropped when another one is called.
    """
    with ExitStack() as stack:
        current = _CurrentBlock(split)
        stack.callback(current.close)
        for block in blocks:
            stack.enter_context(_wrapped(block, current))
        yield


@contextmanager
def replaced(forwards: Forwards) -> Iterator[None]:
    """Replace the `forward` of these modules while inside."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            module.forward = forward
            stack.callback(delattr, module, "forward")  # restores the class's method
        yield


class _CurrentBlock:
    """The block whose fast layers are in memory."""

    def __init__(self, split: bool) -> None:
        self.split = split
        self.block: nn.Module | None = None
        self.stack = ExitStack()

    def prepare(self, block: nn.Module) -> None:
        if block is not self.block:
            self.close()
            self.stack.enter_context(replaced(fast_forwards(block, split=self.split)))
            self.block = block

    def close(self) -> None:
        self.stack.close()
        self.block = None


@contextmanager
def _wrapped(block: Any, current: _CurrentBlock) -> Iterator[None]:
    """Prepare the block's fast layers before each call, while inside."""
    # Set where accelerate moves inputs between devices.
    instance_forward = vars(block).get("forward")
    forward = block.forward

    def prepared(*args: Any, **kwargs: Any) -> Any:
        current.prepare(block)
        return forward(*args, **kwargs)

    block.forward = prepared
    try:
        yield
    finally:
        if instance_forward is None:
            del block.forward
        else:
            block.forward = instance_forward


def _fast_forward(module: Any, split: bool) -> Callable[[Tensor], Tensor] | None:
    """A faster forward of one module; None if there is none."""
    kind = type(module).__name__
    if kind in UNFUSED_GELU:
        return lambda x: nn.functional.gelu(x, approximate="tanh")
    if kind not in LINEAR or not _on_gpu(module.weight):
        return None
    weight = module.weight if kind == "Conv1D" else module.weight.T
    if weight.dtype == torch.float32 and split and supports_mixed(weight.device):
        matmul = split_matmul if splits_float32(weight.dtype) else half_matmul
        return matmul(weight, module.bias)
    if kind == "Conv1D":
        transposed = weight.T.contiguous()
        return lambda x: nn.functional.linear(x, transposed, module.bias)
    return None if weight.dtype == torch.float32 else padded_linear(module.weight, module.bias)


def padded_linear(
    weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Callable[[Tensor], Tensor] | None:
    """x ↦ x Wᵀ + b with zeros up to an aligned width, for which kernels are several times as fast;
    None if the width is aligned already."""
    width = len(weight)
    if width % ALIGN == 0:
        return None
    more = -width % ALIGN
    weight = nn.functional.pad(weight, (0, 0, 0, more))
    bias = None if bias is None else nn.functional.pad(bias, (0, more))
    return lambda x: nn.functional.linear(x, weight, bias)[..., :width]


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda
