"""How many records a data file has, for a list of data sets."""

import json
from pathlib import Path

from factscope.data.facts_file import read_text
from factscope.data.references import read_array
from factscope.errors import BadFact

__all__ = ["count_records"]

LARGE = 200_000_000
"""Bytes beyond which counting would take longer than one likes to wait for a list."""


def count_records(path: Path) -> int | None:
    """Elements, lines, words or values, by the kind of file; None where it is large or broken."""
    if path.stat().st_size > LARGE:
        return None
    try:
        name = path.name.removesuffix(".gz")
        if name.endswith(".npy"):
            return len(read_array(path))
        return _in_text(read_text(path), lines=name.endswith(".jsonl"))
    except (BadFact, ValueError):
        return None


def _in_text(text: str, lines: bool) -> int:
    return sum(1 for line in text.split("\n") if line.strip()) if lines else len(json.loads(text))
