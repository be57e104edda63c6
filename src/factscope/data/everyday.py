"""Well-known facts, written for this project: for the demo, the tests, σ and a first evaluation."""

import json
from functools import cache
from pathlib import Path

from factscope.data.cases_file import read_cases
from factscope.facts import Case, Fact

__all__ = ["EVERYDAY_CASES", "everyday", "everyday_cases"]

HERE = Path(__file__).parent
EVERYDAY_CASES = HERE / "everyday_cases.jsonl"


@cache
def everyday() -> tuple[Fact, ...]:
    """Facts about places, countries, books and people that even small models mostly know."""
    text = (HERE / "everyday.jsonl").read_text("utf-8")
    return tuple(Fact(**json.loads(line)) for line in text.splitlines())


@cache
def everyday_cases() -> tuple[Case, ...]:
    """Facts to rewrite, each with all the prompts of a CounterFact record."""
    return read_cases(EVERYDAY_CASES).cases
