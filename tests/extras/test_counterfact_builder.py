"""Data sets like CounterFact, built from a toy table with a stubbed Wikidata."""

import gzip
import io
import json
import urllib.error
import urllib.request
from collections import Counter
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from factscope.data.readers import generation_templates, neutral_sentences, read_cases
from factscope.errors import BadFact, BadSetting, DownloadFailed
from factscope.extras import counterfact_builder
from factscope.extras.counterfact_builder import (
    COUNTERFACT,
    CompositionRow,
    Relation,
    SubjectsWithObject,
    article_names,
    articles_by_entity,
    build_record,
    build_records,
    build_references,
    composition,
    knowledge_tuples,
    plain_sentences,
    read_articles,
    sparql_query,
    subjects_in_wikidata,
    usable_relations,
)
from factscope.facts import Case, Fact

from commands import Result, Run, runner

CITIES = {"Oslo": 14, "Rome": 12, "Lima": 3, "Bonn": 1}
BORN = [[f"{city} child {i}", city] for city, n in CITIES.items() for i in range(n)]
FACTS: dict[str, list[Any]] = {
    "P19": BORN,
    "P103": [["Ada", "French"], ["Bo", "Danish"], ["Cy", "Danish"], ["Ada", "Danish"]],
    "P31": [["Etna", "volcano"], ["Nile", "river"]],
    "P30": [["Peru", "America"], ["Cuba", "America"]],
}
PATTERNS = {
    "P19": ["[X] was born in [Y].", "[X] is a [Y]-born person.", "[X]  comes from [Y] .",
            "[X] is a [Y].", "the birthplace of [X] is [Y]", "[X] label : [Y].",
            "[X] was born in [Y]"],
    "P103": ["The mother tongue of [X] is [Y].", "[X] is a native speaker of [Y]"],
    "P31": ["[Y] is what [X] is.", "[X] is [Y]"],
    "P30": ["[X] is in [Y].", "[X] is part of [Y]."],
}  # fmt: skip
ARTICLES = """Oslo child 3 was from (old) Oslo, a village.
Many small houses stand along the river.
The museum shows wooden boats and old fishing tools.

Oslo child 4
A writer from Oslo (born there), and of Lima child 0 a friend.

Oslo child 5, sculptor (d. 1900), lived in Rome as many artists.
Several large ships were built in the northern harbour.

Australia, New Zealand and others signed (at last) a treaty."""


def built(seed: int = 0, **how: Any) -> list[dict[str, Any]]:
    usable, _ = usable_relations(FACTS, PATTERNS)
    return list(build_records(knowledge_tuples(usable, seed), **how))


def truths(relation: str) -> dict[str, set[str]]:
    return {s: {o for t, o in FACTS[relation] if t == s} for s, _ in FACTS[relation]}


# ---- the tables


def test_usable_relations_and_problems() -> None:
    usable, problems = usable_relations(
        FACTS | {"P20": [["x"], ["a", "b"], [1, "b"], ["a", "c"]]}, PATTERNS
    )
    assert [relation.name for relation in usable] == ["P19", "P103"]
    assert usable[0].templates == (
        "{} was born in",
        "{} comes from",
        "The birthplace of {} is",
        "{} label:",
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "P20",
        "P20 skipped, with 2 facts",
        "P30 skipped, with 2 facts",
        "P31 skipped, with 2 facts",
    ]
    assert "2 rows" in problems[0]
    assert "0 usable patterns" in problems[1]
    assert "1 objects" in problems[2]
    assert "1 usable patterns" in problems[3]


def test_selected_relations() -> None:
    assert [r.name for r in usable_relations(FACTS, PATTERNS, ["P103"])[0]] == ["P103"]
    with pytest.raises(BadSetting, match=r"no relation P7, P8 .* it has P19, P30, P31, P103"):
        usable_relations(FACTS, PATTERNS, ["P7", "P19", "P8"])


@pytest.mark.parametrize("facts", [{}, {"P19": []}])
def test_an_empty_table(facts: dict[str, list]) -> None:
    with pytest.raises(BadFact, match="empty"):
        usable_relations(facts, PATTERNS)


def test_no_usable_relation() -> None:
    with pytest.raises(BadFact, match="P30 skipped"):
        usable_relations({"P30": FACTS["P30"]}, PATTERNS)


def test_every_relation_of_the_paper_has_generation_templates() -> None:
    for relation in COUNTERFACT:
        found = generation_templates(relation)
        assert len(set(found)) >= 5
        assert found != generation_templates("P999999")
        assert all(template.count("{}") == 1 for template in found)


# ---- records


def test_every_part_of_a_record() -> None:
    every = built()
    assert [one["case_id"] for one in every] == list(range(len(every)))
    # Ada has both languages, so that no counterfactual is left.
    assert len(every) == len(BORN) + 2
    for one in every:
        rewrite = one["requested_rewrite"]
        relation, subject = rewrite["relation_id"], rewrite["subject"]
        true, new = rewrite["target_true"]["str"], rewrite["target_new"]["str"]
        objects = truths(relation)
        assert true in objects[subject]
        assert new not in objects[subject]
        assert new in {target for _, target in FACTS[relation]}
        [usable], _ = usable_relations(FACTS, PATTERNS, [relation])
        assert rewrite["prompt"] in usable.templates

        rephrased = [t.replace("{}", subject) for t in usable.templates if t != rewrite["prompt"]]
        assert len(set(one["paraphrase_prompts"])) == 2
        for text in one["paraphrase_prompts"]:
            [words] = [words for words in rephrased if text.endswith(". " + words)]
            assert text.removesuffix(" " + words) in neutral_sentences()

        for name, target, other in (
            ("neighborhood_prompts", true, new),
            ("attribute_prompts", new, true),
        ):
            about_whom = Counter(subject_of(text, usable) for text in one[name])
            others = {s for s, o in objects.items() if target in o and other not in o} - {subject}
            assert set(about_whom) <= others
            assert len(about_whom) == min(len(others), 10)
            assert len(one[name]) == min(len(others) * len(usable.templates), 10)
            assert len(set(one[name])) == len(one[name])

        assert len(one["generation_prompts"]) == 10
        wanted = {template.replace("{}", subject) for template in generation_templates(relation)}
        assert set(one["generation_prompts"]) <= wanted


def subject_of(text: str, relation: Relation) -> str:
    """The subject that gives the text with one of the templates."""
    subjects = {subject for subject, _ in relation.pairs}
    [found] = {s for s in subjects for t in relation.templates if t.replace("{}", s) == text}
    return found


def test_new_objects_are_drawn_by_frequency() -> None:
    relation = Relation("P19", tuple((s, o) for s, o in BORN), ("{} a", "{} b"))
    drawn = Counter(
        build_record(each, 0)["requested_rewrite"]["target_new"]["str"]
        for seed in range(100)
        for each in knowledge_tuples([relation], seed)
        if each.target in ("Bonn", "Lima")
    )
    assert drawn["Oslo"] / drawn["Rome"] == pytest.approx(14 / 12, rel=0.25)
    assert drawn["Oslo"] > 2 * drawn["Lima"]


def test_the_subject_is_never_the_new_object() -> None:
    relation = Relation("P36", (("Rome", "Oslo"), ("Italy", "Rome")), ("{} a", "{} b"))
    [one] = build_records(knowledge_tuples([relation], 0))
    assert one["requested_rewrite"]["subject"] == "Italy"


def test_the_seed_determines_the_data_set() -> None:
    assert built(3) == built(3)
    assert built(3) != built(4)


def test_a_record_does_not_depend_on_the_others() -> None:
    def without_number(one: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in one.items() if key != "case_id"}

    alone = list(build_records(knowledge_tuples(usable_relations(FACTS, PATTERNS, ["P103"])[0], 0)))
    among = [one for one in built() if one["requested_rewrite"]["relation_id"] == "P103"]
    assert list(map(without_number, alone)) == list(map(without_number, among))


def test_full_skips_records_with_too_few_prompts() -> None:
    every = built(full=True)
    assert 0 < len(every) < len(built())
    assert [one["case_id"] for one in every] == list(range(len(every)))
    for one in every:
        assert len(one["neighborhood_prompts"]) == len(one["attribute_prompts"]) == 10


def test_sentences_that_name_the_case_are_not_used() -> None:
    given = [f"A train to {city} left at noon." for city in CITIES]
    for one in built(sentences=given):
        rewrite = one["requested_rewrite"]
        for text in one["paraphrase_prompts"]:
            sentence = text.split(". ")[0]
            assert rewrite["target_true"]["str"] not in sentence
            assert rewrite["target_new"]["str"] not in sentence
        if rewrite["relation_id"] == "P19":  # two of the four cities are left
            assert all(text.startswith("A train to") for text in one["paraphrase_prompts"])


# ---- articles


def test_plain_sentences() -> None:
    assert plain_sentences(ARTICLES.split("\n\n")) == (
        "Many small houses stand along the river.",
        "The museum shows wooden boats and old fishing tools.",
        "Several large ships were built in the northern harbour.",
    )


@pytest.mark.parametrize(
    "sentence",
    ["He went there again last summer.", "This, then, was the second reason.", "Too short here.",
     "The treaty (signed in May) was broken.", "It was the work of V. Voevodsky in spring.",
     "There are books on this; you know them.", "see the list of old towns."],
)  # fmt: skip
def test_sentences_that_are_not_plain(sentence: str) -> None:
    assert plain_sentences([sentence]) == ()


@pytest.mark.parametrize(
    ("article", "name"),
    [
        ("The Eiffel Tower is a tower.", "Eiffel Tower"),
        ("Sir Isaac Newton (1643) was", "Isaac Newton"),
        ("Adam Smith, FRSE, was", "Adam Smith"),
        ("Ada Lovelace\nShe wrote a program.", "Ada Lovelace"),
        ("Albedo", "Albedo"),
    ],
)
def test_article_names(article: str, name: str) -> None:
    assert name in article_names(article)


def test_a_list_is_not_about_its_members() -> None:
    assert "Australia" not in article_names("Australia, New Zealand and others signed a treaty.")
    assert "Paris" not in article_names("The University of Paris is old.")


def test_references_mention_the_object() -> None:
    usable, _ = usable_relations(FACTS, PATTERNS)
    every = built()
    found = build_references(every, usable, articles_by_entity(ARTICLES.split("\n\n")))
    assert {r: {o: len(texts) for o, texts in t.items()} for r, t in found.items()} == {
        "P19": {"Oslo": 3}
    }
    moved = ARTICLES.replace("Oslo child 5, sculptor", "Rome child 5, sculptor")
    found = build_references(every, usable, articles_by_entity(moved.split("\n\n")))
    assert {o: len(texts) for o, texts in found["P19"].items()} == {"Oslo": 2, "Rome": 1}


def test_an_empty_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n\n")
    with pytest.raises(BadFact, match="empty"):
        read_articles(tmp_path / "empty.txt")
    with pytest.raises(BadFact, match="cannot read"):
        read_articles(tmp_path / "none.txt")


# ---- Wikidata


def answer(rows: list[tuple[str, str]]) -> bytes:
    """A response with rows of the object's id and the subject's name."""
    bindings = [
        {"object": {"value": f"http://www.wikidata.org/entity/{id_}"}, "name": {"value": name}}
        for id_, name in rows
    ]
    return json.dumps({"results": {"bindings": bindings}}).encode()


def test_sparql_query() -> None:
    query = sparql_query("P19", 'Rock "n" Roll\\')
    assert "?subject wdt:P19 ?object" in query
    assert '?object rdfs:label "Rock \\"n\\" Roll\\\\"@en' in query
    assert query.endswith("LIMIT 200")
    for wrong in ("19", "P", "P0", "P1 } DROP", ""):
        with pytest.raises(BadSetting, match="property"):
            sparql_query(wrong, "x")


def test_wikidata_responses_are_cached(tmp_path: Path) -> None:
    urls: list[str] = []

    def get(url: str) -> bytes:
        urls.append(url)
        return answer([("Q585", "Bo"), ("Q1", "Al"), ("Q585", "Cy"), ("Q585", "Bo")])

    for _ in range(2):
        found = subjects_in_wikidata("P19", "Oslo", tmp_path / "cache", get)
        assert found == SubjectsWithObject(subjects=("Al", "Bo", "Cy"), object_id="Q585")
    [url] = urls
    assert parse_qs(urlsplit(url).query)["query"] == [sparql_query("P19", "Oslo")]
    assert subjects_in_wikidata("P19", "x", tmp_path, lambda _: answer([])) == SubjectsWithObject(
        ()
    )


@pytest.mark.parametrize("response", [b"<html>", b"[]", b'{"results": {}}', b"\xff"])
def test_an_unreadable_response(tmp_path: Path, response: bytes) -> None:
    with pytest.raises(DownloadFailed, match="cannot be read"):
        subjects_in_wikidata("P19", "Oslo", tmp_path, lambda _: response)
    assert not list(tmp_path.iterdir())


def failing(*codes: int) -> Any:
    """A urlopen that fails with each status code in turn, then responds."""
    left = list(codes)

    def urlopen(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert "factscope" in str(request.get_header("User-agent"))
        assert timeout > 0
        if not left:
            return io.BytesIO(b"fine")
        headers = Message()
        headers["Retry-After"] = "2"
        raise urllib.error.HTTPError(request.full_url, left.pop(0), "no", headers, None)

    return urlopen


def test_requests_are_repeated_if_the_service_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(counterfact_builder.time, "sleep", waits.append)
    monkeypatch.setattr(urllib.request, "urlopen", failing(429, 503))
    assert counterfact_builder.http_get("https://example.org") == b"fine"
    assert waits == [2, 2]
    for codes in ((429, 429, 429), (400,)):
        monkeypatch.setattr(urllib.request, "urlopen", failing(*codes))
        with pytest.raises(DownloadFailed, match=str(codes[0])):
            counterfact_builder.http_get("https://example.org")


def no_network(*_: object, **__: object) -> Any:
    raise urllib.error.URLError("no route to host")


# ---- composition


def case(subject: str, relation: str, new: str, **lists: Any) -> Case:
    fact = Fact(subject=subject, prompt="{} is", target=new, relation=relation)
    return Case(fact=fact, true="o", **lists)


def test_composition() -> None:
    cases = [
        case("a", "P1", "x", paraphrases=("p", "q"), neighbours=("n", "m"), generations=("g", "g")),
        case("b", "P1", "x", paraphrases=("p", "r"), neighbours=("n",), generations=("h", "g")),
        case("a", "P2", "y", paraphrases=("s", "t"), neighbours=("n",), generations=("g", "i")),
    ]
    assert composition(cases) == (
        CompositionRow("records", 3, 1.5, 1.0),
        CompositionRow("subjects", 2, 1.5, 1.0),
        CompositionRow("objects", 2, 1.0, 1.0),
        CompositionRow("counterfactual statements", 2, 1.5, 1.0),
        CompositionRow("paraphrase prompts", 5, 2.5, 2.0),
        CompositionRow("neighbourhood prompts", 2, 1.5, 4 / 3),
        CompositionRow("generation prompts", 3, 2.0, 5 / 3),
    )
    assert [row.total for row in composition(cases * 2)] == [6, 2, 2, 2, 5, 2, 3]
    assert composition([])[0] == CompositionRow("records", 0, 0.0, 0.0)


# ---- the commands


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.fixture
def build(factscope: Run, tmp_path: Path) -> Run:
    """`factscope data build-counterfact` on the toy tables."""
    (tmp_path / "facts.json").write_text(json.dumps(FACTS))
    (tmp_path / "patterns.json").write_text(json.dumps(PATTERNS))
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(ARTICLES.encode()))

    def run(*words: object) -> Result:
        tables = ("--facts", "facts.json", "--patterns", "patterns.json")
        return factscope("data", "build-counterfact", *tables, *words)

    return run


def test_build_command(build: Run, factscope: Run, tmp_path: Path) -> None:
    words = ("--text", "text.txt.gz", "--references-out", "refs.json")
    result = build("--out", "set.json", *words)
    assert result.code == 0
    for word in ("P30 skipped", "P31 skipped", "2 facts skipped"):
        assert word in result.err
    for word in ("neighbourhood prompts", "per relation", "have reference texts: refs.json"):
        assert word in result.out
    read = read_cases(tmp_path / "set.json")
    assert (len(read.cases), read.problems) == (len(BORN) + 2, ())
    assert {c.fact.relation for c in read.cases} == {"P19", "P103"}
    refs = json.loads((tmp_path / "refs.json").read_text())
    assert set(refs) == {"P19"}
    assert all(isinstance(text, str) for text in refs["P19"]["Oslo"])
    assert not list(tmp_path.glob("*.partial"))

    counted = json.loads(factscope("data", "composition", "set.json", "--json").out)
    again = json.loads(build("--out", "again.json", *words, "--json").out)
    assert again["composition"] == counted["composition"]
    assert again["composition"][0] == {
        "name": "records", "total": 32, "per_relation": 16.0, "per_record": 1.0
    }  # fmt: skip
    assert (len(again["problems"]), again["without_counterfactual"]) == (2, 2)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "set.json").read_bytes()


def test_limit_seed_relations_and_gz(build: Run, tmp_path: Path) -> None:
    assert build("--out", "all.json").code == 0
    every = json.loads((tmp_path / "all.json").read_text())
    assert build("--out", "some.json.gz", "--limit", 5).code == 0
    assert json.loads(gzip.decompress((tmp_path / "some.json.gz").read_bytes())) == every[:5]
    assert build("--out", "other.json", "--seed", 1, "--limit", 5).code == 0
    assert json.loads((tmp_path / "other.json").read_text()) != every[:5]
    assert build("--out", "one.json", "--relations", "P103, ").code == 0
    assert len(json.loads((tmp_path / "one.json").read_text())) == 2
    assert build("--out", "paper.json", "--relations", "counterfact", "--full").code == 0
    assert len(json.loads((tmp_path / "paper.json").read_text())) == len(built(full=True))


def test_build_with_wikidata(build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def urlopen(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        urls.append(request.full_url)
        known = "Danish" in request.full_url
        return io.BytesIO(answer([("Q9035", f"Dane {i}") for i in range(20)] if known else []))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    assert build("--out", "set.json", "--wikidata", "--relations", "P103").code == 0
    every = json.loads((tmp_path / "set.json").read_text())
    assert len(every) == 2
    for one in every:
        assert one["requested_rewrite"]["target_true"] == {"str": "Danish", "id": "Q9035"}
        assert one["requested_rewrite"]["target_new"] == {"str": "French", "id": None}
        assert len(one["neighborhood_prompts"]) == 10
        assert all("Dane" in text for text in one["neighborhood_prompts"])
    assert len(urls) == 2


def test_bad_input(build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    for words, message in (
        (("--facts", "empty.json"), "empty"),
        (("--facts", "list.json"), "not a table"),
        (("--patterns", "none.json"), "cannot read none.json"),
        (("--text", "none.txt"), "cannot read none.txt"),
        (("--references-out", "refs.json"), "--text"),
        (("--relations", "P7"), "no relation P7"),
        (("--relations", "P31"), "P31 skipped"),
        (("--relations", "P30"), "1 objects"),
        (("--wikidata",), "check the network"),
    ):
        result = build("--out", "set.json", *words)
        assert (result.code, result.out) == (2, "")
        assert message in result.err
        assert "Traceback" not in result.err
    assert not (tmp_path / "set.json").exists()
