"""Many texts written at once, each up to the same length.

All rows begin at the first position, so none needs padding or a mask: a row whose prompt is longer
than another's takes its next token from the prompt while the other already takes it from the model.
What a row draws depends on its own name and the seed only, not on who stands beside it.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["draws_of", "write_on"]

FEW = 8
"""So few tokens are not worth getting ready for."""


def draws_of(names: Sequence[str], length: int, seed: int) -> Float[Tensor, "row position"]:
    """Uniform random numbers for each row by its name: the same wherever the row stands."""
    rows = []
    for name in names:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)


@torch.no_grad()
def write_on(
    lm: "LM",
    rows: Sequence[Sequence[int]],
    draws: Float[Tensor, "row position"],
    *,
    k: int,
    steady: bool | None = None,
) -> list[list[int]]:
    """Every row continued to as many tokens as it has draws, each drawn from the k likeliest.

    `k` = 1 is the likeliest alone. Nothing stops at an end of text. `steady` steps (see
    `lm.steady`) are taken on a GPU if nothing else is said.
    """
    from transformers import DynamicCache

    from factscope.lm.steady import steady_steps

    length = draws.shape[1]
    given = _side_by_side(rows, length).to(lm.device)
    shortest = min(map(len, rows))
    next_ = _Next(given, draws.to(lm.device), k)
    ids, cache = given.clone(), DynamicCache()
    new = ids[:, : min(shortest, length)]
    steady = lm.device.type == "cuda" if steady is None else steady
    for position in range(shortest, length):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        logits = lm.head(states.last_hidden_state[:, -1])
        ids[:, position] = next_(logits, position)
        new = ids[:, position : position + 1]
        if steady and position == shortest and length - position > FEW:
            rest = steady_steps(lm, new[:, 0], cache, position, next_)
            if rest is not None:
                ids[:, position + 1 :] = rest
                break
    return ids.tolist()


class _Next:
    """Which token comes next in every row: its own, or one that is drawn."""

    def __init__(self, given: Tensor, draws: Tensor, k: int) -> None:
        self.given, self.draws, self.k = given, draws, k
        self.length = given.shape[1]

    def __call__(
        self, logits: Float[Tensor, "row vocabulary"], position: int | Tensor
    ) -> Int[Tensor, " row"]:
        """The tokens at a position; it may be a number or a tensor that holds one."""
        at = torch.as_tensor(position, device=self.given.device).reshape(1)
        own = self.given.index_select(1, at)[:, 0]
        draw = self.draws.index_select(1, at)[:, 0].to(logits.device)
        return torch.where(own < 0, _drawn(logits, draw, self.k).to(own.device), own)


def _side_by_side(rows: Sequence[Sequence[int]], length: int) -> Int[Tensor, "row position"]:
    """The rows' own tokens, and -1 where the model shall write."""
    given = torch.full((len(rows), length), -1)
    for i, row in enumerate(rows):
        given[i, : len(row)] = torch.tensor(list(row)[:length])
    return given


def _drawn(
    logits: Float[Tensor, "row vocabulary"], draws: Float[Tensor, " row"], k: int
) -> Int[Tensor, " row"]:
    """One of the k likeliest tokens each: the one in whose share of probability the draw falls."""
    best = logits.float().topk(min(k, logits.shape[-1]))
    reached = best.values.softmax(-1).cumsum(-1)[:, :-1]
    place = (draws[:, None] >= reached).sum(-1, keepdim=True)
    return best.indices.gather(1, place)[:, 0]
