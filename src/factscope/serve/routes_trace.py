"""Traces: stream the cells of a trace while it is computed; download figures and records."""

import json
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from factscope.errors import NotFound
from factscope.lm.tokens import encode_fact
from factscope.records import TraceRecord
from factscope.report.figures import gradients_figure, severed_detail, traces_figure
from factscope.report.labels import display_token, token_labels
from factscope.report.style import FIGURE_FORMATS, figure_bytes
from factscope.report.traces import trace_page
from factscope.serve.jobs import Job
from factscope.serve.schemas import TraceBody
from factscope.serve.security import attachment
from factscope.serve.sessions import TABLE_FIELDS, ServerState
from factscope.tracing.stream import CellUpdate, stream_trace

FIGURES = {"figure": traces_figure, "severed": severed_detail, "gradients": gradients_figure}
FILES = ["record.json", "page.html", *(f"{f}.{kind}" for f in FIGURES for kind in FIGURE_FORMATS)]


def trace_routes(state: ServerState) -> APIRouter:
    """Routes of traces."""
    routes = APIRouter(prefix="/api", tags=["trace"])

    @routes.post("/traces", response_class=Response)
    async def create_trace(body: TraceBody, request: Request) -> Response:
        """Trace a fact. Streams events, one JSON object per line."""
        fact, settings = body.fact(state.limits), body.tracing(state.limits)
        name, tables = state.traces.name(fact, settings), body.table_names()
        cached = state.traces.get(name)
        if cached is not None and all(kind in getattr(cached, field) for field, kind in tables):
            line = json.dumps(record_event(name, cached), allow_nan=False) + "\n"
            return Response(line, media_type="application/x-ndjson")

        def work(job: Job) -> None:
            state.limits.check_tokens(len(encode_fact(state.lm, fact)[0]))
            record: TraceRecord | None = None
            for update in stream_trace(
                state.lm, fact, settings, memory=state.trace_memory, only=tables,
                progress=job.progress,
            ):  # fmt: skip
                job.check()
                if isinstance(update, CellUpdate):
                    job.send({"event": "cells", **asdict(update)})
                    continue
                if record is None:
                    job.send({"event": "baseline", **baseline(update)})
                record = update
            assert record is not None
            job.send(record_event(name, state.traces.store(name, record)))

        return state.stream(request, work)

    @routes.get("/traces/{name}/{file}", response_class=Response)
    def download_trace(name: str, file: str) -> Response:
        """A trace as a figure, a page or a record."""
        record = state.traces.get(name)
        if record is None:
            raise NotFound(f"the trace {name[:40]!r} is no longer stored; trace the fact again")
        with state.report_lock:
            return attachment(file_content(record, file), f"trace-{name[:8]}-{file}")

    return routes


def baseline(record: TraceRecord) -> dict[str, Any]:
    """The results of the clean and the corrupted run."""
    return {
        "labels": token_labels(record),
        "subject": record.subject,
        "answer": display_token(record.answer),
        "clean": record.clean,
        "corrupted": record.corrupted,
        "samples": len(record.corrupted_samples),
    }


def record_event(name: str, record: TraceRecord) -> dict[str, Any]:
    """The last event of a trace: all results, and the name for downloads."""
    tables = {field: getattr(record, field) for field in TABLE_FIELDS}
    return {"event": "record", "name": name, **baseline(record), "tables": tables}


def file_content(record: TraceRecord, file: str) -> bytes:
    """A trace as one of `FILES`."""
    if file not in FILES:
        raise NotFound(f"a trace has no file {file[:40]!r}; choose from {', '.join(FILES)}")
    if file == "record.json":
        return (record.to_json() + "\n").encode(errors="replace")
    if file == "page.html":
        return trace_page(record).encode(errors="replace")
    figure, _, kind = file.partition(".")
    return figure_bytes(FIGURES[figure](record), kind)
