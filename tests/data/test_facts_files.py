"""Fact files, and ParaRel's tables."""

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from factscope.data.readers import (
    FactsFile,
    everyday_facts,
    pararel_facts,
    read_cases,
    read_facts,
)
from factscope.errors import BadFact
from factscope.facts import Fact

TOWER = {"subject": "The Eiffel Tower", "prompt": "{} is in", "target": "Paris"}
NEEDLE = {"subject": "Space Needle", "prompt": "The Space Needle is in", "target": "Seattle"}


def written(path: Path, *records: Any) -> Path:
    """JSON lines; a string is written as it is."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_everyday_facts_are_complete() -> None:
    facts = everyday_facts()
    assert len(facts) >= 60
    assert len({fact.id for fact in facts}) == len(facts)
    assert all(fact.target and fact.subject in fact.text for fact in facts)
    assert len({fact.text for fact in facts}) == len(facts)


def test_known_1000_format(tmp_path: Path) -> None:
    record = {
        "known_id": 7,
        "subject": "Vinson Massif",
        "attribute": "Antarctica",
        "template": "{} is located in the continent",
        "prediction": " of Antarctica. It is",
        "prompt": "Vinson Massif is located in the continent of",
        "relation_id": "P30",
    }
    path = tmp_path / "known.json"
    path.write_text(json.dumps([record], indent=2))
    assert read_facts(path).facts == (
        Fact(
            subject="Vinson Massif",
            prompt="{} is located in the continent of",
            target="Antarctica",
            id="7",
            relation="P30",
        ),
    )


def test_counterfact_format(tmp_path: Path) -> None:
    record = {
        "case_id": 0,
        "pararel_idx": 2796,
        "requested_rewrite": {
            "prompt": "The mother tongue of {} is",
            "relation_id": "P103",
            "target_new": {"str": "English", "id": "Q1860"},
            "target_true": {"str": "French", "id": "Q150"},
            "subject": "Danielle Darrieux",
        },
        "paraphrase_prompts": ["Danielle Darrieux, a native"],
    }
    path = tmp_path / "counterfact.json"
    path.write_text(json.dumps([record]))
    assert read_facts(path).facts == (
        Fact(
            subject="Danielle Darrieux",
            prompt="The mother tongue of {} is",
            target="French",
            id="0",
            relation="P103",
        ),
    )


def test_json_lines_with_templates_or_texts(tmp_path: Path) -> None:
    file = read_facts(written(tmp_path / "facts.jsonl", TOWER, "", NEEDLE))
    assert [fact.text for fact in file.facts] == ["The Eiffel Tower is in", NEEDLE["prompt"]]
    assert [fact.prompt for fact in file.facts] == ["{} is in", "The {} is in"]
    assert [fact.id for fact in file.facts] == ["1", "3"]  # line numbers
    assert file.problems == ()


@pytest.mark.parametrize("name", ["facts.jsonl.gz", "facts.gz"])
def test_a_gzipped_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress((json.dumps(TOWER) + "\n").encode()))
    assert read_facts(path).facts[0].target == "Paris"


def test_a_fact_without_a_target(tmp_path: Path) -> None:
    record = {"subject": "Oslo", "prompt": "{} is in", "target": None}
    assert read_facts(written(tmp_path / "f.jsonl", record)).facts[0].target is None


def test_unicode(tmp_path: Path) -> None:
    """Unicode's line separator does not end a line of JSON."""
    record = {"subject": "東京タワー", "prompt": "{}は\u2028日本の", "target": "東京"}
    file = read_facts(written(tmp_path / "f.jsonl", record))
    assert file.problems == ()
    assert file.facts[0].text == "東京タワーは\u2028日本の"


BROKEN = {
    "not JSON": ('{"subject": "Oslo", ', "not JSON"),
    "a number": ("7", "must be an object"),
    "no subject": ({"prompt": "{} is in"}, "'subject'"),
    "empty subject": ({"subject": " ", "prompt": "{} is in"}, "'subject'"),
    "no prompt": ({"subject": "Oslo"}, "'prompt'"),
    "prompt of a wrong kind": ({"subject": "Oslo", "prompt": ["{}"]}, "'prompt'"),
    "target of a wrong kind": ({"subject": "Oslo", "prompt": "{} is", "target": 5}, "'target'"),
    "subject not in prompt": ({"subject": "Oslo", "prompt": "Olso is in"}, "Olso"),
    "two slots": ({"subject": "Oslo", "prompt": "{} and {} are in"}, "must have"),
    "rewrite of a wrong kind": ({"case_id": 1, "requested_rewrite": "x"}, "must be an object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_reported_and_the_others_are_read(tmp_path: Path, case: str) -> None:
    record, words = BROKEN[case]
    file = read_facts(written(tmp_path / "facts.jsonl", TOWER, record, NEEDLE))
    assert [fact.target for fact in file.facts] == ["Paris", "Seattle"]
    [problem] = file.problems
    assert problem.startswith("facts.jsonl, line 2: ")
    assert words in problem


def test_a_broken_record_of_a_list_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps([TOWER, {"subject": "x"}]))
    assert "facts.json, record 2" in read_facts(path).problems[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"[]", "empty"),
        (b"[{]", "not JSON"),
        (b"once upon a time", "line 1: not JSON"),
        (b'{"subject": "x"}', "line 1: .*prompt"),
        (b"\xff\xfe\x00", "cannot read .*; give a text file in UTF-8"),
        (b"[" * 100_000, "facts.* is not JSON .*recursion"),
    ],
)
def test_a_file_without_facts(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(data)
    with pytest.raises(BadFact, match=words) as caught:
        read_facts(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadFact, match=r"cannot read .*lost\.json"):
        read_facts(tmp_path / "lost.json")


@pytest.mark.parametrize("damage", ["not gzip", "truncated", "scrambled"])
def test_a_damaged_gzip(tmp_path: Path, damage: str) -> None:
    data = bytearray(gzip.compress(json.dumps([TOWER] * 50).encode()))
    if damage == "not gzip":
        data = bytearray(b"plain")
    elif damage == "truncated":
        data = data[:-12]
    else:
        data[12:40] = bytes(byte ^ 0xFF for byte in data[12:40])
    path = tmp_path / "facts.json.gz"
    path.write_bytes(data)
    with pytest.raises(BadFact, match="cannot read"):
        read_facts(path)


# ---- tables

ROWS = [
    ["subject", "prompt", "target", "id", "note"],
    ["The Eiffel Tower", "{} is in", "Paris", "eiffel", ""],
    ["Space Needle", 'The Space Needle, a "tower", is in', "", "", "no target"],
]
FACTS = (
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Paris", id="eiffel"),
    Fact(subject="Space Needle", prompt='The {}, a "tower", is in', target=None, id="3"),
)


def table(delimiter: str = ",", end: str = "\r\n") -> str:
    """ROWS as spreadsheets write them."""
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows(ROWS)
    return text.getvalue()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("name", "delimiter"),
    [("facts.csv", ","), ("facts.csv", ";"), ("FACTS.TSV", "\t"), ("facts.tsv.gz", "\t")],
)
def test_tables_of_spreadsheets(tmp_path: Path, name: str, delimiter: str, encoding: str) -> None:
    data = table(delimiter).encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert read_facts(path) == FactsFile(facts=FACTS, problems=())


def test_byte_order_mark_in_json(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_bytes(json.dumps(TOWER).encode("utf-8-sig"))
    assert read_facts(path).facts[0].target == "Paris"


def test_spaces_and_capitals_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text('\nSubject , Prompt, TARGET\n Oslo , "Oslo, that is in", Norway \n,,\n\n')
    [fact] = read_facts(path).facts
    assert (fact.text, fact.target, fact.id) == ("Oslo, that is in", "Norway", "3")


def test_case_lists_are_repeated_columns(tmp_path: Path) -> None:
    path = tmp_path / "cases.csv"
    path.write_text(
        "subject,prompt,to,true,paraphrases,paraphrases,neighbours\n"
        "Oslo,{} is in,Peru,Norway,Where is Oslo? In,Oslo lies in,Bergen is in\n"
        "Lima,{} is in,Chad,,Lima lies in,,\n"
    )
    oslo, lima = read_cases(path).cases
    assert (oslo.fact.target, oslo.true) == ("Peru", "Norway")
    assert oslo.paraphrases == ("Where is Oslo? In", "Oslo lies in")
    assert oslo.neighbours == ("Bergen is in",)
    assert (lima.true, lima.paraphrases, lima.neighbours) == (None, ("Lima lies in",), ())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("Oslo, the capital,{} is in,Norway", "4 cells under 3 columns; .* double quotes"),
        ('Oslo,"{} is in" the country,', "expected after '\"'"),
        (",{} is in,Norway", "'subject' is missing or empty"),
        ("Oslo,{} and {} are in,Norway", "must have"),
    ],
)
def test_broken_row_is_reported_with_its_line(tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "facts.csv"
    path.write_text(
        f'subject,prompt,target\n"Rome","{{}} is\nin",Italy\n{row}\nLima,{{}} is in,Peru'
    )
    file = read_facts(path)
    assert [fact.target for fact in file.facts] == ["Italy", "Peru"]
    [problem] = file.problems
    assert problem.startswith("facts.csv, line 4: ")
    assert re.search(words, problem)


def test_quote_that_never_ends_is_reported_where_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "facts.csv"
    path.write_text('subject,prompt\nRome,{} is in\nOslo,"{} is in\nLima,{} is in\n')
    assert read_facts(path).problems[0].startswith("facts.csv, line 3: unexpected end of data")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("subject,prompt\n", "it is empty"),
        ("subject,text\nOslo,x", r"line 1: no column 'prompt' in the header; .*subject, text"),
        ("subject,prompt,prompt\na,b,c", "line 1: two columns are named 'prompt'"),
        ('{"subject": "Oslo", "prompt": "{} is in"}', "line 1"),
    ],
)
def test_table_without_facts(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "facts.csv"
    path.write_text(text)
    with pytest.raises(BadFact, match=words) as caught:
        read_facts(path)
    assert str(path) in str(caught.value)


# ---- ParaRel


def tables(folder: Path, facts: Any, patterns: Any) -> tuple[Path, Path]:
    paths = folder / "facts.json", folder / "patterns.json"
    for path, table in zip(paths, (facts, patterns), strict=True):
        path.write_text(json.dumps(table))
    return paths


def test_pararel_uses_the_first_pattern_that_ends_in_the_object(tmp_path: Path) -> None:
    facts = {
        "P36": [["France", "Paris"], ["Italy", "Rome"]],
        "P103": [["Victor Hugo", "French"]],
        "P999": [["nobody", "nothing"]],  # no pattern at all
        "P7": [["a", "b"]],  # none that ends in the object
    }
    patterns = {
        "P36": [
            "[Y] is the capital of [X].",
            "The capital of [X] is [Y] .",
            "[X]'s capital is [Y].",
        ],
        "P103": ["The mother tongue of [X] is [Y]"],
        "P7": ["[Y] of [X]", "[X] has [Y] inside.", "no slot at all"],
    }
    found = list(pararel_facts(*tables(tmp_path, facts, patterns)))
    assert [(f.id, f.text, f.target) for f in found] == [
        ("P103-0", "The mother tongue of Victor Hugo is", "French"),
        ("P36-0", "The capital of France is", "Paris"),
        ("P36-1", "The capital of Italy is", "Rome"),
    ]
    assert {f.relation for f in found} == {"P103", "P36"}


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[1]", "not a table")])
def test_invalid_pararel_tables(tmp_path: Path, text: str, words: str) -> None:
    facts, patterns = tables(tmp_path, {}, {})
    patterns.write_text(text)
    with pytest.raises(BadFact, match=rf"patterns\.json.*{words}"):
        list(pararel_facts(facts, patterns))


def test_paths_may_be_strings(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text('{"subject": "Ann", "prompt": "{} speaks", "target": "Thai"}')
    assert read_facts(str(path)) == read_facts(path)
    path.write_text('{"subject": "Ann", "prompt": "{} speaks", "to": "Thai", "true": "Lao"}')
    assert read_cases(str(path)) == read_cases(path)
