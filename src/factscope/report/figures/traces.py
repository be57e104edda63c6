"""Figures of a single fact: its causal trace, its severed graphs, its integrated gradients."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.effects import SEVERED, baseline, cell_table, has_table, kinds_of
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord
from factscope.report.style import (
    KIND_STYLES,
    MEDIUM,
    SMALL,
    HeatMap,
    blank_figure,
    display_token,
    draw_heatmap,
    label_layers,
    plain,
    tidy,
    token_labels,
)

__all__ = ["gradients_figure", "severed_detail", "trace_figure", "traces_figure"]

ROW, FRAME, PANEL = 0.17, 0.95, 3.9
"""Inches: a token's height, what surrounds the cells, a panel's width."""


def trace_figure(record: TraceRecord, kind: str = "states") -> Figure:
    """The causal trace of one fact (Figure 1e-g): tokens down, layers across."""
    return heatmaps_figure(record, [[trace_heat(record, kind)]])


def traces_figure(record: TraceRecord) -> Figure:
    """The causal traces of every kind that was restored, side by side."""
    return heatmaps_figure(record, [[trace_heat(record, kind) for kind in restored(record)]])


def gradients_figure(record: TraceRecord) -> Figure:
    """The causal traces above the maps of integrated gradients (App. B)."""
    kinds = [kind for kind in KINDS if kind in record.gradients]
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} has no gradients; trace them first")
    traces = [trace_heat(record, kind) if kind in record.restored else None for kind in kinds]
    return heatmaps_figure(record, [traces, [gradient_heat(record, kind) for kind in kinds]])


def restored(record: TraceRecord) -> tuple[str, ...]:
    """The kinds that were restored, of which there must be one."""
    kinds = kinds_of([record])
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} restores nothing; trace a kind first")
    return kinds


def heatmaps_figure(record: TraceRecord, rows: Sequence[Sequence[HeatMap | None]]) -> Figure:
    """Heat maps of one fact in rows; a place without one stays empty."""
    height = max(1.9, FRAME + ROW * len(record.tokens))
    fig = blank_figure(PANEL * len(rows[0]), height * len(rows))
    axes = fig.subplots(len(rows), len(rows[0]), squeeze=False)
    for ax, heat in zip(axes.flat, (heat for row in rows for heat in row), strict=True):
        if heat is None:
            ax.set_axis_off()
        else:
            draw_heatmap(ax, heat)
    return fig


def trace_heat(record: TraceRecord, kind: str) -> HeatMap:
    """The probability of the answer with each cell restored, upwards from the corrupted one."""
    if kind not in KIND_STYLES:
        raise BadSetting(f"no kind {kind!r}; there are: {', '.join(KINDS)}")
    look, cells, low = KIND_STYLES[kind], cell_table(record, kind), baseline(record, kind)
    return HeatMap(
        cells=cells,
        rows=token_labels(record),
        colormap=look.colormap,
        low=low,
        high=top(cells, low),
        title=f"Impact of restoring {look.what} after corrupted input",
        axis=look.axis.format(window=record.settings.get("window", "the"), model=record.model),
        scale=f"p({display_token(record.answer)})",
    )


def gradient_heat(record: TraceRecord, kind: str) -> HeatMap:
    """The norm of the integrated gradient at each state."""
    cells = cell_table(record, f"gradients {kind}")
    return HeatMap(
        cells=cells,
        rows=token_labels(record),
        colormap=KIND_STYLES[kind].colormap,
        low=0.0,
        high=top(cells, 0.0),
        title=f"Integrated gradients of {KIND_STYLES[kind].what}",
        axis=f"layer within {record.model}",
        scale="norm",
    )


def top(cells: np.ndarray, low: float) -> float:
    """The darkest colour's value: the highest cell, or a little above the lowest colour's."""
    return float(np.max(cells, initial=low + 1e-3, where=~np.isnan(cells)))


def severed_detail(record: TraceRecord, token: int | None = None) -> Figure:
    """One fact at one token, with and without severing; by default the decisive subject token."""
    chosen = decisive_token(record) if token is None else token
    if not 0 <= chosen < len(record.tokens):
        raise BadSetting(f"no token {chosen} in a prompt of {len(record.tokens)} tokens")
    rows = detail_rows(record, chosen)
    fig = blank_figure(6.2, 2.7)
    ax = fig.subplots()
    tidy(ax)
    for i, (label, (scores, color)) in enumerate(rows.items()):
        width = 0.8 / len(rows)
        x = np.arange(len(scores)) + width * (i - (len(rows) - 1) / 2)
        ax.bar(x, scores - record.corrupted, width, record.corrupted, label=label, color=color)
    draw_run(ax, "clean run", record.clean, "--")
    draw_run(ax, "corrupted run", record.corrupted, ":")
    ax.set_ylim(bottom=0)
    layers = cell_table(record, "states").shape[1]
    label_layers(
        ax, layers, f"layer of the restored state at “{display_token(record.tokens[chosen])}”"
    )
    ax.set_ylabel(f"p({display_token(record.answer)})", fontsize=MEDIUM, **plain())
    ax.set_title(shortened(record.fact.text), fontsize=MEDIUM, **plain())
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


def decisive_token(record: TraceRecord) -> int:
    """The subject's token, of those traced in a severed graph, where a state restores most."""
    severed = [cell_table(record, SEVERED[module]) for module in record.severed]
    measured = [
        token
        for token in range(*record.subject)
        if all(not np.isnan(table[token]).any() for table in severed)
    ]
    states = cell_table(record, "states")
    return max(measured, key=lambda token: states[token].max(), default=record.subject[1] - 1)


def draw_run(ax: Axes, name: str, probability: float, style: str) -> None:
    """A line across at the probability of a run without restoration, with the run's name."""
    ax.axhline(probability, color="0.3", linewidth=0.7, linestyle=style)
    ax.text(
        1.01,
        probability,
        name,
        transform=ax.get_yaxis_transform(),
        verticalalignment="center",
        fontsize=SMALL,
    )


def detail_rows(record: TraceRecord, token: int) -> dict[str, tuple[np.ndarray, str]]:
    """The scores of a token's states in each graph that was traced, with a colour each."""
    rows = {"intact graph": (cell_table(record, "states")[token], KIND_STYLES["states"].line)}
    for module, table in SEVERED.items():
        if has_table(record, table):
            look = KIND_STYLES[module]
            rows[f"{look.what} severed"] = (cell_table(record, table)[token], look.line)
    return rows


def shortened(text: str, most: int = 80) -> str:
    """A text as one line that fits above a figure."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most // 2] + " … " + line[-most // 2 :]
