"""Figures of average indirect effects (AIE) over many facts, and of severed graphs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from factscope.analysis.effects import AverageEffects, SeveredComparison
from factscope.errors import BadSetting
from factscope.report.labels import KIND_STYLES
from factscope.report.style import (
    MEDIUM,
    SMALL,
    HeatMap,
    blank_figure,
    draw_heatmap,
    highest_cell,
    label_layers,
    literal_text,
    style_axes,
)

ROLE_COLORS = {
    "first subject token": "#1f77b4",
    "middle subject tokens": "#ff7f0e",
    "last subject token": "#2ca02c",
    "first subsequent token": "#9467bd",
    "further tokens": "#8c564b",
    "last token": "#d62728",
}


def average_heatmap(effects: AverageEffects, kind: str = "states") -> Figure:
    """AIE by token role and layer (Figure 2); negative effects have the lightest colour."""
    return average_heatmaps({kind: effects})


def average_heatmaps(effects: Mapping[str, AverageEffects]) -> Figure:
    """The same for several kinds side by side, on the colour scale of the first."""
    _check_kinds(effects)
    high = highest_cell(next(iter(effects.values())).mean, 0.0)
    fig = blank_figure(3.6 * len(effects) + 0.9, 2.15)
    axes = fig.subplots(1, len(effects), squeeze=False)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        style = KIND_STYLES[kind]
        heatmap = HeatMap(
            cells=np.clip(average.mean, 0, None),
            row_labels=[role.capitalize() for role in average.roles],
            colormap=style.colormap,
            low=0.0,
            high=high,
            title=f"Avg indirect effect of {style.label} over {average.facts} facts",
            xlabel=style.axis.format(window=average.window or "the", model=average.model),
            colorbar_label="AIE",
        )
        draw_heatmap(ax, heatmap, row_labels=ax is axes[0])
    return fig


def average_lines(effects: Mapping[str, AverageEffects]) -> Figure:
    """AIE by layer with 95 % intervals: one panel per kind, one line per token role (App. B)."""
    _check_kinds(effects)
    fig = blank_figure(3.9 * len(effects) + 0.3, 3.2)
    axes = fig.subplots(1, len(effects), squeeze=False, sharey=True)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        style_axes(ax)
        for role in filter(average.measured, average.roles):
            row, layers, color = average.row(role), np.arange(average.layers), ROLE_COLORS[role]
            low, high = row.mean - row.half_width, row.mean + row.half_width
            ax.fill_between(layers, low, high, color=color, alpha=0.25, linewidth=0)
            ax.plot(layers, row.mean, color=color, linewidth=1.3, label=role.capitalize())
        intervention = KIND_STYLES[kind].intervention.format(window=average.window or "the")
        title = f"Average indirect effect of a {intervention}"
        ax.set_title(title, fontsize=MEDIUM, **literal_text())
        label_layers(ax, average.layers, f"layer in {average.model}")
    axes[0].set_ylabel("average indirect effect on p(o)", fontsize=MEDIUM)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, fontsize=SMALL)
    return fig


def severed_figure(comparison: SeveredComparison) -> Figure:
    """AIE of states at the last subject token, intact and with a module severed (Figure 3)."""
    bars = [("Effect of single state", comparison.intact, KIND_STYLES["states"].color)]
    for module, row in comparison.severed.items():
        style = KIND_STYLES[module]
        bars.append((f"Effect with {style.label} severed", row, style.color))
    fig = blank_figure(7.2, 2.9)
    ax = fig.subplots()
    style_axes(ax)
    width = 0.84 / len(bars)
    for i, (label, row, color) in enumerate(bars):
        x = np.arange(len(row)) + width * (i - (len(bars) - 1) / 2)
        ax.bar(x, row.mean, width, label=label, color=color)
        ax.errorbar(x, row.mean, row.half_width, fmt="none", ecolor="0.25", elinewidth=0.5)
    title = f"Effect of states at the last subject token over {comparison.facts} facts"
    ax.set_title(title, fontsize=MEDIUM)
    where = f"layer of {comparison.model} at which the single state is restored"
    label_layers(ax, len(comparison.intact), where)
    ax.set_ylabel("average indirect effect", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


def _check_kinds(effects: Mapping[str, AverageEffects]) -> None:
    if not effects or not effects.keys() <= KIND_STYLES.keys():
        raise BadSetting(
            f"cannot draw the kinds {list(effects)}; there are: {', '.join(KIND_STYLES)}"
        )
