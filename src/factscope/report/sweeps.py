"""Reports of sweeps: a table, a figure and a page; sweep.json has every number."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from factscope.analysis.estimate import to_dict
from factscope.analysis.localization import Localization
from factscope.analysis.metrics import METRICS, Summary
from factscope.analysis.sweep import Point, Sweep
from factscope.errors import BadRecord
from factscope.report.comparisons import layers_table, localization_table
from factscope.report.evaluations import FAILED_NOTE, UNMEASURED
from factscope.report.figures.comparisons import localization_figure
from factscope.report.figures.evaluation import sweep_figure
from factscope.report.html import embed_figure, render, table_files, write_files
from factscope.report.labels import AXIS_NAMES, setting_name, sweep_title
from factscope.report.tables import Cell, Score, Table

COLUMNS = ("S", "ES", "PS", "NS", "GE", "RS", "efficacy", "paraphrase", "specificity")
"""Metrics of the table; those that were not measured are left out."""
NOTE = (
    "Values in percent (GE in hundredths of a bit); in parentheses half the width of the 95 % "
    "confidence interval. Best: the highest value of a column."
)


def write_sweep_report(
    sweep: Sweep, folder: Path, relations: Sequence[Localization] = ()
) -> list[Path]:
    """Write the report and return its files, the page first.

    `relations` are those of trace effects and edit success, if the facts were traced too.
    """
    if not any(point.summary and point.summary.metrics for point in sweep.points):
        errors = [f"{point.name}: {point.error}" for point in sweep.points if point.error]
        reasons = f" ({'; '.join(errors[:3])})" if errors else ""
        raise BadRecord(f"the sweep has no scores yet; there is nothing to report{reasons}")
    title, table = f"Sweep: {sweep_title(sweep)}", sweep_table(sweep)
    files: list[tuple[str, str | Figure]] = [
        *table_files("table", table, full=all_points_table(sweep)),
        ("sweep.json", json.dumps(sweep_to_dict(sweep), indent=2, ensure_ascii=False) + "\n"),
        ("sweep", sweep_figure(sweep)),
    ]
    localization = None
    if relations:
        related = localization_table(relations)
        description = "Trace effect and edit success by layer"
        drawn = embed_figure(localization_figure(relations, sweep.model), description)
        localization = {"figure": drawn, "table": related}
        files.append(("localization", localization_figure(relations, sweep.model)))
        files += table_files("localization", related, full=layers_table(relations))
    summaries = [point.summary for point in sweep.points if point.summary is not None]
    page = render(
        "overview.html",
        title=title,
        numbers={
            "points": f"{len(summaries)} of {len(sweep.points)}",
            "cases": max(summary.cases for summary in summaries),
            "failed points": sum(point.error is not None for point in sweep.points),
        },
        figure=embed_figure(sweep_figure(sweep), f"Scores at each point: {title}"),
        table=table,
        localization=localization,
        settings=sweep.spec,
    )
    return write_files(folder, [("index.html", page), *files])


def sweep_table(sweep: Sweep) -> Table:
    """The unedited model, then one row per point; the highest value of each column is marked."""
    names = sweep.measured(COLUMNS)
    rows: list[tuple[Cell, ...]] = []
    if sweep.unedited is not None:
        scores = [Score(sweep.unedited.metrics.get(name, UNMEASURED)) for name in names]
        blank = [""] * (len(sweep.grid) - 1)
        rows.append(("unedited", *blank, sweep.unedited.cases, None, *scores))
    # A value that no other point has is not marked.
    best = {}
    for name in names:
        values = [value.mean for point in sweep.points if (value := point.metric(name))]
        best[name] = max(values) if len(values) > 1 else math.nan
    for point in sweep.points:
        labels = (setting_name(axis, point.settings[axis]) for axis in sweep.grid)
        values = {name: point.metric(name) or UNMEASURED for name in names}
        scores = [
            Score(value, "best" if value.mean == best[name] else None)
            for name, value in values.items()
        ]
        rows.append((*labels, *_counts(point), *scores))
    errors = "".join(f" {point.name}: {point.error}." for point in sweep.points if point.error)
    failed = any(point.summary and point.summary.failed for point in sweep.points)
    axes = (AXIS_NAMES.get(axis, axis) for axis in sweep.grid)
    return Table(
        sweep_title(sweep),
        (*axes, "cases", "failed", *(f"{name} ↑" for name in names)),
        tuple(rows),
        note=(f"{NOTE} {FAILED_NOTE}" if failed else NOTE) + errors,
        rules=(0,) if sweep.unedited is not None else (),
    )


def all_points_table(sweep: Sweep) -> Table:
    """All points and metrics for CSV, as fractions and bits."""
    names = sweep.measured(("S", *METRICS, "drawdown"))
    columns = (*sweep.grid, "cases", "failed", "error", *names)
    rows = []
    for point in sweep.points:
        values = (point.metric(name) or UNMEASURED for name in names)
        rows.append((*point.settings.values(), *_counts(point), point.error or "", *values))
    return Table("All points", columns, tuple(rows))


def _counts(point: Point) -> tuple[int | None, int | None]:
    return (point.summary.cases, point.summary.failed) if point.summary else (None, None)


def sweep_to_dict(sweep: Sweep) -> dict[str, Any]:
    """The sweep as JSON values; unknown values are null."""

    def metrics(summary: Summary) -> dict[str, Any]:
        return {name: to_dict(value) for name, value in summary.metrics.items()}

    return {
        "model": sweep.model,
        "data": sweep.data,
        "method": sweep.method,
        "grid": {axis: list(values) for axis, values in sweep.grid.items()},
        "unedited": None if sweep.unedited is None else metrics(sweep.unedited),
        "points": [
            {
                "settings": dict(point.settings),
                "cases": _counts(point)[0],
                "failed": _counts(point)[1],
                "error": point.error,
                "metrics": metrics(point.summary) if point.summary else {},
            }
            for point in sweep.points
        ],
    }
