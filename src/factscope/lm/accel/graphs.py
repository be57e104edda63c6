"""A computation on a GPU recorded once and played again.

A search makes the same few hundred small operations at every step, and launching them one by one
takes longer than computing them. A CUDA graph launches them all at once.

Passes through a model that are played from a recording.

One pass over a few rows takes a GPU longer to be told than to compute. A pass that comes again and
again, such as the one over a plain text that every edit is measured by, is recorded when it comes
for the second time (`lm.recorded`). What the recording says must be what the pass itself says, or
it is not used. A recording reads the weights where they lie: edits written into them are seen.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from factscope.lm.hooks import has_hooks
from factscope.lm.model import modules_of

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "CudaGraph",
    "played",
    "plays",
]

T = TypeVar("T")

log = logging.getLogger(__name__)


class CudaGraph(Generic[T]):
    """A function of tensors: the first call records it, every call plays it.

    The function must do the same operations on tensors of the same shape whatever the numbers
    are. What a played call returns is overwritten by the next. On a CPU, where recording does not
    pay and where it fails, every call runs it.
    """

    def __init__(
        self,
        function: Callable[..., T],
        *,
        pays: bool = True,
        pool: tuple[int, int] | None = None,
    ) -> None:
        """`pool` is the memory that the recording may use, shared with others never played at the
        same time (`torch.cuda.graph_pool_handle`)."""
        self.function = function
        self.pool = pool
        self.tried = not pays
        self.cost = 0.0
        """Seconds that recording took."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.failed = False
        """Whether it could not be recorded."""

    def __call__(self, *given: Tensor) -> T:
        """The function's results."""
        if given[0].is_cuda and not self.tried:
            self._record(given)
        if self.graph is None:
            return self.function(*given)
        for place, x in zip(self.given, given, strict=True):
            place.copy_(x)
        self.graph.replay()
        return self.results

    def _record(self, given: tuple[Tensor, ...]) -> None:
        self.tried = True
        begin = time.perf_counter()
        self.given = [x.clone() for x in given]
        graph = torch.cuda.CUDAGraph()
        try:
            self.results = _captured(graph, self.pool, lambda: self.function(*self.given))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.failed = True
            log.info("not recorded: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return
        self.graph = graph
        self.cost = time.perf_counter() - begin


def _captured(graph: Any, pool: Any, function: Callable[[], T]) -> T:
    """Run the function into the CUDA graph.

    `torch.cuda.graph` would also give back all memory that is not in use, which takes longer than
    a short recording, and longer still to ask for again.
    """
    torch.cuda.synchronize()
    with _nothing_collected(), torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        try:
            return function()
        finally:
            graph.capture_end()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside, Python leaves garbage where it is.

    In it may be a recording, of a model that is no longer there; to throw that away while another
    is made spoils the other, and torch's memory with it.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


NAME = "recorded passes"
"""Where a model keeps them."""
MOST = 8
"""So many are kept; the one unused longest gives way."""
SHARE = 1 / 64
"""Of a GPU's memory, the most that what a pass returns may take for it to be kept."""
TOLERANCE = 1e-3
"""By how much a recording may differ from the pass itself, in units of the largest number."""


def played(lm: "LM", name: Any, function: Callable[..., T], *given: Tensor) -> T:
    """function(*given), a pass through the model that leaves no gradients.

    Whatever changes from one call to another must be among the given tensors or in the name. What
    is returned is overwritten by the next pass of its kind.
    """
    places = _places(lm.model) if plays(lm) else None
    if places is None:
        return function(*given)
    passes: dict[Any, _Pass] = lm.cache.setdefault(NAME, {})
    shapes = tuple((x.shape, x.dtype) for x in given)
    key = (name, shapes, torch.get_float32_matmul_precision(), places)
    known = passes[key] = passes.pop(key, None) or _Pass()  # now the newest
    while len(passes) > MOST:
        del passes[next(iter(passes))]
    return known(function, given)


@dataclass
class _Pass:
    """A pass of one kind, and how often it came."""

    times: int = 0
    tape: CudaGraph[Any] | None = None

    def __call__(self, function: Callable[..., T], given: tuple[Tensor, ...]) -> T:
        self.times += 1
        if self.tape is not None:
            return self.tape(*given)
        result = function(*given)
        if self.times == 2 and _bytes(result) <= SHARE * _memory(given[0].device):
            form = _form(result)  # a model that is recorded makes masks that it can do without
            tape = CudaGraph(lambda *given: _like(form, function(*given)))
            again = tape(*given)
            if tape.graph is not None and _agree(result, again):
                self.tape = tape
        return result


def plays(lm: "LM") -> bool:
    """Whether passes of this model can be recorded: all of it on one GPU."""
    devices = getattr(lm.model, "hf_device_map", None) or {}
    return lm.device.type == "cuda" and len(set(map(str, devices.values()))) <= 1


def _places(model: nn.Module) -> tuple[int, ...] | None:
    """Where the weights lie; None where there are hooks, of which a recording would not know."""
    places: list[int] = []
    for module in modules_of(model):
        if has_hooks([module]):
            return None
        places += [x.data_ptr() for x in module._parameters.values() if x is not None]
    return tuple(places)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _form(found: Any) -> Any:
    """Of what a pass returned, which parts there are: None where there is nothing."""
    if is_dataclass(found) and not isinstance(found, type):
        found = vars(found)
    if isinstance(found, dict):
        return {name: _form(part) for name, part in found.items()}
    if isinstance(found, list | tuple):
        return [_form(part) for part in found]
    return None if found is None else True


def _like(form: Any, found: Any) -> Any:
    """What a pass returned, without the parts that are not there in another's form."""
    if form is None or form is True:
        return form and found
    if isinstance(found, dict):
        return {name: _like(form.get(name), part) for name, part in found.items()}
    if isinstance(found, list | tuple):
        forms = [*form, *[True] * len(found)]  # what is too much stays, and will be seen
        return type(found)(map(_like, forms, found))
    return replace(found, **_like(form, vars(found)))


def _agree(result: Any, again: Any) -> bool:
    """Whether a recording says what the pass said."""
    one, other = list(_tensors(result)), list(_tensors(again))
    alike = [(x.shape, x.dtype) for x in one] == [(x.shape, x.dtype) for x in other]
    right = alike and all(map(_near, one, other))
    if not right:
        log.warning("a recorded pass differs from the pass itself; it is not used")
    return right


def _near(x: Tensor, y: Tensor) -> bool:
    if not x.numel():
        return True
    if not x.is_floating_point():
        return torch.equal(x, y)
    gap = torch.where(x == y, 0.0, (x - y).abs())  # a mask's infinities are equal
    return bool(gap.max() <= TOLERANCE * x.abs().max())


def _bytes(result: Any) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(result))


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors in something made of tuples, lists, dictionaries and dataclasses."""
    if isinstance(found, Tensor):
        yield found
    elif is_dataclass(found) or isinstance(found, dict):
        for part in (found if isinstance(found, dict) else vars(found)).values():
            yield from _tensors(part)
    elif isinstance(found, list | tuple):
        for part in found:
            yield from _tensors(part)
