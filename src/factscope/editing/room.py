"""Lengths rounded up, so that problems of nearly the same size have the same shape.

A recorded search (`editing.kept`) serves every fact of its shape. With a little empty room at the
end of each axis a few shapes are enough for most facts; what is empty is masked or weighs nothing.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Room"]

GRAIN = 8
"""Lengths are multiples of this where room is left."""


@dataclass(frozen=True)
class Room:
    """How much room there is for so many of something."""

    grain: int = 1

    @classmethod
    def of(cls, lm: "LM", facts: int) -> "Room":
        """Room for the search of one fact on a GPU, where recordings are kept; else none."""
        return cls(GRAIN) if facts == 1 and lm.device.type == "cuda" else cls()

    def slots(self, count: int, most: int | None = None) -> int:
        """Tokens: the next multiple of the grain, as far as there are so many."""
        wide = math.ceil(count / self.grain) * self.grain
        return wide if most is None else max(count, min(wide, most))

    def reads(self, count: int) -> int:
        """Reads, whose number doubles with the new object's length: the grain, or 2, 4, 8, … times
        as many."""
        if self.grain == 1:
            return count
        return self.grain * 2 ** math.ceil(math.log2(max(1.0, count / self.grain)))
