"""Closed form: the update of W that sets the values of given keys and changes others least.

Of all ΔW with ΔW k = r, the one with the smallest ‖ΔW C^½‖ is r (C⁻¹k)ᵀ / ((C⁻¹k)ᵀ k): eq. 2 of the
paper. For several keys at once it is R (U Kᵀ)⁻¹ U, with the directions C⁻¹k as the rows of U.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.edit import LowRank
from factscope.editing.settings import SecondMomentSetting
from factscope.errors import BadSetting
from factscope.stats.second_moment import SecondMoment, find_second_moment

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)


def insert(
    keys: Float[Tensor, "fact key"],
    residuals: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> LowRank:
    """One update that changes the value of every key by its residual."""
    U = _normalised(directions)
    A = torch.linalg.solve(U @ keys.double().T, U)
    return LowRank(residuals.T.float().contiguous().cpu(), A.float().cpu())


def insert_each(
    keys: Float[Tensor, "fact key"],
    residuals: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> list[LowRank]:
    """A rank-one update for each key on its own."""
    U = _normalised(directions)
    A = (U / (U * keys.double()).sum(-1, keepdim=True)).float().cpu()
    B = residuals.float().cpu()
    return [LowRank(b[:, None].clone(), a[None].clone()) for a, b in zip(A, B, strict=True)]


def division_factors(
    keys: Float[Tensor, "fact key"], directions: Float[Tensor, "fact key"]
) -> list[float]:
    """The cosine between each key and its direction: the update is divided by it."""
    K = keys.double()
    return ((_normalised(directions) * K).sum(-1) / K.norm(dim=-1)).tolist()


def _normalised(directions: Float[Tensor, "fact key"]) -> Float[Tensor, "fact key"]:
    """Unit vectors in float64: the length of a direction cancels, and C⁻¹k can be tiny."""
    U = directions.double()
    return U / U.norm(dim=-1, keepdim=True)


def resolve_second_moment(
    lm: "LM", layer: int, setting: SecondMomentSetting
) -> SecondMoment | None:
    """C of a layer; None for the identity."""
    if isinstance(setting, SecondMoment):
        setting.check(lm, layer)
        return setting
    if setting == "identity":
        log.warning("C is left out: this is not the paper's method and changes other facts more")
        return None
    given = [] if isinstance(setting, str) else setting
    for moment in given:
        if isinstance(moment, SecondMoment) and moment.layer == layer:
            return resolve_second_moment(lm, layer, moment)
    found = find_second_moment(lm, layer, [x for x in given if isinstance(x, Path)])
    if found is None:
        raise BadSetting(
            f"there are no statistics of layer {layer} of {lm.name}; collect them once with "
            f"`factscope stats --model {lm.name} --layers {layer}` (--text FILE for your own text)"
        )
    return found
