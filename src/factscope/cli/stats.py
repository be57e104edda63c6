"""factscope stats: second moments of a layer's keys, which edits divide by."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.group import DefaultGroup
from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, results, working
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.lm.model import LM
    from factscope.stats.second_moment import SecondMoment

__all__ = ["stats"]

HELP = "Second moments of a layer's keys: what an edit must know to disturb little else."
ENOUGH = 10
"""Tokens for each entry of a key below which C is hardly an estimate."""

stats = typer.Typer(cls=DefaultGroup, help=HELP, no_args_is_help=True)

Layers = Annotated[
    list[str], typer.Option("--layer", "-l", help="A layer, or several as 5-9; repeatable.")
]
TextFile = Annotated[
    Path | None, typer.Option(help="Text file, also .gz; a blank line parts two articles.")
]
DataSetName = Annotated[
    str | None,
    typer.Option(help="Hugging Face data set, as NAME,CONFIG:SPLIT#COLUMN; needs `datasets`."),
]
Tokens = Annotated[int, typer.Option(help="How many tokens to read.", min=1)]
WindowLength = Annotated[int | None, typer.Option(help="Tokens in a window; 256 if not given.")]
Rows = Annotated[int | None, typer.Option(help="Windows in a batch.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the order of articles, or of the model's text.")]
Until = Annotated[
    float | None, typer.Option(help="Stop when two halves of the text differ by less, as 0.05.")
]
Shard = Annotated[str, typer.Option(help="Take one part of the windows, as 1/4; merge later.")]
Packed = Annotated[
    bool, typer.Option("--half-precision", help="Half precision, a quarter of the size.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Folder, or .safetensors file; the user's cache if not given."
    ),
]
FigureFile = Annotated[
    Path | None, typer.Option(help="Draw the convergence (.png .svg .pdf) into this file.")
]
Files = Annotated[list[Path], typer.Argument(help="Files that `factscope stats` made.")]


@stats.command("collect")
def collect(
    layer: Layers,
    text: TextFile = None,
    dataset: DataSetName = None,
    tokens: Tokens = 100_000,
    seq_length: WindowLength = None,
    batch_size: Rows = None,
    seed: Seed = 0,
    convergence: Until = None,
    shard: Shard = "1/1",
    half_precision: Packed = False,
    out: Out = None,
    figure: FigureFile = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Collect the second moments of some layers; "collect" can be left out."""
    from factscope.lm.load import load
    from factscope.stats.covariance import collect as collect_moments
    from factscope.stats.settings import StatsSettings
    from factscope.stats.text import open_text

    layers = parse_layers(layer)
    settings = StatsSettings(
        tokens=tokens, seq_length=seq_length, batch_size=batch_size, seed=seed,
        convergence=convergence, shard=shard, half_precision=half_precision,
    )  # fmt: skip
    _check_files(text, dataset, out, figure, layers)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    if text is None and dataset is None:
        notes.print(
            f"No --text and no --dataset: {lm.name} generates its own text, which is less varied "
            "than human text.",
            soft_wrap=True,
        )
    sequences, corpus = open_text(lm, settings, text, dataset)
    paths = _paths(lm, layers, out, (settings.shard_index, settings.n_shards))
    partial = paths[0].with_name(paths[0].name + ".partial")
    with working("collecting") as done:
        moments = collect_moments(
            lm, layers, sequences, settings, corpus=corpus, partial=partial, progress=done
        )
    _save(moments, paths, half_precision)
    partial.unlink(missing_ok=True)
    if figure is not None:
        _draw(moments, figure)
    _warn(moments[0], tokens // settings.n_shards, convergence)
    _tell(list(zip(paths, moments, strict=True)), json)
    if not json and settings.n_shards > 1:
        results.print("Next, when all shards are there: factscope stats merge FILES -o FILE")


@stats.command("merge")
def merge(
    files: Files,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the merged file goes.")],
    half_precision: Packed = False,
    json: Json = False,
) -> None:
    """Merge the files of one layer, such as those of shards, weighted by their tokens."""
    from factscope.stats.second_moment import (
        load_second_moment,
        merge_second_moments,
        save_second_moment,
    )

    _check_suffix(out)
    merged = merge_second_moments([load_second_moment(file) for file in files])
    save_second_moment(merged, out, half_precision)
    _tell([(out, merged)], json)


@stats.command("show")
def show(files: Files, figure: FigureFile = None, json: Json = False) -> None:
    """Say what statistics files hold."""
    from factscope.stats.second_moment import load_second_moment

    moments = [load_second_moment(file) for file in files]
    if figure is not None:
        _check_figure(figure)
        _draw(moments, figure)
    _tell(list(zip(files, moments, strict=True)), json)


# ---- what was asked for


def parse_layers(words: Sequence[str]) -> list[int]:
    """The layers of words such as 5, 5-9 and 5,7."""
    layers: list[int] = []
    for word in ",".join(words).split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", word)
        if found is None:
            raise BadSetting(f"the layer {word!r} is no number; write 5, or 5-9 for several")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise BadSetting(f"the layers {word!r} run backwards; write {last}-{first}")
        layers += range(first, last + 1)
    return sorted(set(layers))


def _check_files(
    text: Path | None, dataset: str | None, out: Path | None, figure: Path | None, layers: list[int]
) -> None:
    """Refuse what cannot work before the model is loaded."""
    if text is not None and dataset is not None:
        raise BadSetting("--text and --dataset: give one of them")
    if text is not None and not text.is_file():
        raise BadSetting(f"there is no text file {text}")
    if out is not None and out.suffix and not out.is_dir():
        _check_suffix(out)
        if len(layers) > 1:
            raise BadSetting(f"{len(layers)} layers do not go into one file {out}; give a folder")
    if figure is not None:
        _check_figure(figure)


def _check_suffix(out: Path) -> None:
    from factscope.stats.second_moment import SUFFIX

    if out.suffix != SUFFIX:
        raise BadSetting(f"cannot write statistics as {out.name!r}; the suffix is {SUFFIX}")


def _check_figure(figure: Path) -> None:
    from factscope.report.style import FIGURE_FORMATS

    if figure.suffix.lstrip(".").lower() not in FIGURE_FORMATS:
        known = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise BadSetting(f"cannot write a figure as {figure.name!r}; the suffix can be {known}")


def _paths(lm: "LM", layers: Sequence[int], out: Path | None, shard: tuple[int, int]) -> list[Path]:
    """Where each layer's file goes."""
    from factscope.stats.second_moment import SUFFIX, cached_path, file_name

    if out is not None and out.suffix == SUFFIX and not out.is_dir():
        return [out]
    paths = [cached_path(lm, n) if out is None else out / file_name(n) for n in layers]
    if shard[1] == 1:
        return paths
    return [p.with_stem(f"{p.stem}-shard-{shard[0] + 1}-of-{shard[1]}") for p in paths]


# ---- what came out


def _save(moments: "Sequence[SecondMoment]", paths: Sequence[Path], packed: bool) -> None:
    from factscope.stats.second_moment import save_second_moment

    for moment, path in zip(moments, paths, strict=True):
        save_second_moment(moment, path, packed)


def _draw(moments: "Sequence[SecondMoment]", figure: Path) -> None:
    from factscope.report.figures.training import convergence_figure
    from factscope.report.style import save_figure

    histories = {moment.layer: moment.convergence_history for moment in moments}
    save_figure(convergence_figure(histories, moments[0].model), figure)


def _warn(moment: "SecondMoment", asked: int, until: float | None) -> None:
    if moment.tokens < asked and until is None:
        notes.print(f"The text has only {moment.tokens:,} tokens.")
    if moment.tokens < ENOUGH * moment.width:
        notes.print(
            f"{moment.tokens:,} tokens are few for keys {moment.width:,} wide: an edit will need "
            f"a ridge. Better are {ENOUGH * moment.width:,} or more.",
            soft_wrap=True,
        )


def _tell(found: "Sequence[tuple[Path, SecondMoment]]", json: bool) -> None:
    if json:
        print_json([_facts(path, moment) for path, moment in found])
        return
    for path, moment in found:
        difference = moment.split_half_difference
        shown = "not measured" if difference is None else f"{difference:.3f}"
        results.print(
            f"{path}\n  layer {moment.layer} of {moment.model}, {moment.width:,} wide, "
            f"{moment.tokens:,} tokens, split-half difference {shown}\n  {moment.corpus}",
            soft_wrap=True,
        )


def _facts(path: Path, moment: "SecondMoment") -> dict[str, Any]:
    return {
        "file": str(path), "layer": moment.layer, "model": moment.model,
        "fingerprint": moment.fingerprint, "width": moment.width, "tokens": moment.tokens,
        "corpus": moment.corpus, "split_half_difference": moment.split_half_difference,
        "convergence_history": moment.convergence_history,
    }  # fmt: skip
