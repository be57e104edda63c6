"""Tables of numbers, written once as values and then as Markdown, LaTeX or CSV."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from factscope.analysis.effects import AverageEffects, SeveredComparison
from factscope.analysis.estimate import Estimate
from factscope.report.style import KIND_STYLES

__all__ = [
    "Cell",
    "Marked",
    "Score",
    "Table",
    "as_csv",
    "as_latex",
    "as_markdown",
    "cells_table",
    "effects_table",
    "severed_table",
    "summary_table",
]

UNKNOWN = "–"


@dataclass(frozen=True)
class Score:
    """A metric as the paper's tables have it, in hundredths with its half width: "89.2 (0.3)"."""

    value: Estimate
    mark: Literal["best", "failure"] | None = None
    """Whether it is set apart: in green and bold, or in red."""

    def __str__(self) -> str:
        """The number as it is read, without the mark."""
        mean, width = (round(100 * x, 1) + 0.0 for x in (self.value.mean, self.value.half_width))
        if math.isnan(mean):
            return UNKNOWN
        return f"{mean:.1f}" if math.isnan(width) else f"{mean:.1f} ({width:.1f})"


@dataclass(frozen=True)
class Marked:
    """Another number that may be set apart."""

    value: int | float
    mark: Literal["best", "failure"] | None = None

    def __str__(self) -> str:
        """The number as it is read, without the mark."""
        return written(self.value)


Cell = str | int | float | Estimate | Score | Marked | None
"""None is a number that is not known."""


@dataclass(frozen=True)
class Table:
    """A table: each row has a cell for every column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What one has to know to read it."""
    rules: tuple[int, ...] = ()
    """The rows after which a line is drawn, counted from 0."""

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
        name = KIND_STYLES[kind].name
        at, anywhere = average.best_at_subject, average.best_anywhere
        rows.append((f"best {name} score at the last subject token", at, at.n))
        rows.append((f"best {name} score anywhere", anywhere, anywhere.n))
    return Table("Runs", ("quantity", "mean", "facts"), tuple(rows))


def effects_table(effects: Mapping[str, AverageEffects]) -> Table:
    """Where each role's average indirect effect peaks."""
    rows = [
        (KIND_STYLES[kind].name, role, *peak_cells(average, role))
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
        (
            KIND_STYLES[kind].name,
            role,
            layer,
            average.row(role)[layer],
            int(average.row(role).n[layer]),
        )
        for kind, average in effects.items()
        for role in average.roles
        if average.measured(role)
        for layer in range(average.layers)
    ]
    return Table("Average effects", ("restored", "token", "layer", "AIE", "n"), tuple(rows))


def severed_table(comparison: SeveredComparison) -> Table:
    """AIE at the last subject token, layer by layer, in each graph."""
    names = tuple(f"{KIND_STYLES[module].what} severed" for module in comparison.severed)
    rows = [
        (layer, comparison.intact[layer], *(row[layer] for row in comparison.severed.values()))
        for layer in range(len(comparison.intact))
    ]
    return Table("Severed graphs", ("layer", "intact", *names), tuple(rows))


def as_markdown(table: Table) -> str:
    """The table in Markdown, numbers to the right."""
    heads = [markdown_text(column) for column in table.columns]
    marks = [":--" if is_words(table, i) else "--:" for i in range(len(table.columns))]
    rows = [list(map(markdown_cell, row)) for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, marks, *rows)]
    note = f"\n{markdown_text(table.note)}\n" if table.note else ""
    return f"**{markdown_text(table.title)}**\n\n" + "\n".join(lines) + "\n" + note


def as_latex(table: Table) -> str:
    """The table in LaTeX, for the packages booktabs and, where numbers are marked, xcolor."""
    columns = "".join("l" if is_words(table, i) else "r" for i in range(len(table.columns)))
    heads = " & ".join(latex_text(column) for column in table.columns)
    rows = [" & ".join(map(latex_cell, row)) + r" \\" for row in table.rows]
    for place in sorted(table.rules, reverse=True):
        rows.insert(place + 1, r"\midrule")
    caption = f"{table.title}. {table.note}" if table.note else table.title
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        heads + r" \\",
        r"\midrule",
        *rows,
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


def written(cell: Cell) -> str:
    """A cell as it is read."""
    if cell is None:
        return UNKNOWN
    if isinstance(cell, Estimate):
        return cell.percent
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def csv_fields(cell: Cell) -> tuple[str | int | float, ...]:
    """A cell as fields; a NaN is an empty one."""
    if isinstance(cell, Score | Marked):
        cell = cell.value
    values = (cell.mean, cell.half_width) if isinstance(cell, Estimate) else (cell,)
    return tuple("" if value is None or value != value else value for value in values)


def is_estimated(table: Table, column: int) -> bool:
    """Whether a column holds estimates."""
    return any(isinstance(row[column], Estimate | Score) for row in table.rows)


def is_words(table: Table, column: int) -> bool:
    """Whether a column holds words rather than numbers."""
    return any(isinstance(row[column], str) for row in table.rows)


def markdown_cell(cell: Cell) -> str:
    """One cell; the best in bold, failures in italics."""
    sign = {"best": "**", "failure": "_"}.get(mark_of(cell) or "", "")
    return f"{sign}{markdown_text(written(cell))}{sign}"


def latex_cell(cell: Cell) -> str:
    """One cell; marks as in the paper, whose green and red these are."""
    color = {"best": "0,0.6,0", "failure": "0.75,0,0"}.get(mark_of(cell) or "")
    text = latex_text(written(cell))
    return rf"\textcolor[rgb]{{{color}}}{{\textbf{{{text}}}}}" if color else text


def mark_of(cell: Cell) -> str | None:
    """A number's mark."""
    return cell.mark if isinstance(cell, Score | Marked) else None


def markdown_text(text: str) -> str:
    """Text that does not end its cell or begin an emphasis."""
    for character in "\\|*_`<":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#",
    "_": r"\_", "$": r"\$", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "±": r"$\pm$", "–": "--", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": "$-$",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Text without the characters that LaTeX reads as commands."""
    return "".join(LATEX.get(character, character) for character in text)
