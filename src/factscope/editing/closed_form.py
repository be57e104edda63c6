"""The closed form: the change of W that moves the value of given keys and disturbs others least.

Of all ΔW with ΔW k = r, the one with the smallest ‖ΔW C^½‖ is r (C⁻¹k)ᵀ / ((C⁻¹k)ᵀ k): the paper's
eq. 2. For several keys at once it is R (U Kᵀ)⁻¹ U, with the directions C⁻¹k as the rows of U.

The second moment that an edit needs: given, found, or collected where there is none yet.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.edit import LowRank
from factscope.errors import BadSetting
from factscope.stats.second_moment import SecondMoment, find_moment

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "SecondMomentSetting",
    "describe_second_moment",
    "division_factors",
    "insert",
    "insert_each",
    "resolve_second_moment",
]


def insert(
    keys: Float[Tensor, "fact key"],
    moved: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> LowRank:
    """One change that moves every key's value by its row of `moved`."""
    U = _unit(directions)
    A = torch.linalg.solve(U @ keys.double().T, U)
    return LowRank(moved.T.float().contiguous().cpu(), A.float().cpu())


def insert_each(
    keys: Float[Tensor, "fact key"],
    moved: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> list[LowRank]:
    """A change for each key alone."""
    U = _unit(directions)
    A = (U / (U * keys.double()).sum(-1, keepdim=True)).float().cpu()
    B = moved.float().cpu()
    return [LowRank(b[:, None].clone(), a[None].clone()) for a, b in zip(A, B, strict=True)]


def division_factors(
    keys: Float[Tensor, "fact key"], directions: Float[Tensor, "fact key"]
) -> list[float]:
    """The cosine between each key and its direction, by which its update is divided."""
    K = keys.double()
    return ((_unit(directions) * K).sum(-1) / K.norm(dim=-1)).tolist()


def _unit(directions: Tensor) -> Tensor:
    U = directions.double()
    return U / U.norm(dim=-1, keepdim=True)


log = logging.getLogger(__name__)

SecondMomentSetting = (
    SecondMoment | Sequence[SecondMoment] | Sequence[Path] | Literal["find", "identity"]
)
"""C: as it is, of several layers, in files or folders, wherever it is found, or none (C = I)."""


def resolve_second_moment(lm: "LM", layer: int, moment: SecondMomentSetting) -> SecondMoment | None:
    """C of a layer; None for the identity."""
    if moment == "identity":
        log.warning("C is left out: this is not the paper's method, and disturbs other facts more")
        return None
    if isinstance(moment, SecondMoment):
        moment.check(lm, layer)
        return moment
    for given in () if isinstance(moment, str) else moment:
        if isinstance(given, SecondMoment) and given.layer == layer:
            return resolve_second_moment(lm, layer, given)
    paths = [] if isinstance(moment, str) else [x for x in moment if isinstance(x, Path)]
    found = find_moment(lm, layer, paths)
    if found is None:
        raise BadSetting(
            f"there are no statistics of layer {layer} of {lm.name} yet; collect them once with "
            f"`factscope stats --model {lm.name} --layer {layer}` (--text FILE for your own text)"
        )
    return found


def describe_second_moment(moment: SecondMomentSetting | None) -> Any:
    """What an edit's settings say of it."""
    if isinstance(moment, SecondMoment):
        return {"layer": moment.layer, "tokens": moment.tokens, "corpus": moment.corpus}
    if moment is None or isinstance(moment, str):
        return moment or "identity"
    return [describe_second_moment(x) if isinstance(x, SecondMoment) else str(x) for x in moment]
