"""Types and shapes are checked at every call; the check of a signature is compiled only once.

jaxtyping has an empty function with the signature of every function checked, also of those that
are defined inside others, anew each time: of hooks, at every pass through a model.
"""

from collections.abc import Callable
from typing import Any

from beartype import beartype

__all__ = ["checked"]

Function = Callable[..., Any]

_known: dict[tuple[object, ...], Function] = {}


def checked(empty: Function) -> Function:
    """An empty function that refuses arguments of other types than it says."""
    hints = tuple(empty.__annotations__.items())
    signature = (empty.__module__, empty.__qualname__, empty.__code__, hints)
    if signature not in _known:
        _known[signature] = beartype(empty)
    return _known[signature]
