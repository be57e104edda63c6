"""Causal tracing: which hidden states carry a fact (paper §2.1).

1. Clean run: the prompt as it is; its most likely next token is the answer.
2. Corrupted run: the subject's embeddings are hidden in noise, and the answer fades.
3. Corrupted run with restoration: as 2, but one state (or one window of MLP or attention outputs)
   of the clean run is put back. How far the answer returns is that cell's indirect effect.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.forward import Run, forward
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt, encode_fact, first_token, spoken
from factscope.records import Grid, TraceRecord, as_grid
from factscope.tracing.corrupt import Corruption, Scale, draw, noisy, scale
from factscope.tracing.engine import Restoration, Stretch, probability, restore
from factscope.tracing.memory import Budget, is_out_of_memory
from factscope.tracing.settings import Tracing, window_of

__all__ = ["trace", "trace_many"]

LOOKAHEAD = 128
"""How many facts are asked for their answers, and sorted by length, before they are traced."""


def trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    scale_: Scale | None = None,
    memory: int | None = None,
    done: Callable[[float], None] = lambda share: None,
) -> TraceRecord:
    """Trace one fact; a fact that the model does not know is traced all the same.

    `memory` bounds the bytes used beside the model; `done` hears each share of the work (of 1).
    """
    settings = settings or Tracing()
    scale_ = scale_ or default_scale(lm, settings.corruption, [fact])
    question = _ask(lm, [fact], settings)[0]
    return _trace_within(lm, [question], settings, scale_, Budget.of(lm, memory), done)[0]


def trace_many(
    lm: LM,
    facts: Sequence[Fact],
    settings: Tracing | None = None,
    *,
    scale_: Scale | None = None,
    memory: int | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> Iterator[TraceRecord]:
    """Trace many facts, several of about the same length in a batch, as each batch is finished.

    A fact whose answer is not its target is recorded as not known, without a trace. `memory`
    bounds the bytes used beside the model; `done` hears how many facts were finished.
    """
    settings = settings or Tracing()
    scale_ = scale_ or default_scale(lm, settings.corruption, facts)
    budget = Budget.of(lm, memory)
    for begin in range(0, len(facts), LOOKAHEAD):
        questions = _ask(lm, facts[begin : begin + LOOKAHEAD], settings)
        for question in questions:
            if not question.known:
                yield _unknown(lm, question, settings)
                done(1)
        for batch in batches(lm, [q for q in questions if q.known], settings, budget):
            yield from _trace_within(lm, batch, settings, scale_, budget)
            done(len(batch))


def default_scale(lm: LM, corruption: Corruption, facts: Sequence[Fact]) -> Scale:
    """σ over the subjects of the facts, or of the package's own where these are too few."""
    from factscope.data.everyday import everyday

    if len(facts) < 20:
        facts = everyday()
    return scale(lm, corruption, [f.subject for f in facts], [f.text for f in facts])


@dataclass(frozen=True, kw_only=True)
class Question:
    """A fact as the model reads it, with its answer in the clean run."""

    fact: Fact
    prompt: Prompt
    subject: tuple[int, int]
    answer: int
    clean: float
    known: bool


@torch.no_grad()
def _ask(lm: LM, facts: Sequence[Fact], settings: Tracing) -> list[Question]:
    """The clean run's answer to every prompt."""
    coded = [encode_fact(lm, fact) for fact in facts]
    ids = _padded(lm, [prompt for prompt, _ in coded])
    ends = torch.tensor([len(prompt) - 1 for prompt, _ in coded])
    states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    last = states[torch.arange(len(ids)), ends]
    best = lm.head(last).float().softmax(-1).max(-1)
    return [
        Question(
            fact=fact,
            prompt=prompt,
            subject=subject,
            answer=int(answer),
            clean=float(clean),
            known=_known(lm, fact, prompt, int(answer), settings),
        )
        for fact, (prompt, subject), answer, clean in zip(
            facts, coded, best.indices, best.values, strict=True
        )
    ]


def _known(lm: LM, fact: Fact, prompt: Prompt, answer: int, settings: Tracing) -> bool:
    if fact.target is None:
        return True
    if settings.known == "whole_word":
        return lm.tokenizer.decode([answer]).strip() == fact.target.strip()
    return answer == first_token(lm, prompt, fact.text, fact.target)


def _padded(lm: LM, prompts: Sequence[Prompt]) -> Tensor:
    """Rows of ids, padded on the right; a causal model never looks there."""
    length = max(map(len, prompts))
    return torch.tensor(
        [[*p.ids, *[p.ids[-1]] * (length - len(p))] for p in prompts], device=lm.device
    )


def batches(
    lm: LM, questions: Sequence[Question], settings: Tracing, budget: Budget
) -> Iterator[list[Question]]:
    """Questions that go together: about the same number of tokens to restore, so that few slots
    stay empty."""
    kept = 1 + len(_kept(settings))
    batch: list[Question] = []
    for q in sorted(questions, key=_restorable):
        size = budget.facts(lm, len(q.prompt), settings.corruption.samples, kept)
        if batch and (len(batch) >= size or _restorable(q) > _restorable(batch[0]) + 1):
            yield batch
            batch = []
        batch.append(q)
    if batch:
        yield batch


def _restorable(q: Question) -> int:
    return len(q.prompt) - q.subject[0]


def _trace_within(
    lm: LM,
    questions: Sequence[Question],
    settings: Tracing,
    scale_: Scale,
    budget: Budget,
    done: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """Trace a batch; where memory runs out, in halves, and with half the bound."""
    try:
        return trace_batch(lm, questions, settings, scale_, budget, done)
    except RuntimeError as error:
        if not is_out_of_memory(error) or budget.bytes < 2**20:
            raise
    if lm.device.type == "cuda":
        torch.cuda.empty_cache()
    half = max(1, len(questions) // 2)
    parts = [questions[i : i + half] for i in range(0, len(questions), half)]
    return [r for part in parts for r in _trace_within(lm, part, settings, scale_, budget.half())]


def trace_batch(
    lm: LM,
    questions: Sequence[Question],
    settings: Tracing,
    scale_: Scale,
    budget: Budget,
    done: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """The three runs for several facts at once."""
    noise = [_noise(lm, q, settings.corruption, scale_) for q in questions]
    run = _runs(lm, questions, noise, settings, replace=settings.corruption.replace)
    corrupted = unrestored = _corrupted(lm, questions, run, settings)
    if settings.corruption.replace and settings.corruption.baseline == "added":
        added = _runs(lm, questions, noise, settings, replace=False)
        corrupted = _corrupted(lm, questions, added, settings)
    wanted = _restorations(lm, settings)

    def part_done(share: float) -> None:
        done(share / len(wanted))

    tables = {
        name: _tables(
            lm, run, questions, settings, unrestored, budget, restoration, rows, part_done
        )
        for name, (restoration, rows) in wanted.items()
    }
    return [
        TraceRecord(
            fact=q.fact,
            model=lm.name,
            tokens=q.prompt.texts,
            subject=q.subject,
            answer=spoken(lm, q.prompt.ids, [q.answer]),
            answer_id=q.answer,
            known=q.known,
            clean=q.clean,
            corrupted=float(corrupted[i].mean()),
            corrupted_samples=tuple(corrupted[i].tolist()),
            restored={kind: tables["restored", kind][i] for kind in settings.kinds},
            severed={module: tables["severed", module][i] for module in settings.sever},
            gradients=_gradients(lm, q, settings),
            settings=_noted(settings, scale_),
        )
        for i, q in enumerate(questions)
    ]


def _unknown(lm: LM, q: Question, settings: Tracing) -> TraceRecord:
    """The record of a fact that the model answers otherwise: no corruption, no tables."""
    return TraceRecord(
        fact=q.fact,
        model=lm.name,
        tokens=q.prompt.texts,
        subject=q.subject,
        answer=spoken(lm, q.prompt.ids, [q.answer]),
        answer_id=q.answer,
        known=False,
        clean=q.clean,
        corrupted=q.clean,
        corrupted_samples=(),
        settings=settings.to_dict(),
    )


def _noted(settings: Tracing, scale_: Scale) -> dict:
    return {**settings.to_dict(), "sigma": scale_.sigma}


def _noise(
    lm: LM, q: Question, corruption: Corruption, scale_: Scale
) -> Float64[np.ndarray, "sample token width"]:
    start, stop = corruption.tokens(q.subject, len(q.prompt))
    return draw(corruption, scale_, q.fact, stop - start, lm.embed.weight.shape[1])


def _kept(settings: Tracing) -> set[str]:
    """The contributions that the runs must keep."""
    return ({*settings.kinds} | {*settings.sever}) - {"states"}


def _runs(
    lm: LM,
    questions: Sequence[Question],
    noise: Sequence[np.ndarray],
    settings: Tracing,
    *,
    replace: bool,
) -> Run:
    """Clean and corrupted rows in one forward pass: a clean row a fact, then its samples."""
    samples = settings.corruption.samples
    clean = _padded(lm, [q.prompt for q in questions])
    ids = torch.cat([clean, clean.repeat_interleave(samples, 0)])

    def corrupt(out: Tensor) -> Tensor:
        for i, (q, numbers) in enumerate(zip(questions, noise, strict=True)):
            rows = _samples_of(i, len(questions), samples)
            start, stop = settings.corruption.tokens(q.subject, len(q.prompt))
            out[rows, start:stop] = noisy(out[rows, start:stop], numbers, replace)
        return out

    return forward(lm, ids, keep=sorted(_kept(settings)), embed=corrupt)


def _samples_of(fact: int, facts: int, samples: int) -> slice:
    """The rows of a fact's corrupted runs."""
    begin = facts + fact * samples
    return slice(begin, begin + samples)


def _corrupted(
    lm: LM, questions: Sequence[Question], run: Run, settings: Tracing
) -> Float[Tensor, "fact sample"]:
    """P*[o] in every corrupted run."""
    samples = settings.corruption.samples
    ends = torch.tensor([len(q.prompt) - 1 for q in questions]).repeat_interleave(samples)
    last = run.states[-1][len(questions) :]
    last = last[torch.arange(len(last)), ends.to(last.device)]
    answer = torch.tensor([q.answer for q in questions], device=last.device)
    p = probability(lm, last, answer.repeat_interleave(samples))
    return p.view(len(questions), samples).cpu()


def _restorations(lm: LM, settings: Tracing) -> dict[tuple[str, str], tuple[Restoration, str]]:
    """Every table asked for, and at which tokens it restores."""
    single = [(layer, layer + 1) for layer in range(lm.n_layers)]
    windows = [window_of(settings, layer, lm.n_layers) for layer in range(lm.n_layers)]
    restored = {
        ("restored", kind): (
            Restoration(kind=kind, windows=single if kind == "states" else windows),
            "all",
        )
        for kind in settings.kinds
    }
    severed = {
        ("severed", module): (
            Restoration(
                kind="states",
                windows=single,
                sever=module,
                sever_every=settings.sever_at == "every",
            ),
            settings.sever_rows,
        )
        for module in settings.sever
    }
    return restored | severed


def _tables(
    lm: LM,
    run: Run,
    questions: Sequence[Question],
    settings: Tracing,
    unrestored: Float[Tensor, "fact sample"],
    budget: Budget,
    restoration: Restoration,
    rows: str,
    done: Callable[[float], None],
) -> list[Grid]:
    """One table a fact: the mean over the samples of each cell's restored probability."""
    samples = settings.corruption.samples
    stretches = [
        Stretch(
            clean=i,
            row=_samples_of(i, len(questions), samples).start + sample,
            start=token,
            stop=len(q.prompt),
            answer=q.answer,
        )
        for i, q in enumerate(questions)
        for sample in range(samples)
        for token in _restored_tokens(q, rows)
    ]
    values = restore(lm, run, stretches, restoration, budget.job(lm), done)
    tables = []
    for i, q in enumerate(questions):
        tokens = list(_restored_tokens(q, rows))
        mine = [k for k, s in enumerate(stretches) if s.clean == i]
        cells = values[mine].view(samples, len(tokens), lm.n_layers).mean(0)
        table = torch.full((len(q.prompt), lm.n_layers), torch.nan)
        if rows == "all":
            # Left of the subject both runs are the same: there is nothing to restore.
            table[: q.subject[0]] = unrestored[i].mean()
        table[tokens] = cells
        tables.append(as_grid(table.tolist()))
    return tables


def _restored_tokens(q: Question, rows: str) -> Iterable[int]:
    """Tokens whose states differ between the runs, from the subject's first one on."""
    if rows == "last_subject":
        return [q.subject[1] - 1]
    return range(q.subject[0], len(q.prompt))


def _gradients(lm: LM, q: Question, settings: Tracing) -> dict[str, Grid]:
    if not settings.gradients:
        return {}
    from factscope.tracing.gradients import integrated_gradients

    norms = {
        kind: integrated_gradients(lm, q.prompt.ids, q.answer, kind, path=settings.gradient_path)
        for kind in settings.kinds
    }
    return {kind: as_grid(table.tolist()) for kind, table in norms.items()}
