"""One edit before and after: predictions after the prompts of a case, continuations, and traces.

Predictions and continuations write no weight: the edited model is the same model with the edit on
some rows of the batch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from factscope.editing.edit import CheckLimits, Edit, EditChecks
from factscope.editing.per_row import edited
from factscope.evaluation.score import Query, QueryScore, score_queries
from factscope.facts import Case, Fact
from factscope.lm.generate import fitting_tokens, generate_greedy
from factscope.lm.tokens import encode
from factscope.progress import Progress, shown, split
from factscope.records import (
    ChangedWeight,
    EditRecord,
    EditTraces,
    Generation,
    Prediction,
    PromptChange,
)
from factscope.tracing.corruption import default_noise_scale
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import trace

if TYPE_CHECKING:
    from factscope.lm.model import LM

TOKENS = 40
"""Default length of continuations in tokens."""
ANSWER_TOKENS = 8
"""Enough tokens for the first word of an answer."""
FIRST_WORD = re.compile(r"\s*(\w[\w'’.-]*\w|\w)")


def before_after(
    lm: "LM", edit: Edit, case: Case, *, generation_tokens: int = TOKENS
) -> EditRecord:
    """How the edit changes the predictions after a case's prompts and its continuations."""
    return before_after_each(lm, edit, [case], generation_tokens=generation_tokens)[0]


def before_after_each(
    lm: "LM", edit: Edit, cases: Sequence[Case], *, generation_tokens: int = TOKENS
) -> list[EditRecord]:
    """The same for several cases of one edit, scored together."""
    first_words = _first_words(lm, cases)
    prompts = [_prompts(case, first_words) for case in cases]
    changes, taken = _score(lm, edit, list(chain(*prompts)))
    checks = describe_checks(_with_prompts(edit.checks, changes, taken))
    # A case without generation prompts continues its own prompt.
    texts = [tuple(dict.fromkeys(case.generations)) or (case.fact.text,) for case in cases]
    generations = iter(generate_before_after(lm, edit, list(chain(*texts)), generation_tokens))
    records, remaining = [], iter(changes)
    for case, case_prompts, case_texts in zip(cases, prompts, texts, strict=True):
        prompt_changes = tuple(islice(remaining, len(case_prompts)))
        records.append(
            EditRecord(
                fact=case.fact,
                true=prompt_changes[0].old,
                model=edit.model,
                method=edit.method,
                changed_weights=changed_weights(edit),
                prompts=prompt_changes,
                generations=tuple(islice(generations, len(case_texts))),
                checks=checks,
                settings=edit.settings,
            )
        )
    return records


def already_predicted(lm: "LM", facts: Sequence[Fact]) -> list[bool]:
    """For each fact, whether the unedited model already generates its new object (greedily)."""
    targets = [(fact.target or "").strip() for fact in facts]
    longest = max(len(encode(lm, target, special=False)) for target in targets)
    texts = [fact.text for fact in facts]
    answers = generate_greedy(lm, texts, fitting_tokens(lm, texts, longest + 2))
    return [
        answer.strip().startswith(target) and not answer.strip()[len(target) :][:1].isalnum()
        for answer, target in zip(answers, targets, strict=True)
    ]


def generate_before_after(
    lm: "LM", edit: Edit, texts: Sequence[str], tokens: int
) -> list[Generation]:
    """The greedy continuation of each text without and with the edit."""
    if not tokens or not texts:
        return []
    tokens = fitting_tokens(lm, texts, tokens)
    before = generate_greedy(lm, texts, tokens)
    with edited(lm, [edit]):
        after = generate_greedy(lm, texts, tokens)
    return [
        Generation(text=text, before=unedited, after=with_edit)
        for text, unedited, with_edit in zip(texts, before, after, strict=True)
    ]


def changed_weights(edit: Edit) -> tuple[ChangedWeight, ...]:
    """The weights that an edit changes, and by how much."""
    return tuple(
        ChangedWeight(name=name, shape=change.shape, rank=change.rank, norm=change.norm())
        for name, change in sorted(edit.changes.items())
    )


def describe_checks(checks: EditChecks | None) -> dict[str, Any]:
    """The edit checks as JSON values, with their limits, complaints and verdict."""
    if checks is None:
        return {}
    values = checks.to_dict() | {"perplexity_growth": checks.perplexity_growth}
    finite = {  # JSON has no infinity
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in values.items()
    }
    words = {"complaints": checks.complaints(), "verdict": checks.verdict}
    return finite | {"limits": asdict(CheckLimits())} | words


def _with_prompts(
    checks: EditChecks | None, changes: Sequence[PromptChange], taken: Sequence[bool]
) -> EditChecks | None:
    """The checks with the paraphrases and neighbours of the cases; if more of these neighbours
    changed than of the unrelated prompts, their fraction counts."""
    if checks is None:
        return None
    followed = [x for x, change in zip(taken, changes, strict=True) if change.kind == "paraphrase"]
    changed = [change.top_changed for change in changes if change.kind == "neighbour"]
    if followed:
        checks = replace(checks, paraphrases_taken=sum(followed) / len(followed))
    if changed:
        most = max(checks.neighbours_changed or 0.0, sum(changed) / len(changed))
        checks = replace(checks, neighbours_changed=most)
    return checks


# ---- the prompts of a case


class _Prompt(NamedTuple):
    kind: str
    text: str
    new: str
    old: str | None


def _prompts(case: Case, first_words: Mapping[str, str | None]) -> list[_Prompt]:
    """The case's own prompt first, then paraphrases, then neighbours.

    An unknown old object is the first word that the unedited model generates. A paraphrase takes
    its fact's old object. A neighbour is about another subject and gets its own.
    """
    own = case.fact.text
    rows = [("prompt", own, own)]
    rows += [("paraphrase", text, own) for text in case.paraphrases]
    rows += [("neighbour", text, text) for text in case.neighbours]
    new = (case.fact.target or "").strip()
    return [
        _Prompt(kind, text, new, first_words[source] if case.true is None else case.true)
        for kind, text, source in rows
    ]


def _first_words(lm: "LM", cases: Sequence[Case]) -> dict[str, str | None]:
    """The first word that the unedited model generates after each prompt without an old object."""
    unknown = [
        text for case in cases if case.true is None for text in (case.fact.text, *case.neighbours)
    ]
    answers = generate_greedy(lm, unknown, fitting_tokens(lm, unknown, ANSWER_TOKENS))
    return {
        text: match[1] if (match := FIRST_WORD.match(answer)) else None
        for text, answer in zip(unknown, answers, strict=True)
    }


def _score(
    lm: "LM", edit: Edit, prompts: Sequence[_Prompt]
) -> tuple[list[PromptChange], list[bool]]:
    """The new and the old object after each prompt, without and with the edit; and whether the new
    object is then the most likely one, token by token."""
    queries = [
        Query(prompt.text, target, which)
        for prompt in prompts
        for which in (None, 0)
        for target in (prompt.new, prompt.new if prompt.old is None else prompt.old)
    ]
    found = list(score_queries(lm, queries, [edit]))
    scores, taken = iter(found), [all(score.correct) for score in found[2::4]]

    def predicted(old_known: bool, new: QueryScore, old: QueryScore) -> Prediction:
        return Prediction(
            new=math.exp(-new.nll),
            old=math.exp(-old.nll) if old_known else None,
            top=new.top,
            top_probability=new.top_probability,
        )

    changes = [
        PromptChange(
            **prompt._asdict(),
            before=predicted(prompt.old is not None, next(scores), next(scores)),
            after=predicted(prompt.old is not None, next(scores), next(scores)),
        )
        for prompt in prompts
    ]
    return changes, taken


# ---- traces


def trace_edit(
    lm: "LM",
    edit: Edit,
    fact: Fact,
    settings: Tracing | None = None,
    *,
    name: str | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
) -> EditTraces:
    """Trace the fact in the unedited model, and both answers in the edited one, with one noise.

    The old answer is what the unedited model predicts, the new one the target of the edited fact
    with the same subject, or what the edited model predicts. With the metric logit-difference they
    are compared with each other. `name` is that of the edited model in the records. The checks of
    the edit are not repeated: a broken model can be traced too.
    """
    settings = settings or Tracing()
    scale = default_noise_scale(lm, settings.corruption, [fact])
    new = next((own.target for own in edit.facts if own.subject == fact.subject), None)
    run = partial(trace, fact=fact, settings=settings, scale=scale, memory=memory)
    edited_lm = replace(lm, name=name or f"{lm.name} + edit")
    with shown(progress) as report:
        first, second, third = split(report, [1, 1, 1])
        before = run(lm, foil=new, progress=first)
        with edit.applied(edited_lm, force=True):
            after = run(edited_lm, answer=new, foil=before.answer, progress=second)
            # The token itself: its text may be tokenized differently.
            old_after = run(edited_lm, answer=[before.answer_id], foil=new, progress=third)
    return EditTraces(before=before, after=after, old_after=old_after)
