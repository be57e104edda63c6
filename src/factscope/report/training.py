"""The report of a training run: tables, a figure and a page in one folder."""

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.training import TrainingCurve
from factscope.io import write_atomic
from factscope.records import TrainingRecord
from factscope.report.figures.training import training_figure
from factscope.report.html import embed_figure, render
from factscope.report.labels import dataset_name, editor_name, training_title
from factscope.report.tables import Cell, Marked, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.write import write_figure

COLUMNS = (
    "step", "minutes", "loss ↓", "edit accuracy ↑", "rephrase accuracy ↑", "locality accuracy ↑",
    "locality KL ↓",
)  # fmt: skip
NOTE = (
    "Means over the validation examples; accuracies in percent. "
    "Marked: the evaluation with the lowest loss, whose network is saved."
)


def training_table(curve: TrainingCurve) -> Table:
    """One row per evaluation, the best one marked."""
    rows = tuple(_row(e, best=e is curve.best) for e in curve.evaluations)
    return Table(training_title(curve), COLUMNS, rows, note=NOTE)


def _row(evaluation: TrainingRecord, *, best: bool) -> tuple[Cell, ...]:
    mark = "best" if best else None
    accuracies = (
        evaluation.edit_accuracy, evaluation.rephrase_accuracy, evaluation.locality_accuracy,
    )  # fmt: skip
    return (
        Marked(evaluation.step, mark),
        Marked(round(evaluation.seconds / 60, 1), mark),
        Marked(round(evaluation.loss, 4), mark),
        *(Score(Estimate(accuracy, math.nan, 1), mark) for accuracy in accuracies),
        Marked(round(evaluation.locality_loss, 4), mark),
    )


def all_evaluations_table(curve: TrainingCurve) -> Table:
    """Every field of every evaluation, for CSV."""
    names = tuple(field.name for field in fields(TrainingRecord))
    rows = tuple(tuple(getattr(e, name) for name in names) for e in curve.evaluations)
    return Table("All evaluations", names, rows)


def training_to_dict(curve: TrainingCurve) -> dict[str, Any]:
    """The curve as JSON values; numbers that are not finite become null."""

    def to_dict(evaluation: TrainingRecord) -> dict[str, Any]:
        return {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in asdict(evaluation).items()
        }

    return {
        "model": curve.model,
        "data": curve.data,
        "method": curve.method,
        "steps": curve.steps,
        "minutes": curve.minutes,
        "best": to_dict(curve.best),
        "evaluations": [to_dict(evaluation) for evaluation in curve.evaluations],
    }


def training_page(curve: TrainingCurve) -> str:
    """The page: the figure, the table and the settings."""
    title = training_title(curve)
    numbers = {
        "method": editor_name(curve.method),
        "data": dataset_name(curve.data),
        "steps": str(curve.steps),
        "minutes": f"{curve.minutes:.1f}",
        "best step": str(curve.best.step),
    }
    return render(
        "overview.html",
        title=title,
        numbers=numbers,
        figure=embed_figure(training_figure(curve), f"Losses and accuracies by step: {title}"),
        table=training_table(curve),
        settings=curve.spec,
    )


def write_training_report(curve: TrainingCurve, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    table = training_table(curve)
    files = {
        "index.html": training_page(curve),
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(all_evaluations_table(curve)),
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    figures = write_figure(training_figure(curve), folder / "training")
    return [*(folder / name for name in files), *figures]
