"""CUDA graphs: computations that are captured once and replayed.

A pass over a few rows is launch-bound: launching its hundreds of small operations one by one takes
longer than computing them. A captured graph launches them all at once. `captured` captures passes
through a model that are repeated, such as the one over the text that every edit is checked with.
`LengthBuckets` rounds lengths up, so that few shapes occur.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from factscope.lm.accel.device import on_gpu, total_memory
from factscope.lm.hooks import has_hooks

if TYPE_CHECKING:
    from factscope.lm.model import LM

T = TypeVar("T")

log = logging.getLogger(__name__)

CACHE = "captured passes"
"""Key of the captured passes in `LM.cache`."""
MAX_PASSES = 8
"""Captured passes per model; the least recently used one is dropped."""
MAX_MEMORY = 1 / 64
"""A pass is captured only if its results take at most this fraction of the GPU's memory."""
TOLERANCE = 1e-3
"""Largest difference between a replay and the eager pass, relative to the largest entry."""


class CudaGraph(Generic[T]):
    """A function of tensors: the first call captures it, every call replays it.

    The function must run the same operations whatever the numbers are. A replay overwrites the
    results of the previous one. On a CPU, where capture does not pay or where it fails, every call
    runs the function.
    """

    def __init__(
        self, function: Callable[..., T], *, pays: bool = True, pool: tuple[int, int] | None = None
    ) -> None:
        """`pays` is False where capture would not save time. `pool` is graph memory, shared with
        other graphs that are never replayed concurrently."""
        self.function = function
        self.pool = pool
        self.tried = not pays
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False
        self.capture_seconds = 0.0

    def __call__(self, *inputs: Tensor) -> T:
        """The function's results."""
        if inputs[0].is_cuda and not self.tried:
            self._capture(inputs)
        if self.graph is None:
            return self.function(*inputs)
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        self.graph.replay()
        return self.results

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.tried = True
        start = time.perf_counter()
        self.inputs = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            self.results = _capture(graph, self.pool, lambda: self.function(*self.inputs))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.failed = True
            log.info("graph capture failed: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return
        self.graph = graph
        self.capture_seconds = time.perf_counter() - start


def _capture(graph: Any, pool: Any, function: Callable[[], T]) -> T:
    """Run the function into the graph.

    `torch.cuda.graph` would also empty the memory cache, which takes longer than a short capture.
    """
    torch.cuda.synchronize()
    with _no_garbage_collection(), torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        try:
            return function()
        finally:
            graph.capture_end()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during capture.

    It could free another graph (of a model that is gone), which invalidates the capture and leaves
    torch's allocator in a broken state.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- passes that are repeated


def captured(lm: "LM", key: Any, function: Callable[..., T], *inputs: Tensor) -> T:
    """function(*inputs), a pass through the model without gradients.

    On a GPU the second call with the same key and shapes captures the pass and later calls replay
    it. Whatever differs between calls must be among the inputs or in the key. The results are
    overwritten by the next call. A graph reads the weights where they are: edits applied in place
    are seen.
    """
    addresses = _addresses(lm.model) if can_capture(lm) else None
    if addresses is None:
        return function(*inputs)
    passes: dict[Any, _Pass] = lm.cache.setdefault(CACHE, {})
    shapes = tuple((x.shape, x.dtype) for x in inputs)
    full_key = (key, shapes, torch.get_float32_matmul_precision(), addresses)
    entry = passes[full_key] = passes.pop(full_key, None) or _Pass()  # now the most recent
    while len(passes) > MAX_PASSES:
        del passes[next(iter(passes))]
    return entry(function, inputs)


@dataclass
class _Pass:
    """A pass of one key and shape, and how often it was called."""

    calls: int = 0
    graph: CudaGraph[Any] | None = None

    def __call__(self, function: Callable[..., T], inputs: tuple[Tensor, ...]) -> T:
        self.calls += 1
        if self.graph is not None:
            return self.graph(*inputs)
        result = function(*inputs)
        if self.calls == 2 and _size(result) <= MAX_MEMORY * total_memory(inputs[0].device):
            structure = _structure(result)
            graph = CudaGraph(lambda *inputs: _matching(structure, function(*inputs)))
            replayed = graph(*inputs)
            if graph.graph is not None and _agree(result, replayed):
                self.graph = graph
        return result


def copied(result: T) -> T:
    """A copy of a result, which the next call does not overwrite."""
    unique = {id(x): x for x in tensors_in(result)}
    copies = {number: torch.empty_like(x) for number, x in unique.items()}
    if unique:  # one kernel for many small tensors
        torch._foreach_copy_(list(copies.values()), list(unique.values()))  # pyright: ignore
    return _mapped(result, copies)


def _mapped(result: Any, copies: dict[int, Tensor]) -> Any:
    """A nested result with every tensor replaced by its copy."""
    if isinstance(result, Tensor):
        return copies[id(result)]
    if is_dataclass(result) and not isinstance(result, type):
        return replace(result, **_mapped(vars(result), copies))
    if isinstance(result, dict):
        return {name: _mapped(part, copies) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(_mapped(part, copies) for part in result)
    return result


def can_capture(lm: "LM") -> bool:
    """Whether passes of this model can be captured: all of it is on one GPU."""
    devices = getattr(lm.model, "hf_device_map", None) or {}
    return on_gpu(lm) and len(set(map(str, devices.values()))) <= 1


def _addresses(model: nn.Module) -> tuple[int, ...] | None:
    """Where the weights are in memory; None if there are hooks, which a graph would not run."""
    addresses: list[int] = []
    for module in modules_in(model):
        if has_hooks([module]):
            return None
        addresses += [x.data_ptr() for x in module._parameters.values() if x is not None]
    return tuple(addresses)


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all below it, shared ones repeated; faster than `modules()`."""
    pending = [module]
    while pending:
        current = pending.pop()
        yield current
        pending += [child for child in current._modules.values() if child is not None]


def weights_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of the module and of all below it; shared ones repeat."""
    for owner in modules_in(module):
        yield from (weight for weight in owner._parameters.values() if weight is not None)


def _structure(result: Any) -> Any:
    """The nested structure of a result, with True for every value that is not None."""
    if is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, dict):
        return {name: _structure(part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        return [_structure(part) for part in result]
    return None if result is None else True


def _matching(structure: Any, result: Any) -> Any:
    """A result without the parts that the eager result does not have.

    During capture, transformers builds causal masks that it otherwise leaves out.
    """
    if structure is None or structure is True:
        return structure and result
    if isinstance(result, dict):
        return {name: _matching(structure.get(name), part) for name, part in result.items()}
    if isinstance(result, list | tuple):
        structures = [*structure, *[True] * len(result)]  # `_agree` rejects extra parts
        return type(result)(map(_matching, structures, result))
    return replace(result, **_matching(structure, vars(result)))


def _agree(result: Any, replayed: Any) -> bool:
    """Whether the captured graph reproduces the eager result."""
    expected, actual = list(tensors_in(result)), list(tensors_in(replayed))
    same_shapes = [(x.shape, x.dtype) for x in expected] == [(x.shape, x.dtype) for x in actual]
    agree = same_shapes and all(map(_close, expected, actual))
    if not agree:
        log.warning("a captured pass differs from the eager one; it is not used")
    return agree


def _close(x: Tensor, y: Tensor) -> bool:
    if not x.numel():
        return True
    if not x.is_floating_point():
        return torch.equal(x, y)
    gap = torch.where(x == y, 0.0, (x - y).abs())  # a mask's infinities are equal
    return bool(gap.max() <= TOLERANCE * x.abs().max())


def _size(result: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(result))


def tensors_in(result: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dictionaries and dataclasses."""
    if isinstance(result, Tensor):
        yield result
    elif is_dataclass(result) or isinstance(result, dict):
        for part in (result if isinstance(result, dict) else vars(result)).values():
            yield from tensors_in(part)
    elif isinstance(result, list | tuple):
        for part in result:
            yield from tensors_in(part)


# ---- length buckets


@dataclass(frozen=True)
class LengthBuckets:
    """The number that each length is rounded up to a multiple of; 1 adds no padding.

    A captured graph serves every fact of its shape. With some padding at the end of each axis a few
    shapes cover most facts; padding is masked or has weight 0.
    """

    slots: int = 1
    """Tokens from the edited one on: all of them are computed at every step."""
    past: int = 1
    """Tokens before it, which are only attended to."""
    tokens: int = 1
    """Tokens of a row, all of which are computed once."""
    labels: int = 1
    """Target tokens of one row."""
    targets: int = 1
    """Target tokens of all rows; their number grows with the target's length, so this doubles."""

    @classmethod
    def of(cls, lm: "LM", facts: int) -> "LengthBuckets":
        """Padding for a single fact on a GPU, where graphs are captured; otherwise none."""
        single = facts == 1 and on_gpu(lm)
        return cls(slots=4, past=16, tokens=8, labels=4, targets=32) if single else cls()

    def for_slots(self, count: int) -> int:
        """The padded number of slots."""
        return _round_up(count, self.slots)

    def for_past(self, count: int, limit: int | None) -> int:
        """The padded length of the past, at most the model's context."""
        return _round_up(count, self.past, limit)

    def for_tokens(self, count: int, limit: int | None) -> int:
        """The padded length of a row, at most the model's context."""
        return _round_up(count, self.tokens, limit)

    def for_labels(self, count: int) -> int:
        """The padded number of target tokens of one row."""
        return _round_up(count, self.labels)

    def for_targets(self, count: int) -> int:
        """The padded number of target tokens: a power of two times `targets`."""
        if self.targets == 1:
            return count
        return self.targets * 2 ** math.ceil(math.log2(max(1.0, count / self.targets)))


def _round_up(count: int, multiple: int, limit: int | None = None) -> int:
    """The next multiple, but not beyond the limit."""
    rounded = math.ceil(count / multiple) * multiple
    return rounded if limit is None else max(count, min(rounded, limit))
