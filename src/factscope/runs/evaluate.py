"""Evaluate an editor on many cases, into a run folder.

Cases are scored one by one on a CPU, and in groups on a GPU. Groups have a fixed size, independent
of what is already done, so that a resumed run has the same records as an uninterrupted one. Work
items of one or more groups run in this process, or on Ray (`runs.ray`). Sequential edits depend on
each other and always run here.

The unedited model's scores are computed once for all methods and cached in the user's cache folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from factscope.data.readers import CasesFile, read_cases
from factscope.errors import FactscopeError
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.io import cache_folder, sha256, write_atomic
from factscope.progress import Progress, no_progress, split
from factscope.records import VERSION, CaseRecord, CaseScores, Protocol, decode
from factscope.runs.folder import Run, RunFolder, locks_folder
from factscope.settings import check

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.evaluation.cases import Similarity
    from factscope.evaluation.protocols import Evaluation
    from factscope.lm.model import LM


GPU_CASES = 64
"""Cases that a GPU edits and scores together: it needs large batches to be fast. A CPU handles them
one by one, so that an interrupt loses one case."""


@dataclass(frozen=True)
class CaseGroup:
    """Cases that are scored together."""

    cases: tuple[Case, ...]
    before: list[CaseScores | FactscopeError] | None
    """The unedited model's scores; None if they are not cached."""
    recorded: bool
    """Whether the run folder has the records of all its cases."""


@dataclass(frozen=True)
class WorkItem:
    """Groups whose facts are written by one edit (batch protocol), or a single group."""

    number: int
    groups: tuple[CaseGroup, ...]


Results = Iterator[tuple[CaseGroup, list[CaseRecord]]]
"""Groups as they are scored: without records under the unedited model, then with records."""


@dataclass(frozen=True)
class Executor:
    """Runs work items in other processes."""

    run: Callable[[Iterable[WorkItem]], Results]
    on_gpu: bool
    """Whether those processes compute on GPUs."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRun(Run):
    """Which editor to evaluate on which cases, and how."""

    model: str
    """Model: a short name, a folder, a file or a hub id."""
    dtype: str
    """Number format of the weights."""
    data: Path
    """File of cases."""
    name: str
    """Name of the data set in records and tables, such as "counterfact" or "zsre"."""
    method: str
    """Name of the editor in records and tables."""
    editor: "Editor"
    """The editor with its settings."""
    protocol: Protocol = "single"
    """Single edits, sequential edits, or a batch of facts in one edit."""
    batch_size: Annotated[int | None, Ge(1)] = None
    """Facts per edit in the batch protocol; None for all of them."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only the first N cases."""
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    """How each case is scored."""
    similarity: "Similarity | None" = None
    """Similarity of generated texts to reference texts (RS)."""
    references: Path | None = None
    """File of the reference texts."""

    __post_init__ = check

    def read(self) -> CasesFile:
        """The cases to evaluate, and problems of those that cannot be read."""
        file = read_cases(self.data)
        return CasesFile(file.cases[: self.limit], file.problems)

    def spec(self) -> dict[str, Any]:
        """What identifies the run."""
        return {
            "command": "evaluate",
            "model": self.model,
            "dtype": self.dtype,
            "data": self.name,
            "data_file": self.data.name,
            "data_sha256": sha256(self.data),
            "limit": self.limit,
            "method": self.method,
            "protocol": self.protocol,
            "batch_size": self.batch_size,
            "references_sha256": None if self.references is None else sha256(self.references),
            "scoring": asdict(self.scoring),
            "editor": self.editor.to_dict(),
        }

    def is_complete(self, folder: RunFolder, cases: Sequence[Case]) -> bool:
        """Whether every case has its records."""
        phases = ("edit", "end") if self.protocol == "sequential" else ("edit",)
        finished = {(record.fact, record.phase) for record in folder.case_records()}
        return all((case.fact, phase) in finished for case in cases for phase in phases)

    def evaluation(self, lm: "LM") -> "Evaluation":
        """The evaluation on a loaded model."""
        from factscope.evaluation.protocols import Evaluation

        return Evaluation(
            lm=lm,
            editor=self.editor.resolve(lm),
            data=self.name,
            method=self.method,
            scoring=self.scoring,
            similarity=self.similarity,
        )

    @locks_folder
    def run(
        self,
        lm: "LM",
        folder: RunFolder,
        cases: Sequence[Case],
        *,
        executor: Executor | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Evaluate the cases that are not yet in the folder; without an executor, here."""
        from factscope.lm.accel import on_gpu

        unedited = UneditedScores(lm, self.scoring, self.references)
        size = 1 if lm.device.type == "cpu" else 4
        if on_gpu(lm) if executor is None else executor.on_gpu:
            size = GPU_CASES
        if self.protocol == "sequential":
            groups = _chunks(cases, size)
            _run_sequential(self.evaluation(lm), folder, groups, unedited, progress)
            return
        recorded = {record.fact for record in folder.case_records()}

        def group(cases: tuple[Case, ...]) -> CaseGroup:
            finished = all(case.fact in recorded for case in cases)
            return CaseGroup(cases, unedited.read(cases), finished)

        def store(group: CaseGroup, records: Sequence[CaseRecord]) -> list[CaseRecord]:
            if not records and group.before is not None:
                unedited.write(group.cases, group.before)
            new = [record for record in records if record.fact not in recorded]
            for record in new:
                folder.append(record)
            return new

        edit_size = (self.batch_size or len(cases)) if self.protocol == "batch" else size
        items = [
            WorkItem(number, tuple(map(group, _chunks(chunk, size))))
            for number, chunk in enumerate(_chunks(cases, edit_size))
            if any(case.fact not in recorded for case in chunk)
        ]
        missing = [
            sum(case.fact not in recorded for group in item.groups for case in group.cases)
            for item in items
        ]
        finished, *parts = split(progress, [len(cases) - sum(missing), *missing])
        finished(1.0)
        if executor is not None:
            for group_result in executor.run(items):
                progress(len(store(*group_result)) / len(cases))
            return
        evaluation, edits = self.evaluation(lm), folder.path / "edits"
        for item, part in zip(items, parts, strict=True):
            for group_result in run_item(evaluation, self.protocol, item, edits, part):
                store(*group_result)
            part(1.0)


def _chunks(cases: Sequence[Case], size: int) -> list[tuple[Case, ...]]:
    return [tuple(cases[i : i + size]) for i in range(0, len(cases), size)]


def run_item(
    evaluation: "Evaluation",
    protocol: Protocol,
    item: WorkItem,
    edits: Path | None = None,
    progress: Progress = no_progress,
) -> Results:
    """Score the unedited model where that is not cached, edit, and score again.

    The edit of a batch is saved in the folder `edits`, if given: a resumed run loads it.
    """
    from factscope.editing.edit import Edit
    from factscope.evaluation.protocols import EDIT_WORK

    batch = protocol == "batch"
    cases = [case for group in item.groups for case in group.cases]
    unscored = [len(group.cases) for group in item.groups if group.before is None]
    unrecorded = [len(group.cases) for group in item.groups if not group.recorded]
    edit_work = [EDIT_WORK * len(cases)] if batch else []
    score_work = unrecorded if batch else [(EDIT_WORK + 1) * n for n in unrecorded]
    parts = iter(split(progress, [*unscored, *edit_work, *score_work]))
    before: list[list[CaseScores | FactscopeError]] = []
    for group in item.groups:
        scores = group.before
        if scores is None:
            scores = evaluation.score_unedited(group.cases, progress=next(parts))
            yield replace(group, before=scores), []
        before.append(scores)
    edit: Edit | FactscopeError | None = None
    if batch:
        editing, path = next(parts), edits and edits / f"{item.number:06}.edit"
        if path and path.is_file():
            edit = Edit.load(path)
        else:
            edit = evaluation.batch_edit(cases, list(chain(*before)), progress=editing)
            if path and isinstance(edit, Edit):
                path.parent.mkdir(exist_ok=True)
                edit.save(path)
    for group, scores in zip(item.groups, before, strict=True):
        if group.recorded:
            continue
        part = next(parts)
        if edit is None:
            yield group, evaluation.single(group.cases, scores, progress=part)
        else:
            yield group, evaluation.batch(group.cases, scores, edit, item.number, progress=part)


def _run_sequential(
    evaluation: "Evaluation",
    folder: RunFolder,
    groups: Sequence[tuple[Case, ...]],
    unedited: "UneditedScores",
    progress: Progress,
) -> None:
    """Edit the facts one after another, then score all cases again.

    Each edit is saved to a file before its record is written. A resumed run loads and applies the
    saved edits in order, and then continues.
    """
    from factscope.editing.edit import Edit, broken_text
    from factscope.evaluation.protocols import EDIT_WORK

    cases = list(chain(*groups))
    cached = [unedited.read(group) for group in groups]
    records = folder.case_records()
    edited = [record for record in records if record.phase == "edit"]
    ended = {record.fact for record in records if record.phase == "end"}
    # A group is scored again even if part of it is done: its batches must stay the same.
    unended = [group for group in groups if any(case.fact not in ended for case in group)]
    unscored = [len(group) for group, scores in zip(groups, cached, strict=True) if scores is None]
    work = [*unscored, *[EDIT_WORK + 1] * (len(cases) - len(edited)), *map(len, unended)]
    finished = (EDIT_WORK + 3) * len(cases) - sum(work)
    first, *rest = split(progress, [finished, *work])
    first(1.0)
    parts = iter(rest)
    before: list[CaseScores | FactscopeError] = []
    for group, scores in zip(groups, cached, strict=True):
        if scores is None:
            scores = evaluation.score_unedited(group, progress=next(parts))
            unedited.write(group, scores)
        before += scores
    edits = folder.path / "edits"
    edits.mkdir(exist_ok=True)
    unedited_perplexity = evaluation.text_perplexity()
    with ExitStack() as applied:
        for record in edited:
            if not record.failed:
                edit = Edit.load(edits / f"{record.step or 0:06}.edit")
                applied.enter_context(edit.applied(evaluation.lm, force=True))
        for step in range(len(edited), len(cases)):
            part = next(parts)
            record, edit = evaluation.sequential_step(
                cases[step], before[step], step, unedited_perplexity, progress=part
            )
            if edit is not None and not record.failed:
                edit.save(edits / f"{step:06}.edit")
                applied.enter_context(edit.applied(evaluation.lm, force=True))
            folder.append(record)
            edited.append(record)
            part(1.0)
        by_fact = {record.fact: record for record in edited}
        broken = broken_text(unedited_perplexity, evaluation.text_perplexity()) if unended else None
        for group in unended:
            part, edit_records = next(parts), [by_fact[case.fact] for case in group]
            for record in evaluation.sequential_end(edit_records, group, broken, progress=part):
                if record.fact not in ended:
                    folder.append(record)
            part(1.0)


class UneditedScores:
    """Cache of the unedited model's scores: a JSON file for each group of cases.

    A file's name is a hash of everything that the scores depend on: weights, number format,
    device, cases and scoring options.
    """

    def __init__(self, lm: "LM", scoring: ScoringOptions, references: Path | None) -> None:
        import torch

        self.folder = cache_folder() / "unedited"
        self.key = [
            VERSION,
            lm.fingerprint,
            str(lm.dtype),
            torch.get_float32_matmul_precision(),
            lm.device.type,
            asdict(scoring),
            None if references is None else sha256(references),
        ]

    def read(self, cases: Sequence[Case]) -> list[CaseScores | FactscopeError] | None:
        """The cached scores; None if there is no file or it is broken."""
        try:
            entries = json.loads(self._path(cases).read_text("utf-8"))
            scores = [
                FactscopeError(entry) if isinstance(entry, str) else decode(entry, CaseScores)
                for entry in entries
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return scores if len(scores) == len(cases) else None

    def write(self, cases: Sequence[Case], scores: Sequence[CaseScores | FactscopeError]) -> None:
        """Cache the scores; an error is stored as its message."""
        entries = [str(x) if isinstance(x, FactscopeError) else asdict(x) for x in scores]
        path = self._path(cases)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(entries, ensure_ascii=False, allow_nan=False))

    def _path(self, cases: Sequence[Case]) -> Path:
        key = json.dumps([*self.key, [asdict(case) for case in cases]], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
