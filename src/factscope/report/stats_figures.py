"""Figures of second moments: how fast two halves of a text come to agree."""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from factscope.errors import BadSetting
from factscope.report.canvas import MEDIUM, SMALL, blank_figure, plain

__all__ = ["convergence_figure"]

History = Sequence[tuple[int, float]]
"""Tokens so far and the gap between the halves."""


def convergence_figure(histories: Mapping[int, History], model: str) -> Figure:
    """The gap between the halves against the tokens read, a line for each layer."""
    measured = {layer: points for layer, points in histories.items() if points}
    if not measured:
        raise BadSetting("no gaps to draw: the text was too short to compare its halves")
    fig = blank_figure(4.6, 3.2)
    ax = fig.subplots()
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5, which="both")
    colors = matplotlib.colormaps["Greens"]
    for i, (layer, points) in enumerate(measured.items()):
        shade = colors(0.45 + 0.5 * (i + 1) / len(measured))
        tokens, gaps = zip(*points, strict=True)
        ax.plot(tokens, gaps, color=shade, linewidth=1.3, marker="o", markersize=2.5,
                label=f"layer {layer}")  # fmt: skip
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_title(f"Convergence of the second moments of {model}", fontsize=MEDIUM, **plain())
    ax.set_xlabel("tokens", fontsize=MEDIUM)
    ax.set_ylabel("relative gap between two halves", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig
