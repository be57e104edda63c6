"""Products on halves: as exact as they say, and nothing else changes inside `quick`."""

from collections.abc import Callable

import pytest
import torch

from factscope.lm.accel import matmul as products
from factscope.lm.accel.linear import SPELLED_OUT, quick, replaced
from factscope.lm.accel.matmul import (
    STRETCH,
    _side_by_side,
    _with_ones,
    half_product,
    split_product,
)

from families import tiny


def problem(
    depth: int, width: int = 24, *, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, 5, depth, generator=generator)
    weight = 0.02 * torch.randn(depth, width, generator=generator)
    return x, weight, torch.randn(width, generator=generator) * bias


@pytest.mark.parametrize("width", [24, 21])
@pytest.mark.parametrize("depth", [40, STRETCH + 100])
@pytest.mark.parametrize(
    ("product", "error"), [(split_product, 1e-6), (half_product, 2**-11)], ids=["float32", "tf32"]
)
def test_a_product_has_the_precision_it_says(product, error: float, depth: int, width: int) -> None:
    x, weight, bias = problem(depth, width)
    wanted = x.double() @ weight.double() + bias.double()
    found = product(weight, bias)(x)
    assert found.dtype == torch.float32
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < error


@pytest.mark.parametrize("width", [24, 21])
@pytest.mark.parametrize("product", [split_product, half_product])
def test_without_a_bias(product, width: int) -> None:
    x, weight, nothing = problem(40, width, bias=False)
    torch.testing.assert_close(product(weight, None)(x), product(weight, nothing)(x))


@pytest.mark.parametrize("product", [split_product, half_product])
def test_an_input_out_of_range_shows(product) -> None:
    x, weight, bias = problem(40)
    x[0, 0, 0] = 1e6
    assert not product(weight, bias)(x).isfinite().all()


def test_availability_is_tried_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.available(torch.device("cpu"))
    products.available.cache_clear()

    def refuse(*args: object) -> None:
        raise TypeError("addmm() got an unexpected keyword argument 'out_dtype'")

    monkeypatch.setattr(products, "_add_times", refuse)
    assert not products.available(torch.device("cpu"))
    products.available.cache_clear()


@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom", "llama"])
def test_a_quick_block_is_itself_again_afterwards(family: str) -> None:
    block = tiny(family).blocks[0]
    before = {name: dict(vars(module)) for name, module in block.named_modules()}
    with quick(block):
        changed = [m for m in block.modules() if "forward" in vars(m)]
        assert bool(changed) == (family != "llama")
    with pytest.raises(ZeroDivisionError), quick(block):
        raise ZeroDivisionError
    assert {name: dict(vars(module)) for name, module in block.named_modules()} == before


@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom"])
def test_fused_gelu_is_the_spelled_out_one(family: str) -> None:
    block = tiny(family).blocks[0]
    [module] = [m for m in block.modules() if type(m).__name__ in SPELLED_OUT]
    x = torch.linspace(-6, 6, 1001)
    own = module(x)
    with quick(block):
        torch.testing.assert_close(module(x), own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [24, 21])
@pytest.mark.parametrize(
    ("product", "error"), [(split_product, 1e-6), (half_product, 2**-11)], ids=["float32", "tf32"]
)
def test_gradients_have_that_precision_too(product, error: float, width: int) -> None:
    x, weight, bias = problem(STRETCH + 100, width)
    slope = torch.randn(4, 5, width, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    (found,) = torch.autograd.grad(product(weight, bias)(x), x, slope)
    wanted = slope.double() @ weight.double().T
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < error


def side_by_side(x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    return _side_by_side(x, x.shape[1], fused=fused)


def further_apart(x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    return _side_by_side(x, x.shape[1] + 3, fused=fused)


@pytest.mark.parametrize("form", [side_by_side, further_apart, _with_ones])
@pytest.mark.parametrize("columns", [1, 24, 1030])
def test_one_kernel_cuts_numbers_as_several_operations_do(
    form: Callable[..., torch.Tensor], columns: int
) -> None:
    x = torch.randn(5, 2 * columns, generator=torch.Generator().manual_seed(0)) * 100
    for some in (x[:, :columns], x.T[:columns, :5]):  # rows apart, and columns apart
        assert torch.equal(form(some, fused=True), form(some, fused=False))


def test_the_head_is_answered_for_like_a_block() -> None:
    lm = tiny("gpt2")
    states = torch.randn(3, lm.width)
    own = lm.head(states)
    head = lm.model.get_output_embeddings()
    with replaced(head, split_product(head.weight.T, None)):
        found = lm.head(states)
    assert not torch.equal(found, own)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    assert torch.equal(lm.head(states), own)
