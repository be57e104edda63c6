"""Tables of numbers, written once as values and then as Markdown, LaTeX, CSV or HTML."""

import csv
import html
import io
from collections.abc import Mapping
from dataclasses import dataclass

from factscope.analysis.effects import AverageEffects
from factscope.analysis.estimate import Estimate
from factscope.analysis.severed import SeveredComparison
from factscope.report.look import LOOKS

__all__ = [
    "FORMATS",
    "Cell",
    "Table",
    "as_csv",
    "as_html",
    "as_latex",
    "as_markdown",
    "cells_table",
    "effects_table",
    "severed_table",
    "summary_table",
]

Cell = str | int | float | Estimate
NUMBER = ' class="number"'


@dataclass(frozen=True)
class Table:
    """A table: each row has a cell for every column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        """Check that the rows fit."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"the row {row} does not fit the columns {self.columns}")


def summary_table(effects: Mapping[str, AverageEffects]) -> Table:
    """The runs without restoration, and the best scores that a restoration reaches (App. B)."""
    first = next(iter(effects.values()))
    rows: list[tuple[Cell, ...]] = [
        ("clean run, P[o]", first.clean, first.clean.n),
        ("corrupted run, P*[o]", first.corrupted, first.corrupted.n),
        ("average total effect", first.total, first.total.n),
    ]
    for kind, average in effects.items():
        name = LOOKS[kind].name
        at, anywhere = average.best_at_subject, average.best_anywhere
        rows.append((f"best {name} score at the last subject token", at, at.n))
        rows.append((f"best {name} score anywhere", anywhere, anywhere.n))
    return Table("Runs", ("quantity", "mean", "facts"), tuple(rows))


def effects_table(effects: Mapping[str, AverageEffects]) -> Table:
    """Where each role's average indirect effect peaks."""
    rows = [
        (LOOKS[kind].name, role, *peak_cells(average, role))
        for kind, average in effects.items()
        for role in average.roles
        if average.measured(role)
    ]
    return Table("Peak effects", ("restored", "token", "layer", "AIE", "n"), tuple(rows))


def peak_cells(effects: AverageEffects, role: str) -> tuple[int, Estimate, int]:
    """The layer, height and count of a peak."""
    layer, peak = effects.peak(role)
    return layer, peak, peak.n


def cells_table(effects: Mapping[str, AverageEffects]) -> Table:
    """Every average effect: the numbers behind the figures."""
    rows = [
        (LOOKS[kind].name, role, layer, average.row(role)[layer], int(average.row(role).n[layer]))
        for kind, average in effects.items()
        for role in average.roles
        if average.measured(role)
        for layer in range(average.layers)
    ]
    return Table("Average effects", ("restored", "token", "layer", "AIE", "n"), tuple(rows))


def severed_table(comparison: SeveredComparison) -> Table:
    """AIE at the last subject token, layer by layer, in each graph."""
    names = tuple(f"{LOOKS[module].what} severed" for module in comparison.severed)
    rows = [
        (layer, comparison.intact[layer], *(row[layer] for row in comparison.severed.values()))
        for layer in range(len(comparison.intact))
    ]
    return Table("Severed graphs", ("layer", "intact", *names), tuple(rows))


def as_markdown(table: Table) -> str:
    """The table in Markdown, numbers to the right."""
    heads = [markdown_text(column) for column in table.columns]
    marks = [":--" if is_words(table, i) else "--:" for i in range(len(table.columns))]
    rows = [[markdown_text(written(cell)) for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, marks, *rows)]
    return f"**{markdown_text(table.title)}**\n\n" + "\n".join(lines) + "\n"


def as_latex(table: Table) -> str:
    """The table in LaTeX, for the package booktabs."""
    columns = "".join("l" if is_words(table, i) else "r" for i in range(len(table.columns)))
    heads = " & ".join(latex_text(column) for column in table.columns)
    rows = [" & ".join(latex_text(written(cell)) for cell in row) for row in table.rows]
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        heads + r" \\",
        r"\midrule",
        *(row + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """The table in CSV, unrounded; an estimate takes two columns, its mean and half width."""
    heads = [
        name
        for i, column in enumerate(table.columns)
        for name in ((column, f"{column} ±") if is_estimated(table, i) else (column,))
    ]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(heads)
    for row in table.rows:
        writer.writerow([field for cell in row for field in csv_fields(cell)])
    return buffer.getvalue()


def as_html(table: Table) -> str:
    """The table in HTML, all text escaped."""
    heads = "".join(
        f"<th{'' if is_words(table, i) else NUMBER}>{html.escape(column)}</th>"
        for i, column in enumerate(table.columns)
    )
    rows = "\n".join("<tr>" + "".join(map(html_cell, row)) + "</tr>" for row in table.rows)
    return (
        f"<table>\n<caption>{html.escape(table.title)}</caption>\n"
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n"
    )


FORMATS = {"md": as_markdown, "tex": as_latex, "csv": as_csv, "html": as_html}
"""How a table is written, by the suffix of its file."""


def written(cell: Cell) -> str:
    """A cell as it is read."""
    if isinstance(cell, Estimate):
        return cell.percent
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def csv_fields(cell: Cell) -> tuple[str | int | float, ...]:
    """A cell as fields; a NaN is an empty one."""
    values = (cell.mean, cell.half_width) if isinstance(cell, Estimate) else (cell,)
    return tuple("" if value != value else value for value in values)


def is_estimated(table: Table, column: int) -> bool:
    """Whether a column holds estimates."""
    return any(isinstance(row[column], Estimate) for row in table.rows)


def is_words(table: Table, column: int) -> bool:
    """Whether a column holds words rather than numbers."""
    return any(isinstance(row[column], str) for row in table.rows)


def html_cell(cell: Cell) -> str:
    """One cell, numbers to the right."""
    return f"<td{'' if isinstance(cell, str) else NUMBER}>{html.escape(written(cell))}</td>"


def markdown_text(text: str) -> str:
    """Text that does not end its cell or begin an emphasis."""
    for character in "\\|*_`<":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#",
    "_": r"\_", "$": r"\$", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "±": r"$\pm$", "–": "--",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Text without the characters that LaTeX reads as commands."""
    return "".join(LATEX.get(character, character) for character in text)
