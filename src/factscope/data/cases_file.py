"""Cases from a file: CounterFact, zsRE, or one's own list of facts, as JSON or JSON lines.

A record of one's own has a subject, a prompt (with "{}" for the subject, or spelling it out) and,
as `to`, the new object. It may have the old one as `true`, and as lists of texts `paraphrases`,
`neighbours`, `attributes`, `generations` and `neighbour_answers`. CounterFact's own names for all
of these are known, and those of EasyEdit's condensed CounterFact; a record of zsRE is known by its
fields.
"""

from pathlib import Path
from typing import Any

from factscope.data.facts_file import (
    CasesFile,
    fact_of,
    id_of,
    object_of,
    read_each,
    rewrite_of,
)
from factscope.data.zsre import is_zsre, zsre_case
from factscope.errors import BadFact
from factscope.facts import Case

__all__ = ["CasesFile", "read_cases"]

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
