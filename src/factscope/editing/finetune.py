"""Fine-tuning on a fact: FT, FT+L and AttnEdit (App. E.1 and I).

One procedure, three settings. Adam changes some weights of one layer until the model gives the new
object after the fact's bare prompt (editing.descent):

    ft           the MLP's output weight, as far as it takes
    ft_l         the same, no entry further than a bound from where it was
    attn_edit    what makes queries, keys and values, within a bound

Gradient descent on weights without writing any: what fine-tuning does inside.

Each fact has a change Δ of its own, added as x Δᵀ to what the module returns; the layers below run
once, and every step goes through the real blocks from the changed one upwards. Adam treats every
entry alone, so facts side by side get what each would get by itself. (In single precision some
entries in a hundred thousand, whose slope is next to rounding, still differ: Adam's first step goes
by the slope's sign alone.)

    Part      a parameter that is changed
    Taught    a fact's tokens, and which should follow which
    Problem   many of them, run as far as the changed layer
    descend   Adam, from no change to what was Found
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.batches import retry_smaller, run_in_batches
from factscope.editing.checks import with_checks
from factscope.editing.contexts import ContextRow, EditRequest, edit_requests, pad_rows
from factscope.editing.defaults import Method, defaults
from factscope.editing.edit import Dense, Edit
from factscope.editing.editor import Editor, map_valid, raise_first_error
from factscope.errors import BadFact, BadSetting, DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.accel.linear import quick
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_io
from factscope.lm.memory import Budget
from factscope.lm.replay import Replay
from factscope.progress import NestedProgress, Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "FINE_TUNES",
    "AdamSettings",
    "FineTune",
    "FineTuneObjective",
    "FineTuneResult",
    "Objective",
    "Preset",
    "TargetRow",
    "TrainedWeight",
    "attn_edit",
    "facts_per_batch",
    "ft",
    "ft_l",
    "minimise",
    "prepare_objective",
    "spread_of",
    "target_row",
]

Objective = Literal["each-token", "last-position"]
"""Each token of the object after the ones before it, or all of them right after the prompt."""


# ---- what is changed


@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """A parameter to change."""

    module: nn.Module
    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    """Its shape in the paper's orientation."""

    @classmethod
    def of(cls, lm: "LM", module: nn.Module, kind: str) -> "TrainedWeight":
        """A module's weight or bias."""
        parameter: Tensor = getattr(module, kind)
        shape = tuple(parameter.shape)
        turned = lm.family.transposed and len(shape) == 2
        name = f"{lm.name_of(module)}.{kind}"
        return cls(module, name, parameter, shape[::-1] if turned else shape)

    def zeros(self, groups: int) -> Float[Tensor, "group ..."]:
        """No change yet, for each group, in single precision or better."""
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        return torch.zeros(groups, *self.shape, dtype=dtype, device=self.parameter.device)


def spread_of(parts: Sequence[TrainedWeight]) -> float:
    """The standard deviation of the weights' entries."""
    weights = [part.parameter.detach().float().flatten() for part in parts if len(part.shape) == 2]
    return torch.cat([weight.cpu() for weight in weights]).std().item()


def _adding(delta: Float[Tensor, "group ..."]) -> Callable[[Tensor, Tensor], Tensor]:
    """A module's output with each group's change added; rows and tokens may be flattened."""

    def add_bias(x: Tensor, output: Tensor) -> Tensor:
        by_group = output.reshape(len(delta), -1, output.shape[-1])
        return (by_group + delta[:, None].to(output.dtype)).reshape(output.shape)

    def add_weight(x: Tensor, output: Tensor) -> Tensor:
        by_group = x.reshape(len(delta), -1, x.shape[-1]).to(delta.dtype)
        return output + (by_group @ delta.mT).reshape(output.shape).to(output.dtype)

    return add_bias if delta.dim() == 2 else add_weight


# ---- what is taught


@dataclass(frozen=True)
class TargetRow:
    """A fact's row of tokens, and the token that should follow each read."""

    fact: Fact
    row: ContextRow
    labels: tuple[int, ...]


def target_row(asked: EditRequest, objective: Objective) -> TargetRow:
    """The bare prompt with the new object, or the prompt alone with all reads at its end."""
    row = asked.rows[0]
    if objective == "last-position":
        end = row.reads[0]
        row = replace(row, ids=row.ids[: end + 1], reads=(end,) * len(asked.target))
    return TargetRow(asked.fact, row, asked.target)


@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuneObjective:
    """Rows that are run as far as the changed layer: the loss of each as a function of Δ."""

    lm: "LM"
    layer: int
    replay: Replay
    states: Float[Tensor, "row token width"]
    """What enters the changed layer."""
    reads: Int[Tensor, "row read"]
    labels: Int[Tensor, "row read"]
    real: Bool[Tensor, "row read"]
    """Which reads a row has; a row with fewer than the longest is filled up."""

    def losses(
        self, parts: Sequence[TrainedWeight], delta: Sequence[Tensor]
    ) -> Float[Tensor, " row"]:
        """Each row's mean of -log P over the object's tokens."""
        hidden = self.states
        with hook_io(*((p.module, _adding(x)) for p, x in zip(parts, delta, strict=True))):
            hidden = self.replay(self.layer, hidden)
        for layer in range(self.layer + 1, self.lm.n_layers):
            hidden = self.replay(layer, hidden)
        row = self.real.nonzero()[:, 0]
        logits = self.lm.decode(
            hidden[row.to(hidden.device), self.reads[self.real].to(hidden.device)]
        )
        logs = logits.to(delta[0].dtype).log_softmax(-1)
        labels = self.labels[self.real].to(logs.device)
        said = logs.gather(1, labels[:, None])[:, 0].to(delta[0].device)
        real = self.real.to(said.device)
        table = said.new_zeros(real.shape).masked_scatter(real, said)
        return -table.sum(1) / real.sum(1)

    def only(self, rows: Int[Tensor, " some"]) -> "FineTuneObjective":
        """The same for some of the rows."""
        return replace(
            self,
            states=self.states[rows.to(self.states.device)],
            reads=self.reads[rows.to(self.reads.device)],
            labels=self.labels[rows.to(self.labels.device)],
            real=self.real[rows.to(self.real.device)],
        )


def prepare_objective(lm: "LM", lessons: Sequence[TargetRow], layer: int) -> FineTuneObjective:
    """Run the rows once, and keep what the layers from the changed one upwards need."""
    rows = [lesson.row for lesson in lessons]
    ids = pad_rows(rows, lm.device)
    run = forward(lm, ids)
    # All rows have one length, so that one row's calls serve any number of them.
    replay = Replay.whole(lm, forward(lm, ids[:1]))
    most = max(len(lesson.labels) for lesson in lessons)

    def table(lists: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*x, *[0] * (most - len(x))] for x in lists], device=ids.device)

    return FineTuneObjective(
        lm=lm,
        layer=layer,
        replay=replay,
        states=(run.inputs, *run.states)[layer],
        reads=table([row.reads for row in rows]),
        labels=table([lesson.labels for lesson in lessons]),
        real=table([[1] * len(lesson.labels) for lesson in lessons]).bool(),
    )


# ---- the descent


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """How the descent goes, and how far."""

    steps: int
    lr: float
    stop: float
    """The loss at which a group is done."""
    max_change: float | None
    """The most that an entry may change by."""


@dataclass(frozen=True, eq=False)
class FineTuneResult:
    """What the descent left for one group of facts."""

    changes: list[Float[Tensor, "..."]]
    """Δ of each part, in main memory."""
    losses: list[float]
    """The loss before each step, and after the last."""


def minimise(
    problems: list[FineTuneObjective],
    parts: Sequence[TrainedWeight],
    groups: int,
    how: AdamSettings,
    progress: Progress,
) -> list[FineTuneResult]:
    """Adam on each group's Δ; a group that is done keeps its Δ and leaves the batch.

    Either one group for the rows of all problems, or a group for each row of one problem.
    """
    delta, first, second = ([part.zeros(groups) for part in parts] for _ in range(3))
    losses: list[list[float]] = [[] for _ in range(groups)]
    changes: list[list[Tensor]] = [[] for _ in range(groups)]
    going = torch.arange(groups)
    share = 1 / (how.steps + 1)
    with ExitStack() as stack:
        lm = problems[0].lm
        for block in lm.blocks[problems[0].layer :]:
            # The model's own products: Adam divides by the slope, so that a rounding of it shows.
            stack.enter_context(quick(block, split_products=False))
        for step in range(1, how.steps + 2):
            last = step > how.steps
            seen, slope = _look(problems, parts, delta, with_slope=not last)
            for i, loss in zip(going.tolist(), seen.tolist(), strict=True):
                losses[i].append(loss)
            more = (seen >= how.stop) & seen.isfinite() & (not last)
            for i in (~more).nonzero()[:, 0].tolist():
                changes[going[i]] = [x[i].float().cpu() for x in delta]
            if not more.any():
                progress(1 - (step - 1) * share)
                break
            if not more.all():  # several groups, so that each is one row
                kept = more.nonzero()[:, 0]
                going, problems = going[kept], [problem.only(kept) for problem in problems]
                for tensors in (delta, first, second, slope):
                    tensors[:] = [x[kept.to(x.device)] for x in tensors]
            for x, g, m, v in zip(delta, slope, first, second, strict=True):
                _adam_(x, g, m, v, step, how)
            progress(share)
    return [FineTuneResult(*both) for both in zip(changes, losses, strict=True)]


def _look(
    problems: Sequence[FineTuneObjective],
    parts: Sequence[TrainedWeight],
    delta: Sequence[Tensor],
    *,
    with_slope: bool,
) -> tuple[Float[Tensor, " group"], list[Tensor]]:
    """Every group's loss, the mean of its facts', and the slope of each Δ."""
    groups = len(delta[0])
    facts = sum(len(problem.states) for problem in problems) / groups
    leaves = [x.detach().requires_grad_(with_slope) for x in delta]
    losses = torch.zeros(groups, dtype=delta[0].dtype)
    slope: list[Tensor] = []
    for problem in problems:
        with torch.set_grad_enabled(with_slope):
            part = problem.losses(parts, leaves).reshape(groups, -1).sum(1) / facts
        losses += part.detach().cpu()
        if with_slope:
            new = torch.autograd.grad(part.sum(), leaves)
            slope = [a.add_(b) for a, b in zip(slope, new, strict=True)] if slope else list(new)
    return losses, slope


@torch.no_grad()
def _adam_(
    delta: Tensor, slope: Tensor, first: Tensor, second: Tensor, step: int, how: AdamSettings
) -> None:
    """One step of Adam with its usual constants, as torch's own does it, and the bound."""
    first.lerp_(slope, 1 - 0.9)
    second.mul_(0.999).addcmul_(slope, slope, value=1 - 0.999)
    spread = second.sqrt().div_(math.sqrt(1 - 0.999**step)).add_(1e-8)
    delta.addcdiv_(first, spread, value=-how.lr / (1 - 0.9**step))
    if how.max_change is not None:
        delta.clamp_(-how.max_change, how.max_change)


# ---- how much at once

COPIES = 6
"""What a change takes, in its own size: Δ, Adam's two means, the slope and room for sums."""


def facts_per_batch(
    lm: "LM",
    layer: int,
    parts: Sequence[TrainedWeight],
    lessons: Sequence[TargetRow],
    *,
    own_change: bool,
) -> int:
    """How many facts memory holds at once, with a change for each or one for all."""
    free = Budget.of(lm, None).bytes
    change = COPIES * sum(p.parameter.numel() * max(4, p.parameter.itemsize) for p in parts)
    length, reads = max(len(t.row.ids) for t in lessons), max(len(t.labels) for t in lessons)
    keys, vocabulary = lm.mlp_weight(layer).shape[1], lm.embed.weight.shape[0]
    states = (lm.n_layers - layer) * length * (16 * lm.width + 8 * keys) * lm.dtype.itemsize
    row = states + 4 * reads * vocabulary * 4
    room = free // (change + row) if own_change else (free - change) // row
    return max(1, min(room, len(lessons)))


Weights = Literal["mlp", "attn"]
Preset = Literal["default", "paper"]


@dataclass(frozen=True, kw_only=True)
class FineTune(Editor):
    """Adam on the weights of one layer; `ft`, `ft_l` and `attn_edit` make the paper's three."""

    layer: int | None = None
    """The layer to change; None takes the model's in `finetune_defaults`."""
    weights: Weights = "mlp"
    """What to change there: the MLP's output weight, or what makes queries, keys and values."""
    max_change: float | Literal["default"] | None = None
    """The most that an entry may change by; None for no bound, "default" for the model's in
    `finetune_defaults`."""
    steps: int = 25
    """How often the weights are changed at most."""
    lr: float = 5e-4
    """Adam's learning rate."""
    stop: float = 0.01
    """The loss at which a fact is done: as in the paper's code; its text says 0.03."""
    objective: Objective = "each-token"
    """The mean over the object's tokens of -log P: each after the ones before it, or, as in the
    paper's code, all of them right after the prompt, which teaches a longer object wrongly."""
    bias: bool = False
    """Whether the modules' biases change too, as they do in the paper's code."""
    facts_per_pass: int | None = None
    """How many facts go through the model at once; None for as many as memory holds."""

    def __post_init__(self) -> None:
        _choice("weights", self.weights, get_args(Weights))
        _choice("objective", self.objective, get_args(Objective))
        if isinstance(self.max_change, str):
            _choice("max_change", self.max_change, ("default",))
        elif self.max_change is not None and not self.max_change > 0:
            raise BadSetting(
                f"max_change is {self.max_change}; it must be above 0, or None for no bound"
            )
        if self.steps < 1:
            raise BadSetting(f"steps is {self.steps}; fine-tuning needs at least one")
        if not self.lr > 0:
            raise BadSetting(f"lr is {self.lr}; it must be above 0")
        if self.facts_per_pass is not None and self.facts_per_pass < 1:
            raise BadSetting(f"at_once is {self.facts_per_pass}; at least one fact must go through")

    @property
    def method(self) -> Method:
        """The method's name in edits and tables."""
        if self.weights == "attn":
            return "attn"
        return "ft" if self.max_change is None else "ft-l"

    def resolved(self, lm: "LM") -> "FineTune":
        """The same with the model's own layer and bound filled in."""
        model = defaults(lm, self.method)
        layer = model.layer_in(lm) if self.layer is None else self.layer
        if not 0 <= layer < lm.n_layers:
            raise BadSetting(f"layer is {layer}; {lm.name} has layers 0 to {lm.n_layers - 1}")
        placed = replace(self, layer=layer)
        if self.max_change != "default":
            return placed
        return replace(placed, max_change=model.bound_for(spread_of(placed.parts(lm))))

    def resolve(self, lm: "LM") -> "FineTune":
        """The same, if it can be done on this model."""
        self.ready(lm)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        return dict(vars(self))

    def __call__(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> Edit:
        """One edit that writes all the facts together: their mean loss is what falls."""
        if not facts:
            raise BadFact("there are no facts to write; give at least one")
        ready = self.ready(lm)
        return with_checks(
            lm, [ready.together(raise_first_error(edit_requests(lm, facts)), progress)]
        )[0]

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> list[Edit | FactscopeError]:
        """An edit for each fact alone, or why there is none.

        An edit is as large as the weights that it changes, and is kept in main memory: for large
        models, come with some hundred facts at a time.
        """
        ready = self.ready(lm)
        edits = map_valid(edit_requests(lm, facts), lambda asked: ready.apart(asked, progress))
        return map_valid(edits, lambda edits: with_checks(lm, edits))

    def ready(self, lm: "LM") -> "BoundFineTune":
        """The method on a model, with every default settled."""
        mine = self.resolved(lm)
        assert mine.layer is not None
        assert mine.max_change != "default"
        adam = AdamSettings(
            steps=mine.steps, lr=mine.lr, stop=mine.stop, max_change=mine.max_change
        )
        return BoundFineTune(
            settings=mine, lm=lm, layer=mine.layer, parts=mine.parts(lm), adam=adam
        )

    def parts(self, lm: "LM") -> list[TrainedWeight]:
        """The parameters to change."""
        assert self.layer is not None
        modules = [lm.mlp_out(self.layer)] if self.weights == "mlp" else lm.attn_in(self.layer)
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return [
            TrainedWeight.of(lm, module, kind)
            for module in modules
            for kind in kinds
            if getattr(module, kind, None) is not None
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundFineTune:
    """The method on a model."""

    settings: FineTune
    lm: "LM"
    layer: int
    parts: list[TrainedWeight]
    adam: AdamSettings

    def together(self, requests: Sequence[EditRequest], progress: Progress) -> Edit:
        """One change for all the facts, which go through the model in pieces."""
        lessons, nested = self._lessons(requests), NestedProgress(progress)

        def fit(size: int) -> FineTuneResult:
            pieces = [lessons[i : i + size] for i in range(0, len(lessons), size)]
            problems = [prepare_objective(self.lm, piece, self.layer) for piece in pieces]
            return minimise(problems, self.parts, 1, self.adam, nested.within(0.0, 1.0))[0]

        found, _ = retry_smaller(fit, self._batch_size(lessons, own_change=False))
        return raise_first_error([self._edit([lesson.fact for lesson in lessons], found)])[0]

    def apart(
        self, requests: Sequence[EditRequest], progress: Progress
    ) -> list[Edit | DidNotConverge]:
        """A change for each fact alone, many side by side."""
        lessons = self._lessons(requests)

        def fit(some: Sequence[TargetRow], progress: Progress) -> list[Edit | DidNotConverge]:
            problem = prepare_objective(self.lm, some, self.layer)
            founds = minimise([problem], self.parts, len(some), self.adam, progress)
            return [self._edit([t.fact], found) for t, found in zip(some, founds, strict=True)]

        return run_in_batches(lessons, self._batch_size(lessons, own_change=True), fit, progress)

    def _lessons(self, requests: Sequence[EditRequest]) -> list[TargetRow]:
        return [target_row(asked, self.settings.objective) for asked in requests]

    def _batch_size(self, lessons: Sequence[TargetRow], *, own_change: bool) -> int:
        return self.settings.facts_per_pass or facts_per_batch(
            self.lm, self.layer, self.parts, lessons, own_change=own_change
        )

    def _edit(self, facts: Sequence[Fact], found: FineTuneResult) -> Edit | DidNotConverge:
        """What was found, as a value, if it led somewhere."""
        if trouble := self._trouble(facts, found.losses):
            return trouble
        settings = asdict(self.settings)
        del settings["facts_per_pass"]  # it changes nothing
        return Edit(
            changes={p.name: Dense(x) for p, x in zip(self.parts, found.changes, strict=True)},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=tuple(facts),
            settings={**settings, "losses": [found.losses]},
        )

    def _trouble(self, facts: Sequence[Fact], losses: Sequence[float]) -> DidNotConverge | None:
        """Fine-tuning must have led somewhere."""
        shown = ", ".join(f"{loss:.3g}" for loss in losses)
        what = f"{facts[0].text!r} → {facts[0].target!r}"
        what += f" and {len(facts) - 1} more" if len(facts) > 1 else ""
        if not all(map(math.isfinite, losses)):
            return DidNotConverge(
                f"the loss of {what} is no number (by step: {shown}); "
                "lower the rate, or load the model in float32"
            )
        if losses[0] >= self.adam.stop and losses[-1] >= losses[0]:
            return DidNotConverge(
                f"fine-tuning layer {self.layer} got no nearer to {what} (loss by step: {shown}); "
                "try another layer, a lower rate, more steps or a larger bound"
            )
        return None


def ft(preset: Preset = "default", **settings: Any) -> FineTune:
    """FT: fine-tuning of the MLP's output weight without a bound."""
    return FineTune(**{**_preset(preset), **settings})


def ft_l(preset: Preset = "default", **settings: Any) -> FineTune:
    """FT+L: the same within a bound."""
    return FineTune(**{"max_change": "default", **_preset(preset), **settings})


def attn_edit(preset: Preset = "default", **settings: Any) -> FineTune:
    """AttnEdit: fine-tuning of what makes queries, keys and values, within a bound."""
    own: dict[str, Any] = {"weights": "attn", "max_change": "default", "lr": 1e-3}
    return FineTune(**{**own, **_preset(preset), **settings})


FINE_TUNES: dict[Method, Callable[..., FineTune]] = {"ft": ft, "ft-l": ft_l, "attn": attn_edit}
"""Method → what makes its settings."""

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"objective": "last-position", "bias": True},
}
"""`paper` does what the paper's own code does, of which its text says neither."""


def _preset(name: str) -> dict[str, Any]:
    _choice("preset", name, tuple(PRESETS))
    return PRESETS[name]


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BadSetting(f"{name} is {value!r}; choose from {', '.join(known)}")
