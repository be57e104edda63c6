"""Sums of k kᵀ over two halves of a text, in float32 on the device of the keys.

k kᵀ is symmetric: only the blocks on and above its diagonal are summed, five eighths of the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.errors import BadStats
from factscope.lm.products import MIXED, available

__all__ = ["Sums", "add_products_"]

STRIPS = 4
"""A product is made in so many strips of rows, each from its diagonal block rightwards."""


def add_products_(total: Float[Tensor, "key key"], keys: Float[Tensor, "token key"]) -> None:
    """Add Σ k kᵀ to the upper triangle of the total; what is below it is not to be read.

    Float32 keys are multiplied as torch's matmul precision says, so TF32 only where that was
    chosen. Half-precision keys are multiplied as they are: their products are exact in float32.
    """
    mixed = keys.dtype != torch.float32 and keys.is_cuda and available(keys.device)
    keys = keys if mixed else keys.float()
    width = total.shape[0]
    strip = -(-width // STRIPS // 8) * 8  # tensor cores like multiples of eight
    for start in range(0, width, strip):
        part = total[start : start + strip, start:]
        left, right = keys[:, start : start + strip].T, keys[:, start:]
        if mixed:
            torch.addmm(part, left, right, out=part, **MIXED)
        else:
            part.addmm_(left, right)


@dataclass
class Sums:
    """Two half sums for each of some layers, and how many keys each half has."""

    layers: Sequence[int]
    halves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer; made where the layer's first keys are found."""
    counts: tuple[int, int] = (0, 0)
    """Keys in each half, the same for all layers."""

    @property
    def tokens(self) -> int:
        """Keys in both halves."""
        return sum(self.counts)

    def add_(self, layer: int, keys: Float[Tensor, "row token key"], first: int) -> None:
        """Add a batch's keys: its first rows to one half, the others to the other."""
        one, other = self.halves.get(layer) or (_zeros(keys), _zeros(keys))
        self.halves[layer] = one.to(keys.device), other.to(keys.device)  # a resumed run's: CPU
        for half, some in zip(self.halves[layer], (keys[:first], keys[first:]), strict=True):
            if len(some):
                add_products_(half, some.flatten(0, 1))

    def count_(self, first: int, second: int) -> None:
        """Say how many keys the batch had in each half."""
        self.counts = (self.counts[0] + first, self.counts[1] + second)

    def gap(self, layer: int) -> float | None:
        """‖C₁ - C₂‖ / ‖C‖ of the two halves; None while one is empty."""
        if not all(self.counts):
            return None
        one, other = self.halves[layer]
        apart = _norm(one / self.counts[0] - other / self.counts[1])
        return apart / _norm((one + other) / self.tokens)

    def mean(self, layer: int) -> Float[Tensor, "key key"]:
        """C of both halves together, where they are."""
        one, other = self.halves[layer]
        upper = ((one + other) / self.tokens).triu_()
        if not upper.isfinite().all():
            raise BadStats(
                f"the keys of layer {layer} are not all finite; load the model with "
                "--dtype bfloat16 or float32"
            )
        return upper.add_(upper.triu(1).T)


def _zeros(keys: Float[Tensor, "row token key"]) -> Float[Tensor, "key key"]:
    return torch.zeros(keys.shape[-1], keys.shape[-1], device=keys.device)


def _norm(upper: Float[Tensor, "key key"]) -> float:
    """The Frobenius norm of a symmetric matrix, from its upper triangle."""
    beside, diagonal = upper.triu(1).norm(), upper.diagonal().norm()
    return (2 * beside**2 + diagonal**2).sqrt().item()
