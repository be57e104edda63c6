"""Compare: the finished runs of a folder, as tables, figures and texts side by side. No torch.

A run is looked up in the list of those that are there; no word of a request becomes a path.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Response

from factscope.analysis.effects import average_kinds
from factscope.analysis.metrics import Summary, merge_runs, summarize
from factscope.errors import BadRecord, BadSetting, FactscopeError, NotFound
from factscope.records import CaseRecord, TraceRecord
from factscope.report.evaluations import by_model_and_data, evaluation_tables
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    distributions_figure,
    scores_figure,
    sweep_figure,
)
from factscope.report.html import printable
from factscope.report.samples import Samples, collect_samples
from factscope.report.style import figure_bytes
from factscope.report.sweeps import sweep_table
from factscope.report.tables import (
    Cell,
    Table,
    effects_table,
    is_words,
    mark_of,
    summary_table,
    written,
)
from factscope.runs.folder import RunFolder
from factscope.runs.sweep import read_sweep

__all__ = ["RunLibrary", "compare_routes"]

MOST = 200
"""How many runs are listed."""
DEEP = 2
"""How deep in the folder runs are looked for."""
LARGEST = 2**28
"""Bytes of records that are read at most."""
KEPT = 4
"""How many runs' records, and summaries of runs, are kept in memory."""
TOGETHER = 12
"""How many runs are compared at once."""

Names = Annotated[list[str], Query(max_length=64)]
Record = CaseRecord | TraceRecord
Stamp = tuple[str, int, int]
"""A run's name, and when and how large its records were."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class RunEntry:
    """A run in the folder."""

    name: str
    folder: RunFolder

    @property
    def stamp(self) -> Stamp:
        """What changes when the records do."""
        file = self.folder.records_path
        stat = file.stat() if file.is_file() else None
        return self.name, stat.st_mtime_ns if stat else 0, stat.st_size if stat else 0


class RunLibrary:
    """The runs of a folder."""

    def __init__(self, folder: Path | None, lock: threading.Lock) -> None:
        self._folder, self._lock = folder, lock
        self._read: OrderedDict[Stamp, Sequence[Record]] = OrderedDict()
        self._summed: OrderedDict[tuple[Stamp, ...], list[Summary]] = OrderedDict()

    def all(self) -> dict[str, RunEntry]:
        """Every run by its name, which is its path in the folder."""
        if self._folder is None:
            return {}
        root = self._folder.resolve()
        found: dict[str, RunEntry] = {}
        for depth in range(1, DEEP + 1):
            for spec in sorted(root.glob("/".join(["*"] * depth) + "/spec.toml")):
                path = spec.parent
                inside = path.resolve().is_relative_to(root)
                if inside and path.parent.name != "points" and len(found) < MOST:
                    name = path.relative_to(root).as_posix()
                    found[name] = RunEntry(name, RunFolder(path))
        return found

    def find(self, names: Sequence[str], *commands: str) -> list[RunEntry]:
        """Some of the runs, all made by these commands."""
        every = self.all()
        missing = [name for name in names if name not in every]
        if missing:
            known = ", ".join(list(every)[:10]) or "none"
            raise NotFound(f"there is no run {missing[0][:80]!r}; there are: {known}")
        if not 0 < len(names) <= TOGETHER:
            raise BadSetting(f"{len(names)} runs are named; name 1 to {TOGETHER}")
        runs = [every[name] for name in dict.fromkeys(names)]
        wrong = [run for run in runs if run.folder.command not in commands]
        if wrong:
            raise BadSetting(
                f"the run {wrong[0].name!r} is of {wrong[0].folder.command}, not of "
                f"{' or '.join(commands)}; choose another"
            )
        return runs

    def records(self, run: RunEntry) -> Sequence[Record]:
        """A run's records, read once as long as they do not change."""
        stamp = run.stamp
        if stamp[2] > LARGEST:
            raise BadRecord(
                f"the run {run.name!r} has {stamp[2]:,} bytes of records, too many for a page; "
                "use `factscope report`"
            )
        evaluated = run.folder.command == "evaluate"
        read = run.folder.case_records if evaluated else run.folder.records
        return _kept(self._read, stamp, read)

    def cases(self, names: Sequence[str]) -> list[CaseRecord]:
        """The cases of several evaluations together."""
        runs = self.find(names, "evaluate")
        read = {run.name: list(self.records(run)) for run in runs}
        records = merge_runs(read)  # pyright: ignore[reportArgumentType]
        if not records:
            raise BadRecord(f"the run {runs[0].name!r} has no records yet; come back later")
        return records

    def summaries(self, names: Sequence[str]) -> list[Summary]:
        """The rows of several evaluations, summed up once as long as their records do not change:
        over thousands of texts that takes seconds."""
        stamps = tuple(run.stamp for run in self.find(names, "evaluate"))
        return _kept(self._summed, stamps, lambda: summarize(self.cases(names)))

    def traces(self, name: str) -> list[TraceRecord]:
        """The traces of one run."""
        [run] = self.find([name], "trace")
        records = [r for r in self.records(run) if isinstance(r, TraceRecord)]
        if not any(record.known for record in records):
            raise BadRecord(f"the run {name!r} has no fact that the model knows; nothing to show")
        return records


def _kept(shelf: "OrderedDict[K, V]", key: K, make: Callable[[], V]) -> V:
    """What was made before, or is made now; what was unused longest goes."""
    if key not in shelf:
        shelf[key] = make()
        while len(shelf) > KEPT:
            shelf.popitem(last=False)
    shelf.move_to_end(key)
    return shelf[key]


def compare_routes(folder: Path | None, lock: threading.Lock) -> APIRouter:
    """The routes of this view."""
    routes = APIRouter(prefix="/api", tags=["compare"])
    runs = RunLibrary(folder, lock)

    @routes.get("/runs")
    def listed() -> dict[str, Any]:
        """The runs that are there."""
        return {"runs": [described(run) for run in runs.all().values()]}

    @routes.get("/tables")
    def tables(run: Names) -> dict[str, Any]:
        """The tables of one run, or of several evaluations together, and their figures."""
        with lock:
            return tables_of(runs, run)

    @routes.get("/figure/{which}", response_class=Response)
    def figure(which: str, run: Names) -> Response:
        """A figure of the runs, as an SVG."""
        with lock:
            content = drawn(runs, run, which)
        return Response(content, media_type="image/svg+xml", headers={"cache-control": "no-store"})

    @routes.get("/cases")
    def cases(run: Names) -> dict[str, Any]:
        """The cases whose texts can be read."""
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
    def samples(run: Names, case: Annotated[str, Query(max_length=200)]) -> dict[str, Any]:
        """What each method makes the model write about a case."""
        with lock:
            found = collect_samples(runs.cases(run), [case])
        return {"samples": [side_by_side(one) for one in found]}

    return routes


def described(run: RunEntry) -> dict[str, Any]:
    """A run in a few words."""
    try:
        spec = run.folder.spec()
    except (FactscopeError, OSError) as error:
        return {"name": run.name, "error": printable(str(error))}
    said = {name: spec.get(name) for name in ("model", "method", "data", "protocol", "limit")}
    return {"name": run.name, "command": run.folder.command, **said, "size": run.stamp[2]}


def tables_of(runs: RunLibrary, names: Sequence[str]) -> dict[str, Any]:
    """What there is to see of some runs."""
    command = runs.find(names, "trace", "evaluate", "sweep")[0].folder.command
    if command == "evaluate":
        rows = runs.summaries(names)
        figures = [f"scores-{i}" for i in range(len(by_model_and_data(rows)))]
        return {
            "command": command,
            "tables": [plain(table) for table in evaluation_tables(rows)],
            "figures": [*figures, "spread"],
        }
    if len(names) > 1:
        raise BadSetting(f"only evaluations are compared; choose one run of {command}")
    if command == "sweep":
        table = sweep_table(read_sweep(runs.find(names, "sweep")[0].folder.path))
        return {"command": command, "tables": [plain(table)], "figures": ["sweep"]}
    averages = average_kinds(runs.traces(names[0]))
    found = (summary_table(averages), effects_table(averages))
    return {"command": command, "tables": list(map(plain, found)), "figures": ["heat", "lines"]}


def drawn(runs: RunLibrary, names: Sequence[str], which: str) -> bytes:
    """A figure by its name."""
    kind, _, number = which.partition("-")
    if kind == "scores" and number.isdigit() and len(number) < 4:
        rows = by_model_and_data(runs.summaries(names))
        if int(number) < len(rows):
            return figure_bytes(scores_figure(rows[int(number)]), "svg")
    if which == "spread":
        return figure_bytes(distributions_figure(runs.cases(names)), "svg")
    if which == "sweep":
        [run] = runs.find(names, "sweep")
        return figure_bytes(sweep_figure(read_sweep(run.folder.path)), "svg")
    if which in ("heat", "lines") and len(names) == 1:
        averages = average_kinds(runs.traces(names[0]))
        figure = average_heatmaps if which == "heat" else average_lines
        return figure_bytes(figure(averages), "svg")
    raise NotFound(f"there is no figure {which[:40]!r} of these runs")


def plain(table: Table) -> dict[str, Any]:
    """A table as plain values, every cell as it is read."""
    return {
        "title": table.title,
        "columns": [
            {"name": name, "words": is_words(table, i)} for i, name in enumerate(table.columns)
        ],
        "rows": [[_cell(cell) for cell in row] for row in table.rows],
        "rules": table.rules,
        "note": table.note,
    }


def _cell(cell: Cell) -> dict[str, Any]:
    return {"text": printable(written(cell)), "mark": mark_of(cell)}


def side_by_side(samples: Samples) -> dict[str, Any]:
    """The texts of a case in segments, each with its highlighting."""
    return {
        "text": samples.fact.text,
        "subject": samples.fact.subject_span,
        "true": samples.true,
        "new": samples.fact.target,
        "model": samples.model,
        "rows": samples.highlighted_rows(),
    }
