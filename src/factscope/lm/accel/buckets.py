"""Length buckets: lengths rounded up, so that similar facts have the same shapes.

A captured graph serves every fact of its shape. With some padding at the end of each axis a few
shapes cover most facts; padding is masked or has weight 0.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from factscope.lm.accel.device import on_gpu

if TYPE_CHECKING:
    from factscope.lm.model import LM


@dataclass(frozen=True)
class LengthBuckets:
    """The number that each length is rounded up to a multiple of; 1 adds no padding."""

    slots: int = 1
    """Tokens from the edited one on: all of them are computed at every step."""
    past: int = 1
    """Tokens before it, which are only attended to."""
    tokens: int = 1
    """Tokens of a row, all of which are computed once."""
    labels: int = 1
    """Target tokens of one row."""
    targets: int = 1
    """Target tokens of all rows; their number grows with the target's length, so this doubles."""

    @classmethod
    def of(cls, lm: "LM", facts: int) -> "LengthBuckets":
        """Padding for a single fact on a GPU, where graphs are captured; otherwise none."""
        single = facts == 1 and on_gpu(lm)
        return cls(slots=4, past=16, tokens=8, labels=4, targets=32) if single else cls()

    def for_slots(self, count: int) -> int:
        """The padded number of slots."""
        return _round_up(count, self.slots)

    def for_past(self, count: int, limit: int | None) -> int:
        """The padded length of the past, at most the model's context."""
        return _round_up(count, self.past, limit)

    def for_tokens(self, count: int, limit: int | None) -> int:
        """The padded length of a row, at most the model's context."""
        return _round_up(count, self.tokens, limit)

    def for_labels(self, count: int) -> int:
        """The padded number of target tokens of one row."""
        return _round_up(count, self.labels)

    def for_targets(self, count: int) -> int:
        """The padded number of target tokens: a power of two times `targets`."""
        if self.targets == 1:
            return count
        return self.targets * 2 ** math.ceil(math.log2(max(1.0, count / self.targets)))


def _round_up(count: int, multiple: int, limit: int | None = None) -> int:
    """The next multiple, but not beyond the limit."""
    rounded = math.ceil(count / multiple) * multiple
    return rounded if limit is None else max(count, min(rounded, limit))
