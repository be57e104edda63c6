"""A trace as a heat map in HTML: an image of one pixel a cell, and the numbers behind it."""

import base64
import html
import io
import json
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.image import imsave

from factscope.analysis.grids import baseline, grid
from factscope.records import TraceRecord
from factscope.report.canvas import layer_ticks
from factscope.report.look import LOOKS, shown, token_labels

__all__ = ["heat_html", "image_uri"]

UNMEASURED = "#e1e1e4"


def heat_html(record: TraceRecord, kind: str) -> str:
    """The heat map; page.js lets each cell tell its token, layer and probability."""
    cells = grid(record, kind)
    title = f"Impact of restoring {LOOKS[kind].what}"
    tokens = "".join(f"<li>{html.escape(label)}</li>" for label in token_labels(record))
    return (
        f'<figure class="heat"><h3>{title}</h3>\n'
        f'<div class="map"><ul class="tokens">{tokens}</ul>\n'
        f'<div class="cells" tabindex="0" role="img" aria-label="{title}: tokens × layers">'
        f'<img alt="" src="{image_uri(pixels(record, kind))}"></div>\n'
        f'<div class="layers">{axis(cells.shape[1])}</div></div>\n'
        f"<output>{html.escape(caption(record, cells))}</output>\n"
        f"{embedded(cell_data(record, cells, kind))}</figure>\n"
    )


def pixels(record: TraceRecord, kind: str) -> bytes:
    """A PNG with one pixel for each cell, from the corrupted score up to the highest."""
    cells, low = grid(record, kind), baseline(record, kind)
    high = np.max(cells, initial=low + 1e-3, where=~np.isnan(cells))
    shades = np.ma.masked_invalid(np.clip((cells - low) / (high - low), 0, 1))
    colors = colormaps[LOOKS[kind].colormap].with_extremes(bad=UNMEASURED)
    buffer = io.BytesIO()
    imsave(buffer, colors(shades, bytes=True), format="png")
    return buffer.getvalue()


def image_uri(png: bytes) -> str:
    """A PNG as the address of an image."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def axis(layers: int) -> str:
    """Layer numbers, each below the middle of its column."""
    ticks = layer_ticks(layers)[:: 1 if layers <= 12 else 2]
    return "".join(
        f'<span style="left:{100 * (layer + 0.5) / layers:.2f}%">{layer}</span>' for layer in ticks
    )


def caption(record: TraceRecord, cells: np.ndarray) -> str:
    """The strongest cell, shown until another is pointed at."""
    if np.isnan(cells).all():
        return "no cell was measured"
    token, layer = np.unravel_index(np.nanargmax(cells), cells.shape)
    answer, name = shown(record.answer), token_labels(record)[token]
    score = f"{100 * cells[token, layer]:.1f}\u00a0%"
    return f"p({answer}) is highest at {name}, layer {layer}: {score}"


def cell_data(record: TraceRecord, cells: np.ndarray, kind: str) -> dict[str, Any]:
    """What page.js reads."""
    return {
        "tokens": token_labels(record),
        "corrupted": round(baseline(record, kind), 5),
        "scores": [[None if np.isnan(x) else round(float(x), 5) for x in row] for row in cells],
    }


def embedded(data: dict[str, Any]) -> str:
    """Data for a script; "<" is written as an escape, so that no token can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'
