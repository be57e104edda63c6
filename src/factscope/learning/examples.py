"""What a learned editor is trained on: edits to make, and what must stay as it is.

From cases, an edit is a fact with its new object, asked again in other words; what must stay is the
answer to the case's own unrelated question (zsRE), to its neighbours, or to another case. From
text, an edit is a stretch of it continued by words that the model drew, and another stretch stays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from factscope.editing.learned.lines import Line, line_of
from factscope.editing.requests import request
from factscope.errors import BadFact, BadSetting
from factscope.facts import Case
from factscope.lm.tokens import continuation, encode
from factscope.lm.writing import draws_of, write_on
from factscope.stats.text import Window, WrittenText

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["CaseLessons", "Example", "Lessons", "Locality", "TextLessons", "without"]

AT_ONCE = {"cpu": 64, "cuda": 256}
"""How many texts are written together."""
AMONG = 50
"""Tokens among which each of a continuation is drawn."""

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
    written: dict[int, list[Example]] = field(default_factory=dict, compare=False, repr=False)
    """What was written so far: `AT_ONCE` examples together, by the number of the first."""

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
        size = AT_ONCE.get(lm.device.type, AT_ONCE["cpu"])
        found = []
        for number in numbers:
            first = number // size * size
            if first not in self.written:
                # Always together: what is written depends a little on the company.
                some = range(first, min(first + size, self.count))
                self.written[first] = self._write(lm, some)
            found.append(self.written[first][number - first])
        return found

    def _write(self, lm: "LM", numbers: range) -> list[Example]:
        source = self.source
        if isinstance(source, WrittenText):
            length = source.window
            longer = replace(source, window=length + self.tokens, rows=len(numbers))
            rows = list(longer.pick(numbers))
        else:
            stretches = [source[number] for number in numbers]
            length = len(stretches[0])
            draws = draws_of([str(n) for n in numbers], length + self.tokens, self.seed)
            rows = write_on(lm, stretches, draws, k=AMONG)
        lines = [self._line(row[:length], row[length:]) for row in rows]
        return [Example(line, line, None) for line in lines]

    @staticmethod
    def _line(row: Sequence[int], new: Sequence[int]) -> Line:
        end = len(row) - 1
        reads = tuple(range(end, end + len(new)))
        return Line(ids=(*row, *new[:-1]), reads=reads, labels=tuple(new))
