"""Recorded searches, kept for the next facts of the same shapes.

Facts are often written one after another, each on the model that the last one changed. Their
searches do the same operations on other numbers: the recording of one (see `lm.recorded`) serves
the next, as long as the layers above the edited one are what they were. A few shapes are enough
for most facts (`editing.room`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from factscope.editing.problem import Problem
from factscope.lm.quick import quick_blocks, replaced
from factscope.lm.recorded import Recorded

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Shelf", "keep", "kept_for", "memory_for", "quick_above", "shelf_of"]

SHARE = 1 / 16
"""Of a GPU's memory, the most that the layers above may take for a recording to be kept: it holds
copies of their weights."""
MOST = 8
"""So many recordings are kept; the one unused longest gives way."""
NAME = "recorded searches"
"""Where a model keeps them."""


@dataclass(frozen=True, eq=False)
class Shelf:
    """Recordings over the same layers of a model, by the shape of the problem."""

    modules: list[nn.Module]
    """What they run."""
    weights: "_Seen"
    """The weights that they multiply with."""
    products: dict[nn.Module, Callable[..., Any]]
    """The quick products that they are made of (`lm.quick`): their factors must not go before
    them, and serve for the next recording."""
    memory: Any
    """The pool that they compute in: only one is ever played at a time."""
    recordings: dict[Any, tuple[Problem, Recorded]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, look: Recorded) -> "Shelf":
        """With a recording that was just made, the quick products still in place."""
        modules = problem.modules
        products = {module: vars(module).get("forward") for module in modules}
        products = {module: forward for module, forward in products.items() if forward}
        shelf = cls(modules, _Seen.of(modules), products, look.pool)
        shelf.add(problem, look)
        return shelf

    def add(self, problem: Problem, look: Recorded) -> None:
        """One more recording."""
        while len(self.recordings) >= MOST:
            del self.recordings[next(iter(self.recordings))]
        self.recordings[_form(problem)] = (problem, look)

    def take(self, problem: Problem) -> Recorded | None:
        """A recording of this shape, with the problem's numbers put in place of the old ones."""
        form = _form(problem)
        if form not in self.recordings:
            return None
        old, look = self.recordings[form] = self.recordings.pop(form)  # now the newest
        for place, new in zip(_tensors(old), _tensors(problem), strict=True):
            place.copy_(new)
        return look

    @contextmanager
    def quick(self) -> Iterator[None]:
        """The layers made quick by the products that are kept."""
        with ExitStack() as stack:
            for module, forward in self.products.items():
                stack.enter_context(replaced(module, forward))
            yield


def shelf_of(lm: "LM") -> Shelf | None:
    """What a model keeps and may use now; what was made of other weights is thrown away."""
    shelf: Shelf | None = lm.kept.get(NAME)
    if shelf is None or _hooked(shelf.modules):
        return None
    if not shelf.weights.equal(_Seen.of(shelf.modules)):
        del lm.kept[NAME]
        return None
    return shelf


def kept_for(problem: Problem) -> Recorded | None:
    """A kept recording that now looks at this problem; None if there is no fitting one."""
    shelf = shelf_of(problem.lm) if _may_keep(problem) else None
    return None if shelf is None else shelf.take(problem)


def keep(problem: Problem, look: Recorded) -> None:
    """Keep the recording of a single fact's search, where it is small."""
    if look.graph is None or look.pool is None:
        return
    shelf = _shelf(problem)
    if shelf is None:
        total = torch.cuda.get_device_properties(problem.hidden.device).total_memory
        weights = _weights(problem.modules)
        if sum(w.numel() * w.element_size() for w in weights) <= SHARE * total:
            problem.lm.kept[NAME] = Shelf.of(problem, look)
    elif all(look is not known for _, known in shelf.recordings.values()):
        shelf.add(problem, look)


def memory_for(problem: Problem) -> Any:
    """The pool in which a recording of this problem computes if it may be kept; else None."""
    if not problem.hidden.is_cuda or not _may_keep(problem):
        return None
    shelf = _shelf(problem)
    return torch.cuda.graph_pool_handle() if shelf is None else shelf.memory


@contextmanager
def quick_above(problem: Problem, *, split_products: bool) -> Iterator[None]:
    """The layers above the edited one made quick, by the products that are kept if there are."""
    shelf = _shelf(problem) if split_products and _may_keep(problem) else None
    above = problem.lm.blocks[problem.layer :]
    with quick_blocks(above, split_products=split_products) if shelf is None else shelf.quick():
        yield


def _shelf(problem: Problem) -> Shelf | None:
    """What is kept of the same layers; what is kept of others goes."""
    shelf: Shelf | None = problem.lm.kept.get(NAME)
    if shelf is not None and shelf.modules != problem.modules:
        del problem.lm.kept[NAME]
        return None
    return shelf


def _may_keep(problem: Problem) -> bool:
    return len(problem.size) == 1 and not _hooked(problem.modules)


@dataclass(frozen=True, eq=False)
class _Seen:
    """Weights as they were: where, how often changed in place, how large, how multiplied."""

    places: list[tuple[int, int]]
    norms: Tensor
    precision: str

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "_Seen":
        weights = _weights(modules)
        norms = torch._foreach_norm(weights, dtype=torch.float32)  # pyright: ignore
        places = [(w.data_ptr(), w._version) for w in weights]
        return cls(places, torch.stack(norms), torch.get_float32_matmul_precision())

    def equal(self, other: "_Seen") -> bool:
        same = self.places == other.places and self.precision == other.precision
        return same and torch.equal(self.norms, other.norms)


def _form(problem: Problem) -> tuple[Any, ...]:
    """What two problems must share for one recording to serve both."""
    return (
        problem.layer, problem.site, problem.apart, astuple(problem.search), problem.view.past,
        tuple(problem.run.inputs.shape),
        tuple((x.shape, x.dtype, x.device) for x in _tensors(problem)),
    )  # fmt: skip


def _tensors(problem: Problem) -> list[Tensor]:
    """Every tensor that a look reads and that another fact has other numbers in."""
    problem.prepare()
    own = [x for x in vars(problem).values() if isinstance(x, Tensor)]
    above = slice(problem.layer, None)
    view = problem.view
    return [
        *own, view.row, view.position, view.key_position, view.start,
        *problem.replay.masks,
        *problem.run.keys[above], *problem.run.values[above],
    ]  # fmt: skip


def _weights(modules: Sequence[nn.Module]) -> list[Tensor]:
    return [w.detach() for m in modules for w in m._parameters.values() if w is not None]


def _hooked(modules: Sequence[nn.Module]) -> bool:
    """Whether something else is called in these modules, which a recording would not know of."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in modules)
