"""A computation on a GPU recorded once and played again.

A search makes the same few hundred small operations at every step, and launching them one by one
takes longer than computing them. A CUDA graph launches them all at once.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

__all__ = ["Recorded"]

T = TypeVar("T")

log = logging.getLogger(__name__)


class Recorded(Generic[T]):
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
