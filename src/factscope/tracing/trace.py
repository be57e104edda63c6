"""Causal tracing: which hidden states carry a fact (paper §2.1).

1. Clean run: the prompt as it is; its most likely next token is the answer.
2. Corrupted run: the subject's embeddings are hidden in noise, and the answer fades.
3. Corrupted run with restoration: as 2, but one state (or one window of MLP or attention outputs)
   of the clean run is put back. How far the answer returns is that cell's indirect effect.

Several facts traced at once: the clean and corrupted runs, then every table from them.

A fact put to the model: its tokens, its subject's place, and the clean run's answer.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.forward import ActivationCache, forward
from factscope.lm.memory import Budget, is_out_of_memory
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt, decode_continuation, encode_fact, first_token
from factscope.records import CellTable, TraceRecord, as_cell_table
from factscope.tracing.corruption import (
    NoiseScale,
    corrupt_embeddings,
    measure_noise_scale,
    sample_noise,
)
from factscope.tracing.engine import Restoration, Segment, restore, token_probability
from factscope.tracing.gradients import integrated_gradients
from factscope.tracing.settings import Corruption, Tracing, window_around

__all__ = [
    "CleanAnswer",
    "TraceBatch",
    "clean_answers",
    "pad_prompts",
    "trace",
    "trace_batch",
    "trace_many",
    "unknown_fact_record",
]


@dataclass(frozen=True, kw_only=True)
class CleanAnswer:
    """A fact as the model reads it, with its answer in the clean run."""

    fact: Fact
    prompt: Prompt
    subject: tuple[int, int]
    """The subject's tokens, as [start, stop)."""
    answer: int
    clean: float
    """P[o], the answer's probability."""
    known: bool

    @property
    def restorable(self) -> int:
        """How many tokens a trace can restore: from the subject's first one on."""
        return len(self.prompt) - self.subject[0]

    def tokens(self, rows: str) -> list[int]:
        """The tokens to restore: `all` that can be, or the `last_subject` one."""
        if rows == "last_subject":
            return [self.subject[1] - 1]
        return list(range(self.subject[0], len(self.prompt)))


@torch.no_grad()
def clean_answers(lm: LM, facts: Sequence[Fact], settings: Tracing) -> list[CleanAnswer]:
    """The clean run's answer to every prompt."""
    coded = [encode_fact(lm, fact) for fact in facts]
    ids = pad_prompts(lm, [prompt for prompt, _ in coded])
    ends = torch.tensor([len(prompt) - 1 for prompt, _ in coded])
    states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    last = states[torch.arange(len(ids)), ends]
    best = lm.head(last).float().softmax(-1).max(-1)
    return [
        CleanAnswer(
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


def pad_prompts(lm: LM, prompts: Sequence[Prompt]) -> Int[Tensor, "row token"]:
    """Rows of ids, padded on the right; a causal model never looks there."""
    length = max(map(len, prompts))
    return torch.tensor(
        [[*p.ids, *[p.ids[-1]] * (length - len(p))] for p in prompts], device=lm.device
    )


def trace_batch(
    lm: LM,
    questions: Sequence[CleanAnswer],
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """The record of every question; `done` hears each share of the work (of 1)."""
    batch = TraceBatch(lm=lm, questions=questions, settings=settings, scale=scale)
    run = batch.run(replace=settings.corruption.replace)
    records, unrestored = batch.unrestored(run)
    tables = batch.tables(run, unrestored, budget, progress)
    return [
        replace(
            record,
            restored={kind: tables["restored", kind][i] for kind in settings.kinds},
            severed={module: tables["severed", module][i] for module in settings.sever},
            gradients=batch.gradients(questions[i]) if settings.gradients else {},
        )
        for i, record in enumerate(records)
    ]


def unknown_fact_record(lm: LM, q: CleanAnswer, settings: Tracing) -> TraceRecord:
    """The record of a fact that the model answers otherwise: not corrupted, no tables."""
    return TraceRecord(
        **_answered(lm, q),
        known=False,
        corrupted=q.clean,
        corrupted_samples=(),
        settings=settings.to_dict(),
    )


def _answered(lm: LM, q: CleanAnswer) -> dict[str, Any]:
    """What the clean run alone tells."""
    return {
        "fact": q.fact,
        "model": lm.name,
        "tokens": q.prompt.texts,
        "subject": q.subject,
        "answer": decode_continuation(lm, q.prompt.ids, [q.answer]),
        "answer_id": q.answer,
        "clean": q.clean,
    }


@dataclass(frozen=True, kw_only=True)
class TraceBatch:
    """The rows of one forward pass: a clean row for each fact, then each fact's samples."""

    lm: LM
    questions: Sequence[CleanAnswer]
    settings: Tracing
    scale: NoiseScale

    @cached_property
    def samples(self) -> int:
        """How many corrupted rows a fact has."""
        return self.settings.corruption.samples

    def first_row(self, fact: int) -> int:
        """The first of a fact's corrupted rows."""
        return len(self.questions) + fact * self.samples

    def run(self, *, replace: bool) -> ActivationCache:
        """Clean and corrupted rows in one forward pass."""
        clean = pad_prompts(self.lm, [q.prompt for q in self.questions])
        ids = torch.cat([clean, clean.repeat_interleave(self.samples, 0)])

        def corrupt(out: Tensor) -> Tensor:
            for i, q in enumerate(self.questions):
                self.corrupt_(out[self.first_row(i) :][: self.samples], q, replace)
            return out

        return forward(self.lm, ids, keep=self.settings.contributions, embed=corrupt)

    def corrupt_(
        self, embeddings: Float[Tensor, "sample token width"], q: CleanAnswer, replace: bool
    ) -> None:
        """Hide the subject in a fact's corrupted rows."""
        corruption = self.settings.corruption
        start, stop = corruption.tokens(q.subject, len(q.prompt))
        noise = sample_noise(corruption, self.scale, q.fact, stop - start, embeddings.shape[-1])
        embeddings[:, start:stop] = corrupt_embeddings(embeddings[:, start:stop], noise, replace)

    def corrupted(self, run: ActivationCache) -> Float[Tensor, "fact sample"]:
        """P*[o] in every corrupted row."""
        rows = run.states[-1][len(self.questions) :]
        ends = torch.tensor([len(q.prompt) - 1 for q in self.questions])
        last = rows[torch.arange(len(rows)), ends.repeat_interleave(self.samples)]
        answer = torch.tensor([q.answer for q in self.questions], device=last.device)
        p = token_probability(self.lm, last, answer.repeat_interleave(self.samples))
        return p.view(-1, self.samples).cpu()

    def unrestored(self, run: ActivationCache) -> tuple[list[TraceRecord], Float[Tensor, " fact"]]:
        """The records without tables, and what a cell holds that restores nothing."""
        corruption = self.settings.corruption
        unrestored = corrupted = self.corrupted(run)
        if corruption.replace and corruption.baseline == "added":
            corrupted = self.corrupted(self.run(replace=False))
        records = [
            TraceRecord(
                **_answered(self.lm, q),
                known=q.known,
                corrupted=float(corrupted[i].mean()),
                corrupted_samples=tuple(corrupted[i].tolist()),
                settings={**self.settings.to_dict(), "sigma": self.scale.sigma},
            )
            for i, q in enumerate(self.questions)
        ]
        return records, unrestored.mean(1)

    def tables(
        self,
        run: ActivationCache,
        unrestored: Float[Tensor, " fact"],
        budget: Budget,
        progress: Callable[[float], None],
    ) -> dict[tuple[str, str], list[CellTable]]:
        """Every table that the settings ask for, one of each for every fact."""
        wanted = self.restorations()
        job = budget.job(self.lm)

        def part_done(share: float) -> None:
            progress(share / len(wanted))

        found: dict[tuple[str, str], list[CellTable]] = {}
        for name, restoration in wanted.items():
            rows = self.settings.sever_rows if restoration.sever else "all"
            stretches = self.stretches(rows)
            cells = restore(self.lm, run, stretches, restoration, job, part_done)
            found[name] = self.grids(cells, rows, unrestored)
        return found

    def restorations(self) -> dict[tuple[str, str], Restoration]:
        """What each table restores, by where it goes in the record."""
        layers, settings = range(self.lm.n_layers), self.settings
        single = [(layer, layer + 1) for layer in layers]
        windows = [window_around(settings, layer, len(layers)) for layer in layers]
        every = settings.sever_at == "every"
        restored = {
            ("restored", kind): Restoration(
                kind=kind, windows=single if kind == "states" else windows
            )
            for kind in settings.kinds
        }
        severed = {
            ("severed", module): Restoration(
                kind="states", windows=single, sever=module, sever_every=every
            )
            for module in settings.sever
        }
        return restored | severed

    def stretches(self, rows: str) -> list[Segment]:
        """The tokens that each restoration sends through the layers: by fact, sample, token."""
        return [
            stretch
            for i, q in enumerate(self.questions)
            for stretch in self.stretches_of(i, range(self.samples), q.tokens(rows))
        ]

    def stretches_of(
        self, fact: int, samples: Sequence[int], tokens: Sequence[int]
    ) -> list[Segment]:
        """Those of one fact, of some samples and tokens."""
        q = self.questions[fact]
        return [
            Segment(
                clean=fact,
                row=self.first_row(fact) + sample,
                start=token,
                stop=len(q.prompt),
                answer=q.answer,
            )
            for sample in samples
            for token in tokens
        ]

    def grids(
        self,
        cells: Float[Tensor, "stretch layer"],
        rows: str,
        unrestored: Float[Tensor, " fact"],
    ) -> list[CellTable]:
        """A table for each fact: the mean over its samples of each cell's probability."""
        sizes = [self.samples * len(q.tokens(rows)) for q in self.questions]
        tables = []
        for q, mine, p in zip(self.questions, cells.split(sizes), unrestored, strict=True):
            tokens = q.tokens(rows)
            table = torch.full((len(q.prompt), self.lm.n_layers), torch.nan)
            if rows == "all":
                # Left of the subject both runs are the same: there is nothing to restore.
                table[: q.subject[0]] = p
            table[tokens] = mine.view(self.samples, len(tokens), -1).mean(0)
            tables.append(as_cell_table(table.tolist()))
        return tables

    def gradients(self, q: CleanAnswer) -> dict[str, CellTable]:
        """The norm of the integrated gradient at the same cells."""
        path = self.settings.gradient_path
        norms = {
            kind: integrated_gradients(self.lm, q.prompt.ids, q.answer, kind, path=path)
            for kind in self.settings.kinds
        }
        return {kind: as_cell_table(table.tolist()) for kind, table in norms.items()}


LOOKAHEAD = 128
"""How many facts are asked for their answers, and sorted by length, before they are traced."""


def trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TraceRecord:
    """Trace one fact; a fact that the model does not know is traced all the same.

    `memory` bounds the bytes used beside the model; `done` hears each share of the work (of 1).
    """
    settings = settings or Tracing()
    scale = scale or default_scale(lm, settings.corruption, [fact])
    [question] = clean_answers(lm, [fact], settings)
    return _trace_within(lm, [question], settings, scale, Budget.of(lm, memory), progress)[0]


def trace_many(
    lm: LM,
    facts: Sequence[Fact],
    settings: Tracing | None = None,
    *,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    finished: Collection[Fact] = (),
    progress: Callable[[int], None] = lambda n: None,
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
        questions = [q for q in clean_answers(lm, some, settings) if q.fact not in finished]
        for question in questions:
            if not question.known:
                yield unknown_fact_record(lm, question, settings)
                progress(1)
        for batch in batches(lm, [q for q in questions if q.known], settings, budget):
            yield from _trace_within(lm, batch, settings, scale, budget)
            progress(len(batch))


def default_scale(lm: LM, corruption: Corruption, facts: Sequence[Fact]) -> NoiseScale:
    """σ over the subjects of the facts, or of the package's own where these are too few."""
    from factscope.data.readers import everyday_facts

    if len(facts) < 20:
        facts = everyday_facts()
    return measure_noise_scale(lm, corruption, [f.subject for f in facts], [f.text for f in facts])


def batches(
    lm: LM, questions: Sequence[CleanAnswer], settings: Tracing, budget: Budget
) -> Iterator[list[CleanAnswer]]:
    """Questions that go together: about as many tokens to restore, so that few slots are empty."""
    kept = 1 + len(settings.contributions)
    batch: list[CleanAnswer] = []
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
    questions: Sequence[CleanAnswer],
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """Trace a batch; where memory runs out, in halves, and with half the bound."""
    try:
        return trace_batch(lm, questions, settings, scale, budget, progress)
    except RuntimeError as error:
        if not is_out_of_memory(error) or budget.bytes < 2**20:
            raise
    if lm.device.type == "cuda":
        torch.cuda.empty_cache()
    half = max(1, len(questions) // 2)
    parts = [questions[i : i + half] for i in range(0, len(questions), half)]
    return [r for part in parts for r in _trace_within(lm, part, settings, scale, budget.half())]
