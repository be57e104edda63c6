"""factscope report: figures, tables and a page from the records of runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Group

from factscope.cli.flags import Command, Options
from factscope.cli.output import doing
from factscope.errors import BadRecord, BadSetting
from factscope.io import check_output_folder
from factscope.runs.folder import RunFolder
from factscope.settings import Flag

if TYPE_CHECKING:
    from rich.text import Text

    from factscope.analysis.effects import AverageEffects
    from factscope.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    runs: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Run folders, written by `factscope trace`, `evaluate`, `sweep`, `calibrate` or `train`."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Folder to write to; RUN/report if not given."""
    preset: Literal["default", "paper"] = "default"
    """Traces: paper pools tokens as the paper's notebook does."""
    normalised: bool = False
    """Traces: show effects as fractions of the average total effect, and single facts on a scale
    from 0, the corrupted run, to 1, the clean run."""
    cases: str | None = None
    """Evaluations: ids of the cases whose texts to show, e.g. 3,17."""
    traces: Path | None = None
    """Sweep over layers: run folder of traces of the same facts. Compares the trace effect with the
    edit success at each layer."""


ABOUT = {
    "preset": ("trace", "traces"),
    "normalised": ("trace", "traces"),
    "cases": ("evaluate", "evaluations"),
    "traces": ("sweep", "one sweep over layers"),
}
"""Flag → the only command whose runs it applies to, and these runs in messages."""


@Command
def report(options: ReportOptions) -> None:
    """Draw figures and write tables and a page. Needs no model.

    One run of traces gives average effects, one or more evaluations give the paper's table, a sweep
    gives the scores of its points, a calibration its trials, a training run its losses.
    """
    folders = [RunFolder.open(run) for run in dict.fromkeys(options.runs)]
    commands = {folder.command for folder in folders}
    check_output_folder(options.out or folders[0].path / "report")
    for flag, (command, runs) in ABOUT.items():
        if getattr(options, flag) not in (None, False, "default") and commands != {command}:
            raise BadSetting(f"--{flag} is about {runs}; leave it out for other runs")
    if commands == {"evaluate"}:
        _evaluations(folders, options)
        return
    if len(folders) > 1:
        given = ", ".join(f"{folder.path} ({folder.command})" for folder in folders)
        raise BadSetting(
            f"give one run of traces, one sweep, one training, or evaluations only; "
            f"these are {given}"
        )
    [folder], [command] = folders, commands
    if command == "sweep":
        print_sweep(folder, options, options.out, options.traces)
    else:
        {"trace": _traces, "calibrate": _calibration}.get(command, _training)(folder, options)


def _traces(run: RunFolder, options: ReportOptions) -> None:
    """Report the average effects of one run."""
    from factscope.analysis.effects import average_kinds, normalised_run
    from factscope.report.tables import as_rows, summary_table
    from factscope.report.traces import run_sections, write_trace_report

    paper = options.preset == "paper"
    averaging: Any = {"pooling": "tokens" if paper else "facts", "paper_roles": paper}
    records = run.trace_records()
    if not any(record.known for record in records):
        raise BadRecord(f"{run.path} has no fact that the model knows; there is nothing to average")
    folder, title = options.out or run.path / "report", f"Causal traces: {run.path.name}"
    with doing("drawing"):
        files = write_trace_report(
            records, folder, title=title, normalise=options.normalised, **averaging
        )
    if options.normalised:
        records = normalised_run(records)
    effects = average_kinds(records, **averaging)
    sections = list(run_sections(records))
    values = {
        "summary": {kind: _effect_values(average) for kind, average in effects.items()},
        **{section.name: as_rows(section.full) for section in sections},
    }
    tables = [summary_table(effects)] if effects else []
    tables += [table for section in sections for table in section.tables]
    _print(options, files, values, tables)


def _effect_values(effects: "AverageEffects") -> dict[str, Any]:
    """Average effects as JSON values, by role."""
    peaks = {role: effects.peak(role) for role in effects.roles if effects.measured(role)}
    return {
        "facts": effects.facts,
        "skipped": effects.skipped,
        "average_total_effect": effects.total.mean,
        "peaks": {
            role: {"layer": layer, "effect": peak.mean, "half_width": peak.half_width}
            for role, (layer, peak) in peaks.items()
        },
    }


def _evaluations(runs: list[RunFolder], options: ReportOptions) -> None:
    """Report all runs in the paper's table."""
    from factscope.analysis.estimate import to_dict
    from factscope.analysis.metrics import merge_runs, summarize
    from factscope.report import evaluations

    if options.out is None and len(runs) > 1:
        raise BadSetting("give --out FOLDER: several runs share one report")
    names = {run.path.name for run in runs}
    named = {run.path.name if len(names) == len(runs) else str(run.path): run for run in runs}
    records = merge_runs({name: run.case_records() for name, run in named.items()})
    if not records:
        raise BadRecord(f"{runs[0].path} has no records yet; there is nothing to average")
    chosen = [case.strip() for case in (options.cases or "").split(",") if case.strip()] or None
    folder, title = options.out or runs[0].path / "report", f"Evaluation: {', '.join(named)}"
    with doing("drawing"):
        summaries = summarize(records)
        files = evaluations.write_evaluation_report(
            records, folder, title, cases=chosen, rows=summaries
        )
    values = {"summaries": [to_dict(summary) for summary in summaries]}
    tables = evaluations.evaluation_tables(summaries)
    samples = evaluations.collect_samples(records, chosen) if chosen else ()
    _print(options, files, values, tables, map(evaluations.samples_text, samples))


def print_sweep(
    run: RunFolder, options: Options, out: Path | None = None, traces: Path | None = None
) -> None:
    """Write the report of a sweep, and print its table; with traces, their relation too."""
    from factscope.analysis.localization import localizations
    from factscope.report.comparisons import localization_table, localization_to_dict
    from factscope.report.sweeps import sweep_table, sweep_to_dict, write_sweep_report
    from factscope.runs.sweep import read_sweep, records_by_layer

    sweep, relations = read_sweep(run.path), []
    if traces is not None:
        folder = RunFolder.open(traces)
        if folder.command != "trace":
            raise BadSetting(f"--traces is {traces}, a run of {folder.command}; give one of trace")
        relations = localizations(folder.trace_records(), records_by_layer(run.path))
    with doing("drawing"):
        files = write_sweep_report(sweep, out or run.path / "report", relations)
    values = {"sweep": run.path, **sweep_to_dict(sweep)}
    tables = [sweep_table(sweep)]
    if relations:
        values["localization"] = localization_to_dict(relations)
        tables.append(localization_table(relations))
    _print(options, files, values, tables)


def _calibration(run: RunFolder, options: ReportOptions) -> None:
    """Report the trials and the result of a calibration."""
    from factscope.editing.calibration import load_calibration
    from factscope.report.calibrations import (
        calibration_table,
        trials_table,
        write_calibration_report,
    )

    calibration = load_calibration(run.path / "calibration.json")
    with doing("drawing"):
        files = write_calibration_report(calibration, options.out or run.path / "report")
    values = {
        "calibration": run.path, "settings": calibration.settings, "evidence": calibration.evidence
    }  # fmt: skip
    _print(options, files, values, [calibration_table(calibration), trials_table(calibration)])


def _training(run: RunFolder, options: ReportOptions) -> None:
    """Report the losses of a training run."""
    from factscope.report import training

    curve = training.TrainingCurve.of(run.spec(), run.training_records())
    with doing("drawing"):
        files = training.write_training_report(curve, options.out or run.path / "report")
    values = {"training": run.path, **training.training_to_dict(curve)}
    _print(options, files, values, [training.training_table(curve)])


def _print(
    options: Options,
    files: list[Path],
    values: dict[str, Any],
    tables: "Iterable[Table]",
    texts: "Iterable[Text]" = (),
) -> None:
    """Print the values as JSON; or the tables, the texts and the page, which is the first file."""
    from factscope.report.tables import as_markdown

    # In a group, the texts are wrapped at the width of the terminal.
    lines = (*map(as_markdown, tables), *map(Group, texts))
    page = f"{len(files)} files; open {files[0]}"
    options.print_result({"files": files, **values}, *lines, page)
