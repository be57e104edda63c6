"""What factors usually are: running means and spreads, in whatever pieces they come."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Usual"]

SMALL = 1e-7
"""What keeps an entry that never moved from being divided by 0."""


class Usual(nn.Module):
    """The mean and spread of each entry of a vector, over all that were seen."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("squares", torch.zeros(width))

    @torch.no_grad()
    def observe(self, rows: Float[Tensor, "row width"]) -> None:
        """Take more vectors in (Chan's way to join two samples)."""
        if not len(rows):
            return
        more = len(rows)
        both = self.count + more
        mean = rows.mean(0)
        gap = mean - self.mean
        self.squares += (rows - mean).square().sum(0) + gap.square() * (self.count * more / both)
        self.mean += gap * (more / both)
        self.count += more

    @property
    def spread(self) -> Float[Tensor, " width"]:
        """The standard deviation of each entry; 1 before there are two vectors."""
        known = (self.squares / (self.count - 1).clamp(min=1)).sqrt()
        return torch.where(self.count > 1, known, torch.ones_like(known))

    def normed(self, rows: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Vectors with the mean taken off, in units of the spread."""
        return (rows - self.mean) / (self.spread + SMALL)

    @property
    def size(self) -> Float[Tensor, ""]:
        """The root mean square of all entries; 1 before there was a vector."""
        known = (self.squares / self.count.clamp(min=1) + self.mean.square()).mean().sqrt()
        return torch.where(self.count > 0, known, torch.ones_like(known)) + SMALL
