"""What a learned editor is trained on: edits to make, and what must stay as it is.

From cases, an edit is a fact with its new object, asked again in other words; what must stay is the
answer to the case's own unrelated question (zsRE), to its neighbours, or to another case. From
text, an edit is a stretch of it continued by words that the model drew, and another stretch stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from factscope.editing.learned.lines import Line, line_of
from factscope.editing.requests import request
from factscope.errors import BadFact, BadSetting
from factscope.facts import Case
from factscope.lm.predict import continue_ids, top_k
from factscope.lm.tokens import continuation, encode
from factscope.stats.text import Window, WrittenText

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["CaseLessons", "Example", "Lessons", "Locality", "TextLessons", "without"]

Locality = Literal["unrelated", "neighbours"]
"""What must stay as it is: answers about other cases, or about neighbours of the same one."""


@dataclass(frozen=True)
class Example:
    """One edit to make."""

    edit: Line
    rephrased: Line
    """Where the edit must show, too; the edit's own line where there are no other words for it."""
    local: Line | None
    """What must stay; None for another example's line."""


@runtime_checkable
class Lessons(Protocol):
    """Examples by number, made when they are needed."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def order(self, numbers: range) -> list[int]:
        """Some of the numbers, those of like length next to each other."""
        ...

    def made(self, lm: "LM", numbers: Sequence[int]) -> list[Example]:
        """Some examples; one that the model cannot read is left out."""
        ...


# ---- from cases


@dataclass(frozen=True)
class CaseLessons:
    """Examples from cases."""

    cases: tuple[Case, ...]
    locality: Locality = "unrelated"

    def __len__(self) -> int:
        return len(self.cases)

    def order(self, numbers: range) -> list[int]:
        """By length of the text."""
        return sorted(numbers, key=lambda i: len(self.cases[i].fact.text))

    def made(self, lm: "LM", numbers: Sequence[int]) -> list[Example]:
        """Those cases as examples."""
        found = []
        for number in numbers:
            try:
                found.append(self._example(lm, self.cases[number]))
            except BadFact:
                continue
        return found

    def _example(self, lm: "LM", case: Case) -> Example:
        edit = line_of(request(lm, case.fact))
        new = (case.fact.target or "").strip()
        rephrased = _line(lm, case.paraphrases[0], new) if case.paraphrases else edit
        own = self.locality == "neighbours" or case.true is None  # zsRE's question is unrelated
        if not own or not case.neighbours:
            return Example(edit, rephrased, None)
        answer = case.neighbour_answers[0] if case.neighbour_answers else case.true
        return Example(edit, rephrased, _line(lm, case.neighbours[0], answer or new))


def _line(lm: "LM", text: str, target: str) -> Line:
    """A prompt and what follows it."""
    prompt = encode(lm, text)
    labels = continuation(lm, prompt, text, target.strip())
    end = len(prompt) - 1
    reads = tuple(range(end, end + len(labels)))
    return Line(ids=(*prompt.ids, *labels[:-1]), reads=reads, labels=labels)


def without(cases: Iterable[Case], others: Iterable[Case]) -> tuple[Case, ...]:
    """The cases whose subject is in none of the others."""
    taken = {_subject(case) for case in others}
    return tuple(case for case in cases if _subject(case) not in taken)


def _subject(case: Case) -> str:
    return " ".join(case.fact.subject.casefold().split())


# ---- from text


@dataclass(frozen=True, kw_only=True)
class TextLessons:
    """Examples from stretches of text, each continued by words that the model drew."""

    source: Sequence[Window] | WrittenText
    """Stretches of one length; or the model's own, of which there is no end."""
    count: int
    tokens: int = 10
    """How many tokens are drawn: an edit teaches these."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise BadSetting(f"tokens is {self.tokens}; an edit must teach at least one")

    def __len__(self) -> int:
        return self.count

    def order(self, numbers: range) -> list[int]:
        """As they are: all have one length."""
        return list(numbers)

    def made(self, lm: "LM", numbers: Sequence[int]) -> list[Example]:
        """Those stretches, continued."""
        rows = [list(row) for row in self._stretches(numbers)]
        draws = [top_k(50, self.seed * 1_000_003 + number) for number in numbers]

        def choose(logits: Tensor) -> Tensor:
            return torch.cat([draw(row[None]) for draw, row in zip(draws, logits, strict=True)])

        drawn = continue_ids(lm, rows, self.tokens, choose, stop=False)
        lines = [self._line(row, new) for row, new in zip(rows, drawn, strict=True)]
        return [Example(line, line, None) for line in lines]

    def _stretches(self, numbers: Sequence[int]) -> Iterable[Window]:
        if not isinstance(self.source, WrittenText):
            return [self.source[number] for number in numbers]
        # Together, as ever: what is written depends a little on the company.
        together = replace(self.source, rows=len(numbers))
        return together.pick(range(numbers[0], numbers[0] + len(numbers)))

    @staticmethod
    def _line(row: Sequence[int], new: Sequence[int]) -> Line:
        end = len(row) - 1
        reads = tuple(range(end, end + len(new)))
        return Line(ids=(*row, *new[:-1]), reads=reads, labels=tuple(new))
