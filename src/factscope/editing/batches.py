"""Many facts in batches: as many at once as memory allows, fewer where it ran out."""

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

MOST = 64
"""How many facts a GPU takes at once at most: beyond that it is full anyway."""


def solve_in_batches(
    lm: "LM",
    requests: Sequence[EditRequest],
    layer: int,
    solve: Callable[[Sequence[EditRequest], Progress], Sequence[T]],
    *,
    facts_per_pass: int | None,
    progress: Progress,
) -> list[T]:
    """Solve every request, those of like length together; results in the order of the requests."""
    order = sorted(range(len(requests)), key=lambda i: _slots(requests[i]))
    size = facts_per_pass or _even(len(requests), _at_once(lm, requests, layer))
    results = run_in_batches([requests[i] for i in order], size, solve, progress)
    by_number = dict(zip(order, results, strict=True))
    return [by_number[i] for i in range(len(requests))]


def run_in_batches(
    items: Sequence[S],
    size: int,
    solve: Callable[[Sequence[S], Progress], Sequence[T]],
    progress: Progress,
) -> list[T]:
    """Solve in batches of a size, halved whenever memory runs out."""
    results: list[T] = []
    nested = NestedProgress(progress)

    def solve_next(size: int) -> Sequence[T]:
        begin = len(results)
        some = items[begin : begin + size]
        return solve(some, nested.within(begin / len(items), len(some) / len(items)))

    while len(results) < len(items):
        more, size = retry_smaller(solve_next, min(size, len(items) - len(results)))
        results += more
    return results


def retry_smaller(solve: Callable[[int], T], size: int) -> tuple[T, int]:
    """What solving at a size gives, halved until memory suffices; and the size that did."""
    while True:
        try:
            return solve(size), size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                reason = str(error).partition("\n")[0]
                raise OutOfMemory(
                    f"not even one fact at a time fits into memory ({reason}); take fewer or "
                    "shorter texts, a higher layer, dtype bfloat16 or a larger device"
                ) from error
        # Only here, past the error, is what the failed attempt held free.
        torch.cuda.empty_cache()
        size //= 2


def _even(items: int, most: int) -> int:
    """The size of as few batches as can be, all nearly of one size."""
    return math.ceil(items / math.ceil(items / most))


def _slots(request: EditRequest) -> int:
    """The longest row from the fact's token on."""
    return max(len(row.ids) - row.place for row in request.rows)


def _at_once(lm: "LM", requests: Sequence[EditRequest], layer: int) -> int:
    """How many facts fit: what the layers above keep for the gradient, and the logits."""
    if lm.device.type == "cpu":
        return 1  # one fact fills it
    keys, vocabulary = lm.mlp_weight(0).shape[1], lm.embed.weight.shape[0]
    item = lm.dtype.itemsize
    largest = max(requests, key=lambda r: _slots(r) * len(r.rows))
    slots = _slots(largest) * (len(largest.rows) + 1)
    tokens = max(len(row.ids) for row in largest.rows) * (len(largest.rows) + 1)
    kept = slots * (lm.n_layers - layer) * (10 * lm.width + 3 * keys) * item
    run = tokens * lm.n_layers * 2 * lm.width * item
    logits = 4 * 4 * len(largest.rows) * len(largest.target) * vocabulary
    return max(1, min(MOST, Budget.of(lm, None).bytes // (kept + run + logits)))
