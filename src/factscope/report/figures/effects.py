"""Figures of many facts: average indirect effects by token role and layer, and severed graphs.

How each metric is spread over cases, method by method (Figure 24).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.effects import AverageEffects, SeveredComparison
from factscope.analysis.estimate import Estimates
from factscope.analysis.metrics import UNEDITED, case_metrics, grouped, setting_of, summary_of
from factscope.errors import BadRecord, BadSetting
from factscope.records import CaseRecord, CaseScores
from factscope.report.labels import editor_name, row_name
from factscope.report.style import (
    KIND_STYLES,
    MEDIUM,
    SMALL,
    HeatMap,
    KindStyle,
    blank_figure,
    draw_heatmap,
    label_layers,
    plain,
    tidy,
)

__all__ = [
    "average_heatmap",
    "average_heatmaps",
    "average_lines",
    "distributions_figure",
    "severed_figure",
]

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
        draw_heatmap(ax, average_heat(average, KIND_STYLES[kind], high), rows=i == 0)
    return fig


def average_heat(effects: AverageEffects, look: KindStyle, high: float) -> HeatMap:
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
        title = f"Average indirect effect of a {words(KIND_STYLES[kind].run, average)}"
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
    graphs = {"Effect of single state": (comparison.intact, KIND_STYLES["states"].line)}
    for module, row in comparison.severed.items():
        look = KIND_STYLES[module]
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
    unknown = [kind for kind in effects if kind not in KIND_STYLES]
    if unknown or not effects:
        raise BadSetting(
            f"cannot draw the kinds {list(effects)}; there are: {', '.join(KIND_STYLES)}"
        )


PANELS = {
    "ES": "Efficacy, ES (%)",
    "PS": "Paraphrases, PS (%)",
    "NS": "Neighbours, NS (%)",
    "EM": "Efficacy, EM (%)",
    "PM": "Paraphrases, PM (%)",
    "NM": "Neighbours, NM (%)",
    "GE": "Fluency, GE",
    "RS": "Consistency, RS (%)",
    "efficacy": "Efficacy (%)",
    "paraphrase": "Paraphrases (%)",
    "specificity": "Specificity (%)",
}
"""Metric → the title of its panel."""
SHARES = ("ES", "PS", "NS", "efficacy", "paraphrase", "specificity")
"""Metrics from 0 to 100 %."""
MEAN, BOX = "#d9730d", "#4a6fa5"


def distributions_figure(records: Iterable[CaseRecord]) -> Figure:
    """A panel a metric, a box a method; the mean is dotted, dots are beyond 1.5 times the box."""
    found = distributions(records)
    names = [name for name in PANELS if any(name in mine for mine in found.values())]
    if not names:
        raise BadRecord("there are no scores to draw; evaluate some cases first")
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    fig = blank_figure(max(1.9, 0.55 * len(found) + 1.1) * columns, 2.5 * rows)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax, name in zip(axes, names, strict=False):
        _boxes(ax, name, {method: mine.get(name, []) for method, mine in found.items()})
    for ax in axes[len(names) :]:
        ax.set_visible(False)
    return fig


def distributions(records: Iterable[CaseRecord]) -> dict[str, dict[str, list[float]]]:
    """Row → metric → the values of its cases; the unedited model's first."""
    everyone = list(records)
    before = {record.fact: record.before for record in everyone if record.before is not None}
    found = {editor_name(UNEDITED): _columns(before.values())}
    edits = [record for record in everyone if record.method != UNEDITED]
    for some in grouped(edits, setting_of).values():
        after = [record.after for record in some if record.after is not None]
        found[row_name(summary_of(some))] = _columns(after)
    return {row: columns for row, columns in found.items() if columns}


def _columns(cases: Iterable[CaseScores]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for scores in cases:
        for name, value in case_metrics(scores).items():
            columns.setdefault(name, []).append(100 * value)
    return columns


def _boxes(ax: Axes, name: str, values: Mapping[str, Sequence[float]]) -> None:
    ax.boxplot(
        list(values.values()), tick_labels=list(values),
        showmeans=True, meanline=True, widths=0.5,
        meanprops={"color": MEAN, "linestyle": ":", "linewidth": 1.6},
        medianprops={"color": "0.35", "linewidth": 1.0},
        boxprops={"color": "0.35", "linewidth": 0.8},
        whiskerprops={"color": "0.35", "linewidth": 0.8},
        capprops={"color": "0.35", "linewidth": 0.8},
        flierprops={"marker": "o", "markersize": 2, "markerfacecolor": BOX,
                    "markeredgecolor": "none", "alpha": 0.5},
    )  # fmt: skip
    if name in SHARES:
        ax.set_ylim(-4, 104)
    ax.set_title(PANELS[name], fontsize=MEDIUM)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    for label in ax.get_xticklabels():
        label.set(parse_math=False, rotation=30, ha="right", fontfamily=plain()["fontfamily"])
