"""Accelerated value search: fast layers, suffix attention, captured steps.

`accelerated_search(objective, minimise)` calls `minimise(objective, make_step)`, where
`make_step(objective)` is one step of the optimiser. On a CPU that is the objective's own step.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.lm.accel.attention import (
    rounds_to_half,
    suffix_attention,
    supports_suffix_attention,
)
from factscope.lm.accel.graphs import CudaGraph
from factscope.lm.accel.linear import fast_blocks, replaced, splits_float32
from factscope.lm.accel.model_cache import ModelCache, model_cache
from factscope.lm.hooks import has_hooks

if TYPE_CHECKING:
    from factscope.lm.model import LM

LAUNCH_BOUND = 1.5e11
"""Below this many multiplications per block, launching a step takes longer than computing it."""

T = TypeVar("T")


@runtime_checkable
class Objective(Protocol):
    """What a search minimises: each fact's loss as a function of its δ."""

    @property
    def lm(self) -> "LM":
        """The model."""
        ...

    @property
    def hidden(self) -> Float[Tensor, "row slot width"]:
        """The states that enter the first block that δ changes."""
        ...

    @property
    def suffix_attention(self) -> bool:
        """Whether steps run with suffix attention."""
        ...

    @property
    def lowest_block(self) -> int:
        """The lowest block that a step runs."""
        ...

    @property
    def facts(self) -> int:
        """How many facts are searched at once."""
        ...

    def step(self, state: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """The losses at a state, and the state after one step of the optimiser."""
        ...

    def key(self) -> tuple[Any, ...]:
        """Everything beside the tensors that a captured step depends on."""
        ...

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads and that differs between facts."""
        ...

    def modules(self) -> list[nn.Module]:
        """Every module that a step runs."""
        ...

    def last_block(self, hidden: Tensor) -> Tensor:
        """The last block's output for given states."""
        ...

    def with_suffix_attention(self, *, half: bool) -> "Objective":
        """The same with suffix attention, and with `half` the past's keys in float16."""
        ...


@runtime_checkable
class Step(Protocol):
    """A step of the optimiser; its results may be overwritten by the next call."""

    capture_seconds: float
    """How long it took to set up: a smaller batch must save more than that."""

    def __call__(self, state: Tensor, correction: Tensor, /) -> tuple[Tensor, Tensor]:
        """The losses at a state, and the next state."""
        ...


Minimise = Callable[[Any, Callable[[Any], Step]], tuple[T, list[list[float]]]]
"""(objective, make_step) → result and the losses of each fact by step."""


def accelerated_search(objective: Objective, minimise: Minimise[T]) -> tuple[T, list[list[float]]]:
    """minimise(objective, make_step) with fast steps; on overflow again, without split products."""
    objective = _with_suffix_attention(objective)
    # In float32 the run over the contexts, just before, has refreshed the cache.
    stale = not splits_float32(objective.lm.dtype)
    cache = model_cache(objective.lm, refresh=stale) if _uses_cache(objective) else None
    with _Steps(cache, split=True) as steps:
        result, losses = minimise(objective, steps.make)
        steps.cache_captured(objective)
    overflow = not all(math.isfinite(loss) for fact in losses for loss in fact)
    if objective.hidden.is_cuda and overflow:
        with _Steps(None, split=False) as steps:
            result, losses = minimise(objective, steps.make)
    return result, losses


def _uses_cache(objective: Objective) -> bool:
    """Whether captured steps are reused: those of single facts are, batches vary in size."""
    return objective.hidden.is_cuda and objective.facts == 1


class _Steps:
    """Makes steps, and holds the fast layers and the attention that they run with."""

    def __init__(self, cache: ModelCache | None, *, split: bool) -> None:
        self.cache, self.split = cache, split
        self.stack = ExitStack()
        self.entered = False
        self.new: CudaGraph | None = None

    def __enter__(self) -> "_Steps":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def make(self, objective: Objective) -> CudaGraph:
        """A step for this objective: cached, or captured when it is first called."""
        if self.cache is not None and not has_hooks(objective.modules()):
            cached = self.cache.find(_key(objective), objective.tensors())
            if cached is not None:
                return cached
        self._enter(objective)
        objective.tensors()  # compute masks and positions now, not at each replay
        block = sum(weight.numel() for weight in objective.lm.blocks[-1].parameters())
        pays = objective.hidden.shape[:2].numel() * block < LAUNCH_BOUND
        pool = None if self.cache is None else self.cache.pool
        self.new = CudaGraph(objective.step, pays=pays, pool=pool)
        return self.new

    def _enter(self, objective: Objective) -> None:
        """Switch on fast layers and suffix attention, once."""
        if self.entered:
            return
        self.entered = True
        lm, lowest = objective.lm, objective.lowest_block
        if self.cache is None:
            blocks = lm.blocks[lowest:]
            self.stack.enter_context(fast_blocks(blocks, split=self.split))
        else:
            layers = range(lowest, lm.n_layers + splits_float32(lm.dtype))
            self.stack.enter_context(replaced(self.cache.build(lm, layers)))
        if objective.suffix_attention:
            self.stack.enter_context(suffix_attention(objective.hidden.device))

    def cache_captured(self, objective: Objective) -> None:
        """Cache a newly captured step for the next fact."""
        if self.cache is None or self.new is None:
            return
        if self.new.failed:  # torch rejects a memory pool in which a capture failed
            self.cache.pool = torch.cuda.graph_pool_handle()
        elif self.new.graph is not None and not has_hooks(objective.modules()):
            tensors = objective.tensors()
            self.cache.add(_key(objective), objective.lowest_block, tensors, self.new)


def _key(objective: Objective) -> tuple[Any, ...]:
    shapes = tuple((x.shape, x.dtype, x.device) for x in objective.tensors())
    return (*objective.key(), shapes)


# ---- suffix attention


def _with_suffix_attention(objective: Objective) -> Objective:
    """The objective with suffix attention, where that works for this model and shape."""
    hidden = objective.hidden
    key = (hidden.shape, objective.key())
    if not supports_suffix_attention(
        objective.lm, key, hidden.device, lambda: _output_and_gradient(objective)
    ):
        return objective
    # Round the past's keys and values once, so that attention need not do it at every step.
    return objective.with_suffix_attention(half=rounds_to_half(hidden.dtype))


def _output_and_gradient(objective: Objective) -> tuple[Tensor, Tensor]:
    """The last block's output, and the gradient of a function of it by its input."""
    hidden = objective.hidden.detach().requires_grad_()
    with torch.enable_grad():
        out = objective.last_block(hidden)
        (gradient,) = torch.autograd.grad(out, hidden, out.detach())
    return out.detach(), gradient
