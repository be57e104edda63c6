"""What all the routes share: the model, its queue, the visitors, and traces that are finished."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from factscope.errors import NotHere
from factscope.lm.hooks import on_output
from factscope.lm.model import LM
from factscope.records import TraceRecord
from factscope.serve.limits import Limits
from factscope.serve.queue import Job, WorkQueue
from factscope.serve.visitors import Visitors

__all__ = ["Served", "Traces", "visitor_of"]

MEMORY = 2**28
"""The bytes that a trace may take beside the model, where there is no GPU."""


class Traces:
    """Finished traces by name; the one asked for least recently is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._records: OrderedDict[str, TraceRecord] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def name(asked: dict[str, Any]) -> str:
        """The name of all traces of a fact in the same way."""
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]

    def get(self, name: str) -> TraceRecord | None:
        """A trace, if it is remembered."""
        with self._lock:
            if name in self._records:
                self._records.move_to_end(name)
            return self._records.get(name)

    def find(self, name: str) -> TraceRecord:
        """A trace that must be there."""
        record = self.get(name)
        if record is None:
            raise NotHere(f"the trace {name[:40]!r} is not here any more; trace it again")
        return record

    def keep(self, name: str, record: TraceRecord) -> TraceRecord:
        """Remember a trace, with the tables that others of the same fact have made."""
        with self._lock:
            known = self._records.pop(name, None)
            self._records[name] = record = record if known is None else _both(known, record)
            while len(self._records) > self._most:
                self._records.popitem(last=False)
        return record


def _both(one: TraceRecord, other: TraceRecord) -> TraceRecord:
    """One record with the tables of two; its settings say what there is."""
    tables = {
        name: {**getattr(one, name), **getattr(other, name)}
        for name in ("restored", "severed", "gradients")
    }
    said = {
        "kinds": tuple(tables["restored"]),
        "sever": tuple(tables["severed"]),
        "gradients": bool(tables["gradients"]),
    }
    return replace(one, **tables, settings={**one.settings, **said})


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """One model, and everyone who came to see it."""

    lm: LM
    runs: Path | None = None
    """The folder whose runs are shown."""
    limits: Limits = field(default_factory=Limits)

    @cached_property
    def queue(self) -> WorkQueue:
        """The one worker that uses the model; every forward pass looks up whether to go on."""
        return WorkQueue(
            waiting=self.limits.waiting,
            each=self.limits.each,
            around=lambda job: on_output((self.lm.embed, lambda out: job.check())),
        )

    @cached_property
    def visitors(self) -> Visitors:
        """Whose edits are whose."""
        return Visitors(self.limits)

    @cached_property
    def traces(self) -> Traces:
        """What was traced lately."""
        return Traces(self.limits.traces)

    @cached_property
    def reading(self) -> threading.Lock:
        """Figures are drawn, and runs read, one at a time: matplotlib knows no threads."""
        return threading.Lock()

    @property
    def memory(self) -> int | None:
        """The bound on memory of a trace."""
        return MEMORY if self.lm.device.type == "cpu" else None

    def stream(self, request: Request, work: Callable[[Job], None]) -> "Told":
        """Put work in the queue and tell its events as they come, one a line."""
        job = self.queue.submit(visitor_of(request), work)
        return Told(self.queue, job)


class Told(StreamingResponse):
    """A job's events as lines of JSON; when nobody listens any more, the job is called off."""

    def __init__(self, queue: WorkQueue, job: Job) -> None:
        self._queue, self._job = queue, job
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(_lines(job), media_type="application/x-ndjson", headers=headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._queue.cancel(self._job)


async def _lines(job: Job) -> AsyncIterator[bytes]:
    while (event := await job.events.get()) is not None:
        yield json.dumps(event, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def visitor_of(request: Request) -> str:
    """Who asks: see `serve.guard`."""
    return request.state.visitor
