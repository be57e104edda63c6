"""The paper's nouns: facts, and cases in which a fact is rewritten.

A fact is a subject, a prompt that asks for its object, and the object. A case is a fact with the
object that it shall have from now on, and the prompts that tell whether that worked.
"""

import difflib
from dataclasses import dataclass, replace
from typing import Any

from factscope.errors import BadFact, SubjectNotFound

__all__ = ["Case", "Fact"]

PLACE = "{}"


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A knowledge tuple (s, r, o), with the relation put into words as a prompt."""

    subject: str
    prompt: str
    """The words of the relation, with "{}" where the subject goes."""
    target: str | None = None
    """The object that the model should name, where it is known beforehand."""
    old: str | None = None
    """For a fact to rewrite, the object that it has so far, where that is known."""
    id: str | None = None
    """The fact's name in the file that it came from."""
    relation: str | None = None
    """The relation's name, for instance a Wikidata property."""

    def __post_init__(self) -> None:
        if not self.subject.strip():
            raise BadFact("the subject is empty; give the words of the prompt that name it")
        if self.prompt.count(PLACE) != 1:
            raise BadFact(
                f"the prompt {self.prompt!r} must have one {PLACE!r}, where the subject goes"
            )

    @property
    def text(self) -> str:
        """The prompt as the model reads it."""
        return self.prompt.replace(PLACE, self.subject)

    @property
    def subject_span(self) -> tuple[int, int]:
        """The subject's characters in `text`, as [start, stop)."""
        start = self.prompt.index(PLACE)
        return start, start + len(self.subject)

    @classmethod
    def from_text(
        cls, text: str, subject: str, occurrence: int | None = None, **fields: Any
    ) -> "Fact":
        """The fact of a prompt that already names its subject.

        Where the subject occurs more than once the last occurrence is taken, or the one given
        (counted from 1): see `occurrences`.
        """
        if not text.strip():
            raise BadFact("the prompt is empty; give a text that leads up to the object")
        starts = occurrences(text, subject)
        if not starts:
            raise SubjectNotFound(
                f"the subject {subject!r} is not in the prompt {text!r}; "
                f"did you mean {nearest_span(text, subject)!r}?"
            )
        chosen = len(starts) if occurrence is None else occurrence
        if not 1 <= chosen <= len(starts):
            raise BadFact(
                f"the subject {subject!r} occurs {len(starts)} times in the prompt; "
                f"occurrence {occurrence} does not exist"
            )
        start = starts[chosen - 1]
        prompt = text[:start] + PLACE + text[start + len(subject) :]
        return cls(subject=subject, prompt=prompt, **fields)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fact to rewrite, and how to see whether the rewriting worked."""

    fact: Fact
    """The fact as it shall be: its target is the new object o*."""
    true: str | None = None
    """The object o that the world gives it, where it is known."""
    paraphrases: tuple[str, ...] = ()
    """Other ways to ask the same: the new object should follow."""
    neighbours: tuple[str, ...] = ()
    """The same question of other subjects with the true object: it should stay."""
    neighbour_answers: tuple[str, ...] = ()
    """What the neighbours are answered with, where it is not the true object; one for each."""
    attributes: tuple[str, ...] = ()
    """The same question of subjects that have the new object already."""
    generations: tuple[str, ...] = ()
    """Openings about the subject, to be continued at length."""
    target_id: str | None = None
    """The Wikidata id of the new object, where it is known."""

    def __post_init__(self) -> None:
        if self.neighbour_answers and len(self.neighbour_answers) != len(self.neighbours):
            raise BadFact(
                f"{len(self.neighbour_answers)} answers for {len(self.neighbours)} neighbours; "
                "give one for each, or none"
            )

    @property
    def request(self) -> Fact:
        """The fact as an editor is asked to write it: it may know what it replaces."""
        return replace(self.fact, old=self.true)


def occurrences(text: str, subject: str) -> list[int]:
    """Where the subject starts in the text: each place, first to last."""
    if not subject:
        return []
    return [i for i in range(len(text)) if text.startswith(subject, i)]


def nearest_span(text: str, subject: str) -> str:
    """The run of words in the text that looks most like the subject."""
    words = text.split()
    spans = [
        " ".join(words[i:j])
        for i in range(len(words))
        for j in range(i + 1, min(len(words), i + len(subject.split()) + 2) + 1)
    ]

    def likeness(span: str) -> float:
        return difflib.SequenceMatcher(None, span.casefold(), subject.casefold()).ratio()

    return max(spans, key=likeness)
