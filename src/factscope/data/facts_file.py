"""Facts from a file: known_1000, CounterFact, or one's own list, as JSON or JSON lines, also .gz.

A record names its subject and a prompt; the prompt has "{}" for the subject or spells it out. The
target may be called target or attribute (as in known_1000), the name id, known_id or case_id.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.errors import BadFact
from factscope.facts import PLACE, Fact

__all__ = ["FactsFile", "read_facts", "read_text"]


@dataclass(frozen=True)
class FactsFile:
    """The facts of a file, and what was wrong with the records that are missing."""

    facts: tuple[Fact, ...]
    problems: tuple[str, ...]


def read_facts(path: Path) -> FactsFile:
    """Every fact that can be read; a broken record is named and the rest kept."""
    facts: list[Fact] = []
    problems: list[str] = []
    for place, record in _records(read_text(path), path):
        try:
            if isinstance(record, ValueError):
                raise BadFact(f"not JSON ({record})")
            facts.append(_fact(record, default_id=place.split()[-1]))
        except BadFact as error:
            problems.append(f"{path.name}, {place}: {error}")
    if not facts:
        shown = "; ".join(problems[:3]) or "it is empty"
        raise BadFact(f"{path} has no usable fact: {shown}")
    return FactsFile(tuple(facts), tuple(problems))


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


def _fact(record: Any, default_id: str) -> Fact:
    if not isinstance(record, dict):
        raise BadFact(f"a record must be an object with subject and prompt, not {record!r:.60}")
    name = _first(record, "id", "known_id", "case_id")
    inner = record.get("requested_rewrite", record)  # CounterFact keeps its fact one level down
    if not isinstance(inner, dict):
        raise BadFact(f"requested_rewrite must be an object, not {inner!r:.60}")
    target = _first(inner, "target", "attribute", "target_true")
    if isinstance(target, dict):
        target = target.get("str")
    if not isinstance(target, str | None):
        raise BadFact(f"the field 'target' is {target!r:.60}; it must be a text")
    relation = _first(inner, "relation", "relation_id")
    fields = {
        "id": default_id if name is None else str(name),
        "target": target,
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


def _first(record: dict[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)
