"""Edits as files: safetensors, with what they are for and what they write in the header.

A low-rank change of a weight is two tensors, `<weight>#B` and `<weight>#A`; any other is one,
`<weight>#delta`. All are float32, in the paper's orientation. Nothing in the file is code.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from factscope.editing.edit import Change, Dense, Edit, LowRank
from factscope.editing.health import Health
from factscope.errors import BadEdit, BadFact
from factscope.facts import Fact
from factscope.files import write_whole

__all__ = ["load_edit", "save_edit"]

FORMAT = "factscope-edit"
VERSION = 1


def save_edit(edit: Edit, path: str | Path) -> None:
    """Write the edit, whole or not at all; `load_edit` gives the same one, bit by bit.

    Settings are kept as JSON: their tuples come back as lists.
    """
    path, header = Path(path), _header(edit)
    tensors = {
        f"{name}#{part}": _plain(tensor)
        for name, change in edit.changes.items()
        for part, tensor in _parts(change).items()
    }
    try:
        # By way of bytes: safetensors' own files can be read by their maker only.
        write_whole(path, save(tensors, metadata=header))
    except (OSError, SafetensorError) as error:
        raise BadEdit(f"the edit cannot be written to {path} ({error}); give another") from error


def load_edit(path: str | Path) -> Edit:
    """The edit in a file, on the CPU."""
    path = Path(path)
    header, tensors = _read(path)
    try:
        health = header.get("health")
        return Edit(
            changes=_changes(tensors),
            model=header["model"],
            fingerprint=header["fingerprint"],
            method=header["method"],
            facts=tuple(Fact(**fact) for fact in json.loads(header["facts"])),
            settings=dict(json.loads(header["settings"])),
            health=None if health is None else Health(**json.loads(health)),
        )
    except (KeyError, ValueError, TypeError, AttributeError, BadFact) as error:
        reason = f"no {error} in its header" if isinstance(error, KeyError) else str(error)
        raise _unreadable(path, reason) from error


# ---- writing


def _header(edit: Edit) -> dict[str, str]:
    header = {
        "format": f"{FORMAT} {VERSION}",
        "model": edit.model,
        "fingerprint": edit.fingerprint,
        "method": edit.method,
        "facts": json.dumps([asdict(fact) for fact in edit.facts]),
        "settings": _json(edit.settings),
    }
    return header if edit.health is None else {**header, "health": _json(edit.health.to_dict())}


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(values))
    except (TypeError, ValueError) as error:
        raise BadEdit(
            f"the edit's settings are not plain values ({error}); give numbers, text, lists"
        ) from error


def _parts(change: Change) -> dict[str, Tensor]:
    if isinstance(change, LowRank):
        return {"A": change.A, "B": change.B}
    return {"delta": change.delta}


def _plain(tensor: Tensor) -> Tensor:
    """A copy of its own, since safetensors takes no two tensors that share memory."""
    tensor = tensor.detach().to("cpu", torch.float32)
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- reading


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file that says it is an edit, of a version we know."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_format(path, header)
            # Copies: a tensor that still lay in the file would change with it.
            return header, {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadEdit(f"there is no file {path}; give one that `Edit.save` wrote") from error
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error


def _check_format(path: Path, header: Mapping[str, str]) -> None:
    kind, _, version = header.get("format", "").partition(" ")
    if kind != FORMAT or not version.isdigit():
        raise BadEdit(f"{path} holds no edit; give a file that `Edit.save` wrote")
    if int(version) > VERSION:
        raise BadEdit(
            f"{path} has format {version}, this factscope reads up to {VERSION}; update factscope"
        )


def _changes(tensors: Mapping[str, Tensor]) -> dict[str, Change]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("#")
        found.setdefault(name, {})[part] = tensor
    return {name: _change(name, parts) for name, parts in found.items()}


def _change(name: str, parts: Mapping[str, Tensor]) -> Change:
    if any(tensor.dtype != torch.float32 for tensor in parts.values()):
        raise ValueError(f"the change of {name!r} is not float32")
    if parts.keys() == {"delta"}:
        return Dense(parts["delta"])
    if parts.keys() != {"A", "B"}:
        raise ValueError(f"the change of {name!r} has the parts {sorted(parts)}, not A and B")
    B, A = parts["B"], parts["A"]
    if B.dim() != 2 or A.dim() != 2 or B.shape[1] != A.shape[0]:
        shapes = f"{tuple(B.shape)} and {tuple(A.shape)}"
        raise ValueError(f"B and A of {name!r} have shapes {shapes}, which do not fit together")
    return LowRank(B, A)


def _unreadable(path: Path, reason: str) -> BadEdit:
    return BadEdit(f"the edit {path} cannot be read ({reason}); fetch or make it again")
