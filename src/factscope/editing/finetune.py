"""Fine-tuning on a fact: FT, FT+L and AttnEdit (App. E.1 and I).

One procedure, three presets: Adam on weights of one layer until the model predicts the new object
after the bare prompt.

    FT           the MLP's output weight
    FT_L         the same, no entry changed by more than ε
    ATTN_EDIT    the query, key and value projections, within ε

The model's weights are not written. Each fact has its own change Δ, added as x Δᵀ to the output of
the module; the layers below run once, and every step runs the blocks from the trained layer
upwards. Adam treats every entry on its own, so facts in one batch do not affect each other.
(In single precision a few entries in 100,000 still differ, where the gradient is close to rounding
error: Adam's first step depends on the sign of the gradient only.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim.adam import adam

from factscope.editing.checks import with_checks
from factscope.editing.contexts import EditRequest, TokenBatch, TokenRow, edit_requests
from factscope.editing.defaults import check_layer, finetune_layer, finetune_max_change
from factscope.editing.edit import Dense, Edit
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error, results_or_errors
from factscope.editing.settings import FineTune
from factscope.errors import DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.accel import fast_blocks
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_io
from factscope.lm.memory import Budget, retry_smaller, run_in_batches
from factscope.lm.replay import Replay
from factscope.progress import NestedProgress, Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM


class TrainedWeight(NamedTuple):
    """A weight or bias to train."""

    module: nn.Module
    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    """Its shape in the paper's orientation (output × input)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuneObjective:
    """The loss of each row as a function of Δ; the layers below the trained one already ran."""

    lm: "LM"
    layer: int
    replay: Replay
    states: Float[Tensor, "row token width"]
    """Input of the trained layer."""
    batch: TokenBatch

    @classmethod
    def of(cls, lm: "LM", rows: Sequence[TokenRow], layer: int) -> "FineTuneObjective":
        """Run the rows once and store the input of the trained layer."""
        batch = TokenBatch.of(rows, lm.device)
        run = forward(lm, batch.ids)
        # All rows are padded to one length, so masks and positions of one row serve all of them.
        replay = Replay.whole(lm, forward(lm, batch.ids[:1]))
        states = (run.inputs, *run.states)[layer]
        return cls(lm=lm, layer=layer, replay=replay, states=states, batch=batch)

    def losses(
        self, weights: Sequence[TrainedWeight], deltas: Sequence[Float[Tensor, "group ..."]]
    ) -> Float[Tensor, " row"]:
        """The mean of -log P over the target tokens of each row."""
        hidden = self.states
        pairs = zip(weights, deltas, strict=True)
        with hook_io(*((w.module, partial(_add_delta, delta)) for w, delta in pairs)):
            for layer in range(self.layer, self.lm.n_layers):
                hidden = self.replay(layer, hidden)
        return self.batch.losses(self.batch.log_probs(self.lm, hidden))

    def only(self, rows: Int[Tensor, " selected"]) -> "FineTuneObjective":
        """The same for the selected rows."""
        states = self.states[rows.to(self.states.device)]
        return replace(self, states=states, batch=self.batch.only(rows))


def _add_delta(delta: Float[Tensor, "group ..."], x: Tensor, output: Tensor) -> Tensor:
    """A module's output with each group's change of its weight or bias."""
    # Some families flatten rows and tokens; either way the rows of a group are consecutive.
    x_by_group, by_group = (t.reshape(len(delta), -1, t.shape[-1]) for t in (x, output))
    is_bias = delta.dim() == 2
    change = delta[:, None] if is_bias else x_by_group.to(delta.dtype) @ delta.mT
    return (by_group + change.to(output.dtype)).reshape(output.shape)


@dataclass(frozen=True, eq=False)
class FineTuneResult:
    """The result of training for one group of facts."""

    deltas: list[Float[Tensor, "..."]]
    """Δ of each weight, on the CPU."""
    losses: list[float]
    """The loss before each step, and after the last."""


def minimise(
    objectives: list[FineTuneObjective],
    weights: Sequence[TrainedWeight],
    groups: int,
    settings: FineTune,
    progress: Progress,
) -> list[FineTuneResult]:
    """Adam on Δ of each group. A group below the stop loss keeps its Δ and leaves the batch.

    Either one group for the rows of all objectives, or one group for each row of one objective.
    """
    deltas: list[Tensor] = []
    for w in weights:
        dtype = torch.promote_types(w.parameter.dtype, torch.float32)
        deltas.append(w.parameter.new_zeros(groups, *w.shape, dtype=dtype))
    means, squares = ([torch.zeros_like(x) for x in deltas] for _ in range(2))
    steps_done = [torch.tensor(0.0) for _ in weights]
    results = [FineTuneResult([], []) for _ in range(groups)]
    active = torch.arange(groups)
    fraction = 1 / (settings.steps + 1)
    blocks = objectives[0].lm.blocks[objectives[0].layer :]
    # No split products: Adam divides by the gradient, so their rounding errors would show.
    with fast_blocks(blocks, split=False):
        for step in range(settings.steps + 1):
            last = step == settings.steps
            losses, gradients = _loss_and_gradients(objectives, weights, deltas, backward=not last)
            unfinished = (losses >= settings.stop_loss) & losses.isfinite() & (not last)
            for i, group in enumerate(active.tolist()):
                results[group].losses.append(losses[i].item())
                if not unfinished[i]:
                    results[group].deltas.extend(x[i].float().cpu() for x in deltas)
            if not unfinished.any():
                progress(1 - step * fraction)
                break
            if not unfinished.all():  # then there are several groups, of one row each
                rest = unfinished.nonzero()[:, 0]
                active, objectives = active[rest], [x.only(rest) for x in objectives]
                for tensors in (deltas, means, squares, gradients):
                    tensors[:] = [x[rest.to(x.device)] for x in tensors]
            adam(
                deltas, gradients, means, squares, [], steps_done,
                lr=settings.lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0,
                amsgrad=False, maximize=False, foreach=False,
            )  # fmt: skip
            if settings.max_change is not None:
                limit = float(settings.max_change)
                for delta in deltas:
                    delta.clamp_(-limit, limit)
            progress(fraction)
    return results


def _loss_and_gradients(
    objectives: Sequence[FineTuneObjective],
    weights: Sequence[TrainedWeight],
    deltas: Sequence[Float[Tensor, "group ..."]],
    *,
    backward: bool,
) -> tuple[Float[Tensor, " group"], list[Float[Tensor, "group ..."]]]:
    """Each group's mean loss over its facts, and the gradient of each Δ."""
    groups = len(deltas[0])
    facts_per_group = sum(len(objective.states) for objective in objectives) / groups
    leaves = [x.detach().requires_grad_(backward) for x in deltas]
    losses = torch.zeros(groups, dtype=deltas[0].dtype)
    gradients: list[Tensor] = []
    for objective in objectives:
        with torch.set_grad_enabled(backward):
            part = objective.losses(weights, leaves).reshape(groups, -1).sum(1) / facts_per_group
        losses += part.detach().cpu()
        if backward:
            new = list(torch.autograd.grad(part.sum(), leaves))
            both = zip(gradients, new, strict=True)
            gradients = [a.add_(b) for a, b in both] if gradients else new
    return losses, gradients


class BoundFineTune(BoundEditor):
    """Fine-tuning bound to a model; its settings have the model's layer and limit filled in."""

    def __init__(self, settings: FineTune, lm: "LM") -> None:
        self.lm = lm
        layer, max_change = settings.layer, settings.max_change
        self.layer = (
            finetune_layer(lm, settings.method) if layer is None else check_layer(lm, layer)
        )
        modules = lm.attn_in(self.layer) if settings.weights == "attn" else [lm.mlp_out(self.layer)]
        self.weights: list[TrainedWeight] = []
        for module in modules:
            for kind in ("weight", "bias") if settings.bias else ("weight",):
                parameter: Tensor | None = getattr(module, kind, None)
                if parameter is not None:
                    shape = tuple(parameter.shape)
                    if lm.family.transposed:
                        shape = shape[::-1]
                    name = f"{lm.name_of(module)}.{kind}"
                    self.weights.append(TrainedWeight(module, name, parameter, shape))
        if max_change == "default":
            matrices = [w.parameter.detach() for w in self.weights if len(w.shape) == 2]
            entries = torch.cat([matrix.float().cpu().flatten() for matrix in matrices])
            max_change = finetune_max_change(lm, settings.method, entries.std().item())
        self.settings = replace(settings, layer=self.layer, max_change=max_change)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: their mean loss is minimised."""
        rows = self._rows(raise_first_error(edit_requests(self.lm, facts)))
        nested = NestedProgress(progress)

        def train(size: int) -> FineTuneResult:
            batches = [rows[i : i + size] for i in range(0, len(rows), size)]
            objectives = [FineTuneObjective.of(self.lm, batch, self.layer) for batch in batches]
            return minimise(objectives, self.weights, 1, self.settings, nested.within(0.0, 1.0))[0]

        result, _ = retry_smaller(train, self._facts_per_pass(rows, delta_per_fact=False))
        edits = raise_first_error([self._edit(facts, result)])
        return with_checks(self.lm, edits)[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error.

        An edit is as large as the weights that it changes and stays in main memory: with large
        models, call this with a few hundred facts at a time.
        """

        def train(
            requests: Sequence[EditRequest], progress: Progress
        ) -> list[Edit | FactscopeError]:
            objective = FineTuneObjective.of(self.lm, self._rows(requests), self.layer)
            results = minimise([objective], self.weights, len(requests), self.settings, progress)
            facts = [[request.fact] for request in requests]
            return results_or_errors(self._edit, facts, results)

        def train_all(requests: list[EditRequest]) -> list[Edit | FactscopeError]:
            size = self._facts_per_pass(self._rows(requests), delta_per_fact=True)
            return run_in_batches(requests, size, train, progress)

        edits = map_valid(edit_requests(self.lm, facts), train_all)
        return map_valid(edits, lambda edits: with_checks(self.lm, edits))

    def _rows(self, requests: Sequence[EditRequest]) -> list[TokenRow]:
        """The bare prompts with the new objects."""
        last = self.settings.objective == "last-position"
        return [r.rows[0].at_last_position() if last else r.rows[0] for r in requests]

    def _facts_per_pass(self, rows: Sequence[TokenRow], *, delta_per_fact: bool) -> int:
        """How many facts fit into memory, each with its own Δ or all with one."""
        if self.settings.facts_per_pass is not None:
            return self.settings.facts_per_pass
        lm = self.lm
        # Δ, its gradient, Adam's two averages and two temporaries.
        delta = 6 * sum(w.parameter.numel() * max(4, w.parameter.itemsize) for w in self.weights)
        length, labels = max(len(row.ids) for row in rows), max(len(row.labels) for row in rows)
        keys, vocabulary = lm.mlp_weight(self.layer).shape[1], lm.embed.weight.shape[0]
        layers = lm.n_layers - self.layer
        states = layers * length * (16 * lm.width + 8 * keys) * lm.dtype.itemsize
        row = states + 4 * labels * vocabulary * 4
        free = Budget.of(lm, None).bytes
        fit = free // (delta + row) if delta_per_fact else (free - delta) // row
        return max(1, min(fit, len(rows)))

    def _edit(self, facts: Sequence[Fact], result: FineTuneResult) -> Edit | FactscopeError:
        """The result as an edit, if the loss went down."""
        losses = result.losses
        by_step = ", ".join(f"{loss:.3g}" for loss in losses)
        what = f"{facts[0].text!r} → {facts[0].target!r}"
        what += f" and {len(facts) - 1} more" if len(facts) > 1 else ""
        if not all(map(math.isfinite, losses)):
            return DidNotConverge(
                f"the loss of {what} is NaN or infinite (by step: {by_step}); lower the learning "
                "rate, or load the model in float32"
            )
        if losses[0] >= self.settings.stop_loss and losses[-1] >= losses[0]:
            return DidNotConverge(
                f"fine-tuning layer {self.layer} did not lower the loss of {what} (by step: "
                f"{by_step}); try another layer, a lower learning rate, more steps or a larger "
                "limit"
            )
        changes = {w.name: Dense(x) for w, x in zip(self.weights, result.deltas, strict=True)}
        edit = self.settings.new_edit(self.lm, changes, facts, losses=[losses])
        settings = dict(edit.settings)
        del settings["facts_per_pass"]  # does not affect the result
        return replace(edit, settings=settings)
