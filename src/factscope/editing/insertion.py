"""The closed form: the change of W that moves the value of given keys and disturbs others least.

Of all ΔW with ΔW k = r, the one with the smallest ‖ΔW C^½‖ is r (C⁻¹k)ᵀ / ((C⁻¹k)ᵀ k): the paper's
eq. 2. For several keys at once it is R (U Kᵀ)⁻¹ U, with the directions C⁻¹k as the rows of U.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.edit import LowRank

__all__ = ["division_factors", "insert", "insert_each"]


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
