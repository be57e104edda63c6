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

    pending: int  # states of cells that are pending together
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

    def rows(self, lm: LM, length: int, tensors: int) -> int:
        """How many rows of a length a run may have: a quarter of the bound, but at least a clean
        and a corrupted one. `tensors` counts the tensors of a state's width that a run keeps per
        layer."""
        kept = self.bytes // 4 // run_bytes(lm, 1, length, tensors)
        return max(2, min(kept, self.bytes // 2 // (length * _slot_bytes(lm, length))))

    def facts(self, lm: LM, length: int, samples: int, tensors: int) -> int:
        """How many facts of a length to trace in one batch. One is enough to fill a CPU."""
        limit = 1 if lm.device.type == "cpu" else 16
        return max(1, min(limit, self.rows(lm, length, tensors) // (1 + samples)))

    def batch_sizes(self, lm: LM, length: int = 1, kept: int = 0) -> BatchSizes:
        """How to split a trace of prompts of a length, beside runs that keep some bytes: half of
        the bound for pending states, a quarter for a block's activations, an eighth for logits; of
        what is left, if the runs take more than a quarter."""
        left = min(self.bytes * 3 // 4, self.bytes - kept)
        return BatchSizes(
            pending=max(1, left * 2 // 3 // (lm.width * lm.dtype.itemsize)),
            call=max(1, left // 3 // _slot_bytes(lm, length)),
            logits=max(1, min(4096, left // 6 // _logit_bytes(lm))),
        )

    def check_minimum(self, lm: LM, length: int, tensors: int) -> None:
        """Raise BadSetting if a clean and a corrupted run of a prompt, and one cell, do not fit."""
        activations = max(length * _slot_bytes(lm, length), 2 * _logit_bytes(lm))
        needed = run_bytes(lm, 2, length, tensors) + 3 * activations
        if needed > self.bytes:
            raise BadSetting(
                f"max_memory is {self.bytes / 2**20:.6g} MiB, but tracing a prompt of {length} "
                f"tokens on {lm.name} needs {math.ceil(needed / 2**20)} MiB; raise it, shorten the "
                "prompt or restore fewer kinds"
            )


def run_bytes(lm: LM, rows: int, length: int, tensors: int) -> int:
    """What a run of some rows keeps, its keys and values included."""
    return rows * (tensors + 2) * lm.n_layers * length * lm.width * lm.dtype.itemsize


def _slot_bytes(lm: LM, length: int) -> int:
    """What a token takes in a block call: activations, and attention weights over its keys."""
    keys = lm.mlp_weight(0).shape[1]
    return lm.dtype.itemsize * (16 * lm.width + 8 * keys + 2 * lm.n_heads * 2 * length)


def _logit_bytes(lm: LM) -> int:
    return lm.embed.weight.shape[0] * 12


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
