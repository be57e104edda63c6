"""Second moments as files: safetensors, with what they were made from in the header.

Plain, the file holds C in float32. Packed, it holds a quarter of that: C = D R D with the scales
D (float32) and the upper triangle of the correlations R (half precision, entries within [-1, 1]).
That moves the eigenvalues of R by some 1e-3: a C nearer to singular than that needs a ridge.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from factscope.errors import BadStats
from factscope.fetch import whole
from factscope.stats.moment import SecondMoment

__all__ = ["load_moment", "read_header", "save_moment"]

KIND = "factscope second moment"
VERSION = 1


def save_moment(moment: SecondMoment, path: Path, packed: bool = False) -> None:
    """Write the moment, whole or not at all; `packed` in a quarter of the space."""
    matrix = moment.matrix.detach().float().cpu()
    tensors = pack(matrix) if packed else {"matrix": matrix.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary:
        # By way of bytes: safetensors' own files can be read by their maker only.
        temporary.write_bytes(save(tensors, metadata=_header(moment)))


def load_moment(path: Path) -> SecondMoment:
    """The moment in a file, plain or packed, on the CPU."""
    header = read_header(path)
    tensors = load_file(path)
    try:
        matrix = unpack(tensors) if "scales" in tensors else tensors["matrix"]
        return SecondMoment(
            matrix=matrix,
            layer=int(header["layer"]),
            tokens=int(header["tokens"]),
            corpus=header["corpus"],
            model=header["model"],
            fingerprint=header["fingerprint"],
            halves=tuple((int(n), float(gap)) for n, gap in json.loads(header["halves"])),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def read_header(path: Path) -> Mapping[str, str]:
    """What the file says of itself, without its matrix."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except FileNotFoundError as error:
        raise BadStats(f"there is no file {path}; `factscope stats` makes it") from error
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    if header.get("kind") != KIND:
        raise BadStats(f"{path} holds no second moment; `factscope stats` makes such files")
    if not header.get("version", "").isdigit() or int(header["version"]) > VERSION:
        raise BadStats(
            f"{path} has format {header.get('version')!r}, this factscope reads up to {VERSION}; "
            "update factscope"
        )
    return header


def pack(matrix: Float[Tensor, "key key"]) -> dict[str, Tensor]:
    """C = D R D as the scales D and the upper triangle of R in half precision."""
    scales = matrix.diagonal().sqrt()
    safe = torch.where(scales > 0, scales, 1)  # a key that is always 0 stays so
    correlations = matrix / torch.outer(safe, safe)
    upper = torch.triu_indices(*matrix.shape)
    return {"scales": scales.clone(), "upper": correlations[upper[0], upper[1]].half()}


def unpack(tensors: Mapping[str, Tensor]) -> Float[Tensor, "key key"]:
    """C from its packed form."""
    scales = tensors["scales"]
    upper = torch.triu_indices(len(scales), len(scales))
    matrix = torch.zeros(len(scales), len(scales))
    matrix[upper[0], upper[1]] = tensors["upper"].float()
    matrix = matrix + matrix.triu(1).T
    return matrix * torch.outer(scales, scales)


def _header(moment: SecondMoment) -> dict[str, str]:
    return {
        "kind": KIND,
        "version": str(VERSION),
        "model": moment.model,
        "fingerprint": moment.fingerprint,
        "layer": str(moment.layer),
        "corpus": moment.corpus,
        "tokens": str(moment.tokens),
        "halves": json.dumps(moment.halves),
    }


def _unreadable(path: Path, reason: Any) -> BadStats:
    return BadStats(f"the statistics {path} cannot be read ({reason}); delete and make them again")
