"""Errors as the page hears them: the command line's words, in JSON, with a status."""

from typing import Any

from factscope.errors import (
    BadInput,
    Busy,
    FactscopeError,
    Foreign,
    NotHere,
    OutOfMemory,
)
from factscope.tracing.memory import is_out_of_memory

__all__ = ["status_of", "words_of"]

OURS = "the server failed at this; its log says why"
MEMORY = "memory ran out; try fewer samples, prompts or tokens"

STATUS: dict[type[FactscopeError], int] = {
    NotHere: 404,
    Foreign: 403,
    Busy: 503,
    BadInput: 422,
    FactscopeError: 422,
}
"""The first that fits counts."""


def words_of(error: Exception) -> dict[str, Any]:
    """An error as plain values: which of the tree it is, and its words."""
    if isinstance(error, FactscopeError):
        return {"kind": type(error).__name__, "message": shown(str(error))}
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return {"kind": OutOfMemory.__name__, "message": MEMORY}
    return {"kind": "ServerError", "message": OURS}


def status_of(error: FactscopeError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def shown(text: str) -> str:
    """Text that can be sent: half characters replaced."""
    return text.encode(errors="replace").decode()
