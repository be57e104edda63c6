"""Figures of causal traces: of one fact, and of average indirect effects (AIE) over many facts."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from factscope.analysis.attention import (
    AverageHeads,
    AverageKnockout,
    head_effects,
    knockout_changes,
)
from factscope.analysis.effects import (
    LENS_RUNS,
    SEVERED,
    AverageEffects,
    SeveredComparison,
    baseline,
    cell_table,
    effect_sign,
    has_table,
    indirect_effects,
    kinds_of,
)
from factscope.analysis.estimate import Estimates
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord
from factscope.report.labels import (
    GROUP_COLORS,
    GROUP_NAMES,
    HEAD_COLORS,
    KIND_STYLES,
    LENS_COLORS,
    METRIC_NAMES,
    attribution_method,
    cell_title,
    display_token,
    metric_label,
    replaced_by,
    restores,
    token_labels,
)
from factscope.report.style import (
    MEDIUM,
    SMALL,
    blank_figure,
    draw_heatmap,
    label_layers,
    literal_text,
    strongest_cell,
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


def attribution_heatmaps(record: TraceRecord) -> Figure:
    """The measured cells in the first row, those estimated by gradients in the second."""
    kinds = [k for k in KINDS if k in record.attribution and k in record.restored]
    if not kinds:
        raise BadRecord(
            f"the trace of {record.fact.text!r} has no estimates; trace with --attribution"
        )
    return _heatmaps(record, [kinds, [f"attribution {kind}" for kind in kinds]])


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
        # What is compared has one scale: estimates that of the measured cells, both lenses another.
        scale = cells
        kind = table.removeprefix("gradients ").removeprefix("attribution ")
        style = KIND_STYLES.get(kind)
        xlabel, colorbar_label = (
            f"layer within {record.model}",
            f"p({display_token(record.answer)})",
        )
        if style is None:
            title = f"Logit lens on the {table.removeprefix('lens ')} run"
            scale = cell_table(record, next(name for name in rows[0] if name is not None))
        elif kind == table:
            title = cell_title(record, style.label)
            xlabel = style.axis_label(record.settings.get("window"), record.model)
            colorbar_label = metric_label(record)
        elif table.startswith("attribution"):
            title = f"{attribution_method(record)} estimate: {style.label}"
            colorbar_label, scale = metric_label(record), cell_table(record, kind)
        else:
            title, colorbar_label = f"Integrated gradients of {style.label}", "norm"
        draw_heatmap(
            ax,
            cells,
            token_labels(record),
            colormap=style.colormap if style else LENS_COLORS,
            low=low,
            high=strongest_cell(scale, low, effect_sign(record, table)),
            title=title,
            xlabel=xlabel,
            colorbar_label=colorbar_label,
        )
    _name_replacement(fig, record)
    return fig


def _name_replacement(fig: Figure, record: TraceRecord) -> None:
    """With token replacement, name the other subject above the panels."""
    subject = replaced_by(record)
    if subject is not None:
        text = f"subject replaced by “{display_token(subject)}”"
        fig.suptitle(text, fontsize=SMALL, color="0.35", **literal_text())


def lens_figure(record: TraceRecord) -> Figure:
    """The answer's probability decoded from every state of the clean and the corrupted run."""
    tables = [f"lens {run}" for run in LENS_RUNS if run in record.lens]
    if not tables:
        raise BadRecord(f"the trace of {record.fact.text!r} has no lens; trace with --lens")
    return _heatmaps(record, [tables])


def heads_figure(record: TraceRecord, token: int | None = None) -> Figure:
    """Restoring single heads at one token: heads × layers.

    By default the token is the one with the strongest head.
    """
    effects = head_effects(record)
    if token is None:
        strongest = np.max(effects, axis=(0, 2), initial=-np.inf, where=~np.isnan(effects))
        token = int(strongest.argmax())
    if not 0 <= token < len(record.tokens):
        raise BadSetting(f"no token {token} in a prompt of {len(record.tokens)} tokens")
    cells = np.array(record.heads, dtype=float)[:, token]
    where = f"head at “{display_token(record.tokens[token])}”"
    fig = blank_figure(PANEL_WIDTH + 1, _heads_height(len(cells)))
    draw_heatmap(
        fig.subplots(),
        cells,
        _head_labels(len(cells)),
        colormap=HEAD_COLORS,
        low=record.base_value,
        high=strongest_cell(cells, record.base_value, effect_sign(record)),
        title=cell_title(record, where),
        xlabel=f"layer within {record.model}",
        colorbar_label=metric_label(record),
    )
    _name_replacement(fig, record)
    return fig


def _heads_height(heads: int) -> float:
    return max(1.9, MARGIN + 0.8 * ROW_HEIGHT * heads)


def _head_labels(heads: int) -> list[str]:
    """Labels of the rows; where there are many heads, of every second one."""
    return [f"head {i}" if heads <= 16 or i % 2 == 0 else "" for i in range(heads)]


def knockout_figure(record: TraceRecord) -> Figure:
    """Attention from the last token to each group of tokens blocked around each layer (Geva et al.,
    2023, Figure 2): the change of the metric."""
    changes = knockout_changes(record)
    return _knockout_lines(
        {group: Estimates(x, np.full_like(x, np.nan), np.ones(len(x), int))
         for group, x in changes.items()},
        what=metric_label(record),
        relative=record.metric == "probability",
        window=record.settings.get("knockout_window"),
        model=record.model,
    )  # fmt: skip


def _knockout_lines(
    changes: Mapping[str, Estimates], *, what: str, relative: bool, window: Any, model: str
) -> Figure:
    """One line per group of blocked tokens, with a band where there is an interval."""
    fig = blank_figure(5.2, 2.9)
    ax = fig.subplots()
    style_axes(ax)
    for group, row in changes.items():
        _draw_line(ax, row, GROUP_COLORS[group], GROUP_NAMES[group])
    if relative:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel(f"{'relative ' * relative}change of {what}", fontsize=MEDIUM, **literal_text())
    window_text = "a window of layers" if window is None else f"{window} layers"
    ax.set_title(f"Attention from the last token blocked in {window_text}", fontsize=MEDIUM)
    layers = len(next(iter(changes.values())))
    label_layers(ax, layers, f"layer of {model} at the window's centre")
    ax.legend(frameon=False, fontsize=SMALL, title="blocked", title_fontsize=SMALL,
              alignment="left")  # fmt: skip
    return fig


def _draw_line(ax: Axes, row: Estimates, color: str, label: str) -> None:
    """A line over the layers with its 95 % band."""
    layers, low, high = np.arange(len(row)), row.mean - row.half_width, row.mean + row.half_width
    ax.fill_between(layers, low, high, color=color, alpha=0.25, linewidth=0)
    ax.plot(layers, row.mean, color=color, linewidth=1.3, label=label)


def severed_detail(record: TraceRecord, token: int | None = None) -> Figure:
    """The scores of one token's states, intact and with a module severed (App. B).

    By default the token is the subject token with the strongest state.
    """
    states = cell_table(record, "states")
    if token is None:  # the strongest of those that were traced in every graph
        severed = [cell_table(record, SEVERED[module]) for module in record.severed]
        traced = [t for t in range(*record.subject) if not np.isnan([x[t] for x in severed]).any()]
        effects = indirect_effects(record, "states")
        token = max(traced, key=lambda t: effects[t].max(), default=record.subject[1] - 1)
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
        base = record.base_value
        ax.bar(x, scores - base, width, base, label=label, color=color)
    runs = (("clean run", record.clean_value, "--"), ("corrupted run", record.corrupted_value, ":"))
    for name, value, line in runs:
        ax.axhline(value, color="0.3", linewidth=0.7, linestyle=line)
        ax.text(1.01, value, name, transform=ax.get_yaxis_transform(),
                verticalalignment="center", fontsize=SMALL)  # fmt: skip
    if record.metric == "probability":
        ax.set_ylim(bottom=0)
    changed = "restored" if restores(record) else "corrupted"
    where = f"layer of the {changed} state at “{display_token(record.tokens[token])}”"
    label_layers(ax, states.shape[1], where)
    ax.set_ylabel(metric_label(record), fontsize=MEDIUM, **literal_text())
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
    return _role_heatmaps(
        effects,
        titles=[f"Avg indirect effect of {KIND_STYLES[kind].label}" for kind in effects],
        colormaps=[KIND_STYLES[kind].colormap for kind in effects],
        axes=[KIND_STYLES[kind].axis_label(e.window, e.model) for kind, e in effects.items()],
        colorbar_label=_aie_label(next(iter(effects.values())).metric),
    )


def average_lens(effects: Mapping[str, AverageEffects]) -> Figure:
    """The answer's probability by the logit lens: its mean by token role and layer, for each run.

    The keys are runs, "clean" and "corrupted"; all panels have the colour scale of the first.
    """
    return _role_heatmaps(
        effects,
        titles=[f"Logit lens on the {run} run" for run in effects],
        colormaps=[LENS_COLORS] * len(effects),
        axes=[f"layer within {average.model}" for average in effects.values()],
        colorbar_label="mean p(o)",
    )


def _role_heatmaps(
    effects: Mapping[str, AverageEffects],
    *,
    titles: Sequence[str],
    colormaps: Sequence[str],
    axes: Sequence[str],
    colorbar_label: str,
) -> Figure:
    """Token roles × layers, one panel per average, on the colour scale of the first."""
    averages = list(effects.values())
    fig = blank_figure(3.6 * len(averages) + 0.9, 2.15)
    panels = fig.subplots(1, len(averages), squeeze=False)[0]
    for i, (ax, average) in enumerate(zip(panels, averages, strict=True)):
        roles = [role.capitalize() for role in average.roles]
        draw_heatmap(
            ax,
            np.clip(average.mean, 0, None),
            roles if i == 0 else [""] * len(roles),
            colormap=colormaps[i],
            low=0.0,
            high=strongest_cell(averages[0].mean, 0.0),
            title=f"{titles[i]} over {average.facts} facts",
            xlabel=axes[i],
            colorbar_label=colorbar_label,
        )
    return fig


def _aie_label(metric: str) -> str:
    return "AIE" if metric == "probability" else f"AIE, {METRIC_NAMES.get(metric, metric)}"


def average_lines(effects: Mapping[str, AverageEffects]) -> Figure:
    """AIE by layer with 95 % intervals: one panel per kind, one line per token role (App. B)."""
    _check_kinds(effects)
    fig = blank_figure(3.9 * len(effects) + 0.3, 3.2)
    axes = fig.subplots(1, len(effects), squeeze=False, sharey=True)[0]
    for ax, (kind, average) in zip(axes, effects.items(), strict=True):
        style_axes(ax)
        for role in filter(average.measured, average.roles):
            _draw_line(ax, average.row(role), ROLE_COLORS[role], role.capitalize())
        title = (
            f"Average indirect effect of a {KIND_STYLES[kind].intervention_label(average.window)}"
        )
        ax.set_title(title, fontsize=MEDIUM, **literal_text())
        label_layers(ax, average.layers, f"layer in {average.model}")
    first = next(iter(effects.values()))
    metric = METRIC_NAMES.get(first.metric, first.metric)
    axes[0].set_ylabel(f"average indirect effect on {metric}", fontsize=MEDIUM)
    if first.total.mean > 0:  # the same scale, normalised: 1 is the whole way to the other run
        total = first.total.mean
        scale = axes[-1].secondary_yaxis(
            "right", functions=(lambda x: x / total, lambda x: x * total)
        )
        scale.set_ylabel("fraction of the total effect", fontsize=SMALL)
        scale.tick_params(labelsize=SMALL, length=2, width=0.5)
        scale.spines["right"].set_linewidth(0.5)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, fontsize=SMALL)
    return fig


def average_heads_figure(averages: Sequence[AverageHeads]) -> Figure:
    """The average indirect effect of each head, one panel per token role, on the first's scale."""
    heads = len(averages[0].mean)
    fig = blank_figure(3.9 * len(averages) + 0.4, _heads_height(heads))
    axes = fig.subplots(1, len(averages), squeeze=False)[0]
    for ax, average in zip(axes, averages, strict=True):
        draw_heatmap(
            ax,
            np.clip(average.mean, 0, None),
            _head_labels(heads) if ax is axes[0] else [""] * heads,
            colormap=HEAD_COLORS,
            low=0.0,
            high=strongest_cell(averages[0].mean, 0.0),
            title=f"Single heads at the {average.role} over {average.facts} facts",
            xlabel=f"layer within {average.model}",
            colorbar_label=_aie_label(average.metric),
        )
    return fig


def average_knockout_figure(average: AverageKnockout) -> Figure:
    """`knockout_figure` of the mean over facts, with 95 % intervals."""
    return _knockout_lines(
        average.changes,
        what=METRIC_NAMES.get(average.metric, average.metric),
        relative=average.metric == "probability",
        window=average.window,
        model=average.model,
    )


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
