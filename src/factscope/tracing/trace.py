"""Causal tracing: which hidden states carry a fact (paper §2.1).

1. Clean run: the most likely next token after the prompt is the answer o, with probability P[o];
   or another answer is given. P of several tokens is their product.
2. Corrupted run: noise on the subject's embeddings lowers its probability to P*[o].
3. Corrupted run with restoration: as 2, but one state (or one window of MLP or attention outputs)
   is set to its value in the clean run. How far P[o] recovers is that cell's indirect effect.

`trace` traces one fact, `trace_many` many facts in batches. `find_known` finds the facts that a
model knows, which the paper traces.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.errors import BadFact, BadModelFile, BadSetting
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.lm.accel import release_memory
from factscope.lm.forward import ActivationCache, answer_probability, forward
from factscope.lm.generate import generate_greedy
from factscope.lm.memory import Budget, is_out_of_memory
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt, continuation_ids, decode_continuation, encode_fact
from factscope.progress import NestedProgress, Progress, no_progress, shown
from factscope.records import CellTable, TraceRecord, as_cell_table
from factscope.tracing.corruption import (
    NoiseScale,
    corrupt_embeddings,
    default_noise_scale,
    sample_noise,
)
from factscope.tracing.engine import Restoration, Segment, restore
from factscope.tracing.gradients import integrated_gradients
from factscope.tracing.settings import Tracing

# ---- clean run


@dataclass(frozen=True, kw_only=True)
class CleanAnswer:
    """A tokenized fact and the model's answer in the clean run."""

    fact: Fact
    prompt: Prompt
    subject: tuple[int, int]  # the subject's tokens, as [start, stop)
    answer_ids: tuple[int, ...]  # o, the most likely next token, or the tokens of a given answer
    probability: float  # P[o]
    known: bool  # whether the answer is the fact's target

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt, and all tokens of the answer but the last, which nothing follows."""
        return (*self.prompt.ids, *self.answer_ids[:-1])

    @property
    def restorable(self) -> int:
        """How many tokens can be restored: those from the subject's first on."""
        return len(self.prompt) - self.subject[0]


@torch.no_grad()
def clean_answers(lm: LM, facts: Sequence[Fact], settings: Tracing) -> list[CleanAnswer]:
    """Run the prompts and take the most likely next token of each."""
    encoded = [encode_fact(lm, fact) for fact in facts]
    ids = _padded_ids(lm, [prompt.ids for prompt, _ in encoded])
    ends = torch.tensor([len(prompt) - 1 for prompt, _ in encoded])
    states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    best = lm.head(states[torch.arange(len(ids)), ends]).float().softmax(-1).max(-1)
    for fact, p in zip(facts, best.values.tolist(), strict=True):
        if math.isnan(p):
            raise BadModelFile(
                f"{lm.name} predicts NaN after {fact.text!r}: its weights are NaN or infinite, or "
                f"overflow in {lm.dtype}; try dtype float32, or fetch or save the model again"
            )

    def known(fact: Fact, prompt: Prompt, token: int) -> bool:
        if fact.target is None:
            return True
        if settings.known == "whole-word":
            return lm.tokenizer.decode([token]).strip() == fact.target.strip()
        return token == continuation_ids(lm, prompt, fact.text, fact.target)[0]

    return [
        CleanAnswer(
            fact=fact,
            prompt=prompt,
            subject=subject,
            answer_ids=(token,),
            probability=p,
            known=known(fact, prompt, token),
        )
        for fact, (prompt, subject), token, p in zip(
            facts, encoded, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


@torch.no_grad()
def given_answer(lm: LM, answer: CleanAnswer, text: str) -> CleanAnswer:
    """Another answer than the most likely token: the text, which may have several tokens."""
    if not text.strip():
        raise BadFact(f"the answer is {text!r}; give the text to trace")
    fact, prompt = answer.fact, answer.prompt
    ids = continuation_ids(lm, prompt, fact.text, text)
    answer = replace(answer, answer_ids=ids)
    rows = torch.tensor([answer.ids], device=lm.device)
    states = forward(lm, rows).states[-1][:, len(prompt) - 1 :]
    probability = answer_probability(lm, states, torch.tensor([ids], device=lm.device)).item()
    known = fact.target is None or fact.target.strip() == text.strip()
    return replace(answer, probability=probability, known=known)


def _padded_ids(lm: LM, rows: Sequence[Sequence[int]]) -> Int[Tensor, "row token"]:
    """Token ids, padded on the right; a causal model's real tokens do not attend to padding."""
    length = max(map(len, rows))
    padded = [[*ids, *[ids[-1]] * (length - len(ids))] for ids in rows]
    return torch.tensor(padded, device=lm.device)


def _record(
    lm: LM, answer: CleanAnswer, corrupted: Sequence[float], settings: dict[str, Any]
) -> TraceRecord:
    """A record without tables; without corrupted samples, P*[o] is recorded as P[o]."""
    mean = float(torch.tensor(corrupted).mean()) if corrupted else answer.probability
    return TraceRecord(
        fact=answer.fact,
        model=lm.name,
        tokens=answer.prompt.texts,
        subject=answer.subject,
        answer=decode_continuation(lm, answer.prompt.ids, answer.answer_ids),
        answer_id=answer.answer_ids[0],
        known=answer.known,
        clean=answer.probability,
        corrupted=mean,
        corrupted_samples=tuple(corrupted),
        settings=settings,
    )


# ---- corrupted run and restoration


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceBatch:
    """Facts traced together. Their runs are rows of one forward pass: first a clean row for each
    fact, then each fact's corrupted samples."""

    lm: LM
    answers: Sequence[CleanAnswer]
    settings: Tracing
    scale: NoiseScale

    @property
    def samples(self) -> int:
        """Corrupted rows per fact."""
        return self.settings.corruption.samples

    @cached_property
    def run(self) -> ActivationCache:
        """The clean and corrupted runs."""
        clean = _padded_ids(self.lm, [answer.ids for answer in self.answers])
        ids = torch.cat([clean, clean.repeat_interleave(self.samples, 0)])
        corruption = self.settings.corruption

        def corrupt(embeddings: Float[Tensor, "row token width"]) -> Tensor:
            width = embeddings.shape[-1]
            for i, answer in enumerate(self.answers):
                rows = embeddings[self._first_row(i) :][: self.samples]
                start, stop = corruption.token_range(answer.subject, len(answer.prompt))
                noise = sample_noise(corruption, self.scale, answer.fact, stop - start, width)
                rows[:, start:stop] = corrupt_embeddings(
                    rows[:, start:stop], noise, corruption.replace
                )
            return embeddings

        return forward(self.lm, ids, keep=self.settings.contributions, embed=corrupt)

    def _first_row(self, fact: int) -> int:
        """The first of a fact's corrupted rows."""
        return len(self.answers) + fact * self.samples

    def corrupted_records(self) -> tuple[list[TraceRecord], Float[Tensor, " fact"]]:
        """Records of both runs, without tables; and the baseline: P*[o] with nothing restored."""
        corruption = self.settings.corruption
        baseline = corrupted = self._corrupted_probabilities(self.run)
        if corruption.replace and corruption.baseline == "added":
            added = replace(self.settings, corruption=replace(corruption, replace=False))
            corrupted = self._corrupted_probabilities(replace(self, settings=added).run)
        settings = {**self.settings.to_dict(), "sigma": self.scale.sigma}
        self.refuse_nan(torch.cat([baseline, corrupted]), "the corrupted run")
        records = [
            _record(self.lm, answer, samples.tolist(), settings)
            for answer, samples in zip(self.answers, corrupted, strict=True)
        ]
        return records, baseline.mean(1)

    def refuse_nan(self, probabilities: Tensor, where: str) -> None:
        """Raise BadSetting for NaN, which a record would contain as "not measured"."""
        if probabilities.isnan().any():
            corruption = self.settings.corruption
            level = f"{corruption.level:g}{'s' if corruption.in_sigmas else ''}"
            raise BadSetting(
                f"{self.lm.name} predicts NaN in {where} of {self.answers[0].fact.text!r}; the "
                f"noise level is {level} and the dtype {self.lm.dtype}: lower the noise, or use "
                "float32"
            )

    def _corrupted_probabilities(self, run: ActivationCache) -> Float[Tensor, "fact sample"]:
        rows = run.states[-1][len(self.answers) :]
        ids = torch.tensor([a.answer_ids for a in self.answers]).repeat_interleave(self.samples, 0)
        ends = torch.tensor([len(a.prompt) - 1 for a in self.answers])
        ends = ends.repeat_interleave(self.samples)[:, None] + torch.arange(ids.shape[1])
        last = rows[torch.arange(len(rows))[:, None], ends]
        return answer_probability(self.lm, last, ids).view(-1, self.samples).cpu()

    def restorations(self) -> dict[tuple[str, str], Restoration]:
        """What each table restores, by its field in the record and its key there."""
        layers, settings = range(self.lm.n_layers), self.settings
        single = [(layer, layer + 1) for layer in layers]
        wide = [settings.window_around(layer, len(layers)) for layer in layers]
        tables = {
            ("restored", kind): Restoration(kind=kind, windows=wide if kind != "states" else single)
            for kind in settings.kinds
        }
        severed = Restoration(kind="states", windows=single, freeze_all=settings.freeze_at == "all")
        for module in settings.sever:
            tables["severed", module] = replace(severed, sever=module)
        return tables

    def tokens(self, answer: CleanAnswer, restoration: Restoration) -> tuple[list[int], list[int]]:
        """The tokens left of the subject, where both runs agree, so that their cells equal the
        baseline; and the tokens that a table restores."""
        start, stop = answer.subject
        if restoration.sever and self.settings.sever_tokens == "last-subject":
            return [], [stop - 1]
        return list(range(start)), list(range(start, len(answer.prompt)))

    def segments(self, fact: int, samples: Iterable[int], tokens: Sequence[int]) -> list[Segment]:
        """One segment for each sample and restored token of a fact."""
        answer, first = self.answers[fact], self._first_row(fact)
        stop, answer_ids = len(answer.ids), answer.answer_ids
        return [
            Segment(clean=fact, row=first + sample, start=token, stop=stop, answer=answer_ids)
            for sample in samples
            for token in tokens
        ]

    def tables(
        self,
        cells: Float[Tensor, "segment layer"],
        restoration: Restoration,
        baseline: Float[Tensor, " fact"],
    ) -> list[CellTable]:
        """A table per fact: each cell's mean probability over the samples."""
        self.refuse_nan(cells, "a restored run")
        tokens = [self.tokens(answer, restoration) for answer in self.answers]
        parts = cells.split([self.samples * len(restored) for _, restored in tokens])
        tables = []
        for i, (left, restored) in enumerate(tokens):
            table = torch.full((len(self.answers[i].prompt), self.lm.n_layers), torch.nan)
            table[left] = baseline[i]
            table[restored] = parts[i].view(self.samples, len(restored), -1).mean(0)
            tables.append(as_cell_table(table.tolist()))
        return tables


MIN_BUDGET = 2**20
"""Bytes below which running out of memory is final."""


def trace_batch(
    lm: LM,
    answers: Sequence[CleanAnswer],
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Progress = no_progress,
) -> list[TraceRecord]:
    """Trace facts together; if memory runs out, in two halves with half the budget."""
    nested = NestedProgress(progress)
    batch = TraceBatch(lm=lm, answers=answers, settings=settings, scale=scale)
    try:
        records, baseline = batch.corrupted_records()
        restorations, samples = batch.restorations(), range(batch.samples)
        tables: dict[str, dict[str, list[CellTable]]]
        tables = {"restored": {}, "severed": {}, "gradients": {}}
        for i, ((field, key), restoration) in enumerate(restorations.items()):
            tokens = [batch.tokens(answer, restoration)[1] for answer in answers]
            segments = [s for j, t in enumerate(tokens) for s in batch.segments(j, samples, t)]
            part = nested.within(i / len(restorations), 1 / len(restorations))
            cells = restore(lm, batch.run, segments, restoration, budget.batch_sizes(lm), part)
            tables[field][key] = batch.tables(cells, restoration, baseline)
        for kind in settings.kinds if settings.gradients else ():
            path = settings.gradient_path
            norms = [
                integrated_gradients(lm, a.ids, a.answer_ids, kind, path=path)[: len(a.prompt)]
                for a in answers
            ]
            tables["gradients"][kind] = [as_cell_table(table.tolist()) for table in norms]
        return [
            replace(record, **{f: {key: t[i] for key, t in x.items()} for f, x in tables.items()})
            for i, record in enumerate(records)
        ]
    except RuntimeError as error:
        if not is_out_of_memory(error) or budget.bytes < MIN_BUDGET:
            raise
    # Outside the except block, so that nothing refers to the failed attempt's activations.
    del batch
    release_memory()
    half = max(1, len(answers) // 2)
    records = []
    for i in range(0, len(answers), half):
        part_answers = answers[i : i + half]
        part = nested.within(i / len(answers), len(part_answers) / len(answers))
        records += trace_batch(lm, part_answers, settings, scale, Budget(budget.bytes // 2), part)
    return records


# ---- one fact, many facts


def trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    answer: str | None = None,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> TraceRecord:
    """Trace one fact, whether the model knows it or not.

    `answer` is the text whose probability is traced, by default the most likely next token.
    `memory` bounds the bytes used beside the model. Notebooks show a progress bar by default.
    """
    settings = settings or Tracing()
    scale = scale or default_noise_scale(lm, settings.corruption, [fact])
    answers = clean_answers(lm, [fact], settings)
    if answer is not None:
        answers = [given_answer(lm, answers[0], answer)]
    with shown(progress) as report:
        return trace_batch(lm, answers, settings, scale, Budget.of(lm, memory), report)[0]


LOOKAHEAD = 128
"""Facts whose clean answers are computed together and sorted by length before they are traced."""


def trace_many(
    lm: LM,
    facts: Sequence[Fact],
    settings: Tracing | None = None,
    *,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    finished: Collection[Fact] = (),
    progress: Progress | None = None,
) -> Iterator[TraceRecord]:
    """Trace many facts, those of similar length together; yield records as they are finished.

    A fact that the model does not know is recorded without tables. `memory` bounds the bytes used
    beside the model. Facts already `finished` are skipped, but their clean answers are computed
    together with the others', so that a resumed run is bit-for-bit identical to an uninterrupted
    one where facts are traced one at a time, as on a CPU. `progress` counts skipped facts as done.
    """
    settings = settings or Tracing()
    scale = scale or default_noise_scale(lm, settings.corruption, facts)
    budget = Budget.of(lm, memory)
    with shown(progress) as report:
        report(sum(fact in finished for fact in facts) / max(1, len(facts)))
        for start in range(0, len(facts), LOOKAHEAD):
            group = facts[start : start + LOOKAHEAD]
            if all(fact in finished for fact in group):
                continue
            answers = [a for a in clean_answers(lm, group, settings) if a.fact not in finished]
            for answer in answers:
                if not answer.known:
                    yield _record(lm, answer, (), settings.to_dict())
                    report(1 / len(facts))
            known = [answer for answer in answers if answer.known]
            for batch in batches_by_length(lm, known, settings, budget):
                yield from trace_batch(lm, batch, settings, scale, budget)
                report(len(batch) / len(facts))


def batches_by_length(
    lm: LM, answers: Sequence[CleanAnswer], settings: Tracing, budget: Budget
) -> Iterator[list[CleanAnswer]]:
    """Batches of facts with about as many tokens to restore, so that little padding is needed."""
    tensors = 1 + len(settings.contributions)
    batch: list[CleanAnswer] = []
    for answer in sorted(answers, key=lambda answer: answer.restorable):
        size = budget.facts(lm, len(answer.ids), settings.corruption.samples, tensors)
        if batch and (len(batch) >= size or answer.restorable > batch[0].restorable + 1):
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


# ---- known facts


def find_known(
    lm: LM,
    facts: Sequence[Fact],
    *,
    max_new_tokens: int = 10,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Iterator[tuple[Fact, str]]:
    """The facts that a model knows (App. B.1), each with the text that the model generates.

    The model continues a prompt greedily. If its text names the right object before any other
    capitalised word, the fact is known, and the prompt to trace is everything up to the object.
    """
    with shown(progress) as report:
        for start in range(0, len(facts), batch_size):
            batch = facts[start : start + batch_size]
            texts = generate_greedy(lm, [fact.text for fact in batch], max_new_tokens)
            for fact, text in zip(batch, texts, strict=True):
                if fact.target is None:
                    raise BadFact(f"the fact about {fact.subject!r} has no target; give one")
                before = text_before_target(fact.target, text)
                if before is not None and SUBJECT_SLOT not in before:
                    yield replace(fact, prompt=(fact.prompt + before).rstrip()), text
            report(len(batch) / len(facts))


def text_before_target(target: str, text: str) -> str | None:
    """The text before the target; None if it is missing or a capitalised word precedes it."""
    match = re.search(rf"(?<!\w){re.escape(target.strip())}(?!\w)", text)
    if match is None:
        return None
    before = text[: match.start()]
    initials = re.findall(r"(?<!\w)[^\W\d_]", before)
    return None if any(letter.isupper() for letter in initials) else before
