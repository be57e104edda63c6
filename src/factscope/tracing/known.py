"""Facts that a model knows: what the paper traces (App. B.1).

The model continues a prompt greedily. If its text names the right object before any other
capitalised word, the fact is known, and the prompt to trace is everything up to the object.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from factscope.errors import BadFact
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.lm.generate import generate_greedy
from factscope.lm.model import LM

__all__ = ["find_known", "words_before"]


def find_known(
    lm: LM,
    facts: Sequence[Fact],
    *,
    tokens: int = 10,
    batch: int = 64,
    progress: Callable[[int], None] = lambda n: None,
) -> Iterator[tuple[Fact, str]]:
    """The known facts among the given ones, their prompts drawn out up to the object, each with
    what the model said."""
    for begin in range(0, len(facts), batch):
        some = facts[begin : begin + batch]
        for fact, said in zip(
            some, generate_greedy(lm, [f.text for f in some], tokens), strict=True
        ):
            if fact.target is None:
                raise BadFact(f"the fact about {fact.subject!r} has no target to look for")
            words = words_before(fact.target, said)
            if words is not None and SUBJECT_SLOT not in words:
                yield replace(fact, prompt=(fact.prompt + words).rstrip()), said
        progress(len(some))


def words_before(target: str, said: str) -> str | None:
    """What was said before the target; None if it is not named, or something else was first."""
    found = re.search(rf"(?<!\w){re.escape(target.strip())}(?!\w)", said)
    if found is None:
        return None
    before = said[: found.start()]
    initials = re.findall(r"(?<!\w)[^\W\d_]", before)
    return None if any(letter.isupper() for letter in initials) else before
