"""Attention for short rows says what the library's own does; its kernels run by interpretation."""

import pytest
import torch

from factscope.editing.contexts import edit_request
from factscope.editing.value_search import prepare_search
from factscope.lm.accel import attention as short_attention
from factscope.lm.accel.attention import _bias
from factscope.lm.accel.kernels import attend

from editing_facts import FACTS, FEW, PREFIXES, text_lm


@pytest.mark.parametrize("kind", [torch.float32, torch.half], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(("key_heads", "past"), [(4, 0), (4, 5), (2, 40)])
def test_it_equals_torchs_own(kind: torch.dtype, boolean: bool, key_heads: int, past: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(3, tokens, heads, 20, generator=generator).transpose(1, 2)

    new = [draw(heads, 5).requires_grad_() for heads in (4, key_heads, key_heads)]
    query, key, value = new
    past_key, past_value = draw(key_heads, past), draw(key_heads, past)
    seen = torch.rand(3, 1, 5, past + 5, generator=generator) > 0.3
    seen[..., past:] |= torch.eye(5, dtype=torch.bool)
    mask = seen if boolean else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, torch.cat([past_key, key], 2), torch.cat([past_value, value], 2),
        attn_mask=mask, scale=0.3, enable_gqa=key_heads < 4,
    ).transpose(1, 2)  # fmt: skip
    found = attend(query, key, value, past_key, past_value, _bias(mask, kind), 0.3)
    tolerance = 2e-3 if kind == torch.half else 1e-6
    assert (found - wanted).abs().max().item() < tolerance * wanted.abs().max().item()
    slope = torch.randn(wanted.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(x, new, slope) for x in (found, wanted))
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).abs().max().item() < 3 * tolerance * y.abs().max().item()


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "opt", "gptj", "gemma2"])
def test_a_search_sees_the_same_losses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the past apart, for the families that let us; the others keep their own attention."""
    lm = text_lm(family)
    asked = [edit_request(lm, fact, PREFIXES[:1]) for fact in FACTS[1:]]

    def losses() -> tuple[torch.Tensor, torch.Tensor, bool]:
        problem = prepare_search(lm, asked, 0, "mlp", "subject-last", FEW).problem
        delta = torch.full((2, lm.width), 0.05, requires_grad=True)
        with short_attention.short_attention(problem.hidden.device), torch.enable_grad():
            found = problem.losses(delta)
            (slope,) = torch.autograd.grad(found.sum(), delta)
        some = torch.tensor([1])
        with short_attention.short_attention(problem.hidden.device):
            fewer = problem.only(some).losses(delta.detach()[some])
        assert torch.allclose(fewer, found.detach()[some], rtol=1e-5)
        return found.detach(), slope, problem.apart

    wanted, wanted_slope, apart = losses()
    assert not apart
    monkeypatch.setattr(short_attention, "kernels_here", lambda device: True)
    lm.cache.clear()
    found, slope, apart = losses()
    assert torch.allclose(found, wanted, rtol=1e-5)
    assert (slope - wanted_slope).abs().max() < 1e-4 * wanted_slope.abs().max()
    assert apart == (family not in ("gptj", "gemma2"))


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    monkeypatch.setattr(short_attention, "kernels_here", lambda device: True)

    def apart() -> bool:
        lm.cache.clear()
        return prepare_search(
            lm, [edit_request(lm, FACTS[2])], 0, "mlp", "subject-last", FEW
        ).problem.apart

    assert apart()
    monkeypatch.setattr("factscope.lm.accel.kernels.attend", lambda *x: 1.1 * attend(*x))
    assert not apart()

    def broken(*x: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("factscope.lm.accel.kernels.attend", broken)
    assert not apart()
