"""A sweep's points as a table, and as plain values for JSON."""

import math
from collections.abc import Sequence
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS
from factscope.analysis.sweep import Point, Sweep
from factscope.report.sweep_words import axis_name, setting_name, sweep_title
from factscope.report.tables import Cell, Score, Table

__all__ = ["every_point", "sweep_table", "sweep_values"]

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
