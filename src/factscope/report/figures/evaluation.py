"""The three scores of every method with their intervals, as a figure."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from factscope.analysis.metrics import Summary
from factscope.report.labels import DATA, row_name
from factscope.report.style import MEDIUM, SMALL, blank_figure, percent_rows, plain

__all__ = ["scores_figure"]

SUCCESS = {"ES": "efficacy, ES", "PS": "paraphrases, PS", "NS": "neighbours, NS"}
ACCURACY = {name: name for name in ("efficacy", "paraphrase", "specificity")}
"""Which scores are shown, and how they are called: CounterFact's, or zsRE's."""
COLORS = ("#d9730d", "#6a51a3", "#4a6fa5")
ROW, FRAME, WIDTH = 0.42, 1.1, 7.2
"""Inches: a method's height, what surrounds the methods, the figure's width."""
APART = 0.22
"""How far a method's first and last score lie from its middle."""


def scores_figure(rows: Sequence[Summary]) -> Figure:
    """One model's methods from top to bottom: three scores each, the published ones hollow."""
    data = rows[0].data
    names = ACCURACY if any("efficacy" in row.metrics for row in rows) else SUCCESS
    fig = blank_figure(WIDTH, FRAME + ROW * len(rows))
    ax = fig.subplots()
    for height, row in enumerate(rows):
        for place, name in enumerate(names):
            _point(ax, height + (place - 1) * APART, row, name, COLORS[place])
    ax.set_yticks(range(len(rows)), [row_name(row) for row in rows], fontsize=SMALL, **plain())
    model = next((row.model for row in rows if not row.published), rows[0].model)
    _frame(ax, f"{DATA.get(data, data)}, {model}", len(rows))
    _legend(ax, list(names.values()), any(row.published for row in rows))
    return fig


def _point(ax: Axes, height: float, row: Summary, name: str, color: str) -> None:
    if name not in row.metrics:
        return
    value = row.metrics[name]
    if value.half_width == value.half_width:  # not NaN
        ends = [max(0.0, value.low), min(1.0, value.high)]
        ax.plot(ends, [height, height], color=color, linewidth=1.4, alpha=0.6, zorder=2)
    inside = "white" if row.published else color
    ax.scatter([value.mean], [height], s=24, facecolors=inside, edgecolors=color, linewidths=1.3,
               zorder=3, clip_on=False)  # fmt: skip


def _frame(ax: Axes, title: str, rows: int) -> None:
    percent_rows(ax, rows, "mean over cases, with 95 % interval")
    for height in range(rows - 1):
        ax.axhline(height + 0.5, color="0.92", linewidth=0.6, zorder=0)
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=22, **plain())


def _legend(ax: Axes, names: Sequence[str], published: bool) -> None:
    dot = {"marker": "o", "linestyle": "", "markersize": 5, "markeredgewidth": 1.3}
    handles = [
        Line2D([], [], color=color, label=name, **dot)
        for name, color in zip(names, COLORS, strict=True)
    ]
    if published:
        hollow = {**dot, "markerfacecolor": "white", "markeredgecolor": "0.35"}
        handles.append(Line2D([], [], label="published", **hollow))
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False,
              fontsize=SMALL, borderaxespad=0.1, columnspacing=1.4, handletextpad=0.4,
              borderpad=0.2)  # fmt: skip
