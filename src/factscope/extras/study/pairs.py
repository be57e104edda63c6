"""Pairs of generated texts to compare: for each case, what two methods wrote for the same prompt.

A study is saved as its *key*, a JSON file that says which method wrote which text. The form for the
raters has the texts in the key's order and nothing about the methods.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from factscope.analysis.metrics import UNEDITED
from factscope.errors import BadStudy
from factscope.facts import Fact
from factscope.records import CaseRecord

KEY_KIND = "factscope study key"
COMPARED_SETTINGS = ("model", "data", "data_sha256", "scoring")
"""Settings of two runs that must be equal for their texts to be comparable."""

Texts = Mapping[str, tuple[str, ...]]
"""Method → its texts about a case; texts with the same index continue the same prompt."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A pair of texts about one case."""

    id: str
    """Its number in the form; independent of the case."""
    case: str
    """The case's id in its data set, or its prompt."""
    statement: str
    """The edited fact as a sentence."""
    texts: tuple[str, str]
    methods: tuple[str, str]
    """The method that wrote each text."""


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
            fields = json.loads(text)
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
            one, other = reference.get(setting), spec.get(setting)
            if one != other:
                raise BadStudy(
                    f"{first} and {name} cannot be compared: {setting} is {_shortened(one)} in the "
                    f"one and {_shortened(other)} in the other; evaluate both methods with the "
                    "same settings"
                )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"


def shared_cases(
    runs: Mapping[str, Sequence[CaseRecord]], *, unedited: bool = False
) -> dict[Fact, Texts]:
    """The texts of each run's method, for the cases in which all of them have texts.

    Of sequential edits, the texts after the last edit count. `unedited` adds the texts before the
    edit.
    """
    texts: dict[str, dict[Fact, tuple[str, ...]]] = {
        name: _texts_after(runs[run]) for run, name in _method_names(runs).items()
    }
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


def _method_names(runs: Mapping[str, Sequence[CaseRecord]]) -> dict[str, str]:
    """Run → the name of its method, with the run's name if two are equal."""
    for run, records in runs.items():
        if not records:
            raise BadStudy(f"{run} has no evaluated case yet; let `factscope evaluate` finish")
    methods = {run: records[0].method for run, records in runs.items()}
    ambiguous = len(set(methods.values())) < len(methods)
    return {run: f"{method} ({run})" if ambiguous else method for run, method in methods.items()}


def _texts_after(records: Sequence[CaseRecord]) -> dict[Fact, tuple[str, ...]]:
    texts: dict[Fact, tuple[str, ...]] = {}
    for record in sorted(records, key=lambda record: record.phase == "end"):  # "end" overwrites
        if record.after and record.after.texts:
            texts[record.fact] = record.after.texts
    return _require_texts(texts, records[0].method)


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
