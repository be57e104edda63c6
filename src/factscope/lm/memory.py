"""Memory bounds: how much to compute at once, and what to do when memory runs out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from factscope.errors import BadSetting, OutOfMemory
from factscope.lm.accel.device import free_memory, on_gpu, release_memory
from factscope.lm.model import LM
from factscope.progress import NestedProgress, Progress

S = TypeVar("S")
T = TypeVar("T")

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Parse a size in bytes: "4GiB", "500M", "123456"."""
    short = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = short[-1:] if short[-1:] in UNITS else ""
    try:
        size = float(short.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        size = 0
    if not 1 <= size < math.inf:
        raise BadSetting(f"max_memory is {text!r}; write a size such as 4GiB")
    return int(size)


@dataclass(frozen=True)
class BatchSizes:
    """How much of a trace is computed at once."""

    pending: int  # slots whose cells are pending together, counted once for all layers
    call: int  # slots that go through a block in one call
    logits: int  # states decoded to logits at once


@dataclass(frozen=True)
class Budget:
    """A bound, in bytes, on the memory used beside the model."""

    bytes: int

    @classmethod
    def of(cls, lm: LM, bound: int | None) -> "Budget":
        """The given bound, or the device's default: 60 % of a GPU's free memory, or 512 MiB."""
        if bound is not None:
            return cls(bound)
        return cls(int(free_memory(lm.device) * 0.6) if on_gpu(lm) else 2**29)

    def facts(self, lm: LM, length: int, samples: int, tensors: int) -> int:
        """How many facts of a length to trace in one batch.

        Their runs may take a quarter of the bound; `tensors` counts the tensors of a state's width
        that a run keeps per layer. One fact is enough to fill a CPU.
        """
        limit = 1 if lm.device.type == "cpu" else 16
        row = (tensors + 2) * lm.n_layers * length * lm.width * lm.dtype.itemsize
        return max(1, min(limit, self.bytes // 4 // (row * (1 + samples))))

    def batch_sizes(self, lm: LM) -> BatchSizes:
        """How to split a trace: half of the bound for pending states, a quarter for a block's
        activations, an eighth for logits."""
        item = lm.dtype.itemsize
        keys, vocabulary = lm.mlp_weight(0).shape[1], lm.embed.weight.shape[0]
        call = self.bytes // 4 // (item * (16 * lm.width + 8 * keys))
        return BatchSizes(
            pending=min(call, self.bytes // 2 // (lm.n_layers * lm.width * item)),
            call=call,
            logits=max(1, min(4096, self.bytes // 8 // (vocabulary * 12))),
        )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def retry_smaller(solve: Callable[[int], T], size: int) -> tuple[T, int]:
    """Call solve(size), halving the size whenever memory runs out; also return the final size."""
    while True:
        try:
            return solve(size), size
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                reason = str(error).partition("\n")[0]
                raise OutOfMemory(
                    f"not even one item at a time fits into memory ({reason}); use fewer or "
                    "shorter texts, a higher layer, dtype bfloat16 or a larger device"
                ) from error
        # Only here, after the except block, is the memory of the failed attempt free.
        release_memory()
        size //= 2


def run_in_batches(
    items: Sequence[S],
    size: int,
    solve: Callable[[Sequence[S], Progress], Sequence[T]],
    progress: Progress,
) -> list[T]:
    """Solve items in batches of a size, halved whenever memory runs out."""
    results: list[T] = []
    nested = NestedProgress(progress)

    def solve_next(size: int) -> Sequence[T]:
        start = len(results)
        batch = items[start : start + size]
        return solve(batch, nested.within(start / len(items), len(batch) / len(items)))

    while len(results) < len(items):
        batch_results, size = retry_smaller(solve_next, min(size, len(items) - len(results)))
        results += batch_results
    return results
