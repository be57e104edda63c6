"""The value v*: what a fact's token must carry so that the model names the new object.

δ is changed by gradient descent until the new object follows in every context; the essence term
keeps what else is said of the subject. Many facts are searched at once: steps, losses and stops of
one do not touch another's.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.batches import in_batches
from factscope.editing.editor import Done, each_or_error
from factscope.editing.kept import keep, kept_for, memory_for, quick_above, shelf_of
from factscope.editing.problem import Posed, Problem, Site, ValueSearch, pose
from factscope.editing.requests import Request, Token, requests_of
from factscope.errors import FactscopeError, NoProgress
from factscope.facts import Fact
from factscope.lm.quick import MANY
from factscope.lm.recorded import Recorded
from factscope.lm.short_attention import short_attention

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Sought", "search", "search_each"]

SCALE = 2.0**12
"""The loss is scaled by this before its slopes are taken, which brings them into the middle of
half precision's range (see `lm.products`)."""

HEAVY = 1.5e11
"""A block with so many products takes a GPU longer to compute than to be told."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sought:
    """What a search found for one fact."""

    request: Request
    delta: Float[Tensor, " value"]
    values: Float[Tensor, "row value"]
    """What was there before: the value (or state) at the fact's token after each prefix, the bare
    prompt first; v₀ is the first of them."""
    keys: Float[Tensor, "row key"]
    """The keys there: the input of the layer's MLP output weight."""
    losses: tuple[float, ...]
    """The loss at each step."""

    @property
    def fact(self) -> Fact:
        """The fact that it is for."""
        return self.request.fact


def search_each(
    lm: "LM", facts: Sequence[Fact], prefixes: Sequence[str], layer: int, site: Site, token: Token,
    settings: ValueSearch, *, at_once: int | None, done: Done,
) -> list[Sought | FactscopeError]:  # fmt: skip
    """The value of each fact, searched in batches; a fact that fails has its error there."""

    def solve(requests: Sequence[Request], done: Done) -> list[Sought | FactscopeError]:
        shelf = shelf_of(lm) if len(requests) == 1 else None
        quick = None if shelf is None else shelf.quick
        return search(pose(lm, requests, layer, site, token, settings, quick), requests, done)

    def solve_all(requests: list[Request]) -> list[Sought | FactscopeError]:
        return in_batches(lm, requests, layer, solve, at_once=at_once, done=done)

    return each_or_error(requests_of(lm, facts, prefixes, token), solve_all)


def search(
    posed: Posed, requests: Sequence[Request], done: Done = lambda share: None
) -> list[Sought | FactscopeError]:
    """Change every δ until its fact is told, or the steps are used up.

    A fact whose search led nowhere gets the error in place of a value.
    """
    problem = posed.problem
    delta, losses = _descend(problem, done)
    if problem.hidden.is_cuda and not all(map(_is_finite, chain(*losses))):
        # Quick products may have left half precision's range; the model's own do not.
        delta, losses = _descend(problem, lambda share: None, split_products=False)
    found = [
        Sought(request=r, delta=d, values=v, keys=k, losses=tuple(mine))
        for r, d, v, k, mine in zip(requests, delta, posed.values, posed.keys, losses, strict=True)
    ]
    return [_trouble(one) or one for one in found]


def _descend(
    problem: Problem, done: Done, *, split_products: bool = True
) -> tuple[Float[Tensor, "fact width"], list[list[float]]]:
    """Adam on every δ; a fact that is done keeps its δ and, when that pays, leaves the batch."""
    settings, steps = problem.search, problem.search.looks
    adam = _Adam(problem)
    losses: list[list[float]] = [[] for _ in problem.size]
    with ExitStack() as stack:
        look = kept_for(problem) if split_products else None
        if look is None:
            stack.enter_context(quick_above(problem, split_products=split_products))
            if problem.apart:
                stack.enter_context(short_attention(problem.hidden.device))
            look = _looking(problem, memory_for(problem))
        current, batch = problem, torch.arange(len(losses), device=problem.size.device)
        going = torch.ones_like(batch, dtype=torch.bool)
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            last = step == steps
            forward_only = last and len(batch) >= MANY
            delta = adam.delta[batch]
            seen, slope = _only_losses(current, delta) if forward_only else look(delta)
            for i, loss, mine in zip(batch.tolist(), seen.tolist(), going.tolist(), strict=True):
                if mine:
                    losses[i].append(loss)
            going = going & ~(seen < settings.stop) & seen.isfinite()
            done(1 / steps)
            if last or not going.any():
                done(1 - step / steps)
                break
            moving = batch[going]
            adam.move_(moving, slope[going], step)
            spared = (time.perf_counter() - begin) * (1 - len(moving) / len(batch)) * (steps - step)
            if len(moving) < len(batch) and spared > look.cost:
                batch, going = moving, torch.ones_like(moving, dtype=torch.bool)
                current = problem.only(batch)
                look = _looking(current)
        if split_products:
            keep(problem, look)
    return adam.delta, losses


class _Adam:
    """δ of every fact, and Adam's two means of its slopes."""

    def __init__(self, problem: Problem) -> None:
        self.size, self.search = problem.size, problem.search
        self.delta = problem.size.new_zeros(len(problem.size), problem.hidden.shape[-1])
        self.first, self.second = torch.zeros_like(self.delta), torch.zeros_like(self.delta)

    def move_(self, facts: Tensor, slope: Tensor, step: int) -> None:
        """One step for some of the facts, each δ kept no longer than its bound."""
        first = self.first[facts] = 0.9 * self.first[facts] + 0.1 * slope
        second = self.second[facts] = 0.999 * self.second[facts] + 0.001 * slope**2
        mean, spread = first / (1 - 0.9**step), second / (1 - 0.999**step)
        moved = self.delta[facts] - self.search.rate * mean / (spread.sqrt() + 1e-8)
        longest = self.search.longest * self.size[facts, None]
        norm = moved.norm(dim=-1, keepdim=True)
        self.delta[facts] = torch.where(norm > longest, moved * longest / norm, moved)


def _looking(problem: Problem, memory: Any = None) -> Recorded:
    """The losses at δ and their slopes, as a function of δ; a recording computes in the memory."""
    problem.prepare()
    block = sum(weight.numel() for weight in problem.lm.blocks[-1].parameters())
    slots = problem.view.position.numel()

    def look(delta: Tensor) -> tuple[Tensor, Tensor]:
        delta = delta.detach().requires_grad_()
        with torch.enable_grad():
            losses = problem.losses(delta)
            slope = torch.autograd.grad(SCALE * losses.sum(), delta)[0]
        return losses.detach(), slope / SCALE

    return Recorded(look, pays=slots * block < HEAVY, pool=memory)


def _only_losses(problem: Problem, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The losses at δ, for the last look, after which nothing moves."""
    with torch.no_grad():
        return problem.losses(delta), torch.zeros_like(delta)


def _trouble(found: Sought) -> NoProgress | None:
    """A search must have led somewhere."""
    fact, losses = found.fact, found.losses
    shown = ", ".join(f"{loss:.3g}" for loss in losses)
    if not all(map(_is_finite, losses)):
        return NoProgress(
            f"the loss of {fact.text!r} → {fact.target!r} is no number (by step: {shown}); "
            "lower the rate, or load the model in float32"
        )
    if len(losses) > 1 and losses[-1] >= losses[0]:
        return NoProgress(
            f"no value makes the model say {fact.target!r} after {fact.text!r} "
            f"(loss by step: {shown}); try another layer, more steps or a larger clamp"
        )
    return None


def _is_finite(x: float) -> bool:
    return abs(x) < float("inf")
