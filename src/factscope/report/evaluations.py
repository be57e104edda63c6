"""Reports of evaluations: the paper's tables (Tables 1 and 4) with our rows and the published ones,
and generated texts side by side (Figure 6).

Cells are marked as in the paper: green for the highest value of a column, red for a clear failure.
The paper does not define a clear failure. The rule here reproduces the red cells of its CounterFact
tables except for four: a score, success rate or accuracy below 50 %, a magnitude below 0, or a
fluency, consistency or zsRE specificity below 95 % of the unedited model's.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rich.text import Text

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS, UNEDITED, Pair, Summary, summarize
from factscope.analysis.published import published
from factscope.errors import BadRecord, BadSetting
from factscope.facts import Fact
from factscope.records import CaseRecord
from factscope.report.figures.evaluation import distributions_figure, scores_figure
from factscope.report.html import embed_figure, render, table_files, write_files
from factscope.report.labels import base_method, group_title, printable, row_name
from factscope.report.tables import Cell, Mark, Score, Table

COLUMNS = (
    "S", "ES", "EM", "PS", "PM", "NS", "NM", "GE", "RS",
    "efficacy", "paraphrase", "specificity", "drawdown",
)  # fmt: skip
"""Metrics of CounterFact and of zsRE; a table has columns for those that were measured."""
RATES = ("S", "ES", "PS", "NS", "efficacy", "paraphrase")
MAGNITUDES = ("EM", "PM", "NM")
PRESERVED = ("GE", "RS", "specificity")
"""Metrics that an edit should not lower."""
LOWER_IS_BETTER = ("drawdown",)
"""Cells of these columns are not marked."""
EXACT_MATCHES = {
    "prompt_correct": "prompt",
    "paraphrase_correct": "paraphrases",
    "neighbour_correct": "neighbours",
}
UNMEASURED = Estimate(math.nan, math.nan, 0)
NOTE = (
    "Values in percent (GE in hundredths of a bit); in parentheses half the width of the 95 % "
    "confidence interval. Best: the highest value of a column among rows of the same kind. "
    "Failure: a rate below 50, a magnitude below 0, or a GE, RS or specificity below 95 % of the "
    "unedited model's."
)
FAILED_NOTE = "Cases whose edit failed are counted as failed and excluded from all means."
BROKEN_NOTE = (
    "Broken: cases whose edited model no longer predicts unrelated text, or neither object after "
    "any prompt. Their scores count in the means."
)


def write_evaluation_report(
    records: Iterable[CaseRecord],
    folder: Path,
    title: str = "Evaluation of edits",
    *,
    cases: Sequence[str] | None = None,
    include_published: bool = True,
    rows: Sequence[Summary] | None = None,
) -> list[Path]:
    """Write the report and return its files, the page first.

    The page has tables and a figure for each model and data set, then the generated texts.

    `cases` are the ids of the cases whose texts the page displays; `include_published` adds the
    paper's rows; `rows` are the summaries of the records if they were computed before.
    """
    records = list(records)
    rows = summarize(records) if rows is None else rows
    if not rows:
        raise BadRecord("there are no scores to report on; evaluate some cases first")
    samples = collect_samples(records, cases)
    groups, figures = [], []
    for group in by_model_and_data(rows):
        name, edits = group_title(group), [row for row in group if row.edited]
        shown = with_published(group) if include_published else group
        numbers = {
            "cases": max(row.cases for row in group),
            "methods": len({row.method for row in edits}),
            "failed edits": sum(row.failed for row in edits),
            "broken models": sum(row.broken for row in edits),
        }
        groups.append(
            {
                "name": name,
                "numbers": numbers,
                "tables": evaluation_tables(group, include_published=include_published),
                "figure": embed_figure(scores_figure(shown), f"Scores of each method: {name}"),
            }
        )
        model, data = group[0].model, group[0].data
        file_name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{data}-{model}").strip("-.")
        figures.append((f"scores-{file_name}", scores_figure(shown)))
        if any(row.metrics for row in edits):
            ours = [record for record in records if (record.model, record.data) == (model, data)]
            figures.append((f"spread-{file_name}", distributions_figure(ours)))
    page = render(
        "evaluation.html",
        title=title,
        models=", ".join(dict.fromkeys(row.model for row in rows)),
        groups=groups,
        samples=samples,
    )
    tables = [table for group in groups for table in group["tables"]]
    full = all_metrics_table(rows, include_published=include_published)
    return write_files(
        folder, [("index.html", page), *table_files("table", *tables, full=full), *figures]
    )


# ---- rows


def by_model_and_data(rows: Iterable[Summary]) -> list[list[Summary]]:
    """The rows of each model and data set; each group becomes a table."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for row in rows:
        groups.setdefault((row.model, row.data), []).append(row)
    return list(groups.values())


def with_published(rows: Sequence[Summary]) -> list[Summary]:
    """The rows of one model and data set together with the published ones.

    A published row follows our row of single edits with the same method, or our last row of that
    method; methods that only the paper has come last.
    """
    paper_rows = {row.method: row for row in published(rows[0].model, rows[0].data)}
    single = [i for i, row in enumerate(rows) if row.protocol == "single"]
    # Later keys overwrite earlier ones, so a row of single edits wins over any other.
    last = {base_method(rows[i].method): i for i in (*range(len(rows)), *single)}
    merged: list[Summary] = []
    for i, row in enumerate(rows):
        merged.append(row)
        method = base_method(row.method)
        if last[method] == i and method in paper_rows:
            merged.append(paper_rows.pop(method))
    unedited = [row for row in paper_rows.values() if not row.edited]
    return [*unedited, *merged, *(row for row in paper_rows.values() if row.edited)]


# ---- tables


def evaluation_tables(rows: Iterable[Summary], *, include_published: bool = True) -> list[Table]:
    """For each model and data set: the paper's table and, if measured, exact matches."""
    tables: list[Table] = []
    for group in by_model_and_data(rows):
        tables.append(metrics_table(with_published(group) if include_published else group))
        if any(name in row.metrics for row in group for name in EXACT_MATCHES):
            tables.append(exact_match_table(group))
    return tables


def metrics_table(rows: Sequence[Summary]) -> Table:
    """The paper's table for one model and data set."""
    names = [name for name in COLUMNS if any(name in row.metrics for row in rows)]
    arrows = (f"{name} {'↓' if name in LOWER_IS_BETTER else '↑'}" for name in names)

    def score(row: Summary, name: str) -> Score:
        value = row.metrics.get(name, UNMEASURED)
        return Score(value, cell_mark(row, name, rows) if value.n and row.edited else None)

    notes = [NOTE]
    if any(row.failed for row in rows):
        notes.append(FAILED_NOTE)
    columns = ["editor", "cases", "failed"]
    broken = any(row.broken for row in rows)  # the column is left out if no model is broken
    if broken:
        notes.append(BROKEN_NOTE)
        columns.append("broken")
    return Table(
        group_title(rows),
        (*columns, *arrows),
        tuple((*_head(row, broken), *(score(row, name) for name in names)) for row in rows),
        note=" ".join(notes),
        rules=_rules(rows),
    )


def exact_match_table(rows: Sequence[Summary]) -> Table:
    """How often every token of the correct object is the most likely one."""
    return Table(
        f"Exact match: {group_title(rows)}",
        ("editor", "cases", "failed", *(f"{name} ↑" for name in EXACT_MATCHES.values())),
        tuple(
            (*_head(row), *(Score(row.metrics.get(name, UNMEASURED)) for name in EXACT_MATCHES))
            for row in rows
        ),
        note="How often every token of the correct object (the new object; for neighbours the true "
        "one) is the most likely token, in percent.",
        rules=_rules(rows),
    )


def pair_table(pair: Pair, names: tuple[str, str]) -> Table:
    """The metrics of two runs and their difference; `names` are those of the runs."""
    first, second = pair.summaries
    rows = []
    for name in (*COLUMNS, *EXACT_MATCHES):
        values = [summary.metrics.get(name, UNMEASURED) for summary in (first, second)]
        if name == "drawdown" or not any(value.n for value in values):  # specificity says the same
            continue
        difference = pair.differences.get(name, UNMEASURED)
        label = f"{EXACT_MATCHES[name]}, exact match" if name in EXACT_MATCHES else name
        rows.append((label, *map(Score, values), Score(difference), difference.n))
    phase = {"edit": "", "end": ", after all edits"}[pair.phase]
    if pair.shared:
        note = (
            f"Over the {pair.shared} cases that both runs scored. Difference: {names[1]} - "
            f"{names[0]}, the mean over cases; if its 95 % interval, given by half its width in "
            "parentheses, excludes 0, the runs differ clearly. "
        )
    else:
        note = "The runs have no case in common, so their metrics are of different cases. "
    return Table(
        f"{names[0]} and {names[1]}{phase}",
        ("metric", *names, "difference", "cases"),
        tuple(rows),
        note=note + "Values in percent (GE in hundredths of a bit).",
    )


def all_metrics_table(rows: Iterable[Summary], *, include_published: bool = True) -> Table:
    """All rows and metrics in one table for CSV, as fractions and bits."""
    groups = by_model_and_data(rows)
    rows = [r for g in groups for r in (with_published(g) if include_published else g)]
    names = [n for n in ("S", *METRICS, "drawdown") if any(n in row.metrics for row in rows)]
    columns = (
        "model", "data", "method", "protocol", "phase", "source",
        "cases", "failed", "broken", *names,
    )  # fmt: skip
    cells = tuple(
        (
            row.model, row.data, row.method, row.protocol, row.phase,
            "published" if row.published else "ours", *_head(row, broken=True)[1:],
            *(row.metrics.get(name, UNMEASURED) for name in names),
        )
        for row in rows
    )  # fmt: skip
    return Table("All metrics", columns, cells)


def cell_mark(row: Summary, name: str, rows: Sequence[Summary]) -> Mark:
    """The mark of a metric's cell, by the rule of this module.

    Rows compete with those of the same source, protocol and phase, if any.
    """
    measured = [r for r in rows if name in r.metrics and r.published == row.published]
    unedited = next((r.metrics[name].mean for r in measured if not r.edited), None)
    value = row.metrics[name].mean
    lowered = name in PRESERVED and unedited is not None and value < 0.95 * unedited
    if (name in RATES and value < 0.5) or (name in MAGNITUDES and value < 0) or lowered:
        return "failure"
    rivals = [
        r.metrics[name].mean
        for r in measured
        if r.edited and (r.protocol, r.phase) == (row.protocol, row.phase)
    ]
    best = len(rivals) > 1 and name not in LOWER_IS_BETTER and value == max(rivals)
    return "best" if best else None


def _head(row: Summary, broken: bool = False) -> tuple[Cell, ...]:
    counts = (row.failed, row.broken) if broken else (row.failed,)
    ours = row.edited and not row.published
    return row_name(row), row.cases, *(count if ours else None for count in counts)


def _rules(rows: Sequence[Summary]) -> tuple[int, ...]:
    """A rule below the rows of the unedited model."""
    unedited = [i for i, row in enumerate(rows) if not row.edited]
    return (unedited[-1],) if unedited and len(unedited) < len(rows) else ()


# ---- generated texts

TERMINAL_STYLES = {
    "new": ("*", "bold green"),
    "true": ("~", "yellow"),
    "reference": ("", "underline"),
    "opening": ("", "italic"),
    "": ("", ""),
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

    def highlight(self, text: str, opening: int = 0) -> list[Segment]:
        """One of the texts in segments."""
        return highlight(
            text, new=self.fact.target, true=self.true, reference_words=self.reference_words,
            opening=opening,
        )  # fmt: skip

    def highlighted_rows(self) -> list[dict[str, list[Segment]]]:
        """For each generation prompt: column name → text in segments."""
        rows = []
        for i in range(max(map(len, self.texts.values()), default=0)):
            row = {name: texts[i] for name, texts in self.texts.items() if i < len(texts)}
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
    return [_samples(group, (reference or {}).get(group[0].fact.id or "", ())) for group in chosen]


def _samples(records: Sequence[CaseRecord], reference: Iterable[str]) -> Samples:
    """The texts of one case before its edit and after each of its records."""
    scored = [("before", record.before) for record in records]
    scored += [
        ("before" if record.method == UNEDITED else row_name(record), record.after)
        for record in records
    ]
    texts: dict[str, tuple[str, ...]] = {}
    for name, scores in scored:
        if scores and scores.texts:
            texts.setdefault(name, scores.texts)
    words = re.findall(r"\w+", " ".join(reference))
    return Samples(
        fact=records[0].fact,
        true=records[0].true,
        model=records[0].model,
        texts=texts,
        reference_words=frozenset(w.casefold() for w in words if len(w) >= MIN_REFERENCE_WORD),
    )


def samples_text(samples: Samples) -> Text:
    """The texts one below the other for the terminal: *new object*, ~true object~."""

    def styled(text: str, kind: str) -> tuple[str, str]:
        sign, style = TERMINAL_STYLES[kind]
        return f"{sign}{printable(text)}{sign}", style

    fact = samples.fact
    case = f"case {fact.id}, {samples.model}: " if fact.id else f"{samples.model}: "
    output = Text.assemble(
        (printable(f"{case}{fact.text} "), "bold"),
        styled(samples.true or "?", "true"),
        " → ",
        styled(fact.target or "?", "new"),
    )
    for row in samples.highlighted_rows():
        output.append("\n")
        for name, segments in row.items():
            output.append(f"\n{printable(name)}\n", style="dim")
            for segment in segments:
                output.append(*styled(*segment))
    return output.append("\n")
