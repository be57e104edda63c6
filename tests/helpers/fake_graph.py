"""Stands in for a CUDA graph on a CPU: replays the function on the tensors it was captured with."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from factscope.lm.accel import graphs, search
from factscope.lm.accel.graphs import CudaGraph, LengthBuckets


class FakeGraph(CudaGraph):
    """The first call captures: it copies the inputs and runs the function on the copies. Later
    calls overwrite the copies and, like a replay, the results."""

    captures = 0
    replays = 0

    def __init__(self, function: Callable[..., Any], **_: Any) -> None:
        super().__init__(function)
        self.graph: Any = "captured"
        self.inputs: list[Tensor] = []

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.inputs:
            self.inputs = [x.clone() for x in inputs]
            self.results = self.function(*self.inputs)
            type(self).captures += 1
            return self.results
        type(self).replays += 1
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        again = graphs.tensors_in(self.function(*self.inputs))
        for static, x in zip(graphs.tensors_in(self.results), again, strict=True):
            static.untyped_storage().copy_(x.untyped_storage())  # also of an expanded tensor
        return self.results


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Capture passes and pad lengths as on a GPU."""
    monkeypatch.setattr(graphs, "can_capture", lambda lm: True)
    monkeypatch.setattr(graphs, "CudaGraph", FakeGraph)
    monkeypatch.setattr(graphs, "total_memory", lambda device: 1 << 40)
    monkeypatch.setattr(search, "CudaGraph", FakeGraph)
    padded = LengthBuckets(slots=4, past=16, tokens=8, labels=4, targets=32)
    monkeypatch.setattr(
        LengthBuckets, "of", lambda lm, facts: padded if facts == 1 else LengthBuckets()
    )
    FakeGraph.captures = FakeGraph.replays = 0
    return FakeGraph
