"""The gradient of a linear layer, as the factors that it is made of (MEND, §3).

For one line of tokens the gradient of a loss with respect to W is Σ_t δ_t x_tᵀ: x_t is what the
layer reads at token t, δ_t the gradient with respect to what it returns there. The factors are
small, each fact of a batch has its own, and whatever is made of them is an edit of low rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from factscope.editing.learned.halves import Halves
from factscope.editing.learned.lines import Lines
from factscope.editing.learned.places import Place
from factscope.lm.hooks import on_pass

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Change", "Factors", "changed", "factors_of"]


@dataclass(frozen=True, eq=False)
class Factors:
    """One weight's gradient, fact by fact."""

    x: Float[Tensor, "fact token key"]
    delta: Float[Tensor, "fact token value"]

    @cached_property
    def real(self) -> Bool[Tensor, "fact token"]:
        """The tokens that the loss depends on."""
        return (self.delta != 0).any(-1)

    @property
    def alone(self) -> bool:
        """Whether there is one fact only. All its tokens are looked at, so that how many are real
        need not be known (`learned.passes`)."""
        return len(self.x) == 1

    def rows(self, table: Float[Tensor, "fact token width"]) -> Float[Tensor, "row width"]:
        """What the table has at the tokens that are looked at."""
        return table[0] if self.alone else table[self.real]

    def table(self, rows: Float[Tensor, "row width"]) -> Float[Tensor, "fact token width"]:
        """Those rows where they came from; zeros at the tokens that are not real."""
        real = self.real[..., None]
        none = rows.new_zeros(*self.real.shape, rows.shape[-1])
        return torch.where(real, rows, none) if self.alone else none.masked_scatter(real, rows)

    def gradient(self) -> Float[Tensor, "fact value key"]:
        """The gradient itself."""
        return self.delta.mT @ self.x


@dataclass(frozen=True, eq=False)
class Change:
    """One weight's change, fact by fact: ΔW = B A."""

    B: Float[Tensor, "fact value rank"]
    A: Float[Tensor, "fact rank key"]

    def matrix(self) -> Float[Tensor, "fact value key"]:
        """ΔW itself."""
        return self.B @ self.A


def factors_of(
    lm: "LM", places: Sequence[Place], halves: Halves, entering: Float[Tensor, "fact token width"],
    lines: Lines,
) -> tuple[list[Factors], Float[Tensor, " fact"]]:  # fmt: skip
    """Every place's factors of each fact's loss, and the losses."""
    read: list[Tensor] = [torch.empty(0)] * len(places)
    probes: list[Tensor] = [torch.empty(0)] * len(places)

    def probe(i: int, x: Tensor, output: Tensor) -> Tensor:
        """Add a zero whose gradient is δ."""
        read[i] = x.detach()
        probes[i] = torch.zeros_like(output, requires_grad=True)
        return output + probes[i]

    def at(i: int) -> "tuple":
        return places[i].module, lambda x, output: probe(i, x, output)

    with torch.enable_grad(), on_pass(*map(at, range(len(places)))):
        losses = lines.losses(lines.logs(lm, halves.above(entering)))
        slopes = torch.autograd.grad(losses.sum(), probes)

    def by_fact(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(entering), -1, tensor.shape[-1]).float().to(lm.device)

    both = zip(read, slopes, strict=True)
    return [Factors(by_fact(x), by_fact(delta)) for x, delta in both], losses.detach()


@contextmanager
def changed(places: Sequence[Place], changes: Sequence[Change]) -> Iterator[None]:
    """Inside, each fact's lines see its own change; lines of a fact follow one another."""

    def at(place: Place, change: Change) -> "tuple":
        def add(x: Tensor, output: Tensor) -> Tensor:
            A, B = change.A.to(x.device), change.B.to(x.device)
            mine = x.reshape(len(A), -1, x.shape[-1]).float()
            shift = torch.bmm(torch.bmm(mine, A.mT), B.mT)
            return output + shift.reshape(output.shape).to(output.dtype)

        return place.module, add

    with on_pass(*(at(p, c) for p, c in zip(places, changes, strict=True))):
        yield
