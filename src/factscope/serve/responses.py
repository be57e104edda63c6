"""Errors as the page hears them: the command line's words, in JSON, with a status.

Files to take away: each with its type, and as an attachment that a browser saves.
"""

import re
from pathlib import PurePath
from typing import Any

from starlette.responses import Response

from factscope.errors import (
    BadInput,
    FactscopeError,
    ForbiddenOrigin,
    NotFound,
    OutOfMemory,
    ServerBusy,
)
from factscope.lm.memory import is_out_of_memory

__all__ = [
    "MEDIA",
    "attached",
    "error_message",
    "error_status",
]

OURS = "the server failed at this; its log says why"
MEMORY = "memory ran out; try fewer samples, prompts or tokens"

STATUS: dict[type[FactscopeError], int] = {
    NotFound: 404,
    ForbiddenOrigin: 403,
    ServerBusy: 503,
    BadInput: 422,
    FactscopeError: 422,
}
"""The first that fits counts."""


def error_message(error: Exception) -> dict[str, Any]:
    """An error as plain values: which of the tree it is, and its words."""
    if isinstance(error, FactscopeError):
        return {"kind": type(error).__name__, "message": shown(str(error))}
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return {"kind": OutOfMemory.__name__, "message": MEMORY}
    return {"kind": "ServerError", "message": OURS}


def error_status(error: FactscopeError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def shown(text: str) -> str:
    """Text that can be sent: half characters replaced."""
    return text.encode(errors="replace").decode()


MEDIA = {
    ".json": "application/json",
    ".html": "text/html; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".zip": "application/zip",
    ".safetensors": "application/octet-stream",
}


def attached(file: str, content: bytes, name: str) -> Response:
    """A file's contents, to be saved under a name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return Response(
        content,
        media_type=MEDIA[PurePath(file).suffix],
        headers={
            "content-disposition": f'attachment; filename="{safe}"',
            "cache-control": "no-store",
        },
    )
