"""Locate: a trace that comes cell by cell, and its figures and records to take away."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from factscope.errors import NotFound
from factscope.facts import Fact
from factscope.lm.tokens import encode_fact
from factscope.records import TraceRecord
from factscope.report.figures import gradients_figure, severed_detail, traces_figure
from factscope.report.style import FIGURE_FORMATS, display_token, figure_bytes, token_labels
from factscope.report.traces import trace_page
from factscope.serve.jobs import Job
from factscope.serve.responses import MEDIA, attached
from factscope.serve.schemas import LocateBody
from factscope.serve.sessions import ServerState
from factscope.tracing.settings import Tracing
from factscope.tracing.stream import CellUpdate, stream_trace

__all__ = ["locate_routes"]


def locate_routes(served: ServerState) -> APIRouter:
    """The routes of this view."""
    routes = APIRouter(prefix="/api", tags=["locate"])

    @routes.post("/locate", response_class=Response)
    async def locate(body: LocateBody, request: Request) -> Response:
        """Trace a fact: events, one a line, as they come."""
        fact, settings = body.fact(served.limits), body.settings(served.limits)
        name, tables = served.traces.name(body.base()), body.names()
        known = served.traces.get(name)
        if known is not None and tables <= tables_of(known):
            line = json.dumps(whole(name, known), allow_nan=False) + "\n"
            return Response(line, media_type="application/x-ndjson")
        return served.stream(request, tracing(served, fact, settings, name, tables))

    @routes.get("/traces/{name}/{file}", response_class=Response)
    def download(name: str, file: str) -> Response:
        """A trace as a figure, a page or a record."""
        record = served.traces.find(name)
        with served.reading:
            return attached(file, written(record, file), f"trace-{name[:8]}-{file}")

    return routes


def tracing(
    served: ServerState, fact: Fact, settings: Tracing, name: str, tables: set[tuple[str, str]]
) -> Callable[[Job], None]:
    """The work of a trace."""

    def work(job: Job) -> None:
        served.limits.check_tokens(len(encode_fact(served.lm, fact)[0]))
        pieces = stream_trace(
            served.lm, fact, settings, memory=served.memory, only=tables, progress=job.done
        )
        last: TraceRecord | None = None
        for piece in pieces:
            job.check()
            if isinstance(piece, CellUpdate):
                job.say({"event": "cells", **asdict(piece)})
                continue
            if last is None:
                job.say({"event": "runs", **runs_of(piece)})
            last = piece
        assert last is not None
        job.say(whole(name, served.traces.keep(name, last)))

    return work


def runs_of(record: TraceRecord) -> dict[str, Any]:
    """What the clean and the corrupted run tell."""
    return {
        "labels": token_labels(record),
        "subject": record.subject,
        "answer": display_token(record.answer),
        "clean": record.clean,
        "corrupted": record.corrupted,
        "samples": len(record.corrupted_samples),
    }


def whole(name: str, record: TraceRecord) -> dict[str, Any]:
    """The event that ends a trace: all of it, under the name by which it is found again."""
    tables = {t: getattr(record, t) for t in ("restored", "severed", "gradients")}
    return {"event": "record", "name": name, **runs_of(record), "tables": tables}


def tables_of(record: TraceRecord) -> set[tuple[str, str]]:
    """The tables that a record has."""
    return {
        (name, kind)
        for name in ("restored", "severed", "gradients")
        for kind in getattr(record, name)
    }


FIGURES = {"figure": traces_figure, "severed": severed_detail, "gradients": gradients_figure}
FILES = ["record.json", "page.html", *(f"{f}.{kind}" for f in FIGURES for kind in FIGURE_FORMATS)]


def written(record: TraceRecord, file: str) -> bytes:
    """A trace as a file of that name."""
    if file not in FILES:
        raise NotFound(f"a trace has no file {file[:40]!r}; it has {', '.join(FILES)}")
    if file == "record.json":
        return (record.to_json() + "\n").encode(errors="replace")
    if file == "page.html":
        return trace_page(record).encode(errors="replace")
    which, _, kind = file.partition(".")
    assert f".{kind}" in MEDIA
    return figure_bytes(FIGURES[which](record), kind)
