"""The report of a training: a table, a figure and a page in one folder, each file whole."""

import html
from pathlib import Path

from factscope.analysis.training import Course
from factscope.files import write_whole
from factscope.report.evaluation_words import DATA, editor_name
from factscope.report.page import numbers_html, page, plate, scrolled, settings_html
from factscope.report.run import write_figure
from factscope.report.tables import as_csv, as_latex, as_markdown
from factscope.report.training_figures import training_figure
from factscope.report.training_table import every_look, looks_table, training_title

__all__ = ["training_page", "write_training_report"]


def write_training_report(course: Course, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    table = looks_table(course)
    files = {
        "index.html": training_page(course),
        "table.md": as_markdown(table),
        "table.tex": as_latex(table),
        "table.csv": as_csv(every_look(course)),
    }
    for name, text in files.items():
        write_whole(folder / name, text)
    return [
        *(folder / name for name in files),
        *write_figure(training_figure(course), folder / "training"),
    ]


def training_page(course: Course) -> str:
    """The page: the figure, the table, and how the training was made."""
    title = training_title(course)
    numbers = {
        "method": editor_name(course.method),
        "data": DATA.get(course.data, course.data),
        "steps": str(course.steps),
        "minutes": f"{course.minutes:.1f}",
        "best step": str(course.best.step),
    }
    body = [
        f"<h1>{html.escape(title)}</h1>",
        numbers_html(numbers),
        plate(training_figure(course), f"Losses and shares at each look: {title}"),
        f'<div class="paper">{scrolled(looks_table(course))}</div>',
        settings_html(course.spec, "How it was made"),
    ]
    return page(title, body, note="")
