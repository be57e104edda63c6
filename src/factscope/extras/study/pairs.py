"""Which texts are compared: for each case what two methods wrote after the same opening.

A study is kept as its *key*, a JSON file that says who wrote which text. The form that people fill
in has the texts in the key's order and nothing of who wrote them.
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

__all__ = ["Item", "Study", "draw", "must_be_comparable", "shared_cases"]

KIND = "factscope study key"
GROUND = ("model", "data", "data_sha256", "asking")
"""What two runs must have in common, of their specs, for their texts to be comparable."""

Texts = Mapping[str, tuple[str, ...]]
"""What each method wrote about a case; texts at the same place have the same opening."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Two texts about one case, to be compared."""

    id: str
    """Its place in the form; tells nothing of the case."""
    case: str
    """The case's id in its data set, or its prompt."""
    statement: str
    """The fact as it shall be, as a sentence."""
    texts: tuple[str, str]
    methods: tuple[str, str]
    """Who wrote each of them."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is compared, and who wrote it."""

    model: str
    data: str
    methods: tuple[str, ...]
    """In the order in which they are reported."""
    items: tuple[Item, ...]
    seed: int
    per_rater: int | None = None
    """How many pairs each person is asked for; None for all."""

    @property
    def id(self) -> str:
        """A hash of what people see, by which answers are told from those of another study."""
        seen = [[item.id, item.statement, *item.texts] for item in self.items]
        return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The key."""
        fields = {"kind": KIND, "study": self.id, **dataclasses.asdict(self)}
        return json.dumps(fields, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Study":
        """The study of a key."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.pop("kind", None) != KIND:
                raise ValueError("it does not say that it is one")
            name = fields.pop("study")
            items = tuple(_item(item) for item in fields.pop("items"))
            study = cls(**{**fields, "methods": tuple(fields["methods"]), "items": items})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadStudy(
                f"not the key of a study ({error}); `factscope study build` writes key.json"
            ) from error
        if study.id != name:
            raise BadStudy(f"the key was changed: it is of {name} and its texts are of {study.id}")
        return study


def _item(fields: Any) -> Item:
    pairs = {name: tuple(map(str, fields[name])) for name in ("texts", "methods")}
    return Item(**{**fields, **pairs})


def must_be_comparable(specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse runs, by name, of another model or data set, or whose models wrote otherwise."""
    (first, ground), *others = specs.items()
    for name, spec in others:
        for field in GROUND:
            here, there = ground.get(field), spec.get(field)
            if here != there:
                raise BadStudy(
                    f"{first} and {name} cannot be compared: {field} is {_short(here)} in the one "
                    f"and {_short(there)} in the other; evaluate both methods with the same flags"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:119] + "…"


def shared_cases(
    runs: Mapping[str, Sequence[CaseRecord]], *, unedited: bool = False
) -> dict[Fact, Texts]:
    """What each run's method wrote, for the cases on which all of them wrote something.

    Of a sequence of edits, what the model wrote after the last. `unedited` adds what it wrote
    before.
    """
    names = _names(runs)
    written = {names[run]: _written(records) for run, records in runs.items()}
    if unedited:
        first = next(iter(runs.values()))
        before = {r.fact: r.before.texts for r in first if r.before and r.before.texts}
        written[UNEDITED] = _some(before, "the unedited model")
    shared = set.intersection(*(set(texts) for texts in written.values()))
    if not shared:
        raise BadStudy(f"no case has texts of {' and of '.join(written)}; evaluate the same cases")
    order = next(iter(written.values()))
    return {
        fact: {method: texts[fact] for method, texts in written.items()}
        for fact in order
        if fact in shared
    }


def _names(runs: Mapping[str, Sequence[CaseRecord]]) -> dict[str, str]:
    """What each run's method is called; with the run's name where two are the same."""
    for run, records in runs.items():
        if not records:
            raise BadStudy(f"{run} has no evaluated case yet; let `factscope evaluate` finish")
    methods = {run: records[0].method for run, records in runs.items()}
    same = len(set(methods.values())) < len(methods)
    return {run: f"{method} ({run})" if same else method for run, method in methods.items()}


def _written(records: Sequence[CaseRecord]) -> dict[Fact, tuple[str, ...]]:
    texts: dict[Fact, tuple[str, ...]] = {}
    for record in sorted(records, key=lambda record: record.phase == "end"):
        if record.after and record.after.texts:
            texts[record.fact] = record.after.texts
    return _some(texts, records[0].method)


def _some(texts: dict[Fact, tuple[str, ...]], who: str) -> dict[Fact, tuple[str, ...]]:
    if not texts:
        raise BadStudy(f"there are no texts by {who}; evaluate with --length 100, say")
    return texts


def draw(
    runs: Mapping[str, Sequence[CaseRecord]],
    *,
    seed: int,
    cases: int = 50,
    unedited: bool = False,
    per_rater: int | None = None,
) -> Study:
    """So many of the shared cases, one text each, in an order and on sides drawn by the seed.

    A pair of texts that are the same letter by letter is left out: there is nothing to compare.
    """
    shared = shared_cases(runs, unedited=unedited)
    methods = tuple(next(iter(shared.values())))
    rng = random.Random(seed)
    pairs = []
    for fact, texts in rng.sample(list(shared.items()), min(cases, len(shared))):
        place = rng.randrange(min(map(len, texts.values())))
        for pair in combinations(methods, 2):
            sides = tuple(rng.sample(pair, 2))
            if texts[sides[0]][place] != texts[sides[1]][place]:
                pairs.append((fact, sides, tuple(texts[side][place] for side in sides)))
    if not pairs:
        raise BadStudy(f"{' and '.join(methods)} wrote the same in every case; nothing to compare")
    rng.shuffle(pairs)
    items = tuple(
        Item(id=str(number), case=fact.id or fact.text, statement=statement(fact), texts=texts,
             methods=sides)
        for number, (fact, sides, texts) in enumerate(pairs, start=1)
    )  # fmt: skip
    record = next(iter(runs.values()))[0]
    return Study(
        model=record.model, data=record.data, methods=methods, items=items, seed=seed,
        per_rater=per_rater if per_rater and per_rater < len(items) else None,
    )  # fmt: skip


def statement(fact: Fact) -> str:
    """The fact as a sentence."""
    return f"{fact.text.strip()} {(fact.target or '').strip()}".strip() + "."
