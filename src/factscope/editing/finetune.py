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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim.adam import adam

from factscope.editing.checks import with_checks
from factscope.editing.contexts import EditRequest, TokenBatch, TokenRow, edit_requests
from factscope.editing.defaults import check_layer, finetune_layer, finetune_max_change
from factscope.editing.edit import Dense, Edit
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.settings import FineTune, TargetPositions
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


@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """A weight or bias to train."""

    module: nn.Module
    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    """Its shape in the paper's orientation (output × input)."""

    @classmethod
    def of(cls, lm: "LM", module: nn.Module, kind: Literal["weight", "bias"]) -> "TrainedWeight":
        """The weight or bias of a module."""
        parameter: Tensor = getattr(module, kind)
        shape = tuple(parameter.shape)
        transposed = lm.family.transposed and len(shape) == 2
        name = f"{lm.name_of(module)}.{kind}"
        return cls(module, name, parameter, shape[::-1] if transposed else shape)

    def zeros(self, groups: int) -> Float[Tensor, "group ..."]:
        """Δ = 0 for each group, in float32 or better."""
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        return torch.zeros(groups, *self.shape, dtype=dtype, device=self.parameter.device)


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuneObjective:
    """The loss of each row as a function of Δ; the layers below the trained one already ran."""

    lm: "LM"
    layer: int
    replay: Replay
    states: Float[Tensor, "row token width"]
    """Input of the trained layer."""
    batch: TokenBatch

    def losses(
        self, weights: Sequence[TrainedWeight], deltas: Sequence[Float[Tensor, "group ..."]]
    ) -> Float[Tensor, " row"]:
        """The mean of -log P over the target tokens of each row."""
        hidden = self.states
        with hook_io(*((w.module, _add_delta(d)) for w, d in zip(weights, deltas, strict=True))):
            for layer in range(self.layer, self.lm.n_layers):
                hidden = self.replay(layer, hidden)
        return self.batch.losses(self.batch.log_probs(self.lm, hidden))

    def only(self, rows: Int[Tensor, " selected"]) -> "FineTuneObjective":
        """The same for the selected rows."""
        states = self.states[rows.to(self.states.device)]
        return replace(self, states=states, batch=self.batch.only(rows))


def _add_delta(delta: Float[Tensor, "group ..."]) -> Callable[[Tensor, Tensor], Tensor]:
    """A hook that adds each group's change to a module's output.

    Some families flatten rows and tokens; either way the rows of a group are consecutive.
    """

    def add_bias(x: Tensor, output: Tensor) -> Tensor:
        by_group = output.reshape(len(delta), -1, output.shape[-1])
        return (by_group + delta[:, None].to(output.dtype)).reshape(output.shape)

    def add_weight(x: Tensor, output: Tensor) -> Tensor:
        by_group = x.reshape(len(delta), -1, x.shape[-1]).to(delta.dtype)
        return output + (by_group @ delta.mT).reshape(output.shape).to(output.dtype)

    return add_bias if delta.dim() == 2 else add_weight


def target_row(request: EditRequest, objective: TargetPositions) -> TokenRow:
    """The bare prompt with the new object, or the prompt with all labels at its last position."""
    row = request.rows[0]
    if objective == "each-token":
        return row
    end = row.positions[0]
    return TokenRow(row.ids[: end + 1], (end,) * len(row.labels), row.labels)


def prepare_objective(lm: "LM", rows: Sequence[TokenRow], layer: int) -> FineTuneObjective:
    """Run the rows once and store the input of the trained layer."""
    batch = TokenBatch.of(rows, lm.device)
    run = forward(lm, batch.ids)
    return FineTuneObjective(
        lm=lm,
        layer=layer,
        # All rows are padded to one length, so masks and positions of one row serve all of them.
        replay=Replay.whole(lm, forward(lm, batch.ids[:1])),
        states=(run.inputs, *run.states)[layer],
        batch=batch,
    )


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
    deltas, means, squares = ([w.zeros(groups) for w in weights] for _ in range(3))
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
            new = torch.autograd.grad(part.sum(), leaves)
            if gradients:
                gradients = [a.add_(b) for a, b in zip(gradients, new, strict=True)]
            else:
                gradients = list(new)
    return losses, gradients


class BoundFineTune(BoundEditor):
    """Fine-tuning bound to a model; its settings have the model's layer and limit filled in."""

    def __init__(self, settings: FineTune, lm: "LM") -> None:
        self.lm = lm
        given = settings.layer
        self.layer = (
            finetune_layer(lm, settings.method) if given is None else check_layer(lm, given)
        )
        modules = lm.attn_in(self.layer) if settings.weights == "attn" else [lm.mlp_out(self.layer)]
        self.weights = [
            TrainedWeight.of(lm, module, kind)
            for module in modules
            for kind in ("weight", "bias")
            if (kind == "weight" or settings.bias) and getattr(module, kind, None) is not None
        ]
        max_change = settings.max_change
        if max_change == "default":
            max_change = finetune_max_change(lm, settings.method, self._standard_deviation())
        self.settings = replace(settings, layer=self.layer, max_change=max_change)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: their mean loss is minimised."""
        requests = raise_first_error(edit_requests(self.lm, facts))
        rows = self._rows(requests)
        nested = NestedProgress(progress)

        def train(size: int) -> FineTuneResult:
            batches = [rows[i : i + size] for i in range(0, len(rows), size)]
            objectives = [prepare_objective(self.lm, batch, self.layer) for batch in batches]
            return minimise(objectives, self.weights, 1, self.settings, nested.within(0.0, 1.0))[0]

        result, _ = retry_smaller(train, self._facts_per_pass(rows, delta_per_fact=False))
        edits = raise_first_error([self._edit(facts, result)])
        return with_checks(self.lm, edits)[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error.

        An edit is as large as the weights that it changes and stays in main memory: with large
        models, call this with a few hundred facts at a time.
        """

        def train_all(requests: list[EditRequest]) -> list[Edit | FactscopeError]:
            size = self._facts_per_pass(self._rows(requests), delta_per_fact=True)
            return run_in_batches(requests, size, self._train_each, progress)

        edits = map_valid(edit_requests(self.lm, facts), train_all)
        return map_valid(edits, lambda edits: with_checks(self.lm, edits))

    def _train_each(
        self, requests: Sequence[EditRequest], progress: Progress
    ) -> list[Edit | FactscopeError]:
        objective = prepare_objective(self.lm, self._rows(requests), self.layer)
        results = minimise([objective], self.weights, len(requests), self.settings, progress)
        return [self._edit([r.fact], result) for r, result in zip(requests, results, strict=True)]

    def _rows(self, requests: Sequence[EditRequest]) -> list[TokenRow]:
        return [target_row(request, self.settings.objective) for request in requests]

    def _standard_deviation(self) -> float:
        """Standard deviation of the entries of the trained matrices."""
        matrices = [w.parameter.detach().float().cpu() for w in self.weights if len(w.shape) == 2]
        return torch.cat([matrix.flatten() for matrix in matrices]).std().item()

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
        if error := self._error(facts, result.losses):
            return error
        settings = asdict(self.settings)
        del settings["facts_per_pass"]  # does not affect the result
        return Edit(
            changes={w.name: Dense(x) for w, x in zip(self.weights, result.deltas, strict=True)},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=tuple(facts),
            settings={**settings, "losses": [result.losses]},
        )

    def _error(self, facts: Sequence[Fact], losses: Sequence[float]) -> DidNotConverge | None:
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
        return None
