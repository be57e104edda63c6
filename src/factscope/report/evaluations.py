"""Reports of evaluations: the paper's tables (Tables 1 and 4) with our rows and the published ones.

Cells are marked as in the paper: green for the highest value of a column, red for a clear failure.
The paper does not define a clear failure. The rule here reproduces the red cells of its CounterFact
tables except for four: a score, success rate or accuracy below 50 %, a magnitude below 0, or a
fluency, consistency or zsRE specificity below 95 % of the unedited model's.
"""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import METRICS, Summary, summarize
from factscope.analysis.published import published
from factscope.errors import BadRecord
from factscope.records import CaseRecord
from factscope.report.figures.evaluation import distributions_figure, scores_figure
from factscope.report.html import embed_figure, render
from factscope.report.labels import base_method, dataset_name, row_name
from factscope.report.samples import Samples, collect_samples
from factscope.report.tables import Cell, Score, Table, as_csv, as_latex, as_markdown
from factscope.report.write import write_figure, write_texts

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

    `cases` are the ids of the cases whose texts the page displays; `include_published` adds the
    paper's rows; `rows` are the summaries of the records if they were computed before.
    """
    records = list(records)
    rows = summarize(records) if rows is None else rows
    if not rows:
        raise BadRecord("there are no scores to report on; evaluate some cases first")
    samples = collect_samples(records, cases)
    tables = evaluation_tables(rows, include_published=include_published)
    every_metric = all_metrics_table(rows, include_published=include_published)
    texts = {
        "index.html": evaluation_page(title, rows, samples, include_published=include_published),
        "table.md": "\n".join(map(as_markdown, tables)),
        "table.tex": "\n".join(map(as_latex, tables)),
        "table.csv": as_csv(every_metric),
    }
    files = write_texts(folder, texts)
    for group in by_model_and_data(rows):
        model, data = group[0].model, group[0].data
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{data}-{model}").strip("-.")
        scores = scores_figure(with_published(group) if include_published else group)
        files += write_figure(scores, folder / f"scores-{name}")
        if any(row.edited and row.metrics for row in group):
            spread = distributions_figure(
                [r for r in records if (r.model, r.data) == (model, data)]
            )
            files += write_figure(spread, folder / f"spread-{name}")
    return files


def evaluation_page(
    title: str,
    rows: Sequence[Summary],
    samples: Sequence[Samples],
    *,
    include_published: bool = True,
) -> str:
    """The page: tables and a figure for each model and data set, then the generated texts."""
    return render(
        "evaluation.html",
        title=title,
        models=", ".join(dict.fromkeys(row.model for row in rows)),
        groups=[_group_values(group, include_published) for group in by_model_and_data(rows)],
        samples=samples,
    )


def _group_values(group: Sequence[Summary], include_published: bool) -> dict[str, Any]:
    name = _title(group[0])
    edits = [row for row in group if row.edited]
    figure = scores_figure(with_published(group) if include_published else group)
    return {
        "name": name,
        "numbers": {
            "cases": max(row.cases for row in group),
            "methods": len({row.method for row in edits}),
            "failed edits": sum(row.failed for row in edits),
        },
        "tables": evaluation_tables(group, include_published=include_published),
        "figure": embed_figure(figure, f"Scores of each method: {name}"),
    }


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
    ours = next((row for row in rows if not row.published), rows[0])
    return Table(
        _title(ours),
        ("editor", "cases", "failed", *arrows),
        tuple((*_head(row), *(_score(row, name, rows) for name in names)) for row in rows),
        note=f"{NOTE} {FAILED_NOTE}" if any(row.failed for row in rows) else NOTE,
        rules=_rules(rows),
    )


def exact_match_table(rows: Sequence[Summary]) -> Table:
    """How often every token of the correct object is the most likely one."""
    return Table(
        f"Exact match: {_title(rows[0])}",
        ("editor", "cases", "failed", *(f"{name} ↑" for name in EXACT_MATCHES.values())),
        tuple(
            (*_head(row), *(Score(row.metrics.get(name, UNMEASURED)) for name in EXACT_MATCHES))
            for row in rows
        ),
        note="How often every token of the correct object (the new object; for neighbours the true "
        "one) is the most likely token, in percent.",
        rules=_rules(rows),
    )


def all_metrics_table(rows: Iterable[Summary], *, include_published: bool = True) -> Table:
    """All rows and metrics in one table for CSV, as fractions and bits."""
    rows = [
        row
        for group in by_model_and_data(rows)
        for row in (with_published(group) if include_published else group)
    ]
    names = [n for n in ("S", *METRICS, "drawdown") if any(n in row.metrics for row in rows)]
    columns = ("model", "data", "method", "protocol", "phase", "source", "cases", "failed", *names)
    cells = tuple(
        (
            row.model, row.data, row.method, row.protocol, row.phase,
            "published" if row.published else "ours", *_head(row)[1:],
            *(row.metrics.get(name, UNMEASURED) for name in names),
        )
        for row in rows
    )  # fmt: skip
    return Table("All metrics", columns, cells)


def is_failure(name: str, value: float, unedited: float | None) -> bool:
    """Whether a metric's value is a clear failure, by the rule of this module."""
    if name in RATES:
        return value < 0.5
    if name in MAGNITUDES:
        return value < 0
    return name in PRESERVED and unedited is not None and value < 0.95 * unedited


def _score(row: Summary, name: str, rows: Sequence[Summary]) -> Score:
    value = row.metrics.get(name, UNMEASURED)
    return Score(value, _mark(row, name, rows) if value.n and row.edited else None)


def _mark(row: Summary, name: str, rows: Sequence[Summary]) -> Literal["best", "failure"] | None:
    """Mark a cell; rows compete with those of the same source, protocol and phase, if any."""
    measured = [r for r in rows if name in r.metrics and r.published == row.published]
    unedited = next((r.metrics[name].mean for r in measured if not r.edited), None)
    value = row.metrics[name].mean
    if is_failure(name, value, unedited):
        return "failure"
    rivals = [
        r.metrics[name].mean
        for r in measured
        if r.edited and (r.protocol, r.phase) == (row.protocol, row.phase)
    ]
    best = len(rivals) > 1 and name not in LOWER_IS_BETTER and value == max(rivals)
    return "best" if best else None


def _title(row: Summary) -> str:
    return f"{dataset_name(row.data)}, {row.model}"


def _head(row: Summary) -> tuple[Cell, ...]:
    return row_name(row), row.cases, row.failed if row.edited and not row.published else None


def _rules(rows: Sequence[Summary]) -> tuple[int, ...]:
    """A rule below the rows of the unedited model."""
    unedited = [i for i, row in enumerate(rows) if not row.edited]
    return (unedited[-1],) if unedited and len(unedited) < len(rows) else ()
