"""Facts: what a prompt may look like, whichever way it is given."""

from dataclasses import replace

import jaxtyping
import pytest

from factscope.errors import BadFact
from factscope.facts import Case, Fact, check_facts

FACT = Fact(subject="Eiffel Tower", prompt="The {} is located in", target="Paris")


@pytest.mark.parametrize("end", [" ", "  ", "\t", "\u00a0"])
def test_spaces_at_the_end_of_a_prompt_are_removed(end: str) -> None:
    assert replace(FACT, prompt=FACT.prompt + end) == FACT
    text, subject = FACT.text + end, FACT.subject
    assert Fact.from_text(text, subject, target="Paris") == FACT
    assert Fact.from_text(text, f" {subject} ", target="Paris") == FACT
    assert Fact(subject="Rome" + end, prompt="I live in {}").text == "I live in Rome"
    assert Fact.from_text("I live in Rome" + end, "Rome" + end).text == "I live in Rome"


def test_line_breaks_at_the_end_of_a_prompt_stay() -> None:
    assert replace(FACT, prompt="Where is {}?\n").text == "Where is Eiffel Tower?\n"


def test_spaces_at_the_end_of_a_cases_prompts_are_removed() -> None:
    texts = ("One ", "Two")
    case = Case(
        fact=FACT, paraphrases=texts, neighbours=texts, attributes=texts, generations=texts
    )  # fmt: skip
    for found in (case.paraphrases, case.neighbours, case.attributes, case.generations):
        assert found == ("One", "Two")


@pytest.mark.parametrize("text", ["The \udce9 is", "The \ud800 Tower is"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(BadFact, match=r"'The \\ud.* is not valid Unicode at character 4"):
        Fact.from_text(text, "The")
    with pytest.raises(BadFact, match="not valid Unicode"):
        replace(FACT, target=text)


def test_a_string_in_place_of_a_list_of_prompts_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside of tests
    with pytest.raises(BadFact, match=r"paraphrases is the string 'One'; .*\['One'\]"):
        Case(fact=FACT, paraphrases="One")  # pyright: ignore


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (FACT, "facts is one fact, 'The Eiffel Tower is located in'; give a list"),
        ("The Nile", "'T' is not a Fact; give a list of facts"),
        ([FACT, "The Nile"], "'The Nile' is not a Fact"),
    ],
)
def test_what_is_not_a_list_of_facts_is_refused(facts: object, message: str) -> None:
    check_facts([FACT, FACT])
    with pytest.raises(BadFact, match=message):
        check_facts(facts)
