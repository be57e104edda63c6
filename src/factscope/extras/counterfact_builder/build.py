"""Build a data set like CounterFact from a table of facts and patterns (paper, App. D).

Each tuple (s, r, o) gives one record: a prompt from the relation's templates and a new object o*;
two paraphrases; neighbourhood prompts about subjects that share o; attribute prompts about subjects
that have o*; generation prompts.

Every tuple has its own random generator, seeded by the seed and the tuple, and the data set is
sorted by each generator's first number. So a record does not depend on which others are built, and
a limited data set is a prefix of the full one.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any

from factscope.data.readers import generation_templates, neutral_sentences, pararel_prompt
from factscope.errors import BadFact, BadSetting
from factscope.facts import SUBJECT_SLOT

COUNTERFACT = (
    "P17", "P19", "P20", "P27", "P30", "P36", "P37", "P39", "P101", "P103", "P106", "P108",
    "P127", "P131", "P136", "P138", "P140", "P159", "P176", "P178", "P190", "P264", "P276", "P364",
    "P407", "P413", "P449", "P463", "P495", "P641", "P740", "P937", "P1303", "P1412",
)  # fmt: skip
"""The relations of the paper's data set: in most of them a subject has one object."""
PARAPHRASES = 2
PROMPTS = 10
"""Number of neighbourhood, attribute and generation prompts of a record."""
REFERENCE_TEXTS = 10
"""Maximum number of reference texts of an object."""
SENTENCE_SAMPLE = 50
"""Number of sentences among which unrelated ones are searched."""

Tables = Mapping[str, Sequence[Any]]
"""A table of ParaRel: relation → pairs or patterns."""


# ---- relations


@dataclass(frozen=True)
class Relation:
    """A relation: its distinct (subject, object) pairs, and templates that end in the object."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    templates: tuple[str, ...]

    @cached_property
    def frequency(self) -> Counter[str]:
        """Object → number of its subjects."""
        return Counter(target for _, target in self.pairs)

    @cached_property
    def objects(self) -> dict[str, set[str]]:
        """Subject → its true objects."""
        by_subject: dict[str, set[str]] = defaultdict(set)
        for subject, target in self.pairs:
            by_subject[subject].add(target)
        return by_subject

    @cached_property
    def subjects(self) -> dict[str, list[str]]:
        """Object → its subjects."""
        by_object: dict[str, list[str]] = defaultdict(list)
        for subject, target in self.pairs:
            by_object[target].append(subject)
        return by_object

    def candidates(self, subject: str) -> dict[str, int]:
        """The objects that are false for the subject, with their frequencies."""
        false = self.frequency.keys() - self.objects[subject] - {subject}
        return {target: n for target, n in self.frequency.items() if target in false}


@dataclass(frozen=True)
class Relations:
    """The usable relations of the tables, and messages about the others."""

    usable: tuple[Relation, ...]
    problems: tuple[str, ...]


def usable_relations(facts: Tables, patterns: Tables, selected: Sequence[str] = ()) -> Relations:
    """The relations of ParaRel's tables, or only the selected ones."""
    if not any(facts.values()):
        raise BadFact("the table of facts is empty; it needs relation → [[subject, object], …]")
    unknown = [name for name in selected if name not in facts]
    if unknown:
        known = ", ".join(sorted(facts, key=_property_number))
        raise BadSetting(f"no relation {', '.join(unknown)} in the table of facts; it has {known}")
    usable: list[Relation] = []
    problems: list[str] = []
    for name in sorted(selected or facts, key=_property_number):
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
        raise BadFact(f"no usable relation: {'; '.join(problems[:3])}")
    return Relations(tuple(usable), tuple(problems))


def _property_number(name: str) -> tuple[int, str]:
    """Sort key: P103 after P19."""
    return (int(name[1:]) if name[1:].isdecimal() else 0, name)


def _pairs(rows: Sequence[Any]) -> tuple[tuple[tuple[str, str], ...], int]:
    """The distinct valid pairs, and the number of invalid rows."""
    valid = [
        (row[0].strip(), row[1].strip())
        for row in rows
        if isinstance(row, list | tuple)
        and len(row) == 2
        and all(isinstance(word, str) and word.strip() and SUBJECT_SLOT not in word for word in row)
    ]
    return tuple(dict.fromkeys(valid)), len(rows) - len(valid)


def _templates(patterns: Sequence[Any]) -> tuple[str, ...]:
    """The distinct prompt templates of the patterns that end in the object."""
    prompts = (pararel_prompt(pattern) for pattern in patterns if isinstance(pattern, str))
    tidy = (" ".join(prompt.split()).replace(" :", ":") for prompt in prompts if prompt)
    # After "a" or "an", the article would rule out some of the objects.
    usable = (prompt for prompt in tidy if prompt.rsplit(" ", 1)[-1] not in ("a", "an"))
    return tuple(dict.fromkeys(prompt[0].upper() + prompt[1:] for prompt in usable))


def _problem(relation: Relation) -> str | None:
    """Why a relation cannot be used, or None."""
    if len(relation.templates) < 2:
        return (
            f"{len(relation.templates)} usable patterns; a prompt and its paraphrases need two "
            "that have [X] once and end in [Y]"
        )
    if len(relation.frequency) < 2:
        return f"{len(relation.frequency)} objects; a counterfactual needs two"
    return None


# ---- subjects with an object


@dataclass(frozen=True)
class SubjectsWithObject:
    """The subjects that have an object in a relation, and the object's Wikidata id if known."""

    subjects: Sequence[str]
    object_id: str | None = None


FindSubjects = Callable[[Relation, str], SubjectsWithObject]
"""Called with a relation and an object."""


def subjects_in_table(relation: Relation, target: str) -> SubjectsWithObject:
    """The subjects of an object in the table of facts."""
    return SubjectsWithObject(relation.subjects.get(target, []))


# ---- records


@dataclass(frozen=True)
class KnowledgeTuple:
    """A tuple (s, r, o) from which a record can be built, and the data set's seed."""

    relation: Relation
    subject: str
    target: str
    seed: int

    def rng(self) -> random.Random:
        """A new generator, seeded by the seed and the tuple."""
        parts = (str(self.seed), self.relation.name, self.subject, self.target)
        return random.Random("\n".join(parts))


def knowledge_tuples(relations: Iterable[Relation], seed: int) -> list[KnowledgeTuple]:
    """Every tuple for which there is a false object, in the order of the data set."""
    tuples = [
        KnowledgeTuple(relation, subject, target, seed)
        for relation in relations
        for subject, target in relation.pairs
        if relation.candidates(subject)
    ]
    return sorted(tuples, key=lambda fact: fact.rng().random())


def build_records(
    tuples: Iterable[KnowledgeTuple],
    *,
    sentences: Sequence[str] = (),
    find: FindSubjects = subjects_in_table,
    full: bool = False,
) -> Iterator[dict[str, Any]]:
    """One record per tuple, numbered from 0; `full` skips those with fewer than ten prompts."""
    number = 0
    for fact in tuples:
        record = build_record(fact, number, sentences=sentences, find=find)
        counts = len(record["neighborhood_prompts"]), len(record["attribute_prompts"])
        if not full or counts == (PROMPTS, PROMPTS):
            yield record
            number += 1


def build_record(
    fact: KnowledgeTuple,
    number: int,
    *,
    sentences: Sequence[str] = (),
    find: FindSubjects = subjects_in_table,
) -> dict[str, Any]:
    """A record in CounterFact's format; the sentences are put before the paraphrases."""
    relation, subject, true = fact.relation, fact.subject, fact.target
    rng = fact.rng()
    rng.random()  # skip the number that sorts the data set
    prompt = rng.choice(relation.templates)
    candidates = relation.candidates(subject)
    [new] = rng.choices(list(candidates), list(candidates.values()))
    with_true, with_new = find(relation, true), find(relation, new)
    # The subject itself, and subjects for which both objects are true.
    excluded = {subject} | set(relation.subjects[new]) & set(relation.subjects[true])
    paraphrases = _paraphrases(rng, fact, prompt)
    leads = _unrelated_sentences(rng, sentences, (subject, true, new))
    return {
        "case_id": number,
        "requested_rewrite": {
            "prompt": prompt,
            "relation_id": relation.name,
            "target_new": {"str": new, "id": with_new.object_id},
            "target_true": {"str": true, "id": with_true.object_id},
            "subject": subject,
        },
        "paraphrase_prompts": [f"{a} {b}" for a, b in zip(leads, paraphrases, strict=True)],
        "neighborhood_prompts": _prompts(rng, relation, with_true.subjects, excluded),
        "attribute_prompts": _prompts(rng, relation, with_new.subjects, excluded),
        "generation_prompts": [
            template.replace(SUBJECT_SLOT, subject)
            for template in rng.choices(generation_templates(relation.name), k=PROMPTS)
        ],
    }


def _paraphrases(rng: random.Random, fact: KnowledgeTuple, prompt: str) -> list[str]:
    """The subject in two other templates; in the same one twice if there is only one."""
    others = [template for template in fact.relation.templates if template != prompt]
    chosen = rng.sample(others, PARAPHRASES) if len(others) > 1 else others * PARAPHRASES
    return [template.replace(SUBJECT_SLOT, fact.subject) for template in chosen]


def _unrelated_sentences(
    rng: random.Random, sentences: Sequence[str], words: Sequence[str]
) -> list[str]:
    """Sentences that contain none of the words; the package's own if too few remain."""
    pools = (sentences, neutral_sentences())
    sampled = (rng.sample(pool, min(len(pool), SENTENCE_SAMPLE)) for pool in pools)
    folded = [word.casefold() for word in words]
    unrelated = (
        sentence
        for sentence in chain.from_iterable(sampled)
        if not any(word in sentence.casefold() for word in folded)
    )
    # Fetching one more can sample the second pool: earlier versions did, and the random numbers
    # that follow, hence the records of a seed, must not change.
    return list(islice(unrelated, PARAPHRASES + 1))[:PARAPHRASES]


def _prompts(
    rng: random.Random, relation: Relation, subjects: Sequence[str], excluded: set[str]
) -> list[str]:
    """Ten prompts: one per subject, then about the same subjects in other templates."""
    others = [subject for subject in subjects if subject not in excluded]
    chosen = rng.sample(others, min(len(others), PROMPTS))
    shuffled = [rng.sample(relation.templates, len(relation.templates)) for _ in chosen]
    prompts = [
        templates[i].replace(SUBJECT_SLOT, subject)
        for i in range(len(relation.templates))
        for subject, templates in zip(chosen, shuffled, strict=True)
    ]
    return prompts[:PROMPTS]


# ---- reference texts


def build_references(
    records: Iterable[Mapping[str, Any]],
    relations: Iterable[Relation],
    texts: Mapping[str, Sequence[str]],
    find: FindSubjects = subjects_in_table,
) -> dict[str, dict[str, list[str]]]:
    """Relation → new object → texts about subjects with that object, where there are any.

    Several entities can share a name, so a text must also mention the object.
    """
    by_name = {relation.name: relation for relation in relations}
    rewrites = (record["requested_rewrite"] for record in records)
    targets = {(rewrite["relation_id"], rewrite["target_new"]["str"]) for rewrite in rewrites}
    references: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, target in sorted(targets, key=lambda pair: (_property_number(pair[0]), pair[1])):
        subjects = find(by_name[name], target).subjects
        distinct = dict.fromkeys(text for subject in subjects for text in texts.get(subject, ()))
        mention = re.compile(rf"(?<!\w){re.escape(target)}(?!\w)", re.IGNORECASE)
        mentioning = [text for text in distinct if mention.search(text)]
        if mentioning:
            references[name][target] = mentioning[:REFERENCE_TEXTS]
    return dict(references)
