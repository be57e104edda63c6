"""Queues: one worker thread runs all work on the model, another one draws figures.

A job sends events (dicts) to its client while it waits and runs; `EventStream` is the HTTP
response that carries them. If the client disconnects, the job is cancelled: work checks that
before every forward pass and whenever it reports progress.
"""

import asyncio
import json
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from starlette.responses import StreamingResponse

from factscope.errors import FactscopeError, ServerBusy
from factscope.serve.limits import ServerLimits
from factscope.serve.security import error_to_dict

log = logging.getLogger(__name__)

T = TypeVar("T")
Event = dict[str, Any]
PROGRESS_INTERVAL = 0.1
"""Seconds between two progress events."""


class Cancelled(Exception):
    """The job was cancelled."""


class Job:
    """Work for one session and the queue of its events; created in the client's event loop."""

    def __init__(self, session: str, work: "Callable[[Job], None]") -> None:
        self.session = session
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self.cancelled = False  # if set, the job stops at its next check
        self.error: Exception | None = None
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._fraction, self._reported_at = 0.0, 0.0

    def check(self) -> None:
        """Raise if the job was cancelled."""
        if self.cancelled:
            raise Cancelled

    def send(self, event: Event | None) -> None:
        """Send an event from any thread; None ends the stream."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def progress(self, fraction: float) -> None:
        """Report progress (`factscope.progress.Progress`)."""
        self.check()
        self._fraction += fraction
        if time.monotonic() - self._reported_at > PROGRESS_INTERVAL:
            self._reported_at = time.monotonic()
            self.send({"event": "progress", "fraction": round(min(1.0, self._fraction), 4)})

    def run(self) -> None:
        """Do the work; an exception becomes an error event."""
        try:
            self.check()
            self._work(self)
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, FactscopeError):
                log.exception("a job failed")
            self.error = error
            self.send({"event": "error", "error": error_to_dict(error)})


class JobQueue:
    """Jobs in order of arrival, and the worker thread. The running job is the first one."""

    def __init__(
        self, limits: ServerLimits, context: Callable[[Job], AbstractContextManager[Any]]
    ) -> None:
        """Each job runs inside `context(job)`."""
        self._limits, self._context = limits, context
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, session: str, work: Callable[[Job], None]) -> Job:
        """Append a job; ServerBusy if the queue is full."""
        with self._changed:
            if len(self._jobs) >= self._limits.max_jobs:
                raise ServerBusy(f"{len(self._jobs)} jobs are waiting; try again in a minute")
            active = sum(job.session == session and not job.cancelled for job in self._jobs)
            if active >= self._limits.max_jobs_per_session:
                raise ServerBusy(f"{active} of your jobs are waiting; let one finish, or cancel it")
            job = Job(session, work)
            self._jobs.append(job)
            job.send({"event": "queued", "position": len(self._jobs) - 1})
            self._changed.notify()
        return job

    async def finish(self, job: Job) -> None:
        """Wait until the job is done; its exception is raised again."""
        while await job.events.get() is not None:
            pass
        if job.error is not None:
            raise job.error
        if job.cancelled:
            raise ServerBusy("the request was replaced by a newer one, or the server stops")

    def cancel(self, job: Job) -> None:
        """Remove a waiting job, or make the running job stop."""
        job.cancelled = True
        with self._changed:
            if job in self._jobs and job is not self._jobs[0]:
                self._jobs.remove(job)
                job.send(None)
                self._send_positions()

    def close(self) -> None:
        """Cancel all jobs and stop the thread."""
        with self._changed:
            self._open = False
            for job in self._jobs:
                job.cancelled = True
            self._changed.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or not self._open)
                if not self._jobs:
                    return
                job = self._jobs[0]
            with self._context(job):
                job.run()
            with self._changed:
                self._jobs.popleft()
                self._send_positions()
            job.send(None)  # last: a client that sees its stream end can submit its next job

    def _send_positions(self) -> None:
        for position, job in enumerate(self._jobs):
            job.send({"event": "queued", "position": position})


class ReportQueue:
    """One thread that reads runs and draws figures, one request at a time, in order of arrival.

    matplotlib is not thread-safe; and a figure can take seconds, in which other requests must be
    answered.
    """

    def __init__(self, max_reports: int) -> None:
        self._max_reports = max_reports
        self._count = 0  # of reports that wait or run
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="reports")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """The result of work(*args); ServerBusy if too many reports wait."""
        if self._count >= self._max_reports:
            raise ServerBusy(f"{self._count} figures or tables are waiting; try again in a minute")
        self._count += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, work, *args)
        finally:
            self._count -= 1

    def close(self) -> None:
        """Stop after the report that runs now."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class EventStream(StreamingResponse):
    """A job's events, one JSON object per line. A client that disconnects cancels the job."""

    def __init__(self, queue: JobQueue, job: Job) -> None:
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
        yield json.dumps(event, allow_nan=False).encode() + b"\n"
