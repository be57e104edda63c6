"""Everything that is asked about a case, of an edited or an unedited model: raw scores (§3.3).

Many cases are asked at once, each under its own edit, and no weight is written.
"""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from factscope.editing.batches import halving
from factscope.editing.edit import Edit
from factscope.editing.editor import Done
from factscope.editing.rows import edited
from factscope.evaluation.score import Ask, answers
from factscope.facts import Case
from factscope.lm.tokens import encode, spoken
from factscope.lm.writing import draws_of, write_on
from factscope.records import Asked, CaseScores
from factscope.tracing.memory import Budget

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Asking", "Likeness", "score_cases"]

Likeness = Callable[[Case, Sequence[str]], float | None]
"""How like a case's texts are to its references; None where it has none."""

KINDS = {"paraphrase": "paraphrases", "neighbour": "neighbours", "attribute": "attributes"}
"""What a prompt is called in records → where a case keeps such prompts."""
ROWS = {"cpu": 32, "cuda": 640}
"""How many texts are written at once."""
ASKED = {"cpu": 4096, "cuda": 32768}
"""About how many tokens of prompts go through the model at once."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What is asked of every case."""

    length: int = 100
    """How long texts become in tokens, their openings included; 0 for no texts."""
    k: int = 5
    """From how many of the likeliest tokens each next one is drawn."""
    seed: int = 0
    """Of the draws."""
    attributes: bool = True
    """Whether prompts about subjects that have the new object already are asked too."""


def score_cases(
    lm: "LM",
    cases: Sequence[Case],
    edits: Sequence[Edit] = (),
    seats: Sequence[int | None] | None = None,
    *,
    asking: Asking | None = None,
    likeness: Likeness | None = None,
) -> list[CaseScores]:
    """Each case's scores under edits[seats[i]], or by the model as it is where that is None."""
    asking = asking or Asking()
    seats = [None] * len(cases) if seats is None else seats
    prompts = _prompts(lm, cases, edits, seats, asking)
    texts = _texts(lm, cases, edits, seats, asking)
    return [
        CaseScores(
            prompts=said if case.true is not None else {},
            tokens={} if case.true is not None else rights,
            texts=written,
            reference=likeness(case, written) if likeness and written else None,
        )
        for case, (said, rights), written in zip(cases, prompts, texts, strict=True)
    ]


# ---- prompts


def _questions(case: Case, asking: Asking) -> Iterator[tuple[str, str, str, str]]:
    """Kind, text, new object, true object; where no object is true, the right answer twice."""
    new = (case.fact.target or "").strip()
    old = new if case.true is None else case.true
    yield "prompt", case.fact.text, new, old
    for kind, name in KINDS.items():
        if kind == "attribute" and (case.true is None or not asking.attributes):
            continue
        texts = getattr(case, name)
        own = case.neighbour_answers if kind == "neighbour" and case.true is None else ()
        for i, text in enumerate(texts):
            answer = own[i] if i < len(own) else new
            yield kind, text, answer, old if case.true is not None else answer


def _prompts(
    lm: "LM", cases: Sequence[Case], edits: Sequence[Edit], seats: Sequence[int | None],
    asking: Asking,
) -> list[tuple[dict[str, tuple[Asked, ...]], dict[str, tuple[bool, ...]]]]:  # fmt: skip
    """Both objects after every prompt, and the right answer token by token."""
    questions = [list(_questions(case, asking)) for case in cases]
    asks = [
        Ask(text, target, seat)
        for mine, seat in zip(questions, seats, strict=True)
        for _, text, new, old in mine
        for target in dict.fromkeys((new, old))
    ]
    found = iter(answers(lm, asks, edits, tokens=ASKED.get(lm.device.type, 4096)))
    result = []
    for mine in questions:
        said: dict[str, tuple[Asked, ...]] = {}
        rights: dict[str, tuple[bool, ...]] = {}
        for kind, _, new, old in mine:
            first = next(found)
            second = first if new == old else next(found)
            asked = Asked(
                new=first.nll, true=second.nll,
                new_right=all(first.right), true_right=all(second.right),
            )  # fmt: skip
            said[kind] = (*said.get(kind, ()), asked)
            rights[kind] = (*rights.get(kind, ()), *first.right)
        result.append((said, rights))
    return result


# ---- texts


def _texts(
    lm: "LM", cases: Sequence[Case], edits: Sequence[Edit], seats: Sequence[int | None],
    asking: Asking,
) -> list[tuple[str, ...]]:  # fmt: skip
    """What the model writes after each opening of each case."""
    openings = [
        (i, f"{case.fact.id}/{n}", text)
        for i, case in enumerate(cases)
        for n, text in enumerate(case.generations if asking.length else ())
    ]
    coded = [encode(lm, text).ids for _, _, text in openings]
    order = sorted(range(len(openings)), key=lambda j: len(coded[j]))
    length = min(asking.length, lm.context or asking.length)

    def write(some: Sequence[int], done: Done) -> list[str]:
        draws = draws_of([openings[j][1] for j in some], length, asking.seed)
        own = [seats[openings[j][0]] for j in some]
        used = sorted({seat for seat in own if seat is not None})
        rows = [len(used) if seat is None else used.index(seat) for seat in own]
        with edited(lm, [*(edits[seat] for seat in used), None], rows):
            ids = write_on(lm, [coded[j] for j in some], draws, k=asking.k)
        return [
            _clean(lm, openings[j][2] + spoken(lm, coded[j], row[len(coded[j]) :]))
            for j, row in zip(some, ids, strict=True)
        ]

    texts = halving(order, _rows(lm, length), write, lambda share: None) if order else []
    written = dict(zip(order, texts, strict=True))
    return [
        tuple(written[j] for j in range(len(openings)) if openings[j][0] == i)
        for i in range(len(cases))
    ]


def _rows(lm: "LM", length: int) -> int:
    """How many texts are written at once: their keys and values must fit."""
    row = 2 * lm.n_layers * lm.width * length * lm.dtype.itemsize
    return max(1, min(ROWS.get(lm.device.type, 32), Budget.of(lm, None).bytes // row))


def _clean(lm: "LM", text: str) -> str:
    """A text as the paper's code keeps it: no end-of-text marker, no blank lines, NFKD."""
    end = lm.tokenizer.eos_token or ""
    text = text.replace(end, "") if end else text
    return unicodedata.normalize("NFKD", text).replace("\n\n", " ")
