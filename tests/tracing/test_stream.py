"""A streamed trace: its updates add up to the record of `trace`."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from factscope.facts import Fact
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt
from factscope.progress import no_progress
from factscope.records import TraceRecord
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.stream import CellUpdate, stream_answer
from factscope.tracing.trace import CleanAnswer, trace_batch

from families import tiny

SCALE = NoiseScale(sigma=0.3)
SETTINGS = Tracing(
    corruption=Corruption(level=2.0, samples=5), window=2, sever=("mlp", "attn"), gradients=True
)
BUDGET = Budget(2**28)


def clean_answer(lm: LM, subject: tuple[int, int] = (1, 3), length: int = 6) -> CleanAnswer:
    ids = tuple(np.random.default_rng(7).integers(3, 99, length).tolist())
    logits = lm.model(torch.tensor([ids])).logits[0, -1]
    return CleanAnswer(
        fact=Fact(subject="s", prompt="{}"),
        prompt=Prompt(ids=ids, offsets=((0, 0),) * length, texts=("?",) * length),
        subject=subject,
        answer_ids=(int(logits.argmax()),),
        probability=logits.softmax(-1).max().item(),
        known=True,
    )


def streamed(lm: LM, answer: CleanAnswer, settings: Tracing, progress=no_progress) -> list:
    return list(stream_answer(lm, answer, settings, SCALE, BUDGET, progress))


def assert_close(a: TraceRecord, b: TraceRecord) -> None:
    for field in ("restored", "severed", "gradients"):
        ours, theirs = getattr(a, field), getattr(b, field)
        assert ours.keys() == theirs.keys()
        for kind in ours:
            x, y = (np.array(tables[kind], dtype=float) for tables in (ours, theirs))
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9, err_msg=f"{field} {kind}")
    empty = {"restored": {}, "severed": {}, "gradients": {}}
    assert replace(a, **empty) == replace(b, **empty)


def displayed(found: list, table: str, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """A table after every update has overwritten its cells."""
    picture = np.full(shape, np.nan)
    for update in found:
        if isinstance(update, CellUpdate) and (update.table, update.kind) == (table, kind):
            where = np.ix_(list(update.tokens), list(update.layers))
            picture[where] = np.array(update.values, dtype=float)
    return picture


def test_the_last_record_equals_that_of_trace(lm: LM) -> None:
    answer = clean_answer(lm)
    found = streamed(lm, answer, SETTINGS)
    [whole] = trace_batch(lm, [answer], SETTINGS, SCALE, BUDGET)
    assert_close(found[-1], whole)


@pytest.fixture(scope="module")
def llama() -> LM:
    return tiny("llama")


@pytest.mark.parametrize("rows", ["all", "last-subject"])
def test_the_updates_add_up_to_the_tables(llama: LM, rows: str) -> None:
    answer = clean_answer(llama)
    settings = replace(SETTINGS, sever_tokens=rows)
    first, *found, last = streamed(llama, answer, settings)
    assert isinstance(first, TraceRecord)
    assert (first.restored, first.severed, first.gradients) == ({}, {}, {})
    assert first.corrupted == last.corrupted
    shape = (6, llama.n_layers)
    for table in ("restored", "severed", "gradients"):
        for kind, values in getattr(last, table).items():
            expected = np.array(values, dtype=float)
            np.testing.assert_array_equal(displayed(found, table, kind, shape), expected)
    [whole] = trace_batch(llama, [answer], settings, SCALE, BUDGET)
    assert_close(last, whole)


@pytest.mark.parametrize("direction", ["restore", "corrupt"])
def test_replacement_heads_knockout_and_lens_are_those_of_trace(llama: LM, direction) -> None:
    answer = clean_answer(llama)
    other = tuple(3 + i % 90 if t in (1, 2) else i for t, i in enumerate(answer.ids))
    answer = replace(answer, replaced=other, answer_ids=(5, 80))
    settings = Tracing(
        corruption=Corruption(distribution="tokens"), window=2, metric="log-probability",
        direction=direction, heads=True, knockout=True, lens=True,
    )  # fmt: skip
    first, *_, last = streamed(llama, answer, settings)
    [whole] = trace_batch(llama, [answer], settings, SCALE, BUDGET)
    assert first.lens == {}
    assert len(last.heads) == llama.n_heads
    np.testing.assert_allclose(np.array(last.heads), np.array(whole.heads), rtol=1e-5)
    assert (last.lens, last.knockout) == (whole.lens, whole.knockout)
    assert_close(replace(last, heads=()), replace(whole, heads=()))


def test_heads_at_some_tokens_are_those_of_trace(llama: LM) -> None:
    answer = clean_answer(llama)
    settings = replace(SETTINGS, kinds=(), sever=(), gradients=False, heads=True)
    [whole] = trace_batch(llama, [answer], settings, SCALE, BUDGET)
    for token in (0, 2, 5):  # before the subject, in it, the last
        first, *found, last = stream_answer(
            llama, answer, settings, SCALE, BUDGET, no_progress, [("heads", "")],
            head_tokens=[token],
        )  # fmt: skip
        assert isinstance(last, TraceRecord)
        for head, table in enumerate(last.heads):
            assert set(table[:token] + table[token + 1 :]) == {(None,) * llama.n_layers}
            assert table[token] == pytest.approx(whole.heads[head][token], rel=1e-5)
            shown = displayed(found, "heads", str(head), (6, llama.n_layers))[token]
            assert shown.tolist() == list(table[token])
        assert first == replace(last, heads=())


@pytest.mark.parametrize("method", ["atp", "atp-star"])
def test_attribution_alone_is_that_of_trace(llama: LM, method) -> None:
    settings = replace(SETTINGS, sever=(), gradients=False, knockout=True, attribution=method)
    answer, progress = clean_answer(llama), []
    only = [("attribution", "states"), ("knockout", "")]
    *_, last = stream_answer(llama, answer, settings, SCALE, BUDGET, progress.append, only)
    assert isinstance(last, TraceRecord)
    [whole] = trace_batch(llama, [answer], settings, SCALE, BUDGET)
    assert (last.attribution, last.knockout) == (whole.attribution, whole.knockout)
    assert set(last.attribution) == {"states", "mlp", "attn"}
    assert last.restored == {}
    assert sum(progress) == pytest.approx(1)


def test_the_lens_alone_can_be_requested(llama: LM) -> None:
    settings = replace(SETTINGS, kinds=(), sever=(), gradients=False, lens=True)
    first, last = streamed(llama, clean_answer(llama), settings)
    assert list(last.lens) == ["clean", "corrupted"]
    assert replace(last, lens={}) == first


def test_the_subjects_rows_come_first_then_the_others_from_the_last(llama: LM) -> None:
    _, *found, _ = streamed(llama, clean_answer(llama, subject=(0, 2)), SETTINGS)
    states = [u for u in found if (u.table, u.kind) == ("restored", "states")]
    once = [u for u in states if u.samples == 1]
    assert [u.tokens for u in once] == [(1,), (0,), (5,), (4,), (3,), (2,)]
    assert states[: len(once)] == once
    assert [update.kind for update in found[:3]] == ["states", "mlp", "attn"]
    assert found[-1].table == "gradients"


def test_progress_adds_up_to_one(llama: LM) -> None:
    fractions: list[float] = []
    streamed(llama, clean_answer(llama), SETTINGS, fractions.append)
    assert sum(fractions) == pytest.approx(1)
    assert len(fractions) > 20


def test_an_exception_in_progress_stops_the_trace_and_leaves_no_hook(llama: LM) -> None:
    calls = 0

    def stop(fraction: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamed(llama, clean_answer(llama), SETTINGS, stop)
    assert calls == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.model.modules())


def test_only_the_requested_tables_are_computed(llama: LM) -> None:
    answer, requested = clean_answer(llama), [("gradients", "mlp"), ("severed", "attn")]
    fractions: list[float] = []
    every = streamed(llama, answer, SETTINGS)[-1]
    *_, last = stream_answer(llama, answer, SETTINGS, SCALE, BUDGET, fractions.append, requested)
    assert isinstance(last, TraceRecord)
    assert last.restored == {}
    assert list(last.severed) == ["attn"]
    np.testing.assert_allclose(
        np.array(last.severed["attn"], float), np.array(every.severed["attn"], float), rtol=1e-5
    )
    assert last.gradients == {"mlp": every.gradients["mlp"]}
    assert sum(fractions) == pytest.approx(1)


def test_lens_and_knockout_are_those_of_trace(llama: LM) -> None:
    answer = clean_answer(llama)
    settings = Tracing(corruption=Corruption(level=2.0, samples=2), lens=True, knockout=True)
    last = streamed(llama, answer, settings)[-1]
    [whole] = trace_batch(llama, [answer], settings, SCALE, BUDGET)
    assert last.lens == whole.lens
    assert last.knockout == whole.knockout
    assert whole.lens.keys() == {"clean", "corrupted"}
    only = [("restored", "mlp")]
    *_, part = stream_answer(llama, answer, settings, SCALE, BUDGET, no_progress, only)
    assert isinstance(part, TraceRecord)
    assert (part.lens, part.knockout) == ({}, {})
