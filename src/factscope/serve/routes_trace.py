"""Traces: stream the cells of a trace while it is computed; download figures and records."""

import json
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial, reduce
from operator import add
from typing import Any

from fastapi import APIRouter, Request, Response

from factscope.analysis.attention import knockout_changes
from factscope.analysis.attribution import compare_attribution, has_attribution, over_all_layers
from factscope.analysis.effects import (
    effect_sign,
    normalised,
    strongest_subject_cell,
    total_effect,
    trace_warnings,
)
from factscope.editing.per_row import edited
from factscope.errors import BadSetting, NotFound
from factscope.lm.generate import top_next_tokens
from factscope.lm.tokens import encode, encode_fact
from factscope.records import Lens, TraceRecord
from factscope.report.figures import (
    attribution_heatmaps,
    gradients_figure,
    heads_figure,
    knockout_figure,
    lens_figure,
    severed_detail,
    traces_figure,
)
from factscope.report.labels import (
    GROUP_NAMES,
    attribution_method,
    display_token,
    metric_label,
    printable,
    token_labels,
)
from factscope.report.style import FIGURE_FORMATS, figure_bytes
from factscope.report.traces import trace_page
from factscope.serve.examples import suggest_replacement
from factscope.serve.jobs import Job
from factscope.serve.schemas import PromptBody, TraceBody
from factscope.serve.security import attachment
from factscope.serve.sessions import TABLE_FIELDS, ServerState
from factscope.tracing.stream import CellUpdate, stream_trace

TOP_TOKENS = 5
"""Most likely next tokens that are shown."""
FIGURES = {
    "figure": traces_figure, "severed": severed_detail, "gradients": gradients_figure,
    "lens": lens_figure, "heads": heads_figure, "knockout": knockout_figure,
    "attribution": attribution_heatmaps,
}  # fmt: skip
FILES = ["record.json", "page.html", *(f"{f}.{kind}" for f in FIGURES for kind in FIGURE_FORMATS)]


def trace_routes(state: ServerState) -> APIRouter:
    """Routes of traces."""
    routes = APIRouter(prefix="/api", tags=["trace"])

    @routes.post("/traces", response_class=Response)
    async def create_trace(body: TraceBody, request: Request) -> Response:
        """Trace a fact. Streams events, one JSON object per line."""
        session, tables = request.state.session, body.table_names()
        fact, settings = body.fact(state.limits), body.tracing(state.limits, tables)
        edits = [stored.edit for stored in state.sessions.select(session, body.edits)]
        of_session = [session, *body.edits] if body.edits else []
        answer, foil = body.traced_answer(state.limits), body.traced_foil(state.limits)
        if settings.corruption.replaces_tokens and fact.replacement is None:
            # If there is none, the trace says so.
            fact = replace(fact, replacement=suggest_replacement(state.lm, fact))
        name = state.traces.name(fact, settings, of_session, answer, foil)
        missing = partial(state.traces.missing, name, tables, settings, body.token)
        cached = state.traces.get(name)
        if cached is not None and not missing():
            line = json.dumps(record_event(name, cached), allow_nan=False) + "\n"
            return Response(line, media_type="application/x-ndjson")

        def work(job: Job) -> None:
            length = len(encode_fact(state.lm, fact)[0])
            state.limits.check_tokens(length)
            token = length - 1 if body.token is None else body.token
            if token >= length:
                raise BadSetting(f"token is {token}; the prompt has the tokens 0 to {length - 1}")
            if answer is not None:
                tokens = len(encode(state.lm, f"{fact.text} {answer}"))
                state.limits.check_tokens(tokens, "prompt and answer have")
            record, only = state.traces.get(name), missing()
            if record is None or only:
                settings = body.tracing(state.limits, only)
                record = None
                with edited(state.lm, [reduce(add, edits)]) if edits else nullcontext():
                    for update in stream_trace(
                        state.lm, fact, settings, memory=state.trace_memory, only=only,
                        head_tokens=[token], progress=job.progress, answer=answer, foil=foil,
                    ):  # fmt: skip
                        job.check()
                        if isinstance(update, CellUpdate):
                            job.send({"event": "cells", **asdict(update)})
                            continue
                        if record is None:
                            job.send({"event": "baseline", **baseline(update)})
                        record = update
                assert record is not None
                record = state.traces.store(name, record)
            job.send(record_event(name, record))

        return state.stream(request, work)

    @routes.get("/traces/{name}/{file}", response_class=Response)
    async def download_trace(name: str, file: str, normalise: bool = False) -> Response:
        """A trace as a figure or a page, with raw or normalised values, or as a record."""
        record = state.traces.get(name)
        if record is None:
            raise NotFound(f"the trace {name[:40]!r} is no longer stored; trace the fact again")
        content = await state.reports.run(file_content, record, file, normalise)
        return attachment(content, f"trace-{name[:8]}-{file}")

    latest: dict[str, Job] = {}  # of each session

    @routes.post("/next-tokens")
    async def next_tokens(body: PromptBody, request: Request) -> dict[str, Any]:
        """A prompt's tokens (spans of characters), and the most likely next tokens.

        A newer request of the same session replaces one that still waits.
        """
        text, session = state.limits.check_text("prompt", body.prompt), request.state.session
        prompt = encode(state.lm, text)
        state.limits.check_tokens(len(prompt))
        if session in latest:
            state.queue.cancel(latest[session])

        top: list[tuple[str, float]] = []
        latest[session] = job = state.queue.submit(
            session, lambda job: top.extend(top_next_tokens(state.lm, text, TOP_TOKENS))
        )
        try:
            await state.queue.finish(job)
        finally:
            if latest.get(session) is job:
                del latest[session]
        spans = [{"start": start, "stop": stop} for start, stop in prompt.offsets]
        return {
            "tokens": [span for span in spans if span["start"] < span["stop"]],
            "next": [{"token": display_token(token), "p": p} for token, p in top],
        }

    return routes


def baseline(record: TraceRecord) -> dict[str, Any]:
    """The results of the clean and the corrupted run.

    `replacement` is the subject of the corrupted run, or None with noise. `sign` is 1 if effects
    raise the metric, -1 if they lower it.
    """
    replaced = record.settings["corruption"]["distribution"] == "tokens"
    return {
        "replacement": printable(record.fact.replacement or "") if replaced else None,
        "labels": token_labels(record),
        "subject": record.subject,
        "answer": display_token(record.answer),
        "clean": record.clean,
        "corrupted": record.corrupted,
        "metric": record.metric,
        "metric_label": metric_label(record),
        "clean_value": record.clean_value,
        "corrupted_value": record.corrupted_value,
        "base_value": record.base_value,
        "total_effect": total_effect(record),
        "sign": effect_sign(record),
        "direction": record.direction,
        "samples": len(record.corrupted_samples),
        "warnings": [printable(warning) for warning in trace_warnings(record)],
    }


def record_event(name: str, record: TraceRecord) -> dict[str, Any]:
    """The last event of a trace: all results, and the name for downloads.

    `strongest` is the subject's cell with the highest effect in each table.
    """
    tables = {field: getattr(record, field) for field in TABLE_FIELDS}
    tables["lens"] = {run: lens_to_dict(lens) for run, lens in record.lens.items()}
    tables["heads"] = heads_by_token(record)
    tables["knockout"] = knockout_to_dict(record) if record.knockout else None
    strongest = {
        kind: dict(zip(("token", "layer", "effect"), cell, strict=True))
        for kind, cell in ((kind, strongest_subject_cell(record, kind)) for kind in record.restored)
    }
    return {
        "event": "record", "name": name, **baseline(record), "tables": tables,
        "strongest": strongest, "agreement": agreement(record),
    }  # fmt: skip


def lens_to_dict(lens: Lens) -> dict[str, Any]:
    """The answer's probability, and the most likely tokens, of every state."""
    top = [
        [[{"token": display_token(token), "p": p} for token, p in cell] for cell in row]
        for row in lens.top
    ]
    return {"answer": lens.answer, "top": top}


def heads_by_token(record: TraceRecord) -> dict[int, list[Any]]:
    """Head × layer at each token whose heads were restored."""
    return {
        token: [table[token] for table in record.heads]
        for token in range(len(record.tokens))
        if record.heads and record.heads[0][token][0] is not None
    }


def knockout_to_dict(record: TraceRecord) -> dict[str, Any]:
    """The metric with attention to each group of tokens blocked, and how it changes."""
    changes = {group: x.tolist() for group, x in knockout_changes(record).items()}
    return {
        "window": record.settings["knockout_window"],
        "values": record.knockout,
        "changes": {group: [finite(x) for x in row] for group, row in changes.items()},
        "names": {group: GROUP_NAMES[group] for group in changes},
    }


def agreement(record: TraceRecord) -> dict[str, Any]:
    """How well estimates agree with the measured cells of each kind."""
    if not has_attribution(record):
        return {}
    found = over_all_layers(compare_attribution([replace(record, known=True)]))
    return {
        a.kind: {
            "method": attribution_method(record), "pearson": finite(a.pearson.mean),
            "spearman": finite(a.spearman.mean), "top": a.top,
            "missed": round(a.missed.mean * a.top), "to_verify": round(a.to_verify.mean),
            "cells": round(a.cells),
        }
        for a in found
    }  # fmt: skip


def finite(x: float) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return x if math.isfinite(x) else None


def file_content(record: TraceRecord, file: str, normalise: bool) -> bytes:
    """A trace as one of `FILES`; records are never normalised."""
    if file not in FILES:
        raise NotFound(f"a trace has no file {file[:40]!r}; choose from {', '.join(FILES)}")
    if file == "record.json":
        return (record.to_json() + "\n").encode(errors="replace")
    record = normalised(record) if normalise else record
    if file == "page.html":
        return trace_page(record).encode(errors="replace")
    figure, _, kind = file.partition(".")
    return figure_bytes(FIGURES[figure](record), kind)
