"""Facts, and cases in which a fact is edited.

A fact is a tuple (subject, relation, object), with the relation as a prompt that the object
continues. A case is a fact with the new object o* and the prompts that test the edit.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from factscope.errors import BadFact, SubjectNotFound

SUBJECT_SLOT = "{}"
"""Stands for the subject in a prompt template."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A knowledge tuple (s, r, o), with the relation as a prompt."""

    subject: str
    prompt: str
    """Prompt template, with "{}" for the subject; the object follows it."""
    target: str | None = None
    """The object o, where it is known in advance."""
    old: str | None = None
    """For a fact to edit, the object that the target replaces, where it is known."""
    id: str | None = None
    """The fact's id in its data set."""
    relation: str | None = None
    """The relation's name, for instance a Wikidata property."""
    replacement: str | None = None
    """Another subject with as many tokens, for traces with token replacement."""
    context_start: int = 0
    """Character of the prompt template before which an editor puts its prefixes; in a chat, the
    beginning of the user's message."""

    def __post_init__(self) -> None:
        if not self.subject.strip():
            raise BadFact("the subject is empty; give the words of the prompt that name it")
        for text in (self.subject, self.prompt, self.target, self.old, self.replacement):
            check_unicode(text or "")
        if self.replacement is not None and not self.replacement.strip():
            raise BadFact(f"the replacement of {self.subject!r} is empty; give another subject")
        # Frozen; stripped here, so that every source of facts gives the same prompt.
        object.__setattr__(self, "prompt", strip_end(self.prompt))
        if self.prompt.endswith(SUBJECT_SLOT):
            object.__setattr__(self, "subject", strip_end(self.subject))
        if self.prompt.count(SUBJECT_SLOT) != 1:
            raise BadFact(
                f"the prompt {self.prompt!r} must have one {SUBJECT_SLOT!r}, where the subject goes"
            )

    @property
    def text(self) -> str:
        """The prompt with the subject filled in."""
        return self.prompt.replace(SUBJECT_SLOT, self.subject)

    @property
    def subject_span(self) -> tuple[int, int]:
        """The subject's characters in `text`, as [start, stop)."""
        start = self.prompt.index(SUBJECT_SLOT)
        return start, start + len(self.subject)

    @classmethod
    def from_text(
        cls, text: str, subject: str, occurrence: int | None = None, **fields: Any
    ) -> "Fact":
        """The fact of a prompt that contains its subject.

        If the subject occurs more than once, `occurrence` selects one, counted from 1; the
        default is the last.
        """
        if not text.strip():
            raise BadFact("the prompt is empty; give a text that leads up to the object")
        check_unicode(text)
        text, subject = strip_end(text), subject.strip()
        starts = occurrences(text, subject)
        if not starts:
            raise SubjectNotFound(
                f"the subject {subject!r} is not in the prompt {text!r}; "
                f"did you mean {_most_similar_words(text, subject)!r}?"
            )
        chosen = len(starts) if occurrence is None else occurrence
        if not 1 <= chosen <= len(starts):
            raise BadFact(
                f"occurrence is {occurrence}, but the subject {subject!r} occurs {len(starts)} "
                "times in the prompt; count from 1"
            )
        start = starts[chosen - 1]
        prompt = text[:start] + SUBJECT_SLOT + text[start + len(subject) :]
        return cls(subject=subject, prompt=prompt, **fields)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fact to edit, and the prompts that test the edit."""

    fact: Fact
    """The fact after the edit: its target is the new object o*."""
    true: str | None = None
    """The true object o, where it is known."""
    paraphrases: tuple[str, ...] = ()
    """Prompts with the same meaning, which the new object should follow too."""
    neighbours: tuple[str, ...] = ()
    """The same prompt for other subjects with the true object, which should not change."""
    neighbour_answers: tuple[str, ...] = ()
    """The object of each neighbour, where it is not the true object."""
    attributes: tuple[str, ...] = ()
    """The same prompt for subjects that have the new object already."""
    generations: tuple[str, ...] = ()
    """Generation prompts: beginnings of a text about the subject, for the model to continue."""
    target_id: str | None = None
    """The Wikidata id of the new object, where it is known."""

    def __post_init__(self) -> None:
        for name in ("paraphrases", "neighbours", "attributes", "generations"):
            check_list(name, getattr(self, name))
            object.__setattr__(self, name, tuple(map(strip_end, getattr(self, name))))
        if self.neighbour_answers and len(self.neighbour_answers) != len(self.neighbours):
            raise BadFact(
                f"{len(self.neighbour_answers)} answers for {len(self.neighbours)} neighbours; "
                "give one for each, or none"
            )

    @property
    def request(self) -> Fact:
        """The edit request: the fact, with the true object as the one to replace."""
        return replace(self.fact, old=self.true)


def strip_end(prompt: str) -> str:
    """The prompt without spaces at its end.

    In every tokenizer the space belongs to the next word, so that after a space the model predicts
    something else than the object. A line break at the end stays: chat templates end in one.
    """
    return prompt.rstrip(" \t\u00a0")


def check_list(name: str, texts: object) -> None:
    """Raise BadFact for a string in place of a list of texts: it would be read letter by letter."""
    if isinstance(texts, str):
        raise BadFact(f"{name} is the string {texts!r}; give a list of strings: [{texts!r}]")


def check_facts(facts: object) -> None:
    """Raise BadFact for a single fact or text in place of a list of facts."""
    if isinstance(facts, Fact):
        raise BadFact(f"facts is one fact, {facts.text!r}; give a list: [fact]")
    for fact in facts if isinstance(facts, Sequence) else [facts]:
        if not isinstance(fact, Fact):
            raise BadFact(f"{fact!r} is not a Fact; give a list of facts, as in [Fact(…)]")


def check_unicode(text: str) -> None:
    """Raise BadFact for lone surrogates, which no tokenizer encodes (e.g. from invalid UTF-8)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadFact(
            f"{text!r} is not valid Unicode at character {error.start}; give the text as UTF-8"
        ) from error


def occurrences(text: str, subject: str) -> list[int]:
    """Every index at which the subject starts in the text."""
    if not subject:
        return []
    return [i for i in range(len(text)) if text.startswith(subject, i)]


def _most_similar_words(text: str, subject: str) -> str:
    """The consecutive words of the text that are most similar to the subject."""
    words = text.split()
    spans = [
        " ".join(words[i:j])
        for i in range(len(words))
        for j in range(i + 1, min(len(words), i + len(subject.split()) + 2) + 1)
    ]

    def similarity(span: str) -> float:
        return difflib.SequenceMatcher(None, span.casefold(), subject.casefold()).ratio()

    return max(spans, key=similarity)
