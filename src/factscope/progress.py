"""Progress callbacks: long work reports the fraction of it that was just done."""

from collections.abc import Callable
from dataclasses import dataclass

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
            reached += fraction * length
            if reached > self.reported:
                self.progress(reached - self.reported)
                self.reported = reached

        return advance
