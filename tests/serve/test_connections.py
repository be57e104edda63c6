"""Idle, half-open and stalled connections are closed; others are still served."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from factscope.serve import connections
from factscope.serve.limits import ServerLimits

from serving import running_server, serving_lm


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with running_server(serving_lm()) as (url, _):
        yield "127.0.0.1", int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def narrow() -> Iterator[tuple[str, int]]:
    """A server with two connections per address."""
    limits = ServerLimits(max_connections_per_address=2, max_connections=3)
    with running_server(serving_lm(), limits=limits) as (url, _):
        yield "127.0.0.1", int(url.rpartition(":")[2])


def is_closed(connection: socket.socket, seconds: float = 10) -> bool:
    """Whether the server closes the connection within that time, after a refusal or without."""
    connection.settimeout(seconds)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def status(address: tuple[str, int]) -> int:
    return httpx.get(f"http://{address[0]}:{address[1]}/api/queue", timeout=10).status_code


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc"])
def test_a_request_that_does_not_arrive_is_given_up(
    address: tuple[str, int], sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.2)
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_second_request_that_stays_incomplete_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.3)
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /api/queue HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /api/queue HTTP/1.1\r\n")
        assert is_closed(connection)


def test_a_response_takes_longer_than_the_timeout_of_requests(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT", 0.1)
    body = {"prompt": "A b c d", "subject": "b", "settings": {"samples": 10, "window": 3}}
    answer = httpx.post(f"http://{address[0]}:{address[1]}/api/traces", json=body, timeout=60)
    assert '"event": "record"' in answer.text.splitlines()[-1]


def test_three_hundred_idle_connections_lock_nobody_out(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        idle = []
        for number in range(300):
            connection = stack.enter_context(socket.create_connection(address))
            if number % 2:
                connection.sendall(b"GET /api/queue HTTP/1.1\r\n")
            idle.append(connection)
        start = time.monotonic()
        assert [status(address) for _ in range(5)] == [200] * 5
        assert time.monotonic() - start < connections.REQUEST_TIMEOUT
        # New connections replaced the oldest ones of the same address.
        assert all(is_closed(connection) for connection in idle[:100])


def test_a_connection_without_any_request_is_replaced_first(narrow: tuple[str, int]) -> None:
    browser = HTTPConnection(*narrow, timeout=10)

    def ask() -> int:
        browser.request("GET", "/api/queue")
        answer = browser.getresponse()
        answer.read()
        return answer.status

    with ExitStack() as stack:
        assert ask() == 200
        used = browser.sock
        idle = stack.enter_context(socket.create_connection(narrow))
        stack.enter_context(socket.create_connection(narrow))
        assert is_closed(idle)
        assert ask() == 200
        assert browser.sock is used
        browser.close()


def test_a_request_that_was_sent_before_the_connection_is_replaced_is_answered(
    narrow: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stalls accepts several connections before it reads any of them."""
    loops: list[Any] = []
    made = connections.BoundedProtocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        loops.append(self.loop)
        made(self, transport)

    monkeypatch.setattr(connections.BoundedProtocol, "connection_made", connection_made)
    with ExitStack() as stack:
        stack.enter_context(socket.create_connection(narrow))
        assert status(narrow) == 200
        loops[0].call_soon_threadsafe(time.sleep, 0.5)
        time.sleep(0.1)
        first = stack.enter_context(socket.create_connection(narrow))
        first.sendall(b"GET /api/queue HTTP/1.1\r\nHost: localhost\r\n\r\n")
        idle = [stack.enter_context(socket.create_connection(narrow)) for _ in range(3)]
        first.settimeout(10)
        assert first.recv(12) == b"HTTP/1.1 200"
        assert is_closed(idle[0])


def test_an_address_that_uses_all_its_connections_is_refused(narrow: tuple[str, int]) -> None:
    """Others are served, until the connections of all addresses are in use."""
    head = b"POST /api/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:

        def ask(request: bytes, address: str) -> bytes:
            connection = socket.create_connection(narrow, source_address=(address, 0))
            stack.enter_context(connection).settimeout(10)
            connection.sendall(request)
            return connection.recv(12)

        # The server asks for the body, which does not come: the request is in progress.
        unfinished = head.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")
        finished = b"GET /api/queue HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert [ask(unfinished, "127.0.0.1") for _ in range(2)] == [b"HTTP/1.1 100"] * 2
        assert status(narrow) == 503
        assert ask(finished, "127.0.0.2") == b"HTTP/1.1 200"
        assert ask(unfinished, "127.0.0.2") == b"HTTP/1.1 100"  # replaces the idle one
        assert ask(finished, "127.0.0.3") == b"HTTP/1.1 503"


def test_a_client_that_does_not_read_is_disconnected(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_TIMEOUT", 0.2)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(address)
        connection.settimeout(10)
        request = b"GET /static/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with pytest.raises(ConnectionError):
            connection.sendall(request * 300_000)  # more than all buffers take
