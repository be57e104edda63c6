"""A trace in the terminal: a small heat map, and its strongest cells."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.style import Style
from rich.table import Table
from rich.text import Text

from factscope.analysis.grids import baseline, grid
from factscope.records import TraceRecord
from factscope.report.look import LOOKS, RGB, shown, token_labels

__all__ = ["TerminalHeatMap", "strongest_cells", "trace_heatmap"]

RAMP = " .:-=+*#%@"
"""The shades where there is no colour."""
WIDEST_LABEL = 16
AXIS_EVERY = 5
"""Columns between the layers named below the heat map."""


def trace_heatmap(record: TraceRecord, kind: str = "states") -> "TerminalHeatMap":
    """The trace as a heat map that fits the console it is printed on."""
    grid(record, kind)  # says so at once where the kind was not traced
    return TerminalHeatMap(record, kind)


def strongest_cells(record: TraceRecord, kind: str = "states", count: int = 5) -> Table:
    """The cells whose restoration brings the answer back most."""
    table = Table(title=f"Strongest {LOOKS[kind].name}", title_justify="left")
    table.add_column("token")
    for column in ("layer", f"p({shown(record.answer)})", "indirect effect"):
        table.add_column(Text(column), justify="right")
    labels, cells = token_labels(record), grid(record, kind)
    for token, layer in strongest(cells, count):
        score = cells[token, layer]
        effect = score - baseline(record, kind)
        table.add_row(Text(labels[token]), str(layer), f"{score:.1%}", f"{effect:+.1%}")
    return table


def strongest(cells: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The places of the highest cells, highest first; cells not measured are left out."""
    order = np.argsort(-cells, axis=None, kind="stable")[: np.count_nonzero(~np.isnan(cells))]
    places = [np.unravel_index(i, cells.shape) for i in order[:count]]
    return [(int(token), int(layer)) for token, layer in places]


@dataclass(frozen=True)
class TerminalHeatMap:
    """Tokens down, layers across. Where layers do not fit, neighbours share their maximum."""

    record: TraceRecord
    kind: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines of the heat map, in colour where the console has it."""
        labels = token_labels(self.record)
        margin = min(WIDEST_LABEL, max(cell_len(label) for label in labels)) + 1
        cells = grid(self.record, self.kind)
        groups = layer_groups(cells.shape[1], max(1, options.max_width - margin))
        wide = 2 if 2 * len(groups) + margin <= options.max_width else 1
        shades = shades_of(pooled(cells, groups), baseline(self.record, self.kind))
        colored = console.color_system is not None
        for label, row in zip(labels, shades, strict=True):
            line = Text(fitted(label, margin - 1) + " ", no_wrap=True)
            for shade in row:
                line.append_text(block(shade, wide, LOOKS[self.kind].shades if colored else None))
            yield line
        yield Text(" " * margin + layer_axis(groups, wide), style="dim", no_wrap=True)
        yield Text(self.caption(cells), style="dim")

    def caption(self, cells: np.ndarray) -> str:
        """What the shades mean."""
        record, name = self.record, LOOKS[self.kind].name
        best = strongest(cells, 1)
        highest = f", up to {cells[best[0]]:.1%} restored" if best else ""
        return (
            f"{name}: p({shown(record.answer)}) {record.clean:.1%} clean, "
            f"{record.corrupted:.1%} corrupted{highest}"
        )


def layer_groups(layers: int, columns: int) -> list[np.ndarray]:
    """The layers that share a column: one each, or more where there are too few columns."""
    size = -(-layers // columns)
    return [np.arange(start, min(start + size, layers)) for start in range(0, layers, size)]


def pooled(cells: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """The highest measured cell of each group of layers."""
    lowest = np.where(np.isnan(cells), -np.inf, cells)
    best = np.stack([lowest[:, group].max(axis=1) for group in groups], axis=1)
    return np.where(np.isinf(best), np.nan, best)


def shades_of(cells: np.ndarray, low: float) -> np.ndarray:
    """How dark each cell is: 0 at the corrupted score or below, 1 at the highest cell."""
    high = np.max(cells, initial=low + 1e-3, where=~np.isnan(cells))
    return np.clip((cells - low) / (high - low), 0, 1)


def block(shade: float, width: int, shades: tuple[RGB, RGB, RGB] | None) -> Text:
    """One cell: a coloured block, or a character; blank where it was not measured."""
    if np.isnan(shade):
        return Text(" " * width)
    if shades is None:
        return Text(RAMP[round(shade * (len(RAMP) - 1))] * width)
    return Text(" " * width, style=Style(bgcolor=Color.from_rgb(*mixed(shade, shades))))


def mixed(shade: float, shades: tuple[RGB, RGB, RGB]) -> tuple[int, int, int]:
    """The colour between the lightest, middle and darkest."""
    channels = np.array(shades).T
    red, green, blue = (round(np.interp(shade, (0, 0.5, 1), channel)) for channel in channels)
    return red, green, blue


def layer_axis(groups: Sequence[np.ndarray], width: int) -> str:
    """The layers' numbers below their columns."""
    line = ""
    for column in range(0, len(groups), AXIS_EVERY):
        line = line.ljust(column * width) + str(groups[column][0])
    return line


def fitted(label: str, width: int) -> str:
    """A label of exactly this many columns; wide characters count twice."""
    if cell_len(label) <= width:
        return " " * (width - cell_len(label)) + label
    star = "*" if label.endswith("*") else ""
    return set_cell_size(label, width - 1 - len(star)) + "…" + star
