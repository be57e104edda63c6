"""Stretches of prompts packed into rows, so that blocks run on full batches.

A restoration at token t sends the tokens t … T-1 through the layers: a *stretch*. The stretches of
one corrupted row share *strands*, rows of about `SLOTS` slots, each blind to the others: hardly a
slot is empty, and attention works on full tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from factscope.lm.replay import View

__all__ = ["Strands", "Stretch", "lay_out", "pack"]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The tokens of one prompt from a restored one to the last, in one row of the run."""

    clean: int
    """The row of the clean run."""
    row: int
    """The row of the corrupted run."""
    start: int
    """The restored token."""
    stop: int
    answer: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class Strands:
    """Stretches packed into rows: the view for the blocks, and where each stretch lies."""

    view: View
    stretches: list[Stretch]
    """In the order of the tensors below."""
    strand: Int[Tensor, " stretch"]
    first: Int[Tensor, " stretch"]
    """The slot of the restored token."""
    last: Int[Tensor, " stretch"]
    """The slot of the prompt's last token."""
    token: Int[Tensor, " stretch"]
    clean: Int[Tensor, " stretch"]
    row: Int[Tensor, " stretch"]
    answer: Int[Tensor, " stretch"]


SLOTS = 48
"""About how many slots a strand has: with its past it should fill one tile of 64 keys."""


def pack(stretches: Sequence[Stretch], alone: bool) -> list[list[Stretch]]:
    """Put the stretches of each row into strands, longest first, each where it fits first.

    With `alone`, no two share a strand.
    """
    rows: dict[int, list[Stretch]] = {}
    for stretch in sorted(stretches, key=len, reverse=True):
        rows.setdefault(stretch.row, []).append(stretch)
    if alone:
        return [[stretch] for row in rows.values() for stretch in row]
    width = max(map(_width, rows.values()))
    return [strand for row in rows.values() for strand in _fill(row, width)]


def _width(row: list[Stretch]) -> int:
    """Slots for strands that share a row's stretches evenly."""
    total = sum(map(len, row))
    return max(len(row[0]), -(-total // -(-total // SLOTS)))


def _fill(row: list[Stretch], width: int) -> list[list[Stretch]]:
    strands: list[list[Stretch]] = []
    for stretch in row:
        room = (held for held in strands if sum(map(len, held)) + len(stretch) <= width)
        held = next(room, None)
        if held is None:
            strands.append([stretch])
        else:
            held.append(stretch)
    return strands


def lay_out(strands: list[list[Stretch]], device: torch.device) -> Strands:
    """The tensors that tell the blocks and the hooks where every stretch lies."""
    width = max(sum(map(len, held)) for held in strands)
    position = torch.zeros(len(strands), width, dtype=torch.long)
    start = torch.full((len(strands), width), -1)
    places: list[tuple[Stretch, int, int]] = []
    for i, held in enumerate(strands):
        slot = 0
        for stretch in held:
            stop = slot + len(stretch)
            position[i, slot:stop] = torch.arange(stretch.start, stretch.stop)
            start[i, slot:stop] = stretch.start
            places.append((stretch, i, slot))
            slot = stop

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return Strands(
        view=View(
            row=tensor([held[0].row for held in strands]),
            position=position.to(device),
            start=start.to(device),
            past=int(start.max()),
        ),
        stretches=[s for s, _, _ in places],
        strand=tensor([i for _, i, _ in places]),
        first=tensor([slot for _, _, slot in places]),
        last=tensor([slot + len(s) - 1 for s, _, slot in places]),
        token=tensor([s.start for s, _, _ in places]),
        clean=tensor([s.clean for s, _, _ in places]),
        row=tensor([s.row for s, _, _ in places]),
        answer=tensor([s.answer for s, _, _ in places]),
    )
