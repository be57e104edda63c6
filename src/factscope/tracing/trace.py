"""Causal tracing: which hidden states carry a fact (paper §2.1).

1. Clean run: the prompt as it is; its most likely next token is the answer.
2. Corrupted run: the subject's embeddings are hidden in noise, and the answer fades.
3. Corrupted run with restoration: as 2, but one state (or one window of MLP or attention outputs)
   of the clean run is put back. How far the answer returns is that cell's indirect effect.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.records import TraceRecord
from factscope.tracing.batch import trace_batch, unknown
from factscope.tracing.corrupt import Corruption, Scale, measure
from factscope.tracing.memory import Budget, is_out_of_memory
from factscope.tracing.questions import Question, ask
from factscope.tracing.settings import Tracing

__all__ = ["trace", "trace_many"]

LOOKAHEAD = 128
"""How many facts are asked for their answers, and sorted by length, before they are traced."""


def trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    scale: Scale | None = None,
    memory: int | None = None,
    done: Callable[[float], None] = lambda share: None,
) -> TraceRecord:
    """Trace one fact; a fact that the model does not know is traced all the same.

    `memory` bounds the bytes used beside the model; `done` hears each share of the work (of 1).
    """
    settings = settings or Tracing()
    scale = scale or default_scale(lm, settings.corruption, [fact])
    [question] = ask(lm, [fact], settings)
    return _trace_within(lm, [question], settings, scale, Budget.of(lm, memory), done)[0]


def trace_many(
    lm: LM,
    facts: Sequence[Fact],
    settings: Tracing | None = None,
    *,
    scale: Scale | None = None,
    memory: int | None = None,
    finished: Collection[Fact] = (),
    done: Callable[[int], None] = lambda n: None,
) -> Iterator[TraceRecord]:
    """Trace many facts, several of about the same length in a batch, as each batch is finished.

    A fact whose answer is not its target is recorded as not known, without a trace. `memory`
    bounds the bytes used beside the model; `done` hears how many facts were finished. Those
    `finished` before are passed over, but still asked together with the others, so that a run
    that was broken off gives the very numbers of an unbroken one (where facts are traced one by
    one, as on a CPU).
    """
    settings = settings or Tracing()
    scale = scale or default_scale(lm, settings.corruption, facts)
    budget = Budget.of(lm, memory)
    for begin in range(0, len(facts), LOOKAHEAD):
        some = facts[begin : begin + LOOKAHEAD]
        if all(fact in finished for fact in some):
            continue
        questions = [q for q in ask(lm, some, settings) if q.fact not in finished]
        for question in questions:
            if not question.known:
                yield unknown(lm, question, settings)
                done(1)
        for batch in batches(lm, [q for q in questions if q.known], settings, budget):
            yield from _trace_within(lm, batch, settings, scale, budget)
            done(len(batch))


def default_scale(lm: LM, corruption: Corruption, facts: Sequence[Fact]) -> Scale:
    """σ over the subjects of the facts, or of the package's own where these are too few."""
    from factscope.data.everyday import everyday

    if len(facts) < 20:
        facts = everyday()
    return measure(lm, corruption, [f.subject for f in facts], [f.text for f in facts])


def batches(
    lm: LM, questions: Sequence[Question], settings: Tracing, budget: Budget
) -> Iterator[list[Question]]:
    """Questions that go together: about as many tokens to restore, so that few slots are empty."""
    kept = 1 + len(settings.contributions)
    batch: list[Question] = []
    for q in sorted(questions, key=lambda q: q.restorable):
        size = budget.facts(lm, len(q.prompt), settings.corruption.samples, kept)
        if batch and (len(batch) >= size or q.restorable > batch[0].restorable + 1):
            yield batch
            batch = []
        batch.append(q)
    if batch:
        yield batch


def _trace_within(
    lm: LM,
    questions: Sequence[Question],
    settings: Tracing,
    scale: Scale,
    budget: Budget,
    done: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """Trace a batch; where memory runs out, in halves, and with half the bound."""
    try:
        return trace_batch(lm, questions, settings, scale, budget, done)
    except RuntimeError as error:
        if not is_out_of_memory(error) or budget.bytes < 2**20:
            raise
    if lm.device.type == "cuda":
        torch.cuda.empty_cache()
    half = max(1, len(questions) // 2)
    parts = [questions[i : i + half] for i in range(0, len(questions), half)]
    return [r for part in parts for r in _trace_within(lm, part, settings, scale, budget.half())]
