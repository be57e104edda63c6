"""Facts from a file: known_1000, CounterFact, or one's own list, as JSON or JSON lines, also .gz.

A record names its subject and a prompt; the prompt has "{}" for the subject or spells it out. The
target may be called target or attribute (as in known_1000), the name id, known_id or case_id.

Cases from a file: CounterFact, zsRE, or one's own list of facts, as JSON or JSON lines.

A record of one's own has a subject, a prompt (with "{}" for the subject, or spelling it out) and,
as `to`, the new object. It may have the old one as `true`, and as lists of texts `paraphrases`,
`neighbours`, `attributes`, `generations` and `neighbour_answers`. CounterFact's own names for all
of these are known, and those of EasyEdit's condensed CounterFact; a record of zsRE is known by its
fields.

zsRE: questions with one answer, as MEND splits them and the paper evaluates them.

What is written is a true fact, the first of a record's answers: there is no other object to compare
it with. The neighbour is an unrelated question with an answer of its own.

ParaRel's tables: relation → subject–object pairs, relation → patterns with [X] and [Y].

Well-known facts, written for this project: for the demo, the tests, σ and a first evaluation.

Openings to be continued and neutral sentences, written for this project (phrases.toml).
"""

import gzip
import json
import tomllib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from factscope.errors import BadFact
from factscope.facts import PLACE, Case, Fact

__all__ = [
    "EVERYDAY_CASES",
    "CasesFile",
    "FactsFile",
    "everyday",
    "everyday_cases",
    "fact_of",
    "id_of",
    "is_zsre",
    "neutral_sentences",
    "object_of",
    "openings",
    "prompt_of",
    "read_cases",
    "read_each",
    "read_facts",
    "read_table",
    "read_text",
    "read_zsre",
    "rewrite_of",
    "statements",
    "zsre_case",
]

T = TypeVar("T")

TARGETS = ("target", "attribute", "target_true")
"""What a record may call the object that its fact has."""


@dataclass(frozen=True)
class FactsFile:
    """The facts of a file, and what was wrong with the records that are missing."""

    facts: tuple[Fact, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class CasesFile:
    """The cases of a file, and what was wrong with the records that are missing."""

    cases: tuple[Case, ...]
    problems: tuple[str, ...]


def read_facts(path: Path) -> FactsFile:
    """Every fact that can be read; a broken record is named and the rest kept."""
    return FactsFile(*read_each(path, partial(fact_of, targets=TARGETS)))


def read_each(
    path: Path, made_of: Callable[[Any, str], T]
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """What is made of each record and its number; and, by place, why a record was left out."""
    found: list[T] = []
    problems: list[str] = []
    for place, record in _records(read_text(path), path):
        try:
            if isinstance(record, ValueError):
                raise BadFact(f"not JSON ({record})")
            found.append(made_of(record, place.split()[-1]))
        except BadFact as error:
            problems.append(f"{path.name}, {place}: {error}")
    if not found:
        shown = "; ".join(problems[:3]) or "it is empty"
        raise BadFact(f"{path} has no usable fact: {shown}")
    return tuple(found), tuple(problems)


def read_text(path: Path) -> str:
    """The text of a file, unpacked where it is gzipped."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadFact(f"cannot read {path}: {error}") from error


def _records(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Each record with its place: a line of JSON lines, or an element of one JSON list."""
    if not text.lstrip().startswith("["):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"line {number}", _parsed(line)
        return
    whole = _parsed(text)
    if isinstance(whole, ValueError):
        raise BadFact(f"{path} is not JSON ({whole}); write a list of records, or one a line")
    for number, record in enumerate(whole, start=1):
        yield f"record {number}", record


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return error


def fact_of(record: Any, number: str, targets: Sequence[str]) -> Fact:
    """The fact of a record; its target is the first of those fields that is there."""
    inner = rewrite_of(record)
    name = _first(record, "id", "known_id", "case_id")
    relation = _first(inner, "relation", "relation_id")
    fields = {
        "id": number if name is None else str(name),
        "target": object_of(inner, targets),
        "relation": None if relation is None else str(relation),
    }
    subject: Any = inner.get("subject")
    prompt: Any = inner.get("prompt")
    for what, value in (("subject", subject), ("prompt", prompt)):
        if not isinstance(value, str) or not value.strip():
            raise BadFact(f"the field {what!r} is missing or empty")
    if PLACE in prompt:
        return Fact(subject=subject, prompt=prompt, **fields)
    return Fact.from_text(prompt, subject, **fields)


def rewrite_of(record: Any) -> dict[str, Any]:
    """Where a record's fact is: CounterFact keeps it one level down."""
    if not isinstance(record, dict):
        raise BadFact(f"a record must be an object with subject and prompt, not {record!r:.60}")
    inner = record.get("requested_rewrite", record)
    if not isinstance(inner, dict):
        raise BadFact(f"requested_rewrite must be an object, not {inner!r:.60}")
    return inner


def object_of(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """The first of those fields that is there: a text, or CounterFact's object with its `str`."""
    value = _first(record, *names)
    if isinstance(value, dict):
        value = value.get("str")
    if not isinstance(value, str | None):
        raise BadFact(f"the field {names[0]!r} is {value!r:.60}; it must be a text")
    return value


def id_of(record: dict[str, Any], names: Sequence[str]) -> str | None:
    """The Wikidata id that CounterFact gives with the first of those objects."""
    value = _first(record, *names)
    found = value.get("id") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _first(record: dict[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


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


NEW = ("to", "target_new")
TRUE = ("true", "target_true", "ground_truth")
LISTS = {
    "paraphrases": ("paraphrases", "paraphrase_prompts", "rephrase_prompt"),
    "neighbours": ("neighbours", "neighborhood_prompts", "locality_prompt"),
    "attributes": ("attributes", "attribute_prompts"),
    "generations": ("generations", "generation_prompts"),
    "neighbour_answers": ("neighbour_answers",),
}
"""A case's lists of texts → what a record may call them."""


def read_cases(path: Path) -> CasesFile:
    """Every case that can be read; a broken record is named and the rest kept."""
    return CasesFile(*read_each(path, _case))


def _case(record: Any, number: str) -> Case:
    return zsre_case(record, number) if is_zsre(record) else _rewrite(record, number)


def _rewrite(record: Any, number: str) -> Case:
    inner = rewrite_of(record)
    fact = fact_of(record, number, NEW)
    if fact.target is None or not fact.target.strip():
        raise BadFact("the field 'to' is missing or empty; it says what the new object shall be")
    lists = {name: _texts(record, names) for name, names in LISTS.items()}
    return Case(fact=fact, true=object_of(inner, TRUE), target_id=id_of(inner, NEW), **lists)


def _texts(record: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """A list of prompts, or one alone; empty where there is none."""
    name = next((name for name in names if record.get(name) is not None), names[0])
    value = record.get(name, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(x, str) and x.strip() for x in texts):
        raise BadFact(f"the field {name!r} is {value!r:.60}; it must be a list of texts")
    return tuple(texts)


def statements(facts: Path, patterns: Path) -> Iterator[Fact]:
    """Every pair in the first pattern of its relation that ends in the object."""
    pairs, templates = read_table(facts), read_table(patterns)
    for relation in sorted(pairs):
        prompt = next(filter(None, map(prompt_of, templates.get(relation, []))), None)
        if prompt is None:
            continue
        for number, (subject, target) in enumerate(pairs[relation]):
            yield Fact(
                subject=subject,
                prompt=prompt,
                target=target,
                relation=relation,
                id=f"{relation}-{number}",
            )


def prompt_of(pattern: str) -> str | None:
    """A pattern as a prompt that asks for the object, where the object comes last."""
    before, found, after = pattern.partition("[Y]")
    if not found or before.count("[X]") != 1 or after.strip(" .") or PLACE in before:
        return None
    return before.replace("[X]", PLACE).strip()


def read_table(path: Path) -> dict[str, list]:
    """A table by relation."""
    try:
        table = json.loads(read_text(path))
    except ValueError as error:
        raise BadFact(f"{path} is not JSON ({error}); expected a table by relation") from error
    if not isinstance(table, dict):
        raise BadFact(f"{path} is not a table by relation, as ParaRel's facts and patterns are")
    return table


HERE = Path(__file__).parent
EVERYDAY_CASES = HERE / "everyday_cases.jsonl"


@cache
def everyday() -> tuple[Fact, ...]:
    """Facts about places, countries, books and people that even small models mostly know."""
    text = (HERE / "everyday.jsonl").read_text("utf-8")
    return tuple(Fact(**json.loads(line)) for line in text.splitlines())


@cache
def everyday_cases() -> tuple[Case, ...]:
    """Facts to rewrite, each with all the prompts of a CounterFact record."""
    return read_cases(EVERYDAY_CASES).cases


def openings(relation: str) -> tuple[str, ...]:
    """Texts with "{}" for the subject, that lead up to a relation's object without asking."""
    phrases = _phrases()
    return tuple(phrases["openings"].get(relation, phrases["any"]))


def neutral_sentences() -> tuple[str, ...]:
    """Sentences that are about nobody in particular."""
    return tuple(_phrases()["sentences"])


@cache
def _phrases() -> dict:
    text = resources.files("factscope.data").joinpath("phrases.toml").read_text("utf-8")
    return tomllib.loads(text)
