"""Stream the trace of one fact: updates of cells while it is being computed.

First comes the record of the clean and corrupted runs, then `CellUpdate`s, then the full record.
The tables are first estimated from one noise sample, token by token from the last one, whose cells
are the cheapest; further samples then refine them. The last record is that of `trace`.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class CellUpdate:
    """New values of a table's cells."""

    table: str  # restored, severed or gradients
    kind: str
    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    values: CellTable  # token × layer
    samples: int  # noise samples averaged so far


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
    yield from tables.restored()
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
        self.layers = tuple(range(batch.lm.n_layers))
        self.restorations: dict[TableName, Restoration] = {
            name: restoration
            for name, restoration in batch.restorations().items()
            if only is None or name in only
        }
        self.tokens = {
            name: batch.tokens(self.answer, restoration)
            for name, restoration in self.restorations.items()
        }
        """Each table's tokens left of the subject, and those it restores."""
        self.sums: dict[TableName, Float[Tensor, "token layer"]] = {}
        """Each table's cells, summed over the samples so far."""
        for name, (_, restored) in self.tokens.items():
            self.sums[name] = torch.full(self.shape, torch.nan, dtype=torch.float64)
            self.sums[name][restored] = 0
        self.norms: dict[str, Float[Tensor, "token layer"]] = {
            kind: torch.full(self.shape, torch.nan)
            for kind in (batch.settings.kinds if batch.settings.gradients else ())
            if only is None or ("gradients", kind) in only
        }
        self.n_tables = len(self.restorations) + len(self.norms)

    def restored(self) -> Iterator[CellUpdate]:
        """All tables from one sample, token by token from the last; then refined by the others."""
        for name, (left, _) in self.tokens.items():
            if left:
                values = ((self.baseline,) * len(self.layers),) * len(left)
                yield CellUpdate(*name, tuple(left), self.layers, values, self.batch.samples)
        for token in reversed(range(self.shape[0])):
            for name, (_, restored) in self.tokens.items():
                if token in restored:
                    yield self._restore(name, [token], [0])
        others = range(1, self.batch.samples)
        for start in range(0, len(others), SAMPLES_PER_UPDATE):
            for name, (_, restored) in self.tokens.items():
                samples = others[start : start + SAMPLES_PER_UPDATE]
                yield self._restore(name, restored[::-1], samples)

    def gradients(self) -> Iterator[CellUpdate]:
        """Integrated gradients, layer by layer from the lowest."""
        lm, answer, tokens = self.batch.lm, self.answer, range(self.shape[0])
        path = self.batch.settings.gradient_path
        for kind, norms in self.norms.items():
            for layer in range(lm.n_layers):
                ig = attributions(lm, answer.ids, answer.answer_ids, kind, layer, path=path)
                norms[:, layer] = ig[: len(tokens)].norm(dim=-1)
                self.progress(1 / lm.n_layers / self.n_tables)
                values = as_cell_table(norms[:, [layer]].tolist())
                yield CellUpdate("gradients", kind, tuple(tokens), (layer,), values, 1)

    def finished(self) -> dict[str, dict[str, CellTable]]:
        """All tables by their field in the record."""
        tables: dict[str, dict[str, CellTable]] = {"restored": {}, "severed": {}}
        for name, sums in self.sums.items():
            mean = sums / self.batch.samples
            mean[self.tokens[name][0]] = self.baseline
            tables[name[0]][name[1]] = as_cell_table(mean.tolist())
        tables["gradients"] = {k: as_cell_table(x.tolist()) for k, x in self.norms.items()}
        return tables

    def _restore(
        self, name: TableName, tokens: Sequence[int], samples: Sequence[int]
    ) -> CellUpdate:
        """Restore tokens in further samples; the cells become the mean over all samples so far."""
        batch, sums, length = self.batch, self.sums[name], len(self.answer.ids)
        segments = batch.segments(0, samples, tokens)
        work = batch.samples * sum(length - token for token in self.tokens[name][1])
        fraction = sum(map(len, segments)) / work / self.n_tables
        cells = restore(
            batch.lm,
            batch.run,
            segments,
            self.restorations[name],
            self.sizes,
            lambda part: self.progress(part * fraction),
        )
        batch.refuse_nan(cells, "a restored run")
        sums[list(tokens)] += cells.double().view(len(samples), len(tokens), -1).sum(0)
        so_far = samples[-1] + 1
        values = as_cell_table((sums[list(tokens)] / so_far).tolist())
        return CellUpdate(*name, tuple(tokens), self.layers, values, so_far)
