"""Runs: tables, figures and generated texts of the runs in a folder. No torch.

The run name in a request is looked up in the list of runs; it never becomes a path.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from factscope.analysis.effects import average_kinds
from factscope.analysis.metrics import Summary, merge_runs, summarize
from factscope.errors import BadRecord, BadSetting, FactscopeError, NotFound
from factscope.records import CaseRecord, TraceRecord
from factscope.report.evaluations import by_model_and_data, collect_samples, evaluation_tables
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    distributions_figure,
    scores_figure,
    sweep_figure,
)
from factscope.report.labels import printable
from factscope.report.style import figure_bytes
from factscope.report.sweeps import sweep_table
from factscope.report.tables import (
    Table,
    cell_mark,
    cell_text,
    effects_table,
    is_text_column,
    summary_table,
)
from factscope.runs.folder import RunFolder
from factscope.runs.sweep import read_sweep

MAX_RUNS = 200
"""Runs in the list."""
MAX_DEPTH = 2
"""Folder levels that are searched for runs."""
MAX_BYTES = 2**28
"""Largest records file that is read."""
MAX_COMPARED = 12
"""Runs in one request."""
CACHE_SIZE = 4
"""Runs whose records, and comparisons whose summaries, are cached."""

RunNames = Annotated[list[str], Query(max_length=64)]
Stamp = tuple[str, int, int]
"""A run's name, and the modification time and size of its records: changes with the records."""


class RunLibrary:
    """The runs in a folder. Records and summaries are cached until the records change."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._records = lru_cache(CACHE_SIZE)(self._read)
        self._summaries = lru_cache(CACHE_SIZE)(self._summarize)

    def all(self) -> dict[str, RunFolder]:
        """All runs by name, which is the path within the folder."""
        if self._folder is None:
            return {}
        root = self._folder.resolve()
        runs: dict[str, RunFolder] = {}
        for depth in range(1, MAX_DEPTH + 1):
            for spec in sorted(root.glob("*/" * depth + "spec.toml")):
                path = spec.parent
                inside = path.resolve().is_relative_to(root)  # a symbolic link may lead outside
                if inside and path.parent.name != "points" and len(runs) < MAX_RUNS:
                    runs[path.relative_to(root).as_posix()] = RunFolder(path)
        return runs

    def find(self, names: Sequence[str], *commands: str) -> dict[str, RunFolder]:
        """The runs with these names; an error if one is not a run of these commands."""
        runs = self.all()
        if missing := [name for name in names if name not in runs]:
            known = ", ".join(list(runs)[:10]) or "none"
            raise NotFound(f"there is no run {missing[0][:80]!r}; the runs are: {known}")
        if not 0 < len(names) <= MAX_COMPARED:
            raise BadSetting(f"{len(names)} runs are given; give 1 to {MAX_COMPARED}")
        selected = {name: runs[name] for name in names}
        for name, run in selected.items():
            if run.command not in commands:
                raise BadSetting(
                    f"{name!r} is a run of {run.command}; choose a run of {' or '.join(commands)}"
                )
        return selected

    def cases(self, names: Sequence[str]) -> list[CaseRecord]:
        """The cases of several evaluations."""
        runs = self.find(names, "evaluate")
        records = merge_runs({name: self._records(stamp(name, runs[name])) for name in runs})
        if not records:
            raise BadRecord(f"the run {names[0]!r} has no records yet; try again later")
        return records

    def summaries(self, names: Sequence[str]) -> list[Summary]:
        """The metrics of several evaluations; thousands of generated texts take seconds."""
        runs = self.find(names, "evaluate")
        return self._summaries(tuple(stamp(name, run) for name, run in runs.items()))

    def traces(self, name: str) -> list[TraceRecord]:
        """The traces of one run."""
        records = self._records(stamp(name, self.find([name], "trace")[name]))
        if not any(record.known for record in records):
            raise BadRecord(f"the run {name!r} has no traces of known facts; choose another")
        return records

    def _read(self, stamp: Stamp) -> list[Any]:
        name, _, size = stamp
        if size > MAX_BYTES:
            raise BadRecord(
                f"the records of {name!r} have {size:,} bytes, too many for the page; use "
                "`factscope report`"
            )
        run = self.all()[name]
        return run.case_records() if run.command == "evaluate" else run.trace_records()

    def _summarize(self, stamps: tuple[Stamp, ...]) -> list[Summary]:
        return summarize(self.cases([name for name, _, _ in stamps]))


def stamp(name: str, run: RunFolder) -> Stamp:
    """The cache key of a run's records."""
    if not run.records_path.is_file():
        return name, 0, 0
    status = run.records_path.stat()
    return name, status.st_mtime_ns, status.st_size


def run_routes(folder: Path | None, lock: threading.Lock) -> APIRouter:
    """Routes of runs. Records are read and figures drawn while the lock is held."""
    routes = APIRouter(prefix="/api", tags=["compare"])
    runs = RunLibrary(folder)

    @routes.get("/runs")
    def list_runs() -> dict[str, Any]:
        """The runs in the folder."""
        return {"runs": [run_to_dict(name, folder) for name, folder in runs.all().items()]}

    @routes.get("/tables")
    def tables(run: RunNames) -> dict[str, Any]:
        """The tables of one run or of several evaluations, and the names of their figures."""
        with lock:
            return tables_and_figures(runs, run)

    @routes.get("/figures/{name}", response_class=Response)
    def figure(name: str, run: RunNames) -> Response:
        """A figure of the runs as SVG."""
        with lock:
            content = draw_figure(runs, run, name)
        return Response(content, media_type="image/svg+xml", headers={"cache-control": "no-store"})

    @routes.get("/cases")
    def cases(run: RunNames) -> dict[str, Any]:
        """The cases with generated texts."""
        with lock:
            found = collect_samples(runs.cases(run), count=10_000)
        return {
            "cases": [
                {
                    "id": sample.fact.id,
                    "text": printable(sample.fact.text),
                    "true": sample.true,
                    "new": sample.fact.target,
                }
                for sample in found
                if sample.fact.id is not None
            ]
        }

    @routes.get("/samples")
    def samples(run: RunNames, case: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
        """The texts of a case before the edit and after each method, in highlighted segments."""
        with lock:
            found = collect_samples(runs.cases(run), [case])
        return {
            "samples": [
                {
                    "text": sample.fact.text,
                    "subject": sample.fact.subject_span,
                    "true": sample.true,
                    "new": sample.fact.target,
                    "model": sample.model,
                    "rows": sample.highlighted_rows(),
                }
                for sample in found
            ]
        }

    return routes


def run_to_dict(name: str, run: RunFolder) -> dict[str, Any]:
    """A run in the list; a run that cannot be read has an error."""
    try:
        spec = run.spec()
    except (FactscopeError, OSError) as error:
        return {"name": name, "error": printable(str(error))}
    settings = {key: spec.get(key) for key in ("model", "method", "data", "protocol", "limit")}
    return {"name": name, "command": run.command, **settings, "bytes": stamp(name, run)[2]}


def tables_and_figures(runs: RunLibrary, names: Sequence[str]) -> dict[str, Any]:
    """The tables of runs, and the names of their figures."""
    run = runs.find(names, "trace", "evaluate", "sweep")[names[0]]
    command = run.command
    if command != "evaluate" and len(names) > 1:
        raise BadSetting(f"only evaluations can be compared; choose one run of {command}")
    if command == "evaluate":
        rows = runs.summaries(names)
        tables = evaluation_tables(rows)
        scores = [f"scores-{i}" for i in range(len(by_model_and_data(rows)))]
        figures = [*scores, "distributions"]
    elif command == "sweep":
        tables, figures = [sweep_table(read_sweep(run.path))], ["sweep"]
    else:
        averages = average_kinds(runs.traces(names[0]))
        tables = [summary_table(averages), effects_table(averages)]
        figures = ["heatmaps", "lines"]
    return {"command": command, "tables": [table_to_dict(t) for t in tables], "figures": figures}


def draw_figure(runs: RunLibrary, names: Sequence[str], name: str) -> bytes:
    """A figure of `tables_and_figures` as SVG."""
    figure = None
    kind, _, number = name.partition("-")
    if kind == "scores" and number.isdecimal() and len(number) < 4:
        groups = by_model_and_data(runs.summaries(names))
        if int(number) < len(groups):
            figure = scores_figure(groups[int(number)])
    elif name == "distributions":
        figure = distributions_figure(runs.cases(names))
    elif name == "sweep":
        figure = sweep_figure(read_sweep(runs.find(names, "sweep")[names[0]].path))
    elif name in ("heatmaps", "lines") and len(names) == 1:
        averages = average_kinds(runs.traces(names[0]))
        figure = (average_heatmaps if name == "heatmaps" else average_lines)(averages)
    if figure is None:
        raise NotFound(f"these runs have no figure {name[:40]!r}")
    return figure_bytes(figure, "svg")


def table_to_dict(table: Table) -> dict[str, Any]:
    """A table with all cells as text."""
    return {
        "title": table.title,
        "columns": [
            {"name": name, "numeric": not is_text_column(table, i)}
            for i, name in enumerate(table.columns)
        ],
        "rows": [
            [{"text": printable(cell_text(cell)), "mark": cell_mark(cell)} for cell in row]
            for row in table.rows
        ],
        "rules": table.rules,
        "note": table.note,
    }
