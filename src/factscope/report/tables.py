"""Tables as values, and the same tables in Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from factscope.analysis.effects import AverageEffects, SeveredComparison
from factscope.analysis.estimate import Estimate
from factscope.report.labels import KIND_STYLES

UNKNOWN = "–"

Mark = Literal["best", "failure"] | None
"""Highlighting of a cell: green and bold, or red, as in the paper."""


@dataclass(frozen=True)
class Score:
    """A number or a metric with a mark; a metric in percent with its half width: "89.2 (0.3)"."""

    value: int | float | Estimate
    mark: Mark = None

    def __str__(self) -> str:
        if not isinstance(self.value, Estimate):
            return cell_text(self.value)
        # Adding 0.0 turns -0.0 into 0.0.
        mean, width = (round(100 * x, 1) + 0.0 for x in (self.value.mean, self.value.half_width))
        if math.isnan(mean):
            return UNKNOWN
        return f"{mean:.1f}" if math.isnan(width) else f"{mean:.1f} ({width:.1f})"


Cell = str | int | float | Estimate | Score | None
"""None is an unknown number."""


@dataclass(frozen=True)
class Table:
    """A table; every row has one cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """Explains units and marks."""
    rules: tuple[int, ...] = ()
    """Indices of the rows below which LaTeX draws a line."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"the row {row} does not fit the columns {self.columns}")


# ---- tables of traces


def summary_table(effects: Mapping[str, AverageEffects]) -> Table:
    """The clean and corrupted runs, and the best scores reached by restoring a state (App. B)."""
    first = next(iter(effects.values()))
    quantities = {
        "clean run, P[o]": first.clean,
        "corrupted run, P*[o]": first.corrupted,
        "average total effect": first.total,
    }
    for kind, average in effects.items():
        name = KIND_STYLES[kind].name
        quantities[f"best {name} score at the last subject token"] = average.best_at_subject
        quantities[f"best {name} score anywhere"] = average.best_anywhere
    rows = tuple((name, value, value.n) for name, value in quantities.items())
    return Table("Runs", ("quantity", "mean", "facts"), rows)


def effects_table(effects: Mapping[str, AverageEffects], *, every_layer: bool = False) -> Table:
    """The average indirect effect of each token role at every layer, or where it peaks."""
    rows = []
    for kind, average in effects.items():
        for role in filter(average.measured, average.roles):
            peak = average.peak(role)[0]
            for layer in range(average.layers) if every_layer else [peak]:
                effect = average.row(role)[layer]
                rows.append((KIND_STYLES[kind].name, role, layer, effect, effect.n))
    title = "Average effects" if every_layer else "Peak effects"
    return Table(title, ("restored", "token", "layer", "AIE", "n"), tuple(rows))


def severed_table(comparison: SeveredComparison) -> Table:
    """AIE at the last subject token by layer, intact and with a module severed (Figure 3)."""
    names = (f"{KIND_STYLES[module].label} severed" for module in comparison.severed)
    rows = tuple(
        (layer, comparison.intact[layer], *(row[layer] for row in comparison.severed.values()))
        for layer in range(len(comparison.intact))
    )
    return Table("Severed graphs", ("layer", "intact", *names), rows)


# ---- cells


def cell_text(cell: Cell) -> str:
    """A cell's text without its mark."""
    if cell is None:
        return UNKNOWN
    if isinstance(cell, Estimate):
        return cell.percent
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def cell_mark(cell: Cell) -> Mark:
    """A cell's mark, if any."""
    return cell.mark if isinstance(cell, Score) else None


def is_text_column(table: Table, column: int) -> bool:
    """Whether a column holds text rather than numbers."""
    return any(isinstance(row[column], str) for row in table.rows)


# ---- formats


def as_markdown(table: Table) -> str:
    """The table in Markdown: numbers aligned right, best cells bold, failures italic."""

    def cell_markdown(cell: Cell) -> str:
        sign = {"best": "**", "failure": "_", None: ""}[cell_mark(cell)]
        return f"{sign}{escape_markdown(cell_text(cell))}{sign}"

    heads = [escape_markdown(column) for column in table.columns]
    alignment = [":--" if is_text_column(table, i) else "--:" for i in range(len(table.columns))]
    rows = [list(map(cell_markdown, row)) for row in table.rows]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, alignment, *rows)]
    note = f"\n{escape_markdown(table.note)}\n" if table.note else ""
    return f"**{escape_markdown(table.title)}**\n\n" + "\n".join(lines) + "\n" + note


def escape_markdown(text: str) -> str:
    """Escape characters that would end a cell or start an emphasis."""
    for character in "\\|*_`<":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


LATEX_COLORS = {"best": "0,0.6,0", "failure": "0.75,0,0"}
"""The paper's green and red."""
LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#",
    "_": r"\_", "$": r"\$", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "±": r"$\pm$", "–": "--", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": "$-$",
}  # fmt: skip


def as_latex(table: Table) -> str:
    """The table in LaTeX; needs the package booktabs and, for marked cells, xcolor."""

    def cell_latex(cell: Cell) -> str:
        text, mark = escape_latex(cell_text(cell)), cell_mark(cell)
        return rf"\textcolor[rgb]{{{LATEX_COLORS[mark]}}}{{\textbf{{{text}}}}}" if mark else text

    columns = "".join("l" if is_text_column(table, i) else "r" for i in range(len(table.columns)))
    rows = [" & ".join(map(cell_latex, row)) + r" \\" for row in table.rows]
    for index in sorted(table.rules, reverse=True):
        rows.insert(index + 1, r"\midrule")
    caption = f"{table.title}. {table.note}" if table.note else table.title
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape_latex(caption)}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(map(escape_latex, table.columns)) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Escape characters that LaTeX reads as commands."""
    return "".join(LATEX_ESCAPES.get(character, character) for character in text)


def as_csv(table: Table) -> str:
    """The table in CSV, unrounded; an estimate takes two columns, its mean and half width."""

    rows = [[cell.value if isinstance(cell, Score) else cell for cell in row] for row in table.rows]

    def fields(cell: str | int | float | Estimate | None) -> list[str | int | float]:
        values = (cell.mean, cell.half_width) if isinstance(cell, Estimate) else (cell,)
        return ["" if x is None or x != x else x for x in values]  # NaN is an empty field

    heads: list[str] = []
    for i, column in enumerate(table.columns):
        estimated = any(isinstance(row[i], Estimate) for row in rows)
        heads += (column, f"{column} ±") if estimated else (column,)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([field for cell in row for field in fields(cell)] for row in rows)
    return buffer.getvalue()
