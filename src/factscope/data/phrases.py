"""Openings to be continued and neutral sentences, written for this project (phrases.toml)."""

import tomllib
from functools import cache
from importlib import resources

__all__ = ["neutral_sentences", "openings"]


def openings(relation: str) -> tuple[str, ...]:
    """Texts with "{}" for the subject, that lead up to a relation's object without asking."""
    phrases = _phrases()
    return tuple(phrases["openings"].get(relation, phrases["any"]))


def neutral_sentences() -> tuple[str, ...]:
    """Sentences that are about nobody in particular."""
    return tuple(_phrases()["sentences"])


@cache
def _phrases() -> dict:
    text = resources.files("factscope.data").joinpath("phrases.toml").read_text("utf-8")
    return tomllib.loads(text)
