"""Hypernetwork: what turns the factors of facts' gradients into changes of weights."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.learned.factors import Change, Factors
from factscope.editing.learned.places import Shape
from factscope.editing.learned.usual import Usual

__all__ = ["Design", "Hypernetwork", "Told"]


@dataclass(frozen=True, kw_only=True)
class Design:
    """What a network must be built alike for its weights to fit."""

    places: tuple[Shape, ...]
    """The weights that it changes."""
    layers: tuple[int, ...]
    """The layers that these are in."""
    width: int
    """Of the model's states."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> "Design":
        """The design of plain values; what is missing or too much is a TypeError."""
        places = tuple((str(name), int(keys), int(values)) for name, keys, values in said["places"])
        return cls(**{**said, "places": places, "layers": tuple(said["layers"])})


@dataclass(frozen=True, eq=False)
class Told:
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

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.usual_x = nn.ModuleList(Usual(keys) for _, keys, _ in design.places)
        self.usual_delta = nn.ModuleList(Usual(values) for _, _, values in design.places)

    def usual(self, place: int) -> tuple[Usual, Usual]:
        """What x and δ usually are at a place."""
        return cast("Usual", self.usual_x[place]), cast("Usual", self.usual_delta[place])

    def observe(self, factors: Sequence[Factors]) -> None:
        """Take the factors of facts in training into what is usual."""
        for place, some in enumerate(factors):
            x, delta = self.usual(place)
            x.observe(some.x[some.real])
            delta.observe(some.delta[some.real])

    def forward(self, factors: Sequence[Factors], told: Told) -> list[Change]:
        """Each place's change for each fact."""
        return self.changes(factors, self.read(told))

    def read(self, told: Told) -> Float[Tensor, "fact state"]:
        """What it makes of the facts' tokens before it sees a gradient: nothing, if not said."""
        return told.embedded.new_zeros(len(told.lengths), 0)

    @abstractmethod
    def changes(
        self, factors: Sequence[Factors], read: Float[Tensor, "fact state"]
    ) -> list[Change]:
        """Each place's change for each fact."""

    @abstractmethod
    def groups(self, rate: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, as torch's optimisers take them."""
