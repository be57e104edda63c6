"""Files of a report: every report is a folder with a page, tables and figures."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from factscope.io import write_atomic
from factscope.report.style import save_figure
from factscope.report.tables import Table, as_csv, as_latex, as_markdown


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write text files by name; each file is written completely or not at all."""
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def write_table(table: Table, stem: Path) -> list[Path]:
    """Write a table as Markdown, LaTeX and CSV."""
    texts = {"md": as_markdown(table), "tex": as_latex(table), "csv": as_csv(table)}
    return write_texts(stem.parent, {f"{stem.name}.{kind}": text for kind, text in texts.items()})


def write_figure(fig: Figure, stem: Path) -> list[Path]:
    """Write a figure as PNG and PDF."""
    # Not with_suffix: names of models contain dots.
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    for path in paths:
        save_figure(fig, path)
    return paths
