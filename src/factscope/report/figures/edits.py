"""Figures of an edit: every prompt's probabilities before and after.

The neurons that an edit by Knowledge Neurons chose, by layer.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from factscope.errors import BadRecord
from factscope.records import EditRecord, PromptScores
from factscope.report.labels import HEADINGS, old_name
from factscope.report.style import (
    KIND_STYLES,
    MEDIUM,
    SMALL,
    blank_figure,
    display_token,
    label_layers,
    percent_rows,
    plain,
    tidy,
    visible,
)

__all__ = [
    "before_after_figure",
    "has_neurons",
    "neurons_figure",
]

NEW, OLD = "#d9730d", "#4a6fa5"
"""The colours of the new and of the old object."""
ROW, FRAME, WIDTH = 0.4, 1.1, 7.2
"""Inches: a prompt's height, what surrounds the prompts, the figure's width."""
APART = 0.15
"""How far the two objects of a prompt lie from its middle."""
LETTERS, LINES = 46, 2
"""The most that a prompt's label shows."""


def before_after_figure(record: EditRecord) -> Figure:
    """Each prompt as two lines, from before (hollow) to after (filled): new and old object."""
    rows = list(_rows(record))
    fig = blank_figure(WIDTH, FRAME + ROW * len(rows))
    ax = fig.subplots()
    for height, row in enumerate(rows):
        if isinstance(row, PromptScores):
            _draw(ax, height, row)
    _label(ax, rows)
    _frame(ax, record, len(rows))
    return fig


def _rows(record: EditRecord) -> list[PromptScores | str]:
    """The prompts from top to bottom, with a heading above each further kind."""
    rows: list[PromptScores | str] = []
    for kind, heading in HEADINGS.items():
        some = record.of_kind(kind)
        if some and kind != "prompt":
            rows.append(heading)
        rows += some
    return rows


def _draw(ax: Axes, height: int, scores: PromptScores) -> None:
    before, after = scores.before, scores.after
    _dumbbell(ax, height - APART, before.new, after.new, NEW)
    if before.old is not None and after.old is not None and scores.old != scores.new:
        _dumbbell(ax, height + APART, before.old, after.old, OLD)


def _dumbbell(ax: Axes, height: float, before: float, after: float, color: str) -> None:
    ax.plot([before, after], [height, height], color=color, linewidth=2.2, alpha=0.45,
            solid_capstyle="round", zorder=2)  # fmt: skip
    ends = {"s": 30, "edgecolors": color, "linewidths": 1.4, "zorder": 3, "clip_on": False}
    ax.scatter([before], [height], facecolors="white", **ends)
    ax.scatter([after], [height], facecolors=color, **ends)


def _label(ax: Axes, rows: list[PromptScores | str]) -> None:
    """Prompts as labels; headings, set apart by a line, in italics."""
    labels = [row if isinstance(row, str) else _wrapped(row.text) for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=SMALL, **plain())
    for height, (row, tick) in enumerate(zip(rows, ax.get_yticklabels(), strict=True)):
        if isinstance(row, str):
            tick.set_fontstyle("italic")
            tick.set_color("0.4")
            ax.axhline(height, color="0.85", linewidth=0.6, zorder=0)


def _wrapped(text: str) -> str:
    """A prompt on at most so many lines; of a longer one the end, where the object is due."""
    seen = "".join(visible(character) for character in text)
    lines = textwrap.wrap(seen, LETTERS) or [seen]
    return "\n".join(lines if len(lines) <= LINES else ["… " + lines[-LINES], *lines[1 - LINES :]])


def _frame(ax: Axes, record: EditRecord, rows: int) -> None:
    percent_rows(ax, rows, "probability")
    new, old = display_token(record.own.new), display_token(record.own.old or "?")
    title = f"{display_token(record.fact.subject)}: {old} → {new}"
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=22, **plain())
    how = f"{record.method}, {record.model}"
    ax.set_title(how, fontsize=SMALL, color="0.4", loc="right", pad=22, **plain())
    _legend(ax, f"P({new})", f"P({old_name(record.prompts)})")


def _legend(ax: Axes, new: str, old: str) -> None:
    dot = {"marker": "o", "linestyle": "", "markersize": 5.5, "markeredgewidth": 1.4}
    handles = [
        Line2D([], [], color=NEW, linewidth=2.2, label=new),
        Line2D([], [], color=OLD, linewidth=2.2, label=old),
        Line2D([], [], markerfacecolor="white", markeredgecolor="0.35", label="before", **dot),
        Line2D([], [], markerfacecolor="0.35", markeredgecolor="0.35", label="after", **dot),
    ]
    box = ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4,
                    frameon=False, fontsize=SMALL, borderaxespad=0.1, columnspacing=1.4,
                    handletextpad=0.5, borderpad=0.2)  # fmt: skip
    for text in box.get_texts():
        text.set(**plain())


CHOSEN, COARSE = KIND_STYLES["mlp"].line, "#c7e9c0"
"""MLPs are green, as in the paper's other figures."""
NAMED = 12
"""Up to so many neurons are named by their numbers."""
WIDTH, HEIGHT = 7.2, 4.4
ROOM = 0.15
"""Space above and below the dots for their names, as a share of their spread."""


def has_neurons(record: EditRecord) -> bool:
    """Whether the edit chose neurons."""
    return bool(record.settings.get("neurons"))


def neurons_figure(record: EditRecord) -> Figure:
    """Above, how many neurons each layer has; below, what each chosen one adds to the answer."""
    if not has_neurons(record):
        raise BadRecord(f"an edit by {record.method} chose no neurons; make one by kn")
    chosen = [neuron for of_fact in record.settings["neurons"] for neuron in of_fact]
    coarse = np.sum(record.settings["coarse"], axis=0)
    fig = blank_figure(WIDTH, HEIGHT)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
    _draw_counts(upper, chosen, coarse)
    _draw_attributions(lower, chosen)
    label_layers(lower, len(coarse), f"layer of {record.model}")
    answers = ", ".join(
        dict.fromkeys(display_token(answer) for answer in record.settings["answers"])
    )
    title = f"Neurons that speak for {answers}"
    upper.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=18, **plain())
    prompt = record.fact.text if len(record.settings["neurons"]) == 1 else "several facts"
    lower.set_title(prompt, fontsize=SMALL, color="0.4", loc="left", **plain())
    return fig


def _draw_counts(
    ax: Axes, chosen: Sequence[Mapping[str, Any]], coarse: Float[np.ndarray, " layers"]
) -> None:
    """Bars: those of each context on average, and in front of them the chosen ones."""
    layers = np.arange(len(coarse))
    count = np.bincount([neuron["layer"] for neuron in chosen], minlength=len(coarse))
    ax.bar(layers, coarse, width=0.8, color=COARSE, label="in a context, on average")
    ax.bar(layers, count, width=0.4, color=CHOSEN, label="chosen: shared by the contexts")
    tidy(ax)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_ylabel("neurons", fontsize=SMALL)
    ax.legend(
        loc="lower left", bbox_to_anchor=(0, 0.98), ncols=2, frameon=False, fontsize=SMALL,
        borderaxespad=0, borderpad=0.1, handlelength=1.2,
    )  # fmt: skip


def _draw_attributions(ax: Axes, chosen: Sequence[Mapping[str, Any]]) -> None:
    """A dot for each chosen neuron, darker where more contexts share it."""
    tidy(ax)
    for neuron in chosen:
        x, y = neuron["layer"], neuron["attribution"]
        ax.vlines(x, 0, y, color=CHOSEN, linewidth=1.0, alpha=0.4)
        ax.scatter(
            [x], [y], s=34, color=CHOSEN, alpha=0.35 + 0.65 * neuron["share"],
            edgecolors="white", linewidths=0.7, zorder=3,
        )  # fmt: skip
        if len(chosen) <= NAMED:
            ax.annotate(
                str(neuron["neuron"]), (x, y), xytext=(5, 0), textcoords="offset points",
                fontsize=SMALL, color="0.3", va="center",
            )  # fmt: skip
    ax.margins(y=ROOM)
    if all(neuron["attribution"] >= 0 for neuron in chosen):
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.set_ylabel("adds to the answer's P", fontsize=SMALL)
