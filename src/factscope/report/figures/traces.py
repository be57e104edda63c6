"""Figures of one fact: its causal trace, severed graphs and integrated gradients."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from factscope.analysis.effects import SEVERED, baseline, cell_table, has_table, kinds_of
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord
from factscope.report.labels import KIND_STYLES, display_token, token_labels
from factscope.report.style import (
    MEDIUM,
    SMALL,
    HeatMap,
    blank_figure,
    draw_heatmap,
    highest_cell,
    label_layers,
    literal_text,
    style_axes,
)

ROW_HEIGHT, MARGIN, PANEL_WIDTH = 0.17, 0.95, 3.9
"""Inches; the margin is the height of a panel without its rows."""
MAX_TITLE = 80
"""Characters of a prompt as title."""


def trace_figure(record: TraceRecord, kind: str = "states") -> Figure:
    """The causal trace of one fact (Figure 1e-g): tokens × layers."""
    return _heatmaps_figure(record, [[_trace_heatmap(record, kind)]])


def traces_figure(record: TraceRecord) -> Figure:
    """The causal traces of all restored kinds, side by side."""
    kinds = kinds_of([record])
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} restores nothing; trace a kind first")
    return _heatmaps_figure(record, [[_trace_heatmap(record, kind) for kind in kinds]])


def gradients_figure(record: TraceRecord) -> Figure:
    """Causal traces in the first row, integrated gradients in the second (App. B)."""
    kinds = [kind for kind in KINDS if kind in record.gradients]
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} has no gradients; trace them first")
    traces = [_trace_heatmap(record, kind) if kind in record.restored else None for kind in kinds]
    return _heatmaps_figure(record, [traces, [_gradient_heatmap(record, kind) for kind in kinds]])


def _heatmaps_figure(record: TraceRecord, rows: Sequence[Sequence[HeatMap | None]]) -> Figure:
    height = max(1.9, MARGIN + ROW_HEIGHT * len(record.tokens))
    fig = blank_figure(PANEL_WIDTH * len(rows[0]), height * len(rows))
    axes = fig.subplots(len(rows), len(rows[0]), squeeze=False)
    for ax, heatmap in zip(axes.flat, (heatmap for row in rows for heatmap in row), strict=True):
        if heatmap is None:
            ax.set_axis_off()
        else:
            draw_heatmap(ax, heatmap)
    return fig


def _trace_heatmap(record: TraceRecord, kind: str) -> HeatMap:
    """The answer's probability with each cell restored; white is the corrupted run's."""
    if kind not in KIND_STYLES:
        raise BadSetting(f"no kind {kind!r}; there are: {', '.join(KINDS)}")
    style, cells, low = KIND_STYLES[kind], cell_table(record, kind), baseline(record, kind)
    return HeatMap(
        cells=cells,
        row_labels=token_labels(record),
        colormap=style.colormap,
        low=low,
        high=highest_cell(cells, low),
        title=f"Impact of restoring {style.label} after corrupted input",
        xlabel=style.axis.format(window=record.settings.get("window", "the"), model=record.model),
        colorbar_label=f"p({display_token(record.answer)})",
    )


def _gradient_heatmap(record: TraceRecord, kind: str) -> HeatMap:
    """The norm of the integrated gradient at each cell."""
    cells = cell_table(record, f"gradients {kind}")
    return HeatMap(
        cells=cells,
        row_labels=token_labels(record),
        colormap=KIND_STYLES[kind].colormap,
        low=0.0,
        high=highest_cell(cells, 0.0),
        title=f"Integrated gradients of {KIND_STYLES[kind].label}",
        xlabel=f"layer within {record.model}",
        colorbar_label="norm",
    )


def severed_detail(record: TraceRecord, token: int | None = None) -> Figure:
    """The scores of one token's states, intact and with a module severed (App. B).

    By default the token is the subject token with the strongest state.
    """
    token = _strongest_subject_token(record) if token is None else token
    if not 0 <= token < len(record.tokens):
        raise BadSetting(f"no token {token} in a prompt of {len(record.tokens)} tokens")
    bars = [("intact graph", "states", KIND_STYLES["states"].color)]
    bars += [
        (f"{KIND_STYLES[module].label} severed", table, KIND_STYLES[module].color)
        for module, table in SEVERED.items()
        if has_table(record, table)
    ]
    fig = blank_figure(6.2, 2.7)
    ax = fig.subplots()
    style_axes(ax)
    width = 0.8 / len(bars)
    for i, (label, table, color) in enumerate(bars):
        scores = cell_table(record, table)[token]
        x = np.arange(len(scores)) + width * (i - (len(bars) - 1) / 2)
        ax.bar(x, scores - record.corrupted, width, record.corrupted, label=label, color=color)
    for name, probability, line in (
        ("clean run", record.clean, "--"),
        ("corrupted run", record.corrupted, ":"),
    ):
        ax.axhline(probability, color="0.3", linewidth=0.7, linestyle=line)
        ax.text(1.01, probability, name, transform=ax.get_yaxis_transform(),
                verticalalignment="center", fontsize=SMALL)  # fmt: skip
    ax.set_ylim(bottom=0)
    layers = cell_table(record, "states").shape[1]
    restored = f"layer of the restored state at “{display_token(record.tokens[token])}”"
    label_layers(ax, layers, restored)
    ax.set_ylabel(f"p({display_token(record.answer)})", fontsize=MEDIUM, **literal_text())
    title = " ".join(record.fact.text.split())
    if len(title) > MAX_TITLE:
        title = title[: MAX_TITLE // 2] + " … " + title[-MAX_TITLE // 2 :]
    ax.set_title(title, fontsize=MEDIUM, **literal_text())
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


def _strongest_subject_token(record: TraceRecord) -> int:
    """The subject token with the highest score, of those that were traced in every graph."""
    severed = [cell_table(record, SEVERED[module]) for module in record.severed]
    traced = [
        token
        for token in range(*record.subject)
        if not any(np.isnan(table[token]).any() for table in severed)
    ]
    states = cell_table(record, "states")
    return max(traced, key=lambda token: states[token].max(), default=record.subject[1] - 1)
