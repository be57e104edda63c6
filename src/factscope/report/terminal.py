"""A trace in the terminal: a small heat map, and its strongest cells.

An edit in the terminal: before and after, side by side, in eighty columns.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from factscope.analysis.effects import baseline, cell_table
from factscope.records import ChangedWeight, EditRecord, Generation, PromptScores, TraceRecord
from factscope.report.labels import HEADINGS, change_of, check_rows, old_name, percent, weight_label
from factscope.report.style import (
    KIND_STYLES,
    RGB,
    brief,
    display_token,
    flat,
    token_labels,
    visible,
)

__all__ = [
    "TerminalHeatMap",
    "applied_table",
    "facts_table",
    "generations_table",
    "headline",
    "places_table",
    "rails_table",
    "scores_table",
    "settings_table",
    "side_by_side",
    "strongest_cells",
    "trace_heatmap",
]

RAMP = " .:-=+*#%@"
"""The shades where there is no colour."""
WIDEST_LABEL = 16
AXIS_EVERY = 5
"""Columns between the layers named below the heat map."""


def trace_heatmap(record: TraceRecord, kind: str = "states") -> "TerminalHeatMap":
    """The trace as a heat map that fits the console it is printed on."""
    cell_table(record, kind)  # says so at once where the kind was not traced
    return TerminalHeatMap(record, kind)


def strongest_cells(record: TraceRecord, kind: str = "states", count: int = 5) -> Table:
    """The cells whose restoration brings the answer back most."""
    table = Table(title=f"Strongest {KIND_STYLES[kind].name}", title_justify="left")
    table.add_column("token")
    for column in ("layer", f"p({display_token(record.answer)})", "indirect effect"):
        table.add_column(Text(column), justify="right")
    labels, cells = token_labels(record), cell_table(record, kind)
    for token, layer in strongest(cells, count):
        score = cells[token, layer]
        effect = score - baseline(record, kind)
        table.add_row(Text(labels[token]), str(layer), f"{score:.1%}", f"{effect:+.1%}")
    return table


def strongest(cells: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The places of the highest cells, highest first; cells not measured are left out."""
    order = np.argsort(-cells, axis=None, kind="stable")[: np.count_nonzero(~np.isnan(cells))]
    changed_weights = [np.unravel_index(i, cells.shape) for i in order[:count]]
    return [(int(token), int(layer)) for token, layer in changed_weights]


@dataclass(frozen=True)
class TerminalHeatMap:
    """Tokens down, layers across. Where layers do not fit, neighbours share their maximum."""

    record: TraceRecord
    kind: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines of the heat map, in colour where the console has it."""
        labels = token_labels(self.record)
        margin = min(WIDEST_LABEL, max(cell_len(label) for label in labels)) + 1
        cells = cell_table(self.record, self.kind)
        groups = layer_groups(cells.shape[1], max(1, options.max_width - margin))
        wide = 2 if 2 * len(groups) + margin <= options.max_width else 1
        shades = shades_of(pooled(cells, groups), baseline(self.record, self.kind))
        colored = console.color_system is not None
        for label, row in zip(labels, shades, strict=True):
            line = Text(fitted(label, margin - 1) + " ", no_wrap=True)
            for shade in row:
                line.append_text(
                    block(shade, wide, KIND_STYLES[self.kind].shades if colored else None)
                )
            yield line
        yield Text(" " * margin + layer_axis(groups, wide), style="dim", no_wrap=True)
        yield Text(self.caption(cells), style="dim")

    def caption(self, cells: np.ndarray) -> str:
        """What the shades mean."""
        record, name = self.record, KIND_STYLES[self.kind].name
        best = strongest(cells, 1)
        highest = f", up to {cells[best[0]]:.1%} restored" if best else ""
        return (
            f"{name}: p({display_token(record.answer)}) {record.clean:.1%} clean, "
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


NEW, OLD = "bold green", "yellow"


def headline(record: EditRecord) -> Text:
    """The fact, with its old and its new object."""
    line = Text(plain(f"{record.fact.text} "), style="bold")
    line.append(plain(record.true or "?"), style=OLD)
    line.append(" → ")
    line.append(plain(record.fact.target or ""), style=NEW)
    return line


def scores_table(record: EditRecord) -> Table:
    """Every prompt's probabilities before → after, by kind of prompt."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("prompt", ratio=1, overflow="fold")
    table.add_column(Text(f"P({display_token(record.own.new)})"), justify="right", no_wrap=True)
    table.add_column(Text(f"P({old_name(record.prompts)})"), justify="right", no_wrap=True)
    table.add_column("likeliest", overflow="fold", max_width=22)
    for kind, heading in HEADINGS.items():
        some = record.of_kind(kind)
        if some and kind != "prompt":
            table.add_section()
            table.add_row(Text(heading, style="dim italic"))
        for scores in some:
            table.add_row(*_row(scores))
    return table


def _row(scores: PromptScores) -> tuple[Text, ...]:
    before, after = scores.before, scores.after
    said = display_token(before.top)
    if before.top != after.top:
        said += f" → {display_token(after.top)}"
    return (
        Text(plain(scores.text)),
        _arrow(before.new, after.new),
        _arrow(before.old, after.old),
        Text(said),
    )


def _arrow(before: float | None, after: float | None) -> Text:
    """A probability before → after, as wide in every row."""
    if before is None or after is None:
        return Text("–")
    return Text(f"{percent(before)} → {percent(after):>6}")


def generations_table(record: EditRecord) -> Group:
    """Each text's continuation before and after, side by side, the objects marked."""
    new, old = (record.own.new,), (record.own.old or "",)
    return Group(*(side_by_side(generation, new, old) for generation in record.generations))


def side_by_side(generation: Generation, new: Iterable[str] = (), old: Iterable[str] = ()) -> Table:
    """A text's continuation before and after, with the new and the old objects marked."""
    title = Text(plain(generation.text) + " …", style="italic")
    table = Table(title=title, title_justify="left", expand=True, box=box.SIMPLE_HEAD,
                  show_edge=False, padding=(0, 2, 0, 0))  # fmt: skip
    table.add_column("before", ratio=1, overflow="fold")
    table.add_column("after", ratio=1, overflow="fold")
    words = {**dict.fromkeys(old, OLD), **dict.fromkeys(new, NEW)}
    table.add_row(marked(generation.before, words), marked(generation.after, words))
    return table


def marked(text: str, words: Mapping[str, str]) -> Text:
    """A continuation with some words in their colours."""
    line = Text(plain(text.strip()))
    for word, style in words.items():
        if word.strip():
            line.highlight_regex(rf"(?<!\w){re.escape(plain(word.strip()))}(?!\w)", style)
    return line


def rails_table(checks: Mapping[str, Any]) -> Table | Text:
    """The guard rails with their limits."""
    if not checks:
        return Text("guard rails: not measured", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for rail in check_rows(checks):
        style = "" if rail.kept else "bold red"
        table.add_row(
            Text(rail.name, style="dim"), Text(rail.value, style=style), Text(rail.limit),
            Text("" if rail.kept else "broken", style=style),
        )  # fmt: skip
    return table


def places_table(changed_weights: Sequence[ChangedWeight]) -> Text:
    """Where it is written, a line for each weight."""
    return Text("\n").join([Text(plain(weight_label(place))) for place in changed_weights])


def facts_table(records: Iterable[EditRecord]) -> Table:
    """Many facts of one edit, a line each, with the means of their paraphrases and neighbours."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("fact", ratio=1, overflow="fold")
    table.add_column("P(new)", justify="right", no_wrap=True)
    for column in ("paraphrases", "neighbours"):
        table.add_column(column, justify="right", no_wrap=True)
    for record in records:
        table.add_row(headline_plain(record), *_means(record))
    table.caption = "paraphrases: mean P(new); neighbours: mean P(old)"
    return table


def applied_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Facts of several edits: the new object without, with its own edit, with all of them."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("fact", ratio=1, overflow="fold")
    for column in ("before", "alone", "together"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        fact = Text(plain(row["text"] + " "))
        fact.append(plain(row["target"] or ""), style=NEW)
        table.add_row(fact, *(percent(row[name]) for name in ("before", "alone", "together")))
    return table


def settings_table(settings: Mapping[str, Any]) -> Table:
    """How an edit was made; of a long list only how long it is."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in flat(settings):
        table.add_row(Text(name), Text(plain(brief(value))))
    return table


def headline_plain(record: EditRecord) -> Text:
    """The same without bold."""
    line = headline(record)
    line.stylize("not bold")
    return line


def _means(record: EditRecord) -> Iterator[Text]:
    for kind, which in (("prompt", "new"), ("paraphrase", "new"), ("neighbour", "old")):
        change = change_of(record.of_kind(kind), which)
        yield Text("–") if change is None else _arrow(*change)


def plain(text: str) -> str:
    """Text of a model on one line, what cannot be seen made visible."""
    return "".join(visible(character) for character in text)
