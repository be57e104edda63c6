"""MEND and KE on a model.

An edit takes one forward pass, one backward pass through the edited layers and one pass through the
trained network; nothing is optimised. Facts are independent: the edit of several facts is the sum
of their edits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.checks import (
    check_text_ids,
    measure_checks,
    perplexities,
    text_loss,
    with_checks,
    with_predictions,
)
from factscope.editing.contexts import EditRequest, TokenBatch, edit_requests
from factscope.editing.edit import Edit, LowRank
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error, sum_edits
from factscope.editing.hypernet.model import (
    FactorChange,
    SplitModel,
    changes_applied,
    gradient_factors,
)
from factscope.errors import DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.accel import LengthBuckets, can_capture, captured, on_gpu
from factscope.lm.memory import run_in_batches
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.editing.settings import HypernetEditor
    from factscope.lm.model import LM


class BoundHypernet(BoundEditor):
    """MEND or KE bound to a model."""

    def __init__(self, settings: "HypernetEditor", lm: "LM") -> None:
        self.settings, self.lm = settings, lm
        self.split = SplitModel(lm, settings.trained.targets(lm))
        network = settings.trained.network
        # Moving an LSTM repacks its weights, even to the device where it is.
        if any(x.device != lm.device for x in network.parameters()):
            network.to(lm.device)
        self.network = network.eval().requires_grad_(False)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: the sum of their edits."""
        edits = raise_first_error(self._edits(facts, progress))
        return self._checked([sum_edits(edits, "losses")])[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or the error of a fact that cannot be edited."""
        return map_valid(self._edits(facts, progress), self._checked)

    def _checked(self, edits: Sequence[Edit]) -> list[Edit]:
        """The edits with their checks; a captured edit has them already."""
        captured = all(edit.checks for edit in edits)
        return with_predictions(self.lm, edits) if captured else with_checks(self.lm, edits)

    def _edits(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        size = self.settings.facts_per_pass or (64 if on_gpu(self.lm) else 8)
        return map_valid(
            edit_requests(self.lm, facts),
            lambda requests: run_in_batches(requests, size, self._edit_batch, progress),
        )

    def _edit_batch(
        self, requests: Sequence[EditRequest], progress: Progress
    ) -> list[Edit | FactscopeError]:
        """An edit for each request, all in one pass."""
        lm, rows = self.lm, [request.rows[0] for request in requests]
        # The lengths of a single row are rounded up, for fewer shapes to capture.
        buckets = LengthBuckets.of(lm, len(rows))
        tokens = buckets.for_tokens(max(len(row.ids) for row in rows), lm.context)
        labels = buckets.for_labels(max(len(row.labels) for row in rows))
        batch = TokenBatch.of(rows, lm.device, tokens, labels)
        with torch.no_grad():
            encoded = self.network.encode(lm.embed(batch.ids), batch.lengths)
        if batch.single and can_capture(lm):
            edits = [self._edit_captured(requests[0], encoded, batch)]
        else:
            entering, _ = self.split.below(batch.ids)
            losses, changes = self._changes(batch, entering, encoded)
            parts = zip(requests, _by_fact(changes), losses.tolist(), strict=True)
            edits = [self._to_edit(request, low_rank, loss) for request, low_rank, loss in parts]
        progress(1.0)
        return edits

    def _changes(
        self, batch: TokenBatch, entering: Tensor, encoded: Tensor
    ) -> tuple[Float[Tensor, " fact"], list[FactorChange]]:
        """The facts' losses before the edit, and the change of each weight for each fact."""
        factors, losses = gradient_factors(self.split, entering, batch)
        with torch.no_grad():
            changes = self.network(factors, encoded)
            scale = self.settings.scale
            return losses, [FactorChange(B=change.B * scale, A=change.A) for change in changes]

    def _edit_captured(
        self, request: EditRequest, encoded: Tensor, batch: TokenBatch
    ) -> Edit | FactscopeError:
        """A single fact by a captured pass, which also measures the checks."""
        text = check_text_ids(self.lm)
        tensors = (text, encoded, *vars(batch).values())
        network = self.network
        # A captured pass reads the network's weights at their addresses.
        addresses = tuple(x.data_ptr() for x in network.state_dict().values())
        key: Any = (network.method, self.settings.scale, network.config, network.weights, addresses)
        losses, changes, text_losses = captured(self.lm, key, self._changes_and_checks, *tensors)
        edit = self._to_edit(request, next(_by_fact(changes)), losses.item())
        if isinstance(edit, Edit):
            edit = replace(edit, checks=measure_checks(self.lm, edit, *perplexities(text_losses)))
        return edit

    def _changes_and_checks(
        self, text: Int[Tensor, "1 token"], encoded: Tensor, *fields: Tensor
    ) -> tuple[Tensor, list[FactorChange], Float[Tensor, "2"]]:
        """`_changes` for one row (the fields of its `TokenBatch`), and the losses of the check text
        before and after the edit. No shape depends on the data, so that it can be captured."""
        batch = TokenBatch(*fields)
        rows = [batch.ids, text]
        lengths = [row.shape[1] for row in rows]
        padded = [nn.functional.pad(row, (0, max(lengths) - row.shape[1])) for row in rows]
        entering, last = self.split.below(torch.cat(padded), lengths)
        losses, changes = self._changes(batch, entering[:1, : lengths[0]], encoded)
        with torch.no_grad():
            with changes_applied(self.split.targets, changes):
                edited = self.split.above(entering[1:, : lengths[1]])
            states = (last[1, : lengths[1]], edited[0])
            return losses, changes, torch.stack([text_loss(self.lm, x, text) for x in states])

    def _to_edit(
        self, request: EditRequest, changes: Sequence[LowRank], loss: float
    ) -> Edit | FactscopeError:
        changes = [change.to("cpu") for change in changes]
        if not all(change.is_finite for change in changes):
            return DidNotConverge(
                f"the network's edit for {request.fact.text!r} is not finite; load the model in "
                "float32, or train the weights again"
            )
        names = [target.shape.name for target in self.split.targets]
        by_name = dict(zip(names, changes, strict=True))
        return self.settings.new_edit(self.lm, by_name, [request.fact], losses=[[loss]])


def _by_fact(changes: Sequence[FactorChange]) -> Iterator[list[LowRank]]:
    """Each fact's changes, without the ranks that are zero."""
    device = changes[0].A.device
    nonzero = torch.stack([(c.B != 0).any(1) & (c.A != 0).any(2) for c in changes]).cpu()
    nonzero[:, :, 0] |= ~nonzero.any(2)  # keep at least one rank
    for i in range(nonzero.shape[1]):
        ranks = [mask.nonzero()[:, 0].to(device) for mask in nonzero[:, i]]
        yield [
            LowRank(change.B[i][:, nonzero_ranks].float(), change.A[i][nonzero_ranks].float())
            for change, nonzero_ranks in zip(changes, ranks, strict=True)
        ]
