"""Errors as JSON with an HTTP status, and files as attachments."""

import re
from mimetypes import MimeTypes
from typing import Any

from starlette.responses import Response

from factscope.errors import FactscopeError, ForbiddenOrigin, NotFound, OutOfMemory, ServerBusy
from factscope.lm.memory import is_out_of_memory

MIME_TYPES = MimeTypes(filenames=())


def error_to_dict(error: Exception) -> dict[str, Any]:
    """The kind and message of an error. Only messages of our own errors reach the client."""
    if isinstance(error, FactscopeError):
        return {"kind": type(error).__name__, "message": valid_unicode(str(error))}
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        message = "the server is out of memory; try fewer samples, prompts or tokens"
        return {"kind": OutOfMemory.__name__, "message": message}
    return {"kind": "ServerError", "message": "internal error; see the server's log"}


def error_to_status(error: FactscopeError) -> int:
    """The HTTP status of an error."""
    statuses = {NotFound: 404, ForbiddenOrigin: 403, ServerBusy: 503}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 422)


def valid_unicode(text: str) -> str:
    """The text with lone surrogates replaced, so that it can be encoded."""
    return text.encode(errors="replace").decode()


def media_type(file: str) -> str:
    """The MIME type of a file, independent of the machine's table of types."""
    kind = MIME_TYPES.guess_type(file)[0] or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") else kind


def attachment(content: bytes, name: str) -> Response:
    """A file that the browser saves under a name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return Response(
        content,
        media_type=media_type(name),
        headers={
            "content-disposition": f'attachment; filename="{safe}"',
            "cache-control": "no-store",
        },
    )
