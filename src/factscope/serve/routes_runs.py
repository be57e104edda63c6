"""Runs: tables, figures and generated texts of the runs in a folder. No torch.

The run name in a request is looked up in the list of runs; it never becomes a path.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from matplotlib.figure import Figure

from factscope.analysis.effects import average_kinds, trace_warnings
from factscope.analysis.metrics import DEFINITIONS, Pair, Summary, merge_runs, pair_runs, summarize
from factscope.errors import BadRecord, BadSetting, FactscopeError, NotFound
from factscope.records import CaseRecord, TraceRecord
from factscope.report.evaluations import (
    by_model_and_data,
    collect_samples,
    evaluation_tables,
    pair_table,
)
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    distributions_figure,
    scores_figure,
    sweep_figure,
    traces_figure,
)
from factscope.report.labels import display_token, printable
from factscope.report.style import FIGURE_FORMATS, figure_bytes, share_scales
from factscope.report.sweeps import sweep_table
from factscope.report.tables import (
    Cell,
    Table,
    as_csv,
    as_latex,
    as_markdown,
    cell_mark,
    cell_text,
    effects_table,
    is_text_column,
    summary_table,
)
from factscope.runs.folder import RunFolder
from factscope.runs.sweep import read_sweep
from factscope.serve.jobs import ReportQueue
from factscope.serve.security import attachment, error_to_dict, media_type, without_folders

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
CACHED_FIGURES = 64
COMMANDS = ("trace", "evaluate", "sweep")
"""Commands whose runs are shown."""
COMPARABLE = ("heatmaps", "lines", "distributions", "sweep")
"""Figures that get the same scales as those of the run beside; others have fixed ones."""
TABLE_FORMATS = {"csv": as_csv, "tex": as_latex, "md": as_markdown}
HELP = {
    **DEFINITIONS,
    "AIE": "Average indirect effect: how much of the answer's probability restoring the cell "
    "brings back, on average over facts.",
    "of total effect": "AIE as a fraction of the average total effect, which is the drop of the "
    "answer's probability by the corruption.",
    "failed": "Cases whose edit failed.",
    "difference": "The second run minus the first, on average over the cases that both scored.",
}
"""Definitions of columns and metrics."""

RunNames = Annotated[list[str], Query(max_length=64)]
Stamp = tuple[str, int, int]
"""A run's name, and the modification time and size of its records: changes with the records."""


class RunLibrary:
    """The runs in a folder. Records and summaries are cached until the records change."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._records = lru_cache(CACHE_SIZE)(self._read)
        self._summaries = lru_cache(CACHE_SIZE)(self._summarize)
        self._pairs = lru_cache(CACHE_SIZE)(self._pair)

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
                    name = os.fsencode(path.relative_to(root).as_posix())
                    # Names of files need not be UTF-8.
                    runs[name.decode(errors="backslashreplace")] = RunFolder(path)
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

    def pairs(self, first: str, second: str) -> list[Pair]:
        """Two evaluations, compared case by case."""
        runs = self.find([first, second], "evaluate")
        return self._pairs(stamp(first, runs[first]), stamp(second, runs[second]))

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

    def _pair(self, first: Stamp, second: Stamp) -> list[Pair]:
        return pair_runs(self.cases([first[0]]), self.cases([second[0]]))


def stamp(name: str, run: RunFolder) -> Stamp:
    """The cache key of a run's records; a sweep has those of its points."""
    files = [run.records_path, *run.path.glob("points/*/records.jsonl")]
    statuses = [file.stat() for file in files if file.is_file()]
    latest = max((status.st_mtime_ns for status in statuses), default=0)
    return name, latest, sum(status.st_size for status in statuses)


def run_routes(folder: Path | None, reports: ReportQueue) -> APIRouter:
    """Routes of runs. Records are read and figures drawn in the queue of reports."""
    routes = APIRouter(prefix="/api", tags=["compare"])
    runs = RunLibrary(folder)

    @lru_cache(CACHED_FIGURES)
    def cached_figure(stamps: tuple[Stamp, ...], file: str, beside: tuple[Stamp, ...]) -> bytes:
        names, others = ([name for name, _, _ in group] for group in (stamps, beside))
        return draw_figure(runs, names, file, others)

    def stamps(names: Sequence[str]) -> tuple[Stamp, ...]:
        return tuple(stamp(name, run) for name, run in runs.find(names, *COMMANDS).items())

    def figure_content(names: Sequence[str], file: str, beside: str | None) -> bytes:
        return cached_figure(stamps(names), file, stamps([beside]) if beside else ())

    @routes.get("/runs")
    def list_runs() -> dict[str, Any]:
        """The runs in the folder. Not in the queue of reports: it would wait for their figures."""
        return {"runs": [run_to_dict(name, run) for name, run in runs.all().items()]}

    @routes.get("/tables")
    async def tables(run: RunNames) -> dict[str, Any]:
        """The tables of one run, of two or of several evaluations, and their figures' names."""
        return await reports.run(tables_and_figures, runs, run)

    @routes.get("/tables/{file}", response_class=Response)
    async def table(file: str, run: RunNames) -> Response:
        """A table as a file: 0.csv is the first one in CSV, 0.tex in LaTeX, 0.md in Markdown."""
        content = await reports.run(table_content, runs, run, file)
        return attachment(content, f"table-{file}")

    @routes.get("/figures/{file}", response_class=Response)
    async def figure(
        file: str, run: RunNames, beside: Annotated[str | None, Query(max_length=4000)] = None
    ) -> Response:
        """A figure as a file, such as lines.svg or fact-3.png.

        Its scales also span the values of the run `beside`, so that both can be compared.
        """
        content = await reports.run(figure_content, run, file, beside)
        headers = {"cache-control": "no-store"}
        return Response(content, media_type=media_type(file), headers=headers)

    @routes.get("/facts")
    async def facts(run: Annotated[str, Query(max_length=4000)]) -> dict[str, Any]:
        """The facts of a run of traces; fact-0.svg is the figure of the first."""
        records = await reports.run(runs.traces, run)
        return {"facts": [fact_to_dict(number, r) for number, r in enumerate(records)]}

    @routes.get("/cases")
    async def cases(run: RunNames) -> dict[str, Any]:
        """The cases with generated texts."""
        found = await reports.run(lambda: collect_samples(runs.cases(run), count=10_000))
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
    async def samples(run: RunNames, case: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
        """The texts of a case before the edit and after each method, in highlighted segments."""
        found = await reports.run(lambda: collect_samples(runs.cases(run), [case]))
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
        return {"name": name, "error": error_to_dict(error)["message"]}
    settings = {key: spec.get(key) for key in ("model", "method", "data", "protocol", "limit")}
    return {"name": name, "command": run.command, **settings, "bytes": stamp(name, run)[2]}


def fact_to_dict(number: int, record: TraceRecord) -> dict[str, Any]:
    """A traced fact in the list."""
    return {
        "number": number,
        "text": printable(record.fact.text),
        "answer": display_token(record.answer),
        "known": record.known,
        "clean": record.clean,
        "corrupted": record.corrupted,
        "warnings": [printable(warning) for warning in trace_warnings(record)],
    }


def tables_and_figures(runs: RunLibrary, names: Sequence[str]) -> dict[str, Any]:
    """The tables of runs, and the names of their figures."""
    command, tables = tables_of(runs, names)
    if command != "evaluate" and len(names) > 1:
        return {"command": command, "tables": [table_to_dict(t) for t in tables], "figures": []}
    figures = {"sweep": ["sweep"], "trace": ["heatmaps", "lines"]}.get(command)
    if figures is None:
        groups = by_model_and_data(runs.summaries(names))
        figures = [*(f"scores-{i}" for i in range(len(groups))), "distributions"]
    return {"command": command, "tables": [table_to_dict(t) for t in tables], "figures": figures}


def tables_of(runs: RunLibrary, names: Sequence[str]) -> tuple[str, list[Table]]:
    """The command of the runs, and their tables. Two runs also have the settings that differ."""
    names = list(dict.fromkeys(names))
    found = runs.find(names, *COMMANDS)
    command = found[names[0]].command
    if any(run.command != command for run in found.values()):
        raise BadSetting("these are runs of several commands; choose runs of one")
    tables: list[Table] = []
    if len(names) == 2:
        first, second = names
        if command == "evaluate":
            tables = [pair_table(pair, (first, second)) for pair in runs.pairs(first, second)]
        tables += settings_table({name: run.spec() for name, run in found.items()})
    elif len(names) > 2 and command != "evaluate":
        raise BadSetting(f"{len(names)} runs of {command} are given; give one or two")
    if command == "evaluate":
        return command, [*tables, *evaluation_tables(runs.summaries(names))]
    if len(names) > 1:
        return command, tables
    if command == "sweep":
        return command, [sweep_table(read_sweep(found[names[0]].path))]
    averages = average_kinds(runs.traces(names[0]))
    return command, [summary_table(averages), effects_table(averages)]


def settings_table(specs: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """A table of the settings that differ between runs; none if they are the same."""
    flat = [dict(_flatten(spec)) for spec in specs.values()]
    names = dict.fromkeys(name for spec in flat for name in spec)
    rows = tuple(
        (name, *(without_folders(str(spec.get(name, "–"))) for spec in flat))
        for name in names
        if len({repr(spec.get(name)) for spec in flat}) > 1 and not name.endswith("sha256")
    )
    return [Table("Settings that differ", ("setting", *specs), rows)] if rows else []


def _flatten(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by name; those of a group have its name before theirs."""
    for name, value in spec.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}".replace("_", " "), value


def table_content(runs: RunLibrary, names: Sequence[str], file: str) -> bytes:
    """A table of `tables_of` as a file."""
    number, _, kind = file.partition(".")
    _, tables = tables_of(runs, names)
    if kind not in TABLE_FORMATS or number not in map(str, range(len(tables))):
        raise NotFound(
            f"these runs have no table {file[:40]!r}; choose from 0 to {len(tables) - 1} as "
            f"{', '.join(TABLE_FORMATS)}"
        )
    return TABLE_FORMATS[kind](tables[int(number)]).encode(errors="replace")


def draw_figure(
    runs: RunLibrary, names: Sequence[str], file: str, beside: Sequence[str] = ()
) -> bytes:
    """A figure of `tables_and_figures`, or of one traced fact."""
    name, _, kind = file.partition(".")
    figure = find_figure(runs, names, name) if kind in FIGURE_FORMATS else None
    if figure is None:
        raise NotFound(f"these runs have no figure {file[:40]!r}")
    other = find_figure(runs, beside, name) if beside and name in COMPARABLE else None
    if other is not None:
        share_scales(figure, other)
    return figure_bytes(figure, kind)


def find_figure(runs: RunLibrary, names: Sequence[str], name: str) -> Figure | None:
    """The figure of that name, or None."""
    kind, _, digits = name.partition("-")
    number = int(digits) if digits.isdecimal() and len(digits) < 7 else None
    if kind == "scores" and number is not None:
        groups = by_model_and_data(runs.summaries(names))
        return scores_figure(groups[number]) if number < len(groups) else None
    if name == "distributions":
        return distributions_figure(runs.cases(names))
    if name == "sweep":
        return sweep_figure(read_sweep(runs.find(names, "sweep")[names[0]].path))
    if len(names) > 1:
        return None
    if kind == "fact" and number is not None:
        records = runs.traces(names[0])
        return traces_figure(records[number]) if number < len(records) else None
    if name in ("heatmaps", "lines"):
        averages = average_kinds(runs.traces(names[0]))
        return (average_heatmaps if name == "heatmaps" else average_lines)(averages)
    return None


def table_to_dict(table: Table) -> dict[str, Any]:
    """A table with all cells as text; columns and rows of metrics have a definition."""

    def help_of(name: str) -> str | None:
        return HELP.get(name.removesuffix(" ↑").removesuffix(" ↓"))

    def cell_to_dict(cell: Cell, column: str) -> dict[str, Any]:
        text = printable(cell_text(cell))
        help = help_of(text) if column == "metric" else None
        return {"text": text, "mark": cell_mark(cell), "help": help}

    return {
        "title": table.title,
        "columns": [
            {
                "name": name,
                "numeric": not is_text_column(table, i),
                "help": help_of(name),
            }
            for i, name in enumerate(table.columns)
        ],
        "rows": [
            [cell_to_dict(cell, column) for cell, column in zip(row, table.columns, strict=True)]
            for row in table.rows
        ],
        "rules": table.rules,
        "note": table.note,
    }
