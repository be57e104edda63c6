"""Facts that a model knows: the object comes before any other name in greedy text."""

from collections.abc import Sequence

import pytest

from factscope.errors import BadFact
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.tracing import trace as trace_module
from factscope.tracing.trace import find_known, text_before_target

from families import tiny_text_lm

GENERATED = [
    ("Paris", " Paris, France", " "),
    ("Paris", " the city of Paris.", " the city of "),
    ("Paris", "Paris", ""),
    ("Paris", " London, not Paris", None),  # another name first
    ("Paris", " the Seine, in Paris", None),
    ("Paris", " the Parisian suburbs", None),  # within a longer word
    ("Paris", " a Parisian street in Paris", None),
    ("Paris", " cosmoParis and Paris", " cosmoParis and "),  # not at the start of a word
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


@pytest.mark.parametrize(("target", "text", "expected"), GENERATED)
def test_the_text_before_the_target(target: str, text: str, expected: str | None) -> None:
    assert text_before_target(target, text) == expected


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny_text_lm("gpt2", spread=0.2)


def test_find_known_extends_the_prompt_up_to_the_object(
    gpt2: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "The Eiffel Tower is": " in the city of Paris.",
        "The Space Needle is": " in Portland, not Seattle.",
        "The Colosseum is in": " Rome, of course",
        "The Nile is": " a set {} of Egypt",
    }
    calls: list[tuple[list[str], int]] = []

    def generate(lm: LM, texts: Sequence[str], tokens: int) -> list[str]:
        calls.append((list(texts), tokens))
        return [answers[text] for text in texts]

    monkeypatch.setattr(trace_module, "generate_greedy", generate)
    facts = [
        Fact(subject="The Eiffel Tower", prompt="{} is", target="Paris", id="a", relation="P1"),
        Fact(subject="Space Needle", prompt="The {} is", target="Seattle"),
        Fact(subject="Colosseum", prompt="The {} is in", target="Rome"),
        Fact(subject="Nile", prompt="The {} is", target="Egypt"),
    ]
    fractions: list[float] = []
    found = list(find_known(gpt2, facts, max_new_tokens=7, batch_size=3, progress=fractions.append))
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
    assert [tokens for _, tokens in calls] == [7, 7]
    assert [len(texts) for texts, _ in calls] == [3, 1]
    assert fractions == [3 / 4, 1 / 4]


def test_find_known_needs_targets(gpt2: LM) -> None:
    with pytest.raises(BadFact, match=r"Oslo.*target"):
        list(find_known(gpt2, [Fact(subject="Oslo", prompt="{} is")]))
