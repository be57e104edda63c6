"""SecondMoment: C = E[k kᵀ] of the keys k that a layer's MLP output weight receives.

C says which directions the keys of ordinary text use. An edit divides by it: of all the changes
that make W k* = v*, the one along C⁻¹ k* disturbs other keys least (eq. 2 of the paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.errors import BadStats

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["SecondMoment", "gap_between", "merge"]

Factors = dict[tuple[float, torch.device], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondMoment:
    """The uncentred second moment of a layer's keys, with what it was made from."""

    matrix: Float[Tensor, "key key"]
    """C, float32."""
    layer: int
    tokens: int
    """How many keys were averaged."""
    corpus: str
    """What text, in words."""
    model: str
    """The model's name."""
    fingerprint: str
    """The fingerprint of its weights."""
    halves: tuple[tuple[int, float], ...] = ()
    """Tokens so far and the relative gap ‖C₁ - C₂‖ / ‖C‖ between two halves of the text."""
    _factors: Factors = field(default_factory=dict, init=False, repr=False)

    @property
    def width(self) -> int:
        """How wide a key is."""
        return self.matrix.shape[0]

    @property
    def gap(self) -> float | None:
        """The last gap between two halves of the text, where one was measured."""
        return self.halves[-1][1] if self.halves else None

    def solve(self, keys: Float[Tensor, "n key"], *, ridge: float = 0.0) -> Float[Tensor, "n key"]:
        """C⁻¹ k for each key, on the keys' device; `ridge` · mean(diag C) is added to C's diagonal.

        The factor is computed in float64 and kept, so that further keys cost next to nothing.
        """
        factor = self._factor(ridge, keys.device)
        wide = keys.to(factor)
        solved = torch.cholesky_solve(wide.T, factor).T
        return solved.to(device=keys.device, dtype=torch.promote_types(keys.dtype, torch.float32))

    def check(self, lm: "LM", layer: int) -> None:
        """These are statistics of that layer of that model, or an error says which they are of."""
        if self.fingerprint != lm.fingerprint:
            raise BadStats(
                f"the statistics are of {self.model} (fingerprint {self.fingerprint[:16]}), not of "
                f"{lm.name} as loaded here ({lm.fingerprint[:16]}); make them with "
                f"`factscope stats --model {lm.name} --layer {layer}`"
            )
        if self.layer != layer:
            raise BadStats(
                f"the statistics are of layer {self.layer} of {self.model}, layer {layer} is "
                f"wanted; make them with `factscope stats --model {lm.name} --layer {layer}`"
            )
        width = lm.mlp_weight(layer).shape[1]
        if self.width != width:
            raise BadStats(
                f"the statistics are {self.width} wide, the keys of layer {layer} of {lm.name} "
                f"are {width}; make them anew with `factscope stats`"
            )

    def _factor(self, ridge: float, device: torch.device) -> Float[Tensor, "key key"]:
        """The lower Cholesky factor of C with the ridge."""
        place = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        if (ridge, place) not in self._factors:
            self._factors[ridge, place] = self._factorise(ridge, place)
        return self._factors[ridge, place]

    def _factorise(self, ridge: float, device: torch.device) -> Float[Tensor, "key key"]:
        matrix = self.matrix.to(device, torch.float64, copy=True)
        diagonal = matrix.diagonal()
        diagonal += ridge * diagonal.mean()
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed.item() or not factor.isfinite().all():
            raise BadStats(
                f"C of layer {self.layer} cannot be inverted: {self.tokens:,} tokens for keys "
                f"{self.width:,} wide, ridge {ridge:g}; collect more tokens (ten times the width "
                "or more), or raise the ridge"
            )
        return factor


def merge(moments: Sequence[SecondMoment]) -> SecondMoment:
    """The second moment of several texts together, each weighted by its tokens.

    The history of the first is kept; its last point becomes the gap between the odd and the even
    ones of those merged.
    """
    if not moments:
        raise BadStats("no statistics to merge; give at least one file")
    first = moments[0]
    for other in moments[1:]:
        _must_fit(first, other)
    _must_differ(moments)
    tokens = sum(moment.tokens for moment in moments)
    halves = first.halves
    if len(moments) > 1:
        parts = mean_of(moments[::2]), mean_of(moments[1::2])
        halves = (*halves, (tokens, gap_between(*parts, mean_of(moments))))
    return SecondMoment(
        matrix=mean_of(moments),
        layer=first.layer,
        tokens=tokens,
        corpus="; ".join(dict.fromkeys(moment.corpus for moment in moments)),
        model=first.model,
        fingerprint=first.fingerprint,
        halves=halves,
    )


def mean_of(moments: Sequence[SecondMoment]) -> Float[Tensor, "key key"]:
    """The matrices' mean, weighted by tokens, where the first of them is."""
    total = torch.zeros_like(moments[0].matrix)
    tokens = sum(moment.tokens for moment in moments)
    for moment in moments:
        total.add_(moment.matrix.to(total.device), alpha=moment.tokens / tokens)
    return total


def gap_between(
    one: Float[Tensor, "key key"], other: Float[Tensor, "key key"], whole: Float[Tensor, "key key"]
) -> float:
    """‖C₁ - C₂‖ / ‖C‖ in the Frobenius norm."""
    return ((one - other).norm() / whole.norm()).item()


def _must_fit(first: SecondMoment, other: SecondMoment) -> None:
    """Statistics of one layer of one model."""
    names = [
        f"layer {m.layer} of {m.model} ({m.fingerprint[:16]}), {m.width} wide"
        for m in (first, other)
    ]
    if names[0] != names[1] or first.fingerprint != other.fingerprint:
        raise BadStats(f"cannot merge {names[0]} with {names[1]}; give files of one layer")


def _must_differ(moments: Sequence[SecondMoment]) -> None:
    """The same text twice would count double."""
    for i, one in enumerate(moments):
        for other in moments[i + 1 :]:
            alike = (one.corpus, one.tokens) == (other.corpus, other.tokens)
            if alike and torch.equal(one.matrix.cpu(), other.matrix.cpu()):
                raise BadStats(
                    f"the same statistics are given twice ({one.corpus}, {one.tokens:,} tokens); "
                    "give each file once"
                )
