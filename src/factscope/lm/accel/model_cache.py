"""Per-model cache of fast layers and captured steps.

Facts are often edited one after another, each on the model that the last one changed. Their value
searches run the same operations on other numbers, so the graph captured for one fact serves the
next, as long as the layers above the edited one are unchanged. A few shapes are enough for most
facts (see `LengthBuckets`). A graph reads the copies of the weights that its fast layers made, so
these are cached with it; passes before and after the search use them too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factscope.lm.accel.device import on_gpu, total_memory
from factscope.lm.accel.graphs import CudaGraph, weights_in
from factscope.lm.accel.linear import Forwards, fast_forwards

if TYPE_CHECKING:
    from factscope.lm.model import LM

KEY = "fast layers and captured steps"
"""Key of this cache in `LM.cache`."""
MAX_FRACTION = 1 / 16
"""Nothing is cached for a model whose blocks and head take more than this fraction of the GPU's
memory: fast layers are copies of its weights."""
MAX_GRAPHS = 16
"""Captured steps per model; the least recently used one is dropped."""


@dataclass(eq=False)
class ModelCache:
    """Fast layers of a model's blocks, and captured steps of its value searches."""

    states: list[tuple[Any, ...]]
    """What identifies the weights that the cache was built from (see `_weight_states`)."""
    pool: Any = None
    """Memory pool shared by the graphs; only one is replayed at a time."""
    forwards: dict[int, Forwards] = field(default_factory=dict)
    """Fast layers by block; the head's come after the last block's."""
    version: int = 0
    """Grows when fast layers are added or dropped."""
    graphs: dict[Any, tuple[int, list[Tensor], CudaGraph]] = field(default_factory=dict)
    """By the step's key: the lowest block it runs, its static tensors, its graph."""

    @classmethod
    def of(cls, lm: "LM", pool: Any = None) -> "ModelCache":
        """An empty cache."""
        return cls(_weight_states(lm), pool)

    def refresh(self, lm: "LM") -> None:
        """Drop fast layers and graphs that were built from changed weights."""
        now = _weight_states(lm)
        changed = [i for i, (a, b) in enumerate(zip(self.states, now, strict=True)) if a != b]
        self.states = now
        for i in changed:
            self.version += self.forwards.pop(i, None) is not None
        highest = max(changed, default=-1)
        self.graphs = {key: entry for key, entry in self.graphs.items() if entry[0] > highest}

    def build(self, lm: "LM", blocks: Iterable[int]) -> Forwards:
        """The fast layers of these blocks (n_layers stands for the head), built if missing."""
        forwards: Forwards = {}
        for i in blocks:
            if i not in self.forwards:
                head = i == lm.n_layers
                part = lm.model.get_output_embeddings() if head else lm.blocks[i]
                self.forwards[i] = fast_forwards(part)
                self.version += 1
            forwards |= self.forwards[i]
        return forwards

    def find(self, key: Any, tensors: list[Tensor]) -> CudaGraph | None:
        """A captured step with this key, its static tensors overwritten by the given ones."""
        if key not in self.graphs:
            return None
        _, static, graph = self.graphs[key] = self.graphs.pop(key)  # now the most recent
        for old, new in zip(static, tensors, strict=True):
            old.copy_(new)
        return graph

    def add(self, key: Any, lowest_block: int, tensors: list[Tensor], graph: CudaGraph) -> None:
        """Cache a captured step."""
        while len(self.graphs) >= MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        self.graphs[key] = (lowest_block, tensors, graph)


def model_cache(lm: "LM", *, refresh: bool = True) -> ModelCache | None:
    """The model's cache; None on a CPU and for models too large for copies.

    `refresh` drops entries of changed weights; pass False only right after another refresh.
    """
    if not on_gpu(lm):
        return None
    cache: ModelCache | None = lm.cache.get(KEY)
    if cache is not None and refresh:
        cache.refresh(lm)
    elif cache is None and _is_small(lm):
        cache = lm.cache[KEY] = ModelCache.of(lm, torch.cuda.graph_pool_handle())
    return cache


def _is_small(lm: "LM") -> bool:
    head = lm.model.get_output_embeddings()
    weights = [weight for part in (*lm.blocks, head) for weight in part.parameters()]
    if any(weight.device != lm.device for weight in weights):
        return False
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return size <= MAX_FRACTION * total_memory(lm.device)


def _weight_states(lm: "LM") -> list[tuple[Any, ...]]:
    """What identifies the values of each block's weights, then of the final norm and the head.

    Address, in-place version and norm of each weight, and the matmul precision. The version counts
    changes that autograd sees, the norm shows those made through `.data`.
    """
    heads = [*lm.norms, lm.model.get_output_embeddings()]
    parts = [list(weights_in(block)) for block in lm.blocks]
    parts.append([weight for module in heads for weight in weights_in(module)])
    flat: list[Tensor] = [weight for part in parts for weight in part]
    with torch.no_grad():
        norm_tensors = torch._foreach_norm(flat, dtype=torch.float32)  # pyright: ignore
    norms = iter(torch.stack(norm_tensors).tolist())
    precision = torch.get_float32_matmul_precision()
    return [
        (precision, *((weight.data_ptr(), weight._version, next(norms)) for weight in part))
        for part in parts
    ]
