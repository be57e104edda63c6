"""MEND: networks that transform the factors of a gradient (Mitchell et al. 2021; App. E.4).

Each token's x and δ are normalised and pass together through a residual network of low-rank layers
that starts as the identity:

    h ← h + σ(scale_i ⊙ (U V h + b) + shift_i),    h = [norm(x); norm(δ)]

Weights of one shape share U, V and b; scale and shift belong to the i-th of them. σ is a ReLU, and
the identity in the last layer. The outputs x̃ and δ̃ give the edit, with a learned step size α_W for
each weight:

    ΔW = -α_W Σ_t δ̃_t x̃_tᵀ
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors
from factscope.editing.hypernet.model import LR_OF_STEP_SIZES, EditedWeights, Hypernetwork
from factscope.editing.hypernet.settings import MendConfig


class LowRankLayer(nn.Module):
    """h + σ(scale_i ⊙ (U V h + b) + shift_i); U = 0 at first, so it starts as the identity."""

    def __init__(self, width: int, rank: int, weights: int, *, relu: bool) -> None:
        super().__init__()
        rank = min(rank, width)
        self.down = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(weights, width))
        self.shift = nn.Parameter(torch.zeros(weights, width))
        self.relu = relu

    def forward(self, h: Float[Tensor, "row width"], i: int) -> Float[Tensor, "row width"]:
        """Transform rows that belong to the i-th weight of this shape."""
        update = (h @ self.down.T) @ self.up.T + self.bias
        update = update * self.scale[i] + self.shift[i]
        # At 0, where training starts, clamp has gradient 1; relu would have 0 and learn nothing.
        return h + (update.clamp(min=0) if self.relu else update)


class MendNetwork(Hypernetwork):
    """A network for each shape of weight, and a step size for each weight."""

    method: ClassVar[str] = "mend"

    def __init__(self, config: MendConfig, weights: EditedWeights) -> None:
        super().__init__(config, weights)
        sizes = [(shape.keys, shape.values) for shape in weights.shapes]
        distinct = list(dict.fromkeys(sizes))
        self.slots = [(distinct.index(size), sizes[:i].count(size)) for i, size in enumerate(sizes)]
        """For each weight the index of its network, and its index within that network."""
        self.networks = nn.ModuleList(
            nn.ModuleList(
                LowRankLayer(
                    sum(size), config.rank, sizes.count(size), relu=i < config.hidden_layers
                )
                for i in range(config.hidden_layers + 1)
            )
            for size in distinct
        )
        self.log_edit_lr = nn.Parameter(torch.full((len(sizes),), math.log(config.edit_lr)))

    def changes(
        self, factors: Sequence[GradientFactors], encoded: Float[Tensor, "fact state"]
    ) -> list[FactorChange]:
        """The change of each weight for each fact."""
        return [self._change(i, part) for i, part in enumerate(factors)]

    def _change(self, i: int, factors: GradientFactors) -> FactorChange:
        x_norm, delta_norm = self.norms(i)
        x = x_norm.normalise(factors.select(factors.x))
        delta = delta_norm.normalise(factors.select(factors.delta))
        network, slot = self.slots[i]
        h = torch.cat([x, delta], dim=-1)
        for layer in self.networks[network]:  # pyright: ignore[reportGeneralTypeIssues]
            h = layer(h, slot)
        x, delta = h.split([x.shape[-1], delta.shape[-1]], dim=-1)
        edit_lr = self.log_edit_lr[i].exp()
        return FactorChange(B=factors.scatter(-edit_lr * delta).mT, A=factors.scatter(x))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The networks at `lr`, the step sizes at their own learning rate."""
        return [
            {"params": list(self.networks.parameters()), "lr": lr},
            {"params": [self.log_edit_lr], "lr": LR_OF_STEP_SIZES},
        ]
