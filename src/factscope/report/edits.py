"""One self-contained HTML page for an edit, or for a fact's trace and then its edit."""

import re
from collections.abc import Sequence

from factscope.records import EditRecord, Generation, PromptScores, TraceRecord
from factscope.report.figures.edits import before_after_figure, has_neurons, neurons_figure
from factscope.report.html import (
    clean,
    escaped,
    figure_html,
    numbers_html,
    page,
    scrollable,
    settings_html,
    trace_body,
)
from factscope.report.labels import change_of, check_rows, percent, weight_label
from factscope.report.style import display_token
from factscope.report.tables import Cell, Table

__all__ = ["edit_page", "trace_and_edit_page"]

MADE = "How the edit was made"


def edit_page(record: EditRecord) -> str:
    """The page of one edit: before and after, what it says, the guard rails, how it was made."""
    body = [*edit_body(record), settings_html(record.settings, MADE)]
    return page(f"Edit: {record.fact.text} {record.fact.target}", body)


def trace_and_edit_page(trace: TraceRecord, edit: EditRecord) -> str:
    """Where a fact is, and then what came of rewriting it."""
    settings = [settings_html(trace.settings), settings_html(edit.settings, MADE)]
    body = [*trace_body(trace), *edit_body(edit), *settings]
    return page(f"Trace and edit: {trace.fact.text}", body)


def edit_body(record: EditRecord) -> list[str]:
    """What the page says, but for the settings."""
    return [
        f"<h1>{fact_html(record)}</h1>",
        f'<p class="soft">An edit of {escaped(record.model)} by {escaped(record.method)}</p>',
        numbers_html(edit_numbers(record)),
        "<h2>Before and after</h2>",
        figure_html(before_after_figure(record), "Probabilities before and after the edit"),
        f'<div class="scores">{scrollable(scores_table(record))}</div>',
        *generations_html(record),
        "<h2>Guard rails</h2>",
        rails_html(record),
        "<h2>Where it is written</h2>",
        *neurons_html(record),
        *(f"<p>{escaped(weight_label(place))}</p>" for place in record.changed_weights),
    ]


def neurons_html(record: EditRecord) -> list[str]:
    """The neurons that an edit by Knowledge Neurons chose, by layer."""
    if not has_neurons(record):
        return []
    return [figure_html(neurons_figure(record), "The neurons that were chosen, by layer")]


def fact_html(record: EditRecord) -> str:
    """The prompt with its subject marked, the old object and the new one."""
    start, stop = record.fact.subject_span
    text = record.fact.text
    return (
        f'{escaped(text[:start])}<span class="subject">{escaped(text[start:stop])}</span>'
        f'{escaped(text[stop:])} <span class="old">{escaped(record.true or "?")}</span> '
        f"<mark>{escaped(record.own.new)}</mark>"
    )


def edit_numbers(record: EditRecord) -> dict[str, str]:
    """An edit in a few numbers."""
    named = {
        f"P({display_token(record.own.new)})": (record.of_kind("prompt"), "new"),
        f"P({display_token(record.own.old or 'old')})": (record.of_kind("prompt"), "old"),
        "paraphrases, the new object": (record.of_kind("paraphrase"), "new"),
        "neighbours, the old object": (record.of_kind("neighbour"), "old"),
    }
    changes = {name: change_of(*of) for name, of in named.items()}
    return {
        name: f"{percent(change[0])} → {percent(change[1])}"
        for name, change in changes.items()
        if change is not None
    }


def scores_table(record: EditRecord) -> Table:
    """Every prompt's numbers."""
    columns = (
        "kind", "prompt", "new object", "before", "after", "old object", "before", "after",
        "likeliest before", "likeliest after",
    )  # fmt: skip
    return Table("Every prompt", columns, tuple(map(_row, record.prompts)))


def _row(scores: PromptScores) -> tuple[Cell, ...]:
    before, after = scores.before, scores.after
    old = [("–" if s.old is None else percent(s.old)) for s in (before, after)]
    tops = [f"{display_token(s.top)} ({percent(s.top_probability)})" for s in (before, after)]
    new, was = clean(scores.new), clean(scores.old or "–")
    return (
        scores.kind, clean(scores.text), new, percent(before.new), percent(after.new), was, *old,
        *tops,
    )  # fmt: skip


def generations_html(record: EditRecord) -> list[str]:
    """Continuations side by side, the new and the old object marked."""
    if not record.generations:
        return []
    return ["<h2>What it says</h2>", *(generation_html(g, record) for g in record.generations)]


def generation_html(generation: Generation, record: EditRecord) -> str:
    """One text's continuation before and after."""
    sides = (("before", generation.before), ("after", generation.after))
    words = (record.own.new, record.own.old)
    columns = (f"<div><h3>{name}</h3>{marked(text, words)}</div>" for name, text in sides)
    return f'<p>{escaped(generation.text)} …</p><div class="both">{"".join(columns)}</div>'


def marked(text: str, words: Sequence[str | None]) -> str:
    """A text, escaped, in which the new object and the old one are marked."""
    new, old = (word.strip() if word else "" for word in words)
    named = [re.escape(word) for word in (new, old) if word]
    parts = re.split(rf"(?<!\w)({'|'.join(named)})(?!\w)", text.strip())
    kinds = {old: '<mark class="was">', new: "<mark>"}
    return "".join(
        f"{kinds[part]}{escaped(part)}</mark>" if i % 2 else escaped(part)
        for i, part in enumerate(parts)
    )


def rails_html(record: EditRecord) -> str:
    """The guard rails with their limits."""
    if not record.checks:
        return '<p class="soft">not measured</p>'
    rows = tuple(
        (rail.name, rail.value, rail.limit, "kept" if rail.kept else "broken")
        for rail in check_rows(record.checks)
    )
    return scrollable(Table("Figures and limits", ("guard rail", "value", "limit", ""), rows))
