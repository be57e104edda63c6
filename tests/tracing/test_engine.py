"""The main test of the project: the engine equals one hooked forward pass a cell.

For speed, many cells of the reference run as one batch; a test checks that this equals one pass a
cell.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from factscope.facts import Fact
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt
from factscope.records import KINDS, TraceRecord
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.engine import Segment, pack_segments
from factscope.tracing.reference import ReferenceTrace
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import CleanAnswer, trace_batch

from families import tiny

PROMPTS = [(7, (1, 3)), (9, (0, 3)), (4, (3, 4))]
"""Lengths and subjects, one of them the last token."""
SCALE = NoiseScale(sigma=0.3)
CORRUPTION = Corruption(level=2.0, samples=3)
SETTINGS = Tracing(corruption=CORRUPTION, window=2)


def question(lm: LM, number: int) -> CleanAnswer:
    length, subject = PROMPTS[number]
    ids = tuple(np.random.default_rng(number).integers(3, 99, length).tolist())
    logits = lm.model(torch.tensor([ids])).logits[0, -1]
    return CleanAnswer(
        fact=Fact(subject=str(number), prompt="{}"),
        prompt=Prompt(ids=ids, offsets=((0, 0),) * length, texts=("?",) * length),
        subject=subject,
        answer_ids=(int(logits.argmax()),),
        probability=logits.softmax(-1).max().item(),
        known=True,
        replaced=replaced(ids, subject),
    )


def replaced(ids: tuple[int, ...], subject: tuple[int, int]) -> tuple[int, ...]:
    """The prompt with other tokens as its subject."""
    return tuple(3 + i % 90 if subject[0] <= t < subject[1] else i for t, i in enumerate(ids))


def width(lm: LM) -> int:
    return lm.embed.weight.shape[1]


class BatchedReference(ReferenceTrace):
    """The reference with many cells in one pass: each cell has its own copy of the rows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.frozen: dict[str, list[torch.Tensor]] = {}
        self.cells: list[tuple[Sequence[Any], Sequence[Any], int]] = []

    def _outputs(self, module: str) -> list[torch.Tensor]:
        if module not in self.frozen:
            self.frozen[module] = super()._outputs(module)
        return self.frozen[module]

    def _score(self, hooks: Sequence[Any], calls: Sequence[Any] = (), draw: int = 0) -> float:
        self.cells.append((hooks, calls, draw))
        return float("nan")

    @torch.no_grad()
    def table(self, cell: Callable[[int, int], float]) -> np.ndarray:
        """The values of all cells, by token and layer."""
        self.cells = []
        for token, layer in product(range(self.length), range(self.lm.n_layers)):
            cell(token, layer)
        n, hooks, calls = len(self.cells), [], []

        def own_rows(x: torch.Tensor, i: int) -> torch.Tensor:
            return x.view(n, -1, *x.shape[1:])[i]

        def change(function: Any, i: int, out: torch.Tensor) -> None:
            function(own_rows(out, i))

        def change_input(function: Any, i: int, args: Any, keywords: Any) -> None:
            function((own_rows(args[0], i),), keywords)

        for i, (given, given_calls, draw) in enumerate(self.cells):
            corrupt = (self.lm.embed, self._corrupt_embeddings(draw))
            hooks += [(module, partial(change, f, i)) for module, f in (corrupt, *given)]
            calls += [(module, partial(change_input, f, i)) for module, f in given_calls]
        with hook_outputs(*hooks), hook_calls(*calls):
            logits = self.lm.model(self.ids.repeat(n, 1)).logits[:, self.length - 1 :].float()
        values = self._metrics(logits, self.settings.metric).view(n, -1)[:, list(self.base)]
        return values.mean(1).view(self.length, self.lm.n_layers).numpy()


def plain(lm: LM, q: CleanAnswer, settings: Tracing, scale: NoiseScale = SCALE) -> BatchedReference:
    return BatchedReference(lm, q, settings, scale)


def assert_same(record: TraceRecord, slow: BatchedReference, settings: Tracing) -> None:
    # Differences of logits can be as small as the rounding errors of the logits.
    close = {"rtol": 1e-5, "atol": 1e-5 if settings.metric in ("kl", "logit-difference") else 0}
    np.testing.assert_allclose(record.clean_value, slow.clean_metric, **close)
    np.testing.assert_allclose(record.corrupted_value, slow.corrupted_metric, **close)
    np.testing.assert_allclose(record.clean, slow.clean, **close)
    np.testing.assert_allclose(record.corrupted, slow.corrupted, **close)
    for kind in settings.kinds:
        wanted = slow.table(partial(slow.restored, kind))
        np.testing.assert_allclose(np.array(record.restored[kind]), wanted, **close, err_msg=kind)
    for module in settings.sever:
        wanted = slow.table(partial(slow.severed, module))
        np.testing.assert_allclose(np.array(record.severed[module]), wanted, **close)
    for head, found in enumerate(record.heads):
        wanted = slow.table(partial(slow.head, head))
        np.testing.assert_allclose(np.array(found), wanted, **close, err_msg=f"head {head}")


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("direction", ["restore", "corrupt"])
def test_many_cells_in_one_pass_equal_one_pass_each(family: str, direction: str) -> None:
    lm = tiny(family)
    corruption = replace(CORRUPTION, rng="paper", seed=1)
    settings = replace(SETTINGS, corruption=corruption, direction=direction, sever_draws="two")
    given = (lm, question(lm, 2), settings, SCALE)
    batched, single = BatchedReference(*given), ReferenceTrace(*given)
    ways = [("restored", kind) for kind in KINDS] + [("severed", "mlp"), ("head", 1)]
    for name, what in ways:
        found = batched.table(partial(getattr(batched, name), what))
        for (token, layer), value in np.ndenumerate(found):
            wanted = getattr(single, name)(what, token, layer)
            assert value == pytest.approx(wanted, rel=1e-5), (name, what, token, layer)


def test_every_kind_and_severed_graph_of_every_family(lm: LM) -> None:
    settings = replace(SETTINGS, sever=("mlp", "attn"))
    questions = [question(lm, i) for i in range(len(PROMPTS))]
    records = trace_batch(lm, questions, settings, SCALE, Budget(2**30))
    for q, record in zip(questions, records, strict=True):
        assert_same(record, plain(lm, q, settings), settings)


def test_answers_of_several_tokens_in_every_family(lm: LM) -> None:
    settings = replace(SETTINGS, sever=("mlp",), freeze_at="all")
    settings = replace(settings, corruption=replace(CORRUPTION, extra_tokens=9))
    for answer_ids in ((5,), (5, 80, 12)):
        questions = [replace(question(lm, i), answer_ids=answer_ids) for i in range(len(PROMPTS))]
        records = trace_batch(lm, questions, settings, SCALE, Budget(2**30))
        for q, record in zip(questions, records, strict=True):
            slow = plain(lm, q, settings)
            record = replace(record, clean=slow.clean)  # the question has that of another answer
            assert_same(record, slow, settings)
            assert len(record.restored["states"]) == len(q.prompt)


@pytest.mark.parametrize(
    "corruption",
    [
        Corruption(level=0.5, in_sigmas=False, samples=2),
        Corruption(distribution="uniform", samples=2),
        Corruption(distribution="embedding", samples=2),
        Corruption(replace=True, samples=2),
        Corruption(extra_tokens=2, samples=1),
        Corruption(rng="paper", seed=1, samples=3),
    ],
    ids=lambda c: f"{c.distribution} {c.level} {c.replace} {c.extra_tokens} {c.rng}",
)
def test_every_corruption_of_every_family(lm: LM, corruption: Corruption) -> None:
    rng = np.random.default_rng(0)
    n = width(lm)
    scale = NoiseScale(sigma=0.3, mean=rng.normal(size=n), spread=rng.normal(size=(n, n)) / n)
    settings = replace(SETTINGS, corruption=corruption)
    q = question(lm, 0)
    [record] = trace_batch(lm, [q], settings, scale, Budget(2**30))
    assert_same(record, plain(lm, q, settings, scale), settings)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neo", "gptj"])
@pytest.mark.parametrize(
    ("window", "alignment"), [(1, "paper-text"), (2, "paper-code"), (10, "paper-text")]
)
def test_windows_of_any_width(family: str, window: int, alignment: str) -> None:
    lm = tiny(family)
    settings = replace(SETTINGS, window=window, window_alignment=alignment, kinds=("mlp", "attn"))
    q = question(lm, 1)
    [record] = trace_batch(lm, [q], settings, SCALE, Budget(2**30))
    assert_same(record, plain(lm, q, settings), settings)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt"])
def test_severing_every_token(family: str) -> None:
    lm = tiny(family)
    settings = replace(SETTINGS, kinds=("states",), sever=("mlp", "attn"), freeze_at="all")
    q = question(lm, 0)
    [record] = trace_batch(lm, [q], settings, SCALE, Budget(2**30))
    assert_same(record, plain(lm, q, settings), settings)


@pytest.mark.parametrize("direction", ["restore", "corrupt"])
def test_every_head_and_token_replacement_of_every_family(lm: LM, direction: str) -> None:
    corruption = Corruption(distribution="tokens")
    settings = replace(SETTINGS, corruption=corruption, heads=True, direction=direction)
    for metric in ("logit-difference", "kl"):
        settings = replace(settings, metric=metric)
        questions = [question(lm, i) for i in range(2)]
        records = trace_batch(lm, questions, settings, SCALE, Budget(2**30))
        for q, record in zip(questions, records, strict=True):
            assert len(record.heads) == (lm.n_heads if settings.heads else 0)
            assert_same(record, plain(lm, q, settings), settings)
        settings = replace(settings, heads=False)


METRICS = ("log-probability", "logit-difference", "kl", "rank")


def test_every_metric_of_every_family(lm: LM) -> None:
    q = replace(question(lm, 2), answer_ids=(5, 80))
    for metric, direction in product(METRICS, ("restore", "corrupt")):
        settings = replace(SETTINGS, kinds=("mlp",), metric=metric, direction=direction)
        [record] = trace_batch(lm, [q], settings, SCALE, Budget(2**30))
        slow = plain(lm, q, settings)
        assert_same(replace(record, clean=slow.clean), slow, settings)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("direction", ["restore", "corrupt"])
def test_every_metric_with_noise(metric: str, direction: str) -> None:
    lm = tiny("llama")
    settings = replace(SETTINGS, metric=metric, direction=direction, sever=("mlp",))
    q = replace(question(lm, 0), answer_ids=(5, 80))
    [record] = trace_batch(lm, [q], settings, SCALE, Budget(2**30))
    slow = plain(lm, q, settings)
    assert_same(replace(record, clean=slow.clean), slow, settings)
    left = np.array(record.restored["states"])[: q.subject[0]]
    assert left == pytest.approx(record.base_value, rel=1e-5, abs=1e-6)
    assert record.metric == metric
    assert (record.foil or "").strip() == (str(slow.foil) if metric == "logit-difference" else "")


def test_the_heads_of_a_layer_add_up_to_the_attention_output(lm: LM) -> None:
    run = forward(lm, torch.tensor([question(lm, 0).ids]), keep=("attn", "heads"))
    for layer in range(lm.n_layers):
        heads = run.contributions["heads"][layer].unflatten(-1, (lm.n_heads, -1))
        parts = torch.einsum("rthd,hdw->hrtw", heads, lm.head_weight(layer))
        bias = getattr(lm.contribution("attn", layer), "bias", None)
        total = parts.sum(0) + (0 if bias is None else bias)
        torch.testing.assert_close(total, run.contributions["attn"][layer])


def test_severed_graphs_with_two_draws_of_noise(lm: LM) -> None:
    """As in the paper's code: the frozen outputs are of another draw than the subject's noise."""
    q, corruption = question(lm, 0), replace(CORRUPTION, rng="paper", seed=1)
    settings = replace(SETTINGS, corruption=corruption, kinds=("states",), sever=("mlp", "attn"))
    two = replace(settings, sever_draws="two")
    [record] = trace_batch(lm, [q], two, SCALE, Budget(2**30))
    assert_same(record, plain(lm, q, two), two)
    [one] = trace_batch(lm, [q], settings, SCALE, Budget(2**30))
    states = [np.array(x.restored["states"]) for x in (one, record)]
    np.testing.assert_allclose(*states, rtol=1e-5)
    assert np.abs(np.array(one.severed["mlp"]) - np.array(record.severed["mlp"])).max() > 1e-4


def test_severing_at_the_last_subject_token_alone(lm: LM) -> None:
    everywhere = replace(SETTINGS, kinds=(), sever=("mlp",))
    q = question(lm, 1)
    [whole] = trace_batch(lm, [q], everywhere, SCALE, Budget(2**30))
    [one] = trace_batch(
        lm, [q], replace(everywhere, sever_tokens="last-subject"), SCALE, Budget(2**30)
    )
    last = q.subject[1] - 1
    np.testing.assert_allclose(
        np.array(one.severed["mlp"][last]), np.array(whole.severed["mlp"][last]), rtol=1e-5
    )
    measured = [row for row in one.severed["mlp"] if any(x is not None for x in row)]
    assert len(measured) == 1


def test_a_tight_memory_bound_splits_the_work_and_changes_nothing(lm: LM) -> None:
    """Runs are split by samples, passes by packed rows and by cells."""
    questions = [question(lm, i) for i in (0, 2)]
    settings = replace(SETTINGS, heads=True)
    free = trace_batch(lm, questions, settings, SCALE, Budget(2**30))
    tight = trace_batch(lm, questions, settings, SCALE, Budget(1))
    for a, b in zip(free, tight, strict=True):
        np.testing.assert_allclose(np.array(a.heads), np.array(b.heads), rtol=1e-5)
        for kind in KINDS:
            np.testing.assert_allclose(
                np.array(a.restored[kind]), np.array(b.restored[kind]), rtol=1e-5
            )


def test_cells_whose_value_is_known_in_advance(lm: LM) -> None:
    q = question(lm, 0)
    [record] = trace_batch(lm, [q], SETTINGS, SCALE, Budget(2**30))
    states = np.array(record.restored["states"])
    assert states[-1, -1] == pytest.approx(record.clean, rel=1e-5)  # last token, last layer
    before = slice(0, q.subject[0])
    assert states[before] == pytest.approx(record.corrupted, rel=1e-5)  # nothing to restore
    assert states[:-1, -1] == pytest.approx(record.corrupted, rel=1e-5)  # too late to be read
    assert abs(states[q.subject[0] :, :-1] - record.corrupted).max() > 1e-4
    assert len(record.corrupted_samples) == CORRUPTION.samples
    assert np.mean(record.corrupted_samples) == pytest.approx(record.corrupted)


def test_every_family_of_the_table_is_tested() -> None:
    from factscope.lm.families import FAMILIES

    from families import FAMILIES as TINY

    assert {kind for kind, _ in TINY.values()} == set(FAMILIES)


def test_packed_rows_hold_every_segment_once_and_are_nearly_full() -> None:
    segments = [
        Segment(fact=0, source=0, row=row, start=start, stop=12)
        for row in (1, 2)
        for start in range(12)
    ]
    packed = pack_segments(segments)
    assert sorted((s.row, s.start) for held in packed for s in held) == sorted(
        (s.row, s.start) for s in segments
    )
    assert all(len({s.row for s in held}) == 1 for held in packed)
    widths = [sum(map(len, held)) for held in packed]
    assert sum(widths) / (max(widths) * len(widths)) > 0.9
