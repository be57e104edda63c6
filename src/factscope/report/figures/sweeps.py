"""Figure of a sweep: one panel per metric, one line per setting (Figures 5, 17, 18 and 23)."""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from factscope.analysis.estimate import Estimate
from factscope.analysis.sweep import Line, Sweep
from factscope.errors import BadRecord
from factscope.report.labels import (
    METRIC_TITLES,
    axis_name,
    line_label,
    setting_name,
    sweep_title,
)
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    layer_ticks,
    literal_text,
    panel_axes,
    style_axes,
)

PANELS = ("S", "ES", "PS", "NS", "RS", "GE", "efficacy", "paraphrase", "specificity")
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
NO_BOUND_COLOR = "0.2"
COLORS = ("#d9730d", "#6a51a3", "#4a6fa5", "#238b45", "#cb181d", "#8c564b", "#1f9aa8", "#b5651d")


def sweep_figure(sweep: Sweep, metrics: Sequence[str] | None = None) -> Figure:
    """The given metrics, or all that were measured, with 95 % intervals."""
    names = sweep.measured(PANELS if metrics is None else metrics)
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
        _draw_frame(ax, sweep, name)
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
    estimates = [point.metric(name) for point in line.points]
    y = 100 * np.array([math.nan if v is None else v.mean for v in estimates])
    half_width = 100 * np.array([0.0 if v is None else _half_width(v) for v in estimates])
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


def _half_width(value: Estimate) -> float:
    return 0.0 if math.isnan(value.half_width) else value.half_width


def _draw_frame(ax: Axes, sweep: Sweep, name: str) -> None:
    """Axes, labels, and the score of the unedited model."""
    style_axes(ax)
    ax.set_title(METRIC_TITLES.get(name, name), fontsize=MEDIUM)
    unedited = sweep.unedited.metrics.get(name) if sweep.unedited else None
    if unedited is not None:
        level = 100 * unedited.mean
        ax.axhline(level, color="0.45", linewidth=0.9, linestyle=":", label="unedited")
    if name in UNSCALED:
        estimates = [value for point in sweep.points if (value := point.metric(name))]
        ends = [100 * (v.mean + side * _half_width(v)) for v in estimates for side in (-1, 1)]
        ends += [] if unedited is None else [100 * unedited.mean]
        margin = 0.08 * (max(ends) - min(ends)) or 1.0
        ax.set_ylim(min(ends) - margin, max(ends) + margin)
    else:
        ax.set_ylim(-3, 103)
        ax.set_yticks(range(0, 101, 20))
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    values = list(sweep.grid[sweep.x_axis])
    if sweep.x_axis == "layer":
        layers = [int(value) for value in values]
        first, last = min(layers), max(layers)
        spaced = [tick for tick in layer_ticks(last + 1) if tick >= first]
        ticks = layers if len(layers) <= 8 else spaced
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set_xlim(first - 0.5, last + 0.5)
    else:
        labels = [_break_lines(setting_name(sweep.x_axis, value)) for value in values]
        ax.set_xticks(range(len(labels)), labels, fontsize=SMALL, **literal_text())
        ax.set_xlim(-0.5, len(labels) - 0.5)
    ax.set_xlabel(axis_name(sweep.x_axis), fontsize=SMALL)


def _break_lines(label: str) -> str:
    """The label in short lines, so that neighbouring labels do not overlap."""
    return label.replace(", ", ",\n") if "," in label else label.replace(" token", "\ntoken")


def _line_colors(lines: Sequence[Line]) -> list[str]:
    """A token's own colour; larger bounds darker; other settings in turn."""
    axes = list(lines[0].settings)
    if axes == ["token"]:
        return [TOKEN_COLORS.get(str(line.settings["token"]), COLORS[0]) for line in lines]
    if axes == ["max_change"]:
        bounds = [line.settings["max_change"] for line in lines]
        numbers = sorted(bound for bound in bounds if not isinstance(bound, str))
        shades = matplotlib.colormaps["YlOrRd"](np.linspace(0.4, 0.9, len(numbers)))
        colors = {bound: to_hex(shade) for bound, shade in zip(numbers, shades, strict=True)}
        return [NO_BOUND_COLOR if isinstance(b, str) else colors[b] for b in bounds]
    return [COLORS[i % len(COLORS)] for i in range(len(lines))]
