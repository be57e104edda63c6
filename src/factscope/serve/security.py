"""What every request and response goes through: checks, session cookie, headers, errors as JSON.

Other websites must not reach a server on the user's own machine through the user's browser.
Against DNS rebinding, the Host header must be an IP address or an allowed name; against
cross-site requests, the Origin and Sec-Fetch-Site headers must be those of the server's own page.
"""

import asyncio
import ipaddress
import re
import secrets
from collections.abc import Collection, Mapping
from mimetypes import MimeTypes
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, Response

from factscope.errors import (
    FactscopeError,
    ForbiddenOrigin,
    LimitExceeded,
    NotFound,
    OutOfMemory,
    ServerBusy,
)
from factscope.lm.memory import is_out_of_memory
from factscope.report.labels import printable

COOKIE = "factscope"
"""Name of the session cookie; its value is a random id."""
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
"""Sent with every response. Only our own files can be executed as scripts."""
BODY_TIMEOUT = 10.0
"""Seconds until a request body must have arrived."""
MAX_DISCARDED_BYTES = 2**20
"""A body that is too large is read and discarded up to this size: a client whose connection is
closed while it sends does not see the error message."""
FOLDERS = re.compile(r"(?<![\w.:/~])(?!/api/|/static/)~?/(?:[^/\n'\"`;:,()]+/)+(?=[^/\s])")
"""The folders in an absolute path, but not the path of a URL; the name of the file stays."""
SAFE_METHODS = ("GET", "HEAD")
MIME_TYPES = MimeTypes(filenames=())  # independent of the machine's table of types
STATUSES = {NotFound: 404, ForbiddenOrigin: 403, ServerBusy: 503, FactscopeError: 422}


class SecurityMiddleware:
    """ASGI middleware around the application."""

    def __init__(self, app: Any, *, allowed_hosts: Collection[str], max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes
        self.allowed_hosts = {name.casefold() for name in allowed_hosts}

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Check a request and pass it on, or answer it with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        try:
            check_host(headers.get("host", ""), self.allowed_hosts)
            check_origin(scope["method"], path, headers)
            body = await self._read_body(scope["method"], receive)
        except FactscopeError as error:
            status = 413 if isinstance(error, LimitExceeded) else None
            response = error_response(error, status, {"connection": "close", **HEADERS})
            await response(scope, receive, send)
            return
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        has_session = re.fullmatch("[0-9a-f]{32}", cookie) is not None
        session = cookie if has_session else secrets.token_hex(16)
        scope.setdefault("state", {})["session"] = session
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Any:
            return unread.pop() if unread else await receive()  # then the disconnect

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                sent.update(HEADERS)
                if not has_session and not path.startswith("/static/"):
                    attributes = "Path=/; HttpOnly; SameSite=Strict; Max-Age=604800"
                    sent.append("set-cookie", f"{COOKIE}={session}; {attributes}")
            await send(message)

        await self.app(scope, receive_body, send_with_headers)

    async def _read_body(self, method: str, receive: Any) -> bytes:
        if method in SAFE_METHODS:
            return b""
        body, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while more and size <= MAX_DISCARDED_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    part = message.get("body", b"")
                    size, more = size + len(part), message.get("more_body", False)
                    if size <= self.max_body_bytes:
                        body += part
        except TimeoutError:
            raise LimitExceeded(
                f"the request body did not arrive within {BODY_TIMEOUT:g} seconds; send it again"
            ) from None
        if size > self.max_body_bytes:
            raise LimitExceeded(
                f"the request body is larger than {self.max_body_bytes} bytes; shorten it"
            )
        return bytes(body)


def check_host(host: str, allowed: Collection[str]) -> None:
    """Raise unless the Host header is an IP address or an allowed name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        if name.casefold() not in allowed:
            raise ForbiddenOrigin(
                f"the host name {name[:80]!r} is not allowed; use the server's IP address, or "
                "start it with --allowed-host"
            ) from None


def check_origin(method: str, path: str, headers: Mapping[str, str]) -> None:
    """Raise if a browser says that the request comes from another site."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise ForbiddenOrigin(
            f"the request comes from a page of {origin[:80]!r}; open this server's own page"
        )
    site = headers.get("sec-fetch-site", "none")
    same_origin = site in ("same-origin", "none")
    if not same_origin and (path.startswith("/api/") or method not in SAFE_METHODS):
        raise ForbiddenOrigin(
            "the request comes from a page of another site; open this server's own page"
        )


def without_folders(text: str) -> str:
    """The text without the folders of absolute paths, which are nobody's business."""
    return FOLDERS.sub("", text)


def error_to_dict(error: Exception) -> dict[str, str]:
    """The kind and message of an error. Only messages of our own errors reach the client."""
    if isinstance(error, FactscopeError):
        # A lone surrogate cannot be encoded.
        message = without_folders(str(error)).encode(errors="replace").decode()
        message = re.sub(r" \(--[a-z-]+\)", "", message)  # the page has no flags
        return {"kind": type(error).__name__, "message": printable(message)}
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        message = "the server is out of memory; try fewer samples, prompts or tokens"
        return {"kind": OutOfMemory.__name__, "message": message}
    return {"kind": "ServerError", "message": "internal error; see the server's log"}


def error_response(
    error: Exception, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error as JSON: {"error": {"kind": …, "message": …}}; the status follows from its kind."""
    default = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 500)
    return JSONResponse({"error": error_to_dict(error)}, status or default, headers)


def media_type(file: str) -> str:
    """The MIME type of a file."""
    kind = MIME_TYPES.guess_type(file)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def attachment(content: bytes, name: str) -> Response:
    """A file that the browser saves under a name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    headers = {
        "content-disposition": f'attachment; filename="{safe}"',
        "cache-control": "no-store",
    }
    return Response(content, media_type=media_type(name), headers=headers)
