"""The figure of a training: how the edits of held-out facts got better, and what else moved."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.errors import BadSetting
from factscope.records.training import TrainingRecord
from factscope.report.canvas import MEDIUM, SMALL, blank_figure, plain

__all__ = ["training_figure"]

LOSSES = (
    ("edit", "new object", "#3b0f70"),
    ("rephrased", "in other words", "#8c2981"),
    ("local", "elsewhere (KL)", "#d95f0e"),
)
SHARES = (
    ("said", "new object said", "#3b0f70"),
    ("said_rephrased", "in other words", "#8c2981"),
    ("kept", "unchanged elsewhere", "#d95f0e"),
)
"""Field of a record → its words and colour."""


def training_figure(records: Sequence[TrainingRecord], title: str) -> Figure:
    """Losses and shares on the held-out examples against the steps."""
    if not records:
        raise BadSetting("no records of training to draw yet")
    fig = blank_figure(7.6, 3.0)
    left, right = fig.subplots(1, 2)
    unedited: dict[str, Any] = {"color": "#999999", "linewidth": 0.8, "linestyle": ":"}
    left.axhline(records[0].before, label="new object, unedited", **unedited)
    _lines(left, records, LOSSES)
    left.set_ylabel("loss on held-out facts", fontsize=MEDIUM)
    left.set_ylim(bottom=0)
    _lines(right, records, SHARES)
    right.set_ylabel("share of held-out facts", fontsize=MEDIUM)
    right.set_ylim(-0.02, 1.02)
    fig.suptitle(title, fontsize=MEDIUM, **plain())
    return fig


def _lines(ax: Axes, records: Sequence[TrainingRecord], of: Sequence[tuple[str, str, str]]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    steps = [record.step for record in records]
    for name, words, color in of:
        values = [getattr(record, name) for record in records]
        ax.plot(steps, values, color=color, linewidth=1.3, label=words)
    ax.set_xlabel("step", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
