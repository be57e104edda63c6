"""What training makes small: the edits' losses, and what they do to unrelated text (MEND, eq. 4).

c_edit · mean -log P(new object | edited) + c_local · KL(unedited ‖ edited)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.learned.editor import told_of
from factscope.editing.learned.factors import changed, factors_of
from factscope.editing.learned.halves import Halves
from factscope.editing.learned.lines import Lines
from factscope.editing.learned.network import Hypernetwork
from factscope.editing.learned.places import Place
from factscope.learning.groups import Group

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Seen", "look"]


@dataclass(frozen=True, eq=False)
class Seen:
    """What edits did to their group, fact by fact."""

    before: Float[Tensor, " fact"]
    """The loss of the new object before the edit."""
    edit: Float[Tensor, " fact"]
    """And after it."""
    rephrased: Float[Tensor, " fact"]
    local: Float[Tensor, " fact"]
    """KL(unedited ‖ edited) where nothing should change."""
    said: Float[Tensor, " fact"]
    """1 where the new object is now the likeliest, token by token."""
    said_rephrased: Float[Tensor, " fact"]
    kept: Float[Tensor, " fact"]
    """The share of tokens that are the likeliest as before, where nothing should change."""


def look(
    lm: "LM", places: Sequence[Place], halves: Halves, network: Hypernetwork, group: Group,
    turn: int, *, learn: bool,
) -> Seen:  # fmt: skip
    """Edit every fact of a group by the network and see; with `learn`, in a way to learn from."""
    factors, before = factors_of(lm, places, halves, group.entering[0], group.edit)
    if learn:
        network.observe(factors)
    with torch.set_grad_enabled(learn):
        changes = network(factors, told_of(lm, group.edit))
        local, entering, last = group.local(turn)
        kinds: list[Lines] = [group.edit, local]
        states = [group.entering[0], entering]
        if group.rephrased is not None:
            kinds.append(group.rephrased)
            states.append(group.entering[1])
        with changed(places, changes):
            hidden = halves.above(torch.stack(states, dim=1).flatten(0, 1))
        hidden = hidden.unflatten(0, (len(group), len(kinds)))
        logs = [lines.logs(lm, hidden[:, i]) for i, lines in enumerate(kinds)]
        with torch.no_grad():
            unedited = local.logs(lm, last)
        apart = (unedited.exp() * (unedited - logs[1])).sum(-1)
        again = group.edit if group.rephrased is None else group.rephrased
        return Seen(
            before=before,
            edit=group.edit.losses(logs[0]),
            rephrased=again.losses(logs[0 if group.rephrased is None else 2]),
            local=local.means(apart),
            said=group.edit.all_said(logs[0]).float(),
            said_rephrased=again.all_said(logs[0 if group.rephrased is None else 2]).float(),
            kept=local.means((unedited.argmax(-1) == logs[1].argmax(-1)).float()),
        )
