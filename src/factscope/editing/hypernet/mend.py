"""MEND: networks that transform the factors of a gradient (Mitchell et al. 2021; App. E.4).

Each token's x and δ, in units of what is usual at their place, pass a network of low-rank layers
that begins as the identity. Weights of one shape share a network, which shifts and scales its
layers for each of them. What comes out, x̃ and δ̃, makes the edit:

    ΔW = -rate · Σ_t δ̃_t x̃_tᵀ,    a learned rate for each weight
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors
from factscope.editing.hypernet.model import HypernetConfig, Hypernetwork

__all__ = ["MendConfig", "MendNetwork"]

RATES = 1e-2
"""The learning rate of the edits' rates, which are learned as logarithms."""


@dataclass(frozen=True, kw_only=True)
class MendConfig(HypernetConfig):
    """How a MEND network is built."""

    rank: int = 512
    """Of its layers; the published one is 1920, for weights of 1600 × 6400."""
    hidden: int = 1
    """Layers before the last."""
    lr: float = 1e-4
    """What edits are multiplied by at first."""


class LowRankLayer(nn.Module):
    """h + σ(scale · (U V h + b) + shift), U = 0 at first; σ cuts at 0, or not in the last layer."""

    def __init__(self, width: int, rank: int, places: int, *, cut: bool) -> None:
        super().__init__()
        rank = min(rank, width)
        self.down = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(places, width))
        self.shift = nn.Parameter(torch.zeros(places, width))
        self.cut = cut

    def forward(self, h: Float[Tensor, "row width"], place: int) -> Float[Tensor, "row width"]:
        """Transform the rows of one of the places."""
        moved = (h @ self.down.T) @ self.up.T + self.bias
        moved = moved * self.scale[place] + self.shift[place]
        # Clamped, not rectified: at exactly 0, where all begins, a clamp still has a slope.
        return h + (moved.clamp(min=0) if self.cut else moved)


class MendNetwork(Hypernetwork):
    """The networks of all shapes, what is usual at each place, and the edits' rates."""

    method: ClassVar[str] = "mend"

    def __init__(self, design: MendConfig) -> None:
        super().__init__(design)
        shapes = [(keys, values) for _, keys, values in design.places]
        self.kinds = list(dict.fromkeys(shapes))
        self.seats = [
            (self.kinds.index(shape), shapes[:i].count(shape)) for i, shape in enumerate(shapes)
        ]
        """For each place its network, and which of that network's places it is."""
        self.networks = nn.ModuleList(
            nn.ModuleList(
                LowRankLayer(sum(kind), design.rank, shapes.count(kind), cut=i < design.hidden)
                for i in range(design.hidden + 1)
            )
            for kind in self.kinds
        )
        self.log_rates = nn.Parameter(torch.full((len(shapes),), math.log(design.lr)))

    def changes(
        self, factors: Sequence[GradientFactors], read: Float[Tensor, "fact state"]
    ) -> list[FactorChange]:
        """Each place's change for each fact."""
        return [self._change(i, some) for i, some in enumerate(factors)]

    def _change(self, place: int, factors: GradientFactors) -> FactorChange:
        usual_x, usual_delta = self.usual(place)
        x = usual_x.normed(factors.rows(factors.x))
        delta = usual_delta.normed(factors.rows(factors.delta))
        network, seat = self.seats[place]
        both = torch.cat([x, delta], dim=-1)
        for layer in self.networks[network]:  # pyright: ignore[reportGeneralTypeIssues]
            both = layer(both, seat)
        x, delta = both.split([x.shape[-1], delta.shape[-1]], dim=-1)
        lr = self.log_rates[place].exp()
        return FactorChange(B=factors.table(-lr * delta).mT, A=factors.table(x))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """The networks at the rate, the edits' rates at their own."""
        rates = [self.log_rates]
        return [
            {"params": list(self.networks.parameters()), "lr": lr},
            {"params": rates, "lr": RATES},
        ]
