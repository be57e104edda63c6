"""Reports of causal traces: the page of one fact, and the page, figures and tables of a run."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.image import imsave

from factscope.analysis.effects import (
    AverageEffects,
    Pooling,
    average_kinds,
    baseline,
    cell_table,
    has_severed,
    kinds_of,
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
from factscope.report.html import embed_figure, image_uri, render, table_files, write_files
from factscope.report.labels import KIND_STYLES, display_token, token_labels
from factscope.report.style import highest_cell, layer_ticks
from factscope.report.tables import (
    as_csv,
    effects_table,
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
    files: list[tuple[str, str | Figure]] = [("index.html", page)]
    if averages:
        files += [
            ("average_heatmaps", average_heatmaps(averages)),
            ("average_lines", average_lines(averages)),
            *table_files("summary", summary_table(averages)),
            *table_files("peaks", effects_table(averages)),
            ("effects.csv", as_csv(effects_table(averages, every_layer=True))),
        ]
    if has_severed(records):
        comparison = severed_comparison(records)
        files += [("severed", severed_figure(comparison))]
        files += table_files("severed", severed_table(comparison))
    traced = [record for record in records if record.restored]
    files += [(f"facts/{i:04d}", traces_figure(r)) for i, r in enumerate(traced[:single])]
    return write_files(folder, files)


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
    numbers, average_values = {}, None
    if averages:
        first = next(iter(averages.values()))
        numbers = {
            "average total effect": first.total.percent,
            "clean run": first.clean.percent,
            "corrupted run": first.corrupted.percent,
            "facts averaged": first.facts,
        }
        figures = {
            "Average indirect effects by token role and layer": average_heatmaps,
            "Average indirect effects by layer, with 95 % confidence intervals": average_lines,
        }
        average_values = {
            "sentences": [peak_sentence(kind, effects) for kind, effects in averages.items()],
            "figures": [embed_figure(draw(averages), name) for name, draw in figures.items()],
            "tables": [summary_table(averages), effects_table(averages)],
        }
    severed = severed_figure(severed_comparison(records)) if has_severed(records) else None
    traced_first = sorted(records, key=lambda record: not record.restored)
    return render(
        "trace_run.html",
        title=title,
        models=", ".join(dict.fromkeys(record.model for record in records)),
        numbers={**numbers, "facts skipped (not known)": sum(not r.known for r in records)},
        averages=average_values,
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


def peak_sentence(kind: str, effects: AverageEffects) -> str:
    """Where the average effect peaks at the last subject token and at the last token."""
    peaks = []
    if effects.measured("last subject token"):
        layer, effect = effects.peak("last subject token")
        above = "clearly" if effects.stands_out() else "not clearly"
        peaks.append(
            f"the effect at the last subject token peaks in layer {layer} "
            f"({effect.percent}), {above} above the effect at the surrounding tokens"
        )
    if effects.measured("last token"):
        layer, effect = effects.peak("last token")
        peaks.append(f"the effect at the last token peaks in layer {layer} ({effect.percent})")
    name = KIND_STYLES[kind].name
    return f"{name[0].upper()}{name[1:]}: {'; '.join(peaks) or 'no effect was measured'}."


def heatmaps(record: TraceRecord) -> list[dict[str, Any]]:
    """The heat maps of a trace, one for each kind of restoration, for the macro `heatmaps`."""
    tokens, values = token_labels(record), []
    for kind in kinds_of([record]):
        cells, low = cell_table(record, kind), baseline(record, kind)
        caption = "no cell was measured"
        if not np.isnan(cells).all():
            token, layer = np.unravel_index(np.nanargmax(cells), cells.shape)
            caption = (
                f"p({display_token(record.answer)}) is highest at {tokens[token]}, layer {layer}: "
                f"{100 * cells[token, layer]:.1f}\u00a0%"
            )
        # A PNG with one pixel per cell.
        shades = np.ma.masked_invalid(
            np.clip((cells - low) / (highest_cell(cells, low) - low), 0, 1)
        )
        colors = colormaps[KIND_STYLES[kind].colormap].with_extremes(bad=UNMEASURED)
        png = io.BytesIO()
        imsave(png, colors(shades, bytes=True), format="png")
        layers = cells.shape[1]
        ticks = layer_ticks(layers)[:: 1 if layers <= 12 else 2]
        scores = [[None if np.isnan(x) else round(float(x), 5) for x in row] for row in cells]
        values.append(
            {
                "title": f"Impact of restoring {KIND_STYLES[kind].label}",
                "tokens": tokens,
                "image": image_uri(png.getvalue()),
                # Each layer's number is centred below its column, in percent of the width.
                "ticks": [(layer, 100 * (layer + 0.5) / layers) for layer in ticks],
                "caption": caption,
                "data": {"tokens": tokens, "corrupted": round(low, 5), "scores": scores},
            }
        )
    return values


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %"
