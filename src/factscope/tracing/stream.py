"""A trace of one fact piece by piece, for whoever wants to watch it come.

The record grows: first the runs without restoration, then cell after cell, then the whole. The
tables are first measured with one sample of the noise, token by token from the last one, whose
cells are the cheapest, and then made exact with the others. What is left at the end is what
`trace` gives.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.forward import ActivationCache
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.records import CellTable, TraceRecord, as_cell_table
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.engine import BatchSizes, Restoration, restore
from factscope.tracing.gradients import attributions
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import CleanAnswer, TraceBatch, clean_answers, default_scale

__all__ = ["CellUpdate", "stream_trace"]

SAMPLES = 3
"""How many samples of the noise go together, after the first."""

Done = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class CellUpdate:
    """Some cells of a table, as far as they are known."""

    table: Literal["restored", "severed", "gradients"]
    kind: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    values: CellTable
    """Token × layer."""
    samples: int
    """How many samples of the noise they are the mean of."""


def stream_trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    only: Collection[tuple[str, str]] | None = None,
    progress: Done = lambda share: None,
) -> Iterator[TraceRecord | CellUpdate]:
    """The record without tables, then cells as they are found, then the record as it is.

    `only` names tables, as ("gradients", "states"), where not all of the settings' are wanted.
    `done` hears each share of the work (of 1), also within a piece; what it raises stops the work.
    """
    settings = settings or Tracing()
    scale = scale or default_scale(lm, settings.corruption, [fact])
    [question] = clean_answers(lm, [fact], settings)
    budget = Budget.of(lm, memory)
    yield from stream_answer(lm, question, settings, scale, budget, progress, only)


def stream_answer(
    lm: LM,
    question: CleanAnswer,
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Done,
    only: Collection[tuple[str, str]] | None = None,
) -> Iterator[TraceRecord | CellUpdate]:
    """The same of a fact that was put to the model already."""
    batch = TraceBatch(lm=lm, questions=[question], settings=settings, scale=scale)
    run = batch.run(replace=settings.corruption.replace)
    [record], unrestored = batch.unrestored(run)
    yield record
    growing = _Growing(
        batch=batch,
        run=run,
        job=budget.job(lm),
        unrestored=float(unrestored),
        only=only,
        progress=progress,
    )
    yield from growing.first_sample()
    yield from growing.other_samples()
    yield from growing.gradients()
    yield dataclasses.replace(record, **growing.tables())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Growing:
    """The tables of a trace while they are being made."""

    batch: TraceBatch
    run: ActivationCache
    job: BatchSizes
    unrestored: float
    """What a cell holds that restores nothing."""
    only: Collection[tuple[str, str]] | None
    """The tables to make; None for all."""
    progress: Done

    @cached_property
    def sums(self) -> dict[tuple[str, str], Float[Tensor, "token layer"]]:
        """Each table's cells, summed over the samples so far."""
        question, layers = self.batch.questions[0], self.batch.lm.n_layers
        empty = {}
        for name, restoration in self.wanted.items():
            table = torch.full((len(question.prompt), layers), torch.nan, dtype=torch.float64)
            table[self.tokens(restoration)] = 0
            empty[name] = table
        return empty

    @cached_property
    def wanted(self) -> dict[tuple[str, str], Restoration]:
        """What each table restores."""
        wanted = self.batch.restorations()
        return {name: made for name, made in wanted.items() if self._is_asked(name)}

    @cached_property
    def norms(self) -> dict[str, Float[Tensor, "token layer"]]:
        """Integrated gradients of each kind."""
        shape = len(self.batch.questions[0].prompt), self.batch.lm.n_layers
        kinds = self.batch.settings.kinds if self.batch.settings.gradients else ()
        asked = [kind for kind in kinds if self._is_asked(("gradients", kind))]
        return {kind: torch.full(shape, torch.nan) for kind in asked}

    def _is_asked(self, name: tuple[str, str]) -> bool:
        return self.only is None or name in self.only

    @cached_property
    def parts(self) -> int:
        """How many equal shares of work there are: a table counts once, a gradient once."""
        return len(self.wanted) + len(self.norms)

    def tokens(self, restoration: Restoration) -> list[int]:
        """The tokens that a table restores, the last one first."""
        settings = self.batch.settings
        rows = settings.sever_rows if restoration.sever else "all"
        return self.batch.questions[0].tokens(rows)[::-1]

    def first_sample(self) -> Iterator[CellUpdate]:
        """Every table with one sample of the noise: all kinds, token by token."""
        for name, restoration in self.wanted.items():
            yield from self._left_of_the_subject(name, restoration)
        for token in reversed(range(len(self.batch.questions[0].prompt))):
            for name, restoration in self.wanted.items():
                if token in self.tokens(restoration):
                    yield self._measured(name, [token], [0])

    def other_samples(self) -> Iterator[CellUpdate]:
        """Every table made exact, some samples at a time."""
        rest = range(1, self.batch.samples)
        for begin in rest[::SAMPLES]:
            some = rest[begin - 1 : begin - 1 + SAMPLES]
            for name, restoration in self.wanted.items():
                yield self._measured(name, self.tokens(restoration), some)

    def gradients(self) -> Iterator[CellUpdate]:
        """Integrated gradients, layer by layer from below."""
        lm, question = self.batch.lm, self.batch.questions[0]
        ids, answer, path = question.prompt.ids, question.answer, self.batch.settings.gradient_path
        tokens = tuple(range(len(question.prompt)))
        for kind, table in self.norms.items():
            for layer in range(lm.n_layers):
                found = attributions(lm, ids, answer, kind, layer, path=path)
                table[:, layer] = found.norm(dim=-1)
                values = as_cell_table(table[:, [layer]].tolist())
                self.progress(1 / lm.n_layers / self.parts)
                yield CellUpdate(
                    table="gradients", kind=kind, tokens=tokens, layers=(layer,),
                    values=values, samples=1,
                )  # fmt: skip

    def tables(self) -> dict[str, dict[str, CellTable]]:
        """Every table by its field in the record."""
        restored: dict[str, CellTable] = {}
        severed: dict[str, CellTable] = {}
        for name, sums in self.sums.items():
            where = restored if name[0] == "restored" else severed
            where[name[1]] = as_cell_table(self._filled(name, sums / self.batch.samples).tolist())
        gradients = {kind: as_cell_table(table.tolist()) for kind, table in self.norms.items()}
        return {"restored": restored, "severed": severed, "gradients": gradients}

    def _filled(self, name: tuple[str, str], table: Tensor) -> Tensor:
        """The table with what is left of the subject, where the table is of all tokens."""
        left = self._left(self.wanted[name])
        table[list(left)] = self.unrestored
        return table

    def _left(self, restoration: Restoration) -> range:
        """Tokens at which nothing is to be restored: both runs are the same there."""
        every = not restoration.sever or self.batch.settings.sever_rows == "all"
        return range(self.batch.questions[0].subject[0] if every else 0)

    def _left_of_the_subject(
        self, name: tuple[str, str], restoration: Restoration
    ) -> Iterator[CellUpdate]:
        tokens = self._left(restoration)
        if tokens:
            row = (self.unrestored,) * self.batch.lm.n_layers
            yield self._cells(name, tokens, [row] * len(tokens), self.batch.samples)

    def _measured(
        self, name: tuple[str, str], tokens: Sequence[int], samples: Sequence[int]
    ) -> CellUpdate:
        """Restore the tokens in some samples; the cells then hold the mean of all so far."""
        restoration = self.wanted[name]
        every = self.batch.stretches_of(0, samples, tokens)
        share = len(samples) / self.batch.samples / self.parts
        share *= sum(map(len, every)) / len(samples) / self._slots(restoration)
        cells = restore(
            self.batch.lm, self.run, every, restoration, self.job,
            lambda part: self.progress(part * share),
        )  # fmt: skip
        table = self.sums[name]
        table[list(tokens)] += cells.double().view(len(samples), len(tokens), -1).sum(0)
        so_far = samples[-1] + 1
        return self._cells(name, tokens, (table[list(tokens)] / so_far).tolist(), so_far)

    def _slots(self, restoration: Restoration) -> int:
        """How many tokens one sample of a table sends through the layers."""
        length = len(self.batch.questions[0].prompt)
        return sum(length - token for token in self.tokens(restoration))

    def _cells(
        self,
        name: tuple[str, str],
        tokens: Sequence[int],
        values: Sequence[Sequence[float]],
        samples: int,
    ) -> CellUpdate:
        return CellUpdate(
            table="restored" if name[0] == "restored" else "severed",
            kind=name[1],
            tokens=tuple(tokens),
            layers=tuple(range(self.batch.lm.n_layers)),
            values=as_cell_table(values),
            samples=samples,
        )
