"""A small set of well-known facts, written for this project: for the demo, the tests, and σ."""

import json
from functools import cache
from importlib import resources

from factscope.facts import Fact

__all__ = ["everyday"]


@cache
def everyday() -> tuple[Fact, ...]:
    """Facts about places, countries, books and people that even small models mostly know."""
    text = resources.files("factscope.data").joinpath("everyday.jsonl").read_text("utf-8")
    return tuple(Fact(**json.loads(line)) for line in text.splitlines())
