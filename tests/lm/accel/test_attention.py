"""Suffix attention equals torch's attention; the kernels run in triton's interpreter."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from factscope.editing.contexts import edit_request
from factscope.editing.value_search import ValueObjective, prepare_search
from factscope.facts import Fact
from factscope.lm.accel import attention, run
from factscope.lm.accel.attention import _bias
from factscope.lm.accel.kernels import suffix_attention
from factscope.lm.accel.search import _with_suffix_attention
from factscope.lm.model import LM
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from editing_facts import FACTS, FEW, PREFIXES, text_lm


@pytest.mark.parametrize("kind", [torch.float32, torch.half], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize(("key_heads", "past", "past_rows"), [(4, 0, 3), (4, 5, 1), (2, 40, 3)])
def test_the_kernel_equals_torch(
    kind: torch.dtype, boolean: bool, key_heads: int, past: int, past_rows: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(3, tokens, heads, 20, generator=generator).transpose(1, 2)

    new = [draw(heads, 5).requires_grad_() for heads in (4, key_heads, key_heads)]
    query, key, value = new
    past_key, past_value = (draw(key_heads, past)[:past_rows] for _ in range(2))
    seen = torch.rand(3, 1, 5, past + 5, generator=generator) > 0.3
    seen[..., past:] |= torch.eye(5, dtype=torch.bool)
    mask = seen if boolean else torch.zeros(seen.shape).masked_fill(~seen, -1e30)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, torch.cat([past_key.expand(3, -1, -1, -1), key], 2),
        torch.cat([past_value.expand(3, -1, -1, -1), value], 2),
        attn_mask=mask, scale=0.3, enable_gqa=key_heads < 4,
    ).transpose(1, 2)  # fmt: skip
    found = suffix_attention(query, key, value, past_key, past_value, _bias(mask, kind), 0.3)
    tolerance = 2e-3 if kind == torch.half else 1e-6
    assert (found - wanted).abs().max().item() < tolerance * wanted.abs().max().item()
    gradient = torch.randn(wanted.shape, generator=generator)
    ours, theirs = (torch.autograd.grad(x, new, gradient) for x in (found, wanted))
    for x, y in zip(ours, theirs, strict=True):
        assert (x - y).abs().max().item() < 3 * tolerance * y.abs().max().item()


def test_the_kernel_reads_rows_beyond_32_bit_offsets() -> None:
    """Rows 2³⁰ elements apart, as in the largest batches of a GPU; only the rows are in memory."""
    generator = torch.Generator().manual_seed(0)
    rows, slots, dim, stride = 3, 2, 16, 2**30
    apart = torch.empty((rows - 1) * stride + slots * dim, dtype=torch.half)
    query = apart.as_strided((rows, 1, slots, dim), (stride, slots * dim, dim, 1))
    query.copy_(torch.randn(query.shape, generator=generator))
    assert int(query[2, 0, 0].data_ptr() - query.data_ptr()) == 2**31 * query.itemsize
    close = query.clone(memory_format=torch.contiguous_format)
    past = torch.empty(rows, 1, 0, dim, dtype=torch.half)
    bias = torch.zeros(rows, 1, slots, slots)
    found, expected = (
        suffix_attention(x.requires_grad_(), x, x, past, past, bias, 0.3) for x in (query, close)
    )
    assert torch.equal(found, expected)
    ours, theirs = (
        torch.autograd.grad(result.sum(), x) for result, x in ((found, query), (expected, close))
    )
    assert torch.equal(ours[0], theirs[0])


def objective_of(lm: LM, facts: list[Fact]) -> ValueObjective:
    requests = [edit_request(lm, fact, PREFIXES[:1]) for fact in facts]
    prepared, _, _ = prepare_search(lm, requests, 0, "mlp", "subject-last", FEW)
    objective = _with_suffix_attention(prepared)
    assert isinstance(objective, ValueObjective)
    return objective


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "opt", "gptj", "gemma2"])
def test_the_value_search_has_the_same_losses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For families whose attention can be replaced; GPT-J and Gemma 2 keep their own."""
    lm = text_lm(family)

    def losses() -> tuple[torch.Tensor, torch.Tensor, bool]:
        objective = objective_of(lm, FACTS[1:])
        delta = torch.full((2, lm.width), 0.05, requires_grad=True)
        device, some = objective.hidden.device, torch.tensor([1])
        with attention.suffix_attention(device) if objective.suffix_attention else nullcontext():
            with torch.enable_grad():
                found, _ = objective.evaluate(delta)
                (gradient,) = torch.autograd.grad(found.sum(), delta)
            fewer, _ = objective.select(some).evaluate(delta.detach()[some])
        assert torch.allclose(fewer, found.detach()[some], rtol=1e-5)
        return found.detach(), gradient, objective.suffix_attention

    expected, expected_gradient, split = losses()
    assert not split
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)
    lm.cache.clear()
    found, gradient, split = losses()
    assert torch.allclose(found, expected, rtol=1e-5)
    assert (gradient - expected_gradient).abs().max() < 1e-4 * expected_gradient.abs().max()
    assert split == (family not in ("gptj", "gemma2"))


def test_kernels_with_wrong_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    monkeypatch.setattr(attention, "has_kernels", lambda device: True)

    def used() -> bool:
        lm.cache.clear()
        return objective_of(lm, FACTS[2:]).suffix_attention

    assert used()
    name = "factscope.lm.accel.kernels.suffix_attention"
    monkeypatch.setattr(name, lambda *x: 1.1 * suffix_attention(*x))
    assert not used()

    def broken(*x: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(name, broken)
    assert not used()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "gemma2"])
def test_half_precision_traces_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-J and Gemma 2 keep their own attention."""
    lm = text_lm(family)
    lm = replace(lm, model=copy.deepcopy(lm.model).half(), cache={})
    settings = Tracing(corruption=Corruption(samples=2), window=2, sever=("mlp",))
    expected = trace(lm, FACTS[0], settings)
    calls: list[torch.Size] = []

    def counted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(query.shape)
        return suffix_attention(query, *others)

    monkeypatch.setattr(attention, "has_kernels", lambda device: True)
    monkeypatch.setattr(run, "on_gpu", lambda lm: True)
    monkeypatch.setattr("factscope.lm.accel.kernels.suffix_attention", counted)
    found = trace(lm, FACTS[0], settings)
    assert (len(calls) > lm.n_layers) == (family not in ("gptj", "gemma2"))
    for tables, slow in ((found.restored, expected.restored), (found.severed, expected.severed)):
        for kind, table in slow.items():
            gap = (torch.tensor(tables[kind]) - torch.tensor(table)).abs().max()
            assert gap < 1e-2 * expected.clean
