"""Drawing with matplotlib: heat maps, axes and text in one style, and figures as files.

Figures are built without pyplot, whose global state is not safe in a server's threads. Texts from
data (tokens, answers, model names) are drawn with `literal_text`: a prompt may contain dollar
signs, which matplotlib would otherwise parse as mathematics.
"""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from factscope.errors import BadSetting
from factscope.io import write_atomic

SMALL, MEDIUM = 7.5, 9.0
"""Font sizes."""
UNMEASURED = "0.9"
"""Grey of heat map cells without a measurement."""
FALLBACK_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Arial Unicode MS")
"""Fonts for characters that DejaVu Sans lacks; those that are installed are used."""


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def panel_axes(fig: Figure, count: int, columns: int) -> list[Axes]:
    """Axes for `count` panels in rows of `columns`."""
    axes = list(fig.subplots(math.ceil(count / columns), columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    return axes[:count]


def literal_text() -> dict[str, Any]:
    """Text properties for texts from data: no math, and fonts for other scripts."""
    installed = set(font_manager.get_font_names())
    fallbacks = [name for name in FALLBACK_FONTS if name in installed]
    return {"parse_math": False, "fontfamily": ["DejaVu Sans", *fallbacks]}


# ---- heat maps


def draw_heatmap(
    ax: Axes,
    cells: Float[np.ndarray, "rows layers"],
    row_labels: Sequence[str],
    *,
    colormap: str,
    low: float,
    high: float,
    title: str,
    xlabel: str,
    colorbar_label: str,
) -> None:
    """Draw tokens or token roles from top to bottom and layers from left to right.

    The lightest colour is at `low`, the darkest at `high`, which may be below `low`. Cells that are
    NaN were not measured.
    """
    rows, layers = cells.shape
    ax.set_facecolor(UNMEASURED)
    mesh = ax.pcolormesh(
        np.ma.masked_invalid(cells),
        cmap=colormap if low <= high else f"{colormap}_r",
        vmin=min(low, high),
        vmax=max(low, high),
        rasterized=cells.size > 4000,  # keeps vector files small
    )
    ax.invert_yaxis()
    ax.set_yticks(np.arange(rows) + 0.5, row_labels, fontsize=SMALL, **literal_text())
    ticks = layer_ticks(layers)
    ax.set_xticks(np.array(ticks) + 0.5, [str(t) for t in ticks], fontsize=SMALL)
    ax.tick_params(length=2, width=0.5)
    ax.set_title(title, fontsize=MEDIUM, **literal_text())
    ax.set_xlabel(xlabel, fontsize=SMALL, **literal_text())
    for spine in ax.spines.values():
        spine.set_linewidth(0.5)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=16)
    bar.outline.set_linewidth(0.5)
    bar.ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    bar.ax.set_ylabel(colorbar_label, fontsize=SMALL, **literal_text())


def strongest_cell(cells: Float[np.ndarray, "rows layers"], low: float, sign: int = 1) -> float:
    """The measured cell that is farthest above `low` (below it, if `sign` is -1), as the value of
    the darkest colour; at least a little away from `low`."""
    return low + sign * float(np.max(sign * (cells - low), initial=1e-3, where=~np.isnan(cells)))


# ---- axes


def layer_ticks(layers: int) -> list[int]:
    """About ten layers to label on an axis, counted from 0."""
    step = next((s for s in (1, 2, 5, 10) if layers / s <= 12), 20)
    return list(range(0, layers, step))


def label_layers(ax: Axes, layers: int, label: str) -> None:
    """Label the layer axis of a line or bar plot."""
    ticks = layer_ticks(layers)
    ax.set_xticks(ticks, [str(t) for t in ticks])
    ax.set_xlim(-0.75, layers - 0.25)
    ax.set_xlabel(label, fontsize=MEDIUM, **literal_text())


def style_axes(ax: Axes, *, zero: bool = True) -> None:
    """Axes of a line or bar plot: no box and, unless `zero` is False, a line at zero."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5, which="both")
    if zero:
        ax.axhline(0, color="0.6", linewidth=0.6, zorder=0)


def percent_rows(ax: Axes, rows: int, label: str) -> None:
    """Axes of a dot plot: one row per item, fractions from 0 to 100 % on the x axis."""
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


def legend_above(ax: Axes, handles: Sequence[Artist]) -> None:
    """A legend in one line between the axes and their title."""
    legend = ax.legend(
        handles=list(handles), loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False,
        fontsize=SMALL, borderaxespad=0.1, columnspacing=1.4, handletextpad=0.5, borderpad=0.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set(**literal_text())


def share_scales(figure: Figure, other: Figure) -> None:
    """Make the value axes and colour scales of a figure also span those of another one.

    Panels of the same title belong together; if no titles agree, those at the same place.
    """
    panels, others = ([ax for ax in fig.axes if ax.get_title()] for fig in (figure, other))
    by_title = {ax.get_title(): ax for ax in others}
    pairs = [(ax, by_title[ax.get_title()]) for ax in panels if ax.get_title() in by_title]
    for ax, twin in pairs or zip(panels, others, strict=False):
        meshes = [[m for m in axes.collections if m.get_array() is not None] for axes in (ax, twin)]
        for mesh, twin_mesh in zip(*meshes, strict=False):
            (low, high), (twin_low, twin_high) = mesh.get_clim(), twin_mesh.get_clim()
            mesh.set_clim(min(low, twin_low), max(high, twin_high))
        if not meshes[0]:
            (low, high), (twin_low, twin_high) = ax.get_ylim(), twin.get_ylim()
            ax.set_ylim(min(low, twin_low), max(high, twin_high))


# ---- files

FIGURE_FORMATS = ("png", "svg", "pdf")
DPI = 200
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Neither date nor version: the same records give the same file."""


def save_figure(fig: Figure, path: str | Path) -> None:
    """Write the figure in the format of the path's suffix."""
    path = Path(path)
    kind = path.suffix.lstrip(".").lower()
    if kind not in FIGURE_FORMATS:
        known = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise BadSetting(f"cannot write a figure as {path.name!r}; use one of the suffixes {known}")
    write_atomic(path, figure_bytes(fig, kind))


def figure_bytes(fig: Figure, kind: str, dpi: int = DPI) -> bytes:
    """The figure as the content of a file; characters that no font has are drawn as boxes."""
    buffer = io.BytesIO()
    # Publishers require TrueType fonts in PDFs; a fixed salt gives the same ids in every SVG.
    settings = matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "factscope"})
    with warnings.catch_warnings(), settings:
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .*")
        fig.savefig(buffer, format=kind, dpi=dpi, metadata=METADATA[kind])
    return buffer.getvalue()
