"""An editor evaluated on many cases, into a run's folder.

Cases go in pieces of a fixed size, cut at the same places whatever was done before, so that a run
that was killed and taken up again has the records of an unbroken one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from factscope.data.cases_file import CasesFile, read_cases
from factscope.editing.editor import Editor
from factscope.errors import BadSetting
from factscope.evaluation.cases import Asking, Likeness
from factscope.evaluation.protocols import Evaluation
from factscope.facts import Case
from factscope.fetch import sha256
from factscope.lm.model import LM
from factscope.records import CaseRecord, Protocol
from factscope.runs.folder import RunFolder
from factscope.runs.info import info
from factscope.runs.sequence import go_in_turn
from factscope.runs.unedited import Scores, Unedited

__all__ = ["Crew", "EvaluateRun", "Piece", "alone"]

PIECE = {"cpu": 4, "cuda": 64}
"""How many cases are edited and scored together."""


@dataclass(frozen=True)
class Piece:
    """Some cases to be done together."""

    number: int
    cases: tuple[Case, ...]
    before: list[Scores] | None
    """The unedited model's scores, where they are known."""


Crew = Callable[[Iterable[Piece]], Iterator[tuple[Piece, list[CaseRecord]]]]
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
    asking: Asking = field(default_factory=Asking)
    likeness: Likeness | None = None
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
        return RunFolder.begin(path, self.spec(), info(lm))

    def complete(self, folder: RunFolder, cases: Sequence[Case]) -> bool:
        """Whether every case has its records."""
        moments = ("edit", "end") if self.protocol == "sequential" else ("edit",)
        there = {(record.fact, record.moment) for record in folder.case_records()}
        return all((case.fact, moment) in there for case in cases for moment in moments)

    def evaluation(self, lm: LM) -> Evaluation:
        """The editor on a model, ready to be evaluated."""
        return Evaluation(
            lm=lm, editor=self.editor.settled(lm), data=self.name, method=self.method,
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
        crew: Crew | None = None,
        done: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Evaluate what is not yet in the folder."""
        unedited = Unedited(lm, self.asking, self._referenced())
        pieces = self.pieces(cases, PIECE.get(lm.device.type, 4))
        if self.protocol == "sequential":
            go_in_turn(self.evaluation(lm), folder, pieces, unedited, done)
            return
        finished = {record.fact for record in folder.case_records()}
        done(sum(case.fact in finished for case in cases))
        wanted = [
            Piece(number, some, unedited.read(some))
            for number, some in enumerate(pieces)
            if any(case.fact not in finished for case in some)
        ]
        work = alone(self.evaluation(lm), self.protocol) if crew is None else crew
        for piece, records in work(wanted):
            if piece.before is not None:
                unedited.write(piece.cases, piece.before)
            for record in records:
                if record.fact not in finished:
                    folder.append(record)
                    done(1)

    def _referenced(self) -> dict[str, Any] | None:
        return None if self.references is None else {"sha256": sha256(self.references)}


def alone(evaluation: Evaluation, protocol: Protocol) -> Crew:
    """One worker, this process."""

    def work(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, list[CaseRecord]]]:
        for piece in pieces:
            yield do_piece(evaluation, protocol, piece)

    return work


def do_piece(
    evaluation: Evaluation, protocol: Protocol, piece: Piece
) -> tuple[Piece, list[CaseRecord]]:
    """The unedited scores where they are not known yet, the edits, and the scores after them."""
    before = evaluation.unedited(piece.cases) if piece.before is None else piece.before
    done = Piece(piece.number, piece.cases, before)
    if protocol == "batch":
        return done, evaluation.batch(piece.cases, before, piece.number)
    return done, evaluation.single(piece.cases, before)
