"""The report of a training: a table, a figure and a page in one folder, each file whole.

A training's looks at its held-out examples as a table, and as plain values for JSON.
"""

import html
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.training import TrainingCurve
from factscope.io import write_atomic
from factscope.records import TrainingRecord
from factscope.report.figures.training import training_figure
from factscope.report.html import figure_html, numbers_html, page, scrollable, settings_html
from factscope.report.labels import DATA, editor_name, training_title
from factscope.report.tables import Cell, Marked, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.traces import write_figure

__all__ = [
    "every_look",
    "looks_table",
    "training_page",
    "training_values",
    "write_training_report",
]

COLUMNS = (
    "step", "minutes", "loss ↓", "new object said ↑", "in other words ↑", "unchanged elsewhere ↑",
    "KL elsewhere ↓",
)  # fmt: skip
NOTE = (
    "Means over the held-out examples; shares in percent. "
    "Marked: the look with the least loss, whose network is kept."
)


def looks_table(course: TrainingCurve) -> Table:
    """A row a look, the best one marked."""
    rows = tuple(_row(look, best=look is course.best) for look in course.looks)
    return Table(training_title(course), COLUMNS, rows, note=NOTE)


def every_look(course: TrainingCurve) -> Table:
    """All that was written down of each look, for CSV."""
    names = tuple(field.name for field in fields(TrainingRecord))
    rows = tuple(tuple(getattr(look, name) for name in names) for look in course.looks)
    return Table("Every look", names, rows)


def training_values(course: TrainingCurve) -> dict[str, Any]:
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


def write_training_report(course: TrainingCurve, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    table = looks_table(course)
    files = {
        "index.html": training_page(course),
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(every_look(course)),
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [
        *(folder / name for name in files),
        *write_figure(training_figure(course), folder / "training"),
    ]


def training_page(course: TrainingCurve) -> str:
    """The page: the figure, the table, and how the training was made."""
    title = training_title(course)
    numbers = {
        "method": editor_name(course.method),
        "data": DATA.get(course.data, course.data),
        "steps": str(course.steps),
        "minutes": f"{course.minutes:.1f}",
        "best step": str(course.best.step),
    }
    body = [
        f"<h1>{html.escape(title)}</h1>",
        numbers_html(numbers),
        figure_html(training_figure(course), f"Losses and shares at each look: {title}"),
        f'<div class="paper">{scrollable(looks_table(course))}</div>',
        settings_html(course.spec, "How it was made"),
    ]
    return page(title, body, note="")
