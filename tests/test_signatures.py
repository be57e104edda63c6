"""Types and shapes are checked, also for functions that are defined repeatedly."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor

from factscope.progress import NestedProgress, no_progress

from signatures import checked


def scaled(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that is defined again at every call."""

    @jaxtyped(typechecker=checked)
    def product(a: Float[Tensor, "row axis"], b: Float[Tensor, " axis"]) -> Float[Tensor, " row"]:
        return by * (a @ b) if by else b

    return product


def test_every_definition_is_checked_and_has_its_own_body():
    a, b = torch.ones(2, 3), torch.ones(3)
    one, two, wrong = scaled(1), scaled(2), scaled(0)
    assert (one(a, b).tolist(), two(a, b).tolist()) == ([3, 3], [6, 6])
    for function in (one, two):
        with pytest.raises(TypeCheckError, match=r"parameters of .*product"):
            function(a, torch.ones(2))
    with pytest.raises(TypeCheckError, match=r"return value of .*product"):
        wrong(a, b)


@pytest.mark.parametrize("time", ["first", "second"])
def test_nested_functions_of_the_package_are_checked_every_time(time: str):
    advance = NestedProgress(no_progress).within(0.0, 1.0)
    with pytest.raises(TypeCheckError, match=r"parameters of .*within.*advance"):
        advance(f"not a number, the {time} time")  # pyright: ignore
