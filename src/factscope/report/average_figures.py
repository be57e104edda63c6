"""Figures of many facts: average indirect effects by token role and layer, and severed graphs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.effects import AverageEffects
from factscope.analysis.estimate import Estimates
from factscope.analysis.severed import SeveredComparison
from factscope.errors import BadSetting
from factscope.report.canvas import (
    MEDIUM,
    SMALL,
    HeatMap,
    blank_figure,
    draw_heatmap,
    label_layers,
    plain,
    tidy,
)
from factscope.report.look import LOOKS, Look

__all__ = ["average_heatmap", "average_heatmaps", "average_lines", "severed_figure"]

ROLE_COLORS = {
    "first subject token": "#1f77b4",
    "middle subject tokens": "#ff7f0e",
    "last subject token": "#2ca02c",
    "first subsequent token": "#9467bd",
    "further tokens": "#8c564b",
    "last token": "#d62728",
}


def average_heatmap(effects: AverageEffects, kind: str = "states") -> Figure:
    """AIE by token role and layer (Figure 2); an effect below 0 has the lightest colour."""
    return average_heatmaps({kind: effects})


def average_heatmaps(effects: Mapping[str, AverageEffects]) -> Figure:
    """The same for several kinds, side by side, all on the scale of the first."""
    check(effects)
    first = next(iter(effects.values())).mean
    high = float(np.max(first, initial=1e-3, where=~np.isnan(first)))
    fig = blank_figure(3.6 * len(effects) + 0.9, 2.15)
    axes = fig.subplots(1, len(effects), squeeze=False)[0]
    for i, (ax, (kind, average)) in enumerate(zip(axes, effects.items(), strict=True)):
        draw_heatmap(ax, average_heat(average, LOOKS[kind], high), rows=i == 0)
    return fig


def average_heat(effects: AverageEffects, look: Look, high: float) -> HeatMap:
    """The average effects as coloured cells."""
    return HeatMap(
        cells=np.clip(effects.mean, 0, None),
        rows=[role.capitalize() for role in effects.roles],
        colormap=look.colormap,
        low=0.0,
        high=high,
        title=f"Avg indirect effect of {look.what} over {effects.facts} facts",
        axis=words(look.axis, effects),
        scale="AIE",
    )


def average_lines(effects: Mapping[str, AverageEffects]) -> Figure:
    """AIE as lines with 95 % intervals, a panel for each kind and a line for each role (App. B)."""
    check(effects)
    fig = blank_figure(3.9 * len(effects) + 0.3, 3.2)
    axes = fig.subplots(1, len(effects), squeeze=False, sharey=True)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        draw_roles(ax, average)
        title = f"Average indirect effect of a {words(LOOKS[kind].run, average)}"
        ax.set_title(title, fontsize=MEDIUM, **plain())
        label_layers(ax, average.layers, f"layer in {average.model}")
    axes[0].set_ylabel("average indirect effect on p(o)", fontsize=MEDIUM)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, fontsize=SMALL)
    return fig


def draw_roles(ax: Axes, effects: AverageEffects) -> None:
    """One line with its band for each role that was measured."""
    tidy(ax)
    for role in effects.roles:
        if effects.measured(role):
            draw_band(ax, effects.row(role), role.capitalize(), ROLE_COLORS[role])


def draw_band(ax: Axes, row: Estimates, label: str, color: str) -> None:
    """A line through the means, in the band of their intervals."""
    layers = np.arange(len(row))
    low, high = row.mean - row.half_width, row.mean + row.half_width
    ax.fill_between(layers, low, high, color=color, alpha=0.25, linewidth=0)
    ax.plot(layers, row.mean, color=color, linewidth=1.3, label=label)


def severed_figure(comparison: SeveredComparison) -> Figure:
    """AIE of states at the last subject token, with MLP or attention severed or not (Figure 3)."""
    graphs = {"Effect of single state": (comparison.intact, LOOKS["states"].line)}
    for module, row in comparison.severed.items():
        look = LOOKS[module]
        graphs[f"Effect with {look.what} severed"] = (row, look.line)
    fig = blank_figure(7.2, 2.9)
    ax = fig.subplots()
    tidy(ax)
    for i, (label, (row, color)) in enumerate(graphs.items()):
        draw_bars(ax, row, label, color, place=(i, len(graphs)))
    title = f"Effect of states at the last subject token over {comparison.facts} facts"
    ax.set_title(title, fontsize=MEDIUM)
    where = f"layer of {comparison.model} at which the single state is restored"
    label_layers(ax, len(comparison.intact), where)
    ax.set_ylabel("average indirect effect", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


def draw_bars(ax: Axes, row: Estimates, label: str, color: str, place: tuple[int, int]) -> None:
    """A bar for each layer with its 95 % interval, beside those of the other graphs."""
    i, count = place
    width = 0.84 / count
    x = np.arange(len(row)) + width * (i - (count - 1) / 2)
    ax.bar(x, row.mean, width, label=label, color=color)
    ax.errorbar(x, row.mean, row.half_width, fmt="none", ecolor="0.25", elinewidth=0.5)


def words(template: str, effects: AverageEffects) -> str:
    """A label with the model and window that it speaks of."""
    return template.format(window=effects.window or "the", model=effects.model)


def check(effects: Mapping[str, AverageEffects]) -> None:
    """At least one kind, and only kinds that have a look."""
    unknown = [kind for kind in effects if kind not in LOOKS]
    if unknown or not effects:
        raise BadSetting(f"cannot draw the kinds {list(effects)}; there are: {', '.join(LOOKS)}")
