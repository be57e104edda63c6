"""Answers of the raters, as the form saves them, and the votes that they give."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from factscope.analysis.preferences import QUESTIONS, Vote
from factscope.errors import BadStudy
from factscope.extras.study.pairs import KEY_KIND, Item, Study

ANSWERS_KIND = "factscope study answers"
SAME = "same"
Choice = Literal[0, 1, "same"]
"""One of an item's two texts, or no difference."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A rater's answers about one pair of texts."""

    item: str
    left: int
    """The text that was shown on the left, or above: 0 or 1."""
    choices: Mapping[str, Choice]
    """By question, without skipped ones."""


@dataclass(frozen=True, kw_only=True)
class AnswerSheet:
    """All answers of a rater."""

    study: str
    rater: str
    answers: tuple[Answer, ...]

    @classmethod
    def from_json(cls, text: str) -> "AnswerSheet":
        """Read the JSON that the form saves."""
        try:
            fields = json.loads(text)
            kind = fields.get("kind")
            if kind == KEY_KIND:
                raise ValueError("this is the study's key; give it with --key")
            if kind != ANSWERS_KIND:
                raise ValueError(f"its kind is not {ANSWERS_KIND!r}")
            rater = fields["rater"]
            if not isinstance(rater, str) or not rater.strip():
                raise ValueError(f"the rater is {rater!r}")
            answers = tuple(_answer(answer) for answer in fields["answers"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise BadStudy(f"not a form's answers ({reason})") from error
        counts = Counter(answer.item for answer in answers)
        repeated = [item for item, count in counts.items() if count > 1]
        if repeated:
            raise BadStudy(f"the pair {min(repeated)} is answered twice")
        return cls(study=str(fields["study"]), rater=" ".join(rater.split()), answers=answers)


def _answer(fields: Any) -> Answer:
    left = fields["left"]
    if left not in (0, 1) or isinstance(left, bool):
        raise ValueError(f"left is {left!r}, not 0 or 1")
    choices = {name: fields[name] for name in QUESTIONS if fields.get(name) is not None}
    for name, choice in choices.items():
        if isinstance(choice, bool) or choice not in (0, 1, SAME):
            raise ValueError(f"{name} is {choice!r}, not 0, 1 or {SAME!r}")
    return Answer(item=str(fields["item"]), left=left, choices=choices)


def read_answers(study: Study, paths: Iterable[Path]) -> dict[Path, AnswerSheet]:
    """Read the files of all raters of this study; a rater has one file."""
    sheets: dict[Path, AnswerSheet] = {}
    file_of: dict[str, Path] = {}
    known = {item.id for item in study.items}
    for path in dict.fromkeys(paths):
        sheet = sheets[path] = _read(path)
        if sheet.study != study.id:
            raise BadStudy(
                f"{path} answers the study {sheet.study!r}, but the key is of {study.id!r}; "
                "give the key.json that was written with the form"
            )
        other = file_of.setdefault(sheet.rater.casefold(), path)
        if other != path:
            raise BadStudy(
                f"two files are of the rater {sheet.rater!r}: {other} with "
                f"{len(sheets[other].answers)} pairs and {path} with {len(sheet.answers)}; "
                'give one of them, or, if these are two people, change one\'s "rater"'
            )
        unknown = [answer.item for answer in sheet.answers if answer.item not in known]
        if unknown:
            raise BadStudy(f"{path}: the study has no pair {unknown[0]!r}")
    return sheets


def _read(path: Path) -> AnswerSheet:
    try:
        return AnswerSheet.from_json(path.read_text("utf-8"))
    except OSError as error:
        raise BadStudy(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise BadStudy(f"{path} is not a text file; give the JSON that the form saved") from error
    except BadStudy as error:
        raise BadStudy(f"{path}: {error}") from error


def votes(study: Study, sheets: Iterable[AnswerSheet]) -> list[Vote]:
    """The methods that the raters chose, sorted by question and pair of methods."""
    items = {item.id: item for item in study.items}
    unsorted = [
        _vote(study, items[answer.item], sheet.rater, answer, question)
        for sheet in sheets
        for answer in sheet.answers
        for question in answer.choices
    ]
    order = study.methods.index
    return sorted(unsorted, key=lambda v: (QUESTIONS.index(v.question), *map(order, v.pair)))


def _vote(study: Study, item: Item, rater: str, answer: Answer, question: str) -> Vote:
    choice = answer.choices[question]
    first, second = sorted(item.methods, key=study.methods.index)
    return Vote(
        rater=rater,
        case=item.case,
        question=question,
        pair=(first, second),
        chosen=None if choice == SAME else item.methods[int(choice)],
        left=item.methods[answer.left],
    )
