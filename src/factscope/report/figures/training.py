"""The figure of a training: how the edits of held-out facts got better, and what else moved.

Figures of second moments: how fast two halves of a text come to agree.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from factscope.analysis.training import TrainingCurve
from factscope.errors import BadSetting
from factscope.report.labels import training_title
from factscope.report.style import MEDIUM, SMALL, blank_figure, plain

__all__ = [
    "convergence_figure",
    "training_figure",
]

LOSSES = (
    ("edit", "new object", "#3b0f70", "-"),
    ("rephrased", "in other words", "#8c2981", "--"),
    ("local", "elsewhere (KL)", "#d95f0e", "-"),
)
SHARES = (
    ("said", "new object said", "#3b0f70", "-"),
    ("said_rephrased", "in other words", "#8c2981", "--"),
    ("kept", "unchanged elsewhere", "#d95f0e", "-"),
)
"""Field of a record, its words, colour and line. Text has no other words: there both lines lie on
each other, and are both seen."""
CROWDED = 20
"""Beyond so many looks a line has no dots."""


def training_figure(course: TrainingCurve) -> Figure:
    """Losses and shares on the held-out examples against the steps."""
    fig = blank_figure(7.6, 3.0)
    left, right = fig.subplots(1, 2)
    unedited: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "linestyle": ":"}
    left.axhline(course.looks[0].before, label="new object, unedited", **unedited)
    _lines(left, course, LOSSES)
    left.set_ylabel("loss on held-out facts", fontsize=MEDIUM)
    left.set_ylim(bottom=0)
    _lines(right, course, SHARES)
    right.set_ylabel("share of held-out facts", fontsize=MEDIUM)
    right.set_ylim(-0.02, 1.02)
    fig.suptitle(training_title(course), fontsize=MEDIUM, **plain())
    return fig


def _lines(ax: Axes, course: TrainingCurve, of: Sequence[tuple[str, str, str, str]]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    ax.axvline(course.best.step, color="0.8", linewidth=0.8, label="best look", zorder=0)
    steps = [look.step for look in course.looks]
    dots = "o" if len(steps) <= CROWDED else None
    for name, words, color, line in of:
        values = [getattr(look, name) for look in course.looks]
        ax.plot(
            steps, values, color=color, linestyle=line, linewidth=1.3, marker=dots, markersize=2.5,
            label=words,
        )  # fmt: skip
    ax.set_xlabel("step", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)


History = Sequence[tuple[int, float]]
"""Tokens so far and the gap between the halves."""


def convergence_figure(histories: Mapping[int, History], model: str) -> Figure:
    """The gap between the halves against the tokens read, a line for each layer."""
    measured = {layer: points for layer, points in histories.items() if points}
    if not measured:
        raise BadSetting("no gaps to draw: the text was too short to compare its halves")
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
    ax.set_title(f"Convergence of the second moments of {model}", fontsize=MEDIUM, **plain())
    ax.set_xlabel("tokens", fontsize=MEDIUM)
    ax.set_ylabel("relative gap between two halves", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig
