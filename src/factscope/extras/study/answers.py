"""What people answered, as the form gives it back, and whom they thereby chose."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from factscope.analysis.preferences import QUESTIONS, Vote
from factscope.errors import BadStudy
from factscope.extras.study.pairs import KIND as KEY
from factscope.extras.study.pairs import Item, Study

__all__ = ["ANSWERS", "SAME", "Answer", "Answers", "read_answers", "votes"]

ANSWERS = "factscope study answers"
SAME = "same"
Choice = Literal[0, 1, "same"]
"""Which of an item's two texts, or neither."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one person said of one pair of texts."""

    item: str
    left: int
    """Which of the two texts stood on the left, or above."""
    choices: Mapping[str, Choice]
    """By question; one that was left out is not there."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What one person said."""

    study: str
    rater: str
    answers: tuple[Answer, ...]

    @classmethod
    def from_json(cls, text: str) -> "Answers":
        """The answers of a file that the form wrote."""
        try:
            fields = json.loads(text)
            kind = fields.get("kind")
            if kind == KEY:
                raise ValueError("this is the study's key; give it with --key")
            if kind != ANSWERS:
                raise ValueError("it does not say that it is one")
            rater = fields["rater"]
            if not isinstance(rater, str) or not rater.strip():
                raise ValueError(f"the rater is {rater!r}")
            given = tuple(_answer(answer) for answer in fields["answers"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadStudy(f"not a form's answers ({_said(error)})") from error
        twice = {answer.item for answer in given if sum(a.item == answer.item for a in given) > 1}
        if twice:
            raise BadStudy(f"the pair {min(twice)} is answered twice")
        return cls(study=str(fields["study"]), rater=" ".join(rater.split()), answers=given)


def _answer(fields: Any) -> Answer:
    left = fields["left"]
    if left not in (0, 1) or isinstance(left, bool):
        raise ValueError(f"left is {left!r}, not 0 or 1")
    choices = {name: fields[name] for name in QUESTIONS if fields.get(name) is not None}
    for name, choice in choices.items():
        if isinstance(choice, bool) or choice not in (0, 1, SAME):
            raise ValueError(f"{name} is {choice!r}, not 0, 1 or {SAME!r}")
    return Answer(item=str(fields["item"]), left=left, choices=choices)


def _said(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def read_answers(study: Study, paths: Iterable[Path]) -> dict[Path, Answers]:
    """The answers in these files, each of another person and all to this study."""
    sheets: dict[Path, Answers] = {}
    raters: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        sheet = _read(path)
        if sheet.study != study.id:
            raise BadStudy(
                f"{path} answers the study {sheet.study!r}, and the key is of {study.id!r}; "
                "give the key.json that was made together with the form"
            )
        other = raters.setdefault(sheet.rater.casefold(), path)
        if other != path:
            counts = {p: len((sheets.get(p) or sheet).answers) for p in (other, path)}
            raise BadStudy(
                f"two files are of the rater {sheet.rater!r}: {other} with {counts[other]} pairs "
                f"and {path} with {counts[path]}; give one of them, or, if these are two people, "
                'change one\'s "rater"'
            )
        sheets[path] = sheet
        known = {item.id for item in study.items}
        unknown = [answer.item for answer in sheet.answers if answer.item not in known]
        if unknown:
            raise BadStudy(f"{path}: the study has no pair {unknown[0]!r}")
    return sheets


def _read(path: Path) -> Answers:
    try:
        return Answers.from_json(path.read_text("utf-8"))
    except OSError as error:
        raise BadStudy(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise BadStudy(f"{path} is no text; give the JSON that the form wrote") from error
    except BadStudy as error:
        raise BadStudy(f"{path}: {error}") from error


def votes(study: Study, sheets: Iterable[Answers]) -> list[Vote]:
    """Whom each person chose, with the sides resolved; by question and pair of methods."""
    items = {item.id: item for item in study.items}
    found = [
        _vote(study, items[answer.item], sheet.rater, answer, question)
        for sheet in sheets
        for answer in sheet.answers
        for question in answer.choices
    ]
    places = study.methods.index
    return sorted(found, key=lambda v: (QUESTIONS.index(v.question), *map(places, v.pair)))


def _vote(study: Study, item: Item, rater: str, answer: Answer, question: str) -> Vote:
    choice = answer.choices[question]
    first, second = sorted(item.methods, key=study.methods.index)
    return Vote(
        rater=rater, case=item.case, question=question, pair=(first, second),
        chosen=None if choice == SAME else item.methods[int(choice)],
        left=item.methods[answer.left],
    )  # fmt: skip
