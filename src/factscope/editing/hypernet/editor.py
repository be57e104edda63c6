"""Mend and Ke: editors that take a fact's gradient and a trained network, and no search.

One pass through the model, back through its last layers, and once through the network. Several
facts in one edit are the sum of the edits of each.

From lines to changes: through the model, back to the edited places, and through the network.

Everything here takes and returns tensors and never asks how many of something there are, so that
the pass of one fact can be recorded (`lm.played`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.batches import run_in_batches
from factscope.editing.checks import (
    check_text_ids,
    measure_checks,
    perplexities,
    text_loss,
    with_checks,
)
from factscope.editing.contexts import EditRequest, edit_requests
from factscope.editing.edit import Edit, LowRank, add_changes
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.hypernet.gradients import (
    FactorChange,
    SplitModel,
    TargetModule,
    TokenBatch,
    changes_applied,
    gradient_factors,
)
from factscope.editing.hypernet.model import EmbeddedRequest, Hypernetwork
from factscope.editing.settings import HypernetEditor
from factscope.errors import DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.accel.buckets import LengthBuckets
from factscope.lm.accel.graphs import played, plays
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["BoundHypernet", "Passes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """The passes that a network's edits of a model take."""

    lm: "LM"
    places: list[TargetModule]
    network: Hypernetwork
    scale: float
    """What every change is multiplied by."""

    @cached_property
    def halves(self) -> SplitModel:
        """The model, cut below the first edited layer."""
        return SplitModel(self.lm, self.places[0].layer)

    @property
    def name(self) -> tuple[Any, ...]:
        """What tells these passes from those of other networks."""
        places = tuple(x.data_ptr() for x in self.network.state_dict().values())
        return self.network.method, self.scale, self.network.design, places

    def of_lines(self, read: Tensor, *tables: Tensor) -> tuple[Tensor, list[FactorChange]]:
        """The losses of lines (given as `Lines` has them) and each place's change for each.

        `read` is what the network made of the lines' tokens.
        """
        lines = TokenBatch(*tables)
        entering, _ = self.halves.below(lines.ids)
        return self._changes(lines, entering, read)

    def with_text(
        self, text: Int[Tensor, "1 token"], read: Tensor, *tables: Tensor
    ) -> tuple[Tensor, list[FactorChange], Float[Tensor, "2"]]:
        """The same of one line with a text beside it, and the text's losses before and after."""
        lines = TokenBatch(*tables)
        rows = [lines.ids, text]
        lengths = [row.shape[1] for row in rows]
        padded = [nn.functional.pad(row, (0, max(lengths) - row.shape[1])) for row in rows]
        entering, last = self.halves.below(torch.cat(padded), lengths)
        losses, changes = self._changes(lines, entering[:1, : lengths[0]], read)
        with torch.no_grad():
            with changes_applied(self.places, changes):
                after = self.halves.above(entering[1:, : lengths[1]])
            texts = [text_loss(self.lm, x, text) for x in (last[1, : lengths[1]], after[0])]
        return losses, changes, torch.stack(texts)

    def _changes(
        self, lines: TokenBatch, entering: Tensor, read: Tensor
    ) -> tuple[Tensor, list[FactorChange]]:
        """The same, given what enters the first edited layer."""
        factors, losses = gradient_factors(self.lm, self.places, self.halves, entering, lines)
        with torch.no_grad():
            changes = self.network.changes(factors, read)
            return losses, [FactorChange(B=c.B * self.scale, A=c.A) for c in changes]


AT_ONCE = {"cpu": 8, "cuda": 64}
"""How many facts go through the model together."""


class BoundHypernet(BoundEditor):
    """MEND or KE bound to a model."""

    def __init__(self, settings: HypernetEditor, lm: "LM") -> None:
        weights = settings.trained
        self.settings = settings
        self.lm = lm
        self.places = weights.places(lm)
        self.network = weights.on(lm.device)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: the sum of their edits."""
        single = raise_first_error(self._attempt(facts, progress))
        return _measured(self.lm, [_together(single)])[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error."""
        edits = self._attempt(facts, progress)
        return map_valid(edits, lambda edits: _measured(self.lm, edits))

    @cached_property
    def passes(self) -> Passes:
        """How it goes through the model."""
        return Passes(
            lm=self.lm, places=self.places, network=self.network, scale=self.settings.scale
        )

    def _attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """The edits before their checks, or the error of each fact."""
        size = self.settings.facts_per_pass or AT_ONCE.get(self.lm.device.type, 8)

        def solve(some: Sequence[EditRequest], progress: Progress) -> "list[Edit | FactscopeError]":
            made = self.edits(some)
            progress(1.0)
            return made

        return map_valid(
            edit_requests(self.lm, facts),
            lambda asked: run_in_batches(asked, size, solve, progress),
        )

    def edits(self, requests: Sequence[EditRequest]) -> "list[Edit | FactscopeError]":
        """All the facts at once."""
        lines = self._lines(requests)
        with torch.no_grad():
            read = self.network.read(told_of(self.lm, lines))
        given = (read, *vars(lines).values())
        if lines.alone and plays(self.lm):
            return [self._alone(requests[0], given)]
        losses, changes = self.passes.of_lines(*given)
        return [
            self._edit(asked, [change.to("cpu") for change in some], loss)
            for asked, some, loss in zip(requests, _by_fact(changes), losses.tolist(), strict=True)
        ]

    def _alone(self, asked: EditRequest, given: Sequence[Tensor]) -> "Edit | FactscopeError":
        """One fact, where passes are played: its edit with the guard rails measured."""
        text, passes = check_text_ids(self.lm), self.passes
        losses, changes, texts = played(self.lm, passes.name, passes.with_text, text, *given)
        (own,) = _by_fact(changes)
        edit = self._edit(asked, own, losses.item())
        if isinstance(edit, Edit):
            checks = measure_checks(self.lm, edit, *perplexities(texts))
            edit = replace(edit, checks=checks).to("cpu")
        return edit

    def _lines(self, requests: Sequence[EditRequest]) -> TokenBatch:
        """The facts as lines; one alone gets room that makes its shape a frequent one."""
        lines = [asked.rows[0] for asked in requests]
        room = LengthBuckets.of(self.lm, len(lines))
        length = room.for_tokens(max(len(line.ids) for line in lines), self.lm.context)
        reads = room.for_labels(max(len(line.positions) for line in lines))
        return TokenBatch.of(lines, self.lm.device, length, reads)

    def _edit(
        self, asked: EditRequest, changes: Sequence[LowRank], loss: float
    ) -> "Edit | FactscopeError":
        named = {place.name: change for place, change in zip(self.places, changes, strict=True)}
        finite = [x.isfinite().all() for change in changes for x in (change.A, change.B)]
        if not torch.stack(finite).all():
            return DidNotConverge(
                f"the network's edit for {asked.fact.text!r} is no number; load the model in "
                "float32, or train the weights again"
            )
        return Edit(
            changes=named,
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=(asked.fact,),
            settings={**self.settings.to_dict(), "losses": [[loss]]},
        )


def told_of(lm: "LM", lines: TokenBatch) -> EmbeddedRequest:
    """The lines' tokens as the model embeds them: read, never trained or made longer."""
    with torch.no_grad():
        return EmbeddedRequest(lm.embed(lines.ids), lines.lengths)


def _by_fact(changes: Sequence[FactorChange]) -> Iterator[list[LowRank]]:
    """Each fact's changes, without the tokens at which there is none."""
    device = changes[0].A.device
    used = torch.stack([(c.B != 0).any(1) & (c.A != 0).any(2) for c in changes]).cpu()
    used[:, :, 0] |= ~used.any(2)
    for i in range(used.shape[1]):
        some = [mine.nonzero()[:, 0].to(device) for mine in used[:, i]]
        yield [
            LowRank(change.B[i][:, mine].float(), change.A[i][mine].float())
            for change, mine in zip(changes, some, strict=True)
        ]


def _measured(lm: "LM", edits: Sequence[Edit]) -> list[Edit]:
    """The edits with their guard rails, which one alone may have already."""
    return list(edits) if all(edit.checks for edit in edits) else with_checks(lm, edits)


def _together(edits: Sequence[Edit]) -> Edit:
    """The sum of edits by one method, as one edit."""
    first, *others = edits
    if not others:
        return first
    changes = dict(first.changes)
    for edit in others:
        for name, change in edit.changes.items():
            changes[name] = add_changes(changes[name], change)
    losses = [mine for edit in edits for mine in edit.settings["losses"]]
    return Edit(
        changes=changes,
        model=first.model,
        fingerprint=first.fingerprint,
        method=first.method,
        facts=tuple(fact for edit in edits for fact in edit.facts),
        settings={**first.settings, "losses": losses},
    )
