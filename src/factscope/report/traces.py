"""Reports of causal traces: the page of one fact, and the page, figures and tables of a run."""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.image import imsave

from factscope.analysis.attention import average_heads, average_knockout, head_effects
from factscope.analysis.attribution import compare_attribution, has_attribution
from factscope.analysis.effects import (
    LAST,
    LAST_SUBJECT,
    LENS_RUNS,
    NORMALISED,
    AverageEffects,
    Pooling,
    average_effects,
    average_kinds,
    cell_table,
    effect_sign,
    has_severed,
    has_table,
    indirect_effects,
    kinds_of,
    normalised,
    normalised_run,
    severed_comparison,
    total_effect,
)
from factscope.errors import BadRecord
from factscope.records import KINDS, TraceRecord
from factscope.report.figures import (
    attribution_figure,
    attribution_heatmaps,
    average_heads_figure,
    average_heatmaps,
    average_knockout_figure,
    average_lens,
    average_lines,
    gradients_figure,
    knockout_figure,
    severed_detail,
    severed_figure,
    traces_figure,
)
from factscope.report.html import embed_figure, image_uri, render, table_files, write_files
from factscope.report.labels import (
    HEAD_COLORS,
    KIND_STYLES,
    LENS_COLORS,
    METRIC_NAMES,
    cell_title,
    display_token,
    metric_label,
    metric_text,
    replaced_by,
    restores,
    token_labels,
)
from factscope.report.style import layer_ticks
from factscope.report.tables import (
    Table,
    as_csv,
    attribution_table,
    effects_table,
    heads_table,
    knockout_table,
    lens_table,
    severed_table,
    summary_table,
)

UNMEASURED = "#e1e1e4"
"""Colour of heat map cells without a measurement."""


def write_trace_report(
    records: Iterable[TraceRecord],
    folder: Path,
    *,
    title: str = "Causal tracing",
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    normalise: bool = False,
    single: int = 10,
) -> list[Path]:
    """Write the report of a run and return its files, the page first.

    The first `single` traced facts get a figure each; the page lists more of them. effects.csv
    holds every number of the figures of average effects. `normalise` is that of `trace_run_page`.
    """
    records = list(records)
    if not records:
        raise BadRecord("there are no records to report on; trace some facts first")
    options: Any = {"pooling": pooling, "paper_roles": paper_roles}
    page = trace_run_page(title, records, normalise=normalise, **options)
    traced = [record for record in records if record.restored]
    if normalise:
        traced, records = [normalised(record) for record in traced], normalised_run(records)
    averages = average_kinds(records, **options)
    files: list[tuple[str, str | Figure]] = [("index.html", page)]
    if averages:
        files += [
            ("average_heatmaps", average_heatmaps(averages)),
            ("average_lines", average_lines(averages)),
            *table_files("summary", summary_table(averages)),
            *table_files("peaks", effects_table(averages)),
            ("effects.csv", as_csv(effects_table(averages, every_layer=True))),
        ]
    for section in run_sections(records):
        files += [(section.name, section.figure)]
        files += table_files(section.name, *section.tables, full=section.full)
    files += [(f"facts/{i:04d}", traces_figure(r)) for i, r in enumerate(traced[:single])]
    return write_files(folder, files)


@dataclass(frozen=True)
class Section:
    """A part of the report of a run: a figure, and tables of its numbers."""

    name: str  # of its files
    title: str
    figure: Figure
    tables: tuple[Table, ...]  # on the page, as Markdown and as LaTeX
    full: Table  # as CSV


def run_sections(records: Sequence[TraceRecord]) -> Iterator[Section]:
    """Averages that only some runs have: severed modules, heads, knockout, logit lens, attribution
    patching."""
    known = [record for record in records if record.known]
    if has_severed(known):
        comparison = severed_comparison(known)
        table = severed_table(comparison)
        yield Section("severed", "Severed graphs", severed_figure(comparison), (table,), table)
    if any(record.heads for record in known):
        heads = [average_heads(known, role) for role in (LAST, LAST_SUBJECT)]
        heads = [average for average in heads if average.n.any()]
        figure, table = average_heads_figure(heads), heads_table(heads, count=10)
        yield Section("heads", "Attention heads", figure, (table,), heads_table(heads))
    if any(record.knockout for record in known):
        knockout = average_knockout(known)
        figure, table = average_knockout_figure(knockout), knockout_table(knockout)
        full = knockout_table(knockout, every_layer=True)
        yield Section("knockout", "Attention knockout", figure, (table,), full)
    lens = {
        run: average_effects(known, f"lens {run}")
        for run in LENS_RUNS
        if any(run in record.lens for record in known)
    }
    if lens:
        table, full = lens_table(lens), lens_table(lens, every_layer=True)
        yield Section("lens", "Logit lens", average_lens(lens), (table,), full)
    if any(has_attribution(record) for record in known):
        agreements = compare_attribution(known)
        figure, table = attribution_figure(known, agreements), attribution_table(agreements)
        yield Section("attribution", "Attribution patching", figure, (table,), table)


def trace_page(record: TraceRecord) -> str:
    """The page of one fact: probabilities, a heat map for each kind of restoration, settings."""
    title = f"Trace: {record.fact.text}"
    return render("trace.html", title=title, trace=trace_values(record))


def trace_values(record: TraceRecord) -> dict[str, Any]:
    """What trace_body.html displays."""
    numbers = {
        "answer": display_token(record.answer),
        "clean run": _percent(record.clean),
        "corrupted run": _percent(record.corrupted),
    }
    if record.metric == "probability":
        numbers["total effect"] = _percent(total_effect(record))
    else:
        name = METRIC_NAMES.get(record.metric, record.metric)
        runs = {"clean run": record.clean_value, "corrupted run": record.corrupted_value}
        for run, value in runs.items():
            numbers[f"{name}, {run}"] = metric_text(record.metric, value)
    replacement = replaced_by(record)
    if replacement is None:
        numbers["noise samples"] = str(len(record.corrupted_samples))
    else:
        numbers["subject replaced by"] = display_token(replacement)
    figures = {
        "Attention knockout": (record.knockout, knockout_figure),
        "Severed graphs": (record.severed and "states" in record.restored, severed_detail),
        "Attribution patching": (
            any(k in record.restored for k in record.attribution),
            attribution_heatmaps,
        ),
        "Integrated gradients": (any(k in record.gradients for k in KINDS), gradients_figure),
    }
    return {
        "record": record,
        "caption": trace_caption(record),
        "numbers": numbers,
        "heatmaps": [*heatmaps(record), *lens_maps(record)],
        "heads": heads_map(record) if record.heads else None,
        "figures": {
            title: embed_figure(draw(record), title)
            for title, (present, draw) in figures.items()
            if present
        },
    }


def trace_caption(record: TraceRecord) -> str:
    """What was measured, where it differs from the paper: metric, direction, corruption."""
    parts = []
    if record.metric != "probability":
        parts.append(f"metric: {metric_label(record)}")
    if record.metric.startswith(NORMALISED):
        parts.append("0 is the corrupted run, 1 the clean run")
    if not restores(record):
        parts.append("corrupted cells are put into the clean run")
    replacement = replaced_by(record)
    if replacement is not None:
        parts.append(f"the subject is replaced by “{display_token(replacement)}”")
    return "; ".join(parts)


def trace_run_page(
    title: str,
    records: Iterable[TraceRecord],
    *,
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    normalise: bool = False,
    limit: int = 50,
) -> str:
    """The page of a run: average effects, then at most `limit` individual facts.

    `normalise` puts averages on the scale of `normalised_run`, and each fact on its own.
    """
    records = list(records)
    facts = sorted(records, key=lambda record: not record.restored)[:limit]
    if normalise:
        facts, records = [normalised(record) for record in facts], normalised_run(records)
    averages = average_kinds(records, pooling=pooling, paper_roles=paper_roles)
    numbers, average_values = {}, None
    if averages:
        first = next(iter(averages.values()))
        numbers = {
            "average total effect": first.total.text,
            "clean run": first.clean.text,
            "corrupted run": first.corrupted.text,
            "facts averaged": first.facts,
        }
        if first.metric != "probability":
            numbers["metric"] = METRIC_NAMES.get(first.metric, first.metric)
        figures = {
            "Average indirect effects by token role and layer": average_heatmaps,
            "Average indirect effects by layer, with 95 % confidence intervals": average_lines,
        }
        average_values = {
            "sentences": [peak_sentence(kind, effects) for kind, effects in averages.items()],
            "figures": [embed_figure(draw(averages), name) for name, draw in figures.items()],
            "tables": [summary_table(averages), effects_table(averages)],
        }
    return render(
        "trace_run.html",
        title=title,
        models=", ".join(dict.fromkeys(record.model for record in records)),
        numbers={**numbers, "facts skipped (not known)": sum(not r.known for r in records)},
        averages=average_values,
        sections=[
            {"title": x.title, "figure": embed_figure(x.figure, x.title), "tables": x.tables}
            for x in run_sections(records)
        ],
        facts=[
            {
                "record": record,
                "probabilities": f"{_percent(record.clean)} → {_percent(record.corrupted)}",
                "heatmaps": heatmaps(record),
            }
            for record in facts
        ],
        omitted=max(0, len(records) - limit),
        settings=records[0].settings if records else {},
    )


def peak_sentence(kind: str, effects: AverageEffects) -> str:
    """Where the average effect peaks at the last subject token and at the last token."""
    peaks = []
    if effects.measured("last subject token"):
        layer, effect = effects.peak("last subject token")
        above = "clearly" if effects.stands_out() else "not clearly"
        peaks.append(
            f"the effect at the last subject token peaks in layer {layer} "
            f"({effect.text}), {above} above the effect at the surrounding tokens"
        )
    if effects.measured("last token"):
        layer, effect = effects.peak("last token")
        peaks.append(f"the effect at the last token peaks in layer {layer} ({effect.text})")
    name = KIND_STYLES[kind].name
    return f"{name[0].upper()}{name[1:]}: {'; '.join(peaks) or 'no effect was measured'}."


def heatmaps(record: TraceRecord) -> list[dict[str, Any]]:
    """The heat maps of a trace, one for each kind of restoration, for the macro `heatmaps`."""
    tokens, values = token_labels(record), []
    for kind in kinds_of([record]):
        style = KIND_STYLES[kind]
        cells, effects = cell_table(record, kind), indirect_effects(record, kind)
        title = cell_title(record, style.label)
        view = _view("", cells, effects, style.colormap)
        values.append(_map(title, tokens, [view], _highest(record, tokens, cells, effects), record))
    return values


def lens_maps(record: TraceRecord) -> list[dict[str, Any]]:
    """The logit lens on each run; the pointer shows the most likely tokens of a state."""
    tokens, values = token_labels(record), []
    for run in (run for run in LENS_RUNS if has_table(record, f"lens {run}")):
        cells = cell_table(record, f"lens {run}")
        top = [
            [[[display_token(text), round(p, 4)] for text, p in cell] for cell in row]
            for row in record.lens[run].top
        ]
        caption = f"p({display_token(record.answer)}) and the most likely tokens of each state"
        view = _view("", cells, cells, LENS_COLORS)
        values.append(_map(f"Logit lens on the {run} run", tokens, [view], caption, None, top=top))
    return values


def heads_map(record: TraceRecord) -> dict[str, Any]:
    """Heads × layers, for the strongest token of each cell or for one token."""
    cells, effects = np.array(record.heads, dtype=float), head_effects(record)
    labels = [f"head {head}" for head in range(len(cells))]
    measured = np.where(np.isnan(effects), -np.inf, effects)
    strongest = measured.argmax(axis=1)[:, None]  # (head, 1, layer)
    best, best_effects = (np.take_along_axis(x, strongest, axis=1)[:, 0] for x in (cells, effects))
    views = [_view("the strongest token of each cell", best, best_effects, HEAD_COLORS)]
    views += [
        _view(f"{label} (token {i})", cells[:, i], effects[:, i], HEAD_COLORS)
        for i, label in enumerate(token_labels(record))
        if not np.isnan(cells[:, i]).all()
    ]
    caption = _highest(record, labels, best, best_effects)
    return _map(cell_title(record, "single heads"), labels, views, caption, record)


def _highest(
    record: TraceRecord,
    labels: Sequence[str],
    cells: Float[np.ndarray, "rows layers"],
    effects: Float[np.ndarray, "rows layers"],
) -> str:
    """Caption: the cell with the highest effect."""
    if np.isnan(effects).all():
        return "no cell was measured"
    row, layer = divmod(int(np.nanargmax(effects)), effects.shape[1])
    most = "highest" if effect_sign(record) > 0 else "lowest"
    value = metric_text(record.metric, float(cells[row, layer])).replace("%", "\u00a0%")
    return f"{metric_label(record)} is {most} at {labels[row]}, layer {layer}: {value}"


def _view(
    name: str,
    cells: Float[np.ndarray, "rows layers"],
    effects: Float[np.ndarray, "rows layers"],
    colormap: str,
) -> dict[str, Any]:
    """One heat map as a PNG with a pixel per cell, and its numbers."""
    high = np.max(effects, initial=1e-3, where=~np.isnan(effects))
    shades = np.ma.masked_invalid(np.clip(effects / high, 0, 1))
    png = io.BytesIO()
    colors = colormaps[colormap].with_extremes(bad=UNMEASURED)
    imsave(png, colors(shades, bytes=True), format="png")
    scores = [[None if np.isnan(x) else round(float(x), 5) for x in row] for row in cells]
    return {"name": name, "image": image_uri(png.getvalue()), "scores": scores}


def _map(
    title: str,
    rows: Sequence[str],
    views: Sequence[dict[str, Any]],
    caption: str,
    record: TraceRecord | None,
    **data: Any,
) -> dict[str, Any]:
    """A heat map for the macro `heatmaps`; `record` if its cells have effects in a metric."""
    layers = len(views[0]["scores"][0])
    ticks = layer_ticks(layers)[:: 1 if layers <= 12 else 2]
    effect = None
    if record is not None:
        effect = {"base": record.base_value, "sign": effect_sign(record)}
        if record.metric != "probability":
            effect["total"] = total_effect(record)
    probability = record is None or record.metric == "probability"
    return {
        "title": title,
        "rows": rows,
        "views": views,
        # Each layer's number is centred below its column, in percent of the width.
        "ticks": [(layer, 100 * (layer + 0.5) / layers) for layer in ticks],
        "caption": caption,
        "data": {
            "rows": rows,
            "views": views,
            "label": "p" if record is None or probability else metric_label(record),
            "percent": probability,
            "effect": effect,
            **data,
        },
    }


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"
