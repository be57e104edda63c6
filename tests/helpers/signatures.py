"""A type checker for jaxtyping that compiles the check of a signature only once.

jaxtyping passes the type checker an empty function with the signature of each function. For nested
functions it does so at every definition, for instance for hooks in every forward pass.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

Function = Callable[..., Any]

_known: dict[tuple[object, ...], Function] = {}


def checked(empty: Function) -> Function:
    """The empty function with its arguments checked by beartype."""
    hints = tuple(empty.__annotations__.items())
    signature = (empty.__module__, empty.__qualname__, empty.__code__, hints)
    if signature not in _known:
        _known[signature] = beartype(empty)
    return _known[signature]
