"""Stream the trace of one fact: updates of cells while it is being computed.

First comes the record of the clean and corrupted runs, then `CellUpdate`s, then the full record.
The tables are first estimated from one noise sample, token by token: the subject's tokens from its
last to its first, then the others from the last. Further samples then refine them. The last record
is that of `trace`.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.data.readers import everyday_facts
from factscope.facts import Fact
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.progress import Progress, no_progress
from factscope.records import CellTable, TraceRecord, as_cell_table
from factscope.tracing.corruption import NoiseScale, default_noise_scale, paired_facts
from factscope.tracing.engine import restore
from factscope.tracing.gradients import attributions
from factscope.tracing.metrics import Metric
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import (
    CleanAnswer,
    TableName,
    TraceBatch,
    clean_answers,
    given_answer,
    with_tables,
)

SAMPLES_PER_UPDATE = 3
"""Noise samples computed together, after the first."""


@dataclass(frozen=True)
class CellUpdate:
    """New values of a table's cells."""

    table: str  # restored, severed, heads or gradients
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
    answer: str | None = None,
    foil: str | None = None,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    only: Collection[TableName] | None = None,
    head_tokens: Collection[int] | None = None,
    progress: Progress = no_progress,
) -> Iterator[TraceRecord | CellUpdate]:
    """Trace one fact: a record without tables, cell updates, and the full record.

    `answer` and `foil` are as in `trace`. `only` restricts the tables to the named ones, e.g.
    [("gradients", "states")]; ("heads", "") names all tables of a field. `head_tokens` restricts
    the heads to some tokens; the cells of others are None. An exception raised by `progress` stops
    the trace.
    """
    settings = settings or Tracing()
    budget = Budget.of(lm, memory)
    scale = scale or default_noise_scale(lm, settings.corruption, [fact])
    [fact] = paired_facts(lm, [fact], settings, everyday_facts())
    [clean] = clean_answers(lm, [fact], settings)
    if answer is not None:
        clean = given_answer(lm, clean, answer)
    if memory is not None:
        budget.check_minimum(lm, len(clean.ids), settings.tensors)
    yield from stream_answer(
        lm, clean, settings, scale, budget, progress, only, foil=foil, head_tokens=head_tokens
    )


def stream_answer(
    lm: LM,
    answer: CleanAnswer,
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Progress,
    only: Collection[TableName] | None = None,
    *,
    foil: str | None = None,
    head_tokens: Collection[int] | None = None,
) -> Iterator[TraceRecord | CellUpdate]:
    """Trace one fact, given its clean answer."""
    batch = TraceBatch(
        lm=lm, answers=[answer], settings=settings, scale=scale, budget=budget, foil=foil
    )
    [record], metric, baseline = batch.records()
    yield record
    fields = {"lens", "knockout", "attribution"} if only is None else {field for field, _ in only}
    knockout = settings.knockout and "knockout" in fields
    attribution = settings.attribution != "none" and "attribution" in fields
    tables = _StreamedTables(batch, metric, float(baseline), only, head_tokens, progress)
    tables.n_tables += knockout + attribution
    yield from tables.restored()
    yield from tables.gradients()
    record = with_tables(record, tables.finished())
    if settings.lens and "lens" in fields:
        record = replace(record, lens=batch.lenses()[0])
    if knockout:
        record = replace(record, knockout=batch.knockouts(metric, tables.of_one_table)[0])
    if attribution:
        record = replace(record, **batch.attributions(metric, baseline, tables.of_one_table)[0])
    yield record


class _StreamedTables:
    """The tables of one fact's trace while they are being computed."""

    def __init__(
        self,
        batch: TraceBatch,
        metric: Metric,
        baseline: float,
        only: Collection[TableName] | None,
        head_tokens: Collection[int] | None,
        progress: Progress,
    ) -> None:
        [self.answer] = batch.answers
        self.batch, self.metric, self.baseline, self.progress = batch, metric, baseline, progress
        self.shape = len(self.answer.prompt), batch.lm.n_layers
        self.layers = tuple(range(batch.lm.n_layers))
        self.passes: list[list[TableName]] = []
        self.tokens: dict[TableName, tuple[list[int], list[int]]] = {}
        """Each table's tokens left of the subject, and those it restores."""
        for names in batch.passes:
            wanted = [x for x in names if only is None or x in only or (x[0], "") in only]
            heads = [x for x in wanted if x[0] == "heads"]
            others = [x for x in wanted if x[0] != "heads"]
            self.passes += [names for names in (others, heads) if names]
            for name in (*others, *heads):
                left, own = batch.tokens(self.answer, name)
                if name[0] == "heads" and head_tokens is not None:
                    left, own = ([t for t in x if t in head_tokens] for x in (left, own))
                self.tokens[name] = left, own
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
        self.n_tables = len(self.tokens) + len(self.norms)
        """All tables of the trace, also those that are computed elsewhere."""

    def of_one_table(self, fraction: float) -> None:
        """Report progress with one of the tables."""
        self.progress(fraction / self.n_tables)

    def restored(self) -> Iterator[CellUpdate]:
        """All tables from one sample, token by token; then refined by the others."""
        for name, (left, _) in self.tokens.items():
            if left:
                values = ((self.baseline,) * len(self.layers),) * len(left)
                yield CellUpdate(*name, tuple(left), self.layers, values, self.batch.samples)
        start, stop = self.answer.subject
        others = (t for t in reversed(range(self.shape[0])) if not start <= t < stop)
        first_group = self.batch.groups[0]
        for token in (*reversed(range(start, stop)), *others):
            passes = self.passes
            if token == stop - 1:  # the first: one table at a time, so that cells appear sooner
                heads = [names for names in passes if names[0][0] == "heads"]
                passes = [[x] for names in passes for x in names if x[0] != "heads"] + heads
            for names in passes:
                if token in self.tokens[names[0]][1]:
                    yield from self._restore(names, [token], first_group, [0])
        for group in self.batch.groups:
            samples = [sample for sample in group if sample > 0]
            for i in range(0, len(samples), SAMPLES_PER_UPDATE):
                for names in self.passes:
                    tokens = self.tokens[names[0]][1][::-1]
                    part = samples[i : i + SAMPLES_PER_UPDATE]
                    if tokens:
                        yield from self._restore(names, tokens, group, part)

    def gradients(self) -> Iterator[CellUpdate]:
        """Integrated gradients, layer by layer from the lowest."""
        lm, answer, tokens = self.batch.lm, self.answer, range(self.shape[0])
        path = self.batch.settings.gradient_path
        for kind, norms in self.norms.items():
            for layer in range(lm.n_layers):
                ig = attributions(lm, answer.ids, answer.answer_ids, kind, layer, path=path)
                norms[:, layer] = ig[: len(tokens)].norm(dim=-1)
                self.of_one_table(1 / lm.n_layers)
                values = as_cell_table(norms[:, [layer]].tolist())
                yield CellUpdate("gradients", kind, tuple(tokens), (layer,), values, 1)

    def finished(self) -> dict[TableName, CellTable]:
        """All tables."""
        tables = {}
        for name, sums in self.sums.items():
            mean = sums / self.batch.samples
            mean[self.tokens[name][0]] = self.baseline
            tables[name] = as_cell_table(mean.tolist())
        for kind, norms in self.norms.items():
            tables["gradients", kind] = as_cell_table(norms.tolist())
        return tables

    def _restore(
        self,
        names: Sequence[TableName],
        tokens: Sequence[int],
        group: range,
        samples: Sequence[int],
    ) -> Iterator[CellUpdate]:
        """Restore tokens in further samples; the cells become the mean over all samples so far."""
        batch, length = self.batch, len(self.answer.ids)
        segments = batch.segments(0, group, samples, tokens)
        work = batch.samples * sum(length - token for token in self.tokens[names[0]][1])
        fraction = len(names) * sum(map(len, segments)) / work / self.n_tables
        run, frozen = batch.runs(names[0], group)
        values = restore(
            batch.lm,
            run,
            segments,
            [cell for name in names for cell in batch.tables[name]],
            self.metric,
            batch.sizes,
            lambda part: self.progress(part * fraction),
            frozen=frozen,
        )
        batch.refuse_nan(values, "a restored run")
        so_far = samples[-1] + 1
        cells = values.double().view(len(samples), len(tokens), -1).sum(0)
        for name, own in zip(names, cells.split(len(self.layers), dim=1), strict=True):
            sums = self.sums[name]
            sums[list(tokens)] += own
            means = as_cell_table((sums[list(tokens)] / so_far).tolist())
            yield CellUpdate(*name, tuple(tokens), self.layers, means, so_far)
