"""Split-precision matmul and fast linear layers have their stated precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from factscope.lm.accel import linear, matmul
from factscope.lm.accel.linear import UNFUSED_GELU, fast_blocks, fast_blocks_in_turn, replaced
from factscope.lm.accel.matmul import (
    CHUNK,
    _high_low,
    _with_ones,
    half_matmul,
    split_matmul,
    supports_mixed,
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
@pytest.mark.parametrize("depth", [40, CHUNK + 100])
@pytest.mark.parametrize(
    ("product", "error"), [(split_matmul, 1e-6), (half_matmul, 2**-11)], ids=["float32", "tf32"]
)
def test_products_have_their_stated_precision(
    product, error: float, depth: int, width: int
) -> None:
    x, weight, bias = problem(depth, width)
    wanted = x.double() @ weight.double() + bias.double()
    found = product(weight, bias)(x)
    assert found.dtype == torch.float32
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < error


@pytest.mark.parametrize("width", [24, 21])
@pytest.mark.parametrize("product", [split_matmul, half_matmul])
def test_a_missing_bias_is_zero(product, width: int) -> None:
    x, weight, nothing = problem(40, width, bias=False)
    torch.testing.assert_close(product(weight, None)(x), product(weight, nothing)(x))


@pytest.mark.parametrize("product", [split_matmul, half_matmul])
def test_an_overflow_shows_in_the_result(product) -> None:
    x, weight, bias = problem(40)
    x[0, 0, 0] = 1e6
    assert not product(weight, bias)(x).isfinite().all()


def test_mixed_precision_support_is_detected_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supports_mixed(torch.device("cpu"))
    supports_mixed.cache_clear()

    def refuse(*args: object) -> None:
        raise TypeError("addmm() got an unexpected keyword argument 'out_dtype'")

    monkeypatch.setattr(matmul, "_add_scaled_", refuse)
    assert not supports_mixed(torch.device("cpu"))
    supports_mixed.cache_clear()


@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom", "llama"])
@pytest.mark.parametrize("fast", [fast_blocks, fast_blocks_in_turn])
def test_blocks_are_unchanged_afterwards(family: str, fast: Callable[..., Any]) -> None:
    block = tiny(family).blocks[0]
    before = {name: dict(vars(module)) for name, module in block.named_modules()}
    with fast([block]):
        changed = [m for m in block.modules() if "forward" in vars(m)]
        assert bool(changed) == (family != "llama" or fast is fast_blocks_in_turn)
    with pytest.raises(ZeroDivisionError), fast([block]):
        raise ZeroDivisionError
    assert {name: dict(vars(module)) for name, module in block.named_modules()} == before


@pytest.mark.parametrize("family", ["gpt2", "gptj", "bloom"])
def test_fused_gelu_equals_the_unfused_one(family: str) -> None:
    block = tiny(family).blocks[0]
    [module] = [m for m in block.modules() if type(m).__name__ in UNFUSED_GELU]
    x = torch.linspace(-6, 6, 1001)
    own = module(x)
    with fast_blocks([block]):
        torch.testing.assert_close(module(x), own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [24, 21])
@pytest.mark.parametrize(
    ("product", "error"), [(split_matmul, 1e-6), (half_matmul, 2**-11)], ids=["float32", "tf32"]
)
def test_gradients_have_the_same_precision(product, error: float, width: int) -> None:
    x, weight, bias = problem(CHUNK + 100, width)
    gradient = torch.randn(4, 5, width, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    (found,) = torch.autograd.grad(product(weight, bias)(x), x, gradient)
    wanted = gradient.double() @ weight.double().T
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < error


def adjacent(x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    return _high_low(x, x.shape[1], fused=fused)


def padded(x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    return _high_low(x, x.shape[1] + 3, fused=fused)


@pytest.mark.parametrize("form", [adjacent, padded, _with_ones])
@pytest.mark.parametrize("columns", [1, 24, 1030])
def test_the_splitting_kernel_equals_torch_operations(
    form: Callable[..., torch.Tensor], columns: int
) -> None:
    x = torch.randn(5, 2 * columns, generator=torch.Generator().manual_seed(0)) * 100
    for some in (x[:, :columns], x.T[:columns, :5]):  # with a row stride, with a column stride
        assert torch.equal(form(some, fused=True), form(some, fused=False))


def test_the_head_can_be_replaced() -> None:
    lm = tiny("gpt2")
    states = torch.randn(3, lm.width)
    own = lm.head(states)
    head = lm.model.get_output_embeddings()
    with replaced({head: split_matmul(head.weight.T, None)}):
        found = lm.head(states)
    assert not torch.equal(found, own)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    assert torch.equal(lm.head(states), own)


@pytest.mark.parametrize("bias", [False, True])
def test_a_half_precision_layer_of_odd_width_is_padded(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_on_gpu", lambda weight: True)
    layer = torch.nn.Linear(16, 13, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(2, 3, 16, dtype=torch.bfloat16)
    expected = layer(x)
    [(module, forward)] = linear.fast_forwards(layer).items()
    assert module is layer
    torch.testing.assert_close(forward(x), expected)
    assert linear.fast_forwards(torch.nn.Linear(16, 24, dtype=torch.bfloat16)) == {}


def test_only_one_block_has_copies_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny("gpt2")
    monkeypatch.setattr(linear, "_on_gpu", lambda weight: True)
    ids = torch.arange(6)[None]
    expected = lm.model(ids).logits
    copied: list[int] = []

    def copies(*_: object) -> None:
        fast = [i for i, b in enumerate(lm.blocks) if any("forward" in vars(m) for m in b.modules()
                if m is not b)]  # fmt: skip
        assert len(fast) == 1
        copied.extend(fast)

    with fast_blocks_in_turn(lm.blocks):
        handles = [block.register_forward_hook(copies) for block in lm.blocks]
        found = lm.model(ids).logits
        for handle in handles:
            handle.remove()
    assert copied == list(range(lm.n_layers))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
