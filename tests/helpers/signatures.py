"""Check the shapes in the signatures of the package while the tests run.

jaxtyping's import hook decorates every function and class with `jaxtyping.jaxtyped`, which checks
the types of all arguments, and twice: the tests of the tracing engine took three times as long.
`shapes_checked` takes its place. It checks shapes only, once; pyright checks all other types.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype

same_axes = jaxtyping.jaxtyped
"""As a context: an axis has the same size in all shapes that are checked inside."""


def has_shape(hint: Any) -> bool:
    """Whether a type hint is a tensor with a shape, or contains one."""
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(has_shape, get_args(hint)))


def shapes_checked(target: Any = None, *, typechecker: Any = None) -> Any:
    """Decorate a function, or a dataclass whose fields have shapes."""
    if target is None:
        return shapes_checked
    if inspect.isclass(target):
        if is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = shapes_checked(target.__init__)
        return target
    hints = {name: hint for name, hint in target.__annotations__.items() if has_shape(hint)}
    return _checked(target, hints) if hints else target


def _checked(function: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__module__, copy.__annotations__ = function.__module__, hints
    checked = beartype(copy)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        with same_axes("context"):
            return checked(*args, **keywords)

    return call
