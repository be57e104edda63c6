"""One self-contained HTML page for a trace or for a run: no request leaves it.

Figures are embedded, style and script are inline, and the page's own policy forbids anything
else. All text that comes from records is escaped.

A trace as a heat map in HTML: an image of one pixel a cell, and the numbers behind it.
"""

import base64
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from string import Template
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
    early_site,
    has_severed,
    kinds_of,
    late_site,
    severed_comparison,
)
from factscope.records import KINDS, TraceRecord
from factscope.report.figures import (
    average_heatmaps,
    average_lines,
    gradients_figure,
    severed_detail,
    severed_figure,
)
from factscope.report.style import (
    KIND_STYLES,
    display_token,
    figure_bytes,
    flat,
    layer_ticks,
    setting_text,
    token_labels,
    visible,
)
from factscope.report.tables import Table, as_html, effects_table, summary_table

__all__ = [
    "heat_html",
    "image_uri",
    "run_page",
    "trace_page",
]

UNMEASURED = "#e1e1e4"


def heat_html(record: TraceRecord, kind: str) -> str:
    """The heat map; page.js lets each cell tell its token, layer and probability."""
    cells = cell_table(record, kind)
    title = f"Impact of restoring {KIND_STYLES[kind].what}"
    tokens = "".join(f"<li>{html.escape(label)}</li>" for label in token_labels(record))
    return (
        f'<figure class="heat"><h3>{title}</h3>\n'
        f'<div class="map"><ul class="tokens">{tokens}</ul>\n'
        f'<div class="cells" tabindex="0" role="img" aria-label="{title}: tokens × layers">'
        f'<img alt="" src="{image_uri(pixels(record, kind))}"></div>\n'
        f'<div class="layers">{axis(cells.shape[1])}</div></div>\n'
        f"<output>{html.escape(caption(record, cells))}</output>\n"
        f"{embedded(cell_data(record, cells, kind))}</figure>\n"
    )


def pixels(record: TraceRecord, kind: str) -> bytes:
    """A PNG with one pixel for each cell, from the corrupted score up to the highest."""
    cells, low = cell_table(record, kind), baseline(record, kind)
    high = np.max(cells, initial=low + 1e-3, where=~np.isnan(cells))
    shades = np.ma.masked_invalid(np.clip((cells - low) / (high - low), 0, 1))
    colors = colormaps[KIND_STYLES[kind].colormap].with_extremes(bad=UNMEASURED)
    buffer = io.BytesIO()
    imsave(buffer, colors(shades, bytes=True), format="png")
    return buffer.getvalue()


def image_uri(png: bytes) -> str:
    """A PNG as the address of an image."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def axis(layers: int) -> str:
    """Layer numbers, each below the middle of its column."""
    ticks = layer_ticks(layers)[:: 1 if layers <= 12 else 2]
    return "".join(
        f'<span style="left:{100 * (layer + 0.5) / layers:.2f}%">{layer}</span>' for layer in ticks
    )


def caption(record: TraceRecord, cells: np.ndarray) -> str:
    """The strongest cell, shown until another is pointed at."""
    if np.isnan(cells).all():
        return "no cell was measured"
    token, layer = np.unravel_index(np.nanargmax(cells), cells.shape)
    answer, name = display_token(record.answer), token_labels(record)[token]
    score = f"{100 * cells[token, layer]:.1f}\u00a0%"
    return f"p({answer}) is highest at {name}, layer {layer}: {score}"


def cell_data(record: TraceRecord, cells: np.ndarray, kind: str) -> dict[str, Any]:
    """What page.js reads."""
    return {
        "tokens": token_labels(record),
        "corrupted": round(baseline(record, kind), 5),
        "scores": [[None if np.isnan(x) else round(float(x), 5) for x in row] for row in cells],
    }


def embedded(data: dict[str, Any]) -> str:
    """Data for a script; "<" is written as an escape, so that no token can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
$css</style>
</head>
<body>
$body
<footer>Made by factscope.$note</footer>
<script>
$js</script>
</body>
</html>
""")

FIGURE_DPI, CSS_DPI = 180, 100
"""Dots an inch of an embedded figure, and of the page that shows it."""


def trace_page(record: TraceRecord) -> str:
    """The page of one fact: its three runs, a heat map for each kind, how it was traced."""
    body = [*trace_body(record), settings_html(record.settings)]
    return page(f"Trace: {record.fact.text}", body)


def trace_body(record: TraceRecord) -> list[str]:
    """What that page says, but for the settings."""
    body = [
        f"<h1>{fact_html(record)}</h1>",
        f'<p class="soft">Causal trace of {html.escape(record.model)}{known_html(record)}</p>',
        numbers_html(trace_numbers(record)),
        heats_html(record),
    ]
    if record.severed and "states" in record.restored:
        body += ["<h2>Severed graphs</h2>", figure_html(severed_detail(record), "Severed graphs")]
    if any(kind in record.gradients for kind in KINDS):
        body += [
            "<h2>Integrated gradients</h2>",
            figure_html(gradients_figure(record), "Gradients"),
        ]
    return body


def run_page(
    title: str,
    records: Iterable[TraceRecord],
    *,
    pooling: Pooling = "facts",
    paper_roles: bool = False,
    limit: int = 50,
) -> str:
    """The page of a run: average effects, then the facts one by one, at most `limit` of them."""
    everyone = list(records)
    averages = average_kinds(everyone, pooling=pooling, paper_roles=paper_roles)
    models = ", ".join(dict.fromkeys(record.model for record in everyone))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">Causal traces of {html.escape(models) or "no model"}</p>',
        numbers_html(run_numbers(everyone, averages)),
        *(averages_html(averages) if averages else ["<p>No known fact to average.</p>"]),
    ]
    if has_severed(everyone):
        figure = severed_figure(severed_comparison(everyone))
        body += ["<h2>Severed graphs</h2>", figure_html(figure, "Severed graphs")]
    body += [facts_html(everyone, limit), settings_html(everyone[0].settings if everyone else {})]
    return page(title, body)


TRACED = "* marks the subject's tokens; layers are counted from 0."


def page(title: str, body: Sequence[str], note: str = TRACED) -> str:
    """The whole page around its body; the note explains its signs."""
    return PAGE.substitute(
        title=html.escape(clean(title)), css=asset("page.css"), js=asset("page.js"),
        body="\n".join(body), note=html.escape(f" {note}" if note else ""),
    )  # fmt: skip


def asset(name: str) -> str:
    """A file beside this one."""
    return resources.files("factscope.report").joinpath(name).read_text(encoding="utf-8")


def averages_html(averages: Mapping[str, AverageEffects]) -> list[str]:
    """Average effects as figures, sentences and tables."""
    tables = (summary_table(averages), effects_table(averages))
    return [
        "<h2>Average indirect effects</h2>",
        *(f"<p>{html.escape(sites_text(kind, a))}</p>" for kind, a in averages.items()),
        figure_html(average_heatmaps(averages), "Average indirect effects by token role and layer"),
        figure_html(average_lines(averages), "The same as lines, with 95 % intervals"),
        f'<div class="tables">{"".join(map(scrollable, tables))}</div>',
    ]


def sites_text(kind: str, effects: AverageEffects) -> str:
    """The early and late site in words."""
    sentences = []
    if effects.measured("last subject token"):
        early = early_site(effects)
        apart = "above" if early.stands_out else "not clearly above"
        sentences.append(
            f"the last subject token peaks at layer {early.layer} with {early.effect.percent}, "
            f"{apart} the tokens around it"
        )
    if effects.measured("last token"):
        late = late_site(effects)
        sentences.append(f"the last token at layer {late.layer} with {late.effect.percent}")
    name = KIND_STYLES[kind].name
    return f"{name[0].upper()}{name[1:]}: {'; '.join(sentences) or 'nothing was measured'}."


def trace_numbers(record: TraceRecord) -> dict[str, str]:
    """The three runs of one fact."""
    return {
        "answer": display_token(record.answer),
        "clean run": f"{100 * record.clean:.1f} %",
        "corrupted run": f"{100 * record.corrupted:.1f} %",
        "total effect": f"{100 * record.total_effect:.1f} %",
        "noise samples": str(len(record.corrupted_samples)),
    }


def run_numbers(
    records: Sequence[TraceRecord], averages: Mapping[str, AverageEffects]
) -> dict[str, str]:
    """A run in a few numbers."""
    skipped = {"skipped, not known": str(sum(not record.known for record in records))}
    if not averages:
        return skipped
    first = next(iter(averages.values()))
    return {
        "average total effect": first.total.percent,
        "clean run": first.clean.percent,
        "corrupted run": first.corrupted.percent,
        "facts averaged": str(first.facts),
        **skipped,
    }


def numbers_html(numbers: Mapping[str, str]) -> str:
    """A row of named numbers."""
    items = (
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
        for name, value in numbers.items()
    )
    return f'<dl class="numbers">{"".join(items)}</dl>'


def facts_html(records: Sequence[TraceRecord], limit: int) -> str:
    """The facts one by one, folded, those that were traced first."""
    more = len(records) - limit
    records = sorted(records, key=lambda record: not record.restored)
    rest = f'<p class="soft">{more} more facts are in the records.</p>' if more > 0 else ""
    facts = "\n".join(map(fold_html, records[:limit]))
    return f'<h2>Single facts</h2>\n<div class="small">{facts}</div>\n{rest}'


def fold_html(record: TraceRecord) -> str:
    """One fact with its small heat maps, folded."""
    runs = f"{100 * record.clean:.1f} % → {100 * record.corrupted:.1f} %"
    return (
        f"<details><summary>{fact_html(record)} "
        f'<span class="tag">{runs}</span>{known_html(record)}</summary>\n'
        f"{heats_html(record)}</details>"
    )


def heats_html(record: TraceRecord) -> str:
    """The heat maps of every kind that was restored."""
    return f'<div class="heats">{"".join(heat_html(record, k) for k in kinds_of([record]))}</div>'


def fact_html(record: TraceRecord) -> str:
    """The prompt with its subject marked, and the answer."""
    start, stop = record.fact.subject_span
    text, answer = record.fact.text, html.escape(display_token(record.answer))
    return (
        f'{escaped(text[:start])}<span class="subject">{escaped(text[start:stop])}</span>'
        f'{escaped(text[stop:])} <span class="answer">{answer}</span>'
    )


def known_html(record: TraceRecord) -> str:
    """A tag for a fact that the model does not know."""
    if record.known:
        return ""
    target = f", not {escaped(record.fact.target)}" if record.fact.target else ""
    answer = html.escape(display_token(record.answer))
    return f' <span class="tag">not known: it says {answer}{target}</span>'


def settings_html(settings: Mapping[str, Any], title: str = "How it was traced") -> str:
    """How it was made."""
    if not settings:
        return ""
    rows = tuple((name, setting_text(value)) for name, value in flat(settings))
    table = scrollable(Table(title, ("setting", "value"), rows))
    return f'<h2>Settings</h2><div class="settings">{table}</div>'


def figure_html(fig: Figure, description: str) -> str:
    """A figure, embedded, on a light plate."""
    source = image_uri(figure_bytes(fig, "png", FIGURE_DPI))
    width = round(CSS_DPI * fig.get_figwidth())
    image = f'<img alt="{html.escape(description)}" width="{width}" src="{source}">'
    return f'<div class="plate">{image}</div>'


def scrollable(table: Table) -> str:
    """A table that scrolls where it does not fit."""
    return f'<div class="scroll">{as_html(table)}</div>'


def escaped(text: str) -> str:
    """Text of a record for the page."""
    return html.escape(clean(text))


def clean(text: str) -> str:
    """Text without characters that have no place in a page."""
    return "".join(visible(character) for character in text)
