"""What a set of cases consists of, counted as in the paper's Table 2."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from factscope.facts import Case

__all__ = ["Item", "composition"]


@dataclass(frozen=True)
class Item:
    """One kind of thing, each different one counted once within the whole, a relation, a record."""

    name: str
    total: int
    per_relation: float
    per_record: float


def composition(cases: Sequence[Case]) -> tuple[Item, ...]:
    """The items of the table.

    The paper's numbers come out where objects are the new ones, and statements the rewrite
    prompts with their subject.
    """
    relations = {case.fact.relation for case in cases}
    each = len(cases) / len(relations) if cases else 0.0
    records = Item("records", len(cases), each, 1.0 if cases else 0.0)
    return records, *(_item(name, parts, cases) for name, parts in PARTS.items())


PARTS: dict[str, Callable[[Case], Iterable[object]]] = {
    "subjects": lambda case: [case.fact.subject],
    "objects": lambda case: [case.fact.target],
    "counterfactual statements": lambda case: [case.fact.text],
    "paraphrase prompts": lambda case: case.paraphrases,
    "neighbourhood prompts": lambda case: case.neighbours,
    "generation prompts": lambda case: case.generations,
}
"""An item → what a case has of it."""


def _item(name: str, parts: Callable[[Case], Iterable[object]], cases: Sequence[Case]) -> Item:
    by_relation: dict[str | None, set[object]] = defaultdict(set)
    each: list[int] = []
    for case in cases:
        different = set(parts(case))
        by_relation[case.fact.relation] |= different
        each.append(len(different))
    counts = [len(found) for found in by_relation.values()]
    total = len(set().union(*by_relation.values()))
    return Item(name, total, _mean(counts), _mean(each))


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts) if counts else 0.0
