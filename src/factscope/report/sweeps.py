"""Reports of sweeps: a table, a figure and a page; sweep.json has every number."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS
from factscope.analysis.sweep import Point, Sweep
from factscope.errors import BadRecord
from factscope.report.evaluations import FAILED_NOTE, UNMEASURED
from factscope.report.figures.sweeps import sweep_figure
from factscope.report.html import embed_figure, render
from factscope.report.labels import axis_name, setting_name, sweep_title
from factscope.report.tables import Cell, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.write import write_figure, write_texts

COLUMNS = ("S", "ES", "PS", "NS", "GE", "RS", "efficacy", "paraphrase", "specificity")
"""Metrics of the table; those that were not measured are left out."""
NOTE = (
    "Values in percent (GE in hundredths of a bit); in parentheses half the width of the 95 % "
    "confidence interval. Best: the highest value of a column."
)


def write_sweep_report(sweep: Sweep, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    if not any(point.summary and point.summary.metrics for point in sweep.points):
        errors = [f"{point.name}: {point.error}" for point in sweep.points if point.error]
        reasons = f" ({'; '.join(errors[:3])})" if errors else ""
        raise BadRecord(f"the sweep has no scores yet; there is nothing to report{reasons}")
    table = sweep_table(sweep)
    texts = {
        "index.html": sweep_page(sweep),
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(all_points_table(sweep)),
        "sweep.json": json.dumps(sweep_to_dict(sweep), indent=2, ensure_ascii=False) + "\n",
    }
    return [
        *write_texts(folder, texts),
        *write_figure(sweep_figure(sweep), folder / "sweep"),
    ]


def sweep_page(sweep: Sweep) -> str:
    """The page: the figure, the table and the settings."""
    title = f"Sweep: {sweep_title(sweep)}"
    summaries = [point.summary for point in sweep.points if point.summary is not None]
    return render(
        "overview.html",
        title=title,
        numbers={
            "points": f"{len(summaries)} of {len(sweep.points)}",
            "cases": max(summary.cases for summary in summaries),
            "failed points": sum(point.error is not None for point in sweep.points),
        },
        figure=embed_figure(sweep_figure(sweep), f"Scores at each point: {title}"),
        table=sweep_table(sweep),
        settings=sweep.spec,
    )


def sweep_table(sweep: Sweep) -> Table:
    """The unedited model, then one row per point; the highest value of each column is marked."""
    names = sweep.measured(COLUMNS)
    rows: list[tuple[Cell, ...]] = []
    if sweep.unedited is not None:
        scores = [Score(sweep.unedited.metrics.get(name, UNMEASURED)) for name in names]
        blank = [""] * (len(sweep.grid) - 1)
        rows.append(("unedited", *blank, sweep.unedited.cases, None, *scores))
    best = {name: _best(sweep, name) for name in names}
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
    return Table(
        sweep_title(sweep),
        (*map(axis_name, sweep.grid), "cases", "failed", *(f"{name} ↑" for name in names)),
        tuple(rows),
        note=(f"{NOTE} {FAILED_NOTE}" if failed else NOTE) + errors,
        rules=(0,) if sweep.unedited is not None else (),
    )


def all_points_table(sweep: Sweep) -> Table:
    """All points and metrics for CSV, as fractions and bits."""
    names = sweep.measured(("S", *METRICS, "drawdown"))
    columns = (*sweep.grid, "cases", "failed", "error", *names)
    rows: list[tuple[Cell, ...]] = [
        (
            *point.settings.values(),
            *_counts(point),
            point.error or "",
            *(point.metric(name) or UNMEASURED for name in names),
        )
        for point in sweep.points
    ]
    return Table("All points", columns, tuple(rows))


def sweep_to_dict(sweep: Sweep) -> dict[str, Any]:
    """The sweep as JSON values; unknown values are null."""
    return {
        "model": sweep.model,
        "data": sweep.data,
        "method": sweep.method,
        "grid": {axis: list(values) for axis, values in sweep.grid.items()},
        "unedited": None if sweep.unedited is None else _metrics(sweep.unedited.metrics),
        "points": [
            {
                "settings": dict(point.settings),
                "cases": point.summary.cases if point.summary else None,
                "failed": point.summary.failed if point.summary else None,
                "error": point.error,
                "metrics": _metrics(point.summary.metrics) if point.summary else {},
            }
            for point in sweep.points
        ],
    }


def _best(sweep: Sweep, name: str) -> float:
    """The highest value of a metric; NaN if fewer than two points have one."""
    values = [value.mean for point in sweep.points if (value := point.metric(name))]
    return max(values) if len(values) > 1 else math.nan


def _counts(point: Point) -> tuple[int | None, int | None]:
    return (point.summary.cases, point.summary.failed) if point.summary else (None, None)


def _metrics(metrics: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        name: {
            "mean": value.mean,
            "half_width": None if math.isnan(value.half_width) else value.half_width,
            "n": value.n,
        }
        for name, value in metrics.items()
    }
