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
def hook_io(
    *pairs: tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]],
) -> Iterator[None]:
    """Call each function with its module's input and output; a returned tensor is the output."""
    with ExitStack() as hooks:
        for module, function in pairs:
            hooks.enter_context(
                module.register_forward_hook(lambda _, args, out, f=function: f(args[0], out))
            )
        yield


@contextmanager
def hook_calls(
    *pairs: tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]],
) -> Iterator[None]:
    """Call each function with its module's arguments and keywords, before the module runs."""
    with ExitStack() as hooks:
        for module, function in pairs:
            hooks.enter_context(
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, f=function: f(args, kwargs), with_kwargs=True
                )
            )
        yield


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

    with ExitStack() as hooks:
        for module, function in pairs:
            hooks.enter_context(module.register_forward_hook(hook_for(function)))
        yield
