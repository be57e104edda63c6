"""ParaRel's tables: relation → subject–object pairs, relation → patterns with [X] and [Y]."""

import json
from collections.abc import Iterator
from pathlib import Path

from factscope.data.facts_file import read_text
from factscope.errors import BadFact
from factscope.facts import PLACE, Fact

__all__ = ["prompt_of", "read_table", "statements"]


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
