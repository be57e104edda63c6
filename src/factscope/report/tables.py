"""Tables as values, and the same tables in Markdown, LaTeX and CSV."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from factscope.analysis.attention import AverageHeads, AverageKnockout
from factscope.analysis.attribution import Agreement
from factscope.analysis.effects import AverageEffects, SeveredComparison
from factscope.analysis.estimate import Estimate
from factscope.report.labels import CELL_NAMES, GROUP_NAMES, KIND_STYLES, METRIC_NAMES

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
    metric = METRIC_NAMES.get(first.metric, first.metric)
    clean, corrupted = ("P[o]", "P*[o]") if first.metric == "probability" else (metric, metric)
    quantities = {
        f"clean run, {clean}": first.clean,
        f"corrupted run, {corrupted}": first.corrupted,
        "average total effect": first.total,
    }
    for kind, average in effects.items():
        name = KIND_STYLES[kind].name
        quantities[f"best {name} score at the last subject token"] = average.best_at_subject
        quantities[f"best {name} score anywhere"] = average.best_anywhere
    rows = tuple((name, value, value.n) for name, value in quantities.items())
    return Table("Runs", ("quantity", "mean", "facts"), rows)


def effects_table(effects: Mapping[str, AverageEffects], *, every_layer: bool = False) -> Table:
    """The average indirect effect of each token role at every layer, or where it peaks; also as a
    fraction of the average total effect."""
    rows = []
    for kind, role, layer, effect in _by_role(effects, every_layer):
        total = effects[kind].total.mean if effects[kind].total.mean > 0 else math.nan
        part = Estimate(effect.mean / total, effect.half_width / total, effect.n)
        rows.append((KIND_STYLES[kind].name, role, layer, effect, part, effect.n))
    title = "Average effects" if every_layer else "Peak effects"
    first = next(iter(effects.values()))
    changed = "corrupted" if first.direction == "corrupt" else "restored"
    columns = (changed, "token", "layer", "AIE", "of total effect", "n")
    unit = METRIC_NAMES.get(first.metric, first.metric)
    note = "" if first.metric == "probability" else f"AIE: {unit}."
    return Table(title, columns, tuple(rows), note)


def lens_table(effects: Mapping[str, AverageEffects], *, every_layer: bool = False) -> Table:
    """The answer's mean probability by the logit lens at every layer, or where it is highest."""
    rows = tuple((*row, row[-1].n) for row in _by_role(effects, every_layer))
    title = "Logit lens" if every_layer else "Highest probabilities by the logit lens"
    return Table(title, ("run", "token", "layer", "p(o)", "n"), rows)


def _by_role(
    effects: Mapping[str, AverageEffects], every_layer: bool
) -> Iterator[tuple[str, str, int, Estimate]]:
    """Key, token role, layer and effect: at every layer, or where the effect of a role peaks."""
    for key, average in effects.items():
        for role in filter(average.measured, average.roles):
            for layer in range(average.layers) if every_layer else [average.peak(role)[0]]:
                yield key, role, layer, average.row(role)[layer]


def heads_table(averages: Sequence[AverageHeads], count: int | None = None) -> Table:
    """The average indirect effects of heads, the highest first; only `count` of each role."""
    rows = tuple(
        (average.role, layer, head, average[head, layer], average[head, layer].n)
        for average in averages
        for head, layer in average.strongest(average.mean.size if count is None else count)
    )
    title = "Heads" if count is None else "Strongest heads"
    return Table(title, ("token", "layer", "head", "AIE", "n"), rows)


def knockout_table(average: AverageKnockout, *, every_layer: bool = False) -> Table:
    """The mean change by attention knockout at every layer, or where it is largest."""
    rows = []
    for group, row in average.changes.items():
        largest = int(abs(row.mean).argmax())
        for layer in range(len(row)) if every_layer else [largest]:
            rows.append((GROUP_NAMES[group], layer, row[layer], row[layer].n))
    relative = "relative " if average.metric == "probability" else ""
    change = f"{relative}change of {METRIC_NAMES.get(average.metric, average.metric)}"
    title = "Attention knockout" if every_layer else "Largest changes by attention knockout"
    return Table(title, ("blocked", "layer", change, "n"), tuple(rows))


def severed_table(comparison: SeveredComparison) -> Table:
    """AIE at the last subject token by layer, intact and with a module severed (Figure 3)."""
    names = (f"{KIND_STYLES[module].label} severed" for module in comparison.severed)
    rows = tuple(
        (layer, comparison.intact[layer], *(row[layer] for row in comparison.severed.values()))
        for layer in range(len(comparison.intact))
    )
    return Table("Severed graphs", ("layer", "intact", *names), rows)


def attribution_table(agreements: Sequence[Agreement]) -> Table:
    """How well estimates agree with measured cells, by kind and band of layers."""
    rows = tuple(
        (
            CELL_NAMES[a.kind], f"{a.layers[0]}–{a.layers[1] - 1}", a.facts, a.cells, a.pearson,
            a.spearman, a.top, a.missed, a.to_verify,
        )
        for a in agreements
    )  # fmt: skip
    columns = (
        "cells", "layers", "facts", "cells per fact", "Pearson", "Spearman", "k",
        "top k missed", "cells to verify",
    )  # fmt: skip
    note = (
        "Means over facts with 95 % confidence intervals. Missed: the fraction of the k strongest "
        "measured cells that are not among the k strongest estimates. To verify: how many cells, "
        "strongest estimates first, must be measured to find all k. The estimate of a window of "
        "layers is the sum over them, which counts paths from one layer through another twice."
    )
    return Table("Attribution patching against measured cells", columns, rows, note=note)


# ---- cells


def cell_text(cell: Cell) -> str:
    """A cell's text without its mark."""
    if cell is None:
        return UNKNOWN
    if isinstance(cell, Estimate):
        return cell.text
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


def as_rows(table: Table) -> list[dict[str, Any]]:
    """The table as JSON values: an object per row; unknown numbers are null."""

    def number(x: float | int) -> float | int | None:
        return None if math.isnan(x) else x

    def value(cell: Cell) -> Any:
        cell = cell.value if isinstance(cell, Score) else cell
        if isinstance(cell, Estimate):
            return {"mean": number(cell.mean), "half_width": number(cell.half_width), "n": cell.n}
        return number(cell) if isinstance(cell, float) else cell

    return [dict(zip(table.columns, map(value, row), strict=True)) for row in table.rows]


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
