"""An edit in the terminal: before and after, side by side, in eighty columns."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from factscope.records import EditRecord, Generation, Place, PromptScores
from factscope.report.edit_words import (
    HEADINGS,
    change_of,
    old_name,
    percent,
    place_words,
    rails,
)
from factscope.report.look import shown, visible
from factscope.report.settings import brief, flat

__all__ = [
    "applied_table",
    "facts_table",
    "generations_table",
    "headline",
    "places_table",
    "rails_table",
    "scores_table",
    "settings_table",
    "side_by_side",
]

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
    table.add_column(Text(f"P({shown(record.own.new)})"), justify="right", no_wrap=True)
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
    said = shown(before.top)
    if before.top != after.top:
        said += f" → {shown(after.top)}"
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


def rails_table(health: Mapping[str, Any]) -> Table | Text:
    """The guard rails with their limits."""
    if not health:
        return Text("guard rails: not measured", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for rail in rails(health):
        style = "" if rail.kept else "bold red"
        table.add_row(
            Text(rail.name, style="dim"), Text(rail.value, style=style), Text(rail.limit),
            Text("" if rail.kept else "broken", style=style),
        )  # fmt: skip
    return table


def places_table(places: Sequence[Place]) -> Text:
    """Where it is written, a line for each weight."""
    return Text("\n").join([Text(plain(place_words(place))) for place in places])


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
