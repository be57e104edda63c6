"""Hooks as `with` blocks: read and replace activations, and always remove the hooks again.

The only file that registers hooks. A hook function may return a tensor, which replaces the module's
output.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of these modules has forward hooks."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@contextmanager
def hook_outputs(
    *pairs: tuple[nn.Module, Callable[[Tensor], Tensor | None]],
) -> Iterator[None]:
    """Call each function with its module's output; a returned tensor replaces it.

    If a module returns a tuple, as some families' blocks do, the function gets its first item.
    """

    def hook_for(function: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, tuple):
                return function(output)
            changed = function(output[0])
            return None if changed is None else (changed, *output[1:])

        return hook

    with _temporary(m.register_forward_hook(hook_for(f)) for m, f in pairs):
        yield


@contextmanager
def hook_calls(
    *pairs: tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]],
) -> Iterator[None]:
    """Call each function with its module's arguments and keywords, before the module runs."""

    def hook_for(function: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            function(args, kwargs)

        return hook

    with _temporary(m.register_forward_pre_hook(hook_for(f), with_kwargs=True) for m, f in pairs):
        yield


@contextmanager
def hook_io(
    *pairs: tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]],
) -> Iterator[None]:
    """Call each function with its module's input and output; a returned tensor is the output."""

    def hook_for(function: Callable[[Tensor, Tensor], Tensor | None]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            return function(args[0], output)

        return hook

    with _temporary(m.register_forward_hook(hook_for(f)) for m, f in pairs):
        yield


@contextmanager
def _temporary(handles: Iterable[Any]) -> Iterator[None]:
    """Remove registered hooks at the end of the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield
