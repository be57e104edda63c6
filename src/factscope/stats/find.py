"""Where a layer's statistics are: given files, the user's cache, or what comes with factscope."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from factscope.errors import BadStats
from factscope.fetch import cache_folder
from factscope.stats.moment import SecondMoment
from factscope.stats.moment_file import load_moment, read_header

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["SUFFIX", "cached_path", "file_name", "layers_known", "moment_for"]

SUFFIX = ".safetensors"
SHIPPED = Path(__file__).parent / "shipped"


def moment_for(lm: "LM", layer: int, given: Sequence[Path] = ()) -> SecondMoment | None:
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


def layers_known(lm: "LM") -> list[int]:
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
