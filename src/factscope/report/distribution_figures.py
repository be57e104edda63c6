"""How each metric is spread over cases, method by method (Figure 24)."""

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.metrics import (
    UNEDITED,
    case_metrics,
    grouped,
    setting_of,
    summary_of,
)
from factscope.errors import BadRecord
from factscope.records import CaseRecord, CaseScores
from factscope.report.canvas import MEDIUM, SMALL, blank_figure, plain
from factscope.report.evaluation_words import editor_name, row_name

__all__ = ["distributions_figure"]

PANELS = {
    "ES": "Efficacy, ES (%)",
    "PS": "Paraphrases, PS (%)",
    "NS": "Neighbours, NS (%)",
    "EM": "Efficacy, EM (%)",
    "PM": "Paraphrases, PM (%)",
    "NM": "Neighbours, NM (%)",
    "GE": "Fluency, GE",
    "RS": "Consistency, RS (%)",
    "efficacy": "Efficacy (%)",
    "paraphrase": "Paraphrases (%)",
    "specificity": "Specificity (%)",
}
"""Metric → the title of its panel."""
SHARES = ("ES", "PS", "NS", "efficacy", "paraphrase", "specificity")
"""Metrics from 0 to 100 %."""
MEAN, BOX = "#d9730d", "#4a6fa5"


def distributions_figure(records: Iterable[CaseRecord]) -> Figure:
    """A panel a metric, a box a method; the mean is dotted, dots are beyond 1.5 times the box."""
    found = distributions(records)
    names = [name for name in PANELS if any(name in mine for mine in found.values())]
    if not names:
        raise BadRecord("there are no scores to draw; evaluate some cases first")
    columns = min(len(names), 4)
    rows = math.ceil(len(names) / columns)
    fig = blank_figure(max(1.9, 0.55 * len(found) + 1.1) * columns, 2.5 * rows)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for ax, name in zip(axes, names, strict=False):
        _boxes(ax, name, {method: mine.get(name, []) for method, mine in found.items()})
    for ax in axes[len(names) :]:
        ax.set_visible(False)
    return fig


def distributions(records: Iterable[CaseRecord]) -> dict[str, dict[str, list[float]]]:
    """Row → metric → the values of its cases; the unedited model's first."""
    everyone = list(records)
    before = {record.fact: record.before for record in everyone if record.before is not None}
    found = {editor_name(UNEDITED): _columns(before.values())}
    edits = [record for record in everyone if record.method != UNEDITED]
    for some in grouped(edits, setting_of).values():
        after = [record.after for record in some if record.after is not None]
        found[row_name(summary_of(some))] = _columns(after)
    return {row: columns for row, columns in found.items() if columns}


def _columns(cases: Iterable[CaseScores]) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    for scores in cases:
        for name, value in case_metrics(scores).items():
            columns.setdefault(name, []).append(100 * value)
    return columns


def _boxes(ax: Axes, name: str, values: Mapping[str, Sequence[float]]) -> None:
    ax.boxplot(
        list(values.values()), tick_labels=list(values),
        showmeans=True, meanline=True, widths=0.5,
        meanprops={"color": MEAN, "linestyle": ":", "linewidth": 1.6},
        medianprops={"color": "0.35", "linewidth": 1.0},
        boxprops={"color": "0.35", "linewidth": 0.8},
        whiskerprops={"color": "0.35", "linewidth": 0.8},
        capprops={"color": "0.35", "linewidth": 0.8},
        flierprops={"marker": "o", "markersize": 2, "markerfacecolor": BOX,
                    "markeredgecolor": "none", "alpha": 0.5},
    )  # fmt: skip
    if name in SHARES:
        ax.set_ylim(-4, 104)
    ax.set_title(PANELS[name], fontsize=MEDIUM)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=SMALL, length=2, width=0.5)
    ax.yaxis.grid(True, color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    for label in ax.get_xticklabels():
        label.set(parse_math=False, rotation=30, ha="right", fontfamily=plain()["fontfamily"])
