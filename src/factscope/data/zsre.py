"""zsRE: questions with one answer, as MEND splits them and the paper evaluates them.

What is written is a true fact, the first of a record's answers: there is no other object to compare
it with. The neighbour is an unrelated question with an answer of its own.
"""

from pathlib import Path
from typing import Any

from factscope.data.facts_file import CasesFile, read_each
from factscope.errors import BadFact
from factscope.facts import Case, Fact

__all__ = ["is_zsre", "read_zsre", "zsre_case"]

FIELDS = ("src", "answers", "loc", "loc_ans")
"""What tells a record of zsRE from others."""


def read_zsre(path: Path) -> CasesFile:
    """Every case that can be read; a broken record is named and the rest kept."""
    return CasesFile(*read_each(path, zsre_case))


def is_zsre(record: Any) -> bool:
    """Whether a record has the fields of zsRE."""
    return isinstance(record, dict) and all(name in record for name in FIELDS)


def zsre_case(record: Any, number: str) -> Case:
    """The case of a record; its id counts from 0, as that of the paper's code does."""
    if not is_zsre(record):
        raise BadFact(f"a record of zsRE has {', '.join(FIELDS)}; this one is {record!r:.60}")
    answers = record["answers"]
    if not isinstance(answers, list) or not answers:
        raise BadFact(f"the field 'answers' is {answers!r:.60}; it must be a list of texts")
    fact = Fact.from_text(
        _text("src", record["src"]),
        _text("subject", record.get("subject")),
        target=_text("answers", answers[0]),
        id=str(int(number) - 1),
    )
    return Case(
        fact=fact,
        paraphrases=(_text("rephrase", record.get("rephrase")),),
        # The paper's code asks just so: the question with its "nq question: ", and a question mark.
        neighbours=(_text("loc", record["loc"]) + "?",),
        neighbour_answers=(_text("loc_ans", record["loc_ans"]),),
    )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadFact(f"the field {name!r} is {value!r:.60}; it must be a text")
    return value
