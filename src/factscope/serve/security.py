"""What every request passes: is it ours, is it small enough, whose is it, and what may a page do.

A page of another site must not use a visitor's browser to reach a server on that visitor's own
machine. So a request must come under an address or a name that the server goes by (an address
cannot be rebound, a name can), and a browser that says from where it asks must say: from here.
"""

import asyncio
import ipaddress
import json
from collections.abc import Collection, Iterable
from typing import Any

from factscope.errors import FactscopeError, ForbiddenOrigin, LimitExceeded
from factscope.serve.responses import error_message, error_status
from factscope.serve.sessions import COOKIE, new_name, session_in

__all__ = ["HEADERS", "SecurityMiddleware", "check_origin"]

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""No script but our own files; nothing that a page shows can run."""
PATIENCE = 10.0
"""Seconds that a request may take to arrive."""
HEARD = 2**20
"""Bytes of a request that is too large that are still listened to: a client that is cut off in the
middle of its words does not hear why."""
READING = ("GET", "HEAD")
OURS = ("same-origin", "none")


class SecurityMiddleware:
    """The middleware around the whole application."""

    def __init__(self, app: Any, *, names: Collection[str], body: int) -> None:
        """Names that the server goes by besides addresses, and the most bytes of a request."""
        self.app, self.names, self.body = app, {name.casefold() for name in names}, body

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Let a request pass, or answer it with a refusal."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1")
                   for name, value in scope["headers"]}  # fmt: skip
        try:
            check_host(headers.get("host", ""), self.names)
            check_origin(scope["method"], scope["path"], headers)
            body = await self._read(scope["method"], headers, receive)
        except FactscopeError as error:
            status = 413 if isinstance(error, LimitExceeded) else error_status(error)
            await _refuse(send, status, error)
            return
        visitor = session_in(headers.get("cookie", ""))
        scope.setdefault("state", {})["visitor"] = visitor or new_name()
        new = None if visitor else scope["state"]["visitor"]
        await self.app(scope, _given(body, receive), _dressed(send, new, scope["path"]))

    async def _read(self, method: str, headers: dict[str, str], receive: Any) -> bytes:
        """The whole body; what is too large is heard out for a while, and not kept."""
        if method in READING:
            return b""
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(PATIENCE):
                while more and size <= HEARD:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
                    if size <= self.body:
                        body += message.get("body", b"")
        except TimeoutError:
            raise LimitExceeded(
                f"the request took more than {PATIENCE:g} seconds to arrive"
            ) from None
        if size > self.body:
            said = headers.get("content-length", f"more than {self.body}")
            raise LimitExceeded(f"the request has {said[:20]} bytes, at most {self.body} are read")
        return bytes(body)


def check_host(host: str, names: Collection[str]) -> None:
    """An address, or a name that the server goes by."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        if name.casefold() not in names:
            raise ForbiddenOrigin(
                f"this server does not go by the name {name[:80]!r}; use its address, or start it "
                "with --name"
            ) from None


def check_origin(method: str, path: str, headers: dict[str, str]) -> None:
    """A browser that says from where it asks says: from here."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise ForbiddenOrigin(f"a page of {origin[:80]!r} asked; open this server's own page")
    site = headers.get("sec-fetch-site", "none")
    if site not in OURS and (path.startswith("/api/") or method not in READING):
        raise ForbiddenOrigin("a page of another site asked; open this server's own page")


async def _refuse(send: Any, status: int, error: FactscopeError) -> None:
    body = json.dumps({"error": error_message(error)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
               (b"connection", b"close"), *_raw(HEADERS.items())]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _given(body: bytes, receive: Any) -> Any:
    """The body that was read, then whatever comes: a disconnect."""
    first = True

    async def give() -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return give


def _dressed(send: Any, visitor: str | None, path: str) -> Any:
    """Answers with our headers, and a new visitor's name."""

    async def dressed(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), *_raw(HEADERS.items())]
            if visitor is not None and not path.startswith("/static/"):
                cookie = f"{COOKIE}={visitor}; Path=/; HttpOnly; SameSite=Strict; Max-Age=604800"
                headers.append((b"set-cookie", cookie.encode()))
            message = {**message, "headers": headers}
        await send(message)

    return dressed


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]
