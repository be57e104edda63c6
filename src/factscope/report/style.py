"""What the figures are drawn with: heat maps, layer axes and text, without pyplot's global state.

Text that comes from data (tokens, answers, model names) is never read as mathematics: a prompt
may contain dollar signs.

How a kind looks and is called in every figure: the paper's colours and words.

Settings in words, for pages and the terminal.

Figures as files.
"""

import io
import json
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from factscope.errors import BadSetting
from factscope.io import write_atomic
from factscope.records import TraceRecord

__all__ = [
    "FIGURE_FORMATS",
    "KIND_STYLES",
    "HeatMap",
    "KindStyle",
    "blank_figure",
    "brief",
    "display_token",
    "draw_heatmap",
    "figure_bytes",
    "flat",
    "fonts",
    "label_layers",
    "layer_ticks",
    "percent_rows",
    "plain",
    "save_figure",
    "setting_text",
    "tidy",
    "token_labels",
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


RGB = tuple[int, int, int]

LONGEST = 24
"""The most characters of a token that a label shows."""


@dataclass(frozen=True, kw_only=True)
class KindStyle:
    """The colours and words of one kind of restoration."""

    name: str
    colormap: str
    """Matplotlib's name of the heat map's colours."""
    shades: tuple[RGB, RGB, RGB]
    """The same colours where there is no matplotlib: lightest, middle, darkest."""
    line: str
    """The kind's colour as a line or bar."""
    what: str
    """What is restored, after "Impact of restoring"."""
    run: str
    """What is restored, after "Average indirect effect of a"; takes the window."""
    axis: str
    """What the layer axis counts; takes the window and the model."""


KIND_STYLES = {
    "states": KindStyle(
        name="states",
        colormap="Purples",
        shades=((252, 251, 253), (158, 154, 200), (63, 0, 125)),
        line="#6a51a3",
        what="state",
        run="single hidden state",
        axis="single restored layer within {model}",
    ),
    "mlp": KindStyle(
        name="MLP",
        colormap="Greens",
        shades=((247, 252, 245), (116, 196, 118), (0, 68, 27)),
        line="#238b45",
        what="MLP",
        run="run of {window} MLP layers",
        axis="center of interval of {window} restored MLP layers",
    ),
    "attn": KindStyle(
        name="attention",
        colormap="Reds",
        shades=((255, 245, 240), (251, 106, 74), (103, 0, 13)),
        line="#cb181d",
        what="Attn",
        run="run of {window} Attn layers",
        axis="center of interval of {window} restored Attn layers",
    ),
}
"""Purple states, green MLP, red attention."""

VISIBLE = {"\n": "↵", "\r": "↵", "\t": "⇥", " ": "␣"}


def display_token(token: str) -> str:
    """A token as a label: spaces around it dropped, what cannot be seen made visible."""
    core = token.strip(" ")
    text = "".join(visible(c) for c in core) if core else VISIBLE[" "]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def visible(character: str) -> str:
    """A character, or a sign for one that has no shape of its own."""
    if character in VISIBLE and character != " ":
        return VISIBLE[character]
    category = unicodedata.category(character)
    return "\ufffd" if category in ("Cc", "Cs", "Cn", "Co", "Zl", "Zp") else character


def token_labels(record: TraceRecord) -> list[str]:
    """The tokens as labels, the subject's with a star as in the paper's Figure 1."""
    start, stop = record.subject
    return [
        display_token(token) + ("*" if start <= i < stop else "")
        for i, token in enumerate(record.tokens)
    ]


MAX_SETTING_LENGTH = 56
"""The most characters of a value that the terminal shows."""


def flat(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Settings within settings, by their full names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def setting_text(value: Any) -> str:
    """A setting's value in words."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def brief(value: Any) -> str:
    """The same, of a long one only the beginning."""
    text = setting_text(value)
    if len(text) <= MAX_SETTING_LENGTH:
        return text
    count = f" {len(value)} in all" if isinstance(value, list | tuple) else ""
    return f"{text[: MAX_SETTING_LENGTH - len(count) - 1]}…{count}"


FIGURE_FORMATS = ("png", "svg", "pdf")
DPI = 200

UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Without date and version, the same records give the same file."""


def save_figure(fig: Figure, path: Path) -> None:
    """Write the figure in the format that the path's suffix names."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FIGURE_FORMATS:
        known = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise BadSetting(f"cannot write a figure as {path.name!r}; the suffix can be {known}")
    write_atomic(path, figure_bytes(fig, kind))


def figure_bytes(fig: Figure, kind: str, dpi: int = DPI) -> bytes:
    """The figure as a file's contents. A character that no font has is drawn as a box."""
    buffer = io.BytesIO()
    # Publishers ask for TrueType in PDFs; a fixed salt gives SVGs ids that do not change.
    settings = matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "factscope"})
    with warnings.catch_warnings(), settings:
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .*")
        fig.savefig(buffer, format=kind, dpi=dpi, metadata=UNDATED[kind])
    return buffer.getvalue()
