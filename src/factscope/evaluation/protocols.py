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

from factscope.editing.checks import text_perplexity
from factscope.editing.edit import Edit, broken_text
from factscope.editing.editor import Editor
from factscope.errors import FactscopeError, OutOfMemory
from factscope.evaluation.before_after import describe_checks
from factscope.evaluation.cases import Similarity, score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.progress import NestedProgress, Progress, no_progress, split
from factscope.records import CaseRecord, CaseScores, Protocol

if TYPE_CHECKING:
    from factscope.lm.model import LM

EDIT_WORK = 1.5
"""How long an edit takes, in units of scoring a case with texts: measured for ROME on a CPU."""
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

    def score_unedited(
        self, cases: Sequence[Case], *, progress: Progress = no_progress
    ) -> list[ScoresOrError]:
        """Each case's scores under the unedited model (or the model with its edits applied)."""
        return self._score(cases, [], [None] * len(cases), progress)

    def single(
        self,
        cases: Sequence[Case],
        before: Sequence[ScoresOrError],
        *,
        progress: Progress = no_progress,
    ) -> list[CaseRecord]:
        """Each fact edited alone into the unedited model."""
        editing, scoring = split(progress, [EDIT_WORK, 1])
        edits = self.editor.attempt(self.lm, [case.request for case in cases], progress=editing)
        return self._records(cases, before, edits, "single", None, scoring)

    def batch_edit(
        self,
        cases: Sequence[Case],
        before: Sequence[ScoresOrError],
        *,
        progress: Progress = no_progress,
    ) -> Edit | FactscopeError:
        """One edit of all facts whose cases can be scored, or its error."""
        usable = [case for case, b in zip(cases, before, strict=True) if isinstance(b, CaseScores)]
        try:
            return self.editor(self.lm, [case.request for case in usable], progress=progress)
        except OutOfMemory:
            raise
        except FactscopeError as error:
            return error

    def batch(
        self,
        cases: Sequence[Case],
        before: Sequence[ScoresOrError],
        edit: Edit | FactscopeError,
        step: int,
        *,
        progress: Progress = no_progress,
    ) -> list[CaseRecord]:
        """Cases scored under one edit of many facts, or with its error."""
        return self._records(cases, before, [edit] * len(cases), "batch", step, progress)

    def text_perplexity(self) -> float:
        """Perplexity of unrelated text under the model in its present state."""
        return text_perplexity(self.lm)

    def sequential_step(
        self,
        case: Case,
        before: ScoresOrError,
        step: int,
        unedited_perplexity: float | None = None,
        *,
        progress: Progress = no_progress,
    ) -> tuple[CaseRecord, Edit | None]:
        """One more edit of the model in its present state; the caller applies the edit.

        The model is broken if its perplexity is far above that of the unedited model, where it is
        given: many edits may each raise it a little.
        """
        editing, scoring = split(progress, [EDIT_WORK, 1])
        (edit,) = self.editor.attempt(self.lm, [case.request], progress=editing)
        (record,) = self._records([case], [before], [edit], "sequential", step, scoring)
        if isinstance(edit, FactscopeError):
            return record, None
        if unedited_perplexity is not None and edit.checks is not None:
            broken = broken_text(unedited_perplexity, edit.checks.perplexity_after)
            record = replace(record, broken=record.broken or broken)
        return record, edit

    def sequential_end(
        self,
        records: Sequence[CaseRecord],
        cases: Sequence[Case],
        broken: str | None = None,
        *,
        progress: Progress = no_progress,
    ) -> list[CaseRecord]:
        """Score cases again, on the model with all edits of the sequence applied; `broken` says why
        that model is broken."""
        scores = self.score_unedited(cases, progress=progress)
        return [
            replace(record, phase="end", **_after(after, record.before, broken))
            for record, after in zip(records, scores, strict=True)
        ]

    def _records(
        self,
        cases: Sequence[Case],
        before: Sequence[ScoresOrError],
        edits: Sequence[Edit | FactscopeError],
        protocol: Protocol,
        step: int | None,
        progress: Progress,
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
            [cases[i] for i in usable], on_device, [index[id(edits[i])] for i in usable], progress
        )
        after = dict(zip(usable, scores, strict=True))
        records = []
        for i, (case, scored, edit) in enumerate(zip(cases, before, edits, strict=True)):
            unedited = scored if isinstance(scored, CaseScores) else None
            checks = edit.checks if isinstance(edit, Edit) else None
            broken = checks.broken if checks else None
            record = CaseRecord(
                fact=case.fact, true=case.true, data=self.data, model=self.lm.name,
                method=self.method, protocol=protocol, step=step, before=unedited,
                checks=describe_checks(checks), **_after(after.get(i, errors[i]), unedited, broken),
            )  # fmt: skip
            records.append(record)
        return records

    def _score(
        self,
        cases: Sequence[Case],
        edits: Sequence[Edit],
        edit_index: Sequence[int | None],
        progress: Progress,
    ) -> list[ScoresOrError]:
        """All cases in one batch; if that fails, each alone, so that only the bad ones fail."""
        if not cases:
            return []
        nested, part = NestedProgress(progress), 1 / len(cases)
        try:
            return list(
                score_cases(
                    self.lm, cases, edits, edit_index, scoring=self.scoring,
                    similarity=self.similarity, progress=nested.within(0.0, 1.0),
                )
            )  # fmt: skip
        except OutOfMemory:
            raise
        except FactscopeError as error:
            if len(cases) == 1:
                return [error]
        return [
            scores
            for i, (case, index) in enumerate(zip(cases, edit_index, strict=True))
            for scores in self._score([case], edits, [index], nested.within(i * part, part))
        ]


def _after(
    scores: ScoresOrError | None, before: CaseScores | None, broken: str | None
) -> dict[str, Any]:
    """The fields `after`, `error` and `broken` of a record."""
    if not isinstance(scores, CaseScores):
        error = f"{type(scores).__name__}: {scores}"
        return {"after": None, "error": error, "broken": broken}
    nlls = [x for prompts in scores.prompts.values() for p in prompts for x in (p.new, p.true)]
    if not all(map(math.isfinite, nlls)):
        error = "the edited model's probabilities are NaN or infinite"
        return {"after": None, "error": error, "broken": broken or error}
    if broken is None and before is not None:
        broken = _vanished(before, scores)
    return {"after": scores, "error": None, "broken": broken}


VANISHED = 1e-3
"""A model is broken if the objects are, over all prompts of a case, less likely than this fraction
of their probability before the edit. An edit makes its new object likely: their sum grows."""


def _vanished(before: CaseScores, after: CaseScores) -> str | None:
    """A message if the objects' probabilities are near 0 after every prompt of a case."""
    was, now = (
        math.fsum(math.exp(-x) for ps in s.prompts.values() for p in ps for x in (p.new, p.true))
        for s in (before, after)
    )
    if now >= VANISHED * was:
        return None
    return f"the objects' probabilities are near 0: their sum fell from {was:.2g} to {now:.2g}"
