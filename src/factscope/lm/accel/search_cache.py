"""What the search of one fact leaves on a model for the next: quick products, and recordings.

Facts are often written one after another, each on the model that the last one changed. Their
searches do the same operations on other numbers: the recording of one (see `lm.recorded`) serves
the next, as long as the layers above the edited one are what they were. A few shapes are enough
for most facts (`editing.room`). The quick products (`lm.quick`) that a recording is made of must
not go before it; they also make the run before the next search faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factscope.lm.accel.graphs import CudaGraph
from factscope.lm.accel.linear import Products, Quickly, all_replaced, products_of, splits
from factscope.lm.hooks import has_hooks
from factscope.lm.model import weights_of

if TYPE_CHECKING:
    from factscope.editing.value_search import ValueObjective
    from factscope.lm.model import LM

__all__ = ["Shelf", "quick_where_kept", "shelf_for"]

SHARE = 1 / 16
"""Of a GPU's memory, the most that a model's blocks and head may take for anything to be kept:
products are copies of their weights."""
MOST = 16
"""So many recordings are kept; the one unused longest gives way."""
NAME = "recorded searches"
"""Where a model keeps its shelf."""


@dataclass(eq=False)
class Shelf:
    """What is kept of a model's blocks."""

    seen: list[_Seen]
    """The weights that everything here was made of: of each block, and of what follows them."""
    memory: Any = None
    """The pool that recordings compute in: only one is ever played at a time."""
    products: dict[int, Products] = field(default_factory=dict)
    """The quick products of a block; after the last one's, those of the head."""
    version: int = 0
    """Grows whenever products come or go."""
    recordings: dict[Any, tuple[ValueObjective, CudaGraph]] = field(default_factory=dict)
    """By the shape of the problem."""

    @classmethod
    def of(cls, lm: LM, memory: Any = None) -> Shelf:
        """An empty one."""
        return cls(_seen(lm), memory)

    def refresh(self, lm: LM) -> None:
        """Throw away what was made of other weights than the model's now."""
        now = _seen(lm)
        changed = [i for i, (old, new) in enumerate(zip(self.seen, now, strict=True)) if old != new]
        self.seen = now
        for i in changed:
            self.version += self.products.pop(i, None) is not None
        last = max(changed, default=-1)
        self.recordings = {
            form: kept for form, kept in self.recordings.items() if kept[0].first_block > last
        }

    def quick(self, lm: LM, blocks: Iterable[int]) -> Quickly:
        """Those blocks made quick, by the products that are kept, or that are kept from now on.

        The number after the last block's stands for the head.
        """
        blocks = list(blocks)
        for i in blocks:
            if i not in self.products:
                head = i == lm.n_layers
                part = lm.model.get_output_embeddings() if head else lm.blocks[i]
                self.products[i] = products_of(part)
                self.version += 1
        chosen = {m: forward for i in blocks for m, forward in self.products[i].items()}
        return Quickly(partial(all_replaced, chosen), self.version)

    def quick_above(self, problem: ValueObjective) -> Quickly:
        """What makes looks at a problem faster."""
        lm = problem.lm
        return self.quick(lm, range(problem.layer, lm.n_layers + splits(lm.dtype)))

    def quick_run(self, lm: LM, layer: int) -> Quickly | None:
        """What makes one run faster; None where a GPU is told such products more slowly than it
        would compute the usual ones. At first these are only the blocks that the search wants."""
        if not splits(lm.dtype):
            return None
        return self.quick(lm, range(0 if self.products else layer, lm.n_layers))

    def take(self, problem: ValueObjective) -> CudaGraph | None:
        """A recording of this shape, with the problem's numbers put in place of the old ones."""
        form = _form(problem)
        if form not in self.recordings or has_hooks(problem.modules):
            return None
        old, look = self.recordings[form] = self.recordings.pop(form)  # now the newest
        for place, new in zip(_tensors(old), _tensors(problem), strict=True):
            place.copy_(new)
        return look

    def add(self, problem: ValueObjective, look: CudaGraph) -> None:
        """Keep the recording of a problem's search."""
        if has_hooks(problem.modules) or any(look is one for _, one in self.recordings.values()):
            return
        while len(self.recordings) >= MOST:
            del self.recordings[next(iter(self.recordings))]
        self.recordings[_form(problem)] = (problem, look)

    def leave_memory(self) -> None:
        """Record in another pool from now on: torch accepts none in which a recording failed."""
        self.memory = torch.cuda.graph_pool_handle()


def shelf_for(lm: LM) -> Shelf | None:
    """The model's shelf, with nothing on it that is out of date; None where nothing is kept."""
    if lm.device.type != "cuda":
        return None
    shelf: Shelf | None = lm.cache.get(NAME)
    if shelf is not None:
        shelf.refresh(lm)
    elif _may_keep(lm):
        shelf = lm.cache[NAME] = Shelf.of(lm, torch.cuda.graph_pool_handle())
    return shelf


def quick_where_kept(lm: LM) -> Quickly | None:
    """Blocks whose products are kept made quick, where that makes a single run faster."""
    shelf = shelf_for(lm) if NAME in lm.cache and splits(lm.dtype) else None
    return None if shelf is None else shelf.quick(lm, list(shelf.products))


def _may_keep(lm: LM) -> bool:
    head = lm.model.get_output_embeddings()
    weights = [weight for part in (*lm.blocks, head) for weight in part.parameters()]
    if any(weight.device != lm.device for weight in weights):
        return False
    total = torch.cuda.get_device_properties(lm.device).total_memory
    return sum(weight.numel() * weight.element_size() for weight in weights) <= SHARE * total


@dataclass(frozen=True)
class _Seen:
    """Weights as they were: where, how often changed in place, how large, how multiplied."""

    places: tuple[tuple[int, int], ...]
    norms: tuple[float, ...]
    precision: str


def _seen(lm: LM) -> list[_Seen]:
    """The weights of each block, and of what follows the blocks."""
    heads = [*lm.norms, lm.model.get_output_embeddings()]
    parts = [list(weights_of(block)) for block in lm.blocks]
    parts.append([weight for module in heads for weight in weights_of(module)])
    flat: list[Tensor] = [weight for part in parts for weight in part]
    with torch.no_grad():
        found = torch._foreach_norm(flat, dtype=torch.float32)  # pyright: ignore
    norms = iter(torch.stack(found).tolist())
    precision = torch.get_float32_matmul_precision()
    return [
        _Seen(
            tuple((weight.data_ptr(), weight._version) for weight in part),
            tuple(next(norms) for _ in part),
            precision,
        )
        for part in parts
    ]


def _form(problem: ValueObjective) -> tuple[Any, ...]:
    """What two problems must share for one recording to serve both."""
    return (
        problem.layer, problem.site, problem.apart, astuple(problem.search), problem.view.past,
        tuple((x.shape, x.dtype, x.device) for x in _tensors(problem)),
    )  # fmt: skip


def _tensors(problem: ValueObjective) -> list[Tensor]:
    """Every tensor that a look reads and that another fact has other numbers in."""
    problem.prepare()
    own = [x for x in vars(problem).values() if isinstance(x, Tensor)]
    above, past = slice(problem.layer, None), problem.view.past
    keys = [x[:, :, :past] for x in (*problem.run.keys[above], *problem.run.values[above])]
    return [*own, *problem.replay.made, *keys]
