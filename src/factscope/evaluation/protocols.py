"""Evaluation protocols: from cases to records.

- *single*: each fact is edited alone into the unedited model (the paper's protocol);
- *batch*: one edit of many facts;
- *sequential*: facts are edited one after another into the same model. Each case is scored right
  after its own edit, and again after the last edit (`runs.evaluate` contains the loop, so
  that a killed run resumes).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.errors import FactscopeError, OutOfMemory
from factscope.evaluation.before_after import describe_checks
from factscope.evaluation.cases import Similarity, score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.records import CaseRecord, CaseScores, Protocol

if TYPE_CHECKING:
    from factscope.lm.model import LM

ScoresOrError = CaseScores | FactscopeError
"""The scores of a case, or why it cannot be scored (for instance a prompt that is too long)."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An editor on a model, and how each case is scored."""

    lm: "LM"
    editor: Editor
    data: str
    """Name of the data set in records."""
    method: str
    """Name of the editor in records and tables."""
    scoring: ScoringOptions = field(default_factory=ScoringOptions)
    similarity: Similarity | None = None

    def score_unedited(self, cases: Sequence[Case]) -> list[ScoresOrError]:
        """Each case's scores under the unedited model (or the model with its edits applied)."""
        return self._score(cases, [], [None] * len(cases))

    def single(self, cases: Sequence[Case], before: Sequence[ScoresOrError]) -> list[CaseRecord]:
        """Each fact edited alone into the unedited model."""
        edits = self.editor.attempt(self.lm, [case.request for case in cases])
        return self._records(cases, before, edits, "single", None)

    def batch(
        self, cases: Sequence[Case], before: Sequence[ScoresOrError], step: int
    ) -> list[CaseRecord]:
        """All facts in one edit."""
        usable = [case for case, b in zip(cases, before, strict=True) if isinstance(b, CaseScores)]
        try:
            edit: Edit | FactscopeError = self.editor(self.lm, [case.request for case in usable])
        except OutOfMemory:
            raise
        except FactscopeError as error:
            edit = error
        return self._records(cases, before, [edit] * len(cases), "batch", step)

    def sequential_step(
        self, case: Case, before: ScoresOrError, step: int
    ) -> tuple[CaseRecord, Edit | None]:
        """One more edit of the model in its present state; the caller applies the edit."""
        (edit,) = self.editor.attempt(self.lm, [case.request])
        (record,) = self._records([case], [before], [edit], "sequential", step)
        return record, None if isinstance(edit, FactscopeError) else edit

    def sequential_end(
        self, records: Sequence[CaseRecord], cases: Sequence[Case]
    ) -> list[CaseRecord]:
        """Score cases again, on the model with all edits of the sequence applied."""
        return [
            replace(record, phase="end", **_after(scores))
            for record, scores in zip(records, self.score_unedited(cases), strict=True)
        ]

    def _records(
        self,
        cases: Sequence[Case],
        before: Sequence[ScoresOrError],
        edits: Sequence[Edit | FactscopeError],
        protocol: Protocol,
        step: int | None,
    ) -> list[CaseRecord]:
        """Each case scored under its edit, or with the error of its scores or its edit."""
        errors = [
            next((x for x in both if isinstance(x, FactscopeError)), None)
            for both in zip(before, edits, strict=True)
        ]
        usable = [i for i, error in enumerate(errors) if error is None]
        # In the batch protocol all cases share one edit: pass it to scoring once.
        distinct = {id(edits[i]): edits[i] for i in usable}
        index = {key: n for n, key in enumerate(distinct)}
        on_device = [e.to(self.lm.device) for e in distinct.values() if isinstance(e, Edit)]
        scores = self._score(
            [cases[i] for i in usable], on_device, [index[id(edits[i])] for i in usable]
        )
        after = dict(zip(usable, scores, strict=True))
        return [
            CaseRecord(
                fact=case.fact,
                true=case.true,
                data=self.data,
                model=self.lm.name,
                method=self.method,
                protocol=protocol,
                step=step,
                before=unedited if isinstance(unedited, CaseScores) else None,
                checks=describe_checks(edit.checks) if isinstance(edit, Edit) else {},
                **_after(after.get(i, errors[i])),
            )
            for i, (case, unedited, edit) in enumerate(zip(cases, before, edits, strict=True))
        ]

    def _score(
        self, cases: Sequence[Case], edits: Sequence[Edit], edit_index: Sequence[int | None]
    ) -> list[ScoresOrError]:
        """All cases in one batch; if that fails, each alone, so that only the bad ones fail."""
        if not cases:
            return []
        try:
            return list(
                score_cases(
                    self.lm, cases, edits, edit_index,
                    scoring=self.scoring, similarity=self.similarity,
                )
            )  # fmt: skip
        except OutOfMemory:
            raise
        except FactscopeError as error:
            if len(cases) == 1:
                return [error]
        return [
            scores
            for case, index in zip(cases, edit_index, strict=True)
            for scores in self._score([case], edits, [index])
        ]


def _after(scores: ScoresOrError | None) -> dict[str, Any]:
    """The fields `after` and `error` of a record."""
    if not isinstance(scores, CaseScores):
        return {"after": None, "error": f"{type(scores).__name__}: {scores}"}
    nlls = [x for prompts in scores.prompts.values() for p in prompts for x in (p.new, p.true)]
    if not all(map(math.isfinite, nlls)):
        return {"after": None, "error": "the edited model's probabilities are NaN or infinite"}
    return {"after": scores, "error": None}
