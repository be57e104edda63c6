"""Several facts traced at once: the clean and corrupted runs, then every table from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.lm.forward import Run, forward
from factscope.lm.model import LM
from factscope.lm.tokens import spoken
from factscope.records import Grid, TraceRecord, as_grid
from factscope.tracing.corrupt import Scale, draw, noisy
from factscope.tracing.engine import Restoration, probability, restore
from factscope.tracing.gradients import integrated_gradients
from factscope.tracing.memory import Budget
from factscope.tracing.questions import Question, padded
from factscope.tracing.settings import Tracing, window_of
from factscope.tracing.strands import Stretch

__all__ = ["Batch", "trace_batch", "unknown"]


def trace_batch(
    lm: LM,
    questions: Sequence[Question],
    settings: Tracing,
    scale: Scale,
    budget: Budget,
    done: Callable[[float], None] = lambda share: None,
) -> list[TraceRecord]:
    """The record of every question; `done` hears each share of the work (of 1)."""
    batch = Batch(lm=lm, questions=questions, settings=settings, scale=scale)
    run = batch.run(replace=settings.corruption.replace)
    records, unrestored = batch.unrestored(run)
    tables = batch.tables(run, unrestored, budget, done)
    return [
        replace(
            record,
            restored={kind: tables["restored", kind][i] for kind in settings.kinds},
            severed={module: tables["severed", module][i] for module in settings.sever},
            gradients=batch.gradients(questions[i]) if settings.gradients else {},
        )
        for i, record in enumerate(records)
    ]


def unknown(lm: LM, q: Question, settings: Tracing) -> TraceRecord:
    """The record of a fact that the model answers otherwise: not corrupted, no tables."""
    return TraceRecord(
        **_answered(lm, q),
        known=False,
        corrupted=q.clean,
        corrupted_samples=(),
        settings=settings.to_dict(),
    )


def _answered(lm: LM, q: Question) -> dict[str, Any]:
    """What the clean run alone tells."""
    return {
        "fact": q.fact,
        "model": lm.name,
        "tokens": q.prompt.texts,
        "subject": q.subject,
        "answer": spoken(lm, q.prompt.ids, [q.answer]),
        "answer_id": q.answer,
        "clean": q.clean,
    }


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one forward pass: a clean row for each fact, then each fact's samples."""

    lm: LM
    questions: Sequence[Question]
    settings: Tracing
    scale: Scale

    @cached_property
    def samples(self) -> int:
        """How many corrupted rows a fact has."""
        return self.settings.corruption.samples

    def first_row(self, fact: int) -> int:
        """The first of a fact's corrupted rows."""
        return len(self.questions) + fact * self.samples

    def run(self, *, replace: bool) -> Run:
        """Clean and corrupted rows in one forward pass."""
        clean = padded(self.lm, [q.prompt for q in self.questions])
        ids = torch.cat([clean, clean.repeat_interleave(self.samples, 0)])

        def corrupt(out: Tensor) -> Tensor:
            for i, q in enumerate(self.questions):
                self.corrupt_(out[self.first_row(i) :][: self.samples], q, replace)
            return out

        return forward(self.lm, ids, keep=self.settings.contributions, embed=corrupt)

    def corrupt_(
        self, embeddings: Float[Tensor, "sample token width"], q: Question, replace: bool
    ) -> None:
        """Hide the subject in a fact's corrupted rows."""
        corruption = self.settings.corruption
        start, stop = corruption.tokens(q.subject, len(q.prompt))
        noise = draw(corruption, self.scale, q.fact, stop - start, embeddings.shape[-1])
        embeddings[:, start:stop] = noisy(embeddings[:, start:stop], noise, replace)

    def corrupted(self, run: Run) -> Float[Tensor, "fact sample"]:
        """P*[o] in every corrupted row."""
        rows = run.states[-1][len(self.questions) :]
        ends = torch.tensor([len(q.prompt) - 1 for q in self.questions])
        last = rows[torch.arange(len(rows)), ends.repeat_interleave(self.samples)]
        answer = torch.tensor([q.answer for q in self.questions], device=last.device)
        p = probability(self.lm, last, answer.repeat_interleave(self.samples))
        return p.view(-1, self.samples).cpu()

    def unrestored(self, run: Run) -> tuple[list[TraceRecord], Float[Tensor, " fact"]]:
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
        run: Run,
        unrestored: Float[Tensor, " fact"],
        budget: Budget,
        done: Callable[[float], None],
    ) -> dict[tuple[str, str], list[Grid]]:
        """Every table that the settings ask for, one of each for every fact."""
        wanted = self.restorations()
        job = budget.job(self.lm)

        def part_done(share: float) -> None:
            done(share / len(wanted))

        found: dict[tuple[str, str], list[Grid]] = {}
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
        windows = [window_of(settings, layer, len(layers)) for layer in layers]
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

    def stretches(self, rows: str) -> list[Stretch]:
        """The tokens that each restoration sends through the layers: by fact, sample, token."""
        return [
            stretch
            for i, q in enumerate(self.questions)
            for stretch in self.stretches_of(i, range(self.samples), q.tokens(rows))
        ]

    def stretches_of(
        self, fact: int, samples: Sequence[int], tokens: Sequence[int]
    ) -> list[Stretch]:
        """Those of one fact, of some samples and tokens."""
        q = self.questions[fact]
        return [
            Stretch(
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
    ) -> list[Grid]:
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
            tables.append(as_grid(table.tolist()))
        return tables

    def gradients(self, q: Question) -> dict[str, Grid]:
        """The norm of the integrated gradient at the same cells."""
        path = self.settings.gradient_path
        norms = {
            kind: integrated_gradients(self.lm, q.prompt.ids, q.answer, kind, path=path)
            for kind in self.settings.kinds
        }
        return {kind: as_grid(table.tolist()) for kind, table in norms.items()}
