"""Progress callbacks: long work reports the fraction of it that was just done."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

Progress = Callable[[float], None]
"""Called as work advances, with the fraction (of 1) done since the last call."""


def no_progress(fraction: float) -> None:
    """Ignore progress."""


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """The given callback; without one, a progress bar in a notebook and nothing elsewhere."""
    if progress is not None or "ipykernel" not in sys.modules:
        yield progress or no_progress
        return
    from tqdm import tqdm

    columns = "{percentage:3.0f}%|{bar}| {elapsed} < {remaining}"
    with tqdm(total=1.0, delay=1, leave=False, bar_format=columns) as bar:

        def report(fraction: float) -> None:
            bar.update(fraction)

        yield report


@dataclass
class NestedProgress:
    """Maps the progress of parts to overall progress; work repeated after a failure counts once."""

    progress: Progress
    reported: float = 0.0

    def within(self, start: float, length: float) -> Progress:
        """The callback of a part that spans [start, start + length) of the total work."""
        reached = start

        def advance(fraction: float) -> None:
            nonlocal reached
            reached = min(reached + fraction * length, start + length)
            if reached > self.reported:
                self.progress(reached - self.reported)
                self.reported = reached

        return advance


def split(progress: Progress, weights: Sequence[float | int]) -> list[Progress]:
    """The callbacks of consecutive parts of the work, with these weights.

    A part that reports less than all of its work is complete once the next one reports.
    """
    nested, total = NestedProgress(progress), sum(weights) or 1
    starts = accumulate(weights, initial=0.0)
    return [nested.within(a / total, w / total) for a, w in zip(starts, weights, strict=False)]
