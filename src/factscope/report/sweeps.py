"""The report of a sweep: a table, a figure and a page in one folder, each file whole.

A sweep's points as a table, and as plain values for JSON.
"""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS
from factscope.analysis.sweep import Point, Sweep
from factscope.errors import BadRecord
from factscope.io import write_atomic
from factscope.report.figures.sweeps import sweep_figure
from factscope.report.html import figure_html, numbers_html, page, scrollable, settings_html
from factscope.report.labels import axis_name, setting_name, sweep_title
from factscope.report.tables import Cell, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.traces import write_figure

__all__ = [
    "every_point",
    "sweep_page",
    "sweep_table",
    "sweep_values",
    "write_sweep_report",
]

SHOWN = ("S", "ES", "PS", "NS", "GE", "RS", "efficacy", "paraphrase", "specificity")
"""The columns, those of them that were measured."""
NONE = Estimate(math.nan, math.nan, 0)
NOTE = (
    "In percent (GE in hundredths of a bit), in parentheses half the width of the 95 % interval. "
    "Marked: the highest of a column."
)
FAILED = "Cases whose edit failed are counted under failed and are in no mean."


def sweep_table(sweep: Sweep) -> Table:
    """A row a point, the highest number of each column marked; first the unedited model's."""
    names = sweep.measured(SHOWN)
    rows: list[tuple[Cell, ...]] = []
    if sweep.unedited is not None:
        plain = [Score(sweep.unedited.metrics.get(name, NONE)) for name in names]
        head = ("unedited", *("" for _ in list(sweep.grid)[1:]))
        rows.append((*head, sweep.unedited.cases, None, *plain))
    best = {name: _best(sweep, name) for name in names}
    rows += [_row(sweep, point, names, best) for point in sweep.points]
    troubles = "".join(f" {p.name}: {p.error}." for p in sweep.points if p.error)
    failed = any(point.summary and point.summary.failed for point in sweep.points)
    return Table(
        sweep_title(sweep),
        (*map(axis_name, sweep.grid), "cases", "failed", *(f"{name} ↑" for name in names)),
        tuple(rows),
        note=(f"{NOTE} {FAILED}" if failed else NOTE) + troubles,
        rules=(0,) if sweep.unedited is not None else (),
    )


def every_point(sweep: Sweep) -> Table:
    """All points and metrics, as shares and bits, for CSV."""
    names = sweep.measured(("S", *METRICS, "drawdown"))
    rows: list[tuple[Cell, ...]] = []
    for point in sweep.points:
        numbers = [point.metric(name) or NONE for name in names]
        rows.append((*point.settings.values(), *_counts(point), point.error or "", *numbers))
    return Table(
        "Every point", (*sweep.grid, "cases", "failed", "error", *names), tuple(rows)
    )  # fmt: skip


def sweep_values(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain values; what is not known is null."""
    plain = None if sweep.unedited is None else _metrics(sweep.unedited.metrics)
    return {
        "model": sweep.model,
        "data": sweep.data,
        "method": sweep.method,
        "grid": {axis: list(values) for axis, values in sweep.grid.items()},
        "unedited": plain,
        "points": [
            {
                "settings": dict(point.settings),
                "cases": _counts(point)[0],
                "failed": _counts(point)[1],
                "error": point.error,
                "metrics": _metrics(point.summary.metrics) if point.summary else {},
            }
            for point in sweep.points
        ],
    }


def _row(
    sweep: Sweep, point: Point, names: Sequence[str], best: dict[str, float]
) -> tuple[Cell, ...]:
    where = (setting_name(axis, point.settings[axis]) for axis in sweep.grid)
    scores = []
    for name in names:
        value = point.metric(name) or NONE
        scores.append(Score(value, "best" if value.mean == best[name] else None))
    return (*where, *_counts(point), *scores)


def _best(sweep: Sweep, name: str) -> float:
    """The highest of the points; of one alone there is none."""
    values = [value.mean for point in sweep.points if (value := point.metric(name))]
    return max(values) if len(values) > 1 else math.nan


def _counts(point: Point) -> tuple[int | None, int | None]:
    if point.summary is None:
        return None, None
    return point.summary.cases, point.summary.failed


def _metrics(metrics: Any) -> dict[str, Any]:
    return {
        name: {
            "mean": value.mean,
            "half_width": None if math.isnan(value.half_width) else value.half_width,
            "n": value.n,
        }
        for name, value in metrics.items()
    }


def write_sweep_report(sweep: Sweep, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    if not any(point.summary and point.summary.metrics for point in sweep.points):
        raise BadRecord(_nothing(sweep))
    index = folder / "index.html"
    write_atomic(index, sweep_page(sweep))
    table = sweep_table(sweep)
    files = {
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(every_point(sweep)),
        "sweep.json": json.dumps(sweep_values(sweep), indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [
        index,
        *(folder / name for name in files),
        *write_figure(sweep_figure(sweep), folder / "sweep"),
    ]


def sweep_page(sweep: Sweep) -> str:
    """The page: the figure, the table, and how the sweep was made."""
    title = f"Sweep: {sweep_title(sweep)}"
    scored = [point for point in sweep.points if point.summary is not None]
    numbers = {
        "points": f"{len(scored)} of {len(sweep.points)}",
        "cases": str(max(point.summary.cases for point in scored if point.summary)),
        "points without an edit": str(sum(point.error is not None for point in sweep.points)),
    }
    body = [
        f"<h1>{html.escape(title)}</h1>",
        numbers_html(numbers),
        figure_html(sweep_figure(sweep), f"Scores at each point: {title}"),
        f'<div class="paper">{scrollable(sweep_table(sweep))}</div>',
        *([settings_html(sweep.spec, "How it was made")] if sweep.spec else []),
    ]
    return page(title, body, note="")


def _nothing(sweep: Sweep) -> str:
    errors = [f"{point.name}: {point.error}" for point in sweep.points if point.error]
    why = f" ({'; '.join(errors[:3])})" if errors else ""
    return f"the sweep has no scores yet; there is nothing to report{why}"
