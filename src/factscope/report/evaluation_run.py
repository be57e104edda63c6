"""The report of evaluations: tables, figures and a page in one folder, each file whole."""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from factscope.analysis.metrics import Summary, summaries
from factscope.errors import BadRecord
from factscope.files import write_whole
from factscope.records import CaseRecord
from factscope.report.distribution_figures import distributions_figure
from factscope.report.evaluation_figures import scores_figure
from factscope.report.evaluation_table import (
    blocks,
    evaluation_tables,
    every_number,
    with_published,
)
from factscope.report.evaluation_words import DATA
from factscope.report.page import numbers_html, page, plate, scrolled
from factscope.report.run import write_figure
from factscope.report.samples import Samples, samples_html, samples_of
from factscope.report.tables import as_csv, as_latex, as_markdown

__all__ = ["evaluation_page", "write_evaluation_report"]


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
    write_whole(index, evaluation_page(title, found, samples, beside=beside))
    tables = evaluation_tables(found, beside=beside)
    files = {
        "table.md": "\n".join(map(as_markdown, tables)),
        "table.tex": "\n".join(map(as_latex, tables)),
        "table.csv": as_csv(every_number(found, beside=beside)),
    }
    for name, text in files.items():
        write_whole(folder / name, text)
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
        *(f'<div class="paper">{scrolled(table)}</div>' for table in tables),
        plate(scores_figure(shown(block, beside)), f"Scores of each method: {name}"),
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
