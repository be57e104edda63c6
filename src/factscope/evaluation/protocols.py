"""What it means to evaluate an editor: three protocols, each from cases to records.

- *single*: every fact is written alone into the unedited model (the paper's protocol);
- *batch*: many facts are written by one edit;
- *sequential*: facts are written one after another, each case scored right after its own edit and
  all of them again after the last (in `runs.sequence`, which keeps what a kill must not lose).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.errors import FactscopeError, OutOfMemory
from factscope.evaluation.before_after import checks_of
from factscope.evaluation.cases import ReferenceSimilarity, ScoringOptions, score_cases
from factscope.facts import Case
from factscope.records import CaseRecord, CaseScores

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Evaluation"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An editor to be evaluated on a model, and what is asked of each case."""

    lm: "LM"
    editor: Editor
    data: str
    method: str
    """What the table's row is called."""
    asking: ScoringOptions
    likeness: ReferenceSimilarity | None = None

    def unedited(self, cases: Sequence[Case]) -> list[CaseScores | FactscopeError]:
        """Each case's scores by the model as it is, or why it cannot be asked."""
        return self._scored(cases, [], [None] * len(cases))

    def single(
        self, cases: Sequence[Case], before: Sequence[CaseScores | FactscopeError]
    ) -> list[CaseRecord]:
        """Every fact alone on the unedited model."""
        return self._recorded(cases, before, self._attempt(cases), "single", None)

    def batch(
        self, cases: Sequence[Case], before: Sequence[CaseScores | FactscopeError], step: int
    ) -> list[CaseRecord]:
        """All the facts by one edit."""
        usable = [case for case, b in zip(cases, before, strict=True) if isinstance(b, CaseScores)]
        try:
            edit: Edit | FactscopeError = self.editor(self.lm, [case.request for case in usable])
        except OutOfMemory:
            raise
        except FactscopeError as error:
            edit = error
        return self._recorded(cases, before, [edit] * len(cases), "batch", step)

    def in_turn(
        self, case: Case, before: CaseScores | FactscopeError, step: int
    ) -> tuple[CaseRecord, Edit | None]:
        """One more fact on the model as it is now; the edit is not applied yet."""
        (edit,) = self._attempt([case])
        (record,) = self._recorded([case], [before], [edit], "sequential", step)
        return record, None if isinstance(edit, FactscopeError) else edit

    def at_end(self, records: Sequence[CaseRecord], cases: Sequence[Case]) -> list[CaseRecord]:
        """Cases of a sequence again, on the model that has all its edits."""
        scores = self._scored(cases, [], [None] * len(cases))
        return [
            replace(record, phase="end", **_after(score))
            for record, score in zip(records, scores, strict=True)
        ]

    def _attempt(self, cases: Sequence[Case]) -> list[Edit | FactscopeError]:
        return list(self.editor.attempt(self.lm, [case.request for case in cases]))

    def _recorded(
        self, cases: Sequence[Case], before: Sequence[CaseScores | FactscopeError],
        edits: Sequence[Edit | FactscopeError], protocol: Any, step: int | None,
    ) -> list[CaseRecord]:  # fmt: skip
        """The cases scored under their edits, or with the error that there was."""
        errors = [
            next((x for x in both if isinstance(x, FactscopeError)), None)
            for both in zip(before, edits, strict=True)
        ]
        good = [i for i, error in enumerate(errors) if error is None]
        used = list({id(edits[i]): edits[i] for i in good}.values())
        places = {id(edit): n for n, edit in enumerate(used)}
        seats = [places[id(edits[i])] for i in good]
        on_device = [edit.to(self.lm.device) for edit in used if isinstance(edit, Edit)]
        scored = self._scored([cases[i] for i in good], on_device, seats)
        after = dict(zip(good, scored, strict=True))
        return [
            self._record(case, b, edit, _after(after.get(i, errors[i])), protocol, step)
            for i, (case, b, edit) in enumerate(zip(cases, before, edits, strict=True))
        ]

    def _record(
        self, case: Case, before: CaseScores | FactscopeError, edit: Edit | FactscopeError,
        after: dict[str, Any], protocol: Any, step: int | None,
    ) -> CaseRecord:  # fmt: skip
        return CaseRecord(
            fact=case.fact,
            true=case.true,
            data=self.data,
            model=self.lm.name,
            method=self.method,
            protocol=protocol,
            step=step,
            before=before if isinstance(before, CaseScores) else None,
            checks=checks_of(edit.checks) if isinstance(edit, Edit) else {},
            **after,
        )

    def _scored(
        self, cases: Sequence[Case], edits: Sequence[Edit], seats: Sequence[int | None]
    ) -> list[CaseScores | FactscopeError]:
        """All cases at once; if one cannot be asked, each alone, so that the others can."""

        def ask(some: Sequence[Case], places: Sequence[int | None]) -> list[CaseScores]:
            return score_cases(
                self.lm, some, edits, places, asking=self.asking, likeness=self.likeness
            )

        return _all_or_each(cases, seats, ask) if cases else []


def _all_or_each(
    cases: Sequence[Case],
    seats: Sequence[int | None],
    ask: Callable[[Sequence[Case], Sequence[int | None]], list[CaseScores]],
) -> list[CaseScores | FactscopeError]:
    try:
        return list(ask(cases, seats))
    except OutOfMemory:
        raise
    except FactscopeError as error:
        if len(cases) == 1:
            return [error]
    return [
        result
        for case, seat in zip(cases, seats, strict=True)
        for result in _all_or_each([case], [seat], ask)
    ]


def _after(scores: CaseScores | FactscopeError | None) -> dict[str, Any]:
    """What a record says of the scores, or of the error in their place."""
    if isinstance(scores, CaseScores):
        numbers = [x for asked in scores.prompts.values() for a in asked for x in (a.new, a.true)]
        if all(map(math.isfinite, numbers)):
            return {"after": scores, "error": None}
        return {"after": None, "error": "the edited model's probabilities are no numbers"}
    return {"after": None, "error": f"{type(scores).__name__}: {scores}"}
