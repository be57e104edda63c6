"""Figures that compare: estimated with measured cells, traces before and after an edit, and trace
effects with edit success."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from factscope.analysis.attribution import (
    Agreement,
    attribution_methods,
    cell_effects,
    has_attribution,
    over_all_layers,
)
from factscope.analysis.effects import indirect_effects, kinds_of
from factscope.analysis.estimate import Estimates
from factscope.analysis.localization import Localization
from factscope.records import EditTraces, TraceRecord
from factscope.report.figures.traces import MARGIN, PANEL_WIDTH, ROW_HEIGHT
from factscope.report.labels import (
    ATTRIBUTION_NAMES,
    CELL_NAMES,
    KIND_STYLES,
    METRIC_NAMES,
    metric_label,
    token_labels,
)
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    draw_heatmap,
    label_layers,
    literal_text,
    style_axes,
)

CELL_COLORS = {**{kind: style.color for kind, style in KIND_STYLES.items()}, "heads": "#d94801"}
"""Colours of all kinds of cells, in lines and scatter plots."""
MAX_POINTS = 4000
"""Cells drawn in one scatter plot; more are thinned out evenly."""


# ---- attribution patching


def attribution_figure(records: Sequence[TraceRecord], agreements: Sequence[Agreement]) -> Figure:
    """Estimated against measured effects for each kind of cell, and the recall of the strongest
    cells by the number of verified ones."""
    known = [record for record in records if record.known and has_attribution(record)]
    whole = over_all_layers(agreements)
    fig = blank_figure(2.75 * (len(whole) + 1) + 0.4, 2.9)
    *scatters, last = fig.subplots(1, len(whole) + 1, squeeze=False)[0]
    for ax, agreement in zip(scatters, whole, strict=True):
        _draw_cells(ax, known, agreement)
    scatters[0].set_ylabel("estimated effect", fontsize=MEDIUM)
    style_axes(last, zero=False)
    for agreement in whole:
        row, color = agreement.recall, CELL_COLORS[agreement.kind]
        verified = np.arange(1, len(row) + 1)
        low, high = row.mean - row.half_width, row.mean + row.half_width
        last.fill_between(verified, low, np.clip(high, 0, 1), color=color, alpha=0.2, linewidth=0)
        last.plot(verified, row.mean, color=color, linewidth=1.3, label=CELL_NAMES[agreement.kind])
    last.axvline(whole[0].top, color="0.6", linewidth=0.6, linestyle=":")
    last.set_ylim(0, 1.02)
    last.yaxis.set_major_formatter(PercentFormatter(1.0))
    last.set_xlabel("cells verified, strongest estimates first", fontsize=SMALL)
    last.set_title(f"strongest {whole[0].top} cells found", fontsize=MEDIUM)
    last.legend(frameon=False, fontsize=SMALL)
    method = " and ".join(ATTRIBUTION_NAMES.get(x, x) for x in attribution_methods(known))
    metric = METRIC_NAMES.get(known[0].metric, known[0].metric)
    title = f"{method} against measured cells: effect on {metric} in {known[0].model}, "
    fig.suptitle(f"{title}{len(known)} facts", fontsize=MEDIUM, **literal_text())
    return fig


def _draw_cells(ax: Axes, records: Sequence[TraceRecord], agreement: Agreement) -> None:
    """Every cell of a kind: its measured effect to the right, the estimate upwards."""
    kind = agreement.kind
    pairs = [
        cell_effects(r, kind)
        for r in records
        if (r.head_attribution if kind == "heads" else kind in r.attribution)
    ]
    measured, estimated = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    step = -(-len(measured) // MAX_POINTS)
    style_axes(ax)
    ax.axvline(0, color="0.6", linewidth=0.6, zorder=0)
    ax.scatter(
        measured[::step], estimated[::step], s=4, color=CELL_COLORS[kind], alpha=0.35,
        linewidth=0, rasterized=True,
    )  # fmt: skip
    ax.axline((0, 0), slope=1, color="0.3", linewidth=0.7, linestyle="--")
    ax.set_xlabel("measured effect", fontsize=MEDIUM)
    text = f"r = {agreement.pearson.text}\nρ = {agreement.spearman.text}"
    ax.text(0.03, 0.97, text, transform=ax.transAxes, va="top", fontsize=SMALL)
    ax.set_title(CELL_NAMES[kind], fontsize=MEDIUM)


# ---- before and after an edit

DIFFERENCE_COLORS = "RdBu_r"


def edit_traces_figure(traces: EditTraces) -> Figure:
    """The indirect effects before the edit, after it, and their difference, on one scale.

    A row per kind. The last column is the old answer in the edited model.
    """
    kinds = [k for k in kinds_of([traces.before]) if k in traces.after.restored]
    height = max(1.9, MARGIN + ROW_HEIGHT * len(traces.before.tokens))
    fig = blank_figure(PANEL_WIDTH * 4, height * len(kinds))
    axes = fig.subplots(len(kinds), 4, squeeze=False)
    for row, kind in zip(axes, kinds, strict=True):
        records = (traces.before, traces.after, traces.old_after)
        before, after, old = (indirect_effects(record, kind) for record in records)
        high = float(np.nanmax(np.abs(np.stack([before, after, old])), initial=1e-3))
        colormap, label = KIND_STYLES[kind].colormap, KIND_STYLES[kind].label
        old_before, new_after, old_after = map(metric_label, records)
        panels = [
            (before, f"{label} before the edit: {old_before}", colormap, 0.0),
            (after, f"{label} after the edit: {new_after}", colormap, 0.0),
            (after - before, f"{label}: after − before", DIFFERENCE_COLORS, -high),
            (old, f"{label} after the edit: {old_after}", colormap, 0.0),
        ]
        tokens = token_labels(traces.before)
        for ax, (cells, title, colors, low) in zip(row, panels, strict=True):
            draw_heatmap(
                ax,
                cells,
                tokens if ax is row[0] else [""] * len(tokens),
                colormap=colors,
                low=low,
                high=high,
                title=title,
                xlabel=f"layer of {traces.before.model}",
                colorbar_label="difference" if low < 0 else "effect",
            )
    return fig


# ---- trace effect and edit success


def localization_figure(relations: Sequence[Localization], model: str) -> Figure:
    """By layer: mean edit success, mean trace effect, and their correlation over facts
    (Hase et al., 2023)."""
    fig = blank_figure(10.2, 2.9)
    success, effect, correlation = fig.subplots(1, 3)
    first = relations[0]
    layers = np.array(first.layers)
    _draw_estimates(success, layers, first.success, "0.25", "edit success")
    success.set_title("Edit success (rewrite score)", fontsize=MEDIUM)
    for relation in relations:
        color, name = CELL_COLORS[relation.kind], CELL_NAMES[relation.kind]
        _draw_estimates(effect, layers, relation.effect, color, name)
        values = np.array([(c.value, c.low, c.high) for c in relation.within_layer])
        correlation.fill_between(layers, *values.T[1:], color=color, alpha=0.2, linewidth=0)
        correlation.plot(layers, values[:, 0], color=color, linewidth=1.3, marker="o", markersize=2,
                         label=name)  # fmt: skip
    effect.set_title("Trace effect at the last subject token", fontsize=MEDIUM)
    correlation.set_title("Correlation over facts", fontsize=MEDIUM)
    correlation.set_ylim(-1, 1)
    for ax in (success, effect, correlation):
        style_axes(ax)
        label_layers(ax, int(layers[-1]) + 1, f"layer of {model}")
    effect.legend(frameon=False, fontsize=SMALL)
    return fig


def _draw_estimates(ax: Axes, x: np.ndarray, row: Estimates, color: str, label: str) -> None:
    """A line with its 95 % band."""
    low, high = row.mean - row.half_width, row.mean + row.half_width
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    ax.plot(x, row.mean, color=color, linewidth=1.3, marker="o", markersize=2, label=label)
