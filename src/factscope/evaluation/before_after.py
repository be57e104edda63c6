"""A fact before and after an edit: what the model thinks of its prompts, and how it goes on.

No weight is written: the edited model is the same model with the edit in some rows of the batch.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from factscope.editing.edit import CheckLimits, Edit, EditChecks
from factscope.editing.per_row import edited
from factscope.evaluation.score import Query, QueryScore, score_queries
from factscope.facts import Case, Fact
from factscope.lm.generate import generate_greedy
from factscope.lm.tokens import encode
from factscope.records import ChangedWeight, EditRecord, Generation, PromptScores, TargetScores

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "already_predicted",
    "before_after",
    "before_after_each",
    "changed_weights",
    "checks_of",
    "continued",
    "room",
]

TOKENS = 40
"""How far generations go, where nothing else was said."""
ANSWER_TOKENS = 8
"""Enough to hear the first word of an answer."""
FIRST_WORD = re.compile(r"\s*(\w[\w'’.-]*\w|\w)")


def before_after(
    lm: "LM", edit: Edit, case: Case, *, generation_tokens: int = TOKENS
) -> EditRecord:
    """What the edit changes in the prompts of a case, and in how its texts go on."""
    return before_after_each(lm, edit, [case], generation_tokens=generation_tokens)[0]


def before_after_each(
    lm: "LM", edit: Edit, cases: Sequence[Case], *, generation_tokens: int = TOKENS
) -> list[EditRecord]:
    """The same for several cases that one edit writes, scored together."""
    asked = _with_old_objects(lm, [question for case in cases for question in _questions(case)])
    scores = iter(_scores(lm, edit, asked))
    texts = [text for case in cases for text in _openings(case)]
    said = iter(continued(lm, edit, texts, generation_tokens))
    return [
        _record(
            edit,
            case,
            tuple(next(scores) for _ in _questions(case)),
            tuple(next(said) for _ in _openings(case)) if generation_tokens else (),
        )
        for case in cases
    ]


def already_predicted(lm: "LM", facts: Sequence[Fact]) -> list[bool]:
    """Of each fact, whether the model gives its new object as it is, by greedy text."""
    wanted = [(fact.target or "").strip() for fact in facts]
    longest = max(len(encode(lm, target, special=False)) for target in wanted)
    texts = [fact.text for fact in facts]
    said = generate_greedy(lm, texts, room(lm, texts, longest + 2))
    return [_begins(words.strip(), target) for words, target in zip(said, wanted, strict=True)]


def continued(lm: "LM", edit: Edit, texts: Sequence[str], tokens: int) -> list[Generation]:
    """Each text's greedy continuation, as the model is and with the edit."""
    if not tokens or not texts:
        return []
    tokens = room(lm, texts, tokens)
    before = generate_greedy(lm, texts, tokens)
    with edited(lm, [edit]):
        after = generate_greedy(lm, texts, tokens)
    return [
        Generation(text=text, before=first, after=second)
        for text, first, second in zip(texts, before, after, strict=True)
    ]


def room(lm: "LM", texts: Sequence[str], tokens: int) -> int:
    """So many tokens, or as many as the model can still read after the longest of the texts."""
    if lm.context is None or not texts:
        return tokens
    return max(0, min(tokens, lm.context - max(len(encode(lm, text)) for text in texts)))


def changed_weights(edit: Edit) -> tuple[ChangedWeight, ...]:
    """The weights that an edit changes, and by how much."""
    return tuple(
        ChangedWeight(name=name, shape=change.shape, rank=change.rank, norm=change.norm())
        for name, change in ((name, edit.changes[name]) for name in edit.changed_weights)
    )


def checks_of(checks: EditChecks | None) -> dict[str, Any]:
    """What the guard rails saw, with their limits and complaints, as plain values."""
    if checks is None:
        return {}
    figures = checks.to_dict() | {"perplexity_growth": checks.perplexity_growth}
    return _finite(figures) | {"limits": asdict(CheckLimits()), "complaints": checks.complaints()}


# ---- the prompts of a case


Question = tuple[str, str, str, str | None]
"""Kind, text, new object, old object."""


def _questions(case: Case) -> list[Question]:
    new = (case.fact.target or "").strip()
    kinds = {
        "prompt": (case.fact.text,),
        "paraphrase": case.paraphrases,
        "neighbour": case.neighbours,
    }
    return [(kind, text, new, case.true) for kind, texts in kinds.items() for text in texts]


def _openings(case: Case) -> tuple[str, ...]:
    """What is continued at length: the case's own openings, else its prompt."""
    return tuple(dict.fromkeys(case.generations)) or (case.fact.text,)


def _with_old_objects(lm: "LM", questions: Sequence[Question]) -> list[Question]:
    """Where no old object was given, the first word that the model says as it is.

    A paraphrase has its fact's; a neighbour, which is about another subject, its own.
    """
    unknown = [text for kind, text, _, old in questions if old is None and kind != "paraphrase"]
    said = dict(
        zip(unknown, generate_greedy(lm, unknown, room(lm, unknown, ANSWER_TOKENS)), strict=True)
    )
    full: list[Question] = []
    old_of_fact: str | None = None
    for kind, text, new, given in questions:
        old = given
        if given is None:
            old = old_of_fact if kind == "paraphrase" else _first_word(said[text])
        if kind == "prompt":
            old_of_fact = old
        full.append((kind, text, new, old))
    return full


def _first_word(text: str) -> str | None:
    found = FIRST_WORD.match(text)
    return found[1] if found else None


def _begins(text: str, words: str) -> bool:
    """Whether a text begins with the words, and they end there."""
    return text.startswith(words) and not text[len(words) :][:1].isalnum()


# ---- what the model makes of them


def _scores(lm: "LM", edit: Edit, questions: Sequence[Question]) -> list[PromptScores]:
    """Each prompt with its new and its old object, as the model is and with the edit."""
    asks = [
        Query(text, target, which)
        for _, text, new, old in questions
        for which in (None, 0)
        for target in (new, new if old is None else old)
    ]
    found = iter(score_queries(lm, asks, [edit]))
    return [
        PromptScores(
            kind=kind,
            text=text,
            new=new,
            old=old,
            before=_both(next(found), next(found), old),
            after=_both(next(found), next(found), old),
        )
        for kind, text, new, old in questions
    ]


def _both(new: QueryScore, old: QueryScore, old_object: str | None) -> TargetScores:
    return TargetScores(
        new=math.exp(-new.nll),
        old=None if old_object is None else math.exp(-old.nll),
        top=new.top,
        top_probability=new.top_probability,
    )


def _record(
    edit: Edit, case: Case, prompts: tuple[PromptScores, ...], generations: tuple[Generation, ...]
) -> EditRecord:
    return EditRecord(
        fact=case.fact,
        true=prompts[0].old,
        model=edit.model,
        method=edit.method,
        changed_weights=changed_weights(edit),
        prompts=prompts,
        generations=generations,
        checks=checks_of(edit.checks),
        settings=edit.settings,
    )


def _finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: such a figure becomes None."""
    return {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in figures.items()
    }
