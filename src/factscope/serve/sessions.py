"""Visitors and what is theirs: edits, which nobody else sees.

A visitor is a random number in a cookie. Nothing is remembered of one who has made no edit.

What all the routes share: the model, its queue, the visitors, and traces that are finished.
"""

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from factscope.errors import LimitExceeded, NotFound
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.records import EditRecord, TraceRecord
from factscope.serve.jobs import Job, WorkQueue
from factscope.serve.schemas import ServerLimits

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.serve.schemas import ServerLimits

__all__ = [
    "COOKIE",
    "ServerState",
    "Sessions",
    "StoredEdit",
    "Traces",
    "new_name",
    "session_in",
    "visitor_of",
]

COOKIE = "factscope"
NAME = re.compile(rf"(?:^|;\s*){COOKIE}=([0-9a-f]{{32}})(?:;|$)")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredEdit:
    """An edit that a visitor made."""

    id: str
    edit: "Edit"
    record: EditRecord
    asked: dict[str, Any]
    """The request that made it: whoever sends it again gets the same."""


@dataclass
class _Own:
    """What one visitor has."""

    made: dict[str, StoredEdit] = field(default_factory=dict)
    count: int = 0


class Sessions:
    """Every visitor's edits, as many as the limits allow."""

    def __init__(self, limits: "ServerLimits") -> None:
        self._limits = limits
        self._own: OrderedDict[str, _Own] = OrderedDict()
        self._lock = threading.Lock()

    def edits(self, visitor: str) -> list[StoredEdit]:
        """A visitor's edits, the oldest first."""
        with self._lock:
            own = self._own.get(visitor)
            if own is None:
                return []
            self._own.move_to_end(visitor)
            return list(own.made.values())

    def check_room(self, visitor: str) -> None:
        """Refuse an edit that would be one too many."""
        if len(self.edits(visitor)) >= self._limits.edits:
            raise LimitExceeded(
                f"you have {self._limits.edits} edits, and this server keeps no more; remove one"
            )

    def keep(
        self, visitor: str, edit: "Edit", record: EditRecord, asked: dict[str, Any]
    ) -> StoredEdit:
        """Remember an edit."""
        self.check_room(visitor)
        with self._lock:
            own = self._own.setdefault(visitor, _Own())
            self._own.move_to_end(visitor)
            own.count += 1
            made = StoredEdit(id=str(own.count), edit=edit, record=record, asked=asked)
            own.made[made.id] = made
            while len(self._own) > self._limits.visitors:
                self._own.popitem(last=False)
        return made

    def remove(self, visitor: str, id: str) -> None:
        """Forget an edit."""
        self.chosen(visitor, [id])
        with self._lock:
            own = self._own.get(visitor)
            if own is not None:
                own.made.pop(id, None)

    def chosen(self, visitor: str, ids: Sequence[str]) -> list[StoredEdit]:
        """Some of a visitor's edits, by their numbers."""
        own = {made.id: made for made in self.edits(visitor)}
        missing = [id for id in ids if id not in own]
        if missing:
            known = ", ".join(own) or "none"
            raise NotFound(
                f"you have no edit {missing[0][:20]!r} (there are: {known}); make it again"
            )
        return [own[id] for id in dict.fromkeys(ids)]

    def together(self, visitor: str, ids: Sequence[str]) -> "Edit | None":
        """The sum of some of a visitor's edits; None of none."""
        edits = [made.edit for made in self.chosen(visitor, ids)]
        return reduce(add, edits) if edits else None


def new_name() -> str:
    """A visitor's name, which nobody guesses."""
    return secrets.token_hex(16)


def session_in(cookies: str) -> str | None:
    """The visitor that a Cookie header names."""
    found = NAME.search(cookies)
    return found[1] if found else None


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
            raise NotFound(f"the trace {name[:40]!r} is not here any more; trace it again")
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
class ServerState:
    """One model, and everyone who came to see it."""

    lm: LM
    runs: Path | None = None
    """The folder whose runs are shown."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    @cached_property
    def queue(self) -> WorkQueue:
        """The one worker that uses the model; every forward pass looks up whether to go on."""
        return WorkQueue(
            waiting=self.limits.waiting,
            each=self.limits.each,
            around=lambda job: hook_outputs((self.lm.embed, lambda out: job.check())),
        )

    @cached_property
    def visitors(self) -> Sessions:
        """Whose edits are whose."""
        return Sessions(self.limits)

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

    def stream(self, request: Request, work: Callable[[Job], None]) -> "EventStream":
        """Put work in the queue and tell its events as they come, one a line."""
        job = self.queue.submit(visitor_of(request), work)
        return EventStream(self.queue, job)


class EventStream(StreamingResponse):
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
