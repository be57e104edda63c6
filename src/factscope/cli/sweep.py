"""factscope sweep: one method on the same cases over a grid of settings."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli import edit_options as flags
from factscope.cli import evaluate_options as asked
from factscope.cli.edit_stats import each_with_statistics
from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.report import tell_sweep
from factscope.cli.show import notes, progress
from factscope.cli.stats import parse_layers
from factscope.errors import BadSetting, FactscopeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from factscope.analysis.sweep import Setting, SweepGrid
    from factscope.editing.editor import Editor
    from factscope.facts import Fact
    from factscope.lm.model import LM
    from factscope.runs.evaluate import EvaluateRun
    from factscope.runs.sweep import SweepPoint

__all__ = ["sweep"]

FLAGS = {
    "layer": "--layers",
    "token": "--tokens",
    "max_change": "--max-changes",
    "prefix_lengths": "--prefix-lengths",
}
"""Axis → the flag that gives its values."""


def _axis(text: str, flag: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="The grid")


def sweep(
    layers: Annotated[str | None, _axis("Layers: 0-29, or 0,5,9.", "--layers")] = None,
    tokens: Annotated[
        str | None,
        _axis("Where to write: subject-last, subject-first, after-subject, last.", "--tokens"),
    ] = None,
    bounds: Annotated[
        str | None, _axis("Bounds of fine-tuning: 1e-4,5e-4,none.", "--max-changes")
    ] = None,
    prefix_lengths: Annotated[
        str | None,
        _axis("Prefixes that the model writes: none;5x10,10x10;5x30,10x30.", "--prefix-lengths"),
    ] = None,
    data: asked.Data = "everyday",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The sweep's folder; it can be gone on with.")
    ] = None,
    limit: flags.Limit = None,
    protocol: asked.Protocol = "single",
    batch_size: asked.BatchSize = None,
    length: asked.Length = 0,
    seed: asked.Seed = 0,
    references: asked.References = None,
    on: asked.On = "here",
    ray_address: asked.RayAddress = None,
    workers: asked.Workers = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
    method: flags.MethodName = "rome",
    preset: flags.Preset = "default",
    stats: flags.Stats = None,
    no_stats: flags.NoStats = False,
    prefixes: flags.Prefixes = None,
    ridge: flags.Ridge = None,
    prefix_seed: asked.PrefixSeed = None,
    steps: flags.Steps = None,
    lr: flags.Rate = None,
    clamp: flags.Clamp = None,
    neurons: flags.Neurons = None,
    threshold: flags.Threshold = None,
    share: flags.Share = None,
    new_weight: flags.NewWeight = None,
    old_weight: flags.OldWeight = None,
) -> None:
    """Evaluate a method at every point of a grid: which layer, token, bound or prefixes?

    Every point is an evaluation in a folder of its own; the unedited model is asked once.
    """
    from factscope.runs.sweep import SweepRun

    if out is None:
        raise BadSetting("give --out FOLDER: every point is kept there, and it goes on from there")
    asked.check_protocol(protocol, batch_size)
    worker = asked.Worker(on=on, device=device, address=ray_address, workers=workers)
    grid = grid_of(layers, tokens, bounds, prefix_lengths)
    if prefixes is not None and "prefix_lengths" in grid:
        raise BadSetting("give --prefixes FILE or --prefix-lengths, not both")
    editor = asked.editor_from(
        method, preset, stats=stats, no_stats=no_stats, prefixes=prefixes, prefix_lengths=None,
        prefix_seed=prefix_seed, steps=steps, lr=lr, clamp=clamp, ridge=ridge,
        **flags.neurons_of(neurons, threshold, share, new_weight, old_weight),
    )  # fmt: skip
    _check_axes(method, editor, grid)
    row = asked.row_name(editor, method, preset)
    base = asked.run_from(
        editor, row, model=model, dtype=dtype, data=data, limit=limit,
        protocol=protocol, batch_size=batch_size, length=length, seed=seed, references=references,
    )  # fmt: skip
    settings, runs = _runs(base, grid, preset)
    file = base.read()
    for problem in file.problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    lm = worker.load(model, dtype, device_map)
    swept = SweepRun(base=base, grid=grid)
    folder = swept.begin(lm, out)
    points = _points(lm, settings, runs, [case.fact for case in file.cases])
    with progress(f"{len(points)} points: cases", len(points) * len(file.cases)) as done:
        swept.go_on(
            lm, folder, points, file.cases, crews=lambda run: worker.crew(lm, run), progress=done
        )
    tell_sweep(folder, None, json)


def _points(
    lm: "LM",
    settings: "Sequence[Mapping[str, Setting]]",
    runs: "Sequence[EvaluateRun]",
    facts: "Sequence[Fact]",
) -> "list[SweepPoint]":
    """The grid's points, each with statistics for its editor, or with why there are none."""
    from factscope.runs.sweep import SweepPoint

    ready = each_with_statistics(lm, [run.editor for run in runs], facts)
    return [
        SweepPoint(
            settings=where,
            run=made if isinstance(made, FactscopeError) else replace(run, editor=made),
        )
        for where, run, made in zip(settings, runs, ready, strict=True)
    ]


def grid_of(
    layers: str | None, tokens: str | None, bounds: str | None, prefix_lengths: str | None
) -> "SweepGrid":
    """The axes of the flags, each with its values as they were said, none of them twice."""
    from factscope.editing.contexts import parse_lengths

    grid: dict[str, list[Setting]] = {}
    if layers is not None:
        grid["layer"] = list(parse_layers([layers]))
    if tokens is not None:
        grid["token"] = [token.strip() for token in tokens.split(",") if token.strip()]
        for token in grid["token"]:
            flags.check_token(str(token), "--tokens")
    if bounds is not None:
        grid["max_change"] = [_bound(word.strip()) for word in bounds.split(",") if word.strip()]
    if prefix_lengths is not None:
        groups = [word.strip() for word in prefix_lengths.split(";") if word.strip()]
        grid["prefix_lengths"] = [_lengths(parse_lengths(group)) for group in groups]
    if not grid:
        raise BadSetting(f"a sweep needs a grid; give at least one of {', '.join(FLAGS.values())}")
    for axis, values in grid.items():
        if not values:
            raise BadSetting(f"{FLAGS[axis]} names nothing to try")
    return {axis: list(dict.fromkeys(values)) for axis, values in grid.items()}


def _bound(word: str) -> "Setting":
    from factscope.analysis.sweep import NO_BOUND

    if word == NO_BOUND:
        return word
    try:
        return float(word)
    except ValueError as error:
        raise BadSetting(f"the bound {word!r} is no number; write 5e-4, or none") from error


def _lengths(lengths: "tuple[tuple[int, int], ...]") -> str:
    return ",".join(f"{tokens}x{count}" for tokens, count in lengths) or "none"


def _check_axes(method: str, editor: "Editor", grid: "SweepGrid") -> None:
    """Every axis must be a setting that the method has."""
    known = {field.name for field in fields(editor)}  # pyright: ignore[reportArgumentType]
    for axis in grid:
        if axis in known:
            continue
        more = ""
        if axis == "layer" and "layers" in known:
            more = f": {method} spreads over several layers at once, which `evaluate --layer` says"
        raise BadSetting(
            f"{method} has no {FLAGS[axis]}{more}; leave it out, or choose another --method"
        )


def _runs(
    base: "EvaluateRun", grid: "SweepGrid", preset: str
) -> "tuple[list[dict[str, Setting]], list[EvaluateRun]]":
    """Every point's settings and its evaluation: the one that `factscope evaluate` would make."""
    from factscope.analysis.sweep import grid_points

    settings = grid_points(grid)
    editors = [_editor(base.editor, where) for where in settings]
    return settings, [
        replace(base, editor=made, method=asked.row_name(made, made.method, preset))
        for made in editors
    ]


def _editor(editor: Any, settings: "Mapping[str, Setting]") -> Any:
    """The editor at a point; FT with a bound is FT+L, and FT+L without one is FT."""
    from factscope.analysis.sweep import NO_BOUND
    from factscope.editing.contexts import parse_lengths

    said: dict[str, Any] = dict(settings)
    if said.get("max_change") == NO_BOUND:
        said["max_change"] = None
    if "prefix_lengths" in said:
        said["prefix_lengths"] = parse_lengths(said["prefix_lengths"])
    return replace(editor, **said)
