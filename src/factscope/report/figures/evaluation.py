"""Figures of evaluations: scores, their distributions over cases, sweeps, human preferences."""

import math
from collections.abc import Iterable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import UNEDITED, Summary, case_metrics, group_by_row, summary_of
from factscope.analysis.preferences import Preference
from factscope.analysis.sweep import Line, Sweep
from factscope.errors import BadRecord
from factscope.records import CaseRecord, CaseScores
from factscope.report.labels import (
    AXIS_NAMES,
    METRIC_TITLES,
    QUESTION_LABELS,
    editor_name,
    group_title,
    line_label,
    ratio_text,
    row_name,
    setting_name,
    sweep_title,
)
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    layer_ticks,
    legend_above,
    literal_text,
    panel_axes,
    percent_rows,
    style_axes,
)

WIDTH = 7.2
"""Inches, of the figures of scores and preferences."""
ORANGE, PURPLE, BLUE = "#d9730d", "#6a51a3", "#4a6fa5"
COLORS = (ORANGE, PURPLE, BLUE, "#238b45", "#cb181d", "#8c564b", "#1f9aa8", "#b5651d")

# ---- scores

COUNTERFACT = {"ES": "efficacy, ES", "PS": "paraphrases, PS", "NS": "neighbours, NS"}
ZSRE = {name: name for name in ("efficacy", "paraphrase", "specificity")}
"""Metrics of each data set with their labels."""
SPACING = 0.22
"""Between the scores of a row, as a fraction of the row."""


def scores_figure(rows: Sequence[Summary]) -> Figure:
    """Three scores of every row with 95 % intervals; published scores are hollow."""
    metrics = ZSRE if any("efficacy" in row.metrics for row in rows) else COUNTERFACT
    colors = dict(zip(metrics, (ORANGE, PURPLE, BLUE), strict=True))
    fig = blank_figure(WIDTH, 1.1 + 0.42 * len(rows))
    ax = fig.subplots()
    for i, row in enumerate(rows):
        for j, (name, color) in enumerate(colors.items()):
            value, y = row.metrics.get(name), i + (j - 1) * SPACING
            if value is None:
                continue
            if not math.isnan(value.half_width):
                ends = [max(0.0, value.low), min(1.0, value.high)]
                ax.plot(ends, [y, y], color=color, linewidth=1.4, alpha=0.6, zorder=2)
            face = "white" if row.published else color
            ax.scatter([value.mean], [y], s=24, facecolors=face, edgecolors=color, linewidths=1.3,
                       zorder=3, clip_on=False)  # fmt: skip
        if i:
            ax.axhline(i - 0.5, color="0.92", linewidth=0.6, zorder=0)
    names = [row_name(row) for row in rows]
    ax.set_yticks(range(len(rows)), names, fontsize=SMALL, **literal_text())
    percent_rows(ax, len(rows), "mean over cases, with 95 % interval")
    title = group_title(rows)
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=22, **literal_text())
    dot = {"marker": "o", "linestyle": "", "markersize": 5, "markeredgewidth": 1.3}
    handles = [
        Line2D([], [], color=colors[name], label=label, **dot) for name, label in metrics.items()
    ]
    if any(row.published for row in rows):
        hollow = {**dot, "markerfacecolor": "white", "markeredgecolor": "0.35"}
        handles.append(Line2D([], [], label="published", **hollow))
    legend_above(ax, handles)
    return fig


# ---- distributions (Figure 24)

DISTRIBUTION_PANELS = (
    "ES", "PS", "NS", "EM", "PM", "NM", "GE", "RS", "efficacy", "paraphrase", "specificity",
)  # fmt: skip
FRACTIONS = ("ES", "PS", "NS", "efficacy", "paraphrase", "specificity")
"""Metrics between 0 and 100 %."""


def distributions_figure(records: Iterable[CaseRecord]) -> Figure:
    """Box plots over cases, one panel per metric. Dotted: the mean. Dots: beyond 1.5 × IQR."""
    values = distributions(records)
    names = [n for n in DISTRIBUTION_PANELS if any(n in metrics for metrics in values.values())]
    if not names:
        raise BadRecord("there are no scores to draw; evaluate some cases first")
    columns = min(len(names), 4)
    width = max(1.9, 0.55 * len(values) + 1.1)
    fig = blank_figure(width * columns, 2.5 * math.ceil(len(names) / columns))
    line = {"color": "0.35", "linewidth": 0.8}
    for ax, name in zip(panel_axes(fig, len(names), columns), names, strict=True):
        ax.boxplot(
            [metrics.get(name, []) for metrics in values.values()], tick_labels=list(values),
            showmeans=True, meanline=True, widths=0.5,
            meanprops={"color": ORANGE, "linestyle": ":", "linewidth": 1.6},
            medianprops={"color": "0.35", "linewidth": 1.0},
            boxprops=line, whiskerprops=line, capprops=line,
            flierprops={"marker": "o", "markersize": 2, "markerfacecolor": BLUE,
                        "markeredgecolor": "none", "alpha": 0.5},
        )  # fmt: skip
        if name in FRACTIONS:
            ax.set_ylim(-4, 104)
        _metric_panel(ax, name)
        style_axes(ax, zero=False)
        for label in ax.get_xticklabels():
            label.set(rotation=30, ha="right", **literal_text())
    return fig


def _metric_panel(ax: Axes, name: str) -> None:
    """The title of a metric and horizontal grid lines."""
    ax.set_title(METRIC_TITLES.get(name, name), fontsize=MEDIUM)
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)


def distributions(records: Iterable[CaseRecord]) -> dict[str, dict[str, list[float]]]:
    """Row → metric → the values of its cases, in percent; the unedited model first."""
    records = list(records)
    before = {record.fact: record.before for record in records if record.before is not None}
    by_row = {editor_name(UNEDITED): _metric_values(before.values())}
    for group in group_by_row(records):
        after = [record.after for record in group if record.after is not None]
        by_row[row_name(summary_of(group))] = _metric_values(after)
    return {row: metrics for row, metrics in by_row.items() if metrics}


def _metric_values(cases: Iterable[CaseScores]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for scores in cases:
        for name, value in case_metrics(scores).items():
            values.setdefault(name, []).append(100 * value)
    return values


# ---- sweeps (Figures 5, 17, 18 and 23)

SWEEP_PANELS = ("S", "ES", "PS", "NS", "RS", "GE", "efficacy", "paraphrase", "specificity")
"""Metrics that are drawn if they were measured."""
UNSCALED = ("RS", "GE")
"""Metrics whose axis spans their values; other axes span 0 to 100 %."""
MAX_MARKERS = 20
"""Lines through more points have no markers."""
TOKEN_COLORS = {
    "subject-first": "#1f77b4",
    "subject-last": "#2ca02c",
    "after-subject": "#9467bd",
    "last": "#d62728",
}
"""The same colours as in the figures of average effects."""
UNLIMITED_COLOR = "0.2"


def sweep_figure(sweep: Sweep, metrics: Sequence[str] | None = None) -> Figure:
    """One panel per metric, one line per setting, with 95 % intervals.

    `metrics` are drawn if they were measured; None draws all that were.
    """
    names = sweep.measured(SWEEP_PANELS if metrics is None else metrics)
    if not names:
        raise BadRecord("no point of the sweep has a score; there is nothing to draw")
    columns = len(names) if len(names) < 5 else math.ceil(len(names) / 2)
    rows = math.ceil(len(names) / columns)
    fig = blank_figure(max(2.55 * columns + 0.5, 5.5), 2.35 * rows + 0.75)
    axes = panel_axes(fig, len(names), columns)
    colors = _line_colors(sweep.lines)
    for ax, name in zip(axes, names, strict=True):
        for line, color in zip(sweep.lines, colors, strict=True):
            _draw_line(ax, sweep, line, name, color)
        style_axes(ax)
        _metric_panel(ax, name)
        _sweep_y_axis(ax, sweep, name)
        _sweep_x_axis(ax, sweep)
    fig.suptitle(sweep_title(sweep), fontsize=MEDIUM, fontweight="bold", **literal_text())
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5),
               frameon=False, fontsize=SMALL)  # fmt: skip
    return fig


def _draw_line(ax: Axes, sweep: Sweep, line: Line, name: str, color: str) -> None:
    """A line with its confidence band; values without an order are dots with error bars."""
    values, axis = list(sweep.grid[sweep.x_axis]), sweep.x_axis
    settings = [point.settings[axis] for point in line.points]
    x = np.array([s if axis == "layer" else values.index(s) for s in settings], dtype=float)
    unmeasured = Estimate(math.nan, 0.0, 0)
    estimates = [point.metric(name) or unmeasured for point in line.points]
    y = 100 * np.array([estimate.mean for estimate in estimates])
    half_width = 100 * np.nan_to_num([estimate.half_width for estimate in estimates])
    low, high = y - half_width, y + half_width
    if name not in UNSCALED:
        low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
    label = line_label(line.settings) if line.settings else "edited"
    if axis in ("layer", "max_change"):
        ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        size = 2.2 if len(values) <= MAX_MARKERS else 0
        ax.plot(x, y, color=color, linewidth=1.3, marker="o", markersize=size, label=label)
    else:
        ax.vlines(x, low, high, color=color, linewidth=1.2)
        ax.plot(x, y, color=color, linestyle="", marker="o", markersize=4, label=label)


def _sweep_y_axis(ax: Axes, sweep: Sweep, name: str) -> None:
    """The scale of a metric, and the score of the unedited model."""
    unedited = sweep.unedited.metrics.get(name) if sweep.unedited else None
    levels = [] if unedited is None else [100 * unedited.mean]
    for level in levels:
        ax.axhline(level, color="0.45", linewidth=0.9, linestyle=":", label="unedited")
    if name not in UNSCALED:
        ax.set_ylim(-3, 103)
        ax.set_yticks(range(0, 101, 20))
        return
    for value in filter(None, (point.metric(name) for point in sweep.points)):
        half_width = 0.0 if math.isnan(value.half_width) else value.half_width
        levels += [100 * (value.mean - half_width), 100 * (value.mean + half_width)]
    margin = 0.08 * (max(levels) - min(levels)) or 1.0
    ax.set_ylim(min(levels) - margin, max(levels) + margin)


def _sweep_x_axis(ax: Axes, sweep: Sweep) -> None:
    axis, values = sweep.x_axis, list(sweep.grid[sweep.x_axis])
    if axis == "layer":
        layers = [int(value) for value in values]
        first, last = min(layers), max(layers)
        spaced = [tick for tick in layer_ticks(last + 1) if tick >= first]
        ticks = layers if len(layers) <= 8 else spaced
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set_xlim(first - 0.5, last + 0.5)
    else:
        # In short lines, so that neighbouring labels do not overlap.
        names = [setting_name(axis, value) for value in values]
        labels = [
            name.replace(", ", ",\n") if "," in name else name.replace(" token", "\ntoken")
            for name in names
        ]
        ax.set_xticks(range(len(labels)), labels, fontsize=SMALL, **literal_text())
        ax.set_xlim(-0.5, len(labels) - 0.5)
    ax.set_xlabel(AXIS_NAMES.get(axis, axis), fontsize=SMALL)


def _line_colors(lines: Sequence[Line]) -> list[str]:
    """A token's own colour; larger bounds darker; other settings in turn."""
    axes = list(lines[0].settings)
    if axes == ["token"]:
        return [TOKEN_COLORS.get(str(line.settings["token"]), COLORS[0]) for line in lines]
    if axes == ["max_change"]:
        bounds = [line.settings["max_change"] for line in lines]
        numbers = sorted(bound for bound in bounds if not isinstance(bound, str))
        shades = matplotlib.colormaps["YlOrRd"](np.linspace(0.4, 0.9, len(numbers)))
        colors = dict(zip(numbers, map(to_hex, shades), strict=True))
        return [UNLIMITED_COLOR if isinstance(b, str) else colors[b] for b in bounds]
    return [COLORS[i % len(COLORS)] for i in range(len(lines))]


# ---- human preferences (Figure 26)

TIES = "#d8d6dd"
MIN_LABELLED = 0.045
"""Narrower parts of a bar, as fractions of it, get no label."""


def preferences_figure(preferences: Sequence[Preference]) -> Figure:
    """One panel per question, one bar per pair: votes for the first method, ties, the second."""
    panels = {name: [p for p in preferences if p.question == name] for name in QUESTION_LABELS}
    panels = {name: rows for name, rows in panels.items() if rows}
    heights = [0.75 + 0.62 * len(rows) for rows in panels.values()]
    fig = blank_figure(WIDTH, sum(heights))
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (question, rows) in zip(axes, panels.items(), strict=True):
        for y, preference in enumerate(rows):
            _draw_votes(ax, y, preference)
        ax.set_xlim(0, 1)
        ax.set_ylim(len(rows) - 0.45, -0.6)
        ax.set_xticks([])
        for i, side in enumerate((ax, ax.secondary_yaxis("right"))):
            names = [editor_name(preference.pair[i]) for preference in rows]
            side.set_yticks(range(len(rows)), names, fontsize=MEDIUM, **literal_text())
            side.tick_params(axis="y", length=0)
            side.spines[:].set_visible(False)
        raters, cases = max(row.raters for row in rows), max(row.cases for row in rows)
        count = f"{raters} rater{'' if raters == 1 else 's'}, {cases} cases"
        title = f"{QUESTION_LABELS[question].capitalize()} ({count})"
        ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=4)
    return fig


def _draw_votes(ax: Axes, y: int, preference: Preference) -> None:
    """The bar of a pair of methods with the numbers of votes, and their ratio below it."""
    first, second = preference.wins
    parts = ((first, ORANGE, "white"), (preference.ties, TIES, "0.25"), (second, BLUE, "white"))
    total, left = first + preference.ties + second, 0.0
    for count, color, text_color in parts:
        width = count / total
        ax.barh(y, width, left=left, height=0.5, color=color, linewidth=0)
        if width > MIN_LABELLED:
            ax.text(left + width / 2, y, str(count), ha="center", va="center", color=text_color,
                    fontsize=MEDIUM)  # fmt: skip
        left += width
    ratio = f"ratio {ratio_text(preference)}" if preference.votes else "no votes for either"
    ax.text(0.5, y + 0.27, ratio, ha="center", va="top", fontsize=SMALL, color="0.3")
