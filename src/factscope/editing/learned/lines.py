"""Lines of tokens and what should follow them, side by side as one batch.

The Space Needle is in downtown Paris
                             ▲ reads: what should follow here is the label
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from factscope.editing.requests import Request

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Line", "Lines", "line_of"]


@dataclass(frozen=True)
class Line:
    """Tokens, those of them after which something is read, and the tokens that belong there."""

    ids: tuple[int, ...]
    reads: tuple[int, ...]
    labels: tuple[int, ...]


def line_of(asked: Request) -> Line:
    """A fact's bare prompt with its new object."""
    row = asked.rows[0]
    return Line(ids=row.ids, reads=row.reads, labels=asked.target)


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of one length, shorter ones filled up on the right with what nothing looks at."""

    ids: Int[Tensor, "line token"]
    reads: Int[Tensor, "line read"]
    labels: Int[Tensor, "line read"]
    real: Bool[Tensor, "line read"]
    """Which reads a line has."""
    lengths: Int[Tensor, " line"]

    @classmethod
    def of(
        cls, lines: Sequence[Line], device: torch.device, length: int = 0, reads: int = 0
    ) -> "Lines":
        """The lines as tensors, at least so long and with room for at least so many reads."""
        length = max(length, *(len(line.ids) for line in lines))
        reads = max(reads, *(len(line.reads) for line in lines))

        def table(lists: Sequence[Sequence[int]], width: int) -> Tensor:
            return torch.tensor([[*x, *[0] * (width - len(x))] for x in lists], device=device)

        return cls(
            ids=table([line.ids for line in lines], length),
            reads=table([line.reads for line in lines], reads),
            labels=table([line.labels for line in lines], reads),
            real=table([[1] * len(line.reads) for line in lines], reads).bool(),
            lengths=torch.tensor([len(line.ids) for line in lines], device=device),
        )

    def logs(
        self, lm: "LM", hidden: Float[Tensor, "line token width"]
    ) -> Float[Tensor, "read vocabulary"]:
        """log P of every token at each read, the last layer's states given."""
        rows = torch.arange(len(self.ids), device=self.reads.device)[:, None]
        row, read = self._chosen(rows.expand_as(self.reads)), self._chosen(self.reads)
        logits = lm.decode(hidden[row.to(hidden.device), read.to(hidden.device)])
        return logits.float().log_softmax(-1).to(self.ids.device)

    def losses(self, logs: Float[Tensor, "read vocabulary"]) -> Float[Tensor, " line"]:
        """Each line's mean of -log P over its labels."""
        return self.means(-logs.gather(1, self._chosen(self.labels)[:, None])[:, 0])

    def means(self, numbers: Float[Tensor, " read"]) -> Float[Tensor, " line"]:
        """Each line's mean of what its reads gave."""
        none = numbers.new_zeros(self.real.shape)
        if self.alone:
            table = torch.where(self.real, numbers, none)
        else:
            table = none.masked_scatter(self.real, numbers)
        return table.sum(1) / self.real.sum(1)

    def all_said(self, logs: Float[Tensor, "read vocabulary"]) -> Bool[Tensor, " line"]:
        """Whether all labels of a line are the likeliest where they stand."""
        right = (logs.argmax(-1) == self._chosen(self.labels)).float()
        return self.means(right) == 1

    @property
    def alone(self) -> bool:
        """Whether there is one line only. All its reads are looked at, also those that it does not
        have and that count for nothing: how many there are need not be known (`learned.passes`)."""
        return len(self.ids) == 1

    def _chosen(self, table: Int[Tensor, "line slot"]) -> Int[Tensor, " read"]:
        """What the table has at the reads that are looked at."""
        return table[0] if self.alone else table[self.real]
