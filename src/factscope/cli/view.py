"""A trace as people see it: words and a heat map in the terminal, or a figure in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from factscope.cli.show import results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.records import TraceRecord

__all__ = ["check_suffix", "draw", "print_trace"]


def print_trace(record: "TraceRecord") -> None:
    """The answer, the three probabilities, a small heat map and the strongest cells."""
    from factscope.report.terminal import strongest_cells, trace_heatmap

    results.print(f"{record.fact.text} →{record.answer}", style="bold", soft_wrap=True)
    if not record.known:
        results.print(
            f"Not known: {record.fact.target!r} was expected; averages leave such a fact out.",
            style="yellow",
            soft_wrap=True,
        )
    cells = [x for table in record.restored.values() for row in table for x in row if x is not None]
    results.print(
        f"P clean {record.clean:.3f}   corrupted {record.corrupted:.3f}   "
        f"restored, at best {max(cells, default=record.corrupted):.3f}"
    )
    for kind in record.restored:
        results.print(trace_heatmap(record, kind))
    for kind in record.restored:
        results.print(strongest_cells(record, kind, count=3))


def check_suffix(out: Path) -> None:
    """Say at once that a figure could not be written, not after the work."""
    if out.suffix not in (".png", ".svg", ".pdf", ".html"):
        raise BadSetting(f"--out {out} must end in .png, .svg, .pdf or .html")


def draw(record: "TraceRecord", out: Path) -> list[Path]:
    """Write the figure, and a second one beside it where the graph was severed; or the page."""
    from factscope.io import write_atomic
    from factscope.report.figures import (
        gradients_figure,
        save_figure,
        severed_detail,
        traces_figure,
    )
    from factscope.report.traces import trace_page

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_atomic(out, trace_page(record))
        return [out]
    save_figure(gradients_figure(record) if record.gradients else traces_figure(record), out)
    if not (record.severed and "states" in record.restored):
        return [out]
    beside = out.with_stem(f"{out.stem}-severed")
    save_figure(severed_detail(record), beside)
    return [out, beside]
