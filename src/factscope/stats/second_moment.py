"""SecondMoment: C = E[k kᵀ] of the keys k that a layer's MLP output weight receives.

C shows which directions the keys of ordinary text use. An edit multiplies by its inverse: of all
updates that make W k* = v*, the one along C⁻¹ k* changes the output of other keys least (eq. 2).

A second moment is stored as a safetensors file with its origin in the header. In full precision
the file holds C in float32. In half precision it takes a quarter of the space: C = D R D, stored as
the scales D (float32) and the upper triangle of the correlations R (float16, entries in [-1, 1]).
That changes the eigenvalues of R by about 1e-3, so a C closer to singular than that needs a ridge.

Files are looked up among those given, in the user's cache, and among those that factscope ships.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from factscope.errors import BadStats
from factscope.io import atomic_path, cache_folder, parse_json

if TYPE_CHECKING:
    from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SecondMoment:
    """The uncentred second moment of a layer's keys, and its origin."""

    matrix: Float[Tensor, "key key"]
    """C, float32."""
    layer: int
    tokens: int
    """Number of keys averaged."""
    corpus: str
    """Description of the text."""
    model: str
    """The model's name."""
    fingerprint: str
    """The fingerprint of the model's weights."""
    convergence_history: tuple[tuple[int, float], ...] = ()
    """Tokens so far and split-half difference ‖C₁ - C₂‖ / ‖C‖ between two halves of the text."""
    request: str = ""
    """The settings of the collection as JSON; empty if the moment was merged."""
    _factors: dict[tuple[float, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    """Cholesky factors of C by ridge and device."""

    def __repr__(self) -> str:
        return (
            f"SecondMoment({self.model}, layer {self.layer}: {self.width} × {self.width}, "
            f"{self.tokens:,} tokens of {self.corpus})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    @property
    def width(self) -> int:
        """The length of a key."""
        return self.matrix.shape[0]

    @property
    def split_half_difference(self) -> float | None:
        """The last split-half difference, if one was measured."""
        return self.convergence_history[-1][1] if self.convergence_history else None

    def solve(self, keys: Float[Tensor, "n key"], *, ridge: float = 0.0) -> Float[Tensor, "n key"]:
        """C⁻¹ k for each key, on the keys' device; `ridge` · mean(diag C) is added to C's diagonal.

        The Cholesky factor is computed in float64 and cached, so solving for further keys is cheap.
        """
        # MPS has no float64.
        device = torch.device("cpu") if keys.device.type == "mps" else keys.device
        if (ridge, device) not in self._factors:
            matrix = self.matrix.to(device, torch.float64, copy=True)
            diagonal = matrix.diagonal()
            diagonal += ridge * diagonal.mean()
            factor, failed = torch.linalg.cholesky_ex(matrix)
            if failed.item() or not factor.isfinite().all():
                raise BadStats(
                    f"C of layer {self.layer} cannot be inverted: {self.tokens:,} tokens for keys "
                    f"of width {self.width:,}, ridge {ridge:g}; collect more tokens (at least ten "
                    "times the width), or raise the ridge"
                )
            self._factors[ridge, device] = factor
        factor = self._factors[ridge, device]
        solved = torch.cholesky_solve(keys.to(factor).T, factor).T
        return solved.to(device=keys.device, dtype=torch.promote_types(keys.dtype, torch.float32))

    def check(self, lm: "LM", layer: int) -> None:
        """Raise an error unless these are the statistics of that layer of that model."""
        if self.fingerprint != lm.fingerprint:
            problem = (
                f"are of {self.model} (fingerprint {self.fingerprint[:16]}), not of {lm.name} as "
                f"loaded here ({lm.fingerprint[:16]}); collect them"
            )
        elif self.layer != layer:
            problem = (
                f"are of layer {self.layer} of {self.model}, not of layer {layer}; collect them"
            )
        elif self.width != (width := lm.mlp_weight(layer).shape[1]):
            problem = (
                f"have width {self.width}, the keys of layer {layer} of {lm.name} have width "
                f"{width}; collect them again"
            )
        else:
            return
        raise BadStats(
            f"the statistics {problem} with `factscope stats --model {lm.name} --layers {layer}`"
        )


# ---- merging


def merge_second_moments(moments: Sequence[SecondMoment]) -> SecondMoment:
    """The second moment of several texts together, each weighted by its tokens.

    The convergence history is the first one's; its new last point is the split-half difference
    between every other one of the merged moments and the rest.
    """
    if not moments:
        raise BadStats("no statistics to merge; give at least one file")
    first = moments[0]
    for other in moments[1:]:
        if _origin(first) != _origin(other):
            name = "layer {} of {} ({:.16}), width {}".format
            one, two = name(*_origin(first)), name(*_origin(other))
            raise BadStats(f"cannot merge {one} with {two}; give files of one layer")
    for a, b in combinations(moments, 2):
        same_text = (a.corpus, a.tokens) == (b.corpus, b.tokens)
        if same_text and torch.equal(a.matrix.cpu(), b.matrix.cpu()):
            raise BadStats(
                f"the same statistics are given twice ({a.corpus}, {a.tokens:,} tokens); give each "
                "file once"
            )
    tokens, mean = sum(moment.tokens for moment in moments), _mean(moments)
    history = first.convergence_history
    if len(moments) > 1:
        difference = (_mean(moments[::2]) - _mean(moments[1::2])).norm() / mean.norm()
        history = (*history, (tokens, difference.item()))
    corpus = "; ".join(dict.fromkeys(moment.corpus for moment in moments))
    return replace(
        first, matrix=mean, tokens=tokens, corpus=corpus, convergence_history=history, request=""
    )


def _origin(moment: SecondMoment) -> tuple[int, str, str, int]:
    return moment.layer, moment.model, moment.fingerprint, moment.width


def _mean(moments: Sequence[SecondMoment]) -> Float[Tensor, "key key"]:
    """The mean matrix, weighted by tokens, on the first one's device."""
    total = torch.zeros_like(moments[0].matrix)
    tokens = sum(moment.tokens for moment in moments)
    for moment in moments:
        total.add_(moment.matrix.to(total.device), alpha=moment.tokens / tokens)
    return total


# ---- files

SUFFIX = ".safetensors"
KIND = "factscope second moment"
VERSION = 2
"""In version 1 the header field `convergence_history` was called `halves`."""


def save_second_moment(
    moment: SecondMoment, path: str | Path, half_precision: bool = False
) -> None:
    """Write the file atomically; in half precision it takes a quarter of the space."""
    matrix = moment.matrix.detach().float().cpu()
    tensors = _compress(matrix) if half_precision else {"matrix": matrix.contiguous()}
    header = {
        "kind": KIND,
        "version": str(VERSION),
        "model": moment.model,
        "fingerprint": moment.fingerprint,
        "layer": str(moment.layer),
        "corpus": moment.corpus,
        "tokens": str(moment.tokens),
        "convergence_history": json.dumps(moment.convergence_history),
        "request": moment.request,
    }
    with atomic_path(Path(path)) as temporary:
        # Not safetensors' own save_file: it makes files that only their owner can read.
        temporary.write_bytes(save(tensors, metadata=header))


def load_second_moment(path: str | Path) -> SecondMoment:
    """Read a file of either precision, onto the CPU."""
    path = Path(path)
    header = _read_header(path)
    tensors = load_file(path)
    try:
        history = header["halves" if header["version"] == "1" else "convergence_history"]
        matrix = _decompress(tensors) if "scales" in tensors else tensors["matrix"]
        if not matrix.isfinite().all():
            raise ValueError("the matrix has NaN or infinity")
        points = parse_json(history, allow_nan=True)
        return SecondMoment(
            matrix=matrix,
            layer=int(header["layer"]),
            tokens=int(header["tokens"]),
            corpus=header["corpus"],
            model=header["model"],
            fingerprint=header["fingerprint"],
            convergence_history=tuple((int(n), float(x)) for n, x in points),
            request=header.get("request", ""),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _read_header(path: Path) -> Mapping[str, str]:
    """The file's header, without reading its matrix."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except FileNotFoundError as error:
        raise BadStats(f"there is no file {path}; `factscope stats` writes it") from error
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    if header.get("kind") != KIND:
        raise BadStats(f"{path} is not a second moment; `factscope stats` writes such files")
    if not header.get("version", "").isdigit() or int(header["version"]) > VERSION:
        raise BadStats(
            f"{path} has format version {header.get('version')!r}, this factscope reads up to "
            f"{VERSION}; update factscope"
        )
    return header


def _unreadable(path: Path, reason: str) -> BadStats:
    return BadStats(f"cannot read the statistics {path} ({reason}); delete and collect them again")


def _compress(matrix: Float[Tensor, "key key"]) -> dict[str, Tensor]:
    """C = D R D as the scales D and the upper triangle of R in half precision."""
    scales = matrix.diagonal().sqrt()
    nonzero = torch.where(scales > 0, scales, 1)  # an entry that is 0 in every key stays 0
    correlations = matrix / torch.outer(nonzero, nonzero)
    upper = torch.triu_indices(*matrix.shape)
    return {"scales": scales.clone(), "upper": correlations[upper[0], upper[1]].half()}


def _decompress(tensors: Mapping[str, Tensor]) -> Float[Tensor, "key key"]:
    scales = tensors["scales"]
    upper = torch.triu_indices(len(scales), len(scales))
    matrix = torch.zeros(len(scales), len(scales))
    matrix[upper[0], upper[1]] = tensors["upper"].float()
    return (matrix + matrix.triu(1).T) * torch.outer(scales, scales)


# ---- lookup

SHIPPED = Path(__file__).parent / "shipped"


def find_second_moment(
    lm: "LM", layer: int, given: Sequence[str | Path] = ()
) -> SecondMoment | None:
    """The statistics of a layer from the given files or folders, or else from the user's cache or
    those shipped with factscope; None if there are none.

    If files are given and none fits, that is an error: no other source is used instead.
    """
    paths = [
        file
        for path in map(Path, given)
        for file in (sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path])
    ]
    for path in paths if given else _stored_paths(lm, layer):
        if _fits(path, lm, layer):
            moment = load_second_moment(path)
            moment.check(lm, layer)
            return moment
    if not given:
        return None
    if len(paths) == 1:
        load_second_moment(paths[0]).check(lm, layer)  # raises an error with the reason
    headers = [(path.name, _read_header(path)) for path in paths[:8]]
    available = [f"{name}: layer {h.get('layer')} of {h.get('model')}" for name, h in headers]
    raise BadStats(
        f"none of the given statistics is of layer {layer} of {lm.name} as loaded here "
        f"({'; '.join(available) or 'no files'}); collect them with "
        f"`factscope stats --model {lm.name} --layers {layer}`"
    )


def layers_with_second_moments(lm: "LM") -> list[int]:
    """The layers whose statistics are in the cache or shipped; only file headers are read."""
    return [
        layer
        for layer in range(lm.n_layers)
        if any(_fits(path, lm, layer) for path in _stored_paths(lm, layer))
    ]


def cached_path(lm: "LM", layer: int) -> Path:
    """The path of a layer's statistics in the user's cache."""
    return cache_folder() / "stats" / lm.fingerprint[:16] / file_name(layer)


def file_name(layer: int) -> str:
    """The name of a layer's file in a folder."""
    return f"layer-{layer:02}{SUFFIX}"


def _stored_paths(lm: "LM", layer: int) -> list[Path]:
    cached = cached_path(lm, layer)
    return [*([cached] if cached.is_file() else []), *sorted(SHIPPED.glob(f"*{SUFFIX}"))]


def _fits(path: Path, lm: "LM", layer: int) -> bool:
    header = _read_header(path)
    return (header.get("fingerprint"), header.get("layer")) == (lm.fingerprint, str(layer))
