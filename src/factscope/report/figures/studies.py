"""Whom people chose, as a figure (Figure 26): a bar of votes for each pair and question."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.preferences import Preference
from factscope.report.labels import ASKED, editor_name, ratio_text
from factscope.report.style import MEDIUM, SMALL, blank_figure, plain

__all__ = ["preferences_figure"]

COLORS = {"first": "#d9730d", "ties": "#d8d6dd", "second": "#4a6fa5"}
ROW, FRAME, WIDTH = 0.62, 0.75, 7.2
"""Inches: a pair's height, what surrounds the pairs of a question, the figure's width."""
NARROW = 0.045
"""A part of a bar below this share of it holds no number."""


def preferences_figure(found: Sequence[Preference]) -> Figure:
    """A panel for each question; in it a bar for each pair: votes for one, ties, for the other."""
    panels = {name: [one for one in found if one.question == name] for name in ASKED}
    panels = {name: rows for name, rows in panels.items() if rows}
    heights = [FRAME + ROW * len(rows) for rows in panels.values()]
    fig = blank_figure(WIDTH, sum(heights))
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (name, rows) in zip(axes, panels.items(), strict=True):
        _panel(ax, name, rows)
    return fig


def _panel(ax: Axes, question: str, rows: Sequence[Preference]) -> None:
    for height, one in enumerate(rows):
        _bar(ax, height, one)
    ax.set_xlim(0, 1)
    ax.set_ylim(len(rows) - 0.45, -0.6)
    ax.set_yticks(range(len(rows)), [editor_name(one.pair[0]) for one in rows], fontsize=MEDIUM,
                  **plain())  # fmt: skip
    other = ax.secondary_yaxis("right")
    other.set_yticks(range(len(rows)), [editor_name(one.pair[1]) for one in rows],
                     fontsize=MEDIUM, **plain())  # fmt: skip
    for edge in (ax, other):
        edge.tick_params(axis="y", length=0)
        edge.spines[:].set_visible(False)
    ax.set_xticks([])
    raters, cases = max(one.raters for one in rows), max(one.cases for one in rows)
    count = f"{raters} {'person' if raters == 1 else 'people'}, {cases} cases"
    ax.set_title(f"{ASKED[question].capitalize()} ({count})", fontsize=MEDIUM, fontweight="bold",
                 loc="left", pad=4)  # fmt: skip


def _bar(ax: Axes, height: int, one: Preference) -> None:
    counts = {"first": one.wins[0], "ties": one.ties, "second": one.wins[1]}
    total, start = sum(counts.values()), 0.0
    for part, count in counts.items():
        width = count / total
        ax.barh(height, width, left=start, height=0.5, color=COLORS[part], linewidth=0)
        if width > NARROW:
            color = "0.25" if part == "ties" else "white"
            ax.text(start + width / 2, height, str(count), ha="center", va="center", color=color,
                    fontsize=MEDIUM)  # fmt: skip
        start += width
    said = f"ratio {ratio_text(one)}" if one.votes else "no votes for either"
    ax.text(0.5, height + 0.27, said, ha="center", va="top", fontsize=SMALL, color="0.3")
