"""Figures of causal traces: of one fact, and of average indirect effects (AIE) over many facts."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from factscope.analysis.effects import (
    SEVERED,
    AverageEffects,
    SeveredComparison,
    baseline,
    cell_table,
    has_table,
    kinds_of,
)
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord
from factscope.report.labels import KIND_STYLES, display_token, token_labels
from factscope.report.style import (
    MEDIUM,
    SMALL,
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
ROLE_COLORS = {
    "first subject token": "#1f77b4",
    "middle subject tokens": "#ff7f0e",
    "last subject token": "#2ca02c",
    "first subsequent token": "#9467bd",
    "further tokens": "#8c564b",
    "last token": "#d62728",
}

# ---- one fact


def trace_figure(record: TraceRecord, kind: str = "states") -> Figure:
    """The causal trace of one fact (Figure 1e-g): tokens × layers."""
    if kind not in KIND_STYLES:
        raise BadSetting(f"no kind {kind!r}; there are: {', '.join(KINDS)}")
    return _heatmaps(record, [[kind]])


def traces_figure(record: TraceRecord) -> Figure:
    """The causal traces of all restored kinds, side by side."""
    kinds = kinds_of([record])
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} restores nothing; trace a kind first")
    return _heatmaps(record, [kinds])


def gradients_figure(record: TraceRecord) -> Figure:
    """Causal traces in the first row, integrated gradients in the second (App. B)."""
    kinds = [kind for kind in KINDS if kind in record.gradients]
    if not kinds:
        raise BadRecord(f"the trace of {record.fact.text!r} has no gradients; trace them first")
    traces = [kind if kind in record.restored else None for kind in kinds]
    return _heatmaps(record, [traces, [f"gradients {kind}" for kind in kinds]])


def _heatmaps(record: TraceRecord, rows: Sequence[Sequence[str | None]]) -> Figure:
    """A heat map of each table of the record; None leaves a place empty."""
    height = max(1.9, MARGIN + ROW_HEIGHT * len(record.tokens))
    fig = blank_figure(PANEL_WIDTH * len(rows[0]), height * len(rows))
    axes = fig.subplots(len(rows), len(rows[0]), squeeze=False)
    for ax, table in zip(axes.flat, chain(*rows), strict=True):
        if table is None:
            ax.set_axis_off()
            continue
        cells, low = cell_table(record, table), baseline(record, table)
        kind = table.removeprefix("gradients ")
        style = KIND_STYLES[kind]
        if kind == table:
            title = f"Impact of restoring {style.label} after corrupted input"
            window = record.settings.get("window", "the")
            xlabel = style.axis.format(window=window, model=record.model)
            colorbar_label = f"p({display_token(record.answer)})"
        else:
            title = f"Integrated gradients of {style.label}"
            xlabel, colorbar_label = f"layer within {record.model}", "norm"
        draw_heatmap(
            ax,
            cells,
            token_labels(record),
            kind=kind,
            low=low,
            high=highest_cell(cells, low),
            title=title,
            xlabel=xlabel,
            colorbar_label=colorbar_label,
        )
    return fig


def severed_detail(record: TraceRecord, token: int | None = None) -> Figure:
    """The scores of one token's states, intact and with a module severed (App. B).

    By default the token is the subject token with the strongest state.
    """
    states = cell_table(record, "states")
    if token is None:  # the strongest of those that were traced in every graph
        severed = [cell_table(record, SEVERED[module]) for module in record.severed]
        traced = [t for t in range(*record.subject) if not np.isnan([x[t] for x in severed]).any()]
        token = max(traced, key=lambda t: states[t].max(), default=record.subject[1] - 1)
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
    runs = (("clean run", record.clean, "--"), ("corrupted run", record.corrupted, ":"))
    for name, probability, line in runs:
        ax.axhline(probability, color="0.3", linewidth=0.7, linestyle=line)
        ax.text(1.01, probability, name, transform=ax.get_yaxis_transform(),
                verticalalignment="center", fontsize=SMALL)  # fmt: skip
    ax.set_ylim(bottom=0)
    restored = f"layer of the restored state at “{display_token(record.tokens[token])}”"
    label_layers(ax, states.shape[1], restored)
    ax.set_ylabel(f"p({display_token(record.answer)})", fontsize=MEDIUM, **literal_text())
    title = " ".join(record.fact.text.split())
    if len(title) > MAX_TITLE:
        title = title[: MAX_TITLE // 2] + " … " + title[-MAX_TITLE // 2 :]
    ax.set_title(title, fontsize=MEDIUM, **literal_text())
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


# ---- averages over facts


def average_heatmap(effects: AverageEffects, kind: str = "states") -> Figure:
    """AIE by token role and layer (Figure 2); negative effects have the lightest colour."""
    return average_heatmaps({kind: effects})


def average_heatmaps(effects: Mapping[str, AverageEffects]) -> Figure:
    """The same for several kinds side by side, on the colour scale of the first."""
    _check_kinds(effects)
    high = highest_cell(next(iter(effects.values())).mean, 0.0)
    fig = blank_figure(3.6 * len(effects) + 0.9, 2.15)
    axes = fig.subplots(1, len(effects), squeeze=False)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        style = KIND_STYLES[kind]
        roles = [role.capitalize() for role in average.roles]
        draw_heatmap(
            ax,
            np.clip(average.mean, 0, None),
            roles if ax is axes[0] else [""] * len(roles),
            kind=kind,
            low=0.0,
            high=high,
            title=f"Avg indirect effect of {style.label} over {average.facts} facts",
            xlabel=style.axis.format(window=average.window or "the", model=average.model),
            colorbar_label="AIE",
        )
    return fig


def average_lines(effects: Mapping[str, AverageEffects]) -> Figure:
    """AIE by layer with 95 % intervals: one panel per kind, one line per token role (App. B)."""
    _check_kinds(effects)
    fig = blank_figure(3.9 * len(effects) + 0.3, 3.2)
    axes = fig.subplots(1, len(effects), squeeze=False, sharey=True)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        style_axes(ax)
        for role in filter(average.measured, average.roles):
            row, layers, color = average.row(role), np.arange(average.layers), ROLE_COLORS[role]
            low, high = row.mean - row.half_width, row.mean + row.half_width
            ax.fill_between(layers, low, high, color=color, alpha=0.25, linewidth=0)
            ax.plot(layers, row.mean, color=color, linewidth=1.3, label=role.capitalize())
        intervention = KIND_STYLES[kind].intervention.format(window=average.window or "the")
        title = f"Average indirect effect of a {intervention}"
        ax.set_title(title, fontsize=MEDIUM, **literal_text())
        label_layers(ax, average.layers, f"layer in {average.model}")
    axes[0].set_ylabel("average indirect effect on p(o)", fontsize=MEDIUM)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, fontsize=SMALL)
    return fig


def severed_figure(comparison: SeveredComparison) -> Figure:
    """AIE of states at the last subject token, intact and with a module severed (Figure 3)."""
    bars = [("Effect of single state", comparison.intact, KIND_STYLES["states"].color)]
    bars += [
        (f"Effect with {KIND_STYLES[module].label} severed", row, KIND_STYLES[module].color)
        for module, row in comparison.severed.items()
    ]
    fig = blank_figure(7.2, 2.9)
    ax = fig.subplots()
    style_axes(ax)
    width = 0.84 / len(bars)
    for i, (label, row, color) in enumerate(bars):
        x = np.arange(len(row)) + width * (i - (len(bars) - 1) / 2)
        ax.bar(x, row.mean, width, label=label, color=color)
        ax.errorbar(x, row.mean, row.half_width, fmt="none", ecolor="0.25", elinewidth=0.5)
    title = f"Effect of states at the last subject token over {comparison.facts} facts"
    ax.set_title(title, fontsize=MEDIUM)
    where = f"layer of {comparison.model} at which the single state is restored"
    label_layers(ax, len(comparison.intact), where)
    ax.set_ylabel("average indirect effect", fontsize=MEDIUM)
    ax.legend(frameon=False, fontsize=SMALL)
    return fig


def _check_kinds(effects: Mapping[str, AverageEffects]) -> None:
    if not effects or not effects.keys() <= KIND_STYLES.keys():
        raise BadSetting(
            f"cannot draw the kinds {list(effects)}; there are: {', '.join(KIND_STYLES)}"
        )
