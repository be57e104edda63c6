"""Figures of evaluations: the scores of each method, and their distributions over cases."""

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from factscope.analysis.metrics import UNEDITED, Summary, case_metrics, group_by_row, summary_of
from factscope.errors import BadRecord
from factscope.records import CaseRecord, CaseScores
from factscope.report.labels import METRIC_TITLES, dataset_name, editor_name, row_name
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    legend_above,
    literal_text,
    panel_axes,
    percent_rows,
)

# ---- scores

COUNTERFACT = {"ES": "efficacy, ES", "PS": "paraphrases, PS", "NS": "neighbours, NS"}
ZSRE = {name: name for name in ("efficacy", "paraphrase", "specificity")}
"""Metrics of each data set with their labels."""
COLORS = ("#d9730d", "#6a51a3", "#4a6fa5")
ROW_HEIGHT, MARGIN, WIDTH = 0.42, 1.1, 7.2
"""Inches."""
SPACING = 0.22
"""Between the scores of a row, as a fraction of the row."""


def scores_figure(rows: Sequence[Summary]) -> Figure:
    """Three scores of every row with 95 % intervals; published scores are hollow."""
    labels = ZSRE if any("efficacy" in row.metrics for row in rows) else COUNTERFACT
    fig = blank_figure(WIDTH, MARGIN + ROW_HEIGHT * len(rows))
    ax = fig.subplots()
    for i, row in enumerate(rows):
        for j, (name, color) in enumerate(zip(labels, COLORS, strict=True)):
            if name in row.metrics:
                _draw_score(ax, i + (j - 1) * SPACING, row, name, color)
    names = [row_name(row) for row in rows]
    ax.set_yticks(range(len(rows)), names, fontsize=SMALL, **literal_text())
    percent_rows(ax, len(rows), "mean over cases, with 95 % interval")
    for i in range(len(rows) - 1):
        ax.axhline(i + 0.5, color="0.92", linewidth=0.6, zorder=0)
    model = next((row.model for row in rows if not row.published), rows[0].model)
    title = f"{dataset_name(rows[0].data)}, {model}"
    ax.set_title(title, fontsize=MEDIUM, fontweight="bold", loc="left", pad=22, **literal_text())
    dot = {"marker": "o", "linestyle": "", "markersize": 5, "markeredgewidth": 1.3}
    handles = [
        Line2D([], [], color=color, label=label, **dot)
        for label, color in zip(labels.values(), COLORS, strict=True)
    ]
    if any(row.published for row in rows):
        hollow = {**dot, "markerfacecolor": "white", "markeredgecolor": "0.35"}
        handles.append(Line2D([], [], label="published", **hollow))
    legend_above(ax, handles)
    return fig


def _draw_score(ax: Axes, y: float, row: Summary, name: str, color: str) -> None:
    value = row.metrics[name]
    if not math.isnan(value.half_width):
        ends = [max(0.0, value.low), min(1.0, value.high)]
        ax.plot(ends, [y, y], color=color, linewidth=1.4, alpha=0.6, zorder=2)
    face = "white" if row.published else color
    ax.scatter([value.mean], [y], s=24, facecolors=face, edgecolors=color, linewidths=1.3,
               zorder=3, clip_on=False)  # fmt: skip


# ---- distributions (Figure 24)

PANELS = (
    "ES", "PS", "NS", "EM", "PM", "NM", "GE", "RS", "efficacy", "paraphrase", "specificity",
)  # fmt: skip
FRACTIONS = ("ES", "PS", "NS", "efficacy", "paraphrase", "specificity")
"""Metrics between 0 and 100 %."""


def distributions_figure(records: Iterable[CaseRecord]) -> Figure:
    """Box plots over cases, one panel per metric. Dotted: the mean. Dots: beyond 1.5 × IQR."""
    values = distributions(records)
    names = [name for name in PANELS if any(name in metrics for metrics in values.values())]
    if not names:
        raise BadRecord("there are no scores to draw; evaluate some cases first")
    columns = min(len(names), 4)
    width = max(1.9, 0.55 * len(values) + 1.1)
    fig = blank_figure(width * columns, 2.5 * math.ceil(len(names) / columns))
    for ax, name in zip(panel_axes(fig, len(names), columns), names, strict=True):
        _draw_boxes(ax, name, {row: metrics.get(name, []) for row, metrics in values.items()})
    return fig


def distributions(records: Iterable[CaseRecord]) -> dict[str, dict[str, list[float]]]:
    """Row → metric → the values of its cases, in percent; the unedited model first."""
    records = list(records)
    before = {record.fact: record.before for record in records if record.before is not None}
    by_row = {editor_name(UNEDITED): _metric_values(before.values())}
    for group in group_by_row(records):
        after = [record.after for record in group if record.after is not None]
        by_row[row_name(summary_of(group))] = _metric_values(after)
    return {row: metrics for row, metrics in by_row.items() if metrics}


def _metric_values(cases: Iterable[CaseScores]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for scores in cases:
        for name, value in case_metrics(scores).items():
            values.setdefault(name, []).append(100 * value)
    return values


def _draw_boxes(ax: Axes, name: str, values: Mapping[str, Sequence[float]]) -> None:
    line = {"color": "0.35", "linewidth": 0.8}
    ax.boxplot(
        list(values.values()), tick_labels=list(values), showmeans=True, meanline=True, widths=0.5,
        meanprops={"color": "#d9730d", "linestyle": ":", "linewidth": 1.6},
        medianprops={"color": "0.35", "linewidth": 1.0},
        boxprops=line, whiskerprops=line, capprops=line,
        flierprops={"marker": "o", "markersize": 2, "markerfacecolor": "#4a6fa5",
                    "markeredgecolor": "none", "alpha": 0.5},
    )  # fmt: skip
    if name in FRACTIONS:
        ax.set_ylim(-4, 104)
    ax.set_title(METRIC_TITLES[name], fontsize=MEDIUM)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    for label in ax.get_xticklabels():
        label.set(rotation=30, ha="right", **literal_text())
