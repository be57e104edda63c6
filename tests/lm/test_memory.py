"""Memory bounds; batches keep their order and are halved when memory runs out."""

from collections.abc import Sequence

import pytest
import torch

from factscope.errors import BadSetting, OutOfMemory
from factscope.lm.memory import parse_bytes, run_in_batches
from factscope.progress import Progress, no_progress


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("500M", 500 * 2**20), ("1.5 kb", 1536), ("77", 77)]
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "lots", "0"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="4GiB"):
        parse_bytes(text)


# ---- batches


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
    with pytest.raises(OutOfMemory, match=r"one item at a time.*\(no more\).*bfloat16"):
        run(limit=0)


def test_other_errors_are_not_caught() -> None:
    def solve(some: Sequence[int], progress: Progress) -> list[int]:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_in_batches([1, 2], 2, solve, no_progress)


def test_no_items() -> None:
    assert run(limit=4, items=0) == ([], [], [])
