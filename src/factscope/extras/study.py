"""A blind comparison of generated texts by human raters.

1. For each drawn case, two methods' texts for the same prompt are a pair to compare.
2. The study is saved as its *key*, a JSON file that says which method wrote which text. The form
   for the raters has the texts in the key's order and nothing about the methods.
3. The form saves a rater's answers as JSON; with the key they become votes for methods.
"""

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from factscope.analysis.metrics import UNEDITED
from factscope.analysis.preferences import QUESTIONS, Vote
from factscope.errors import BadStudy
from factscope.facts import Fact
from factscope.io import parse_json
from factscope.records import CaseRecord

KEY_KIND = "factscope study key"
ANSWERS_KIND = "factscope study answers"
COMPARED_SETTINGS = ("model", "data", "data_sha256", "scoring")
"""Settings of two runs that must be equal for their texts to be comparable."""

Texts = Mapping[str, tuple[str, ...]]
"""Method → its texts about a case; texts with the same index continue the same prompt."""
Choice = Literal[0, 1, "same"]
"""One of an item's two texts, or no difference."""


# ---- pairs of texts


@dataclass(frozen=True, kw_only=True)
class Item:
    """A pair of texts about one case."""

    id: str  # its number in the form; independent of the case
    case: str  # the case's id in its data set, or its prompt
    statement: str  # the edited fact as a sentence
    texts: tuple[str, str]
    methods: tuple[str, str]  # the method that wrote each text


@dataclass(frozen=True, kw_only=True)
class Study:
    """The pairs to compare, and which method wrote what."""

    model: str
    data: str
    methods: tuple[str, ...]
    """In the order of the report."""
    items: tuple[Item, ...]
    seed: int
    per_rater: int | None = None
    """Number of pairs for each rater; None for all."""

    @property
    def id(self) -> str:
        """A hash of what the raters see, which their answers repeat."""
        seen = [[item.id, item.statement, *item.texts] for item in self.items]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The key."""
        fields = {"kind": KEY_KIND, "study": self.id, **dataclasses.asdict(self)}
        return json.dumps(fields, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Study":
        """Read a key."""
        try:
            fields = parse_json(text)
            if not isinstance(fields, dict) or fields.pop("kind", None) != KEY_KIND:
                raise ValueError(f"its kind is not {KEY_KIND!r}")
            id_ = fields.pop("study")
            items = tuple(
                Item(**{**item, **{n: tuple(map(str, item[n])) for n in ("texts", "methods")}})
                for item in fields.pop("items")
            )
            study = cls(**{**fields, "methods": tuple(fields["methods"]), "items": items})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadStudy(
                f"not the key of a study ({error}); `factscope study build` writes key.json"
            ) from error
        if study.id != id_:
            raise BadStudy(f"the key was changed: its id is {id_}, its texts give {study.id}")
        return study


def check_comparable(specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise BadStudy if runs, by name, differ in model, data or text generation."""
    (first, reference), *others = specs.items()
    for name, spec in others:
        for setting in COMPARED_SETTINGS:
            if reference.get(setting) == spec.get(setting):
                continue
            texts = [repr(each.get(setting)) for each in (reference, spec)]
            one, other = (text if len(text) <= 120 else text[:119] + "…" for text in texts)
            raise BadStudy(
                f"{first} and {name} cannot be compared: {setting} is {one} in the one and "
                f"{other} in the other; evaluate both methods with the same settings"
            )


def shared_cases(
    runs: Mapping[str, Sequence[CaseRecord]], *, unedited: bool = False
) -> dict[Fact, Texts]:
    """The texts of each run's method, for the cases in which all of them have texts.

    Of sequential edits, the texts after the last edit count. `unedited` adds the texts before the
    edit.
    """
    for run, records in runs.items():
        if not records:
            raise BadStudy(f"{run} has no evaluated case yet; let `factscope evaluate` finish")
    methods = {run: records[0].method for run, records in runs.items()}
    ambiguous = len(set(methods.values())) < len(methods)
    texts: dict[str, dict[Fact, tuple[str, ...]]] = {}
    for run, method in methods.items():
        in_order = sorted(runs[run], key=lambda record: record.phase == "end")  # "end" overwrites
        after = {r.fact: r.after.texts for r in in_order if r.after and r.after.texts}
        texts[f"{method} ({run})" if ambiguous else method] = _require_texts(after, method)
    if unedited:
        first = next(iter(runs.values()))
        before = {r.fact: r.before.texts for r in first if r.before and r.before.texts}
        texts[UNEDITED] = _require_texts(before, "the unedited model")
    shared = set.intersection(*map(set, texts.values()))
    if not shared:
        raise BadStudy(f"no case has texts of {' and of '.join(texts)}; evaluate the same cases")
    order = next(iter(texts.values()))
    return {
        fact: {method: method_texts[fact] for method, method_texts in texts.items()}
        for fact in order
        if fact in shared
    }


def _require_texts(texts: dict[Fact, tuple[str, ...]], method: str) -> dict[Fact, tuple[str, ...]]:
    if not texts:
        raise BadStudy(f"there are no texts by {method}; evaluate with --text-length 100")
    return texts


def build_study(
    runs: Mapping[str, Sequence[CaseRecord]],
    *,
    seed: int,
    cases: int = 50,
    unedited: bool = False,
    per_rater: int | None = None,
) -> Study:
    """Draw cases, one text of each, the order of the pairs and their sides at random.

    Pairs of identical texts are left out.
    """
    shared = shared_cases(runs, unedited=unedited)
    methods = tuple(next(iter(shared.values())))
    rng = random.Random(seed)
    pairs = []
    for fact, texts in rng.sample(list(shared.items()), min(cases, len(shared))):
        index = rng.randrange(min(map(len, texts.values())))
        for pair in combinations(methods, 2):
            sides = tuple(rng.sample(pair, 2))
            if texts[sides[0]][index] != texts[sides[1]][index]:
                pairs.append((fact, sides, tuple(texts[side][index] for side in sides)))
    if not pairs:
        raise BadStudy(f"{' and '.join(methods)} wrote the same in every case; nothing to compare")
    rng.shuffle(pairs)
    items = tuple(
        Item(
            id=str(number),
            case=fact.id or fact.text,
            statement=f"{fact.text.strip()} {(fact.target or '').strip()}".strip() + ".",
            texts=texts,
            methods=sides,
        )
        for number, (fact, sides, texts) in enumerate(pairs, start=1)
    )
    record = next(iter(runs.values()))[0]
    return Study(
        model=record.model,
        data=record.data,
        methods=methods,
        items=items,
        seed=seed,
        per_rater=per_rater if per_rater and per_rater < len(items) else None,
    )


# ---- answers of the raters


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A rater's answers about one pair of texts."""

    item: str
    left: int  # the text that was shown on the left, or above: 0 or 1
    choices: Mapping[str, Choice]  # by question, without skipped ones


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
            fields = parse_json(text)
            kind = fields.get("kind")
            if kind == KEY_KIND:
                raise ValueError("this is the study's key; give it with --key-file")
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
        if isinstance(choice, bool) or choice not in (0, 1, "same"):
            raise ValueError(f"{name} is {choice!r}, not 0, 1 or 'same'")
    return Answer(item=str(fields["item"]), left=left, choices=choices)


def read_answers(study: Study, paths: Iterable[str | Path]) -> dict[Path, AnswerSheet]:
    """Read the files of all raters of this study; a rater has one file."""
    sheets: dict[Path, AnswerSheet] = {}
    file_of: dict[str, Path] = {}
    known = {item.id for item in study.items}
    for path in dict.fromkeys(map(Path, paths)):
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
    order = study.methods.index
    unsorted: list[Vote] = []
    for sheet in sheets:
        for answer in sheet.answers:
            item = items[answer.item]
            first, second = sorted(item.methods, key=order)
            unsorted += [
                Vote(
                    rater=sheet.rater,
                    case=item.case,
                    question=question,
                    pair=(first, second),
                    chosen=None if choice == "same" else item.methods[int(choice)],
                    left=item.methods[answer.left],
                )
                for question, choice in answer.choices.items()
            ]
    return sorted(unsorted, key=lambda v: (QUESTIONS.index(v.question), *map(order, v.pair)))
