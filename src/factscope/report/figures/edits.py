"""Figures of one edit: probabilities before and after, and the selected knowledge neurons."""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from factscope.errors import BadRecord
from factscope.records import EditRecord, PromptChange
from factscope.report.labels import (
    KIND_STYLES,
    PROMPT_HEADINGS,
    display_token,
    old_object_label,
    printable,
)
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    label_layers,
    legend_above,
    literal_text,
    percent_rows,
    style_axes,
)

WIDTH = 7.2
"""Inches."""


# ---- before and after

NEW, OLD = "#d9730d", "#4a6fa5"
"""Colours of the new and the old object."""
ROW_HEIGHT, MARGIN = 0.4, 1.1
"""Inches."""
OFFSET = 0.15
"""Of the two objects of a prompt from the middle of its row."""
MAX_LINE, MAX_LINES = 46, 2
"""Characters and lines of a prompt's label."""


def before_after_figure(record: EditRecord) -> Figure:
    """The probability of the new and old object after each prompt, before and after the edit."""
    rows: list[PromptChange | str] = []
    for kind, heading in PROMPT_HEADINGS.items():
        prompts = record.of_kind(kind)
        rows += [heading, *prompts] if prompts and kind != "prompt" else prompts
    fig = blank_figure(WIDTH, MARGIN + ROW_HEIGHT * len(rows))
    ax = fig.subplots()
    labels = [row if isinstance(row, str) else _prompt_label(row.text) for row in rows]
    ax.set_yticks(range(len(rows)), labels, fontsize=SMALL, **literal_text())
    for y, (row, tick) in enumerate(zip(rows, ax.get_yticklabels(), strict=True)):
        if isinstance(row, str):
            tick.set_fontstyle("italic")
            tick.set_color("0.4")
            ax.axhline(y, color="0.85", linewidth=0.6, zorder=0)
            continue
        _draw_change(ax, y - OFFSET, row.before.new, row.after.new, NEW)
        if row.before.old is not None and row.after.old is not None and row.old != row.new:
            _draw_change(ax, y + OFFSET, row.before.old, row.after.old, OLD)
    percent_rows(ax, len(rows), "probability")
    new, old = display_token(record.fact_prompt.new), display_token(record.fact_prompt.old or "?")
    title = f"{display_token(record.fact.subject)}: {old} → {new}"
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=22, **literal_text())
    source = f"{record.method}, {record.model}"
    ax.set_title(source, fontsize=SMALL, color="0.4", loc="right", pad=22, **literal_text())
    dot = {"marker": "o", "linestyle": "", "markersize": 5.5, "markeredgewidth": 1.4,
           "markeredgecolor": "0.35"}  # fmt: skip
    legend_above(ax, [
        Line2D([], [], color=NEW, linewidth=2.2, label=f"P({new})"),
        Line2D([], [], color=OLD, linewidth=2.2, label=f"P({old_object_label(record.prompts)})"),
        Line2D([], [], markerfacecolor="white", label="before", **dot),
        Line2D([], [], markerfacecolor="0.35", label="after", **dot),
    ])  # fmt: skip
    return fig


def _draw_change(ax: Axes, y: float, before: float, after: float, color: str) -> None:
    """A line from before (hollow dot) to after (filled dot)."""
    ax.plot([before, after], [y, y], color=color, linewidth=2.2, alpha=0.45,
            solid_capstyle="round", zorder=2)  # fmt: skip
    for x, face in ((before, "white"), (after, color)):
        ax.scatter([x], [y], s=30, facecolors=face, edgecolors=color, linewidths=1.4, zorder=3,
                   clip_on=False)  # fmt: skip


def _prompt_label(text: str) -> str:
    """The prompt in a few lines; of a long one the end, which the object follows."""
    text = printable(text)
    lines = textwrap.wrap(text, MAX_LINE) or [text]
    if len(lines) > MAX_LINES:
        lines = lines[-MAX_LINES:]
        lines[0] = "… " + lines[0]
    return "\n".join(lines)


# ---- knowledge neurons

SELECTED, COARSE = KIND_STYLES["mlp"].color, "#c7e9c0"
"""Colours of selected neurons, and of those that coarse selection found."""
MAX_LABELLED = 12
"""With more neurons, their numbers are not drawn."""


def has_neurons(record: EditRecord) -> bool:
    """Whether the edit selected neurons."""
    return bool(record.settings.get("neurons"))


def neurons_figure(record: EditRecord) -> Figure:
    """Above: the number of neurons per layer. Below: the attribution of each selected neuron."""
    if not has_neurons(record):
        raise BadRecord(f"an edit by {record.method} has no neurons; edit with kn")
    settings = record.settings
    neurons = [neuron for of_fact in settings["neurons"] for neuron in of_fact]
    coarse = np.sum(settings["coarse"], axis=0)
    layers = np.arange(len(coarse))
    fig = blank_figure(WIDTH, 4.4)
    upper, lower = fig.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))

    selected = np.bincount([neuron["layer"] for neuron in neurons], minlength=len(coarse))
    upper.bar(layers, coarse, width=0.8, color=COARSE, label="coarse selection, mean per context")
    upper.bar(layers, selected, width=0.4, color=SELECTED, label="selected in enough contexts")
    style_axes(upper)
    upper.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    upper.set_ylabel("neurons", fontsize=SMALL)
    upper.legend(
        loc="lower left", bbox_to_anchor=(0, 0.98), ncols=2, frameon=False, fontsize=SMALL,
        borderaxespad=0, borderpad=0.1, handlelength=1.2,
    )  # fmt: skip
    answers = ", ".join(dict.fromkeys(map(display_token, settings["answers"])))
    upper.set_title(
        f"Knowledge neurons for {answers}",
        fontsize=MEDIUM, fontweight="bold", loc="left", pad=18, **literal_text(),
    )  # fmt: skip

    style_axes(lower)
    for neuron in neurons:
        x, y = neuron["layer"], neuron["attribution"]
        # Darker: selected in more contexts. Records of older versions call the fraction "share".
        fraction = neuron.get("context_fraction", neuron.get("share", 1.0))
        lower.vlines(x, 0, y, color=SELECTED, linewidth=1.0, alpha=0.4)
        lower.scatter([x], [y], s=34, color=SELECTED, alpha=0.35 + 0.65 * fraction,
                      edgecolors="white", linewidths=0.7, zorder=3)  # fmt: skip
        if len(neurons) <= MAX_LABELLED:
            lower.annotate(
                str(neuron["neuron"]), (x, y), xytext=(5, 0), textcoords="offset points",
                fontsize=SMALL, color="0.3", va="center",
            )  # fmt: skip
    lower.margins(y=0.15)  # room for the numbers
    if all(neuron["attribution"] >= 0 for neuron in neurons):
        lower.set_ylim(bottom=0)
    lower.yaxis.set_major_formatter(PercentFormatter(1.0))
    lower.yaxis.set_major_locator(MaxNLocator(5))
    lower.set_ylabel("attribution to P(answer)", fontsize=SMALL)
    label_layers(lower, len(coarse), f"layer of {record.model}")
    prompt = record.fact.text if len(settings["neurons"]) == 1 else "several facts"
    lower.set_title(prompt, fontsize=SMALL, color="0.4", loc="left", **literal_text())
    return fig
