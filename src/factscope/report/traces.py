"""A run's report: figures, tables and a page in one folder, each file whole or not there."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from factscope.analysis.effects import (
    AverageEffects,
    Pooling,
    average_kinds,
    has_severed,
    severed_comparison,
)
from factscope.errors import BadRecord
from factscope.io import write_atomic
from factscope.records import TraceRecord
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    save_figure,
    severed_figure,
    traces_figure,
)
from factscope.report.html import run_page
from factscope.report.tables import (
    FORMATS,
    Table,
    as_csv,
    cells_table,
    effects_table,
    severed_table,
    summary_table,
)

__all__ = ["write_report"]

FIGURES = ("png", "pdf")
TABLES = ("md", "tex", "csv")


def write_report(
    records: Iterable[TraceRecord],
    folder: Path,
    *,
    title: str = "Causal tracing",
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    single: int = 10,
) -> list[Path]:
    """Write the report and return its files, the page first.

    The first `single` traced facts get a figure of their own; the page lists more of them.
    """
    everyone = list(records)
    if not everyone:
        raise BadRecord("there are no records to report on; trace some facts first")
    averages = average_kinds(everyone, pooling=pooling, paper_roles=paper_roles)
    index = folder / "index.html"
    write_atomic(index, run_page(title, everyone, pooling=pooling, paper_roles=paper_roles))
    return [
        index,
        *write_averages(averages, folder),
        *write_severed(everyone, folder),
        *write_traces([r for r in everyone if r.restored][:single], folder / "facts"),
    ]


def write_averages(averages: Mapping[str, AverageEffects], folder: Path) -> list[Path]:
    """The average effects, where there are any; effects.csv holds every number of the figures."""
    if not averages:
        return []
    every_cell = folder / "effects.csv"
    write_atomic(every_cell, as_csv(cells_table(averages)))
    return [
        *write_figure(average_heatmaps(averages), folder / "average_heatmaps"),
        *write_figure(average_lines(averages), folder / "average_lines"),
        *write_table(summary_table(averages), folder / "summary"),
        *write_table(effects_table(averages), folder / "peaks"),
        every_cell,
    ]


def write_severed(records: Sequence[TraceRecord], folder: Path) -> list[Path]:
    """The comparison of severed graphs, where there is one."""
    if not has_severed(records):
        return []
    comparison = severed_comparison(records)
    return [
        *write_figure(severed_figure(comparison), folder / "severed"),
        *write_table(severed_table(comparison), folder / "severed"),
    ]


def write_traces(records: Sequence[TraceRecord], folder: Path) -> list[Path]:
    """Single facts, a figure each."""
    return [
        path
        for number, record in enumerate(records)
        for path in write_figure(traces_figure(record), folder / f"{number:04d}")
    ]


def write_figure(fig: Figure, stem: Path) -> list[Path]:
    """A figure in each of its formats."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in FIGURES]
    for path in paths:
        save_figure(fig, path)
    return paths


def write_table(table: Table, stem: Path) -> list[Path]:
    """A table in each of its formats."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in TABLES]
    for path, kind in zip(paths, TABLES, strict=True):
        write_atomic(path, FORMATS[kind](table))
    return paths
