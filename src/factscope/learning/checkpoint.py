"""Training under way, as a file: the network, Adam's state and how far it is. Safetensors."""

from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from factscope.editing.learned.weights import bytes_of, plain, tensors_in
from factscope.errors import WrongRun
from factscope.files import write_whole
from factscope.learning.training import Progress, Trainer

__all__ = ["restore_", "write_checkpoint"]

FORMAT = "factscope-checkpoint"


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Everything that training goes on from, whole or not at all."""
    adam = trainer.adam.state_dict()["state"]
    tensors = {
        **{f"network.{name}": plain(x) for name, x in trainer.network.state_dict().items()},
        **{f"best.{name}": plain(x) for name, x in trainer.best.items()},
        **{f"adam.{i}.{name}": plain(x) for i, some in adam.items() for name, x in some.items()},
    }
    header = {"format": f"{FORMAT} 1", "progress": asdict(trainer.progress)}
    write_whole(path, bytes_of(tensors, header))


def restore_(trainer: Trainer, path: Path) -> None:
    """Bring a fresh trainer to where another was."""
    header, tensors = tensors_in(path, FORMAT)
    try:
        trainer.progress, trainer.begun = Progress(**header["progress"]), True
        trainer.network.load_state_dict(_under("network.", tensors))
        device = trainer.lm.device
        trainer.best = {name: x.to(device) for name, x in _under("best.", tensors).items()}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("adam.", tensors).items():
            number, _, what = name.partition(".")
            state.setdefault(int(number), {})[what] = tensor
        groups = trainer.adam.state_dict()["param_groups"]
        trainer.adam.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise WrongRun(f"{path} cannot be gone on from ({reason}); give another folder") from error


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
