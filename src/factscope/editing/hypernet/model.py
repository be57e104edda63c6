"""Hypernetwork: the base class of MEND and KE, which map gradient factors to weight changes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors, WeightShape

EPSILON = 1e-7
"""Avoids a division by 0 for entries that never vary."""
LR_OF_STEP_SIZES = 1e-2
"""Adam's learning rate for the edits' step sizes, which are learned as logarithms."""


class RunningNorm(nn.Module):
    """Running mean and standard deviation of each entry of a vector."""

    count: Tensor
    mean: Tensor
    m2: Tensor
    """Sum of squared deviations from the mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("m2", torch.zeros(width))

    @torch.no_grad()
    def update(self, rows: Float[Tensor, "row width"]) -> None:
        """Include more vectors (Chan's parallel form of Welford's algorithm)."""
        if not len(rows):
            return
        new = len(rows)
        total = self.count + new
        mean = rows.mean(0)
        gap = mean - self.mean
        self.m2 += (rows - mean).square().sum(0) + gap.square() * (self.count * new / total)
        self.mean += gap * (new / total)
        self.count += new

    @property
    def std(self) -> Float[Tensor, " width"]:
        """The standard deviation of each entry; 1 with fewer than two vectors."""
        std = (self.m2 / (self.count - 1).clamp(min=1)).sqrt()
        return torch.where(self.count > 1, std, torch.ones_like(std))

    @property
    def rms(self) -> Float[Tensor, ""]:
        """The root mean square over all entries; 1 without a vector."""
        rms = (self.m2 / self.count.clamp(min=1) + self.mean.square()).mean().sqrt()
        return torch.where(self.count > 0, rms, torch.ones_like(rms)) + EPSILON

    def normalise(self, rows: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Shift and scale vectors to mean 0 and standard deviation 1."""
        return (rows - self.mean) / (self.std + EPSILON)


@dataclass(frozen=True, kw_only=True)
class EditedWeights:
    """The weights of a model that a network edits; they determine the network's widths."""

    shapes: tuple[WeightShape, ...]
    layers: tuple[int, ...]
    hidden_size: int
    """Width of the model's hidden states."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EditedWeights":
        """From plain values."""
        return cls(
            shapes=tuple(WeightShape(*shape) for shape in values["shapes"]),
            layers=tuple(values["layers"]),
            hidden_size=values["hidden_size"],
        )


@dataclass(frozen=True, eq=False)
class EmbeddedRequest:
    """Token embeddings of the facts to write, padded on the right."""

    embedded: Float[Tensor, "fact token width"]
    lengths: Int[Tensor, " fact"]


class Hypernetwork(nn.Module, ABC):
    """A network that maps the gradient factors of facts to changes of the edited weights.

    Facts are independent: a fact's changes depend on that fact alone.
    """

    method: ClassVar[str]

    def __init__(self, config: Any, weights: EditedWeights) -> None:
        super().__init__()
        self.config, self.weights = config, weights
        self.x_norms = nn.ModuleList(RunningNorm(shape.keys) for shape in weights.shapes)
        self.delta_norms = nn.ModuleList(RunningNorm(shape.values) for shape in weights.shapes)

    def norms(self, i: int) -> tuple[RunningNorm, RunningNorm]:
        """The running normalisation of x and δ at the i-th weight."""
        return cast("RunningNorm", self.x_norms[i]), cast("RunningNorm", self.delta_norms[i])

    def update_norms(self, factors: Sequence[GradientFactors]) -> None:
        """Include the factors of training examples in the running normalisation."""
        for i, weight_factors in enumerate(factors):
            x_norm, delta_norm = self.norms(i)
            x_norm.update(weight_factors.x[weight_factors.mask])
            delta_norm.update(weight_factors.delta[weight_factors.mask])

    def forward(
        self, factors: Sequence[GradientFactors], request: EmbeddedRequest
    ) -> list[FactorChange]:
        """The change of each weight for each fact."""
        return self.changes(factors, self.encode(request))

    def encode(self, request: EmbeddedRequest) -> Float[Tensor, "fact state"]:
        """An encoding of the facts' tokens, for `changes`; empty by default."""
        return request.embedded.new_zeros(len(request.lengths), 0)

    @abstractmethod
    def changes(
        self, factors: Sequence[GradientFactors], encoded: Float[Tensor, "fact state"]
    ) -> list[FactorChange]:
        """The change of each weight for each fact, given `encode`'s result."""

    @abstractmethod
    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, as torch's optimisers take them."""
