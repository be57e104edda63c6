"""From lines to changes: through the model, back to the edited places, and through the network.

Everything here takes and returns tensors and never asks how many of something there are, so that
the pass of one fact can be recorded (`lm.played`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.guard import text_loss
from factscope.editing.learned.factors import Change, changed, factors_of
from factscope.editing.learned.halves import Halves
from factscope.editing.learned.lines import Lines
from factscope.editing.learned.network import Hypernetwork
from factscope.editing.learned.places import Place

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Passes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """The passes that a network's edits of a model take."""

    lm: "LM"
    places: list[Place]
    network: Hypernetwork
    scale: float
    """What every change is multiplied by."""

    @cached_property
    def halves(self) -> Halves:
        """The model, cut below the first edited layer."""
        return Halves(self.lm, self.places[0].layer)

    @property
    def name(self) -> tuple[Any, ...]:
        """What tells these passes from those of other networks."""
        places = tuple(x.data_ptr() for x in self.network.state_dict().values())
        return self.network.method, self.scale, self.network.design, places

    def of_lines(self, read: Tensor, *tables: Tensor) -> tuple[Tensor, list[Change]]:
        """The losses of lines (given as `Lines` has them) and each place's change for each.

        `read` is what the network made of the lines' tokens.
        """
        lines = Lines(*tables)
        entering, _ = self.halves.below(lines.ids)
        return self._changes(lines, entering, read)

    def with_text(
        self, text: Int[Tensor, "1 token"], read: Tensor, *tables: Tensor
    ) -> tuple[Tensor, list[Change], Float[Tensor, "2"]]:
        """The same of one line with a text beside it, and the text's losses before and after."""
        lines = Lines(*tables)
        rows = [lines.ids, text]
        lengths = [row.shape[1] for row in rows]
        padded = [nn.functional.pad(row, (0, max(lengths) - row.shape[1])) for row in rows]
        entering, last = self.halves.below(torch.cat(padded), lengths)
        losses, changes = self._changes(lines, entering[:1, : lengths[0]], read)
        with torch.no_grad():
            with changed(self.places, changes):
                after = self.halves.above(entering[1:, : lengths[1]])
            texts = [text_loss(self.lm, x, text) for x in (last[1, : lengths[1]], after[0])]
        return losses, changes, torch.stack(texts)

    def _changes(self, lines: Lines, entering: Tensor, read: Tensor) -> tuple[Tensor, list[Change]]:
        """The same, given what enters the first edited layer."""
        factors, losses = factors_of(self.lm, self.places, self.halves, entering, lines)
        with torch.no_grad():
            changes = self.network.changes(factors, read)
            return losses, [Change(B=c.B * self.scale, A=c.A) for c in changes]
