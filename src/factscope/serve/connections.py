"""Connections: timeouts and limits, so that idle or stalled clients cannot lock out others.

uvicorn closes a connection that is idle after a response, but waits without end for a first
request, for the rest of a request's headers, and for a client that does not read.
"""

from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from factscope.serve.limits import ServerLimits

REQUEST_TIMEOUT = 8.0
"""Seconds until the headers of a request must be complete."""
WRITE_TIMEOUT = 30.0
"""Seconds until a client must continue to read a response."""
REPLACEMENT_DELAY = 0.05
"""Seconds in which a request may still arrive on a connection that is replaced. After a stall, the
server accepts many connections before it reads the requests that were sent on them."""
REFUSAL_TIMEOUT = 1.0
"""Seconds until a connection that is refused must send something."""
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\n"
    b'connection: close\r\n\r\n{"error": {"kind": "ServerBusy", "message": "the server has too '
    b'many connections; try again in a few seconds"}}'
)


def bounded_protocol(limits: ServerLimits) -> type["BoundedProtocol"]:
    """The protocol of a server with these limits."""
    return type(BoundedProtocol.__name__, (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with timeouts and limits.

    Above the limits, a new connection replaces one that waits for a request. If all are in use, the
    new one is refused.
    """

    limits = ServerLimits()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._refused = False
        self._request_timer: Any = None
        self._write_timer: Any = None

    @property
    def waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str | None:
        """The client's IP address."""
        return self.client[0] if self.client else None

    def connection_made(self, transport: Any) -> None:
        """Accept a connection, replace a waiting one by it, or refuse it."""
        super().connection_made(transport)
        others = [other for other in self._peers() if other is not self]
        same = [other for other in others if other.address == self.address]
        limits = self.limits
        bounds = (same, limits.max_connections_per_address), (others, limits.max_connections)
        for peers, limit in bounds:
            if len(peers) >= limit and not _replace_oldest(peers):
                self._refused = True
                self._request_timer = self.loop.call_later(REFUSAL_TIMEOUT, transport.close)
                return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request."""
        if self._refused:
            # Only now: a connection that is closed with unread data loses its response.
            self.transport.write(REFUSAL)
            self.transport.close()
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _watch(self) -> None:
        """Run the timer of a request's headers while no request is being answered."""
        if self.waiting and self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_TIMEOUT, self.transport.close)
        elif not self.waiting and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def close_soon(self) -> None:
        """Make room for a new connection: close this one, unless a request arrives first."""
        cycle = self.cycle
        self.connections.discard(self)

        def close() -> None:
            if self.cycle is cycle:
                self.transport.close()
            elif not self.transport.is_closing():
                self.connections.add(self)

        self.loop.call_later(REPLACEMENT_DELAY, close)

    def _peers(self) -> Iterable["BoundedProtocol"]:
        return (peer for peer in self.connections if isinstance(peer, BoundedProtocol))


def _replace_oldest(peers: Iterable[BoundedProtocol]) -> bool:
    """Replace the connection that has waited longest for a request; False if none waits.

    Those without any request so far come first: others are probably open in a browser.
    """
    waiting = [peer for peer in peers if peer.waiting and not peer._refused]
    if not waiting:
        return False
    oldest = min(waiting, key=lambda peer: (peer.cycle is not None, peer._request_timer.when()))
    oldest.close_soon()
    return True
