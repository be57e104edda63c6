"""Stream the trace of one fact: updates of cells while it is being computed.

First comes the record of the clean and corrupted runs, then `CellUpdate`s, then the full record.
The tables are first estimated from one noise sample, token by token from the last one, whose cells
are the cheapest; further samples then refine them. The last record is that of `trace`.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.memory import BatchSizes, Budget
from factscope.lm.model import LM
from factscope.progress import Progress, no_progress
from factscope.records import CellTable, TraceRecord, as_cell_table
from factscope.tracing.corruption import NoiseScale, default_noise_scale
from factscope.tracing.engine import Restoration, restore
from factscope.tracing.gradients import attributions
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import CleanAnswer, TraceBatch, clean_answers

SAMPLES_PER_UPDATE = 3
"""Noise samples computed together, after the first."""

TableName = tuple[str, str]
"""A table's field in the record and its key there, e.g. ("severed", "mlp")."""


@dataclass(frozen=True, kw_only=True)
class CellUpdate:
    """New values of a table's cells."""

    table: Literal["restored", "severed", "gradients"]
    kind: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    values: CellTable
    """Token × layer."""
    samples: int
    """Noise samples averaged so far."""


def stream_trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    only: Collection[TableName] | None = None,
    progress: Progress = no_progress,
) -> Iterator[TraceRecord | CellUpdate]:
    """Trace one fact: a record without tables, cell updates, and the full record.

    `only` restricts the tables to the named ones, e.g. [("gradients", "states")]. An exception
    raised by `progress` stops the trace.
    """
    settings = settings or Tracing()
    scale = scale or default_noise_scale(lm, settings.corruption, [fact])
    [answer] = clean_answers(lm, [fact], settings)
    yield from stream_answer(lm, answer, settings, scale, Budget.of(lm, memory), progress, only)


def stream_answer(
    lm: LM,
    answer: CleanAnswer,
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Progress,
    only: Collection[TableName] | None = None,
) -> Iterator[TraceRecord | CellUpdate]:
    """Trace one fact, given its clean answer."""
    batch = TraceBatch(lm=lm, answers=[answer], settings=settings, scale=scale)
    [record], baseline = batch.corrupted_records()
    yield record
    tables = _StreamedTables(batch, float(baseline), budget.batch_sizes(lm), only, progress)
    yield from tables.first_sample()
    yield from tables.other_samples()
    yield from tables.gradients()
    yield dataclasses.replace(record, **tables.finished())


class _StreamedTables:
    """The tables of one fact's trace while they are being computed."""

    def __init__(
        self,
        batch: TraceBatch,
        baseline: float,
        sizes: BatchSizes,
        only: Collection[TableName] | None,
        progress: Progress,
    ) -> None:
        [self.answer] = batch.answers
        self.batch, self.baseline, self.sizes, self.progress = batch, baseline, sizes, progress
        self.shape = len(self.answer.prompt), batch.lm.n_layers
        self.restorations: dict[TableName, Restoration] = {
            name: restoration
            for name, restoration in batch.restorations().items()
            if only is None or name in only
        }
        self.sums: dict[TableName, Float[Tensor, "token layer"]] = {}
        """Each table's cells, summed over the samples so far."""
        for name, restoration in self.restorations.items():
            self.sums[name] = torch.full(self.shape, torch.nan, dtype=torch.float64)
            self.sums[name][batch.restored_tokens(self.answer, restoration)] = 0
        self.norms: dict[str, Float[Tensor, "token layer"]] = {
            kind: torch.full(self.shape, torch.nan)
            for kind in (batch.settings.kinds if batch.settings.gradients else ())
            if only is None or ("gradients", kind) in only
        }
        self.n_tables = len(self.restorations) + len(self.norms)

    def first_sample(self) -> Iterator[CellUpdate]:
        """All tables from one noise sample, token by token from the last."""
        for name, restoration in self.restorations.items():
            tokens = self.batch.baseline_tokens(self.answer, restoration)
            if tokens:
                row = (self.baseline,) * self.shape[1]
                yield self._update(name, tokens, [row] * len(tokens), self.batch.samples)
        for token in reversed(range(self.shape[0])):
            for name, restoration in self.restorations.items():
                if token in self.batch.restored_tokens(self.answer, restoration):
                    yield self._restore(name, [token], [0])

    def other_samples(self) -> Iterator[CellUpdate]:
        """All tables refined by the other samples, a few at a time."""
        others = range(1, self.batch.samples)
        for start in range(0, len(others), SAMPLES_PER_UPDATE):
            samples = others[start : start + SAMPLES_PER_UPDATE]
            for name, restoration in self.restorations.items():
                tokens = self.batch.restored_tokens(self.answer, restoration)
                yield self._restore(name, tokens[::-1], samples)

    def gradients(self) -> Iterator[CellUpdate]:
        """Integrated gradients, layer by layer from the lowest."""
        lm, prompt = self.batch.lm, self.answer.prompt
        path = self.batch.settings.gradient_path
        for kind, norms in self.norms.items():
            for layer in range(lm.n_layers):
                ig = attributions(lm, prompt.ids, self.answer.answer_id, kind, layer, path=path)
                norms[:, layer] = ig.norm(dim=-1)
                self.progress(1 / lm.n_layers / self.n_tables)
                yield CellUpdate(
                    table="gradients",
                    kind=kind,
                    tokens=tuple(range(len(prompt))),
                    layers=(layer,),
                    values=as_cell_table(norms[:, [layer]].tolist()),
                    samples=1,
                )

    def finished(self) -> dict[str, dict[str, CellTable]]:
        """All tables by their field in the record."""
        tables: dict[str, dict[str, CellTable]] = {"restored": {}, "severed": {}}
        for name, sums in self.sums.items():
            mean = sums / self.batch.samples
            mean[self.batch.baseline_tokens(self.answer, self.restorations[name])] = self.baseline
            tables[name[0]][name[1]] = as_cell_table(mean.tolist())
        tables["gradients"] = {k: as_cell_table(x.tolist()) for k, x in self.norms.items()}
        return tables

    def _restore(
        self, name: TableName, tokens: Sequence[int], samples: Sequence[int]
    ) -> CellUpdate:
        """Restore tokens in further samples; the cells become the mean over all samples so far."""
        restoration, sums = self.restorations[name], self.sums[name]
        segments = self.batch.segments(0, samples, tokens)
        length = self.shape[0]
        all_tokens = self.batch.restored_tokens(self.answer, restoration)
        work = self.batch.samples * sum(length - token for token in all_tokens)
        fraction = sum(map(len, segments)) / work / self.n_tables
        cells = restore(
            self.batch.lm,
            self.batch.run,
            segments,
            restoration,
            self.sizes,
            lambda part: self.progress(part * fraction),
        )
        sums[list(tokens)] += cells.double().view(len(samples), len(tokens), -1).sum(0)
        so_far = samples[-1] + 1
        return self._update(name, tokens, (sums[list(tokens)] / so_far).tolist(), so_far)

    def _update(
        self,
        name: TableName,
        tokens: Sequence[int],
        values: Sequence[Sequence[float]],
        samples: int,
    ) -> CellUpdate:
        return CellUpdate(
            table="restored" if name[0] == "restored" else "severed",
            kind=name[1],
            tokens=tuple(tokens),
            layers=tuple(range(self.shape[1])),
            values=as_cell_table(values),
            samples=samples,
        )
