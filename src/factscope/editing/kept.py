"""A search's recording, kept for the next fact of the same shape.

Facts are often written one after another, each on the model that the last one changed. Their
searches do the same operations on other numbers: the recording of one (see `lm.recorded`) serves
the next, as long as the layers above the edited one are what they were.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factscope.editing.problem import Problem
from factscope.lm.recorded import Recorded

__all__ = ["Kept", "keep", "kept_for"]

SHARE = 1 / 16
"""Of a GPU's memory, the most that the layers above may take for a recording to be kept: it holds
copies of their weights."""
NAME = "recorded search"
"""Where a model keeps it."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A recording, and the problem whose tensors it reads."""

    problem: Problem
    look: Recorded
    weights: "_Seen"
    """The weights that it multiplies with."""
    products: list[Any]
    """The quick products that it was made of (`lm.quick`): their factors must not go before it."""

    @classmethod
    def of(cls, problem: Problem, look: Recorded) -> "Kept":
        """A recording that was just made, with the quick products still in place."""
        products = [vars(module).get("forward") for module in _above(problem)]
        return cls(problem, look, _Seen.of(problem), products)

    def takes(self, problem: Problem) -> bool:
        """Put another problem's numbers in the place of the old ones, if the recording fits it."""
        if _form(self.problem) != _form(problem) or not self.weights.equal(_Seen.of(problem)):
            return False
        for old, new in zip(_tensors(self.problem), _tensors(problem), strict=True):
            old.copy_(new)
        return True


@dataclass(frozen=True, eq=False)
class _Seen:
    """Weights as they were: where, how often changed in place, and how large."""

    places: list[tuple[int, int]]
    norms: Tensor

    @classmethod
    def of(cls, problem: Problem) -> "_Seen":
        weights = _weights(problem)
        norms = torch._foreach_norm(weights, dtype=torch.float32)  # pyright: ignore
        return cls([(w.data_ptr(), w._version) for w in weights], torch.stack(norms))

    def equal(self, other: "_Seen") -> bool:
        return self.places == other.places and torch.equal(self.norms, other.norms)


def kept_for(problem: Problem) -> Recorded | None:
    """A kept recording that now looks at this problem; None if there is no fitting one."""
    kept: Kept | None = problem.lm.kept.get(NAME)
    if kept is None or len(problem.size) != 1 or any(_hooks(problem)):
        return None
    return kept.look if kept.takes(problem) else None


def keep(problem: Problem, look: Recorded) -> None:
    """Keep the recording of a single fact's search, where it is small."""
    kept: Kept | None = problem.lm.kept.get(NAME)
    if kept is not None and kept.look is look:
        return
    if look.graph is None or len(problem.size) != 1 or any(_hooks(problem)):
        return
    total = torch.cuda.get_device_properties(problem.hidden.device).total_memory
    if sum(w.numel() * w.element_size() for w in _weights(problem)) <= SHARE * total:
        problem.lm.kept[NAME] = Kept.of(problem, look)


def _form(problem: Problem) -> tuple[Any, ...]:
    """What two problems must share for one recording to serve both."""
    return (
        problem.layer, problem.site, problem.apart, astuple(problem.search), problem.view.past,
        torch.get_float32_matmul_precision(), tuple(problem.run.inputs.shape),
        [(x.shape, x.dtype, x.device) for x in _tensors(problem)],
    )  # fmt: skip


def _tensors(problem: Problem) -> list[Tensor]:
    """Every tensor that a look reads and that another fact has other numbers in."""
    problem.prepare()
    own = [x for x in vars(problem).values() if isinstance(x, Tensor)]
    above = slice(problem.layer, None)
    view = problem.view
    return [
        *own, view.row, view.position, view.start, *problem.replay.masks,
        *problem.run.keys[above], *problem.run.values[above],
    ]  # fmt: skip


def _above(problem: Problem) -> Iterator[nn.Module]:
    """The modules that a look runs."""
    first = problem.layer + (problem.site == "state")
    for block in problem.lm.blocks[first:]:
        yield from block.modules()
    for norm in problem.lm.norms:
        yield from norm.modules()
    yield from problem.lm.model.get_output_embeddings().modules()


def _weights(problem: Problem) -> list[Tensor]:
    return [w.detach() for m in _above(problem) for w in m.parameters(recurse=False)]


def _hooks(problem: Problem) -> Iterator[Any]:
    """What else is called in the layers above, which a recording would not know of."""
    for module in _above(problem):
        yield from module._forward_hooks.values()
        yield from module._forward_pre_hooks.values()
