"""Lengths rounded up, so that problems of nearly the same size have the same shape.

A recorded search (`editing.kept`) serves every fact of its shape. With a little empty room at the
end of each axis a few shapes are enough for most facts; what is empty is masked or weighs nothing.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["LengthBuckets"]


@dataclass(frozen=True)
class LengthBuckets:
    """Of what each length is a multiple."""

    slots: int = 1
    """Tokens from the fact's own on: every one of them is computed at every step."""
    past: int = 1
    """Tokens before it, which are only looked at."""
    tokens: int = 1
    """Tokens of a row, all of which are computed once."""
    labels: int = 1
    """Tokens of the new object, where one line is read."""
    reads: int = 1
    """Reads; their number doubles with the new object's length, and so does the room for them."""

    @classmethod
    def of(cls, lm: "LM", facts: int) -> "LengthBuckets":
        """Room for the search of one fact on a GPU, where recordings are kept; else none."""
        one = facts == 1 and lm.device.type == "cuda"
        return cls(slots=4, past=16, tokens=8, labels=4, reads=32) if one else cls()

    def for_slots(self, count: int) -> int:
        """How many slots there are for so many."""
        return _up(count, self.slots)

    def for_past(self, count: int, most: int | None) -> int:
        """How many tokens of the past there are for so many, in a model that reads so many."""
        return _up(count, self.past, most)

    def for_tokens(self, count: int, most: int | None) -> int:
        """How many tokens a row has for so many, in a model that reads so many."""
        return _up(count, self.tokens, most)

    def for_labels(self, count: int) -> int:
        """How many labels one line has for so many."""
        return _up(count, self.labels)

    def for_reads(self, count: int) -> int:
        """How many reads there are for so many."""
        if self.reads == 1:
            return count
        return self.reads * 2 ** math.ceil(math.log2(max(1.0, count / self.reads)))


def _up(count: int, grain: int, most: int | None = None) -> int:
    """The next multiple of the grain, as far as there are so many."""
    wide = math.ceil(count / grain) * grain
    return wide if most is None else max(count, min(wide, most))
