"""factscope report: figures, tables and a page from the records of runs."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from factscope.cli.flags import Command, Options
from factscope.cli.output import doing, print_json, results, say
from factscope.errors import BadRecord, BadSetting
from factscope.settings import Flag

if TYPE_CHECKING:
    from rich.text import Text

    from factscope.report.tables import Table
    from factscope.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options."""

    runs: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Run folders, written by `factscope trace`, `evaluate`, `sweep` or `train`."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Folder to write to; RUN/report if not given."""
    preset: Literal["default", "paper"] = "default"
    """Traces: paper pools tokens as the paper's notebook does."""
    cases: str | None = None
    """Evaluations: ids of the cases whose texts to show, e.g. 3,17."""


def report(options: ReportOptions) -> None:
    """Draw figures and write tables and a page. Needs no model.

    One run of traces gives average effects, one or more evaluations give the paper's table, a sweep
    gives the scores of its points, a training run gives its losses.
    """
    from factscope.runs.folder import RunFolder

    folders = [RunFolder.open(run) for run in dict.fromkeys(options.runs)]
    commands = {folder.command for folder in folders}
    paper = options.preset == "paper"
    if commands == {"evaluate"}:
        if paper:
            raise BadSetting("--preset is about traces; leave it out for evaluations")
        _evaluations(folders, options)
        return
    if len(folders) > 1 or len(commands) > 1:
        given = ", ".join(f"{folder.path} ({folder.command})" for folder in folders)
        raise BadSetting(
            f"give one run of traces, one sweep, one training, or evaluations only; "
            f"these are {given}"
        )
    [folder] = folders
    if folder.command == "trace":
        if options.cases is not None:
            raise BadSetting("--cases is about evaluations; leave it out for traces")
        _traces(folder, options)
        return
    if options.cases is not None or paper:
        what = "sweep" if folder.command == "sweep" else "training"
        raise BadSetting(f"--cases and --preset do not apply to a {what}; leave them out")
    if folder.command == "sweep":
        print_sweep(folder, options.out, options.json)
    else:
        _training(folder, options)


REPORT = Command(run=report, base=lambda given: ReportOptions)


def _traces(run: "RunFolder", options: ReportOptions) -> None:
    """Report the average effects of one run."""
    from factscope.analysis.effects import average_kinds
    from factscope.report.tables import summary_table
    from factscope.report.traces import write_trace_report

    paper = options.preset == "paper"
    averaging: Any = {"pooling": "tokens" if paper else "facts", "paper_roles": paper}
    records = run.trace_records()
    if not any(record.known for record in records):
        raise BadRecord(f"{run.path} has no fact that the model knows; there is nothing to average")
    folder, title = options.out or run.path / "report", f"Causal traces: {run.path.name}"
    with doing("drawing"):
        written = write_trace_report(records, folder, title=title, **averaging)
    effects = average_kinds(records, **averaging)
    if options.json:
        print_json({"files": _files(written), "summary": _effect_values(effects)})
    else:
        _show([summary_table(effects)], written)


def _evaluations(runs: "list[RunFolder]", options: ReportOptions) -> None:
    """Report all runs in the paper's table."""
    from factscope.analysis.metrics import merge_runs, summarize
    from factscope.report.evaluations import evaluation_tables, write_evaluation_report
    from factscope.report.samples import collect_samples, samples_text

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
        written = write_evaluation_report(records, folder, title, cases=chosen, rows=summaries)
    if options.json:
        rows = [summary_values(summary) for summary in summaries]
        print_json({"files": _files(written), "summaries": rows})
        return
    texts = (
        [samples_text(samples) for samples in collect_samples(records, chosen)] if chosen else ()
    )
    _show(evaluation_tables(summaries), written, texts)


def print_sweep(run: "RunFolder", out: Path | None, json: bool) -> None:
    """Write the report of a sweep, and print its table."""
    from factscope.report.sweeps import sweep_table, sweep_to_dict, write_sweep_report
    from factscope.runs.sweep import read_sweep

    sweep = read_sweep(run.path)
    with doing("drawing"):
        written = write_sweep_report(sweep, out or run.path / "report")
    if json:
        print_json({"sweep": str(run.path), "files": _files(written), **sweep_to_dict(sweep)})
    else:
        _show([sweep_table(sweep)], written)


def _training(run: "RunFolder", options: ReportOptions) -> None:
    """Report the losses of a training run."""
    from factscope.analysis.training import TrainingCurve
    from factscope.report.training import training_table, training_to_dict, write_training_report

    curve = TrainingCurve.of(run.spec(), run.training_records())
    with doing("drawing"):
        written = write_training_report(curve, options.out or run.path / "report")
    if options.json:
        print_json({"training": str(run.path), "files": _files(written), **training_to_dict(curve)})
    else:
        _show([training_table(curve)], written)


def _files(written: Sequence[Path]) -> list[str]:
    return [str(path) for path in written]


def _show(tables: "Sequence[Table]", written: Sequence[Path], more: "Sequence[Text]" = ()) -> None:
    """Print the tables and the path of the page, which is the first file."""
    from factscope.report.tables import as_markdown

    for table in tables:
        say(as_markdown(table))
    for text in more:
        results.print(text)
    say(f"{len(written)} files; open {written[0]}")


def summary_values(summary: Any) -> dict[str, Any]:
    """A summary as JSON values; NaN becomes null."""
    metrics = {
        name: {
            "mean": value.mean,
            "half_width": value.half_width if value.half_width == value.half_width else None,
            "n": value.n,
        }
        for name, value in summary.metrics.items()
    }
    values = {field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)}
    return {**values, "metrics": metrics}


def _effect_values(effects: dict[str, Any]) -> dict[str, Any]:
    """Average effects as JSON values, by kind and role."""
    return {
        kind: {
            "facts": e.facts,
            "skipped": e.skipped,
            "average_total_effect": e.total.mean,
            "peaks": {
                role: {"layer": layer, "effect": peak.mean, "half_width": peak.half_width}
                for role in e.roles
                if e.measured(role)
                for layer, peak in [e.peak(role)]
            },
        }
        for kind, e in effects.items()
    }
