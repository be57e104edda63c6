"""Methods, data sets and moments of an evaluation as they are called in tables and figures."""

import re

from factscope.analysis.metrics import UNEDITED, Summary

__all__ = ["DATA", "editor_name", "published_method", "row_name"]

METHODS = {
    UNEDITED: "unedited",
    "rome": "ROME",
    "r-rome": "r-ROME",
    "memit": "MEMIT",
    "ft": "FT",
    "ft-l": "FT+L",
    "attn": "AttnEdit",
    "kn": "KN",
    "ke": "KE",
    "ke-cf": "KE-CF",
    "ke-zsre": "KE-zsRE",
    "mend": "MEND",
    "mend-cf": "MEND-CF",
    "mend-zsre": "MEND-zsRE",
}
"""As the paper writes them."""
DATA = {"counterfact": "CounterFact", "zsre": "zsRE"}
WHEN = {"edit": "at edit", "end": "at end"}


def editor_name(method: str) -> str:
    """A method in the paper's writing; what follows its name, such as settings, stays."""
    name = published_method(method)
    return METHODS.get(name, name) + method[len(name) :]


def published_method(method: str) -> str:
    """The method without what follows its name."""
    return re.split(r"[ ,(]", method, maxsplit=1)[0]


def row_name(summary: Summary) -> str:
    """What a table calls the row."""
    parts = [editor_name(summary.method)]
    if summary.protocol != "single":
        parts.append(summary.protocol)
    if summary.protocol == "sequential":
        parts.append(WHEN[summary.moment])
    if summary.published:
        parts.append("published")
    return ", ".join(parts)
