"""Facts from a file: known_1000, CounterFact, or one's own list, as JSON or JSON lines, also .gz.

A record names its subject and a prompt; the prompt has "{}" for the subject or spells it out. The
target may be called target or attribute (as in known_1000), the name id, known_id or case_id.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from factscope.errors import BadFact
from factscope.facts import PLACE, Case, Fact

__all__ = [
    "CasesFile",
    "FactsFile",
    "fact_of",
    "id_of",
    "object_of",
    "read_each",
    "read_facts",
    "read_text",
    "rewrite_of",
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
