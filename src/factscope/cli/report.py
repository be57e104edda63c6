"""factscope report: figures, tables and a page from the records of runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Json
from factscope.cli.show import doing, print_json, results
from factscope.errors import BadRecord, BadSetting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from factscope.report.tables import Table
    from factscope.runs.folder import RunFolder

__all__ = ["report", "summary_values", "tell_sweep"]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that factscope `trace`, `evaluate`, `sweep` or `train` wrote."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; RUN/report by default.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="default, or paper to pool tokens as the paper's notebook does.")
    ] = "default",
    cases: Annotated[
        str | None,
        typer.Option(help="Evaluations: the ids of the cases whose texts to show, as in 3,17."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw figures and write tables and a page; needs no model.

    Of one run of traces the average effects, of any number of evaluations the paper's table, of one
    sweep its points, of one training its looks at what was held out.
    """
    from factscope.runs.folder import RunFolder

    if preset not in ("default", "paper"):
        raise BadSetting(f"the preset {preset!r} is not known; choose from default, paper")
    folders = [RunFolder.open(run) for run in dict.fromkeys(runs)]
    kinds = {folder.command for folder in folders}
    if kinds == {"evaluate"}:
        if preset != "default":
            raise BadSetting("--preset is about traces; evaluations have one way to average")
        _evaluations(folders, out, cases, json)
    elif kinds == {"trace"} and len(folders) == 1:
        if cases is not None:
            raise BadSetting("--cases is about evaluations, and this is a run of traces")
        _traces(folders[0], out, paper=preset == "paper", json=json)
    elif kinds == {"sweep"} and len(folders) == 1:
        if cases is not None or preset != "default":
            raise BadSetting("--cases and --preset say nothing of a sweep; leave them out")
        tell_sweep(folders[0], out, json)
    elif kinds == {"train"} and len(folders) == 1:
        if cases is not None or preset != "default":
            raise BadSetting("--cases and --preset say nothing of a training; leave them out")
        _training(folders[0], out, json)
    else:
        said = ", ".join(f"{folder.path} ({folder.command})" for folder in folders)
        raise BadSetting(
            "give one run of traces, one sweep, one training, or evaluations only; "
            f"these are: {said}"
        )


def _traces(run: "RunFolder", out: Path | None, *, paper: bool, json: bool) -> None:
    """Average effects of one run."""
    from factscope.analysis.effects import average_kinds
    from factscope.report.tables import summary_table
    from factscope.report.traces import write_report

    pooling = "tokens" if paper else "facts"
    records = run.records()
    if not any(record.known for record in records):
        raise BadRecord(f"{run.path} has no fact that the model knows; there is nothing to average")
    folder = out or run.path / "report"
    title = f"Causal traces: {run.path.name}"
    with doing("drawing"):
        written = write_report(records, folder, title=title, pooling=pooling, paper_roles=paper)
    effects = average_kinds(records, pooling=pooling, paper_roles=paper)
    if json:
        print_json({"files": _words(written), "summary": _numbers(effects)})
    else:
        _show([summary_table(effects)], written)


def _evaluations(runs: "list[RunFolder]", out: Path | None, cases: str | None, json: bool) -> None:
    """The paper's table of all runs together."""
    from factscope.analysis.metrics import merge_runs, summaries
    from factscope.report.evaluations import evaluation_tables, write_evaluation_report
    from factscope.report.samples import samples_of, samples_text

    if out is None and len(runs) > 1:
        raise BadSetting("several runs have one report; say where with --out FOLDER")
    names = {run.path.name for run in runs}
    named = {run.path.name if len(names) == len(runs) else str(run.path): run for run in runs}
    records = merge_runs({name: run.case_records() for name, run in named.items()})
    if not records:
        raise BadRecord(f"{runs[0].path} has no records yet; there is nothing to average")
    chosen = [case.strip() for case in cases.split(",") if case.strip()] if cases else None
    folder = out or runs[0].path / "report"
    title = f"Evaluation: {', '.join(named)}"
    with doing("drawing"):
        found = summaries(records)
        written = write_evaluation_report(records, folder, title, cases=chosen, rows=found)
    if json:
        plain = [summary_values(summary) for summary in found]
        print_json({"files": _words(written), "summaries": plain})
        return
    texts = [samples_text(samples) for samples in samples_of(records, chosen)] if chosen else ()
    _show(evaluation_tables(found), written, texts)


def tell_sweep(run: "RunFolder", out: Path | None, json: bool) -> None:
    """A sweep's report, and its table."""
    from factscope.report.sweeps import sweep_table, sweep_values, write_sweep_report
    from factscope.runs.sweep import read_sweep

    sweep, folder = read_sweep(run.path), out or run.path / "report"
    with doing("drawing"):
        written = write_sweep_report(sweep, folder)
    if json:
        print_json({"sweep": str(run.path), "files": _words(written), **sweep_values(sweep)})
    else:
        _show([sweep_table(sweep)], written)


def _training(run: "RunFolder", out: Path | None, json: bool) -> None:
    """How a training went."""
    from factscope.analysis.training import TrainingCurve
    from factscope.report.training import looks_table, training_values, write_training_report

    course = TrainingCurve.of(run.spec(), run.training_records())
    folder = out or run.path / "report"
    with doing("drawing"):
        written = write_training_report(course, folder)
    if json:
        print_json({"training": str(run.path), "files": _words(written), **training_values(course)})
    else:
        _show([looks_table(course)], written)


def _words(written: "Sequence[Path]") -> list[str]:
    return [str(path) for path in written]


def _show(
    tables: "Sequence[Table]", written: "Sequence[Path]", more: "Sequence[Text]" = ()
) -> None:
    """The tables, and where the page is: the first of the files."""
    from factscope.report.tables import as_markdown

    for table in tables:
        results.print(as_markdown(table), soft_wrap=True)
    for text in more:
        results.print(text)
    results.print(f"{len(written)} files; open {written[0]}", soft_wrap=True)


def summary_values(summary: Any) -> dict[str, Any]:
    """A summary as plain values; what is not known is null."""
    import dataclasses

    metrics = {
        name: {
            "mean": value.mean,
            "half_width": value.half_width if value.half_width == value.half_width else None,
            "n": value.n,
        }
        for name, value in summary.metrics.items()
    }
    plain = {f.name: getattr(summary, f.name) for f in dataclasses.fields(summary)}
    return {**plain, "metrics": metrics}


def _numbers(effects: dict) -> dict:
    """The averages as plain numbers, by kind and role."""
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
