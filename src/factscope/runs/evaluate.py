"""Evaluate an editor on many cases, into a run folder.

Cases are split into work items of a fixed size, independent of what is already done, so that a
resumed run has the same records as an uninterrupted one. An executor runs the items: in this
process, or on Ray (`runs.ray`). Sequential edits depend on each other and always run here.

The unedited model's scores are computed once for all methods and cached in the user's cache folder.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factscope.data.readers import CasesFile, read_cases
from factscope.errors import BadSetting, FactscopeError
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.io import cache_folder, sha256, write_atomic
from factscope.progress import Progress, no_progress
from factscope.records import VERSION, CaseRecord, CaseScores, Protocol
from factscope.runs.folder import RunFolder, run_info

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.evaluation.cases import Similarity
    from factscope.evaluation.protocols import Evaluation
    from factscope.lm.model import LM


@dataclass(frozen=True)
class WorkItem:
    """Cases that are edited and scored together."""

    number: int
    cases: tuple[Case, ...]
    before: list[CaseScores | FactscopeError] | None
    """The unedited model's scores; None if they are not cached."""


Executor = Callable[[Iterable[WorkItem]], Iterator[tuple[WorkItem, list[CaseRecord]]]]
"""Runs work items; yields each finished item, with its unedited scores, and its records."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRun:
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
    batch_size: int | None = None
    """Facts per edit in the batch protocol; None for all of them."""
    limit: int | None = None
    """Use only the first N cases."""
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    """How each case is scored."""
    similarity: "Similarity | None" = None
    """Similarity of generated texts to reference texts (RS)."""
    references: Path | None = None
    """File of the reference texts."""

    def read(self) -> CasesFile:
        """The cases to evaluate, and problems of those that cannot be read."""
        file = read_cases(self.data)
        cases = file.cases[: self.limit]
        if not cases:
            raise BadSetting(f"limit is {self.limit}; {self.data} then has no case to evaluate")
        return CasesFile(cases, file.problems)

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

    def create_or_open(self, lm: "LM", path: Path) -> RunFolder:
        """Create the run's folder, or open it to resume."""
        return RunFolder.create_or_open(path, self.spec(), run_info(lm))

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
        size = 64 if on_gpu(lm) else 4
        if self.protocol == "batch":
            size = self.batch_size or len(cases)
        groups = [tuple(cases[i : i + size]) for i in range(0, len(cases), size)]
        if self.protocol == "sequential":
            _run_sequential(self.evaluation(lm), folder, groups, unedited, progress)
            return
        done = {record.fact for record in folder.case_records()}
        progress(sum(case.fact in done for case in cases) / len(cases))
        items = [
            WorkItem(number, group, unedited.read(group))
            for number, group in enumerate(groups)
            if any(case.fact not in done for case in group)
        ]
        if executor is None:
            evaluation = self.evaluation(lm)
            results = (run_item(evaluation, self.protocol, item) for item in items)
        else:
            results = executor(items)
        for item, records in results:
            if item.before is not None:
                unedited.write(item.cases, item.before)
            for record in records:
                if record.fact not in done:
                    folder.append(record)
                    progress(1 / len(cases))


def run_item(
    evaluation: "Evaluation", protocol: Protocol, item: WorkItem
) -> tuple[WorkItem, list[CaseRecord]]:
    """Score the unedited model if that is not cached, edit, and score again."""
    before = evaluation.score_unedited(item.cases) if item.before is None else item.before
    finished = WorkItem(item.number, item.cases, before)
    if protocol == "batch":
        return finished, evaluation.batch(item.cases, before, item.number)
    return finished, evaluation.single(item.cases, before)


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
    from factscope.editing.edit import Edit

    cases = list(chain(*groups))
    before: list[CaseScores | FactscopeError] = []
    for group in groups:
        scores = unedited.read(group)
        if scores is None:
            scores = evaluation.score_unedited(group)
            unedited.write(group, scores)
        before += scores
    records = folder.case_records()
    edited = [record for record in records if record.phase == "edit"]
    ended = {record.fact for record in records if record.phase == "end"}
    edits = folder.path / "edits"
    edits.mkdir(exist_ok=True)
    progress(len(edited) / len(cases))
    with ExitStack() as applied:
        for record in edited:
            if not record.failed:
                edit = Edit.load(edits / f"{record.step or 0:06}.edit")
                applied.enter_context(edit.applied(evaluation.lm, force=True))
        for step in range(len(edited), len(cases)):
            record, edit = evaluation.sequential_step(cases[step], before[step], step)
            if edit is not None and not record.failed:
                edit.save(edits / f"{step:06}.edit")
                applied.enter_context(edit.applied(evaluation.lm, force=True))
            folder.append(record)
            edited.append(record)
            progress(1 / len(cases))
        by_fact = {record.fact: record for record in edited}
        for group in groups:
            # Score the group again even if part of it is done: its batches must stay the same.
            if all(case.fact in ended for case in group):
                continue
            for record in evaluation.sequential_end([by_fact[c.fact] for c in group], group):
                if record.fact not in ended:
                    folder.append(record)


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
                FactscopeError(entry) if isinstance(entry, str) else CaseScores.from_dict(entry)
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
