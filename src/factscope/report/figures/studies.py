"""Figure of human preferences between methods (Figure 26)."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.preferences import Preference
from factscope.report.labels import QUESTION_LABELS, editor_name, ratio_text
from factscope.report.style import MEDIUM, SMALL, blank_figure, literal_text

FIRST, TIES, SECOND = "#d9730d", "#d8d6dd", "#4a6fa5"
"""Colours of votes."""
ROW_HEIGHT, MARGIN, WIDTH = 0.62, 0.75, 7.2
"""Inches."""
MIN_LABELLED = 0.045
"""Narrower parts of a bar, as fractions of it, get no label."""


def preferences_figure(preferences: Sequence[Preference]) -> Figure:
    """One panel per question, one bar per pair: votes for the first method, ties, the second."""
    panels = {name: [p for p in preferences if p.question == name] for name in QUESTION_LABELS}
    panels = {name: rows for name, rows in panels.items() if rows}
    heights = [MARGIN + ROW_HEIGHT * len(rows) for rows in panels.values()]
    fig = blank_figure(WIDTH, sum(heights))
    axes = fig.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (question, rows) in zip(axes, panels.items(), strict=True):
        _draw_panel(ax, question, rows)
    return fig


def _draw_panel(ax: Axes, question: str, rows: Sequence[Preference]) -> None:
    for y, preference in enumerate(rows):
        _draw_bar(ax, y, preference)
    ax.set_xlim(0, 1)
    ax.set_ylim(len(rows) - 0.45, -0.6)
    ax.set_xticks([])
    right = ax.secondary_yaxis("right")
    for i, side in enumerate((ax, right)):
        names = [editor_name(preference.pair[i]) for preference in rows]
        side.set_yticks(range(len(rows)), names, fontsize=MEDIUM, **literal_text())
        side.tick_params(axis="y", length=0)
        side.spines[:].set_visible(False)
    raters, cases = max(row.raters for row in rows), max(row.cases for row in rows)
    count = f"{raters} rater{'' if raters == 1 else 's'}, {cases} cases"
    title = f"{QUESTION_LABELS[question].capitalize()} ({count})"
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=4)


def _draw_bar(ax: Axes, y: int, preference: Preference) -> None:
    first, second = preference.wins
    parts = ((first, FIRST, "white"), (preference.ties, TIES, "0.25"), (second, SECOND, "white"))
    total, left = first + preference.ties + second, 0.0
    for count, color, text_color in parts:
        width = count / total
        ax.barh(y, width, left=left, height=0.5, color=color, linewidth=0)
        if width > MIN_LABELLED:
            ax.text(left + width / 2, y, str(count), ha="center", va="center", color=text_color,
                    fontsize=MEDIUM)  # fmt: skip
        left += width
    ratio = f"ratio {ratio_text(preference)}" if preference.votes else "no votes for either"
    ax.text(0.5, y + 0.27, ratio, ha="center", va="top", fontsize=SMALL, color="0.3")
