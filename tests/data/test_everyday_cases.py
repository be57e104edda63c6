"""The package's own cases: complete, consistent, and known to small models."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from factscope.data.readers import EVERYDAY_CASES, everyday_cases
from factscope.evaluation.score import Query, score_queries
from factscope.lm.model import LM

RECORDS = [json.loads(line) for line in EVERYDAY_CASES.read_text("utf-8").splitlines()]
TEMPLATES: dict[str, set[str]] = defaultdict(set)
for _record in RECORDS:
    _rewrite = _record["requested_rewrite"]
    TEMPLATES[_rewrite["relation_id"]].add(_rewrite["prompt"])


def test_number_of_cases_and_relations() -> None:
    cases = everyday_cases()
    assert len(cases) == len(RECORDS) >= 64
    assert len({case.fact.relation for case in cases}) >= 10
    assert len({case.fact.id for case in cases}) == len(cases)
    assert len({case.fact.text for case in cases}) == len(cases)


def test_every_record_is_complete() -> None:
    for case in everyday_cases():
        assert case.true is not None
        assert case.fact.target not in (None, case.true)
        lists = (case.paraphrases, case.neighbours, case.attributes, case.generations)
        assert [len(texts) for texts in lists] == [2, 10, 10, 10]
        assert all(case.fact.subject in text for text in case.paraphrases + case.generations)
        assert not any(text.endswith(" ") for texts in lists for text in texts)


def test_paraphrases_begin_with_an_unrelated_sentence() -> None:
    for case in everyday_cases():
        for text in case.paraphrases:
            lead, found, question = text.partition(". ")
            assert found
            assert case.fact.subject in question
            assert not any(word in lead for word in (case.fact.subject, case.true or ""))


def statements(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every prompt of a record that has a true object, and that object."""
    rewrite = record["requested_rewrite"]
    true, new = rewrite["target_true"]["str"], rewrite["target_new"]["str"]
    yield rewrite["prompt"].replace("{}", rewrite["subject"]), true
    yield from ((prompt, true) for prompt in record["neighborhood_prompts"])
    yield from ((prompt, new) for prompt in record["attribute_prompts"])


def subject_of(prompt: str, relation: str) -> str:
    """The subject that gives the prompt with the longest matching template of the relation."""
    parts = [template.split("{}") for template in TEMPLATES[relation]]
    fitting = [f for f in parts if prompt.startswith(f[0]) and prompt.endswith(f[1])]
    before, after = max(fitting, key=lambda part: len("".join(part)))
    return prompt[len(before) : len(prompt) - len(after)]


def test_no_subject_has_two_objects() -> None:
    objects: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in RECORDS:
        relation = record["requested_rewrite"]["relation_id"]
        for prompt, target in statements(record):
            objects[relation, subject_of(prompt, relation)].add(target)
    assert {key: found for key, found in objects.items() if len(found) > 1} == {}
    assert len(objects) > 500


def test_neighbours_have_distinct_other_subjects() -> None:
    for record in RECORDS:
        rewrite = record["requested_rewrite"]
        for prompts in (record["neighborhood_prompts"], record["attribute_prompts"]):
            subjects = Counter(subject_of(prompt, rewrite["relation_id"]) for prompt in prompts)
            assert set(subjects.values()) == {1}
            assert rewrite["subject"] not in subjects


@pytest.fixture(scope="module")
def margins(default_model: LM) -> list[float]:
    """Log-probability of the true object minus that of the new one, for each case."""
    asks = [
        Query(case.fact.text, target)
        for case in everyday_cases()
        for target in (case.true or "", case.fact.target or "")
    ]
    found = score_queries(default_model, asks)
    return [new.nll - true.nll for true, new in zip(found[::2], found[1::2], strict=True)]


def test_the_default_model_knows_most_cases(margins: list[float]) -> None:
    assert sum(margin > 0 for margin in margins) / len(margins) >= 0.85
