"""Gradient descent on weights without writing any: what fine-tuning does inside.

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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.editor import Done
from factscope.editing.requests import Request, Row, padded
from factscope.facts import Fact
from factscope.lm.forward import forward
from factscope.lm.hooks import on_pass
from factscope.lm.quick import quick
from factscope.lm.replay import Replay
from factscope.tracing.memory import Budget

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Adam",
    "Found",
    "Objective",
    "Part",
    "Problem",
    "Taught",
    "descend",
    "fitting",
    "pose",
    "spread_of",
    "taught",
]

Objective = Literal["each-token", "last-position"]
"""Each token of the object after the ones before it, or all of them right after the prompt."""


# ---- what is changed


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter to change."""

    module: nn.Module
    name: str
    parameter: Tensor
    shape: tuple[int, ...]
    """Its shape in the paper's orientation."""

    @classmethod
    def of(cls, lm: "LM", module: nn.Module, kind: str) -> "Part":
        """A module's weight or bias."""
        parameter: Tensor = getattr(module, kind)
        shape = tuple(parameter.shape)
        turned = lm.arch.transposed and len(shape) == 2
        name = f"{lm.name_of(module)}.{kind}"
        return cls(module, name, parameter, shape[::-1] if turned else shape)

    def zeros(self, groups: int) -> Float[Tensor, "group ..."]:
        """No change yet, for each group, in single precision or better."""
        dtype = torch.promote_types(self.parameter.dtype, torch.float32)
        return torch.zeros(groups, *self.shape, dtype=dtype, device=self.parameter.device)


def spread_of(parts: Sequence[Part]) -> float:
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
class Taught:
    """A fact's row of tokens, and the token that should follow each read."""

    fact: Fact
    row: Row
    labels: tuple[int, ...]


def taught(asked: Request, objective: Objective) -> Taught:
    """The bare prompt with the new object, or the prompt alone with all reads at its end."""
    row = asked.rows[0]
    if objective == "last-position":
        end = row.reads[0]
        row = replace(row, ids=row.ids[: end + 1], reads=(end,) * len(asked.target))
    return Taught(asked.fact, row, asked.target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
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

    def losses(self, parts: Sequence[Part], delta: Sequence[Tensor]) -> Float[Tensor, " row"]:
        """Each row's mean of -log P over the object's tokens."""
        hidden = self.states
        with on_pass(*((p.module, _adding(x)) for p, x in zip(parts, delta, strict=True))):
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

    def only(self, rows: Int[Tensor, " some"]) -> "Problem":
        """The same for some of the rows."""
        return replace(
            self,
            states=self.states[rows.to(self.states.device)],
            reads=self.reads[rows.to(self.reads.device)],
            labels=self.labels[rows.to(self.labels.device)],
            real=self.real[rows.to(self.real.device)],
        )


def pose(lm: "LM", lessons: Sequence[Taught], layer: int) -> Problem:
    """Run the rows once, and keep what the layers from the changed one upwards need."""
    rows = [lesson.row for lesson in lessons]
    ids = padded(rows, lm.device)
    run = forward(lm, ids)
    # All rows have one length, so that one row's calls serve any number of them.
    replay = Replay.whole(lm, forward(lm, ids[:1]))
    most = max(len(lesson.labels) for lesson in lessons)

    def table(lists: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([[*x, *[0] * (most - len(x))] for x in lists], device=ids.device)

    return Problem(
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
class Adam:
    """How the descent goes, and how far."""

    steps: int
    rate: float
    stop: float
    """The loss at which a group is done."""
    bound: float | None
    """The most that an entry may change by."""


@dataclass(frozen=True, eq=False)
class Found:
    """What the descent left for one group of facts."""

    changes: list[Float[Tensor, "..."]]
    """Δ of each part, in main memory."""
    losses: list[float]
    """The loss before each step, and after the last."""


def descend(
    problems: list[Problem], parts: Sequence[Part], groups: int, how: Adam, done: Done
) -> list[Found]:
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
                done(1 - (step - 1) * share)
                break
            if not more.all():  # several groups, so that each is one row
                kept = more.nonzero()[:, 0]
                going, problems = going[kept], [problem.only(kept) for problem in problems]
                for tensors in (delta, first, second, slope):
                    tensors[:] = [x[kept.to(x.device)] for x in tensors]
            for x, g, m, v in zip(delta, slope, first, second, strict=True):
                _adam_(x, g, m, v, step, how)
            done(share)
    return [Found(*both) for both in zip(changes, losses, strict=True)]


def _look(
    problems: Sequence[Problem],
    parts: Sequence[Part],
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
    delta: Tensor, slope: Tensor, first: Tensor, second: Tensor, step: int, how: Adam
) -> None:
    """One step of Adam with its usual constants, as torch's own does it, and the bound."""
    first.lerp_(slope, 1 - 0.9)
    second.mul_(0.999).addcmul_(slope, slope, value=1 - 0.999)
    spread = second.sqrt().div_(math.sqrt(1 - 0.999**step)).add_(1e-8)
    delta.addcdiv_(first, spread, value=-how.rate / (1 - 0.9**step))
    if how.bound is not None:
        delta.clamp_(-how.bound, how.bound)


# ---- how much at once

COPIES = 6
"""What a change takes, in its own size: Δ, Adam's two means, the slope and room for sums."""


def fitting(
    lm: "LM", layer: int, parts: Sequence[Part], lessons: Sequence[Taught], *, own_change: bool
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
