"""Figures of convergence: the training of a hypernetwork, and the estimate of second moments."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from factscope.analysis.training import TrainingCurve
from factscope.errors import BadSetting
from factscope.report.labels import training_title
from factscope.report.style import MEDIUM, SMALL, blank_figure, literal_text

# Field of a record, label, color, line style. Examples from text have no paraphrase: their edit and
# rephrase lines coincide, and the dashes show both.
LOSSES = (
    ("edit_loss", "edit", "#3b0f70", "-"),
    ("rephrase_loss", "rephrase", "#8c2981", "--"),
    ("locality_loss", "locality (KL)", "#d95f0e", "-"),
)
ACCURACIES = (
    ("edit_accuracy", "edit", "#3b0f70", "-"),
    ("rephrase_accuracy", "rephrase", "#8c2981", "--"),
    ("locality_accuracy", "locality", "#d95f0e", "-"),
)
MAX_MARKERS = 20
"""Lines through more evaluations have no markers."""

History = Sequence[tuple[int, float]]
"""Tokens so far, and the relative gap between the two halves of the text."""


def training_figure(curve: TrainingCurve) -> Figure:
    """Losses and accuracies on the validation examples against the step."""
    fig = blank_figure(7.6, 3.0)
    left, right = fig.subplots(1, 2)
    unedited: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "linestyle": ":"}
    left.axhline(curve.evaluations[0].unedited_loss, label="unedited", **unedited)
    _plot_fields(left, curve, LOSSES)
    left.set_ylabel("validation loss", fontsize=MEDIUM)
    left.set_ylim(bottom=0)
    _plot_fields(right, curve, ACCURACIES)
    right.set_ylabel("validation accuracy", fontsize=MEDIUM)
    right.set_ylim(-0.02, 1.02)
    fig.suptitle(training_title(curve), fontsize=MEDIUM, **literal_text())
    return fig


def _plot_fields(
    ax: Axes, curve: TrainingCurve, lines: Sequence[tuple[str, str, str, str]]
) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    ax.axvline(curve.best.step, color="0.8", linewidth=0.8, label="best step", zorder=0)
    steps = [evaluation.step for evaluation in curve.evaluations]
    for name, label, color, style in lines:
        ax.plot(
            steps,
            [getattr(evaluation, name) for evaluation in curve.evaluations],
            color=color,
            linestyle=style,
            linewidth=1.3,
            marker="o" if len(steps) <= MAX_MARKERS else None,
            markersize=2.5,
            label=label,
        )
    ax.set_xlabel("step", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)


def convergence_figure(histories: Mapping[int, History], model: str) -> Figure:
    """The gap between the second moments of two halves of a text, one line per layer."""
    measured = {layer: points for layer, points in histories.items() if points}
    if not measured:
        raise BadSetting("no gaps to draw: the text is too short to compare its halves")
    fig = blank_figure(4.6, 3.2)
    ax = fig.subplots()
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5, which="both")
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
