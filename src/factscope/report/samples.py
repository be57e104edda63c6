"""Generated texts of a case side by side: before the edit and after each method (Figure 6).

The new and the true object are highlighted, and optionally words of reference texts. The opening
that all texts of a row share, which is the generation prompt, is set in italics.
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
from factscope.report.labels import PHASE_LABELS, editor_name, printable

BEFORE = "before"
TERMINAL_STYLES = {
    "new": ("*", "bold green"),
    "true": ("~", "yellow"),
    "reference": ("", "underline"),
    "opening": ("", "italic"),
}
"""How segments are printed: the sign around them, and their style."""
MIN_REFERENCE_WORD = 4
"""Shorter words of a reference text are not highlighted: they occur in any text."""

Segment = tuple[str, str]
"""A part of a text, and what it is: "new" or "true" (the objects), "reference" (a word of a
reference text), "opening", or "" for other text."""


def highlight(
    text: str,
    *,
    new: str | None,
    true: str | None,
    reference_words: Collection[str] = (),
    opening: int = 0,
) -> list[Segment]:
    """Split a text into segments; its first `opening` characters are the opening.

    Objects are found as whole words in upper or lower case; `reference_words` are in lower case.
    """
    objects = {"true": true, "new": new}  # where both are the same, "new" overwrites "true"
    kinds = {o.strip().casefold(): kind for kind, o in objects.items() if o and o.strip()}
    # The longer object first, so that "New York City" is not found as "New York".
    either = "|".join(re.escape(word) for word in sorted(kinds, key=len, reverse=True))
    parts = re.split(rf"(?i)(?<!\w)({either})(?!\w)" if either else "(?!)()", text[opening:])
    segments: list[Segment] = [(text[:opening], "opening")]
    for i, part in enumerate(parts):
        if i % 2:  # re.split returns the text between objects at even indices, objects at odd ones
            # Case-insensitive matching and casefold() differ for a few characters, such as "ı".
            segments.append((part, kinds.get(part.casefold(), "new")))
        elif reference_words:
            segments += [
                (word, "reference" if word.casefold() in reference_words else "")
                for word in re.split(r"(\w+)", part)
            ]
        else:
            segments.append((part, ""))
    return [segment for segment in segments if segment[0]]


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The generated texts of a case."""

    fact: Fact
    true: str | None
    model: str
    texts: Mapping[str, tuple[str, ...]]
    """Column name ("before", then each method) → texts, in the order of the generation prompts."""
    reference_words: frozenset[str] = frozenset()
    """Words of reference texts, in lower case."""

    def rows(self) -> list[dict[str, str]]:
        """For each generation prompt: column name → text."""
        count = max(map(len, self.texts.values()), default=0)
        return [
            {name: texts[i] for name, texts in self.texts.items() if i < len(texts)}
            for i in range(count)
        ]

    def highlight(self, text: str, opening: int = 0) -> list[Segment]:
        """One of the texts in segments."""
        return highlight(
            text, new=self.fact.target, true=self.true, reference_words=self.reference_words,
            opening=opening,
        )  # fmt: skip

    def highlighted_rows(self) -> list[dict[str, list[Segment]]]:
        """The rows with every text in segments."""
        rows = []
        for row in self.rows():
            opening = shared_opening_length(list(row.values()))
            rows.append({name: self.highlight(text, opening) for name, text in row.items()})
        return rows


def shared_opening_length(texts: Sequence[str]) -> int:
    """The length of the opening that the texts share, cut at the end of a word.

    It is 0 where one text is a prefix of all others: then it is unknown where the opening ends.
    """
    equal = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    shared = texts[0][: sum(1 for _ in equal)]
    if len(shared) == min(map(len, texts)):
        return 0
    if any(text[len(shared) : len(shared) + 1].isalnum() for text in texts):
        shared = re.sub(r"\w+$", "", shared)
    return len(shared.rstrip())


def collect_samples(
    records: Iterable[CaseRecord],
    cases: Sequence[str] | None = None,
    *,
    count: int = 3,
    reference: Mapping[str, Collection[str]] | None = None,
) -> list[Samples]:
    """The texts of the cases with these ids; by default of the first `count` cases with texts.

    `reference` maps ids of cases to reference texts whose words are highlighted.
    """
    groups: dict[tuple[str, Fact], list[CaseRecord]] = {}
    for record in records:
        if any(scores is not None and scores.texts for scores in (record.before, record.after)):
            groups.setdefault((record.model, record.fact), []).append(record)
    chosen = list(groups.values())
    if cases is None:
        chosen = chosen[:count]
    else:
        ids = list(dict.fromkeys(fact.id for _, fact in groups))
        if unknown := [case for case in cases if case not in ids]:
            known = ", ".join(map(str, ids[:10])) or "none"
            raise BadSetting(f"no texts of case {unknown[0]!r}; cases with texts: {known}")
        chosen = [group for group in chosen if group[0].fact.id in cases]
        chosen.sort(key=lambda group: list(cases).index(group[0].fact.id or ""))
    return [_samples(group, reference or {}) for group in chosen]


def _samples(records: Sequence[CaseRecord], reference: Mapping[str, Collection[str]]) -> Samples:
    first = records[0]
    before = [(BEFORE, record.before) for record in records]
    after = [(_column_name(record), record.after) for record in records]
    texts: dict[str, tuple[str, ...]] = {}
    for name, scores in (*before, *after):
        if scores and scores.texts:
            texts.setdefault(name, scores.texts)
    words = re.findall(r"\w+", " ".join(reference.get(first.fact.id or "", ())))
    return Samples(
        fact=first.fact,
        true=first.true,
        model=first.model,
        texts=texts,
        reference_words=frozenset(w.casefold() for w in words if len(w) >= MIN_REFERENCE_WORD),
    )


def _column_name(record: CaseRecord) -> str:
    if record.method == UNEDITED:
        return BEFORE
    name = editor_name(record.method)
    if record.protocol == "single":
        return name
    when = f", {PHASE_LABELS[record.phase]}" if record.protocol == "sequential" else ""
    return f"{name}, {record.protocol}{when}"


def samples_text(samples: Samples) -> Text:
    """The texts one below the other for the terminal: *new object*, ~true object~."""
    fact = samples.fact
    case = f"case {fact.id}, {samples.model}: " if fact.id else f"{samples.model}: "
    output = Text().append(printable(f"{case}{fact.text} "), style="bold")
    output.append_text(_segment_text(samples.true or "?", "true")).append(" → ")
    output.append_text(_segment_text(fact.target or "?", "new"))
    for row in samples.highlighted_rows():
        output.append("\n")
        for name, segments in row.items():
            output.append(f"\n{printable(name)}\n", style="dim")
            for segment in segments:
                output.append_text(_segment_text(*segment))
    return output.append("\n")


def _segment_text(text: str, kind: str) -> Text:
    sign, style = TERMINAL_STYLES.get(kind, ("", ""))
    return Text(f"{sign}{printable(text)}{sign}", style=style)
