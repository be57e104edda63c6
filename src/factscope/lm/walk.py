"""The parts of a model, found faster than torch finds them: some are asked for at every edit."""

from collections.abc import Iterator

from torch import nn

__all__ = ["modules_of", "weights_of"]


def modules_of(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules below it; one that stands twice comes twice."""
    left = [module]
    while left:
        found = left.pop()
        yield found
        left += [part for part in found._modules.values() if part is not None]


def weights_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of the module and of all modules below it; one that is shared comes twice."""
    for found in modules_of(module):
        for weight in found._parameters.values():
            if weight is not None:
                yield weight
