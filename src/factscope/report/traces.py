"""Reports of causal traces: the page of one fact, and the page, figures and tables of a run."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.image import imsave

from factscope.analysis.effects import (
    AverageEffects,
    Pooling,
    average_kinds,
    baseline,
    cell_table,
    early_site,
    has_severed,
    kinds_of,
    late_site,
    severed_comparison,
)
from factscope.errors import BadRecord
from factscope.records import KINDS, TraceRecord
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    gradients_figure,
    severed_detail,
    severed_figure,
    traces_figure,
)
from factscope.report.html import embed_figure, image_uri, render
from factscope.report.labels import KIND_STYLES, display_token, token_labels
from factscope.report.style import layer_ticks
from factscope.report.tables import (
    all_effects_table,
    as_csv,
    effects_table,
    severed_table,
    summary_table,
)
from factscope.report.write import write_figure, write_table, write_texts

UNMEASURED = "#e1e1e4"
"""Colour of heat map cells without a measurement."""


def write_trace_report(
    records: Iterable[TraceRecord],
    folder: Path,
    *,
    title: str = "Causal tracing",
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    single: int = 10,
) -> list[Path]:
    """Write the report of a run and return its files, the page first.

    The first `single` traced facts get a figure each; the page lists more of them. effects.csv
    holds every number of the figures of average effects.
    """
    records = list(records)
    if not records:
        raise BadRecord("there are no records to report on; trace some facts first")
    averages = average_kinds(records, pooling=pooling, paper_roles=paper_roles)
    page = trace_run_page(title, records, pooling=pooling, paper_roles=paper_roles)
    files = write_texts(folder, {"index.html": page})
    if averages:
        files += write_figure(average_heatmaps(averages), folder / "average_heatmaps")
        files += write_figure(average_lines(averages), folder / "average_lines")
        files += write_table(summary_table(averages), folder / "summary")
        files += write_table(effects_table(averages), folder / "peaks")
        files += write_texts(folder, {"effects.csv": as_csv(all_effects_table(averages))})
    if has_severed(records):
        comparison = severed_comparison(records)
        files += write_figure(severed_figure(comparison), folder / "severed")
        files += write_table(severed_table(comparison), folder / "severed")
    traced = [record for record in records if record.restored]
    for i, record in enumerate(traced[:single]):
        files += write_figure(traces_figure(record), folder / "facts" / f"{i:04d}")
    return files


def trace_page(record: TraceRecord) -> str:
    """The page of one fact: probabilities, a heat map for each kind of restoration, settings."""
    title = f"Trace: {record.fact.text}"
    return render("trace.html", title=title, trace=trace_values(record))


def trace_values(record: TraceRecord) -> dict[str, Any]:
    """What trace_body.html displays."""
    severed = record.severed and "states" in record.restored
    gradients = any(kind in record.gradients for kind in KINDS)
    return {
        "record": record,
        "numbers": {
            "answer": display_token(record.answer),
            "clean run": _percent(record.clean),
            "corrupted run": _percent(record.corrupted),
            "total effect": _percent(record.total_effect),
            "noise samples": len(record.corrupted_samples),
        },
        "heatmaps": heatmaps(record),
        "severed": embed_figure(severed_detail(record), "Severed graphs") if severed else None,
        "gradients": (
            embed_figure(gradients_figure(record), "Integrated gradients") if gradients else None
        ),
    }


def trace_run_page(
    title: str,
    records: Iterable[TraceRecord],
    *,
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    limit: int = 50,
) -> str:
    """The page of a run: average effects, then at most `limit` individual facts."""
    records = list(records)
    averages = average_kinds(records, pooling=pooling, paper_roles=paper_roles)
    traced_first = sorted(records, key=lambda record: not record.restored)
    severed = severed_figure(severed_comparison(records)) if has_severed(records) else None
    return render(
        "trace_run.html",
        title=title,
        models=", ".join(dict.fromkeys(record.model for record in records)),
        numbers=_run_numbers(records, averages),
        averages=_average_values(averages),
        severed=severed and embed_figure(severed, "Severed graphs"),
        facts=[
            {
                "record": record,
                "probabilities": f"{_percent(record.clean)} → {_percent(record.corrupted)}",
                "heatmaps": heatmaps(record),
            }
            for record in traced_first[:limit]
        ],
        omitted=max(0, len(records) - limit),
        settings=records[0].settings if records else {},
    )


def _run_numbers(
    records: Sequence[TraceRecord], averages: Mapping[str, AverageEffects]
) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    if averages:
        first = next(iter(averages.values()))
        numbers = {
            "average total effect": first.total.percent,
            "clean run": first.clean.percent,
            "corrupted run": first.corrupted.percent,
            "facts averaged": first.facts,
        }
    return {**numbers, "facts skipped (not known)": sum(not record.known for record in records)}


def _average_values(averages: Mapping[str, AverageEffects]) -> dict[str, Any] | None:
    if not averages:
        return None
    return {
        "sentences": [peak_sentence(kind, effects) for kind, effects in averages.items()],
        "figures": [
            embed_figure(
                average_heatmaps(averages), "Average indirect effects by token role and layer"
            ),
            embed_figure(
                average_lines(averages),
                "Average indirect effects by layer, with 95 % confidence intervals",
            ),
        ],
        "tables": [summary_table(averages), effects_table(averages)],
    }


def peak_sentence(kind: str, effects: AverageEffects) -> str:
    """Where the average effect peaks at the last subject token and at the last token."""
    peaks = []
    if effects.measured("last subject token"):
        early = early_site(effects)
        above = "clearly" if early.stands_out else "not clearly"
        peaks.append(
            f"the effect at the last subject token peaks in layer {early.layer} "
            f"({early.effect.percent}), {above} above the effect at the surrounding tokens"
        )
    if effects.measured("last token"):
        late = late_site(effects)
        peaks.append(
            f"the effect at the last token peaks in layer {late.layer} ({late.effect.percent})"
        )
    name = KIND_STYLES[kind].name
    return f"{name[0].upper()}{name[1:]}: {'; '.join(peaks) or 'no effect was measured'}."


def heatmaps(record: TraceRecord) -> list[dict[str, Any]]:
    """The heat maps of a trace, one for each kind of restoration, for the macro `heatmap`."""
    return [_heatmap(record, kind) for kind in kinds_of([record])]


def _heatmap(record: TraceRecord, kind: str) -> dict[str, Any]:
    cells, tokens = cell_table(record, kind), token_labels(record)
    layers = cells.shape[1]
    ticks = layer_ticks(layers)[:: 1 if layers <= 12 else 2]
    if np.isnan(cells).all():
        caption = "no cell was measured"
    else:
        token, layer = np.unravel_index(np.nanargmax(cells), cells.shape)
        caption = (
            f"p({display_token(record.answer)}) is highest at {tokens[token]}, layer {layer}: "
            f"{100 * cells[token, layer]:.1f}\u00a0%"
        )
    return {
        "title": f"Impact of restoring {KIND_STYLES[kind].label}",
        "tokens": tokens,
        "image": image_uri(_heatmap_png(record, kind)),
        # Each layer's number is centred below its column; positions are percentages of the width.
        "ticks": [(layer, 100 * (layer + 0.5) / layers) for layer in ticks],
        "caption": caption,
        "data": {
            "tokens": tokens,
            "corrupted": round(baseline(record, kind), 5),
            "scores": [[None if np.isnan(x) else round(float(x), 5) for x in row] for row in cells],
        },
    }


def _heatmap_png(record: TraceRecord, kind: str) -> bytes:
    """A PNG with one pixel per cell; colours range from the corrupted score to the highest one."""
    cells, low = cell_table(record, kind), baseline(record, kind)
    high = np.max(cells, initial=low + 1e-3, where=~np.isnan(cells))
    shades = np.ma.masked_invalid(np.clip((cells - low) / (high - low), 0, 1))
    colors = colormaps[KIND_STYLES[kind].colormap].with_extremes(bad=UNMEASURED)
    buffer = io.BytesIO()
    imsave(buffer, colors(shades, bytes=True), format="png")
    return buffer.getvalue()


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"
