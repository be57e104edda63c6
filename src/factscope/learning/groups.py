"""Groups: examples that always go together, with what the lower half of the model makes of them.

No edit changes the layers below the first edited one. So each group's lines go through them once,
and the states are kept for as long as there is room: a step of training then runs the last few
layers only. A group has the same examples whenever it comes, so that its states are the same bit by
bit, kept or computed again, in a run that was killed or not.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.learned.halves import Halves
from factscope.editing.learned.lines import Line, Lines
from factscope.errors import BadSetting
from factscope.learning.examples import Example, Lessons

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Group", "Shelf", "split"]

ROOM = 4 << 30
"""Bytes of states that are kept in main memory at most."""
AT_ONCE = {"cpu": 1024, "cuda": 16384}
"""About how many tokens go through the lower half at once."""


@dataclass(frozen=True, eq=False)
class Group:
    """Examples side by side, all lines of one length."""

    edit: Lines
    rephrased: Lines | None
    """None where all examples have one wording only."""
    own: Lines | None
    """What must stay, where each example brings its own."""
    entering: Float[Tensor, "kind fact token width"]
    """What enters the first edited layer, for the lines of each kind."""
    last: Float[Tensor, "kind fact token width"]
    """The unedited model's last states of the same."""

    def __len__(self) -> int:
        return len(self.edit.ids)

    def local(self, turn: int) -> tuple[Lines, Tensor, Tensor]:
        """What must stay, its entering and its last states; in every turn another's line."""
        if self.own is not None:
            return self.own, self.entering[-1], self.last[-1]
        shift = 1 + turn % (len(self) - 1)
        return (
            _rolled(self.edit, shift),
            self.entering[0].roll(shift, 0),
            self.last[0].roll(shift, 0),
        )

    @property
    def bytes(self) -> int:
        """How much room the states take."""
        return 2 * self.entering.numel() * self.entering.itemsize


def _rolled(lines: Lines, shift: int) -> Lines:
    return Lines(**{name: x.roll(shift, 0) for name, x in vars(lines).items()})


def split(count: int, held_out: int) -> tuple[range, range]:
    """The numbers to train on, and those that are held out: the last, a fifth at most."""
    held = min(held_out, count // 5)
    if held < 2:
        raise BadSetting(
            f"{count} examples are too few to train on some and hold others out; give at least 10"
        )
    return range(count - held), range(count - held, count)


class Shelf:
    """Groups by number, made when first asked for."""

    def __init__(self, lm: "LM", halves: Halves, lessons: Lessons, some: range, size: int) -> None:
        self.lm, self.halves, self.lessons = lm, halves, lessons
        order = lessons.order(some)
        cut = [order[i : i + size] for i in range(0, len(order), size)]
        if len(cut) > 1 and len(cut[-1]) < 2:
            cut[-2:] = [cut[-2] + cut[-1]]
        self.numbers = cut
        self.kept: dict[int, Group] = {}
        self.room = _room(lm)

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, step: int, seed: int) -> tuple["Group | None", int]:
        """The group of a step, and its turn: every group comes once in each, shuffled anew."""
        turn, place = divmod(step, len(self))
        order = list(range(len(self)))
        random.Random(f"{seed} {turn}").shuffle(order)
        return self.group(order[place]), turn

    def group(self, number: int) -> "Group | None":
        """A group; None where too few of its examples can be used."""
        if number in self.kept:
            return self.kept[number]
        examples = self.lessons.made(self.lm, self.numbers[number])
        if len(examples) < 2:
            return None
        made = self._made(examples)
        if made.bytes <= self.room:
            self.room -= made.bytes
            self.kept[number] = made
        return made

    def _made(self, examples: Sequence[Example]) -> Group:
        reworded = any(example.rephrased != example.edit for example in examples)
        own = all(example.local is not None for example in examples)
        kinds: list[list[Line]] = [[example.edit for example in examples]]
        if reworded:
            kinds.append([example.rephrased for example in examples])
        if own:
            kinds.append([example.local for example in examples if example.local is not None])
        length = max(len(line.ids) for lines in kinds for line in lines)
        packed = [Lines.of(lines, self.lm.device, length) for lines in kinds]
        entering, last = self._below(torch.stack([lines.ids for lines in packed]).flatten(0, 1))
        shape = (len(kinds), len(examples))
        return Group(
            edit=packed[0],
            rephrased=packed[1] if reworded else None,
            own=packed[-1] if own else None,
            entering=entering.unflatten(0, shape),
            last=last.unflatten(0, shape),
        )

    def _below(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        size = max(1, AT_ONCE.get(self.lm.device.type, 1024) // ids.shape[1])
        size += len(ids) % size == 1  # a line alone takes another way through
        pieces = [self.halves.below(some) for some in ids.split(size)]
        entering, last = zip(*pieces, strict=True)
        return torch.cat(entering), torch.cat(last)


def _room(lm: "LM") -> int:
    if lm.device.type != "cuda":
        return ROOM
    free, _ = torch.cuda.mem_get_info(lm.device)
    return free // 2
