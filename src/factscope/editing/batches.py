"""Process many facts in batches: as many at once as fit into memory, fewer when memory runs out."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from factscope.editing.contexts import EditRequest
from factscope.errors import OutOfMemory
from factscope.lm.memory import Budget, is_out_of_memory
from factscope.progress import NestedProgress, Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["retry_smaller", "run_in_batches", "solve_in_batches"]

S = TypeVar("S")
T = TypeVar("T")

MAX_FACTS = 64
"""Facts per batch at most: more do not make a GPU faster."""


def solve_in_batches(
    lm: "LM",
    requests: Sequence[EditRequest],
    layer: int,
    solve: Callable[[Sequence[EditRequest], Progress], Sequence[T]],
    *,
    facts_per_pass: int | None,
    progress: Progress,
) -> list[T]:
    """Solve requests of similar length together; results in the order of the requests."""
    order = sorted(range(len(requests)), key=lambda i: _suffix_length(requests[i]))
    size = facts_per_pass
    if size is None:  # the fewest batches, of nearly equal size
        batches = math.ceil(len(requests) / _facts_that_fit(lm, requests, layer))
        size = math.ceil(len(requests) / batches)
    results = run_in_batches([requests[i] for i in order], size, solve, progress)
    by_index = dict(zip(order, results, strict=True))
    return [by_index[i] for i in range(len(requests))]


def run_in_batches(
    items: Sequence[S],
    size: int,
    solve: Callable[[Sequence[S], Progress], Sequence[T]],
    progress: Progress,
) -> list[T]:
    """Solve items in batches of a size that is halved whenever memory runs out."""
    results: list[T] = []
    nested = NestedProgress(progress)

    def solve_next(size: int) -> Sequence[T]:
        begin = len(results)
        batch = items[begin : begin + size]
        return solve(batch, nested.within(begin / len(items), len(batch) / len(items)))

    while len(results) < len(items):
        solved, size = retry_smaller(solve_next, min(size, len(items) - len(results)))
        results += solved
    return results


def retry_smaller(solve: Callable[[int], T], size: int) -> tuple[T, int]:
    """Call `solve` with a size that is halved until memory suffices; also returns that size."""
    while True:
        try:
            return solve(size), size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                reason = str(error).partition("\n")[0]
                raise OutOfMemory(
                    f"not even one fact at a time fits into memory ({reason}); use fewer or "
                    "shorter texts, a higher layer, dtype bfloat16 or a larger device"
                ) from error
        # Only after the except block is the memory of the failed attempt free.
        torch.cuda.empty_cache()
        size //= 2


def _suffix_length(request: EditRequest) -> int:
    """Tokens of the longest row from the edit position on."""
    return max(len(row.ids) - row.edit_position for row in request.rows)


def _facts_that_fit(lm: "LM", requests: Sequence[EditRequest], layer: int) -> int:
    """How many facts of the largest size fit: activations for the gradient, caches and logits."""
    if lm.device.type == "cpu":
        return 1  # larger batches are not faster
    keys, vocabulary = lm.mlp_weight(0).shape[1], lm.embed.weight.shape[0]
    item = lm.dtype.itemsize
    largest = max(requests, key=lambda r: _suffix_length(r) * len(r.rows))
    rows = len(largest.rows) + 1  # and the row of the KL term
    suffixes = _suffix_length(largest) * rows
    tokens = max(len(row.ids) for row in largest.rows) * rows
    activations = suffixes * (lm.n_layers - layer) * (10 * lm.width + 3 * keys) * item
    caches = tokens * lm.n_layers * 2 * lm.width * item
    logits = 4 * 4 * len(largest.rows) * len(largest.target) * vocabulary
    fit = Budget.of(lm, None).bytes // (activations + caches + logits)
    return max(1, min(MAX_FACTS, fit))
