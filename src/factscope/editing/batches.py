"""Batches of the value search: facts of similar length, as many at once as fit into memory."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from factscope.editing.contexts import EditRequest
from factscope.lm.memory import Budget, run_in_batches
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["solve_in_batches"]

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
