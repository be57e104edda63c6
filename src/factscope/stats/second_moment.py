"""SecondMoment: C = E[k kᵀ] of the keys k that a layer's MLP output weight receives.

C says which directions the keys of ordinary text use. An edit divides by it: of all the changes
that make W k* = v*, the one along C⁻¹ k* disturbs other keys least (eq. 2 of the paper).

Second moments as files: safetensors, with what they were made from in the header.

Plain, the file holds C in float32. Packed, it holds a quarter of that: C = D R D with the scales
D (float32) and the upper triangle of the correlations R (half precision, entries within [-1, 1]).
That moves the eigenvalues of R by some 1e-3: a C nearer to singular than that needs a ridge.

Where a layer's statistics are: given files, the user's cache, or what comes with factscope.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from factscope.errors import BadStats
from factscope.io import atomic_path, cache_folder

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "SUFFIX",
    "SecondMoment",
    "cached_path",
    "file_name",
    "find_moment",
    "gap_between",
    "layers_with_moments",
    "load_moment",
    "merge",
    "read_header",
    "save_moment",
]

Factors = dict[tuple[float, torch.device], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondMoment:
    """The uncentred second moment of a layer's keys, with what it was made from."""

    matrix: Float[Tensor, "key key"]
    """C, float32."""
    layer: int
    tokens: int
    """How many keys were averaged."""
    corpus: str
    """What text, in words."""
    model: str
    """The model's name."""
    fingerprint: str
    """The fingerprint of its weights."""
    halves: tuple[tuple[int, float], ...] = ()
    """Tokens so far and the relative gap ‖C₁ - C₂‖ / ‖C‖ between two halves of the text."""
    _factors: Factors = field(default_factory=dict, init=False, repr=False)

    @property
    def width(self) -> int:
        """How wide a key is."""
        return self.matrix.shape[0]

    @property
    def gap(self) -> float | None:
        """The last gap between two halves of the text, where one was measured."""
        return self.halves[-1][1] if self.halves else None

    def solve(self, keys: Float[Tensor, "n key"], *, ridge: float = 0.0) -> Float[Tensor, "n key"]:
        """C⁻¹ k for each key, on the keys' device; `ridge` · mean(diag C) is added to C's diagonal.

        The factor is computed in float64 and kept, so that further keys cost next to nothing.
        """
        factor = self._factor(ridge, keys.device)
        wide = keys.to(factor)
        solved = torch.cholesky_solve(wide.T, factor).T
        return solved.to(device=keys.device, dtype=torch.promote_types(keys.dtype, torch.float32))

    def check(self, lm: "LM", layer: int) -> None:
        """These are statistics of that layer of that model, or an error says which they are of."""
        if self.fingerprint != lm.fingerprint:
            raise BadStats(
                f"the statistics are of {self.model} (fingerprint {self.fingerprint[:16]}), not of "
                f"{lm.name} as loaded here ({lm.fingerprint[:16]}); make them with "
                f"`factscope stats --model {lm.name} --layer {layer}`"
            )
        if self.layer != layer:
            raise BadStats(
                f"the statistics are of layer {self.layer} of {self.model}, layer {layer} is "
                f"wanted; make them with `factscope stats --model {lm.name} --layer {layer}`"
            )
        width = lm.mlp_weight(layer).shape[1]
        if self.width != width:
            raise BadStats(
                f"the statistics are {self.width} wide, the keys of layer {layer} of {lm.name} "
                f"are {width}; make them anew with `factscope stats`"
            )

    def _factor(self, ridge: float, device: torch.device) -> Float[Tensor, "key key"]:
        """The lower Cholesky factor of C with the ridge."""
        place = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        if (ridge, place) not in self._factors:
            self._factors[ridge, place] = self._factorise(ridge, place)
        return self._factors[ridge, place]

    def _factorise(self, ridge: float, device: torch.device) -> Float[Tensor, "key key"]:
        matrix = self.matrix.to(device, torch.float64, copy=True)
        diagonal = matrix.diagonal()
        diagonal += ridge * diagonal.mean()
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if failed.item() or not factor.isfinite().all():
            raise BadStats(
                f"C of layer {self.layer} cannot be inverted: {self.tokens:,} tokens for keys "
                f"{self.width:,} wide, ridge {ridge:g}; collect more tokens (ten times the width "
                "or more), or raise the ridge"
            )
        return factor


def merge(moments: Sequence[SecondMoment]) -> SecondMoment:
    """The second moment of several texts together, each weighted by its tokens.

    The history of the first is kept; its last point becomes the gap between the odd and the even
    ones of those merged.
    """
    if not moments:
        raise BadStats("no statistics to merge; give at least one file")
    first = moments[0]
    for other in moments[1:]:
        _must_fit(first, other)
    _must_differ(moments)
    tokens = sum(moment.tokens for moment in moments)
    halves = first.halves
    if len(moments) > 1:
        parts = mean_of(moments[::2]), mean_of(moments[1::2])
        halves = (*halves, (tokens, gap_between(*parts, mean_of(moments))))
    return SecondMoment(
        matrix=mean_of(moments),
        layer=first.layer,
        tokens=tokens,
        corpus="; ".join(dict.fromkeys(moment.corpus for moment in moments)),
        model=first.model,
        fingerprint=first.fingerprint,
        halves=halves,
    )


def mean_of(moments: Sequence[SecondMoment]) -> Float[Tensor, "key key"]:
    """The matrices' mean, weighted by tokens, where the first of them is."""
    total = torch.zeros_like(moments[0].matrix)
    tokens = sum(moment.tokens for moment in moments)
    for moment in moments:
        total.add_(moment.matrix.to(total.device), alpha=moment.tokens / tokens)
    return total


def gap_between(
    one: Float[Tensor, "key key"], other: Float[Tensor, "key key"], whole: Float[Tensor, "key key"]
) -> float:
    """‖C₁ - C₂‖ / ‖C‖ in the Frobenius norm."""
    return ((one - other).norm() / whole.norm()).item()


def _must_fit(first: SecondMoment, other: SecondMoment) -> None:
    """Statistics of one layer of one model."""
    names = [
        f"layer {m.layer} of {m.model} ({m.fingerprint[:16]}), {m.width} wide"
        for m in (first, other)
    ]
    if names[0] != names[1] or first.fingerprint != other.fingerprint:
        raise BadStats(f"cannot merge {names[0]} with {names[1]}; give files of one layer")


def _must_differ(moments: Sequence[SecondMoment]) -> None:
    """The same text twice would count double."""
    for i, one in enumerate(moments):
        for other in moments[i + 1 :]:
            alike = (one.corpus, one.tokens) == (other.corpus, other.tokens)
            if alike and torch.equal(one.matrix.cpu(), other.matrix.cpu()):
                raise BadStats(
                    f"the same statistics are given twice ({one.corpus}, {one.tokens:,} tokens); "
                    "give each file once"
                )


KIND = "factscope second moment"
VERSION = 1


def save_moment(moment: SecondMoment, path: Path, packed: bool = False) -> None:
    """Write the moment, whole or not at all; `packed` in a quarter of the space."""
    matrix = moment.matrix.detach().float().cpu()
    tensors = pack(matrix) if packed else {"matrix": matrix.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
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


SUFFIX = ".safetensors"
SHIPPED = Path(__file__).parent / "shipped"


def find_moment(lm: "LM", layer: int, given: Sequence[Path] = ()) -> SecondMoment | None:
    """The statistics of a model's layer, from the given files or folders or else from where they
    are kept; None where there are none.

    Files that were given and do not fit are an error: nothing else is taken in their place.
    """
    if given:
        return _from_given(lm, layer, list(_files(given)))
    cached = cached_path(lm, layer)
    for path in [*([cached] if cached.is_file() else []), *sorted(SHIPPED.glob(f"*{SUFFIX}"))]:
        if _fits(path, lm, layer):
            return _checked(path, lm, layer)
    return None


def layers_with_moments(lm: "LM") -> list[int]:
    """The layers whose statistics are kept here, without reading them."""
    shipped = sorted(SHIPPED.glob(f"*{SUFFIX}"))
    return [
        layer
        for layer in range(lm.n_layers)
        if any(
            path.is_file() and _fits(path, lm, layer) for path in [cached_path(lm, layer), *shipped]
        )
    ]


def cached_path(lm: "LM", layer: int) -> Path:
    """Where `factscope stats` keeps a layer's statistics."""
    return cache_folder() / "stats" / lm.fingerprint[:16] / file_name(layer)


def file_name(layer: int) -> str:
    """What a layer's file is called in a folder."""
    return f"layer-{layer:02}{SUFFIX}"


def _from_given(lm: "LM", layer: int, paths: Sequence[Path]) -> SecondMoment:
    """The first of the files that is of this model and layer."""
    for path in paths:
        if _fits(path, lm, layer):
            return _checked(path, lm, layer)
    if len(paths) == 1:
        load_moment(paths[0]).check(lm, layer)
    there = [f"{path.name}: layer {h['layer']} of {h['model']}" for path, h in _headers(paths)]
    raise BadStats(
        f"none of the given statistics is of layer {layer} of {lm.name} as loaded here "
        f"({'; '.join(there[:8]) or 'no files'}); make them with "
        f"`factscope stats --model {lm.name} --layer {layer}`"
    )


def _files(given: Sequence[Path]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            yield from sorted(path.glob(f"*{SUFFIX}"))
        else:
            yield path


def _headers(paths: Sequence[Path]) -> Iterator[tuple[Path, dict[str, str]]]:
    for path in paths:
        yield path, {"layer": "?", "model": "?", **read_header(path)}


def _fits(path: Path, lm: "LM", layer: int) -> bool:
    header = read_header(path)
    return (header.get("fingerprint"), header.get("layer")) == (lm.fingerprint, str(layer))


def _checked(path: Path, lm: "LM", layer: int) -> SecondMoment:
    moment = load_moment(path)
    moment.check(lm, layer)
    return moment
