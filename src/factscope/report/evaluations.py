"""The report of evaluations: tables, figures and a page in one folder, each file whole.

The paper's tables of edits (Tables 1 and 4), our rows beside the published ones.

Numbers are marked as the paper does it. Green is the highest number of a column; red is a clear
failure. The paper does not say what counts as clear. The rule here gives the red of its
CounterFact tables but for four cells: a score, success rate or accuracy below 50 %, a magnitude
below 0, or a fluency, consistency or zsRE specificity below 95 % of the unedited model's.
"""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS, Summary, summaries
from factscope.analysis.published import published
from factscope.errors import BadRecord
from factscope.io import write_atomic
from factscope.records import CaseRecord
from factscope.report.figures.effects import distributions_figure
from factscope.report.figures.evaluation import scores_figure
from factscope.report.html import figure_html, numbers_html, page, scrollable
from factscope.report.labels import DATA, published_method, row_name
from factscope.report.samples import Samples, samples_html, samples_of
from factscope.report.tables import Cell, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.traces import write_figure

__all__ = [
    "evaluation_page",
    "evaluation_tables",
    "every_number",
    "is_failure",
    "with_published",
    "write_evaluation_report",
]

COLUMNS = (
    "S", "ES", "EM", "PS", "PM", "NS", "NM", "GE", "RS",
    "efficacy", "paraphrase", "specificity", "drawdown",
)  # fmt: skip
"""Those of CounterFact and those of zsRE; a table has the ones that were measured."""
RATES = ("S", "ES", "PS", "NS", "efficacy", "paraphrase")
MAGNITUDES = ("EM", "PM", "NM")
KEPT = ("GE", "RS", "specificity")
"""What an edit should leave as it was, or raise."""
LOWER = ("drawdown",)
"""What should be low; neither marked."""
ACCURACIES = {
    "prompt_correct": "prompt",
    "paraphrase_correct": "paraphrases",
    "neighbour_correct": "neighbours",
}
NONE = Estimate(float("nan"), float("nan"), 0)
NOTE = (
    "In percent (GE in hundredths of a bit), in parentheses half the width of the 95 % interval. "
    "Marked as best: the highest of a column among rows of the same kind. Marked as failed: a rate "
    "below 50, a magnitude below 0; GE, RS or specificity below 95 % of the unedited model's."
)
FAILED = "Cases whose edit failed are counted under failed and are in no mean."


def evaluation_tables(summaries: Iterable[Summary], *, beside: bool = True) -> list[Table]:
    """For each model and data set the paper's table, `beside` it the published rows, and how
    often the whole object is the likeliest.
    """
    tables: list[Table] = []
    for block in blocks(summaries):
        rows = with_published(block) if beside else block
        tables.append(metrics_table(rows))
        if any(name in row.metrics for row in block for name in ACCURACIES):
            tables.append(accuracies_table(block))
    return tables


def blocks(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """The rows of each model and data set."""
    groups: dict[tuple[str, str], list[Summary]] = {}
    for summary in summaries:
        groups.setdefault((summary.model, summary.data), []).append(summary)
    return list(groups.values())


def with_published(rows: Sequence[Summary]) -> list[Summary]:
    """One model's rows, after each method's single edits the paper's, then its other ones."""
    theirs = {row.method: row for row in published(rows[0].model, rows[0].data)}
    single = [i for i, row in enumerate(rows) if row.protocol == "single"]
    last = {published_method(rows[i].method): i for i in (*range(len(rows)), *single)}
    together: list[Summary] = []
    for i, row in enumerate(rows):
        together.append(row)
        method = published_method(row.method)
        if last[method] == i and method in theirs:
            together.append(theirs.pop(method))
    unedited = [row for row in theirs.values() if not row.edited]
    return [*unedited, *together, *(row for row in theirs.values() if row.edited)]


def metrics_table(rows: Sequence[Summary]) -> Table:
    """The paper's table of one model and data set."""
    model, data = _of_ours(rows).model, rows[0].data
    names = [name for name in COLUMNS if any(name in row.metrics for row in rows)]
    columns = [f"{name} {'↓' if name in LOWER else '↑'}" for name in names]
    return Table(
        f"{DATA.get(data, data)}, {model}",
        ("editor", "cases", "failed", *columns),
        tuple((*_head(row), *(_score(row, name, rows) for name in names)) for row in rows),
        note=f"{NOTE} {FAILED}" if any(row.failed for row in rows) else NOTE,
        rules=_rules(rows),
    )


def accuracies_table(rows: Sequence[Summary]) -> Table:
    """How often every token of the right object is the likeliest."""
    return Table(
        f"Right word for word: {DATA.get(rows[0].data, rows[0].data)}, {rows[0].model}",
        ("editor", "cases", "failed", *(f"{name} ↑" for name in ACCURACIES.values())),
        tuple(
            (*_head(row), *(Score(row.metrics.get(name, NONE)) for name in ACCURACIES))
            for row in rows
        ),
        note="How often all tokens of the right object (the new one; for neighbours the true one) "
        "are the likeliest, in percent.",
        rules=_rules(rows),
    )


def every_number(summaries: Iterable[Summary], *, beside: bool = True) -> Table:
    """All rows and metrics in one table, as shares and bits, for CSV."""
    rows = [r for block in blocks(summaries) for r in (with_published(block) if beside else block)]
    names = [n for n in ("S", *METRICS, "drawdown") if any(n in row.metrics for row in rows)]
    heads = ("model", "data", "method", "protocol", "phase", "source", "cases", "failed")
    return Table("Every number", (*heads, *names), tuple(_every(row, names) for row in rows))


def is_failure(name: str, value: float, unedited: float | None) -> bool:
    """Whether a metric tells of a clear failure: see above."""
    if name in RATES:
        return value < 0.5
    if name in MAGNITUDES:
        return value < 0
    return name in KEPT and unedited is not None and value < 0.95 * unedited


def _score(row: Summary, name: str, rows: Sequence[Summary]) -> Score:
    value = row.metrics.get(name, NONE)
    return Score(value, _mark(row, name, rows) if value.n and row.edited else None)


def _mark(row: Summary, name: str, rows: Sequence[Summary]) -> Literal["best", "failure"] | None:
    """Rows compete with those of the same source, protocol and moment, if there are any."""
    value = row.metrics[name].mean
    alike = [
        r.metrics[name].mean
        for r in rows
        if r.edited and name in r.metrics and _kind(r) == _kind(row)
    ]
    if is_failure(name, value, _unedited(row, name, rows)):
        return "failure"
    best = len(alike) > 1 and name not in LOWER and value == max(alike)
    return "best" if best else None


def _kind(row: Summary) -> tuple[bool, str, str]:
    return row.published, row.protocol, row.phase


def _unedited(row: Summary, name: str, rows: Sequence[Summary]) -> float | None:
    """The metric of the model as it is, from the same source."""
    found = [r for r in rows if not r.edited and r.published == row.published and name in r.metrics]
    return found[0].metrics[name].mean if found else None


def _head(row: Summary) -> tuple[Cell, ...]:
    return row_name(row), row.cases, row.failed if row.edited and not row.published else None


def _rules(rows: Sequence[Summary]) -> tuple[int, ...]:
    """A line below the rows of the unedited model."""
    plain = [i for i, row in enumerate(rows) if not row.edited]
    return (plain[-1],) if plain and len(plain) < len(rows) else ()


def _of_ours(rows: Sequence[Summary]) -> Summary:
    return next((row for row in rows if not row.published), rows[0])


def _every(row: Summary, names: Sequence[str]) -> tuple[Cell, ...]:
    source = "published" if row.published else "ours"
    numbers = (row.metrics.get(name, NONE) for name in names)
    return (
        row.model, row.data, row.method, row.protocol, row.phase, source, row.cases,
        _head(row)[-1], *numbers,
    )  # fmt: skip


def write_evaluation_report(
    records: Iterable[CaseRecord],
    folder: Path,
    title: str = "Evaluation of edits",
    *,
    cases: Sequence[str] | None = None,
    beside: bool = True,
    rows: Sequence[Summary] | None = None,
) -> list[Path]:
    """Write the report and return its files, the page first.

    `cases` names the cases whose texts are shown, by id; `beside` shows the paper's rows, too;
    `rows` are the records' summaries, if they are there already.
    """
    everyone = list(records)
    found = summaries(everyone) if rows is None else rows
    if not found:
        raise BadRecord("there are no scores to report on; evaluate some cases first")
    index = folder / "index.html"
    samples = samples_of(everyone, cases)
    write_atomic(index, evaluation_page(title, found, samples, beside=beside))
    tables = evaluation_tables(found, beside=beside)
    files = {
        "table.md": "\n".join(map(as_markdown, tables)),
        "table.tex": "\n".join(map(as_latex, tables)),
        "table.csv": as_csv(every_number(found, beside=beside)),
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    figures = [
        path
        for block in blocks(found)
        for path in (
            *write_figure(scores_figure(shown(block, beside)), folder / stem(block)),
            *_write_spread(everyone, block, folder),
        )
    ]
    return [index, *(folder / name for name in files), *figures]


def evaluation_page(
    title: str, rows: Sequence[Summary], samples: Sequence[Samples], *, beside: bool = True
) -> str:
    """The page: for each model and data set a figure and tables, then the texts."""
    models = ", ".join(dict.fromkeys(row.model for row in rows))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">Edits of {html.escape(models)}</p>',
    ]
    for block in blocks(rows):
        body += block_html(block, beside)
    if samples:
        body += [
            "<h2>What it says</h2>",
            '<p class="soft">Marked are <mark>the new object</mark> and '
            '<mark class="was">the true one</mark>; in italics what the texts of a row share.</p>',
            *map(samples_html, samples),
        ]
    return page(title, body, note="")


def block_html(block: Sequence[Summary], beside: bool) -> list[str]:
    """One model on one data set."""
    name = f"{DATA.get(block[0].data, block[0].data)}, {block[0].model}"
    tables = evaluation_tables(block, beside=beside)
    return [
        f"<h2>{html.escape(name)}</h2>",
        numbers_html(numbers(block)),
        *(f'<div class="paper">{scrollable(table)}</div>' for table in tables),
        figure_html(scores_figure(shown(block, beside)), f"Scores of each method: {name}"),
    ]


def numbers(block: Sequence[Summary]) -> dict[str, str]:
    """A few numbers for the top."""
    edits = [row for row in block if row.edited]
    return {
        "cases": str(max(row.cases for row in block)),
        "methods": str(len({row.method for row in edits})),
        "failed edits": str(sum(row.failed for row in edits)),
    }


def shown(block: Sequence[Summary], beside: bool) -> Sequence[Summary]:
    """The rows of a block, with the published ones if they are wanted."""
    return with_published(block) if beside else block


def _write_spread(
    records: Sequence[CaseRecord], block: Sequence[Summary], folder: Path
) -> list[Path]:
    """How a block's scores are spread over cases; nothing where no edit has any."""
    if not any(row.edited and row.metrics for row in block):
        return []
    mine = [r for r in records if (r.model, r.data) == (block[0].model, block[0].data)]
    return write_figure(distributions_figure(mine), folder / stem(block, "spread"))


def stem(block: Sequence[Summary], figure: str = "scores") -> str:
    """The name of a block's figure."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{block[0].data}-{block[0].model}").strip("-.")
    return f"{figure}-{words}"
