"""A training's looks at its held-out examples as a table, and as plain values for JSON."""

import math
from dataclasses import asdict, fields
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.training import Course
from factscope.records import TrainingRecord
from factscope.report.evaluation_words import DATA, editor_name
from factscope.report.tables import Cell, Marked, Score, Table

__all__ = ["every_look", "looks_table", "training_title", "training_values"]

COLUMNS = (
    "step", "minutes", "loss ↓", "new object said ↑", "in other words ↑", "unchanged elsewhere ↑",
    "KL elsewhere ↓",
)  # fmt: skip
NOTE = (
    "Means over the held-out examples; shares in percent. "
    "Marked: the look with the least loss, whose network is kept."
)


def training_title(course: Course) -> str:
    """The training in one line."""
    data = DATA.get(course.data, course.data)
    return f"{editor_name(course.method)} trained on {data}, {course.model}, {course.steps} steps"


def looks_table(course: Course) -> Table:
    """A row a look, the best one marked."""
    rows = tuple(_row(look, best=look is course.best) for look in course.looks)
    return Table(training_title(course), COLUMNS, rows, note=NOTE)


def every_look(course: Course) -> Table:
    """All that was written down of each look, for CSV."""
    names = tuple(field.name for field in fields(TrainingRecord))
    rows = tuple(tuple(getattr(look, name) for name in names) for look in course.looks)
    return Table("Every look", names, rows)


def training_values(course: Course) -> dict[str, Any]:
    """The training as plain values; what is not known, or no number, is null."""
    return {
        "model": course.model,
        "data": course.data,
        "method": course.method,
        "steps": course.steps,
        "minutes": course.minutes,
        "best": _plain(course.best),
        "looks": [_plain(look) for look in course.looks],
    }


def _row(look: TrainingRecord, *, best: bool) -> tuple[Cell, ...]:
    shares = (look.said, look.said_rephrased, look.kept)
    mark = "best" if best else None
    scores = (Score(Estimate(share, math.nan, 1), mark) for share in shares)
    numbers = (look.step, round(look.seconds / 60, 1), round(look.loss, 4), round(look.local, 4))
    *before, local = (Marked(number, mark) for number in numbers)
    return (*before, *scores, local)


def _plain(look: TrainingRecord) -> dict[str, Any]:
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in asdict(look).items()
    }
