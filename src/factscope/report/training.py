"""The learning curve of a hypernetwork: its evaluations on the validation examples, as a report.

`convergence_figure` draws how the estimate of second moments converges.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from factscope.analysis.estimate import Estimate, to_dict
from factscope.errors import BadRecord, BadSetting
from factscope.records import TrainingRecord
from factscope.report.html import embed_figure, render, table_files, write_files
from factscope.report.labels import dataset_name, editor_name
from factscope.report.style import MEDIUM, SMALL, blank_figure, literal_text, style_axes
from factscope.report.tables import Score, Table

COLUMNS = (
    "step", "minutes", "loss ↓", "edit accuracy ↑", "rephrase accuracy ↑", "locality accuracy ↑",
    "locality KL ↓",
)  # fmt: skip
NOTE = (
    "Means over the validation examples; accuracies in percent. "
    "Marked: the evaluation with the lowest loss, whose network is saved."
)
# Examples from text have no paraphrase: their edit and rephrase lines coincide, and the dashes show
# both.
LINES = {"edit": ("#3b0f70", "-"), "rephrase": ("#8c2981", "--"), "locality": ("#d95f0e", "-")}
"""Colour and style of the lines."""
MAX_MARKERS = 20
"""Lines through more evaluations have no markers."""

History = Sequence[tuple[int, float]]
"""Tokens so far, and the relative gap between the two halves of the text."""


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """The evaluations of a training run so far."""

    model: str
    data: str
    method: str
    evaluations: tuple[TrainingRecord, ...]
    spec: Mapping[str, Any]
    """All settings of the run."""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise BadRecord(
                f"the training of {self.method} on {self.data} has no evaluation yet; resume it "
                "with the same `factscope train` command"
            )

    @classmethod
    def of(cls, spec: Mapping[str, Any], evaluations: Sequence[TrainingRecord]) -> "TrainingCurve":
        """From the spec and the records of a run folder."""
        try:
            model, data, method = spec["model"], spec["source"]["data"], spec["training"]["method"]
        except KeyError as error:
            raise BadRecord(
                f"the spec of the training run has no {error}; `factscope train --out` writes it"
            ) from error
        return cls(model=model, data=data, method=method, evaluations=tuple(evaluations), spec=spec)

    @property
    def best(self) -> TrainingRecord:
        """The first evaluation with the lowest loss; the weights file holds its network."""
        return min(self.evaluations, key=lambda e: math.inf if math.isnan(e.loss) else e.loss)

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self.evaluations[-1].step

    @property
    def minutes(self) -> float:
        """Minutes of training so far, without interruptions."""
        return self.evaluations[-1].seconds / 60

    @property
    def title(self) -> str:
        """Method, data set, model and number of steps."""
        method, data = editor_name(self.method), dataset_name(self.data)
        return f"{method} trained on {data}, {self.model}, {self.steps} steps"


# ---- the report


def write_training_report(curve: TrainingCurve, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    names = tuple(field.name for field in fields(TrainingRecord))
    full = Table("All evaluations", names, tuple(astuple(e) for e in curve.evaluations))
    tables = table_files("table", training_table(curve), full=full)
    figure = ("training", training_figure(curve))
    return write_files(folder, [("index.html", training_page(curve)), *tables, figure])


def training_page(curve: TrainingCurve) -> str:
    """The page: the figure, the table and the settings."""
    description = f"Losses and accuracies by step: {curve.title}"
    return render(
        "overview.html",
        title=curve.title,
        numbers={
            "method": editor_name(curve.method),
            "data": dataset_name(curve.data),
            "steps": curve.steps,
            "minutes": f"{curve.minutes:.1f}",
            "best step": curve.best.step,
        },
        figure=embed_figure(training_figure(curve), description),
        table=training_table(curve),
        settings=curve.spec,
    )


def training_table(curve: TrainingCurve) -> Table:
    """One row per evaluation, the best one marked."""
    rows = []
    for evaluation in curve.evaluations:
        mark = "best" if evaluation is curve.best else None
        accuracies = [getattr(evaluation, f"{name}_accuracy") for name in LINES]
        cells = (
            evaluation.step,
            round(evaluation.seconds / 60, 1),
            round(evaluation.loss, 4),
            *(Estimate(accuracy, math.nan, 1) for accuracy in accuracies),
            round(evaluation.locality_loss, 4),
        )
        rows.append(tuple(Score(cell, mark) for cell in cells))
    return Table(curve.title, COLUMNS, tuple(rows), note=NOTE)


def training_to_dict(curve: TrainingCurve) -> dict[str, Any]:
    """The curve as JSON values; numbers that are not finite become null."""
    return {
        "model": curve.model,
        "data": curve.data,
        "method": curve.method,
        "steps": curve.steps,
        "minutes": curve.minutes,
        "best": to_dict(curve.best),
        "evaluations": [to_dict(evaluation) for evaluation in curve.evaluations],
    }


# ---- figures


def training_figure(curve: TrainingCurve) -> Figure:
    """Losses and accuracies on the validation examples against the step."""
    fig = blank_figure(7.6, 3.0)
    left, right = fig.subplots(1, 2)
    unedited = curve.evaluations[0].unedited_loss
    left.axhline(unedited, label="unedited", color="#999999", linewidth=0.8, linestyle=":")
    steps = [evaluation.step for evaluation in curve.evaluations]
    marker = "o" if len(steps) <= MAX_MARKERS else None
    for ax, measure in ((left, "loss"), (right, "accuracy")):
        style_axes(ax, zero=False)
        ax.axvline(curve.best.step, color="0.8", linewidth=0.8, label="best step", zorder=0)
        for name, (color, style) in LINES.items():
            values = [getattr(evaluation, f"{name}_{measure}") for evaluation in curve.evaluations]
            label = "locality (KL)" if (name, measure) == ("locality", "loss") else name
            ax.plot(steps, values, color=color, linestyle=style, linewidth=1.3, marker=marker,
                    markersize=2.5, label=label)  # fmt: skip
        ax.set_xlabel("step", fontsize=MEDIUM)
        ax.set_ylabel(f"validation {measure}", fontsize=MEDIUM)
        ax.legend(frameon=False, fontsize=SMALL)
    left.set_ylim(bottom=0)
    right.set_ylim(-0.02, 1.02)
    fig.suptitle(curve.title, fontsize=MEDIUM, **literal_text())
    return fig


def convergence_figure(histories: Mapping[int, History], model: str) -> Figure:
    """The gap between the second moments of two halves of a text, one line per layer."""
    measured = {layer: points for layer, points in histories.items() if points}
    if not measured:
        raise BadSetting("no gaps to draw: the text is too short to compare its halves")
    fig = blank_figure(4.6, 3.2)
    ax = fig.subplots()
    ax.set_xscale("log")
    ax.set_yscale("log")
    style_axes(ax, zero=False)
    colors = matplotlib.colormaps["Greens"]
    for i, (layer, points) in enumerate(measured.items()):
        shade = colors(0.45 + 0.5 * (i + 1) / len(measured))
        tokens, gaps = zip(*points, strict=True)
        ax.plot(tokens, gaps, color=shade, linewidth=1.3, marker="o", markersize=2.5,
                label=f"layer {layer}")  # fmt: skip
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title(f"Convergence of the second moments of {model}", fontsize=MEDIUM, **literal_text())
    ax.set_xlabel("tokens", fontsize=MEDIUM)
    ax.set_ylabel("relative gap between two halves", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig
