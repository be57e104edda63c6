"""One worker owns the model; jobs wait in a line, hear their place in it, and can be called off.

A job speaks in events: plain values, sent to whoever asked for it as they come. Work looks up
between batches, and before every forward pass, whether it is still wanted.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from factscope.errors import FactscopeError, ServerBusy
from factscope.serve.responses import error_message

__all__ = ["Cancelled", "Job", "WorkQueue"]

log = logging.getLogger(__name__)

Event = dict[str, Any]
OFTEN = 0.1
"""Seconds between two words on how far a job has come."""


class Cancelled(Exception):
    """Nobody waits for the work any more."""


class Job:
    """Some work for a visitor, and what it has to say. Made in the event loop that listens."""

    def __init__(self, visitor: str, work: "Callable[[Job], None]") -> None:
        self.visitor = visitor
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._cancelled = threading.Event()
        self._share, self._said = 0.0, 0.0

    def say(self, event: Event | None) -> None:
        """Send an event; None says that it was the last."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it."""
        return not self._cancelled.is_set()

    def check(self) -> None:
        """Raise where nobody waits any more."""
        if not self.wanted:
            raise Cancelled

    def done(self, share: float) -> None:
        """Hear that a share of the work was done; tell it now and then."""
        self.check()
        self._share += share
        if time.monotonic() - self._said > OFTEN:
            self._said = time.monotonic()
            self.say({"event": "progress", "share": round(min(1.0, self._share), 4)})

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled.set()

    def run(self) -> None:
        """Do the work; whatever becomes of it is an event."""
        try:
            self.check()
            self._work(self)
        except Cancelled:
            pass
        except Exception as error:
            if not isinstance(error, FactscopeError):
                log.exception("a job failed")
            self.say({"event": "error", "error": error_message(error)})


class WorkQueue:
    """The line of jobs, and the one thread that does them in turn."""

    def __init__(
        self,
        *,
        waiting: int,
        each: int,
        around: Callable[[Job], AbstractContextManager[Any]] = lambda job: nullcontext(),
    ) -> None:
        """At most `waiting` jobs, `each` of one visitor; each is done within `around`."""
        self.waiting, self.each = waiting, each
        self._around = around
        self._line: deque[Job] = deque()
        self._change = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._line)

    def submit(self, visitor: str, work: Callable[[Job], None]) -> Job:
        """Put a job at the end of the line, or say politely that the line is full."""
        with self._change:
            if len(self._line) >= self.waiting:
                raise ServerBusy(
                    f"{len(self._line)} jobs are waiting already; try again in a minute"
                )
            mine = sum(job.visitor == visitor and job.wanted for job in self._line)
            if mine >= self.each:
                raise ServerBusy(
                    f"{mine} of your jobs are waiting already; let one end, or cancel it"
                )
            job = Job(visitor, work)
            self._line.append(job)
            job.say({"event": "place", "place": len(self._line) - 1})
            self._change.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Call a job off: one that waits leaves the line, one that runs stops soon."""
        job.cancel()
        with self._change:
            if job in self._line and job is not self._line[0]:
                self._line.remove(job)
                job.say(None)
                self._tell_places()

    def close(self) -> None:
        """Call everything off and let the thread end."""
        with self._change:
            self._open = False
            for job in self._line:
                job.cancel()
            self._change.notify()
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while job := self._next():
            with self._around(job):
                job.run()
            with self._change:
                self._line.popleft()
                self._tell_places()
            job.say(None)  # last: who hears it finds the line already shorter

    def _next(self) -> Job | None:
        """The first of the line, which stays there while it is done."""
        with self._change:
            while self._open and not self._line:
                self._change.wait()
            return self._line[0] if self._line else None

    def _tell_places(self) -> None:
        for place, job in enumerate(self._line):
            job.say({"event": "place", "place": place})
