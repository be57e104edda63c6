"""Case files: CounterFact, EasyEdit's condensed CounterFact, zsRE, and a user's own format."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from factscope.data.readers import read_cases
from factscope.errors import BadFact
from factscope.facts import Case, Fact

COUNTERFACT = {
    "case_id": 18,
    "pararel_idx": 2,
    "requested_rewrite": {
        "prompt": "{}, created by",
        "relation_id": "P176",
        "target_new": {"str": "Honda", "id": "Q9584"},
        "target_true": {"str": "Porsche", "id": "Q40993"},
        "subject": "Porsche 911",
    },
    "paraphrase_prompts": ["Porsche 911 is developed by"],
    "neighborhood_prompts": ["Porsche 550, developed by", "Porsche 804 is created by"],
    "attribute_prompts": ["Honda Bali is produced by"],
    "generation_prompts": ["Porsche 911 is sold by"],
}
OWN = {"subject": "Oslo", "prompt": "Oslo is in", "to": "Italy", "true": "Norway",
       "paraphrases": ["Where is Oslo? In"], "neighbours": ["Bergen is in"]}  # fmt: skip


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_counterfact_format(tmp_path: Path) -> None:
    path = tmp_path / "counterfact.json.gz"
    path.write_bytes(gzip.compress(json.dumps([COUNTERFACT]).encode()))
    [case] = read_cases(path).cases
    fact = Fact(
        subject="Porsche 911", prompt="{}, created by", target="Honda", id="18", relation="P176"
    )
    assert case == Case(
        fact=fact,
        true="Porsche",
        paraphrases=("Porsche 911 is developed by",),
        neighbours=("Porsche 550, developed by", "Porsche 804 is created by"),
        attributes=("Honda Bali is produced by",),
        generations=("Porsche 911 is sold by",),
        target_id="Q9584",
    )


def test_factscope_format(tmp_path: Path) -> None:
    bare = {"subject": "Lima", "prompt": "{} is in", "target_new": "France"}
    first, second = read_cases(written(tmp_path / "mine.jsonl", OWN, bare)).cases
    assert first.fact == Fact(subject="Oslo", prompt="{} is in", target="Italy", id="1")
    assert (first.true, first.paraphrases, first.neighbours) == (
        "Norway",
        ("Where is Oslo? In",),
        ("Bergen is in",),
    )
    assert second == Case(fact=Fact(subject="Lima", prompt="{} is in", target="France", id="2"))


def test_condensed_counterfact_format(tmp_path: Path) -> None:
    record = {"case_id": 0, "prompt": "The mother tongue of Danielle Darrieux is",
              "target_new": "English", "subject": "Danielle Darrieux", "ground_truth": "French",
              "rephrase_prompt": "She speaks", "locality_prompt": "Michel Rocard speaks",
              "locality_ground_truth": "French"}  # fmt: skip
    [case] = read_cases(written(tmp_path / "condensed.json", record)).cases
    assert (case.fact.target, case.true) == ("English", "French")
    assert (case.paraphrases, case.neighbours) == (("She speaks",), ("Michel Rocard speaks",))


ZSRE = {"subject": "Call the Doctor", "src": "What artist created Call the Doctor?",
        "pred": "Riders in the Sky", "rephrase": "Which artist created Call the Doctor?",
        "alt": "The X-Files", "answers": ["Sleater-Kinney", "S-K"],
        "loc": "nq question: who sang white wedding", "loc_ans": "Billy Idol"}  # fmt: skip


def test_zsre_format_as_in_the_papers_code(tmp_path: Path) -> None:
    path = written(tmp_path / "zsre.json", ZSRE)
    [case] = read_cases(path).cases
    assert case == Case(
        fact=Fact(
            subject="Call the Doctor",
            prompt="What artist created {}?",
            target="Sleater-Kinney",
            id="0",
        ),
        paraphrases=("Which artist created Call the Doctor?",),
        neighbours=("nq question: who sang white wedding?",),
        neighbour_answers=("Billy Idol",),
    )


def test_one_file_may_mix_formats(tmp_path: Path) -> None:
    path = written(tmp_path / "mixed.jsonl", COUNTERFACT, ZSRE, OWN)
    assert [case.fact.id for case in read_cases(path).cases] == ["18", "1", "3"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"subject": "Oslo"}, "'Oslo' is not in the prompt"),
        ({"subject": None}, "'subject' is None"),
        ({"src": ""}, "'src' is ''"),
        ({"answers": []}, "'answers' is []"),
        ({"answers": [" "]}, "'answers' is ' '"),
        ({"answers": "Sleater-Kinney"}, "must be a list"),
        ({"rephrase": 3}, "'rephrase' is 3"),
        ({"loc": None}, "'loc' is None"),
        ({"loc_ans": ""}, "'loc_ans' is ''"),
    ],
)
def test_a_broken_zsre_record_is_reported(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = written(tmp_path / "zsre.jsonl", ZSRE, {**ZSRE, **change})
    file = read_cases(path)
    assert len(file.cases) == 1
    [problem] = file.problems
    assert problem.startswith("zsre.jsonl, line 2: ")
    assert words in problem


def test_neighbour_answers(tmp_path: Path) -> None:
    own = {**OWN, "neighbour_answers": ["Norway"]}
    [case] = read_cases(written(tmp_path / "mine.jsonl", own)).cases
    assert case.neighbour_answers == ("Norway",)


BROKEN: dict[str, tuple[Any, str]] = {
    "no new object": ({**OWN, "to": None}, "'to' is missing"),
    "empty new object": ({**OWN, "to": "  "}, "'to' is missing"),
    "new object is a number": ({**OWN, "to": 3}, "'to' is 3"),
    "old object is true": ({**OWN, "true": True}, "'true' is True"),
    "no subject": ({**OWN, "subject": ""}, "'subject'"),
    "subject not there": ({**OWN, "subject": "Rome"}, "'Rome'"),
    "paraphrases are numbers": ({**OWN, "paraphrases": [1]}, "'paraphrases' is [1]"),
    "an empty neighbour": ({**OWN, "neighbours": [""]}, "'neighbours'"),
    "answers without neighbours": ({**OWN, "neighbour_answers": ["a", "b"]}, "2 answers for 1"),
    "lists in an object": ({**OWN, "neighbours": {"a": "b"}}, "must be a list of texts"),
    "a word": ("Oslo", "must be an object"),
    "requested_rewrite is a word": ({"requested_rewrite": "Oslo"}, "requested_rewrite"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_record_is_reported_and_the_others_are_read(tmp_path: Path, case: str) -> None:
    broken, words = BROKEN[case]
    file = read_cases(written(tmp_path / "mine.jsonl", OWN, broken))
    assert len(file.cases) == 1
    [problem] = file.problems
    assert problem.startswith("mine.jsonl, line 2: ")
    assert words in problem


def test_a_file_without_a_usable_case_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.jsonl", {"subject": "Oslo", "prompt": "Oslo is in"})
    with pytest.raises(BadFact, match=r"no usable fact.*'to' is missing"):
        read_cases(path)
    with pytest.raises(BadFact, match=r"cannot read .*lost"):
        read_cases(tmp_path / "lost.jsonl")
    path.write_text("[broken")
    with pytest.raises(BadFact, match="not JSON"):
        read_cases(path)
