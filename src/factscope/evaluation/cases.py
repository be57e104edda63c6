"""Everything that is asked about a case, of an edited or an unedited model: raw scores (§3.3).

Many cases are asked at once, each under its own edit, and no weight is written.

Consistency (RS): how like generated texts are to texts about things that have the new object.
"""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from factscope.analysis.metrics import fit_idf, idf_of, reference_similarity
from factscope.data.references import References, read_references, read_words
from factscope.editing.batches import run_in_batches
from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.evaluation.score import Query, score_queries
from factscope.facts import Case
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.memory import Budget
from factscope.lm.tokens import decode_continuation, encode
from factscope.progress import Progress
from factscope.records import CaseScores, PromptScore

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Consistency",
    "ReferenceSimilarity",
    "ScoringOptions",
    "load_consistency",
    "score_cases",
]

ReferenceSimilarity = Callable[[Case, Sequence[str]], float | None]
"""How like a case's texts are to its references; None where it has none."""

KINDS = {"paraphrase": "paraphrases", "neighbour": "neighbours", "attribute": "attributes"}
"""What a prompt is called in records → where a case keeps such prompts."""
ROWS = {"cpu": 32, "cuda": 640}
"""How many texts are written at once."""
ASKED = {"cpu": 4096, "cuda": 32768}
"""About how many tokens of prompts go through the model at once."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
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
    asking: ScoringOptions | None = None,
    likeness: ReferenceSimilarity | None = None,
) -> list[CaseScores]:
    """Each case's scores under edits[seats[i]], or by the model as it is where that is None."""
    asking = asking or ScoringOptions()
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


def _questions(case: Case, asking: ScoringOptions) -> Iterator[tuple[str, str, str, str]]:
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
    asking: ScoringOptions,
) -> list[tuple[dict[str, tuple[PromptScore, ...]], dict[str, tuple[bool, ...]]]]:  # fmt: skip
    """Both objects after every prompt, and the right answer token by token."""
    questions = [list(_questions(case, asking)) for case in cases]
    asks = [
        Query(text, target, seat)
        for mine, seat in zip(questions, seats, strict=True)
        for _, text, new, old in mine
        for target in dict.fromkeys((new, old))
    ]
    found = iter(score_queries(lm, asks, edits, tokens=ASKED.get(lm.device.type, 4096)))
    result = []
    for mine in questions:
        said: dict[str, tuple[PromptScore, ...]] = {}
        rights: dict[str, tuple[bool, ...]] = {}
        for kind, _, new, old in mine:
            first = next(found)
            second = first if new == old else next(found)
            asked = PromptScore(
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
    asking: ScoringOptions,
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

    def write(some: Sequence[int], progress: Progress) -> list[str]:
        draws = uniform_draws([openings[j][1] for j in some], length, asking.seed)
        own = [seats[openings[j][0]] for j in some]
        used = sorted({seat for seat in own if seat is not None})
        rows = [len(used) if seat is None else used.index(seat) for seat in own]
        with edited(lm, [*(edits[seat] for seat in used), None], rows):
            ids = sample_texts(lm, [coded[j] for j in some], draws, k=asking.k)
        return [
            _clean(lm, openings[j][2] + decode_continuation(lm, coded[j], row[len(coded[j]) :]))
            for j, row in zip(some, ids, strict=True)
        ]

    texts = run_in_batches(order, _rows(lm, length), write, lambda share: None) if order else []
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


@dataclass(frozen=True, eq=False)
class Consistency:
    """The reference texts, and how rare words are."""

    references: References
    idf: Mapping[str, float]

    def __call__(self, case: Case, texts: Sequence[str]) -> float | None:
        """The cosine of the TF-IDF vectors; None where the case has no references."""
        fact = case.fact
        found = self.references.texts_for(fact.relation, fact.target or "", case.target_id)
        return reference_similarity(texts, found, self.idf) if found else None


def load_consistency(
    references: Path, idf: Path | None = None, vocabulary: Path | None = None
) -> Consistency:
    """References from a file; without a table of words, rarity is that in the references."""
    found = read_references(references)
    if idf is not None and vocabulary is not None:
        words = read_words(idf, vocabulary)
        return Consistency(found, idf_of(words.vocabulary, words.idf.tolist()))
    every = chain(*found.by_id.values(), *found.by_name.values())
    return Consistency(found, fit_idf(dict.fromkeys(every)))
