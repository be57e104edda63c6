"""Hypernetwork: what turns the factors of facts' gradients into changes of weights.

What factors usually are: running means and spreads, in whatever pieces they come.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors, WeightShape

__all__ = [
    "EmbeddedRequest",
    "HypernetConfig",
    "Hypernetwork",
    "RunningNorm",
]

SMALL = 1e-7
"""What keeps an entry that never moved from being divided by 0."""


class RunningNorm(nn.Module):
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


@dataclass(frozen=True, kw_only=True)
class HypernetConfig:
    """What a network must be built alike for its weights to fit."""

    places: tuple[WeightShape, ...]
    """The weights that it changes."""
    layers: tuple[int, ...]
    """The layers that these are in."""
    width: int
    """Of the model's states."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "HypernetConfig":
        """The design of plain values; what is missing or too much is a TypeError."""
        places = tuple((str(name), int(keys), int(values)) for name, keys, values in said["places"])
        return cls(**{**said, "places": places, "layers": tuple(said["layers"])})


@dataclass(frozen=True, eq=False)
class EmbeddedRequest:
    """The facts' own tokens, as the model embeds them."""

    embedded: Float[Tensor, "fact token width"]
    lengths: Int[Tensor, " fact"]

    @property
    def real(self) -> Bool[Tensor, "fact token"]:
        """The tokens that a fact has."""
        slots = torch.arange(self.embedded.shape[1], device=self.lengths.device)
        return slots < self.lengths[:, None]


class Hypernetwork(nn.Module, ABC):
    """A network of one design. Facts never mix: each fact's change depends on that fact alone."""

    method: ClassVar[str]

    def __init__(self, design: HypernetConfig) -> None:
        super().__init__()
        self.design = design
        self.usual_x = nn.ModuleList(RunningNorm(keys) for _, keys, _ in design.places)
        self.usual_delta = nn.ModuleList(RunningNorm(values) for _, _, values in design.places)

    def usual(self, place: int) -> tuple[RunningNorm, RunningNorm]:
        """What x and δ usually are at a place."""
        return cast("RunningNorm", self.usual_x[place]), cast(
            "RunningNorm", self.usual_delta[place]
        )

    def observe(self, factors: Sequence[GradientFactors]) -> None:
        """Take the factors of facts in training into what is usual."""
        for place, some in enumerate(factors):
            x, delta = self.usual(place)
            x.observe(some.x[some.real])
            delta.observe(some.delta[some.real])

    def forward(
        self, factors: Sequence[GradientFactors], told: EmbeddedRequest
    ) -> list[FactorChange]:
        """Each place's change for each fact."""
        return self.changes(factors, self.read(told))

    def read(self, told: EmbeddedRequest) -> Float[Tensor, "fact state"]:
        """What it makes of the facts' tokens before it sees a gradient: nothing, if not said."""
        return told.embedded.new_zeros(len(told.lengths), 0)

    @abstractmethod
    def changes(
        self, factors: Sequence[GradientFactors], read: Float[Tensor, "fact state"]
    ) -> list[FactorChange]:
        """Each place's change for each fact."""

    @abstractmethod
    def groups(self, lr: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, as torch's optimisers take them."""
