"""Trained hypernetworks as safetensors files.

The header holds the method, the model with its fingerprint, the edited weights, the network's
settings and how it was trained. Format 1, of factscope 0.1.0.dev0, named its fields and tensors
differently; it is still read.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from factscope.editing.hypernet.gradients import TargetModule, target_modules
from factscope.editing.hypernet.ke import KeNetwork
from factscope.editing.hypernet.mend import MendNetwork
from factscope.editing.hypernet.model import EditedWeights, Hypernetwork
from factscope.editing.hypernet.settings import KeConfig, MendConfig, network_config
from factscope.errors import BadEditorWeights, BadInput
from factscope.io import sha256

if TYPE_CHECKING:
    from factscope.lm.model import LM

FORMAT = "factscope-hypernetwork"
VERSION = 2

NETWORKS: dict[str, Any] = {"mend": MendNetwork, "ke": KeNetwork}

TABLE_SUFFIXES = {"counterfact": "-cf", "zsre": "-zsre", "text": ""}
"""Training data → what the paper appends to the method's name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HypernetWeights:
    """A trained network and the model that it edits."""

    network: Hypernetwork
    model: str
    fingerprint: str
    """Fingerprint of the model that it edits."""
    training: Mapping[str, Any]
    """The data and settings of its training, with the step and the validation loss."""
    sha256: str
    """Of the file, or of the tensors if they were never in one."""

    @property
    def row(self) -> str:
        """The editor's name in the paper's tables, such as "mend-cf"."""
        data = str(self.training.get("data", "text"))
        return self.network.method + TABLE_SUFFIXES.get(data, f"-{data}")

    def targets(self, lm: "LM") -> list[TargetModule]:
        """The modules of the model that the network edits; raises if it is another model."""
        if lm.fingerprint != self.fingerprint:
            raise BadEditorWeights(
                f"the {self.network.method} weights are for {self.model} (fingerprint "
                f"{self.fingerprint[:12]}), not for {lm.name} ({lm.fingerprint[:12]}); load that "
                f"model, or train others: factscope train {self.network.method} --model {lm.name}"
            )
        weights = self.network.weights
        key = ("hypernetwork targets", weights)
        if key not in lm.cache:  # looking up module names takes longer than an edit
            lm.cache[key] = _find_targets(lm, weights)
        return lm.cache[key]

    def on(self, device: torch.device) -> Hypernetwork:
        """The network on a device, for inference."""
        network = self.network
        # Moving an LSTM repacks its weights, even to the device where it is.
        if any(x.device != device for x in network.parameters()):
            network.to(device)
        return network.eval().requires_grad_(False)


def _find_targets(lm: "LM", weights: EditedWeights) -> list[TargetModule]:
    """The modules of the edited weights in a model, whose shapes must agree."""
    try:
        targets = target_modules(lm, weights.layers)
    except BadInput as error:
        raise BadEditorWeights(f"the weights do not fit {lm.name}: {error}") from error
    shapes = tuple(target.shape for target in targets)
    if shapes != weights.shapes:
        missing = next((x for x in weights.shapes if x not in shapes), weights.shapes[0])
        raise BadEditorWeights(
            f"the weights do not fit {lm.name}: they change {missing.name} ({missing.keys} → "
            f"{missing.values}), and layers {', '.join(map(str, weights.layers))} have "
            f"{', '.join(shape.name for shape in shapes)}; train others for these layers"
        )
    return targets


def build_network(
    config: MendConfig | KeConfig, weights: EditedWeights, seed: int = 0
) -> Hypernetwork:
    """An untrained network. The global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[config.method](config, weights)


def network_for(
    lm: "LM", targets: Sequence[TargetModule], config: MendConfig | KeConfig, seed: int = 0
) -> Hypernetwork:
    """An untrained network, on the CPU, that edits these modules of a model."""
    weights = EditedWeights(
        shapes=tuple(target.shape for target in targets),
        layers=tuple(sorted({target.layer for target in targets})),
        hidden_size=lm.embed.weight.shape[1],
    )
    return build_network(config, weights, seed)


# ---- weights files


def pack_weights(weights: HypernetWeights) -> bytes:
    """The bytes of a weights file."""
    network = weights.network
    header = {
        "format": f"{FORMAT} {VERSION}",
        "method": network.method,
        "model": weights.model,
        "fingerprint": weights.fingerprint,
        "weights": network.weights.to_dict(),
        "network": asdict(network.config),
        "training": dict(weights.training),
    }
    return pack_tensors({name: cpu_copy(x) for name, x in network.state_dict().items()}, header)


def load_weights(path: str | Path, method: str | None = None) -> HypernetWeights:
    """Read a weights file; raises if it is for another method than the given one."""
    path = Path(path)
    version, header, tensors = read_tensors(path, FORMAT, (1, VERSION))
    try:
        if version == 1:
            header, tensors = _from_version_1(header, tensors)
        file_method = header["method"]
        if file_method not in NETWORKS or (method is not None and file_method != method):
            expected = method or " or ".join(NETWORKS)
            raise BadEditorWeights(f"{path} holds weights of {file_method!r}, not of {expected}")
        config = network_config(file_method, **header["network"])
        network = build_network(config, EditedWeights.from_dict(header["weights"]))
        network.load_state_dict(tensors)
        return HypernetWeights(
            network=network,
            model=header["model"],
            fingerprint=header["fingerprint"],
            training=header["training"],
            sha256=sha256(path),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, str(error).split("\n")[0]) from error


def _from_version_1(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors under the names of version 2."""
    design = dict(header["design"])
    weights = {
        "shapes": design.pop("places"),
        "layers": design.pop("layers"),
        "hidden_size": design.pop("width"),
    }
    hidden = "hidden_layers" if header["method"] == "mend" else "hidden_width"
    names = {
        "hidden": hidden,
        "rate": "edit_lr",
        "lstm": "lstm_width",
        "condition": "condition_width",
    }
    network = {names.get(name, name): value for name, value in design.items()}

    def renamed(name: str) -> str:
        name = re.sub(r"^usual_(x|delta)\.", r"\1_norms.", name)
        name = re.sub(r"\.squares$", ".m2", name)
        return re.sub(r"log_rates?$", "log_edit_lr", name)

    return (
        {**header, "weights": weights, "network": network, "training": header["trained"]},
        {renamed(name): x for name, x in tensors.items()},
    )


# ---- safetensors with a JSON header


def pack_tensors(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """A safetensors file. The header is one metadata entry, as several have no fixed order."""
    return save(dict(tensors), metadata={"factscope": json.dumps(header)})


def read_tensors(
    path: Path, kind: str, versions: Sequence[int]
) -> tuple[int, dict[str, Any], dict[str, Tensor]]:
    """The version, header and tensors of a file of a kind, in one of these versions."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("factscope", "{}"))
            file_kind, _, version = header.get("format", "").partition(" ")
            if file_kind != kind or not version.isdigit():
                raise BadEditorWeights(
                    f"{path} is not a {kind.removeprefix('factscope-')} file; give one written by "
                    "`factscope train`"
                )
            if int(version) not in versions:
                known = " and ".join(map(str, versions))
                advice = "update factscope" if int(version) > max(versions) else "train it again"
                raise BadEditorWeights(
                    f"{path} has format {version}, and this factscope reads {known}; {advice}"
                )
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return int(version), header, tensors
    except FileNotFoundError as error:
        raise BadEditorWeights(f"there is no file {path}; `factscope train` writes one") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> BadEditorWeights:
    return BadEditorWeights(f"cannot read the weights {path} ({reason}); train them again")


def cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in main memory, detached."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def tensors_sha256(tensors: Sequence[Tensor]) -> str:
    """A hash of tensors, for weights that are in no file."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(cpu_copy(tensor).numpy().tobytes())
    return digest.hexdigest()
