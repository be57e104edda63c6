"""Causal tracing: which hidden states carry a fact (paper §2.1).

1. Clean run: the most likely next token after the prompt is the answer o, with probability P[o];
   or another answer is given. P of several tokens is their product.
2. Corrupted run: noise on the subject's embeddings, or another subject in its place, lowers its
   probability to P*[o].
3. Corrupted run with restoration: as 2, but one state (or one window of MLP or attention outputs,
   or one head's output) is set to its value in the clean run. How far P[o] recovers is that cell's
   indirect effect.

Another metric can take the place of P[o], and with direction "corrupt" single cells of the clean
run get their corrupted values instead.

`trace` traces one fact, `trace_many` many facts in batches. `find_known` finds the facts that a
model knows, which the paper traces.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.data.readers import everyday_facts
from factscope.errors import BadFact, BadModelFile, BadSetting
from factscope.facts import SUBJECT_SLOT, Fact, check_facts
from factscope.lm.accel import accelerated, release_memory
from factscope.lm.forward import ActivationCache, answer_probability, forward
from factscope.lm.generate import fitting_tokens, generate_greedy
from factscope.lm.memory import BatchSizes, Budget, is_out_of_memory, run_bytes
from factscope.lm.model import LM
from factscope.lm.tokens import (
    Prompt,
    continuation_ids,
    decode_continuation,
    encode_fact,
    first_token,
)
from factscope.progress import NestedProgress, Progress, no_progress, shown
from factscope.records import CellTable, Lens, TraceRecord, as_cell_table
from factscope.tracing.attribution import Attribution, attribution_patching, sum_windows
from factscope.tracing.corruption import (
    NoiseScale,
    corrupt_embeddings,
    default_noise_scale,
    paired_facts,
    replaced_prompt,
    sample_noise,
)
from factscope.tracing.engine import Cell, Segment, restore
from factscope.tracing.gradients import integrated_gradients
from factscope.tracing.knockout import GROUPS, knock_out, token_groups
from factscope.tracing.lens import logit_lens, mean_lens
from factscope.tracing.metrics import Metric, make_metric
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
    replaced: tuple[int, ...] = ()  # for token replacement: the prompt with the other subject

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt, and all tokens of the answer but the last, which nothing follows."""
        return (*self.prompt.ids, *self.answer_ids[:-1])

    @property
    def replaced_ids(self) -> tuple[int, ...]:
        """The same with the other subject."""
        return (*self.replaced, *self.answer_ids[:-1])

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

    tokens = settings.corruption.replaces_tokens
    return [
        CleanAnswer(
            fact=fact,
            prompt=prompt,
            subject=subject,
            answer_ids=(token,),
            probability=p,
            known=known(fact, prompt, token),
            replaced=replaced_prompt(lm, fact).ids if tokens else (),
        )
        for fact, (prompt, subject), token, p in zip(
            facts, encoded, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


@torch.no_grad()
def given_answer(lm: LM, answer: CleanAnswer, text: str | Sequence[int]) -> CleanAnswer:
    """Another answer than the most likely token: a text, which may have several tokens, or token
    ids."""
    fact, prompt = answer.fact, answer.prompt
    if isinstance(text, str):
        if not text.strip():
            raise BadFact(f"answer is {text!r}; give the text to trace")
        ids = continuation_ids(lm, prompt, fact.text, text)
    else:
        ids, text = tuple(text), decode_continuation(lm, prompt.ids, text)
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
    lm: LM,
    answer: CleanAnswer,
    corrupted: Sequence[float],
    settings: dict[str, Any],
    **fields: Any,
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
        **fields,
    )


# ---- corrupted run and restoration

TableName = tuple[str, str]
"""A table's field in the record and its key there, e.g. ("severed", "mlp"), ("heads", "3")."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceBatch:
    """Facts traced together. Their runs are rows of one forward pass: first a clean row for each
    fact, then each fact's corrupted samples. If memory is short, the samples are split into groups,
    and each group has a run of its own."""

    lm: LM
    answers: Sequence[CleanAnswer]
    settings: Tracing
    scale: NoiseScale
    budget: Budget
    foil: str | None = None
    """The token that logit-difference compares with; by default the corrupted run's answer."""
    _runs: dict[tuple[range, int], ActivationCache] = field(default_factory=dict)
    """The runs of the current group of samples, by noise draw."""

    @property
    def samples(self) -> int:
        """Corrupted rows per fact."""
        return self.settings.corruption.samples

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(len(answer.ids) for answer in self.answers)

    @cached_property
    def groups(self) -> list[range]:
        """The samples of each run."""
        rows = self.budget.rows(self.lm, self.length, self.settings.tensors)
        size = max(1, rows // len(self.answers) - 1)
        return [range(i, min(self.samples, i + size)) for i in range(0, self.samples, size)]

    @property
    def sizes(self) -> BatchSizes:
        """How much to compute at once beside the runs."""
        rows = len(self.answers) * (1 + len(self.groups[0]))
        kept = run_bytes(self.lm, rows, self.length, self.settings.tensors)
        return self.budget.batch_sizes(self.lm, self.length, kept)

    def run(self, samples: range, draw: int = 0) -> ActivationCache:
        """The clean and corrupted runs of a group of samples; kept until another group is run.

        `draw` 1 has other noise.
        """
        if (samples, draw) in self._runs:
            return self._runs[samples, draw]
        for key in [key for key in self._runs if key[0] != samples]:
            del self._runs[key]
        clean = _padded_ids(self.lm, [answer.ids for answer in self.answers])
        corruption, corrupted = self.settings.corruption, clean
        if corruption.replaces_tokens:
            corrupted = _padded_ids(self.lm, [answer.replaced_ids for answer in self.answers])

        def corrupt(embeddings: Float[Tensor, "row token width"]) -> Tensor:
            width = embeddings.shape[-1]
            for i, answer in enumerate(self.answers):
                rows = embeddings[self._first_row(i, samples) :][: len(samples)]
                start, stop = corruption.token_range(answer.subject, len(answer.prompt))
                noise = sample_noise(
                    corruption, self.scale, answer.fact, stop - start, width, draw=draw
                )
                rows[:, start:stop] = corrupt_embeddings(
                    rows[:, start:stop], noise[samples.start : samples.stop], corruption.replace
                )
            return embeddings

        ids = torch.cat([clean, corrupted.repeat_interleave(len(samples), 0)])
        keep = tuple(self.settings.contributions)
        if corruption.replaces_tokens:
            run = accelerated(
                self.lm, lambda ids: forward(self.lm, ids, keep=keep), ids, batch=len(ids),
                key=("trace", keep), check=lambda run: run.states[-1], copy=True,
            )  # fmt: skip
        else:
            run = forward(self.lm, ids, keep=keep, embed=corrupt)
        self._runs[samples, draw] = run
        return run

    def _first_row(self, fact: int, samples: range) -> int:
        """The first of a fact's corrupted rows."""
        return len(self.answers) + fact * len(samples)

    @torch.no_grad()
    def records(self) -> tuple[list[TraceRecord], Metric, Float[Tensor, " fact"]]:
        """Records of both runs without tables, the metric, and its value in the base run."""
        last = []
        for samples in self.groups:
            last.append(self._predicting(self.run(samples), len(samples)))
        clean, corrupted = last[0][0], torch.cat([x for _, x in last], dim=1)
        facts, lm, name = torch.arange(len(self.answers)), self.lm, self.settings.metric
        ids = [answer.answer_ids for answer in self.answers]
        foil = None
        if self.foil is not None and name == "logit-difference":
            [answer] = self.answers
            foil = first_token(lm, answer.prompt, answer.fact.text, self.foil)
        metric = make_metric(lm, name, ids, clean, corrupted, foil)
        probability = make_metric(lm, "probability", ids, clean, corrupted)

        def measure(metric: Metric, states: Float[Tensor, "fact sample token width"]) -> Tensor:
            """The metric of every fact and sample."""
            rows = facts.repeat_interleave(states.shape[1])
            values = metric.in_parts(lm, states.flatten(0, 1), rows, self.sizes.logits)
            return values.view(states.shape[:2]).cpu()

        base = clean[:, None] if self.settings.direction == "corrupt" else corrupted
        baseline = measure(metric, base)
        corruption = self.settings.corruption
        if corruption.replace and corruption.baseline == "added":
            added = replace(self.settings, corruption=replace(corruption, replace=False))
            batch = replace(self, settings=added, _runs={})
            parts = [batch._predicting(batch.run(x), len(x))[1] for x in self.groups]
            corrupted = torch.cat(parts, dim=1)
        p = measure(probability, corrupted)
        values: list[dict[str, Any]] = [{} for _ in self.answers]
        if name != "probability":
            of_clean, of_corrupted = measure(metric, clean[:, None]), measure(metric, corrupted)
            self.refuse_nan(torch.cat([of_clean, of_corrupted], dim=1), "the corrupted run")
            for i, answer in enumerate(self.answers):
                values[i]["clean_metric"] = float(of_clean[i])
                values[i]["corrupted_metric"] = float(of_corrupted[i].mean())
                if metric.foil is not None:
                    token = int(metric.foil[i])
                    values[i]["foil"] = decode_continuation(lm, answer.prompt.ids, [token])
        settings = self.settings.to_dict()
        if not corruption.replaces_tokens:
            settings["sigma"] = self.scale.sigma
        self.refuse_nan(torch.cat([baseline, p], dim=1), "the corrupted run")
        records = [
            _record(lm, answer, samples.tolist(), settings, metric=name, **fields)
            for answer, samples, fields in zip(self.answers, p, values, strict=True)
        ]
        return records, metric, baseline.mean(1)

    def _predicting(
        self, run: ActivationCache, samples: int
    ) -> tuple[Float[Tensor, "fact token width"], Float[Tensor, "fact sample token width"]]:
        """The last-layer states that predict the answers, of the clean and the corrupted rows."""
        n, facts = len(self.answers[0].answer_ids), torch.arange(len(self.answers))
        ends = torch.tensor([len(a.prompt) - 1 for a in self.answers])[:, None] + torch.arange(n)
        last = run.states[-1]
        corrupted = last[len(facts) :].unflatten(0, (len(facts), samples))
        sample = torch.arange(samples)[:, None]
        return last[facts[:, None], ends], corrupted[facts[:, None, None], sample, ends[:, None]]

    def refuse_nan(self, values: Tensor, where: str) -> None:
        """Raise BadSetting for NaN, which a record would contain as "not measured"."""
        if values.isnan().any():
            corruption = self.settings.corruption
            level = f"{corruption.level:g}{'s' if corruption.in_sigmas else ''}"
            raise BadSetting(
                f"{self.lm.name} predicts NaN in {where} of {self.answers[0].fact.text!r}; the "
                f"noise level is {level} and the dtype {self.lm.dtype}: lower the noise, or use "
                "float32"
            )

    @cached_property
    def tables(self) -> dict[TableName, list[Cell]]:
        """The cells of each table, one per layer."""
        layers, settings = range(self.lm.n_layers), self.settings
        single = [(layer, layer + 1) for layer in layers]
        wide = [settings.window_around(layer, len(layers)) for layer in layers]
        tables = {
            ("restored", kind): [
                Cell(kind=kind, layers=x) for x in (single if kind == "states" else wide)
            ]
            for kind in settings.kinds
        }
        frozen = {"freeze_all": settings.freeze_at == "all",
                  "from_bottom": settings.sever_draws == "two"}  # fmt: skip
        for module in settings.sever:
            tables["severed", module] = [
                Cell(kind="states", layers=x, sever=module, **frozen) for x in single
            ]
        for head in range(self.lm.n_heads if settings.heads else 0):
            tables["heads", str(head)] = [Cell(kind="heads", layers=x, head=head) for x in single]
        return tables

    @property
    def passes(self) -> list[list[TableName]]:
        """The tables whose cells go through the layers together: those of the same tokens and
        runs."""
        names = list(self.tables)
        severed = [name for name in names if name[0] == "severed"]
        others = [name for name in names if name[0] != "severed"]
        together = self.settings.sever_tokens == "all" and self.settings.sever_draws == "one"
        return [x for x in ([names] if together else [others, severed]) if x]

    def tokens(self, answer: CleanAnswer, table: TableName) -> tuple[list[int], list[int]]:
        """The tokens left of the subject, where both runs agree, so that their cells equal the
        baseline; and the tokens that a table restores."""
        start, stop = answer.subject
        if table[0] == "severed" and self.settings.sever_tokens == "last-subject":
            return [], [stop - 1]
        if table[0] == "severed" and self.settings.sever_draws == "two":
            # Frozen outputs of another draw change the cells left of the subject too.
            return [], list(range(len(answer.prompt)))
        return list(range(start)), list(range(start, len(answer.prompt)))

    def segments(
        self, fact: int, group: range, samples: Iterable[int], tokens: Sequence[int]
    ) -> list[Segment]:
        """One segment for each sample of a group and restored token of a fact."""
        stop, first = len(self.answers[fact].ids), self._first_row(fact, group)
        segments = []
        for sample in samples:
            rows = {"source": fact, "row": first + sample - group.start}
            if self.settings.direction == "corrupt":
                rows = {"source": rows["row"], "row": fact}
            segments += [Segment(fact=fact, start=token, stop=stop, **rows) for token in tokens]
        return segments

    def runs(self, table: TableName, group: range) -> tuple[ActivationCache, ActivationCache]:
        """The runs of a group of samples: that of a table, and that of its frozen outputs."""
        first = self.run(group)
        if table[0] == "severed" and self.settings.sever_draws == "two":
            return self.run(group, draw=1), first
        return first, first

    def cell_tables(
        self,
        names: Sequence[TableName],
        values: Sequence[Float[Tensor, "_ cell"]],
        baseline: Float[Tensor, " fact"],
    ) -> list[dict[TableName, CellTable]]:
        """The tables of each fact, given the values of a pass for each group of samples: each
        cell's mean over the samples."""
        self.refuse_nan(torch.cat(list(values)), "a restored run")
        tokens = [self.tokens(answer, names[0]) for answer in self.answers]
        by_group = [
            part.split([len(group) * len(own) for _, own in tokens])
            for part, group in zip(values, self.groups, strict=True)
        ]
        tables = []
        for i, (left, own) in enumerate(tokens):
            cells = torch.cat([part[i].unflatten(0, (-1, len(own))) for part in by_group])
            table = torch.full((len(self.answers[i].prompt), cells.shape[-1]), torch.nan)
            table[left] = baseline[i]
            table[own] = cells.mean(0)
            parts = table.split(self.lm.n_layers, dim=1)
            tables.append(dict(zip(names, [as_cell_table(x.tolist()) for x in parts], strict=True)))
        return tables

    def knockouts(
        self, metric: Metric, progress: Progress = no_progress
    ) -> list[dict[str, tuple[float, ...]]]:
        """The metric of each fact's clean run with attention to each group of tokens blocked."""
        lm, prompts = self.lm, [(answer.prompt, answer.subject) for answer in self.answers]
        n, window = len(self.answers[0].answer_ids), self.settings.knockout_window
        run = self.run(self.groups[0])
        states = knock_out(lm, run, prompts, n, window, self.sizes, progress)
        facts = torch.arange(len(prompts)).repeat_interleave(len(GROUPS) * lm.n_layers)
        values = metric.in_parts(lm, states.flatten(0, 2), facts, self.sizes.logits)
        self.refuse_nan(values, "a run with blocked attention")
        by_fact = values.view(states.shape[:3]).tolist()
        return [
            {
                group: tuple(row)
                for group, row in zip(GROUPS, rows, strict=True)
                if token_groups(lm, *prompt)[group]
            }
            for prompt, rows in zip(prompts, by_fact, strict=True)
        ]

    def lenses(self) -> list[dict[str, Lens]]:
        """The logit lens on each fact's clean and corrupted run."""
        parts: list[dict[str, list[Lens]]] = [{"clean": [], "corrupted": []} for _ in self.answers]
        for group in self.groups:
            states = self.run(group).states
            for i, answer in enumerate(self.answers):
                first, tokens = self._first_row(i, group), len(answer.prompt)
                rows = {"corrupted": slice(first, first + len(group))}
                if group.start == 0:
                    rows["clean"] = slice(i, i + 1)
                for run, own in rows.items():
                    layers = (x[own, :tokens] for x in states)
                    lens = logit_lens(self.lm, layers, answer.answer_ids[0], self.sizes.logits)
                    parts[i][run].append(lens)
        sizes = [len(group) for group in self.groups]
        return [
            {run: mean_lens(lenses, sizes[: len(lenses)]) for run, lenses in own.items()}
            for own in parts
        ]

    def attributions(
        self, metric: Metric, baseline: Float[Tensor, " fact"], progress: Progress
    ) -> list[dict[str, Any]]:
        """The fields of each fact's record that hold its cells estimated by gradients."""
        lm, start = self.lm, min(answer.subject[0] for answer in self.answers)
        sums: list[dict[str, Tensor]] = [{} for _ in self.answers]
        for facts, found in self._estimates(metric, start, progress):
            for kind, effects in found.items():
                self.refuse_nan(effects, "the gradients")
                for i, row in zip(facts, effects.unbind(1), strict=True):
                    sums[i][kind] = sums[i].get(kind, 0) + row / self.samples
        windows = [self.settings.window_around(layer, lm.n_layers) for layer in range(lm.n_layers)]
        fields = []
        for i, answer in enumerate(self.answers):
            first, length = answer.subject[0], len(answer.prompt)
            tables: dict[str, list[CellTable]] = {}
            for kind, effects in sums[i].items():
                if kind in ("mlp", "attn"):
                    effects = sum_windows(effects, windows)
                cells = torch.zeros(len(effects), length, lm.n_layers)
                cells[:, first:] = effects[:, first - start : length - start]
                tables[kind] = [as_cell_table(x.tolist()) for x in cells + baseline[i]]
            heads = tuple(tables.pop("heads", ()))
            own = {kind: table for kind, [table] in tables.items()}
            fields.append({"attribution": own, "head_attribution": heads})
        return fields

    def _estimates(
        self, metric: Metric, start: int, progress: Progress
    ) -> Iterator[tuple[list[int], dict[str, Float[Tensor, "node row token layer"]]]]:
        """Estimated effects from a token on, for some rows at a time; with the fact of each row."""
        lm, settings, answers = self.lm, self.settings, self.answers
        corrected = settings.attribution == "atp-star"
        predicting = torch.arange(len(answers[0].answer_ids))
        ends = torch.tensor([len(a.prompt) - 1 for a in answers])[:, None] + predicting
        # A backward pass keeps the gradients of a layer and of those next to it, for every drop.
        states = 3 * self.length * (lm.n_layers if corrected else 1)
        rows = max(1, min(self.sizes.pending // states, self.sizes.call // self.length))
        for group in self.groups:
            clean = torch.arange(len(answers)).repeat_interleave(len(group))
            corrupted = len(answers) + torch.arange(len(clean))
            for own in torch.arange(len(clean)).split(rows):
                facts = clean[own]  # the clean row of a fact has its number
                base, source = corrupted[own], facts
                if settings.direction == "corrupt":
                    base, source = source, base

                def value(states: Float[Tensor, "row token width"], fact: Tensor = facts) -> Tensor:
                    return metric(lm, states[torch.arange(len(fact))[:, None], ends[fact]], fact)

                work = Attribution(
                    lm=lm, run=self.run(group), base=base, source=source, start=start, metric=value,
                    kinds=[*settings.kinds, *(["heads"] if settings.heads else [])],
                    slots=self.sizes.call,
                )  # fmt: skip
                part = len(own) / len(answers) / self.samples
                found = attribution_patching(
                    work, corrected=corrected, progress=lambda x, part=part: progress(x * part)
                )
                yield facts.tolist(), found


MIN_BUDGET = 2**20
"""Bytes below which running out of memory is final."""


def trace_batch(
    lm: LM,
    answers: Sequence[CleanAnswer],
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    progress: Progress = no_progress,
    *,
    foil: str | None = None,
) -> list[TraceRecord]:
    """Trace facts together; if memory runs out, in two halves with half the budget."""
    nested = NestedProgress(progress)
    batch = TraceBatch(
        lm=lm, answers=answers, settings=settings, scale=scale, budget=budget, foil=foil
    )
    try:
        records, metric, baseline = batch.records()
        tables: list[dict[TableName, CellTable]] = [{} for _ in answers]
        estimated = settings.attribution != "none"
        step = 1 / (len(batch.passes) * len(batch.groups) + estimated or 1)
        for i, names in enumerate(batch.passes):
            cells = [cell for name in names for cell in batch.tables[name]]
            values = []
            for j, group in enumerate(batch.groups):
                run, frozen = batch.runs(names[0], group)
                segments = [
                    segment
                    for k, answer in enumerate(answers)
                    for segment in batch.segments(
                        k, group, group, batch.tokens(answer, names[0])[1]
                    )
                ]
                part = nested.within((i * len(batch.groups) + j) * step, step)
                values.append(
                    restore(lm, run, segments, cells, metric, batch.sizes, part, frozen=frozen)
                )
            for own, new in zip(tables, batch.cell_tables(names, values, baseline), strict=True):
                own |= new
        for kind in settings.kinds if settings.gradients else ():
            for k, a in enumerate(answers):
                path = settings.gradient_path
                norms = integrated_gradients(lm, a.ids, a.answer_ids, kind, path=path)
                tables[k]["gradients", kind] = as_cell_table(norms[: len(a.prompt)].tolist())
        records = [with_tables(r, own) for r, own in zip(records, tables, strict=True)]
        if estimated:
            found = batch.attributions(metric, baseline, nested.within(1 - step, step))
            records = [replace(r, **own) for r, own in zip(records, found, strict=True)]
        if settings.knockout:
            found = batch.knockouts(metric)
            records = [replace(r, knockout=own) for r, own in zip(records, found, strict=True)]
        if settings.lens:
            found = batch.lenses()
            records = [replace(r, lens=own) for r, own in zip(records, found, strict=True)]
        return records
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
        records += trace_batch(
            lm, part_answers, settings, scale, Budget(budget.bytes // 2), part, foil=foil
        )
    return records


def with_tables(record: TraceRecord, tables: Mapping[TableName, CellTable]) -> TraceRecord:
    """The record with its tables."""
    fields: dict[str, Any] = {
        field: {key: table for (own, key), table in tables.items() if own == field}
        for field in ("restored", "severed", "gradients")
    }
    heads = tuple(table for (own, _), table in tables.items() if own == "heads")
    return replace(record, **fields, heads=heads)


# ---- one fact, many facts


def trace(
    lm: LM,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    answer: str | Sequence[int] | None = None,
    foil: str | None = None,
    scale: NoiseScale | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> TraceRecord:
    """Trace one fact, whether the model knows it or not.

    `answer` is the text, or the token ids, whose probability is traced, by default the most likely
    next token; `foil` the text that the metric logit-difference compares it with, by default the
    corrupted run's most likely token. `memory` bounds the bytes used beside the model. Notebooks
    show a progress bar by default.
    """
    settings = settings or Tracing()
    budget = Budget.of(lm, memory)
    scale = scale or default_noise_scale(lm, settings.corruption, [fact])
    [fact] = paired_facts(lm, [fact], settings, everyday_facts())
    answers = clean_answers(lm, [fact], settings)
    if answer is not None:
        answers = [given_answer(lm, answers[0], answer)]
    if memory is not None:
        budget.check_minimum(lm, len(answers[0].ids), settings.tensors)
    with shown(progress) as report:
        return trace_batch(lm, answers, settings, scale, budget, report, foil=foil)[0]


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

    With token replacement, a fact without a `replacement` gets one from the other facts.
    """
    check_facts(facts)
    settings = settings or Tracing()
    scale = scale or default_noise_scale(lm, settings.corruption, facts)
    facts = paired_facts(lm, facts, settings, facts)
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
                if memory is not None:
                    budget.check_minimum(lm, len(batch[-1].ids), settings.tensors)
                yield from trace_batch(lm, batch, settings, scale, budget)
                report(len(batch) / len(facts))


def batches_by_length(
    lm: LM, answers: Sequence[CleanAnswer], settings: Tracing, budget: Budget
) -> Iterator[list[CleanAnswer]]:
    """Batches of facts with about as many tokens to restore, so that little padding is needed."""
    batch: list[CleanAnswer] = []
    for answer in sorted(answers, key=lambda answer: answer.restorable):
        size = budget.facts(lm, len(answer.ids), settings.corruption.samples, settings.tensors)
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
    check_facts(facts)
    with shown(progress) as report:
        for start in range(0, len(facts), batch_size):
            batch = facts[start : start + batch_size]
            prompts = [fact.text for fact in batch]
            tokens = fitting_tokens(lm, prompts, max_new_tokens)
            texts = generate_greedy(lm, prompts, tokens)
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
