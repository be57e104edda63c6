"""An editor evaluated on many cases, into a run's folder.

Cases go in pieces of a fixed size, cut at the same places whatever was done before, so that a run
that was killed and taken up again has the records of an unbroken one.

Facts written one after another into the same model, surviving a kill.

Each edit is kept as a file in the run's folder before its record is written: a run that is taken up
again puts the edits back, in order, and goes on. After the last one every case is scored again.

The unedited model's scores, asked once and shared by every method: files in the user's cache.

A file's name is a hash of the weights, the number format, the device, the cases themselves and
everything that is asked of them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from factscope.data.readers import CasesFile, read_cases
from factscope.editing.edit import load_edit, save_edit
from factscope.editing.editor import Editor
from factscope.errors import BadSetting, FactscopeError
from factscope.evaluation.cases import ReferenceSimilarity, ScoringOptions
from factscope.evaluation.protocols import Evaluation
from factscope.facts import Case
from factscope.io import cache_folder, sha256, write_atomic
from factscope.lm.model import LM
from factscope.records import CaseRecord, CaseScores, Protocol, scores_from
from factscope.runs.folder import RunFolder, run_info

__all__ = [
    "EvaluateRun",
    "Executor",
    "UneditedScores",
    "WorkItem",
    "local_executor",
    "run_sequential",
]

CachedScores = CaseScores | FactscopeError


class UneditedScores:
    """What the model as it is says of cases, where it was asked before."""

    def __init__(
        self, lm: LM, asking: ScoringOptions, references: Mapping[str, Any] | None
    ) -> None:
        self.folder = cache_folder() / "unedited"
        self.key = [
            lm.fingerprint, str(lm.dtype), _precision(), lm.device.type, asdict(asking), references,
        ]  # fmt: skip

    def path(self, cases: Sequence[Case]) -> Path:
        """Where the scores of those cases are."""
        said = json.dumps([*self.key, [asdict(case) for case in cases]], sort_keys=True)
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.json"

    def read(self, cases: Sequence[Case]) -> list[CachedScores] | None:
        """The scores, or None where they were not asked yet or the file is broken."""
        try:
            lines = json.loads(self.path(cases).read_text("utf-8"))
            found = [FactscopeError(x) if isinstance(x, str) else scores_from(x) for x in lines]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        complete = [scores for scores in found if scores is not None]
        return complete if len(complete) == len(cases) else None

    def write(self, cases: Sequence[Case], scores: Sequence[CachedScores]) -> None:
        """Keep the scores for the next method."""
        lines = [str(x) if isinstance(x, FactscopeError) else asdict(x) for x in scores]
        path = self.path(cases)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(lines, ensure_ascii=False, allow_nan=False))


def _precision() -> str:
    import torch

    return torch.get_float32_matmul_precision()


def run_sequential(
    evaluation: Evaluation,
    folder: RunFolder,
    pieces: Sequence[tuple[Case, ...]],
    unedited: UneditedScores,
    progress: Callable[[int], None],
) -> None:
    """Write the facts that are not yet written, then score all cases at the end."""
    cases = list(chain(*pieces))
    before = list(chain(*(_before(evaluation, unedited, some) for some in pieces)))
    lm, edits = evaluation.lm, folder.path / "edits"
    edits.mkdir(exist_ok=True)
    there = folder.case_records()
    written = [record for record in there if record.phase == "edit"]
    ended = {record.fact for record in there if record.phase == "end"}
    progress(len(written))
    with ExitStack() as stack:
        for record in written:
            if not record.failed:
                edit = load_edit(_path(edits, record.step or 0))
                stack.enter_context(edit.applied(lm, force=True))
        for step in range(len(written), len(cases)):
            record, edit = evaluation.in_turn(cases[step], before[step], step)
            if edit is not None and not record.failed:
                save_edit(edit, _path(edits, step))
                stack.enter_context(edit.applied(lm, force=True))
            folder.append(record)
            written.append(record)
            progress(1)
        by_fact = {record.fact: record for record in written}
        for some in pieces:
            left = [case for case in some if case.fact not in ended]
            if not left:
                continue
            scored = evaluation.at_end([by_fact[case.fact] for case in some], some)
            for record in scored:
                if record.fact not in ended:
                    folder.append(record)


def _before(
    evaluation: Evaluation, unedited: UneditedScores, cases: tuple[Case, ...]
) -> list[CachedScores]:
    """The unedited model's scores, from the cache or asked now."""
    known = unedited.read(cases)
    if known is None:
        known = evaluation.unedited(cases)
        unedited.write(cases, known)
    return known


def _path(edits: Path, step: int) -> Path:
    return edits / f"{step:06}.edit"


PIECE = {"cpu": 4, "cuda": 64}
"""How many cases are edited and scored together."""


@dataclass(frozen=True)
class WorkItem:
    """Some cases to be done together."""

    number: int
    cases: tuple[Case, ...]
    before: list[CachedScores] | None
    """The unedited model's scores, where they are known."""


Executor = Callable[[Iterable[WorkItem]], Iterator[tuple[WorkItem, list[CaseRecord]]]]
"""Who does the work: pieces → what was asked before, and the records."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRun:
    """Which editor to evaluate on which cases, and how."""

    model: str
    dtype: str
    data: Path
    name: str
    """What the data set is called in records: "counterfact" or "zsre"."""
    method: str
    """What the editor's row is called."""
    editor: Editor
    protocol: Protocol = "single"
    batch_size: int | None = None
    """Facts to an edit, in the batch protocol; None for all of them."""
    limit: int | None = None
    asking: ScoringOptions = field(default_factory=ScoringOptions)
    likeness: ReferenceSimilarity | None = None
    references: Path | None = None

    def read(self) -> CasesFile:
        """The cases to evaluate, with what could not be read."""
        file = read_cases(self.data)
        cases = file.cases[: self.limit]
        if not cases:
            raise BadSetting(f"{self.data} with limit {self.limit} leaves no case to evaluate")
        return CasesFile(cases, file.problems)

    def spec(self) -> dict[str, Any]:
        """What makes two runs the same."""
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
            "asking": asdict(self.asking),
            "editor": self.editor.to_dict(),
        }

    def begin(self, lm: LM, path: Path) -> RunFolder:
        """A new run in a folder, or the same run taken up again."""
        return RunFolder.begin(path, self.spec(), run_info(lm))

    def complete(self, folder: RunFolder, cases: Sequence[Case]) -> bool:
        """Whether every case has its records."""
        phases = ("edit", "end") if self.protocol == "sequential" else ("edit",)
        there = {(record.fact, record.phase) for record in folder.case_records()}
        return all((case.fact, phase) in there for case in cases for phase in phases)

    def evaluation(self, lm: LM) -> Evaluation:
        """The editor on a model, ready to be evaluated."""
        return Evaluation(
            lm=lm, editor=self.editor.resolve(lm), data=self.name, method=self.method,
            asking=self.asking, likeness=self.likeness,
        )  # fmt: skip

    def pieces(self, cases: Sequence[Case], size: int) -> list[tuple[Case, ...]]:
        """The cases that are done together; in the batch protocol, those of one edit."""
        if self.protocol == "batch":
            size = self.batch_size or len(cases)
        return [tuple(cases[i : i + size]) for i in range(0, len(cases), size)]

    def go_on(
        self,
        lm: LM,
        folder: RunFolder,
        cases: Sequence[Case],
        *,
        crew: Executor | None = None,
        progress: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Evaluate what is not yet in the folder."""
        unedited = UneditedScores(lm, self.asking, self._referenced())
        pieces = self.pieces(cases, PIECE.get(lm.device.type, 4))
        if self.protocol == "sequential":
            run_sequential(self.evaluation(lm), folder, pieces, unedited, progress)
            return
        finished = {record.fact for record in folder.case_records()}
        progress(sum(case.fact in finished for case in cases))
        wanted = [
            WorkItem(number, some, unedited.read(some))
            for number, some in enumerate(pieces)
            if any(case.fact not in finished for case in some)
        ]
        work = local_executor(self.evaluation(lm), self.protocol) if crew is None else crew
        for piece, records in work(wanted):
            if piece.before is not None:
                unedited.write(piece.cases, piece.before)
            for record in records:
                if record.fact not in finished:
                    folder.append(record)
                    progress(1)

    def _referenced(self) -> dict[str, Any] | None:
        return None if self.references is None else {"sha256": sha256(self.references)}


def local_executor(evaluation: Evaluation, protocol: Protocol) -> Executor:
    """One worker, this process."""

    def work(pieces: Iterable[WorkItem]) -> Iterator[tuple[WorkItem, list[CaseRecord]]]:
        for piece in pieces:
            yield run_item(evaluation, protocol, piece)

    return work


def run_item(
    evaluation: Evaluation, protocol: Protocol, piece: WorkItem
) -> tuple[WorkItem, list[CaseRecord]]:
    """The unedited scores where they are not known yet, the edits, and the scores after them."""
    before = evaluation.unedited(piece.cases) if piece.before is None else piece.before
    finished = WorkItem(piece.number, piece.cases, before)
    if protocol == "batch":
        return finished, evaluation.batch(piece.cases, before, piece.number)
    return finished, evaluation.single(piece.cases, before)
