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
from factscope.editing.kept import Shelf, shelf_for
from factscope.editing.problem import Posed, Problem, Site, ValueSearch, pose
from factscope.editing.requests import Request, Token, requests_of
from factscope.errors import FactscopeError, NoProgress
from factscope.facts import Fact
from factscope.lm.quick import MANY, quick_blocks
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
        shelf = shelf_for(lm) if len(requests) == 1 else None
        quick = None if shelf is None else shelf.quick_run(lm, layer)
        posed = pose(lm, requests, layer, site, token, settings, quick)
        return search(posed, requests, done, shelf)

    def solve_all(requests: list[Request]) -> list[Sought | FactscopeError]:
        return in_batches(lm, requests, layer, solve, at_once=at_once, done=done)

    return each_or_error(requests_of(lm, facts, prefixes, token), solve_all)


def search(
    posed: Posed, requests: Sequence[Request], done: Done = lambda share: None,
    shelf: Shelf | None = None,
) -> list[Sought | FactscopeError]:  # fmt: skip
    """Change every δ until its fact is told, or the steps are used up.

    A fact whose search led nowhere gets the error in place of a value. What is on the shelf is
    used, and what the search of a single fact made is put there.
    """
    problem = posed.problem
    delta, losses = _descend(problem, done, shelf)
    if problem.hidden.is_cuda and not all(map(_is_finite, chain(*losses))):
        # Quick products may have left half precision's range; the model's own do not.
        delta, losses = _descend(problem, lambda share: None, None, split_products=False)
    found = [
        Sought(request=r, delta=d, values=v, keys=k, losses=tuple(mine))
        for r, d, v, k, mine in zip(requests, delta, posed.values, posed.keys, losses, strict=True)
    ]
    return [_trouble(one) or one for one in found]


def _descend(
    problem: Problem, done: Done, shelf: Shelf | None, *, split_products: bool = True
) -> tuple[Float[Tensor, "fact width"], list[list[float]]]:
    """Adam on every δ; a fact that is done keeps its δ and, when that pays, leaves the batch."""
    steps = problem.search.looks
    corrections = problem.size.new_tensor(
        [[1 - 0.9**step, 1 - 0.999**step] for step in range(1, steps + 1)]
    )
    descent = _Descent(problem)
    with ExitStack() as stack:
        look = None if shelf is None else shelf.take(problem)
        if look is None:
            stack.enter_context(
                quick_blocks(problem.lm.blocks[problem.layer :], split_products=split_products)
                if shelf is None
                else shelf.quick_above(problem)()
            )
            if problem.apart:
                stack.enter_context(short_attention(problem.hidden.device))
            look = _looking(problem, None if shelf is None else shelf.memory)
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            last = step == steps
            if last and len(descent.batch) >= MANY:
                seen, moved = _only_losses(descent.problem, descent.state)
            else:
                seen, moved = look(descent.state, corrections[step - 1])
            descent.see(seen)
            done(1 / steps)
            if last or descent.idle == 1:
                done(1 - step / steps)
                break
            descent.move(moved)
            spared = (time.perf_counter() - begin) * descent.idle * (steps - step)
            if descent.idle and spared > look.cost:
                descent.leave()
                look = _looking(descent.problem)
        if shelf is not None and look.graph is not None:
            shelf.add(problem, look)
        elif shelf is not None and look.failed:
            shelf.leave_memory()
    return descent.found(), descent.losses


class _Descent:
    """The facts' δ on their way; one that is done stays where it is."""

    def __init__(self, problem: Problem) -> None:
        facts, width = len(problem.size), problem.hidden.shape[-1]
        self.whole = self.problem = problem
        """All the facts, and those in the batch."""
        self.batch = list(range(facts))
        self.going = [True for _ in self.batch]
        """Which facts of the batch still move."""
        self.state = problem.size.new_zeros(3, facts, width)
        """Adam's: δ of the batch, and the two means of its slopes."""
        self.losses: list[list[float]] = [[] for _ in self.batch]
        self.left = problem.size.new_zeros(facts, width)
        """δ of the facts that left the batch."""

    def see(self, losses: Float[Tensor, " fact"]) -> None:
        """Note the losses at δ; a fact whose loss is low enough, or no number, is done."""
        for place, loss in enumerate(losses.tolist()):
            if self.going[place]:
                self.losses[self.batch[place]].append(loss)
                self.going[place] = loss >= self.whole.search.stop and _is_finite(loss)

    @property
    def idle(self) -> float:
        """The share of the batch that is done."""
        return 1 - sum(self.going) / len(self.going)

    def move(self, state: Float[Tensor, "3 fact width"]) -> None:
        """Go on to the given state, which the next look may overwrite."""
        if all(self.going):
            self.state.copy_(state)
        else:
            going = torch.tensor(self.going, device=state.device)[:, None]
            self.state = torch.where(going, state, self.state)

    def leave(self) -> None:
        """Take those that are done out of the batch."""
        self.left[self.batch] = self.state[0]
        places = [place for place, goes in enumerate(self.going) if goes]
        self.batch = [self.batch[place] for place in places]
        self.going = [True for _ in places]
        self.state = self.state[:, places]
        self.problem = self.whole.only(torch.tensor(self.batch, device=self.state.device))

    def found(self) -> Float[Tensor, "fact width"]:
        """δ of every fact."""
        self.left[self.batch] = self.state[0]
        return self.left


def _looking(problem: Problem, memory: Any = None) -> Recorded:
    """The losses at δ, and where Adam goes from there; a recording computes in the memory.

    Adam's state is δ and the two means of its slopes. Those start at 0, which makes them too small
    at first, by the two factors of the correction.
    """
    problem.prepare()
    block = sum(weight.numel() for weight in problem.lm.blocks[-1].parameters())
    slots = problem.view.position.numel()

    def look(state: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        delta = state[0].detach().requires_grad_()
        with torch.enable_grad():
            losses = problem.losses(delta)
            slope = torch.autograd.grad(SCALE * losses.sum(), delta)[0]
        return losses.detach(), _moved(problem, state, slope / SCALE, correction)

    return Recorded(look, pays=slots * block < HEAVY, pool=memory)


def _moved(
    problem: Problem, state: Float[Tensor, "3 fact width"], slope: Float[Tensor, "fact width"],
    correction: Float[Tensor, " 2"],
) -> Float[Tensor, "3 fact width"]:  # fmt: skip
    """Adam's next step, each δ kept no longer than its bound."""
    search = problem.search
    delta, first, second = state
    first = 0.9 * first + 0.1 * slope
    second = 0.999 * second + 0.001 * slope**2
    mean, spread = first / correction[0], second / correction[1]
    moved = delta - search.rate * mean / (spread.sqrt() + 1e-8)
    longest = search.longest * problem.size[:, None]
    norm = moved.norm(dim=-1, keepdim=True)
    return torch.stack([torch.where(norm > longest, moved * longest / norm, moved), first, second])


def _only_losses(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """The losses at δ, for the last look, after which nothing moves."""
    with torch.no_grad():
        return problem.losses(state[0]), state


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
