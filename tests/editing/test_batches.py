"""Batches: results keep their order, sizes are halved when memory runs out, progress adds up."""

from collections.abc import Sequence

import pytest
import torch

from factscope.editing.batches import run_in_batches
from factscope.errors import OutOfMemory
from factscope.progress import Progress, no_progress


def run(limit: int, size: int = 4, items: int = 7) -> tuple[list[int], list[int], list[float]]:
    """Solve numbers; a batch above the limit runs out of memory. Results, sizes tried, progress."""
    sizes: list[int] = []
    reported: list[float] = []

    def solve(some: Sequence[int], progress: Progress) -> list[int]:
        sizes.append(len(some))
        progress(0.5)
        if len(some) > limit:
            raise torch.OutOfMemoryError("no more\nsecond line")
        progress(0.5)
        return [10 * x for x in some]

    return run_in_batches(range(items), size, solve, reported.append), sizes, reported


def test_batches_are_full_with_enough_memory() -> None:
    results, sizes, reported = run(limit=4)
    assert results == [0, 10, 20, 30, 40, 50, 60]
    assert sizes == [4, 3]
    assert reported == pytest.approx([2 / 7, 2 / 7, 1.5 / 7, 1.5 / 7])


@pytest.mark.parametrize(("limit", "wanted"), [(2, [4, 2, 2, 2, 1]), (1, [4, 2, *[1] * 7])])
def test_batch_size_is_halved_when_memory_runs_out(limit: int, wanted: list[int]) -> None:
    results, sizes, _ = run(limit=limit)
    assert results == [0, 10, 20, 30, 40, 50, 60]
    assert sizes == wanted


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_progress_adds_up_to_one_when_work_is_repeated(limit: int) -> None:
    _, _, reported = run(limit=limit, size=7)
    assert sum(reported) == pytest.approx(1)
    assert all(fraction > 0 for fraction in reported)


def test_a_single_item_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match=r"one fact at a time.*\(no more\).*bfloat16"):
        run(limit=0)


def test_other_errors_are_not_caught() -> None:
    def solve(some: Sequence[int], progress: Progress) -> list[int]:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_in_batches([1, 2], 2, solve, no_progress)


def test_no_items() -> None:
    assert run(limit=4, items=0) == ([], [], [])
