"""Examples for the page: facts that the model knows, a finished trace, prompts to test an edit."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from typing import Any

from factscope.analysis.effects import WEAK_ANSWER
from factscope.data.readers import everyday_cases, everyday_facts, generation_templates
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.lm.model import LM
from factscope.records import TraceRecord
from factscope.report.labels import display_token
from factscope.tracing.corruption import choose_replacement
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import clean_answers

MAX_EXAMPLES = 8
MAX_SUGGESTED = 6
"""Suggested prompts of one kind."""
TRACE_FILE = "first_trace.json"
"""The trace that the page shows first, of one model; docs/tools/first_trace.py writes it."""
FINGERPRINT = "model_fingerprint"
"""Setting of that record: the fingerprint of its model."""


def find_examples(lm: LM) -> list[dict[str, Any]]:
    """Facts that the model knows, one of each relation first; any facts if it knows none."""
    facts = everyday_facts()
    found = [
        {
            "prompt": answer.fact.text,
            "subject": answer.fact.subject,
            "answer": display_token(lm.tokenizer.decode(answer.answer_ids)),
            "p": answer.probability,
            "known": answer.known and answer.probability >= WEAK_ANSWER,
        }
        for answer in clean_answers(lm, facts, Tracing())
    ]
    relations = [fact.relation for fact in facts]
    known = [i for i, example in enumerate(found) if example["known"]] or range(len(found))
    firsts = {relations[i]: i for i in reversed(known)}  # the first one of each relation
    chosen = [*sorted(firsts.values()), *(i for i in known if i not in firsts.values())]
    return [found[i] for i in sorted(chosen[:MAX_EXAMPLES])]


def first_trace(lm: LM, settings: Tracing) -> TraceRecord | None:
    """The finished trace in the package, if it is of this model and has these settings."""
    text = resources.files("factscope.serve").joinpath(TRACE_FILE).read_text("utf-8")
    record = TraceRecord.from_json(text)
    stored = {name: x for name, x in record.settings.items() if name != FINGERPRINT}
    # Settings that are newer than the file have defaults that do not change it.
    if record.settings[FINGERPRINT] != lm.fingerprint or not _agree(stored, settings.to_dict()):
        return None
    return replace(record, settings=settings.to_dict())


def _agree(stored: Any, current: Any) -> bool:
    """Whether all stored settings have their current values; lists and tuples are the same."""
    if isinstance(stored, dict):
        return all(name in current and _agree(x, current[name]) for name, x in stored.items())
    return stored == (list(current) if isinstance(current, tuple) else current)


# ---- prompts that test an edit


def suggest_neighbours(fact: Fact) -> tuple[str, ...]:
    """The fact's prompt with other subjects of the same relation, those with the same object first.

    If the relation is unknown, facts of several relations.
    """
    relations = _relations(fact)
    known = [f for f in _built_in() if f.subject not in fact.text and fact.subject not in f.subject]
    objects = {f.target for f in _built_in() if _same_subject(f, fact) and f.relation in relations}
    same = sorted(
        (f for f in known if f.relation in relations), key=lambda f: f.target not in objects
    )
    prompts = [fact.prompt.replace(SUBJECT_SLOT, f.subject) for f in same]
    others = {f.relation: f.text for f in reversed(known)}.values()
    return _first(prompts or others)


def suggest_replacement(lm: LM, fact: Fact) -> str | None:
    """Another subject of the fact's relation with another object and as many tokens, if any."""
    built_in, relations = _built_in(), _relations(fact)
    same = [f for f in built_in if _same_subject(f, fact) and f.relation in relations]
    fact = replace(fact, target=same[0].target if same else None)
    chosen = (
        choose_replacement(lm, replace(fact, relation=relation), built_in)
        for relation in sorted(relations) or [None]
    )
    return next((subject for subject in chosen if subject is not None), None)


def suggest_paraphrases(fact: Fact) -> tuple[str, ...]:
    """Other prompts of the same relation about the fact's subject."""
    relations = _relations(fact)
    prompts = [f.prompt for f in _built_in() if f.relation in relations and f.prompt != fact.prompt]
    return _first(prompt.replace(SUBJECT_SLOT, fact.subject) for prompt in prompts)


def suggest_generations(fact: Fact) -> tuple[str, ...]:
    """Prompts about the subject that do not ask for the object: it shows in the generated text."""
    relation = next((name for name in sorted(_relations(fact)) if name[:1] == "P"), "")
    templates = generation_templates(relation)[: MAX_SUGGESTED // 2]
    return tuple(template.replace(SUBJECT_SLOT, fact.subject) for template in templates)


def _built_in() -> list[Fact]:
    """The facts and the cases of the package; targets are the true objects."""
    cases = [replace(case.fact, target=case.true) for case in everyday_cases()]
    return [*everyday_facts(), *cases]


def _relations(fact: Fact) -> set[str]:
    """The relations that use the fact's prompt, or else those that have a fact of its subject."""
    built_in = [(f, f.relation) for f in _built_in() if f.relation is not None]
    by_prompt = {relation for f, relation in built_in if f.prompt == fact.prompt}
    return by_prompt or {relation for f, relation in built_in if _same_subject(f, fact)}


def _same_subject(a: Fact, b: Fact) -> bool:
    def bare(fact: Fact) -> str:
        return fact.subject.casefold().removeprefix("the ")

    return bare(a) == bare(b)


def _first(prompts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(prompts))[:MAX_SUGGESTED]
