"""The figure of a training: how the edits of held-out facts got better, and what else moved."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.training import Course
from factscope.report.canvas import MEDIUM, SMALL, blank_figure, plain
from factscope.report.training_table import training_title

__all__ = ["training_figure"]

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


def training_figure(course: Course) -> Figure:
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


def _lines(ax: Axes, course: Course, of: Sequence[tuple[str, str, str, str]]) -> None:
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
