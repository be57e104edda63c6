"""What a recording on a GPU needs, as far as it can be seen without one."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from factscope.lm.accel.graphs import _captured


class Graph:
    """In the place of a CUDA graph: notes that it was begun and ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, pool: Any) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")


class Ring:
    """Refers to itself, so that only the garbage collector finds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def test_nothing_is_collected_while_recording() -> None:
    """A recording that is thrown away meanwhile would spoil the one that is made."""
    graph = Graph()
    ring = weakref.ref(Ring())

    def function() -> bool:
        kept = [[] for _ in range(100_000)]  # enough for Python to collect
        return ring() is not None and len(kept) > 0

    assert _captured(graph, None, function)
    assert graph.calls == ["begin", "end"]
    assert gc.isenabled()
    gc.collect()
    assert ring() is None


def test_after_an_error_python_collects_again() -> None:
    graph = Graph()

    def function() -> None:
        raise RuntimeError("not while recording")

    with pytest.raises(RuntimeError, match="not while"):
        _captured(graph, None, function)
    assert graph.calls == ["begin", "end"]
    assert gc.isenabled()
    gc.disable()
    try:
        _captured(graph, None, lambda: None)
        assert not gc.isenabled()  # nor is it switched on where it was off
    finally:
        gc.enable()
