"""What the figures are drawn with: heat maps, layer axes and text, without pyplot's global state.

Text that comes from data (tokens, answers, model names) is never read as mathematics: a prompt
may contain dollar signs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

__all__ = [
    "HeatMap",
    "blank_figure",
    "draw_heatmap",
    "fonts",
    "label_layers",
    "layer_ticks",
    "percent_rows",
    "plain",
    "tidy",
]

SMALL, MEDIUM = 7.5, 9.0
UNMEASURED = "0.9"
FALLBACKS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS")
"""Fonts with the characters that matplotlib's own font lacks; those installed are used."""


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Cells to be coloured, with their labels and scale."""

    cells: Float[np.ndarray, "rows layers"]
    rows: Sequence[str]
    colormap: str
    low: float
    high: float
    title: str
    axis: str
    scale: str
    """What the colours mean, written at the colour bar."""


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def draw_heatmap(ax: Axes, heat: HeatMap, *, rows: bool = True) -> None:
    """Rows down, layers across; cells that were not measured stay grey."""
    count, layers = heat.cells.shape
    ax.set_facecolor(UNMEASURED)
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(heat.cells),
        cmap=heat.colormap,
        vmin=heat.low,
        vmax=heat.high,
        rasterized=heat.cells.size > 4000,
    )
    ax.invert_yaxis()
    labels = list(heat.rows) if rows else [""] * count
    ax.set_yticks(np.arange(count) + 0.5, labels, fontsize=SMALL, **plain())
    ticks = layer_ticks(layers)
    ax.set_xticks(np.array(ticks) + 0.5, [str(t) for t in ticks], fontsize=SMALL)
    ax.tick_params(length=2, width=0.5)
    ax.set_title(heat.title, fontsize=MEDIUM, **plain())
    ax.set_xlabel(heat.axis, fontsize=SMALL, **plain())
    for spine in ax.spines.values():
        spine.set_linewidth(0.5)
    bar = figure_of(ax).colorbar(mesh, ax=ax, pad=0.02, aspect=16)
    bar.outline.set_linewidth(0.5)
    bar.ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    bar.ax.set_ylabel(heat.scale, fontsize=SMALL, **plain())


def figure_of(ax: Axes) -> Figure:
    """The figure that the axes are part of."""
    figure = ax.get_figure(root=True)
    assert isinstance(figure, Figure)
    return figure


def layer_ticks(layers: int) -> list[int]:
    """About ten layers to name on an axis, counted from 0."""
    step = next((s for s in (1, 2, 5, 10) if layers / s <= 12), 20)
    return list(range(0, layers, step))


def label_layers(ax: Axes, layers: int, label: str) -> None:
    """Name the layer axis of a line or bar plot."""
    ticks = layer_ticks(layers)
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xlim(-0.75, layers - 0.25)
    ax.set_xlabel(label, fontsize=MEDIUM, **plain())


def tidy(ax: Axes) -> None:
    """Quiet axes for lines and bars: no box, a zero line."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)


def percent_rows(ax: Axes, rows: int, label: str) -> None:
    """Rows down, shares from 0 to 100 % across."""
    ax.set_xlim(0, 1)
    ax.set_ylim(rows - 0.45, -0.55)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_linewidth(0.6)
    ax.tick_params(axis="x", labelsize=SMALL, length=2, width=0.5)
    ax.tick_params(axis="y", length=0, pad=7)
    ax.set_xlabel(label, fontsize=SMALL)


def plain() -> dict[str, Any]:
    """How text from data is set: as it is, in a font that has its characters."""
    return {"parse_math": False, "fontfamily": fonts()}


def fonts() -> list[str]:
    """Matplotlib's own font, then whatever is installed for other scripts."""
    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACKS if name in installed)]
