"""Devices: which one a model is on, and how much memory it has left."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from factscope.lm.model import LM


def best_device() -> str:
    """The fastest device of this machine, as torch names it."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def on_gpu(where: "LM | torch.device") -> bool:
    """Whether a model (its embedding) or a device is a CUDA GPU."""
    device = where if isinstance(where, torch.device) else where.device
    return device.type == "cuda"


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free or cached by torch without being in use."""
    free = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def release_memory() -> None:
    """Give cached GPU memory back, so that a smaller attempt can allocate it in other sizes."""
    torch.cuda.empty_cache()
