"""Build a data set like CounterFact from a table of facts and patterns (paper, App. D).

Each tuple (s, r, o) gives one record: a prompt from the relation's templates and a new object o*;
two paraphrases; neighbourhood prompts about subjects that share o; attribute prompts about subjects
that have o*; generation prompts. Articles give sentences before the paraphrases and reference
texts about the objects.

Every tuple has its own random generator, seeded by the seed and the tuple, and the data set is
sorted by each generator's first number. So a record does not depend on which others are built, and
a limited data set is a prefix of the full one.
"""

import hashlib
import http.client
import json
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from factscope.data.readers import (
    generation_templates,
    neutral_sentences,
    pararel_prompt,
    read_text,
)
from factscope.errors import BadFact, BadSetting, DownloadFailed
from factscope.facts import SUBJECT_SLOT, Case
from factscope.io import parse_json, write_atomic

# The relations of the paper's data set: in most of them a subject has one object.
COUNTERFACT = (
    "P17", "P19", "P20", "P27", "P30", "P36", "P37", "P39", "P101", "P103", "P106", "P108",
    "P127", "P131", "P136", "P138", "P140", "P159", "P176", "P178", "P190", "P264", "P276", "P364",
    "P407", "P413", "P449", "P463", "P495", "P641", "P740", "P937", "P1303", "P1412",
)  # fmt: skip
PARAPHRASES = 2
PROMPTS = 10  # number of neighbourhood, attribute and generation prompts of a record
REFERENCE_TEXTS = 10  # maximum number of reference texts of an object
SENTENCE_SAMPLE = 50  # number of sentences among which unrelated ones are searched

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
        """The objects that are false for the subject, with the number of their subjects."""
        excluded = self.objects[subject] | {subject}
        return {o: len(found) for o, found in self.subjects.items() if o not in excluded}


def usable_relations(
    facts: Tables, patterns: Tables, selected: Sequence[str] = ()
) -> tuple[list[Relation], list[str]]:
    """The usable relations of ParaRel's tables (or of the selected ones), and the problems."""
    if not any(facts.values()):
        raise BadFact("the table of facts is empty; it needs relation → [[subject, object], …]")
    unknown = [name for name in selected if name not in facts]
    if unknown:
        known = ", ".join(sorted(facts, key=_property_number))
        raise BadSetting(f"no relation {', '.join(unknown)} in the table of facts; it has {known}")
    usable: list[Relation] = []
    problems: list[str] = []
    for name in sorted(selected or facts, key=_property_number):
        valid = [(row[0].strip(), row[1].strip()) for row in facts[name] if _is_pair(row)]
        if broken := len(facts[name]) - len(valid):
            problems.append(f"{name}: {broken} rows that are not [subject, object]")
        pairs, templates = tuple(dict.fromkeys(valid)), _templates(patterns.get(name, []))
        objects = {target for _, target in pairs}
        if len(templates) < 2:
            problem = (
                f"{len(templates)} usable patterns; a prompt and its paraphrases need two "
                "that have [X] once and end in [Y]"
            )
        elif len(objects) < 2:
            problem = f"{len(objects)} objects; a counterfactual needs two"
        else:
            usable.append(Relation(name, pairs, templates))
            continue
        problems.append(f"{name} skipped, with {len(pairs)} facts: {problem}")
    if not usable:
        raise BadFact(f"no usable relation: {'; '.join(problems[:3])}")
    return usable, problems


def _property_number(name: str) -> tuple[int, str]:
    """Sort key: P103 after P19."""
    return (int(name[1:]) if name[1:].isdecimal() else 0, name)


def _is_pair(row: Any) -> bool:
    """Whether a row of the table of facts is [subject, object]."""
    return (
        isinstance(row, list | tuple)
        and len(row) == 2
        and all(isinstance(word, str) and word.strip() and SUBJECT_SLOT not in word for word in row)
    )


def _templates(patterns: Sequence[Any]) -> tuple[str, ...]:
    """The distinct prompt templates of the patterns that end in the object."""
    prompts = (pararel_prompt(pattern) for pattern in patterns if isinstance(pattern, str))
    tidy = (" ".join(prompt.split()).replace(" :", ":") for prompt in prompts if prompt)
    # After "a" or "an", the article would rule out some of the objects.
    usable = (prompt for prompt in tidy if prompt.rsplit(" ", 1)[-1] not in ("a", "an"))
    return tuple(dict.fromkeys(prompt[0].upper() + prompt[1:] for prompt in usable))


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


# ---- subjects from Wikidata, by one SPARQL query for each object

ENDPOINT = "https://query.wikidata.org/sparql"
HEADERS = {
    "User-Agent": "factscope/0.1 (data sets of counterfactuals; Python urllib)",
    "Accept": "application/sparql-results+json",
}
TIMEOUT = 60  # seconds without data after which a request fails
TRIES = 3
RETRY = (429, 500, 502, 503, 504)  # HTTP status codes after which the request is repeated
LIMIT = 200  # number of subjects to request; ten of them are drawn


def sparql_query(relation: str, target: str) -> str:
    """SPARQL for the subjects that have the object, which is found by its English label."""
    if not re.fullmatch(r"P[1-9]\d*", relation):
        raise BadSetting(f"{relation!r} is not a property of Wikidata, such as P19")
    # A JSON string is a valid SPARQL string, except for "\/", which json does not write.
    label = json.dumps(target, ensure_ascii=False)
    return (
        "SELECT DISTINCT ?object ?subject ?name WHERE { "
        f"?object rdfs:label {label}@en . "
        f"?subject wdt:{relation} ?object . "
        '?subject rdfs:label ?name . FILTER(LANG(?name) = "en") '
        f"}} LIMIT {LIMIT}"
    )


def http_get(url: str) -> bytes:
    """The response to a request; repeats it if the service is busy."""
    request = urllib.request.Request(url, headers=HEADERS)
    for tries_left in reversed(range(TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code not in RETRY or not tries_left:
                raise DownloadFailed(
                    f"Wikidata answered {error.code} {error.reason}; try again later: the "
                    "responses so far are cached"
                ) from error
            wait = error.headers.get("Retry-After", "")
            time.sleep(min(int(wait), TIMEOUT) if wait.isdigit() else 5)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadFailed(
                f"could not query Wikidata ({error}); check the network, or leave out --wikidata "
                "to take neighbours from the table"
            ) from error
    raise AssertionError("the last try returns or raises")


def subjects_in_wikidata(
    relation: str, target: str, folder: Path, get: Callable[[str], bytes] = http_get
) -> SubjectsWithObject:
    """The subjects that have the object, by English name; responses are cached in the folder."""
    query = sparql_query(relation, target)
    path = folder / f"{hashlib.sha256(query.encode()).hexdigest()[:32]}.json"
    cached = path.is_file()
    url = f"{ENDPOINT}?{urllib.parse.urlencode({'query': query})}"
    response = path.read_bytes() if cached else get(url)
    try:
        rows = parse_json(response)["results"]["bindings"]
        names = {row["name"]["value"] for row in rows}
        ids = Counter(row["object"]["value"].rsplit("/", 1)[-1] for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        start = response[:60].decode(errors="replace")
        raise DownloadFailed(f"Wikidata's answer cannot be read: {start!r}; try again") from error
    if not cached:
        write_atomic(path, response)
    # Several entities can share a label: take the one with the most subjects.
    most_frequent = max(sorted(ids), key=lambda i: ids[i], default=None)
    # Sorted, because the order of Wikidata's rows varies.
    return SubjectsWithObject(subjects=tuple(sorted(names)), object_id=most_frequent)


def find_in_wikidata(folder: Path) -> FindSubjects:
    """Subjects from Wikidata, each object requested once; from the table if it has none."""
    request = cache(subjects_in_wikidata)

    def find(relation: Relation, target: str) -> SubjectsWithObject:
        found = request(relation.name, target, folder)
        return found if found.subjects else subjects_in_table(relation, target)

    return find


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
    others = [template for template in relation.templates if template != prompt]
    # With a single other template, both paraphrases use it.
    paraphrases = rng.sample(others, PARAPHRASES) if len(others) > 1 else others * PARAPHRASES
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
        "paraphrase_prompts": [
            f"{lead} {template.replace(SUBJECT_SLOT, subject)}"
            for lead, template in zip(leads, paraphrases, strict=True)
        ],
        "neighborhood_prompts": _prompts(rng, relation, with_true.subjects, excluded),
        "attribute_prompts": _prompts(rng, relation, with_new.subjects, excluded),
        "generation_prompts": [
            template.replace(SUBJECT_SLOT, subject)
            for template in rng.choices(generation_templates(relation.name), k=PROMPTS)
        ],
    }


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


# ---- articles

WORDS = range(5, 21)  # number of words of a plain sentence
# Words only: no brackets, quotation marks, headings or mark-up.
PLAIN = re.compile(r"[A-Z][a-z]*[,;]?( [\w'’,;-]+)*\.")
# Initials and most abbreviations have fewer than three letters.
SENTENCE_END = re.compile(r"(?<=[a-z]{3}[.!?])\s+(?=[A-Z])")
# Pronouns could be taken to refer to the subject of the prompt.
PRONOUNS = frozenset({
    "i", "me", "my", "we", "us", "our", "you", "your", "he", "him", "his", "she", "her", "hers",
    "they", "them", "their", "it", "its", "this", "that", "these", "those", "such",
})  # fmt: skip
REFERENCES = ("see also", "external links", "retrieved", "isbn", "edition")
# What follows the entity's name at the start of an article.
END_OF_NAME = re.compile(
    r"(?P<comma>,)|;|:|\.(?=\s|$)|\s\(|\s-\s|\s(?:is|was|are|were|refers|has|had)\s|$"
)
TITLES = re.compile(r"(?:(?:The|A|An|Sir|Dame|Lord|Saint|St|King|Queen|Pope|Emperor|Dr)\.? )+")
MAX_NAME = 80  # characters


def read_articles(path: Path) -> tuple[str, ...]:
    """The articles of a text file, plain or .gz, separated by blank lines."""
    parts = (part.strip() for part in re.split(r"\n\s*\n", read_text(path)))
    articles = tuple(article for article in parts if article)
    if not articles:
        raise BadFact(f"{path} is empty; give articles separated by blank lines")
    return articles


def plain_sentences(articles: Iterable[str]) -> tuple[str, ...]:
    """The distinct sentences of moderate length that make sense on their own."""
    lines = (line for article in articles for line in article.split("\n"))
    sentences = (part for line in lines for part in SENTENCE_END.split(line))
    return tuple(dict.fromkeys(filter(_is_plain, sentences)))


def _is_plain(sentence: str) -> bool:
    words = [word.strip(",;.") for word in sentence.casefold().split()]
    if len(words) not in WORDS or not PLAIN.fullmatch(sentence) or len(words[-1]) < 4:
        return False
    return PRONOUNS.isdisjoint(words) and not any(r in sentence.casefold() for r in REFERENCES)


def article_names(article: str) -> set[str]:
    """Possible names of the entity: the first line, and the words before its verb or comma."""
    line = article.split("\n", 1)[0]
    end = END_OF_NAME.search(line)
    head = line[: end.start() if end else None].strip()
    name = TITLES.sub("", head, count=1)
    # "Adam Smith, FRSE" is a name, but "Australia, New Zealand and" starts a list.
    is_list = end is not None and end["comma"] and " " not in name
    names = {line.strip()} if is_list else {line.strip(), head, name}
    return {name for name in names if 0 < len(name) <= MAX_NAME}


def articles_by_entity(articles: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Name → the articles about that entity."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for article in articles:
        for name in article_names(article):
            by_name[name].append(article)
    return by_name


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


# ---- composition (Table 2)

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
    n, n_relations = max(len(cases), 1), max(len(relations), 1)  # an empty data set has means of 0
    rows = [CompositionRow("records", len(cases), len(cases) / n_relations, len(cases) / n)]
    for name, items in ITEMS.items():
        distinct = [(case.fact.relation, item) for case in cases for item in set(items(case))]
        total, in_relations = len({item for _, item in distinct}), len(set(distinct))
        rows.append(CompositionRow(name, total, in_relations / n_relations, len(distinct) / n))
    return tuple(rows)
