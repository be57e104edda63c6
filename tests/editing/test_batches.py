"""Batches: all are solved in order, in halves where memory runs out, and progress is told once."""

from collections.abc import Sequence

import pytest
import torch

from factscope.editing.batches import run_in_batches
from factscope.errors import OutOfMemory
from factscope.progress import Progress


def run(limit: int, size: int = 4, items: int = 7) -> tuple[list[int], list[int], list[float]]:
    """Solve numbers where a batch beyond a limit fails halfway: results, sizes tried, progress."""
    sizes: list[int] = []
    heard: list[float] = []

    def solve(some: Sequence[int], done: Progress) -> list[int]:
        sizes.append(len(some))
        done(0.5)
        if len(some) > limit:
            raise torch.OutOfMemoryError("no more\nsecond line")
        done(0.5)
        return [10 * x for x in some]

    return run_in_batches(range(items), size, solve, heard.append), sizes, heard


def test_with_enough_memory_batches_are_full() -> None:
    results, sizes, heard = run(limit=4)
    assert results == [0, 10, 20, 30, 40, 50, 60]
    assert sizes == [4, 3]
    assert heard == pytest.approx([2 / 7, 2 / 7, 1.5 / 7, 1.5 / 7])


@pytest.mark.parametrize(("limit", "wanted"), [(2, [4, 2, 2, 2, 1]), (1, [4, 2, *[1] * 7])])
def test_where_memory_runs_out_halves_are_taken(limit: int, wanted: list[int]) -> None:
    results, sizes, _ = run(limit=limit)
    assert results == [0, 10, 20, 30, 40, 50, 60]
    assert sizes == wanted


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_progress_adds_up_to_one_also_where_work_is_done_again(limit: int) -> None:
    _, _, heard = run(limit=limit, size=7)
    assert sum(heard) == pytest.approx(1)
    assert all(share > 0 for share in heard)


def test_what_does_not_fit_alone_is_told() -> None:
    with pytest.raises(OutOfMemory, match=r"one fact at a time.*\(no more\).*bfloat16"):
        run(limit=0)


def test_other_errors_stay_what_they_are() -> None:
    def solve(some: Sequence[int], done: Progress) -> list[int]:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_in_batches([1, 2], 2, solve, lambda share: None)


def test_nothing_to_solve_is_nothing() -> None:
    assert run(limit=4, items=0) == ([], [], [])
