"""Composition of a data set: distinct items in total, per relation and per record (Table 2)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from factscope.facts import Case

ITEMS: dict[str, Callable[[Case], Iterable[object]]] = {
    "subjects": lambda case: [case.fact.subject],
    "objects": lambda case: [case.fact.target],
    "counterfactual statements": lambda case: [case.fact.text],
    "paraphrase prompts": lambda case: case.paraphrases,
    "neighbourhood prompts": lambda case: case.neighbours,
    "generation prompts": lambda case: case.generations,
}
"""Kind of item → the items of a case. As in the paper's numbers, objects are the new ones and
statements are the prompts with their subject."""


@dataclass(frozen=True)
class CompositionRow:
    """Number of distinct items of a kind, and its means over relations and records."""

    name: str
    total: int
    per_relation: float
    per_record: float


def composition(cases: Sequence[Case]) -> tuple[CompositionRow, ...]:
    """The rows of Table 2."""
    relations = {case.fact.relation for case in cases}
    per_relation = len(cases) / len(relations) if cases else 0.0
    records = CompositionRow("records", len(cases), per_relation, 1.0 if cases else 0.0)
    return records, *(_row(name, items, cases) for name, items in ITEMS.items())


def _row(
    name: str, items: Callable[[Case], Iterable[object]], cases: Sequence[Case]
) -> CompositionRow:
    by_relation: dict[str | None, set[object]] = defaultdict(set)
    per_record: list[int] = []
    for case in cases:
        distinct = set(items(case))
        by_relation[case.fact.relation] |= distinct
        per_record.append(len(distinct))
    per_relation = [len(items_of_relation) for items_of_relation in by_relation.values()]
    total = len(set().union(*by_relation.values()))
    return CompositionRow(name, total, _mean(per_relation), _mean(per_record))


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts) if counts else 0.0
