"""Captured passes give what eager ones give, and are used for nothing else.

Real graphs are captured in tests/gpu; here a fake one replays on the CPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.accel import graphs, run
from factscope.lm.accel.graphs import CACHE, _no_garbage_collection, captured
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import TraceBatch, clean_answers, trace

from editing_facts import text_lm
from fake_graph import FakeGraph, use_fake_graphs


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    return use_fake_graphs(monkeypatch)


@pytest.fixture(scope="module")
def lm() -> LM:
    return text_lm("gpt2")


def row(*ids: int) -> Tensor:
    return torch.tensor([ids])


def test_the_third_call_is_a_replay(fake: type[FakeGraph]) -> None:
    lm = text_lm("gpt2")

    def last(ids: Tensor) -> Tensor:
        return forward(lm, ids).states[-1]

    texts = [row(1, 2, 3), row(4, 5, 6), row(7, 8, 9), row(3, 2, 1)]
    for i, ids in enumerate(texts):
        assert torch.equal(captured(lm, "a", last, ids), last(ids))
        assert fake.replays == max(0, i - 1)
    captured(lm, "b", last, texts[0])  # another key
    captured(lm, "a", last, row(1, 2))  # another shape
    torch.set_float32_matmul_precision("high")
    try:
        captured(lm, "a", last, texts[0])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert fake.replays == 2
    with torch.no_grad():
        lm.mlp_weight(1).mul_(1.5)  # changed in place: a graph reads the new values
    assert torch.equal(captured(lm, "a", last, texts[0]), last(texts[0]))
    assert fake.replays == 3
    block: Any = lm.blocks[1]
    block.ln_1.weight = torch.nn.Parameter(2 * block.ln_1.weight)  # at another address
    assert torch.equal(captured(lm, "a", last, texts[0]), last(texts[0]))
    assert fake.replays == 3


def test_a_hooked_model_is_not_replayed(fake: type[FakeGraph], lm: LM) -> None:
    lm.cache.clear()

    def last(ids: Tensor) -> Tensor:
        return forward(lm, ids).states[-1]

    for _ in range(3):
        captured(lm, "a", last, row(1, 2, 3))
    assert fake.replays == 1
    with hook_outputs((lm.mlp_out(1), lambda x: x * 2)):
        assert torch.equal(captured(lm, "a", last, row(1, 2, 3)), last(row(1, 2, 3)))
    assert fake.replays == 1


def test_a_capture_that_differs_is_not_used(
    fake: type[FakeGraph], lm: LM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm.cache.clear()
    calls = 0

    def counts(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + calls

    for i in range(1, 5):
        assert captured(lm, "a", counts, torch.zeros(2)).tolist() == [i + (i > 2)] * 2
    assert "not used" in caplog.text
    assert fake.replays == 0
    monkeypatch.setattr(graphs, "total_memory", lambda device: 0)  # nor one with too large results
    for _ in range(4):
        captured(lm, "b", torch.clone, torch.zeros(2))
    assert fake.replays == 0


def test_tensors_created_only_during_capture_are_dropped(fake: type[FakeGraph], lm: LM) -> None:
    """While it is captured, transformers makes a causal mask that it otherwise does without."""
    lm.cache.clear()
    calls = 0

    def masked(x: Tensor) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        return {"args": [{"mask": None if calls < 3 else x, "other": None}], "out": (2 * x, x)}

    for i in range(1, 5):
        found = captured(lm, "a", masked, torch.full((2,), i))
        assert found["args"] == [{"mask": None, "other": None}]
        assert [x.tolist() for x in found["out"]] == [[2 * i] * 2, [i] * 2]
    assert fake.replays == 2

    def varying(x: Tensor) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return [x] * (1 if calls % 2 else 2)

    for _ in range(4):
        captured(lm, "b", varying, torch.zeros(2))
    assert fake.replays == 2  # other differences are errors


def test_the_least_recently_used_pass_is_dropped(
    fake: type[FakeGraph], lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm.cache.clear()
    monkeypatch.setattr(graphs, "MAX_PASSES", 2)
    for key in ("a", "b", "a", "c"):
        captured(lm, key, torch.clone, torch.zeros(1))
    assert [key[0] for key in lm.cache[CACHE]] == ["a", "c"]


def test_garbage_collection_is_off_during_capture() -> None:
    import gc

    with _no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), _no_garbage_collection():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with _no_garbage_collection():
            pass
        assert not gc.isenabled()  # it stays off where it was off
    finally:
        gc.enable()


def test_traces_of_one_shape_replay_their_runs(
    fake: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm("gpt2")
    settings = Tracing(corruption=Corruption(distribution="tokens"), window=2)
    facts = [
        Fact(subject=subject, prompt="{} is in", replacement=other)
        for subject, other in (("Rome", "Peru"), ("Peru", "Rome"), ("Cairo", "London"))
    ]
    expected = [trace(lm, fact, settings) for fact in facts]
    monkeypatch.setattr(run, "on_gpu", lambda lm: True)
    assert [trace(lm, fact, settings) for fact in facts] == expected
    assert fake.captures
    assert fake.replays
    # A run that is still used keeps its values.
    budget, scale = Budget(2**30), NoiseScale(sigma=1.0)
    batches = [
        TraceBatch(lm=lm, answers=[answer], settings=settings, scale=scale, budget=budget)
        for answer in clean_answers(lm, facts, settings)
    ]
    runs = [batch.run(range(1)) for batch in batches]
    for batch, kept in zip(batches, runs, strict=True):
        ids = torch.tensor([batch.answers[0].ids, batch.answers[0].replaced_ids])
        plain = forward(lm, ids, keep=settings.contributions)
        for x, y in zip(graphs.tensors_in(kept), graphs.tensors_in(plain), strict=True):
            assert torch.equal(x, y)
