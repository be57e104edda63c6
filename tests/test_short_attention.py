"""Attention for short rows says what the library's own does."""

import pytest
import torch

from factscope.lm.short_attention import _bias, attend


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_it_equals_torchs_own(halves: bool, boolean: bool, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 5, 8, generator=generator, requires_grad=True)
    key, value = (
        torch.randn(3, key_heads, 7, 8, generator=generator, requires_grad=True) for _ in range(2)
    )
    seen = torch.rand(3, 1, 5, 7, generator=generator) > 0.3
    seen[..., 0] = True
    mask = seen if boolean else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=key_heads < 4
    ).transpose(1, 2)
    bias = _bias(mask, 3, 4, torch.half if halves else torch.float32)
    found = attend(query, key, value, bias, 0.3)
    tolerance = 3e-3 if halves else 1e-6
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max().item() < tolerance * wanted.abs().max().item()
    slope = torch.randn(wanted.shape, generator=generator)
    for x, y in zip(
        torch.autograd.grad(found, (query, key, value), slope),
        torch.autograd.grad(wanted, (query, key, value), slope),
        strict=True,
    ):
        assert (x - y).abs().max().item() < 3 * tolerance * y.abs().max().item()
