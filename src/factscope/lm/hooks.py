"""Hooks as `with` blocks: read and replace activations, and always remove the hooks again.

The only file that registers hooks. A hook function may return a tensor, which replaces the module's
output.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of these modules has forward hooks."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@contextmanager
def _removed_at_exit(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield


def hook_io(
    *pairs: tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]],
) -> AbstractContextManager[None]:
    """Call each function with its module's input and output; a returned tensor is the output."""
    return _removed_at_exit(
        module.register_forward_hook(lambda _, args, out, f=function: f(args[0], out))
        for module, function in pairs
    )


def hook_calls(
    *pairs: tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]],
) -> AbstractContextManager[None]:
    """Call each function with its module's arguments and keywords, before the module runs."""
    return _removed_at_exit(
        module.register_forward_pre_hook(
            lambda _, args, kw, f=function: f(args, kw), with_kwargs=True
        )
        for module, function in pairs
    )


def hook_outputs(
    *pairs: tuple[nn.Module, Callable[[Tensor], Tensor | None]],
) -> AbstractContextManager[None]:
    """Call each function with its module's output; a returned tensor replaces it.

    If a module returns a tuple, as some families' blocks do, the function gets its first item.
    """
    return _removed_at_exit(
        module.register_forward_hook(partial(_replace_output, function))
        for module, function in pairs
    )


def _replace_output(
    function: Callable[[Tensor], Tensor | None], module: nn.Module, args: Any, output: Any
) -> Any:
    if not isinstance(output, tuple):
        return function(output)
    changed = function(output[0])
    return None if changed is None else (changed, *output[1:])
