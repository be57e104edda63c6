"""How much to do at once, so that a trace stays within a bound on memory."""

from dataclasses import dataclass

import torch

from factscope.errors import BadSetting
from factscope.lm.model import LM
from factscope.tracing.engine import BatchSizes

__all__ = ["Budget", "is_out_of_memory", "parse_bytes"]

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """A size as people write it: "4GiB", "500M", "123456"."""
    short = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = short[-1:] if short[-1:] in UNITS else ""
    try:
        size = float(short.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        size = 0
    if size < 1:
        raise BadSetting(f"the memory bound {text!r} is not a size; write for instance 4GiB")
    return int(size)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch says that memory ran out, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@dataclass(frozen=True)
class Budget:
    """A bound, in bytes, on what tracing keeps beside the model."""

    bytes: int

    @classmethod
    def of(cls, lm: LM, bound: int | None) -> "Budget":
        """The given bound, or one that suits the device."""
        if bound is not None:
            return cls(bound)
        if lm.device.type == "cuda":
            free = torch.cuda.mem_get_info(lm.device)[0]
            free += torch.cuda.memory_reserved(lm.device) - torch.cuda.memory_allocated(lm.device)
            return cls(int(free * 0.6))
        return cls(2**29)

    def half(self) -> "Budget":
        """What to try after memory ran out all the same."""
        return Budget(self.bytes // 2)

    def facts(self, lm: LM, length: int, samples: int, kept: int) -> int:
        """How many facts of a length to trace in one batch.

        Their runs may take a quarter of the bound; `kept` counts the tensors of a state's width
        that a run keeps for each layer. One fact is enough to fill a CPU.
        """
        most = 1 if lm.device.type == "cpu" else 16
        row = (kept + 2) * lm.n_layers * length * lm.width * lm.dtype.itemsize
        return max(1, min(most, self.bytes // 4 // (row * (1 + samples))))

    def job(self, lm: LM) -> BatchSizes:
        """How to split a walk: half of the bound for what is pending, a quarter for a block's
        own activations, an eighth for logits.
        """
        item = lm.dtype.itemsize
        keys, vocabulary = lm.mlp_weight(0).shape[1], lm.embed.weight.shape[0]
        return BatchSizes(
            pending=self.bytes // 2 // (lm.n_layers * lm.width * item),
            call=self.bytes // 4 // (item * (16 * lm.width + 8 * keys)),
            logits=max(1, min(4096, self.bytes // 8 // (vocabulary * 12))),
        )
