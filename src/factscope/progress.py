"""Progress callbacks: long work reports the fraction of it that was just done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Progress = Callable[[float], None]
"""Called as work advances, with the fraction (of 1) done since the last call."""


def no_progress(fraction: float) -> None:
    """Ignore progress."""


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
