"""A trace that comes piece by piece ends as the trace that comes at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from factscope.facts import Fact
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt
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


def question(lm: LM, subject: tuple[int, int] = (1, 3), length: int = 6) -> CleanAnswer:
    ids = tuple(np.random.default_rng(7).integers(3, 99, length).tolist())
    logits = lm.model(torch.tensor([ids])).logits[0, -1]
    return CleanAnswer(
        fact=Fact(subject="s", prompt="{}"),
        prompt=Prompt(ids=ids, offsets=((0, 0),) * length, texts=("?",) * length),
        subject=subject,
        answer=int(logits.argmax()),
        clean=logits.softmax(-1).max().item(),
        known=True,
    )


def pieces(lm: LM, q: CleanAnswer, settings: Tracing, progress=lambda share: None) -> list:
    return list(stream_answer(lm, q, settings, SCALE, BUDGET, progress))


def assert_close(one: TraceRecord, other: TraceRecord) -> None:
    for field in ("restored", "severed", "gradients"):
        mine, theirs = getattr(one, field), getattr(other, field)
        assert mine.keys() == theirs.keys()
        for kind in mine:
            x, y = (np.array(grids[kind], dtype=float) for grids in (mine, theirs))
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9, err_msg=f"{field} {kind}")
    empty = {"restored": {}, "severed": {}, "gradients": {}}
    assert replace(one, **empty) == replace(other, **empty)


def drawn(found: list, table: str, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """What a page shows that draws every piece over the ones before."""
    picture = np.full(shape, np.nan)
    for piece in found:
        if isinstance(piece, CellUpdate) and (piece.table, piece.kind) == (table, kind):
            where = np.ix_(list(piece.tokens), list(piece.layers))
            picture[where] = np.array(piece.values, dtype=float)
    return picture


def test_the_last_record_is_that_of_the_whole_trace(lm: LM) -> None:
    q = question(lm)
    found = pieces(lm, q, SETTINGS)
    [whole] = trace_batch(lm, [q], SETTINGS, SCALE, BUDGET)
    assert_close(found[-1], whole)


@pytest.fixture(scope="module")
def llama() -> LM:
    return tiny("llama")


@pytest.mark.parametrize("rows", ["all", "last_subject"])
def test_the_pieces_add_up_to_the_tables(llama: LM, rows: str) -> None:
    q = question(llama)
    settings = replace(SETTINGS, sever_rows=rows)
    first, *found, last = pieces(llama, q, settings)
    assert isinstance(first, TraceRecord)
    assert (first.restored, first.severed, first.gradients) == ({}, {}, {})
    assert first.corrupted == last.corrupted
    shape = (6, llama.n_layers)
    for table in ("restored", "severed", "gradients"):
        for kind, grid in getattr(last, table).items():
            wanted = np.array(grid, dtype=float)
            np.testing.assert_array_equal(drawn(found, table, kind, shape), wanted)
    [whole] = trace_batch(llama, [q], settings, SCALE, BUDGET)
    assert_close(last, whole)


def test_the_first_cells_are_of_the_last_token_in_one_sample(llama: LM) -> None:
    _, *found, _ = pieces(llama, question(llama, subject=(0, 2)), SETTINGS)
    assert (found[0].tokens, found[0].samples, found[0].kind) == ((5,), 1, "states")
    assert [piece.kind for piece in found[:3]] == ["states", "mlp", "attn"]
    assert found[-1].table == "gradients"


def test_shares_add_up_to_one(llama: LM) -> None:
    shares: list[float] = []
    pieces(llama, question(llama), SETTINGS, shares.append)
    assert sum(shares) == pytest.approx(1)
    assert len(shares) > 50


def test_what_done_raises_stops_the_work_and_leaves_no_hook(llama: LM) -> None:
    heard = 0

    def stop(share: float) -> None:
        nonlocal heard
        heard += 1
        if heard == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pieces(llama, question(llama), SETTINGS, stop)
    assert heard == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llama.model.modules())


def test_only_the_tables_that_are_asked_for_are_made(llama: LM) -> None:
    q, asked = question(llama), [("gradients", "mlp"), ("severed", "attn")]
    shares: list[float] = []
    every = pieces(llama, q, SETTINGS)[-1]
    *_, last = stream_answer(llama, q, SETTINGS, SCALE, BUDGET, shares.append, asked)
    assert isinstance(last, TraceRecord)
    assert last.restored == {}
    assert last.severed == {"attn": every.severed["attn"]}
    assert last.gradients == {"mlp": every.gradients["mlp"]}
    assert sum(shares) == pytest.approx(1)
