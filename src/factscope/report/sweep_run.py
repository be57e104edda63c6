"""The report of a sweep: a table, a figure and a page in one folder, each file whole."""

import html
import json
from pathlib import Path

from factscope.analysis.sweep import Sweep
from factscope.errors import BadRecord
from factscope.files import write_whole
from factscope.report.page import numbers_html, page, plate, scrolled, settings_html
from factscope.report.run import write_figure
from factscope.report.sweep_figures import sweep_figure
from factscope.report.sweep_table import every_point, sweep_table, sweep_values
from factscope.report.sweep_words import sweep_title
from factscope.report.tables import as_csv, as_latex, as_markdown

__all__ = ["sweep_page", "write_sweep_report"]


def write_sweep_report(sweep: Sweep, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    if not any(point.summary and point.summary.metrics for point in sweep.points):
        raise BadRecord(_nothing(sweep))
    index = folder / "index.html"
    write_whole(index, sweep_page(sweep))
    table = sweep_table(sweep)
    files = {
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(every_point(sweep)),
        "sweep.json": json.dumps(sweep_values(sweep), indent=2, ensure_ascii=False) + "\n",
    }
    for name, text in files.items():
        write_whole(folder / name, text)
    return [
        index,
        *(folder / name for name in files),
        *write_figure(sweep_figure(sweep), folder / "sweep"),
    ]


def sweep_page(sweep: Sweep) -> str:
    """The page: the figure, the table, and how the sweep was made."""
    title = f"Sweep: {sweep_title(sweep)}"
    scored = [point for point in sweep.points if point.summary is not None]
    numbers = {
        "points": f"{len(scored)} of {len(sweep.points)}",
        "cases": str(max(point.summary.cases for point in scored if point.summary)),
        "points without an edit": str(sum(point.error is not None for point in sweep.points)),
    }
    body = [
        f"<h1>{html.escape(title)}</h1>",
        numbers_html(numbers),
        plate(sweep_figure(sweep), f"Scores at each point: {title}"),
        f'<div class="paper">{scrolled(sweep_table(sweep))}</div>',
        *([settings_html(sweep.spec, "How it was made")] if sweep.spec else []),
    ]
    return page(title, body, note="")


def _nothing(sweep: Sweep) -> str:
    errors = [f"{point.name}: {point.error}" for point in sweep.points if point.error]
    why = f" ({'; '.join(errors[:3])})" if errors else ""
    return f"the sweep has no scores yet; there is nothing to report{why}"
