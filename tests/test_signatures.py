"""Shapes are checked in functions and dataclasses of the package, and axes agree across them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from factscope.editing.edit import LowRank
from factscope.tracing.attribution import sum_windows

from signatures import shapes_checked


def scaled(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that is defined again at every call."""

    @shapes_checked
    def product(a: Float[Tensor, "row axis"], b: Float[Tensor, " axis"]) -> Float[Tensor, " row"]:
        return by * (a @ b) if by else b

    return product


def test_arguments_and_results_are_checked_and_every_definition_has_its_own_body():
    a, b = torch.ones(2, 3), torch.ones(3)
    one, two, wrong = scaled(1), scaled(2), scaled(0)
    assert (one(a, b).tolist(), two(a, b).tolist()) == ([3, 3], [6, 6])
    for function in (one, two):
        with pytest.raises(BeartypeCallHintViolation, match=r"product\(\) parameter b"):
            function(a, torch.ones(2))
    with pytest.raises(BeartypeCallHintViolation, match=r"product\(\) return"):
        wrong(a, b)


def test_axes_have_the_same_size_in_one_call_only():
    product = scaled(1)
    assert product(torch.ones(2, 3), torch.ones(3)).shape == (2,)
    assert product(torch.ones(4, 5), torch.ones(5)).shape == (4,)


def test_fields_of_dataclasses_are_checked():
    @shapes_checked
    @dataclass
    class Pair:
        a: Float[Tensor, " n"]
        b: Float[Tensor, " n"]

    assert Pair(torch.ones(2), torch.ones(2)).b.shape == (2,)
    with pytest.raises(BeartypeCallHintViolation, match="parameter b"):
        Pair(torch.ones(2), torch.ones(3))


def test_the_package_is_checked():
    with pytest.raises(BeartypeCallHintViolation, match="parameter A"):
        LowRank(torch.ones(4, 1), torch.ones(1))
    with pytest.raises(BeartypeCallHintViolation, match=r"sum_windows\(\) parameter"):
        sum_windows(torch.ones(()), [(0, 1)])
