"""Facts from files, facts that a model knows, and what a model says next."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from factscope.data.readers import everyday, read_facts, statements
from factscope.errors import BadFact
from factscope.facts import Fact
from factscope.lm.generate import generate_greedy
from factscope.lm.load import from_model
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.tracing import known as discover
from factscope.tracing.known import find_known, words_before

from families import tiny_model
from tokenizers_ import tokenizer

TOWER = {"subject": "The Eiffel Tower", "prompt": "{} is in", "target": "Paris"}
NEEDLE = {"subject": "Space Needle", "prompt": "The Space Needle is in", "target": "Seattle"}


def written(path: Path, *records: Any) -> Path:
    """JSON lines; a string is written as it is."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


# ---- a file of facts


def test_everyday_facts_are_whole() -> None:
    facts = everyday()
    assert len(facts) >= 20
    assert all(fact.target and fact.subject in fact.text for fact in facts)
    assert len({fact.text for fact in facts}) == len(facts)


def test_a_list_as_known_1000(tmp_path: Path) -> None:
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


def test_a_list_as_counterfact(tmp_path: Path) -> None:
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


def test_json_lines_with_and_without_a_place(tmp_path: Path) -> None:
    file = read_facts(written(tmp_path / "facts.jsonl", TOWER, "", NEEDLE))
    assert [fact.text for fact in file.facts] == ["The Eiffel Tower is in", NEEDLE["prompt"]]
    assert [fact.prompt for fact in file.facts] == ["{} is in", "The {} is in"]
    assert [fact.id for fact in file.facts] == ["1", "3"]  # their lines
    assert file.problems == ()


@pytest.mark.parametrize("name", ["facts.jsonl.gz", "facts.gz"])
def test_a_gzipped_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress((json.dumps(TOWER) + "\n").encode()))
    assert read_facts(path).facts[0].target == "Paris"


def test_a_fact_without_a_target(tmp_path: Path) -> None:
    record = {"subject": "Oslo", "prompt": "{} is in", "target": None}
    assert read_facts(written(tmp_path / "f.jsonl", record)).facts[0].target is None


def test_letters_of_the_world(tmp_path: Path) -> None:
    """Also a line separator of Unicode inside a text, which is no end of a line of JSON."""
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
    "two places": ({"subject": "Oslo", "prompt": "{} and {} are in"}, "must have"),
    "rewrite of a wrong kind": ({"case_id": 1, "requested_rewrite": "x"}, "must be an object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named_and_the_rest_kept(tmp_path: Path, case: str) -> None:
    record, words = BROKEN[case]
    file = read_facts(written(tmp_path / "facts.jsonl", TOWER, record, NEEDLE))
    assert [fact.target for fact in file.facts] == ["Paris", "Seattle"]
    [problem] = file.problems
    assert problem.startswith("facts.jsonl, line 2: ")
    assert words in problem


def test_a_broken_record_of_a_list_is_named(tmp_path: Path) -> None:
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
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_file_without_facts(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(data)
    with pytest.raises(BadFact, match=words) as caught:
        read_facts(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFact, match=r"cannot read .*lost\.json"):
        read_facts(tmp_path / "lost.json")


@pytest.mark.parametrize("damage", ["not gzip", "cut off", "scrambled"])
def test_a_damaged_gzip(tmp_path: Path, damage: str) -> None:
    data = bytearray(gzip.compress(json.dumps([TOWER] * 50).encode()))
    if damage == "not gzip":
        data = bytearray(b"plain")
    elif damage == "cut off":
        data = data[:-12]
    else:
        data[12:40] = bytes(byte ^ 0xFF for byte in data[12:40])
    path = tmp_path / "facts.json.gz"
    path.write_bytes(data)
    with pytest.raises(BadFact, match="cannot read"):
        read_facts(path)


# ---- ParaRel


def tables(folder: Path, facts: Any, patterns: Any) -> tuple[Path, Path]:
    paths = folder / "facts.json", folder / "patterns.json"
    for path, table in zip(paths, (facts, patterns), strict=True):
        path.write_text(json.dumps(table))
    return paths


def test_pararel_takes_the_first_pattern_that_ends_in_the_object(tmp_path: Path) -> None:
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
        "P7": ["[Y] of [X]", "[X] has [Y] inside.", "no place at all"],
    }
    found = list(statements(*tables(tmp_path, facts, patterns)))
    assert [(f.id, f.text, f.target) for f in found] == [
        ("P103-0", "The mother tongue of Victor Hugo is", "French"),
        ("P36-0", "The capital of France is", "Paris"),
        ("P36-1", "The capital of Italy is", "Rome"),
    ]
    assert {f.relation for f in found} == {"P103", "P36"}


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[1]", "not a table")])
def test_pararel_tables_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    facts, patterns = tables(tmp_path, {}, {})
    patterns.write_text(text)
    with pytest.raises(BadFact, match=rf"patterns\.json.*{words}"):
        list(statements(facts, patterns))


# ---- facts that a model knows

SAID = [
    ("Paris", " Paris, France", " "),
    ("Paris", " the city of Paris.", " the city of "),
    ("Paris", "Paris", ""),
    ("Paris", " London, not Paris", None),  # another name first
    ("Paris", " the Seine, in Paris", None),
    ("Paris", " the Parisian suburbs", None),  # within a longer word
    ("Paris", " a Parisian street in Paris", None),
    ("Paris", " cosmoParis and Paris", " cosmoParis and "),  # not the beginning of a word
    ("Paris", " paris", None),
    ("Paris", " nothing of the kind", None),
    ("Paris", "", None),
    ("Paris", " 2024 and Paris", " 2024 and "),  # a number is no name
    ("Paris", ' the "Île" in Paris', None),  # capitals beyond ASCII
    ("Paris", " Ödön of Paris", None),
    ("Paris", " Ω and Paris", None),
    ("Paris", " été à Paris", " été à "),
    ("東京", " 日本の 東京", " 日本の "),  # letters without case
    (" Paris ", " Paris", " "),
    ("C++", " C++ and Java", " "),
    ("New York", " the New York Times", " the "),
    ("New York", " New Orleans", None),
    ("basketball", " the sport of basketball", " the sport of "),
]


@pytest.mark.parametrize(("target", "said", "wanted"), SAID)
def test_words_before(target: str, said: str, wanted: str | None) -> None:
    assert words_before(target, said) == wanted


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return small("gpt2", "gpt2")


def small(family: str, style: str) -> LM:
    tok = tokenizer(style)
    model = tiny_model(family, vocabulary=len(tok))
    return from_model(model, tok, name=f"tiny {family}", check=False)


def test_find_known_draws_the_prompt_out(gpt2: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        "The Eiffel Tower is": " in the city of Paris.",
        "The Space Needle is": " in Portland, not Seattle.",
        "The Colosseum is in": " Rome, of course",
        "The Nile is": " a set {} of Egypt",
    }
    asked: list[tuple[list[str], int]] = []

    def say(lm: LM, texts: Sequence[str], tokens: int) -> list[str]:
        asked.append((list(texts), tokens))
        return [says[text] for text in texts]

    monkeypatch.setattr(discover, "generate_greedy", say)
    facts = [
        Fact(subject="The Eiffel Tower", prompt="{} is", target="Paris", id="a", relation="P1"),
        Fact(subject="Space Needle", prompt="The {} is", target="Seattle"),
        Fact(subject="Colosseum", prompt="The {} is in", target="Rome"),
        Fact(subject="Nile", prompt="The {} is", target="Egypt"),
    ]
    counted: list[int] = []
    found = list(find_known(gpt2, facts, tokens=7, batch=3, progress=counted.append))
    assert found == [
        (
            Fact(
                subject="The Eiffel Tower",
                prompt="{} is in the city of",
                target="Paris",
                id="a",
                relation="P1",
            ),
            " in the city of Paris.",
        ),
        (facts[2], " Rome, of course"),
    ]
    assert [tokens for _, tokens in asked] == [7, 7]
    assert [len(texts) for texts, _ in asked] == [3, 1]
    assert counted == [3, 1]


def test_find_known_needs_targets(gpt2: LM) -> None:
    with pytest.raises(BadFact, match=r"Oslo.*target"):
        list(find_known(gpt2, [Fact(subject="Oslo", prompt="{} is")]))


# ---- what a model says next

TEXTS = (
    "The Eiffel Tower is located in the city of",
    "Paris",
    "The capital of Italy is",
    "The mother tongue of Danielle Darrieux is",
    "The capital of Spain is",
    "Rome is in the country of",
)


@torch.no_grad()
def without_cache(lm: LM, text: str, tokens: int) -> list[int]:
    """Greedy text the slow way: the whole prompt anew for every token."""
    ids = list(encode(lm, text).ids)
    begin = len(ids)
    for _ in range(tokens):
        ids.append(int(lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[begin:]


@pytest.mark.parametrize(
    ("family", "style"),
    [("gpt2", "gpt2"), ("llama", "llama"), ("mistral", "llama"), ("bloom", "bloom"),
     ("gemma2", "gemma"), ("gpt_neo", "gpt2"), ("opt", "opt")],
)  # fmt: skip
def test_greedy_is_what_the_model_would_say(
    family: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small(family, style)
    assert family != "mistral" or lm.model.config.sliding_window == 4
    monkeypatch.setattr(type(lm.tokenizer), "decode", lambda self, ids: " ".join(map(str, ids)))
    end = lm.tokenizer.eos_token_id
    wanted = []
    for text in TEXTS:
        ids = without_cache(lm, text, 8)
        wanted.append(ids[: ids.index(end)] if end in ids else ids)
    said = generate_greedy(lm, TEXTS, 8, rows=2)
    assert [s.split()[-len(w) :] if w else [] for s, w in zip(said, wanted, strict=True)] == [
        [str(i) for i in ids] for ids in wanted
    ]


def test_greedy_stops_at_the_end_of_text(gpt2: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = without_cache(gpt2, TEXTS[0], 6)
    stop = ids[3]
    monkeypatch.setattr(type(gpt2.tokenizer), "eos_token_id", stop, raising=False)
    assert generate_greedy(gpt2, [TEXTS[0]], 6) == [gpt2.tokenizer.decode(ids[: ids.index(stop)])]


@pytest.mark.parametrize("style", ["gpt2", "llama", "gemma", "opt", "qwen", "bloom"])
def test_greedy_text_continues_the_prompt(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tokenizer would drop the first space of a text on its own."""
    lm = small("gpt2", style)
    wanted = encode(lm, TEXTS[0] + " Paris and").ids[len(encode(lm, TEXTS[0])) :]

    def answer(lm: LM, rows: list[tuple[int, ...]], *how: object) -> list[list[int]]:
        return [list(wanted) for _ in rows]

    monkeypatch.setattr("factscope.lm.generate.generate_ids", answer)
    assert generate_greedy(lm, [TEXTS[0]], 5) == [" Paris and"]
