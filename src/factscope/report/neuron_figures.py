"""The neurons that an edit by Knowledge Neurons chose, by layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from factscope.errors import BadRecord
from factscope.records import EditRecord
from factscope.report.canvas import MEDIUM, SMALL, blank_figure, label_layers, plain, tidy
from factscope.report.look import LOOKS, shown

__all__ = ["has_neurons", "neurons_figure"]

CHOSEN, COARSE = LOOKS["mlp"].line, "#c7e9c0"
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
    answers = ", ".join(dict.fromkeys(shown(answer) for answer in record.settings["answers"]))
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
