"""What models write about a case, side by side: before, and after each method (Figure 6).

The new object is marked, the true one otherwise, and words of a reference text where they are
given. What all texts of a row begin with, that is their opening, is set in italics.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from rich.text import Text

from factscope.analysis.metrics import UNEDITED
from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.records import CaseRecord
from factscope.report.html import clean, escaped
from factscope.report.labels import WHEN, editor_name

__all__ = ["Samples", "samples_html", "samples_of", "samples_text"]

BEFORE = "before"
SIGNS = {"new": ("*", "bold green"), "true": ("~", "yellow"), "like": ("", "underline")}
"""How marked words look in a terminal."""
TAGS = {"new": "<mark>", "true": '<mark class="was">', "like": '<mark class="like">'}
LEAST = 4
"""Shorter words of a reference text are not marked: they are in any text."""
OPEN = 3
"""How many texts of a case a page shows at once."""

Piece = tuple[str, str]
"""Words, and how they are marked: "new", "true", "like", "opening" or ""."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A case's texts."""

    fact: Fact
    true: str | None
    model: str
    texts: Mapping[str, tuple[str, ...]]
    """By column: "before", then each method."""
    like: frozenset[str] = frozenset()
    """Words of reference texts, in small letters."""

    def rows(self) -> list[dict[str, str]]:
        """The texts that belong together, one of each column."""
        count = max(map(len, self.texts.values()), default=0)
        return [
            {name: texts[i] for name, texts in self.texts.items() if i < len(texts)}
            for i in range(count)
        ]

    def pieces(self, text: str, opening: int = 0) -> list[Piece]:
        """The text in pieces, marked; its first so many letters are the opening."""
        objects = {"new": self.fact.target, "true": self.true}
        marks = {o.strip().casefold(): kind for kind, o in objects.items() if o and o.strip()}
        head = [(text[:opening], "opening")] if opening else []
        named = "|".join(re.escape(word) for word in sorted(marks, key=len, reverse=True))
        found = re.split(rf"(?i)(?<!\w)({named})(?!\w)" if named else "(?!)()", text[opening:])
        pieces = list(head)
        for i, part in enumerate(found):
            if i % 2:
                pieces.append((part, marks.get(part.casefold(), "new")))
            else:
                pieces += self._alike(part)
        return [piece for piece in pieces if piece[0]]

    def _alike(self, text: str) -> list[Piece]:
        if not self.like:
            return [(text, "")]
        return [
            (word, "like" if word.casefold() in self.like else "")
            for word in re.split(r"(\w+)", text)
        ]


def samples_of(
    records: Iterable[CaseRecord],
    cases: Sequence[str] | None = None,
    *,
    count: int = 3,
    reference: Mapping[str, Collection[str]] | None = None,
) -> list[Samples]:
    """The texts of the cases with these ids, or else of the first `count` that have any.

    `reference` gives, by a case's id, texts whose words are to be marked.
    """
    written = [record for record in records if _has_texts(record)]
    ids = list(dict.fromkeys(record.fact.id for record in written))
    if cases is not None:
        unknown = [case for case in cases if case not in ids]
        if unknown:
            known = ", ".join(str(case) for case in ids[:10]) or "none"
            raise BadSetting(f"no texts of the case {unknown[0]!r}; there are those of: {known}")
    groups: dict[tuple[str, Fact], list[CaseRecord]] = {}
    for record in written:
        if cases is None or record.fact.id in cases:
            groups.setdefault((record.model, record.fact), []).append(record)
    chosen = list(groups.values())
    if cases is None:
        return [_samples(some, reference or {}) for some in chosen[:count]]
    chosen.sort(key=lambda some: list(cases).index(some[0].fact.id or ""))
    return [_samples(some, reference or {}) for some in chosen]


def _has_texts(record: CaseRecord) -> bool:
    return any(scores is not None and scores.texts for scores in (record.before, record.after))


def _samples(records: Sequence[CaseRecord], reference: Mapping[str, Collection[str]]) -> Samples:
    first = records[0]
    before = [(BEFORE, record.before) for record in records]
    after = [(column_name(record), record.after) for record in records]
    texts: dict[str, tuple[str, ...]] = {}
    for name, scores in (*before, *after):
        if scores and scores.texts:
            texts.setdefault(name, scores.texts)
    words = " ".join(reference.get(first.fact.id or "", ()))
    like = {w.casefold() for w in re.findall(r"\w+", words) if len(w) >= LEAST}
    return Samples(
        fact=first.fact, true=first.true, model=first.model, texts=texts, like=frozenset(like)
    )


def column_name(record: CaseRecord) -> str:
    """What a column of texts is called."""
    if record.method == UNEDITED:
        return BEFORE
    name = editor_name(record.method)
    if record.protocol == "single":
        return name
    when = f", {WHEN[record.phase]}" if record.protocol == "sequential" else ""
    return f"{name}, {record.protocol}{when}"


def shared_opening(texts: Sequence[str]) -> int:
    """How many letters the texts share at their beginning, up to the end of a word; none where
    a whole text is shared: then it is not known how far the opening went.
    """
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    shared = texts[0][: sum(1 for _ in alike)]
    if len(shared) == min(map(len, texts)):
        return 0
    if any(text[len(shared) : len(shared) + 1].isalnum() for text in texts):
        shared = re.sub(r"\w+$", "", shared)
    return len(shared.rstrip())


def samples_html(samples: Samples) -> str:
    """The texts side by side, for a page; those after the first few are folded."""
    rows = [_row_html(samples, row) for row in samples.rows()]
    more = "\n".join(rows[OPEN:])
    folded = f"<details><summary>{len(rows) - OPEN} more texts</summary>\n{more}</details>\n"
    shown = "\n".join(rows[:OPEN])
    return f"<h3>{headline_html(samples)}</h3>\n{shown}\n{folded if more else ''}"


def headline_html(samples: Samples) -> str:
    """The fact, its true object and its new one."""
    fact = samples.fact
    start, stop = fact.subject_span
    text = fact.text
    names = [f"case {fact.id}"] if fact.id else []
    tag = f' <span class="tag">{escaped(", ".join([*names, samples.model]))}</span>'
    return (
        f'{escaped(text[:start])}<span class="subject">{escaped(text[start:stop])}</span>'
        f'{escaped(text[stop:])} <span class="old">{escaped(samples.true or "?")}</span> '
        f"<mark>{escaped(fact.target or '?')}</mark>{tag}"
    )


def _row_html(samples: Samples, row: Mapping[str, str]) -> str:
    opening = shared_opening(list(row.values()))
    columns = (
        f"<div><h3>{escaped(name)}</h3>{_marked(samples.pieces(text, opening))}</div>"
        for name, text in row.items()
    )
    return f'<div class="both">{"".join(columns)}</div>'


def _marked(pieces: Iterable[Piece]) -> str:
    return "".join(_piece_html(*piece) for piece in pieces)


def _piece_html(text: str, kind: str) -> str:
    if kind == "opening":
        return f"<i>{escaped(text)}</i>"
    return f"{TAGS[kind]}{escaped(text)}</mark>" if kind else escaped(text)


def samples_text(samples: Samples) -> Text:
    """The texts one below the other, for the terminal: *new object*, ~true object~."""
    fact = samples.fact
    case = f"case {fact.id}, {samples.model}: " if fact.id else f"{samples.model}: "
    said = Text().append(clean(f"{case}{fact.text} "), style="bold")
    said.append_text(_piece_text(samples.true or "?", "true")).append(" → ")
    said.append_text(_piece_text(fact.target or "?", "new"))
    for row in samples.rows():
        opening = shared_opening(list(row.values()))
        said.append("\n")
        for name, written in row.items():
            said.append(f"\n{clean(name)}\n", style="dim")
            for piece in samples.pieces(written, opening):
                said.append_text(_piece_text(*piece))
    return said.append("\n")


def _piece_text(text: str, kind: str) -> Text:
    if kind not in SIGNS:
        return Text(clean(text), style="italic" if kind else "")
    sign, style = SIGNS[kind]
    return Text(f"{sign}{clean(text)}{sign}", style=style)
