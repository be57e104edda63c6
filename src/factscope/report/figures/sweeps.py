"""Figures of a sweep: a panel a metric, a line a setting, by layer (Figures 5, 17, 18 and 23)."""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from factscope.analysis.estimate import Estimate
from factscope.analysis.sweep import NO_BOUND, Line, Setting, Sweep
from factscope.errors import BadRecord
from factscope.report.labels import axis_name, line_name, setting_name, sweep_title
from factscope.report.style import MEDIUM, SMALL, blank_figure, layer_ticks, plain, tidy

__all__ = ["PANELS", "sweep_figure"]

PANELS = {
    "S": "Score, S (%)",
    "ES": "Efficacy, ES (%)",
    "PS": "Paraphrases, PS (%)",
    "NS": "Neighbours, NS (%)",
    "RS": "Consistency, RS (%)",
    "GE": "Fluency, GE",
    "efficacy": "Efficacy (%)",
    "paraphrase": "Paraphrases (%)",
    "specificity": "Specificity (%)",
}
"""Metric → the title of its panel; drawn are those that were measured."""
WHOLE = ("RS", "GE")
"""Metrics whose axis is as long as their values need; the others are shares from 0 to 100 %."""

CROWDED = 20
"""Beyond so many points a line has no dots."""

TOKEN_COLORS = {
    "subject-first": "#1f77b4",
    "subject-last": "#2ca02c",
    "after-subject": "#9467bd",
    "last": "#d62728",
}
"""As the same tokens have them in the figures of causal traces."""
UNBOUND = "0.2"
OTHERS = ("#d9730d", "#6a51a3", "#4a6fa5", "#238b45", "#cb181d", "#8c564b", "#1f9aa8", "#b5651d")


def sweep_figure(sweep: Sweep, metrics: Sequence[str] | None = None) -> Figure:
    """The metrics that were measured, or those named, side by side with their 95 % intervals."""
    names = sweep.measured(tuple(PANELS) if metrics is None else metrics)
    if not names:
        raise BadRecord("no point of the sweep has a score; there is nothing to draw")
    columns = len(names) if len(names) < 5 else math.ceil(len(names) / 2)
    rows = math.ceil(len(names) / columns)
    fig = blank_figure(max(2.55 * columns + 0.5, 5.5), 2.35 * rows + 0.75)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    lines = sweep.lines
    colors = _colors(lines)
    for ax, name in zip(axes, names, strict=False):
        for line, color in zip(lines, colors, strict=True):
            _draw(ax, sweep, line, name, color)
        _frame(ax, sweep, name)
    for ax in axes[len(names) :]:
        ax.set_visible(False)
    fig.suptitle(sweep_title(sweep), fontsize=MEDIUM, fontweight="bold", **plain())
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5),
               frameon=False, fontsize=SMALL)  # fmt: skip
    return fig


def _draw(ax: Axes, sweep: Sweep, line: Line, name: str, color: str) -> None:
    """A line with its band; values without an order between them are dots with bars."""
    values = list(sweep.grid[sweep.across])
    places = [_place(sweep, values, point.settings[sweep.across]) for point in line.points]
    found = [point.metric(name) for point in line.points]
    x = np.array(places, dtype=float)
    y = 100 * np.array([math.nan if v is None else v.mean for v in found])
    half = 100 * np.array([0.0 if v is None else _width(v) for v in found])
    label = line_name(line.settings) if line.settings else "edited"
    low, high = y - half, y + half
    if name not in WHOLE:
        low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
    if sweep.across in ("layer", "max_change"):
        ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
        dot = 2.2 if len(values) <= CROWDED else 0
        ax.plot(x, y, color=color, linewidth=1.3, marker="o", markersize=dot, label=label)
    else:
        ax.vlines(x, low, high, color=color, linewidth=1.2)
        ax.plot(x, y, color=color, linestyle="", marker="o", markersize=4, label=label)


def _place(sweep: Sweep, values: Sequence[Setting], value: Setting) -> float:
    """Layers lie where their numbers are, other values one beside the other."""
    return float(value) if sweep.across == "layer" else float(values.index(value))


def _width(value: Estimate) -> float:
    return 0.0 if math.isnan(value.half_width) else value.half_width


def _frame(ax: Axes, sweep: Sweep, name: str) -> None:
    tidy(ax)
    ax.set_title(PANELS.get(name, name), fontsize=MEDIUM)
    if sweep.unedited is not None and name in sweep.unedited.metrics:
        level = 100 * sweep.unedited.metrics[name].mean
        ax.axhline(level, color="0.45", linewidth=0.9, linestyle=":", label="unedited")
    if name not in WHOLE:
        ax.set_ylim(-3, 103)
        ax.set_yticks(range(0, 101, 20))
    else:
        _room(ax, sweep, name)
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    values = list(sweep.grid[sweep.across])
    if sweep.across == "layer":
        _layer_axis(ax, [int(value) for value in values])
    else:
        words = [_stacked(setting_name(sweep.across, value)) for value in values]
        ax.set_xticks(range(len(words)), words, fontsize=SMALL, **plain())
        ax.set_xlim(-0.5, len(words) - 0.5)
    ax.set_xlabel(axis_name(sweep.across), fontsize=SMALL)


def _stacked(words: str) -> str:
    """A label in short lines, so that it does not run into the next one."""
    return words.replace(", ", ",\n") if "," in words else words.replace(" token", "\ntoken")


def _layer_axis(ax: Axes, layers: Sequence[int]) -> None:
    """About ten of the layers named, or each of a few."""
    last = max(layers)
    ticks = layers if len(layers) <= 8 else [t for t in layer_ticks(last + 1) if t >= min(layers)]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xlim(min(layers) - 0.5, last + 0.5)


def _room(ax: Axes, sweep: Sweep, name: str) -> None:
    """An axis around the values, without zero: what matters is the change."""
    found = [value for point in sweep.points if (value := point.metric(name))]
    ends = [100 * (v.mean + side * _width(v)) for v in found for side in (-1, 1)]
    if sweep.unedited is not None and name in sweep.unedited.metrics:
        ends.append(100 * sweep.unedited.metrics[name].mean)
    low, high = min(ends), max(ends)
    space = 0.08 * (high - low) or 1.0
    ax.set_ylim(low - space, high + space)


def _colors(lines: Sequence[Line]) -> list[str]:
    """A token's own colour; bounds from light to dark; anything else in turn."""
    axes = list(lines[0].settings)
    if axes == ["token"]:
        return [TOKEN_COLORS.get(str(line.settings["token"]), OTHERS[0]) for line in lines]
    if axes == ["max_change"]:
        return _shades([line.settings["max_change"] for line in lines])
    return [OTHERS[i % len(OTHERS)] for i in range(len(lines))]


def _shades(bounds: Sequence[Setting]) -> list[str]:
    sizes = sorted(max_change for max_change in bounds if not isinstance(max_change, str))
    shades = matplotlib.colormaps["YlOrRd"]
    steps = np.linspace(0.4, 0.9, max(len(sizes), 1))
    by_size = {size: to_hex(shades(step)) for size, step in zip(sizes, steps, strict=False)}
    return [
        UNBOUND if max_change == NO_BOUND or isinstance(max_change, str) else by_size[max_change]
        for max_change in bounds
    ]
