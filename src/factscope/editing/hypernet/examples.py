"""What a learned editor is trained on: edits to make, and what must stay as it is.

From cases, an edit is a fact with its new object, asked again in other words; what must stay is the
answer to the case's own unrelated question (zsRE), to its neighbours, or to another case. From
text, an edit is a stretch of it continued by words that the model drew, and another stretch stays.

Groups: examples that always go together, with what the lower half of the model makes of them.

No edit changes the layers below the first edited one. So each group's lines go through them once,
and the states are kept for as long as there is room: a step of training then runs the last few
layers only. A group has the same examples whenever it comes, so that its states are the same bit by
bit, kept or computed again, in a run that was killed or not.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.contexts import TokenRow, edit_request
from factscope.editing.hypernet.gradients import SplitModel, TokenBatch
from factscope.errors import BadFact, BadSetting
from factscope.facts import Case
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.tokens import continuation_ids, encode
from factscope.stats.text import GeneratedText, TokenSequence

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "BatchCache",
    "CaseExamples",
    "Example",
    "ExampleBatch",
    "ExampleSource",
    "Locality",
    "TextExamples",
    "split_examples",
    "without_overlap",
]

AT_ONCE = {"cpu": 64, "cuda": 256}
"""How many texts are written together."""
AMONG = 50
"""Tokens among which each of a continuation is drawn."""

Locality = Literal["unrelated", "neighbours"]
"""What must stay as it is: answers about other cases, or about neighbours of the same one."""


@dataclass(frozen=True)
class Example:
    """One edit to make."""

    edit: TokenRow
    rephrased: TokenRow
    """Where the edit must show, too; the edit's own line where there are no other words for it."""
    local: TokenRow | None
    """What must stay; None for another example's line."""


@runtime_checkable
class ExampleSource(Protocol):
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
class CaseExamples:
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
        edit = edit_request(lm, case.fact).rows[0]
        new = (case.fact.target or "").strip()
        rephrased = _line(lm, case.paraphrases[0], new) if case.paraphrases else edit
        own = self.locality == "neighbours" or case.true is None  # zsRE's question is unrelated
        if not own or not case.neighbours:
            return Example(edit, rephrased, None)
        answer = case.neighbour_answers[0] if case.neighbour_answers else case.true
        return Example(edit, rephrased, _line(lm, case.neighbours[0], answer or new))


def _line(lm: "LM", text: str, target: str) -> TokenRow:
    """A prompt and what follows it."""
    prompt = encode(lm, text)
    labels = continuation_ids(lm, prompt, text, target.strip())
    end = len(prompt) - 1
    reads = tuple(range(end, end + len(labels)))
    return TokenRow(ids=(*prompt.ids, *labels[:-1]), positions=reads, labels=labels)


def without_overlap(cases: Iterable[Case], others: Iterable[Case]) -> tuple[Case, ...]:
    """The cases whose subject is in none of the others."""
    taken = {_subject(case) for case in others}
    return tuple(case for case in cases if _subject(case) not in taken)


def _subject(case: Case) -> str:
    return " ".join(case.fact.subject.casefold().split())


# ---- from text


@dataclass(frozen=True, kw_only=True)
class TextExamples:
    """Examples from stretches of text, each continued by words that the model drew."""

    source: Sequence[TokenSequence] | GeneratedText
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
        if isinstance(source, GeneratedText):
            length = source.length
            longer = replace(source, length=length + self.tokens, batch_size=len(numbers))
            rows = list(longer.sequences(numbers))
        else:
            stretches = [source[number] for number in numbers]
            length = len(stretches[0])
            draws = uniform_draws([str(n) for n in numbers], length + self.tokens, self.seed)
            rows = sample_texts(lm, stretches, draws, k=AMONG)
        lines = [self._line(row[:length], row[length:]) for row in rows]
        return [Example(line, line, None) for line in lines]

    @staticmethod
    def _line(row: Sequence[int], new: Sequence[int]) -> TokenRow:
        end = len(row) - 1
        reads = tuple(range(end, end + len(new)))
        return TokenRow(ids=(*row, *new[:-1]), positions=reads, labels=tuple(new))


ROOM = 4 << 30
"""Bytes of states that are kept in main memory at most."""
FACTS_PER_PASS = {"cpu": 1024, "cuda": 16384}
"""About how many tokens go through the lower half at once."""


@dataclass(frozen=True, eq=False)
class ExampleBatch:
    """Examples side by side, all lines of one length."""

    edit: TokenBatch
    rephrased: TokenBatch | None
    """None where all examples have one wording only."""
    own: TokenBatch | None
    """What must stay, where each example brings its own."""
    entering: Float[Tensor, "kind fact token width"]
    """What enters the first edited layer, for the lines of each kind."""
    last: Float[Tensor, "kind fact token width"]
    """The unedited model's last states of the same."""

    def __len__(self) -> int:
        return len(self.edit.ids)

    def local(self, turn: int) -> tuple[TokenBatch, Tensor, Tensor]:
        """What must stay, its entering and its last states; in every turn another's line."""
        if self.own is not None:
            return self.own, self.entering[-1], self.last[-1]
        shift = 1 + turn % (len(self) - 1)
        return (
            _rolled(self.edit, shift),
            self.entering[0].roll(shift, 0),
            self.last[0].roll(shift, 0),
        )

    @property
    def bytes(self) -> int:
        """How much room the states take."""
        return 2 * self.entering.numel() * self.entering.itemsize


def _rolled(lines: TokenBatch, shift: int) -> TokenBatch:
    return TokenBatch(**{name: x.roll(shift, 0) for name, x in vars(lines).items()})


def split_examples(count: int, held_out: int) -> tuple[range, range]:
    """The numbers to train on, and those that are held out: the last, a fifth at most."""
    held = min(held_out, count // 5)
    if held < 2:
        raise BadSetting(
            f"{count} examples are too few to train on some and hold others out; give at least 10"
        )
    return range(count - held), range(count - held, count)


class BatchCache:
    """Groups by number, made when first asked for."""

    def __init__(
        self, lm: "LM", halves: SplitModel, lessons: ExampleSource, some: range, size: int
    ) -> None:
        self.lm, self.halves, self.lessons = lm, halves, lessons
        order = lessons.order(some)
        cut = [order[i : i + size] for i in range(0, len(order), size)]
        if len(cut) > 1 and len(cut[-1]) < 2:
            cut[-2:] = [cut[-2] + cut[-1]]
        self.numbers = cut
        self.kept: dict[int, ExampleBatch] = {}
        self.room = _room(lm)

    def __len__(self) -> int:
        return len(self.numbers)

    def at(self, step: int, seed: int) -> tuple["ExampleBatch | None", int]:
        """The group of a step, and its turn: every group comes once in each, shuffled anew."""
        turn, place = divmod(step, len(self))
        order = list(range(len(self)))
        random.Random(f"{seed} {turn}").shuffle(order)
        return self.group(order[place]), turn

    def group(self, number: int) -> "ExampleBatch | None":
        """A group; None where too few of its examples can be used."""
        if number in self.kept:
            return self.kept[number]
        examples = self.lessons.made(self.lm, self.numbers[number])
        if len(examples) < 2:
            return None
        made = self._made(examples)
        if made.bytes <= self.room:
            self.room -= made.bytes
            self.kept[number] = made
        return made

    def _made(self, examples: Sequence[Example]) -> ExampleBatch:
        reworded = any(example.rephrased != example.edit for example in examples)
        own = all(example.local is not None for example in examples)
        kinds: list[list[TokenRow]] = [[example.edit for example in examples]]
        if reworded:
            kinds.append([example.rephrased for example in examples])
        if own:
            kinds.append([example.local for example in examples if example.local is not None])
        length = max(len(line.ids) for lines in kinds for line in lines)
        packed = [TokenBatch.of(lines, self.lm.device, length) for lines in kinds]
        entering, last = self._below(torch.stack([lines.ids for lines in packed]).flatten(0, 1))
        shape = (len(kinds), len(examples))
        return ExampleBatch(
            edit=packed[0],
            rephrased=packed[1] if reworded else None,
            own=packed[-1] if own else None,
            entering=entering.unflatten(0, shape),
            last=last.unflatten(0, shape),
        )

    def _below(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        size = max(1, FACTS_PER_PASS.get(self.lm.device.type, 1024) // ids.shape[1])
        size += len(ids) % size == 1  # a line alone takes another way through
        pieces = [self.halves.below(some) for some in ids.split(size)]
        entering, last = zip(*pieces, strict=True)
        return torch.cat(entering), torch.cat(last)


def _room(lm: "LM") -> int:
    if lm.device.type != "cuda":
        return ROOM
    free, _ = torch.cuda.mem_get_info(lm.device)
    return free // 2
