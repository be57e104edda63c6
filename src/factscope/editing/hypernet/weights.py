"""Weights: a trained network with the model it is for, as one safetensors file.

The header says the method, the model and its fingerprint, how the network is built, and on what it
was trained. Nothing in the file is code.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from factscope.editing.hypernet.gradients import TargetModule, target_modules
from factscope.editing.hypernet.ke import KeConfig, KeNetwork
from factscope.editing.hypernet.mend import MendConfig, MendNetwork
from factscope.editing.hypernet.model import HypernetConfig, Hypernetwork
from factscope.errors import BadEditorWeights, BadInput
from factscope.io import sha256

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "NETWORKS",
    "HypernetWeights",
    "build_network",
    "bytes_of",
    "check_fit",
    "detached",
    "digest_of",
    "load_weights",
    "pack_weights",
    "tensors_in",
]

FORMAT = "factscope-hypernetwork"
VERSION = 1

NETWORKS: dict[str, tuple[type[HypernetConfig], Any]] = {
    "mend": (MendConfig, MendNetwork),
    "ke": (KeConfig, KeNetwork),
}
"""Method → how its network is described and built."""

FLAVOURS = {"counterfact": "-cf", "zsre": "-zsre", "text": ""}
"""What the paper adds to a method's name for the data that it was trained on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HypernetWeights:
    """A network and what it was trained for."""

    network: Hypernetwork
    model: str
    fingerprint: str
    """Of the model that it edits."""
    trained: Mapping[str, Any]
    """On what, and how far."""
    sha256: str
    """Of the file, or of the tensors where there is none."""

    @property
    def row(self) -> str:
        """What the paper's tables call an editor with these weights."""
        data = str(self.trained.get("data", "text"))
        return self.network.method + FLAVOURS.get(data, f"-{data}")

    def places(self, lm: "LM") -> list[TargetModule]:
        """The model's weights that the network changes; refuses a model that it is not for."""
        if lm.fingerprint != self.fingerprint:
            raise BadEditorWeights(
                f"the {self.network.method} weights are for {self.model} (fingerprint "
                f"{self.fingerprint[:12]}), not for {lm.name} ({lm.fingerprint[:12]}); load that "
                f"model, or train others: factscope train {self.network.method} --model {lm.name}"
            )
        design = self.network.design
        known = ("learned places", design.layers, design.places)
        if known not in lm.cache:  # names are slow to find, and an edit is quick
            lm.cache[known] = check_fit(lm, design)
        return lm.cache[known]

    def on(self, device: torch.device) -> Hypernetwork:
        """The network on a device, not to be trained."""
        network = self.network
        if any(x.device != device for x in network.parameters()):  # moving sorts an LSTM's anew
            network.to(device)
        return network.eval().requires_grad_(False)


def check_fit(lm: "LM", design: HypernetConfig) -> list[TargetModule]:
    """The places of a design in a model, if it has them."""
    try:
        found = target_modules(lm, design.layers)
    except BadInput as error:
        raise BadEditorWeights(f"the weights do not fit {lm.name}: {error}") from error
    there, wanted = tuple(place.shape for place in found), design.places
    if there != wanted:
        lost = [shape for shape in wanted if shape not in there] or list(wanted)
        raise BadEditorWeights(
            f"the weights do not fit {lm.name}: they change {lost[0][0]} ({lost[0][1]} → "
            f"{lost[0][2]}), and layers {', '.join(map(str, design.layers))} have "
            f"{', '.join(name for name, _, _ in there)}; train others for these layers"
        )
    return found


def build_network(method: str, design: HypernetConfig, seed: int = 0) -> Hypernetwork:
    """A network as it is before training; nobody else's random numbers change."""
    _, network = NETWORKS[method]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network(design)


# ---- as a file


def pack_weights(
    network: Hypernetwork, lm_name: str, fingerprint: str, trained: Mapping[str, Any]
) -> bytes:
    """The bytes of a weights file."""
    header = {
        "format": f"{FORMAT} {VERSION}",
        "method": network.method,
        "model": lm_name,
        "fingerprint": fingerprint,
        "design": network.design.to_dict(),
        "trained": dict(trained),
    }
    tensors = {name: detached(x) for name, x in network.state_dict().items()}
    return bytes_of(tensors, header)


def bytes_of(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """A safetensors file; its header is one entry, for several have no fixed order."""
    return save(dict(tensors), metadata={"factscope": json.dumps(header)})


def detached(tensor: Tensor) -> Tensor:
    """A copy of its own in main memory."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def load_weights(path: str | Path, method: str | None = None) -> HypernetWeights:
    """The weights in a file, which must be of the method if one is said."""
    path = Path(path)
    header, tensors = tensors_in(path, FORMAT)
    there = header.get("method", "")
    if there not in NETWORKS or (method is not None and there != method):
        raise BadEditorWeights(
            f"{path} holds weights of {there!r}, not of {method or list(NETWORKS)}"
        )
    design, _ = NETWORKS[there]
    try:
        made = build_network(there, design.from_dict(header["design"]))
        made.load_state_dict(tensors)
        return HypernetWeights(
            network=made,
            model=header["model"],
            fingerprint=header["fingerprint"],
            trained=header["trained"],
            sha256=sha256(path),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, str(error).split("\n")[0]) from error


def tensors_in(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file that says it is of that kind."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("factscope", "{}"))
            _check_format(path, header, kind)
            return header, {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadEditorWeights(f"there is no file {path}; `factscope train` makes one") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _check_format(path: Path, header: Mapping[str, Any], kind: str) -> None:
    there, _, version = header.get("format", "").partition(" ")
    if there != kind or not version.isdigit():
        raise BadEditorWeights(f"{path} holds no {kind.removeprefix('factscope-')}; give one that "
                         "`factscope train` wrote")  # fmt: skip
    if int(version) > VERSION:
        raise BadEditorWeights(
            f"{path} has format {version}, this factscope reads up to {VERSION}; update factscope"
        )


def _unreadable(path: Path, reason: str) -> BadEditorWeights:
    return BadEditorWeights(
        f"the weights {path} cannot be read ({reason}); fetch or train them again"
    )


def digest_of(tensors: Sequence[Tensor]) -> str:
    """A hash of tensors, for weights that are in no file."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(detached(tensor).numpy().tobytes())
    return digest.hexdigest()
