"""A set like CounterFact from a table of facts and patterns (paper, App. D).

Each tuple (s, r, o) becomes one record: a rewrite prompt from the relation's templates and a new
object o*; two paraphrases; neighbours, which share o; attribute prompts, of subjects that have o*;
openings. Every tuple draws from a generator of its own, seeded by the seed and the tuple, and the
set is in the order of each one's first draw. So a record does not depend on which others are
built, and a limited set is the beginning of the whole one.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from factscope.data.readers import neutral_sentences, openings, prompt_of
from factscope.errors import BadFact, BadSetting
from factscope.facts import PLACE

__all__ = [
    "COUNTERFACT",
    "Entry",
    "FindHolders",
    "Holders",
    "Relation",
    "Relations",
    "Tables",
    "entries",
    "in_the_table",
    "record",
    "records",
    "references",
    "relations_of",
]

COUNTERFACT = (
    "P17", "P19", "P20", "P27", "P30", "P36", "P37", "P39", "P101", "P103", "P106", "P108",
    "P127", "P131", "P136", "P138", "P140", "P159", "P176", "P178", "P190", "P264", "P276", "P364",
    "P407", "P413", "P449", "P463", "P495", "P641", "P740", "P937", "P1303", "P1412",
)  # fmt: skip
"""The relations of the paper's set: mostly those in which a subject has one object."""
PARAPHRASES = 2
PROMPTS = 10
"""Neighbours, attribute prompts and openings of a record."""
TEXTS = 10
"""Reference texts of an object, at most."""
LOOK_AT = 50
"""Sentences that are looked at to find one that is unrelated."""


@dataclass(frozen=True)
class Holders:
    """The subjects that have an object in a relation, and the object's id where it is known."""

    names: Sequence[str]
    id: str | None = None


@dataclass(frozen=True)
class Relation:
    """A relation: its subject–object pairs, each once, and templates that end in the object."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    templates: tuple[str, ...]

    @cached_property
    def frequency(self) -> Counter[str]:
        """How many subjects have each object."""
        return Counter(target for _, target in self.pairs)

    @cached_property
    def objects(self) -> dict[str, set[str]]:
        """Subject → its true objects."""
        found: dict[str, set[str]] = defaultdict(set)
        for subject, target in self.pairs:
            found[subject].add(target)
        return found

    @cached_property
    def subjects(self) -> dict[str, list[str]]:
        """Object → the subjects that have it."""
        found: dict[str, list[str]] = defaultdict(list)
        for subject, target in self.pairs:
            found[target].append(subject)
        return found

    def candidates(self, subject: str) -> dict[str, int]:
        """Objects that would be false of the subject, and how often each occurs."""
        false = self.frequency.keys() - self.objects[subject] - {subject}
        return {target: n for target, n in self.frequency.items() if target in false}


FindHolders = Callable[[Relation, str], Holders]


def in_the_table(relation: Relation, target: str) -> Holders:
    """The subjects that the table itself gives an object."""
    return Holders(relation.subjects.get(target, []))


Tables = Mapping[str, Sequence[Any]]
"""ParaRel's tables: relation → pairs, relation → patterns."""


@dataclass(frozen=True)
class Relations:
    """The relations that can be built from, and what is wrong with the rest of the tables."""

    usable: tuple[Relation, ...]
    problems: tuple[str, ...]


def relations_of(facts: Tables, patterns: Tables, wanted: Sequence[str] = ()) -> Relations:
    """All relations of the tables, or those that are wanted."""
    if not any(facts.values()):
        raise BadFact("the table of facts is empty; it needs relation → [[subject, object], …]")
    unknown = [name for name in wanted if name not in facts]
    if unknown:
        known = ", ".join(sorted(facts, key=_by_number))
        raise BadSetting(f"no relation {', '.join(unknown)} in the table of facts; it has {known}")
    usable: list[Relation] = []
    problems: list[str] = []
    for name in sorted(wanted or facts, key=_by_number):
        pairs, broken = _pairs(facts[name])
        relation = Relation(name, pairs, _templates(patterns.get(name, [])))
        if broken:
            problems.append(f"{name}: {broken} rows that are not [subject, object]")
        problem = _problem(relation)
        if problem:
            problems.append(f"{name} skipped, with {len(pairs)} facts: {problem}")
        else:
            usable.append(relation)
    if not usable:
        raise BadFact(f"no relation can be built from: {'; '.join(problems[:3])}")
    return Relations(tuple(usable), tuple(problems))


def _by_number(name: str) -> tuple[int, str]:
    return (int(name[1:]) if name[1:].isdecimal() else 0, name)


def _pairs(rows: Sequence[Any]) -> tuple[tuple[tuple[str, str], ...], int]:
    """The usable pairs, each once, and how many rows were broken."""
    good = [
        (row[0].strip(), row[1].strip())
        for row in rows
        if isinstance(row, list | tuple)
        and len(row) == 2
        and all(isinstance(word, str) and word.strip() and PLACE not in word for word in row)
    ]
    return tuple(dict.fromkeys(good)), len(rows) - len(good)


def _templates(patterns: Sequence[Any]) -> tuple[str, ...]:
    """The prompts that end where the object goes, tidied, each once."""
    prompts = (prompt_of(pattern) for pattern in patterns if isinstance(pattern, str))
    tidy = (" ".join(prompt.split()).replace(" :", ":") for prompt in prompts if prompt)
    # "a" or "an" would fit some objects and give others away.
    kept = (prompt for prompt in tidy if prompt.rsplit(" ", 1)[-1] not in ("a", "an"))
    return tuple(dict.fromkeys(prompt[0].upper() + prompt[1:] for prompt in kept))


def _problem(relation: Relation) -> str | None:
    """Why no record can be made of a relation."""
    if len(relation.templates) < 2:
        return (
            f"{len(relation.templates)} usable patterns; a prompt and its paraphrases need two "
            "that have [X] once and end in [Y]"
        )
    if len(relation.frequency) < 2:
        return f"{len(relation.frequency)} objects; a counterfactual needs two"
    return None


@dataclass(frozen=True)
class Entry:
    """A tuple (s, r, o) that can be built from, and its seed."""

    relation: Relation
    subject: str
    target: str
    seed: int

    def draws(self) -> random.Random:
        """The tuple's own generator."""
        words = (str(self.seed), self.relation.name, self.subject, self.target)
        return random.Random("\n".join(words))


def entries(relations: Iterable[Relation], seed: int) -> list[Entry]:
    """Every tuple for which there is a false object, in the order of the set."""
    every = [
        Entry(relation, subject, target, seed)
        for relation in relations
        for subject, target in relation.pairs
        if relation.candidates(subject)
    ]
    return sorted(every, key=lambda entry: entry.draws().random())


def records(
    entries: Iterable[Entry],
    *,
    sentences: Sequence[str] = (),
    find: FindHolders = in_the_table,
    full: bool = False,
) -> Iterator[dict[str, Any]]:
    """The tuples as records, numbered from 0; if `full`, only those with every prompt."""
    number = 0
    for entry in entries:
        made = record(entry, number, sentences=sentences, find=find)
        if not full or _is_full(made):
            yield made
            number += 1


def _is_full(made: Mapping[str, Any]) -> bool:
    return len(made["neighborhood_prompts"]) == len(made["attribute_prompts"]) == PROMPTS


def record(
    entry: Entry,
    number: int,
    *,
    sentences: Sequence[str] = (),
    find: FindHolders = in_the_table,
) -> dict[str, Any]:
    """A tuple as CounterFact has it; sentences stand before the paraphrases."""
    relation, subject, true = entry.relation, entry.subject, entry.target
    draws = entry.draws()
    draws.random()  # the order's
    prompt = draws.choice(relation.templates)
    candidates = relation.candidates(subject)
    [new] = draws.choices(list(candidates), list(candidates.values()))
    with_true, with_new = find(relation, true), find(relation, new)
    both = {subject} | set(relation.subjects[new]) & set(relation.subjects[true])
    paraphrases = _paraphrases(draws, entry, prompt)
    before = _unrelated(draws, sentences, (subject, true, new))
    return {
        "case_id": number,
        "requested_rewrite": {
            "prompt": prompt,
            "relation_id": relation.name,
            "target_new": {"str": new, "id": with_new.id},
            "target_true": {"str": true, "id": with_true.id},
            "subject": subject,
        },
        "paraphrase_prompts": [f"{a} {b}" for a, b in zip(before, paraphrases, strict=True)],
        "neighborhood_prompts": _prompts(draws, relation, with_true.names, both),
        "attribute_prompts": _prompts(draws, relation, with_new.names, both),
        "generation_prompts": [
            opening.replace(PLACE, subject)
            for opening in draws.choices(openings(relation.name), k=PROMPTS)
        ],
    }


def _paraphrases(draws: random.Random, entry: Entry, prompt: str) -> list[str]:
    """The same asked in other words; where there is one other wording, that one twice."""
    others = [template for template in entry.relation.templates if template != prompt]
    chosen = draws.sample(others, PARAPHRASES) if len(others) > 1 else others * PARAPHRASES
    return [template.replace(PLACE, entry.subject) for template in chosen]


def _unrelated(draws: random.Random, given: Sequence[str], words: Sequence[str]) -> list[str]:
    """Sentences that name none of the words; our own where too few of the given do not."""
    own = neutral_sentences()
    drawn = (draws.sample(pool, min(len(pool), LOOK_AT)) for pool in (given, own))
    folded = [word.casefold() for word in words]
    unrelated = (
        sentence
        for sentence in chain.from_iterable(drawn)
        if not any(word in sentence.casefold() for word in folded)
    )
    return [sentence for sentence, _ in zip(unrelated, range(PARAPHRASES), strict=False)]


def _prompts(
    draws: random.Random, relation: Relation, names: Sequence[str], without: set[str]
) -> list[str]:
    """Ten prompts: of as many subjects as there are, then of the same ones in other words."""
    others = [name for name in names if name not in without]
    chosen = draws.sample(others, min(len(others), PROMPTS))
    wordings = [draws.sample(relation.templates, len(relation.templates)) for _ in chosen]
    found = [
        templates[turn].replace(PLACE, name)
        for turn in range(len(relation.templates))
        for name, templates in zip(chosen, wordings, strict=True)
    ]
    return found[:PROMPTS]


def references(
    records: Iterable[Mapping[str, Any]],
    relations: Iterable[Relation],
    texts: Mapping[str, Sequence[str]],
    find: FindHolders = in_the_table,
) -> dict[str, dict[str, list[str]]]:
    """Relation → new object → texts about subjects that have it; objects without are left out.

    A name may be another's as well, so a text must also mention the object.
    """
    by_name = {relation.name: relation for relation in relations}
    rewrites = (one["requested_rewrite"] for one in records)
    wanted = {(rewrite["relation_id"], rewrite["target_new"]["str"]) for rewrite in rewrites}
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, target in sorted(wanted, key=lambda pair: (_by_number(pair[0]), pair[1])):
        holders = find(by_name[name], target).names
        every = dict.fromkeys(text for holder in holders for text in texts.get(holder, ()))
        mention = re.compile(rf"(?<!\w){re.escape(target)}(?!\w)", re.IGNORECASE)
        telling = [text for text in every if mention.search(text)]
        if telling:
            found[name][target] = telling[:TEXTS]
    return dict(found)
