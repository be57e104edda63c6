"""State of the server: the model, the job queue, the edits of each session, finished traces.

A session is a random id in a cookie (see `security`). Nothing is stored for a session without
edits.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request

from factscope.editing.edit import Edit
from factscope.errors import LimitExceeded, NotFound
from factscope.facts import Fact
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.records import KINDS, EditRecord, TraceRecord
from factscope.serve.examples import find_examples, first_trace
from factscope.serve.jobs import EventStream, Job, JobQueue, ReportQueue
from factscope.serve.limits import ServerLimits
from factscope.serve.schemas import default_tracing
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import TableName

T = TypeVar("T")

TABLE_FIELDS = ("restored", "severed", "gradients", "lens", "attribution")
"""The fields of a `TraceRecord` that hold tables by name."""
CPU_TRACE_MEMORY = 2**28
"""Bytes that a trace may allocate on the CPU, besides the model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredEdit:
    """An edit of a session."""

    id: str
    edit: Edit
    record: EditRecord
    request: dict[str, Any]
    """The request body; the same body gives the same edit again."""


class Sessions:
    """The edits of all sessions. The least recently used session is dropped first."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        # The id of an edit is its number in the list. A removed edit leaves None behind.
        self._sessions: OrderedDict[str, list[StoredEdit | None]] = OrderedDict()
        self._lock = threading.Lock()

    def edits(self, session: str) -> list[StoredEdit]:
        """A session's edits, oldest first."""
        with self._lock:
            if session not in self._sessions:
                return []
            self._sessions.move_to_end(session)
            return [stored for stored in self._sessions[session] if stored]

    def check_capacity(self, session: str) -> None:
        """Raise if the session cannot store another edit."""
        if len(self.edits(session)) >= self._limits.max_edits:
            raise LimitExceeded(
                f"you have {self._limits.max_edits} edits, the most that this server stores; "
                "remove one"
            )

    def store(
        self, session: str, edit: Edit, record: EditRecord, request: dict[str, Any]
    ) -> StoredEdit:
        """Store an edit under a new id."""
        self.check_capacity(session)
        with self._lock:
            edits = self._sessions.setdefault(session, [])
            self._sessions.move_to_end(session)
            stored = StoredEdit(id=str(len(edits) + 1), edit=edit, record=record, request=request)
            edits.append(stored)
            while len(self._sessions) > self._limits.max_sessions:
                self._sessions.popitem(last=False)
        return stored

    def remove(self, session: str, id: str) -> None:
        """Remove an edit."""
        self.select(session, [id])
        with self._lock:
            edits = self._sessions.get(session, [])
            edits[:] = [None if stored and stored.id == id else stored for stored in edits]

    def select(self, session: str, ids: Sequence[str]) -> list[StoredEdit]:
        """A session's edits with these ids; NotFound if one does not exist."""
        by_id = {stored.id: stored for stored in self.edits(session)}
        if missing := [id for id in ids if id not in by_id]:
            known = ", ".join(by_id) or "none"
            raise NotFound(f"you have no edit {missing[0][:20]!r} (your edits: {known})")
        return [by_id[id] for id in dict.fromkeys(ids)]


class Traces:
    """Cache of finished traces. The least recently used one is dropped first."""

    def __init__(self, max_traces: int, shipped: TraceRecord | None, settings: Tracing) -> None:
        """`shipped` is a trace with these settings that is never dropped."""
        self._max_traces = max_traces
        self._shipped = {self.name(shipped.fact, settings): shipped} if shipped else {}
        self._records: OrderedDict[str, TraceRecord] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def name(
        fact: Fact,
        settings: Tracing,
        edits: Sequence[str] = (),
        answer: str | None = None,
        foil: str | None = None,
    ) -> str:
        """The cache key: a hash of fact, settings, edits, answer and foil, whichever tables are
        computed."""
        fact = replace(fact, target=None, id=None, relation=None)
        settings = replace(
            settings, kinds=KINDS, sever=(), gradients=False, lens=False, heads=False,
            knockout=False, knockout_window=Tracing.knockout_window, attribution="none",
        )  # fmt: skip
        values = [asdict(fact), settings.to_dict(), list(edits), answer, foil]
        key = json.dumps(values, sort_keys=True)
        return hashlib.sha256(key.encode()).hexdigest()[:24]

    def get(self, name: str) -> TraceRecord | None:
        """A trace, or None if it is not in the cache."""
        with self._lock:
            if name in self._records:
                self._records.move_to_end(name)
            return self._records.get(name) or self._shipped.get(name)

    def missing(
        self, name: str, tables: Collection[TableName], settings: Tracing, token: int | None
    ) -> set[TableName]:
        """The tables that a trace in the cache does not have, with these settings; its heads at
        this token, by default the last."""
        record = self.get(name)
        if record is None:
            return set(tables)
        heads = record.heads[0] if record.heads else ()
        measured = {i for i, row in enumerate(heads) if row[0] is not None}
        at = len(record.tokens) - 1 if token is None else token
        stored = {(field, key) for field in TABLE_FIELDS for key in getattr(record, field)}
        if at in measured:
            stored.add(("heads", ""))
        if record.knockout and record.settings["knockout_window"] == settings.knockout_window:
            stored.add(("knockout", ""))
        if record.settings["attribution"] != settings.attribution:
            stored -= {("attribution", kind) for kind in KINDS}
        return set(tables) - stored

    def store(self, name: str, record: TraceRecord) -> TraceRecord:
        """Store a trace, merged with the tables that are stored under the same name."""
        with self._lock:
            if old := self._records.pop(name, None) or self._shipped.get(name):
                record = merged(old, record)
            self._records[name] = record
            while len(self._records) > self._max_traces:
                self._records.popitem(last=False)
        return record


def merged(old: TraceRecord, new: TraceRecord) -> TraceRecord:
    """A trace with the tables of two; of the same fact with the same settings."""
    tables: dict[str, Any] = {f: {**getattr(old, f), **getattr(new, f)} for f in TABLE_FIELDS}
    last = {field: new if getattr(new, field) else old for field in ("knockout", "attribution")}
    if old.settings["attribution"] != new.settings["attribution"]:  # estimates of one method only
        tables["attribution"] = last["attribution"].attribution
    tables["knockout"] = last["knockout"].knockout
    tables["heads"] = new.heads or old.heads
    if old.heads and new.heads:  # each may have them at other tokens
        tables["heads"] = tuple(
            tuple(a if b[0] is None else b for a, b in zip(*pair, strict=True))
            for pair in zip(old.heads, new.heads, strict=True)
        )
    listed = {
        "kinds": tuple(tables["restored"]),
        "sever": tuple(tables["severed"]),
        **{name: bool(tables[name]) for name in ("gradients", "lens", "heads", "knockout")},
        "knockout_window": last["knockout"].settings["knockout_window"],
        "attribution": last["attribution"].settings["attribution"],
    }
    return replace(old, **tables, settings={**old.settings, **listed})


class ServerState:
    """What all routes share."""

    def __init__(
        self, *, lm: LM, runs: Path | None = None, limits: ServerLimits | None = None
    ) -> None:
        """`runs` is the folder of runs to compare."""
        self.lm, self.runs = lm, runs
        self.limits = limits or ServerLimits()
        self.sessions = Sessions(self.limits)
        settings = default_tracing(self.limits)
        self.first_trace = first_trace(lm, settings)
        self.traces = Traces(self.limits.max_traces, self.first_trace, settings)
        self.examples: Future[list[dict[str, Any]]] = Future()
        self.reports = ReportQueue(self.limits.max_reports)
        self.trace_memory = CPU_TRACE_MEMORY if lm.device.type == "cpu" else None
        # Every forward pass checks whether its job was cancelled.
        self.queue = JobQueue(
            self.limits, lambda job: hook_outputs((lm.embed, lambda output: job.check()))
        )

    def start(self) -> None:
        """Find the examples; call it in the server's event loop."""

        def work(job: Job) -> None:
            try:
                self.examples.set_result(find_examples(self.lm))
            except Exception as error:
                self.examples.set_exception(error)
                raise

        self.queue.submit("", work)

    async def compute(self, session: str, work: Callable[[], T]) -> T:
        """Queue work on the model, and wait for its result."""
        found: list[T] = []
        await self.queue.finish(self.queue.submit(session, lambda job: found.append(work())))
        return found[0]

    def stream(self, request: Request, work: Callable[[Job], None]) -> EventStream:
        """Queue work; the response streams its events."""
        return EventStream(self.queue, self.queue.submit(request.state.session, work))
