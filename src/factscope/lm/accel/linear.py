"""Blocks made faster for a while, with the same results to within their precision.

Inside `quick(block)`, GELU that older model code spells out as eight small operations is torch's
own fused function; and on a GPU, single-precision weights are multiplied on half-precision tensor
cores (see `lm.products`), and GPT-2's, stored with the other axis first, are turned round.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factscope.lm.accel.matmul import available, half_product, split_product

__all__ = [
    "MANY",
    "Products",
    "Quickly",
    "all_replaced",
    "products_of",
    "quick",
    "quick_blocks",
    "replaced",
    "splits",
]

MANY = 8
"""From so many facts or texts on, computing takes a GPU longer than launching: set-up then pays."""
SPELLED_OUT = ("NewGELUActivation", "FastGELUActivation", "BloomGelu")
"""Modules of transformers that write the tanh form of GELU in single operations."""

LINEAR = ("Linear", "Conv1D")
"""Modules that multiply by a matrix and add a bias; Falcon's own kind is changed in place after."""

Products = dict[nn.Module, Callable[..., Any]]
"""Modules, and what answers their calls instead."""


@dataclass(frozen=True)
class Quickly:
    """A way to make some blocks quick: inside `with quickly():` they are."""

    make: Callable[[], AbstractContextManager[None]]
    version: int = 0
    """Another number where other products are used."""

    def __call__(self) -> AbstractContextManager[None]:
        """The blocks are quick inside it."""
        return self.make()


@contextmanager
def quick(block: nn.Module, *, split_products: bool = True) -> Iterator[None]:
    """Run the block's calls faster while inside."""
    with all_replaced(products_of(block, split_products=split_products)):
        yield


@contextmanager
def quick_blocks(blocks: Iterable[nn.Module], *, split_products: bool = True) -> Iterator[None]:
    """Run all these blocks faster while inside."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(quick(block, split_products=split_products))
        yield


def products_of(block: nn.Module, *, split_products: bool = True) -> Products:
    """The block's modules that can be faster, and how."""
    found = {
        module: _faster(module, split_products)
        for module in block.modules()
        if "forward" not in vars(module)  # else accelerate holds it
    }
    return {module: forward for module, forward in found.items() if forward is not None}


def splits(dtype: torch.dtype) -> bool:
    """Whether weights of that kind are multiplied in several parts: float32 that is not TF32."""
    return dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"


def _faster(module: Any, split_products: bool) -> Callable[[Tensor], Tensor] | None:
    """A faster forward of the module, where there is one."""
    kind = type(module).__name__
    if kind in SPELLED_OUT:
        return _gelu
    if kind not in LINEAR or not _on_gpu(module.weight):
        return None
    weight = module.weight if kind == "Conv1D" else module.weight.T
    if weight.dtype == torch.float32 and split_products and available(weight.device):
        made = split_product if splits(weight.dtype) else half_product
        return made(weight, module.bias)
    if kind == "Conv1D":
        turned = weight.T.contiguous()
        return lambda x: nn.functional.linear(x, turned, module.bias)
    return None


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


def _gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


@contextmanager
def all_replaced(products: Products) -> Iterator[None]:
    """All those modules' calls answered by other functions while inside."""
    with ExitStack() as stack:
        for module, forward in products.items():
            stack.enter_context(replaced(module, forward))
        yield


@contextmanager
def replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """The module's calls answered by another function while inside."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward  # back to the class's own
