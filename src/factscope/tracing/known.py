"""Find the facts that a model knows, which the paper traces (App. B.1).

The model continues a prompt greedily. If its text names the right object before any other
capitalised word, the fact is known, and the prompt to trace is everything up to the object.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from factscope.errors import BadFact
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.lm.generate import generate_greedy
from factscope.lm.model import LM
from factscope.progress import Progress, no_progress


def find_known(
    lm: LM,
    facts: Sequence[Fact],
    *,
    max_new_tokens: int = 10,
    batch_size: int = 64,
    progress: Progress = no_progress,
) -> Iterator[tuple[Fact, str]]:
    """The known facts, each with the generated text; prompts are extended up to the object."""
    for start in range(0, len(facts), batch_size):
        batch = facts[start : start + batch_size]
        texts = generate_greedy(lm, [fact.text for fact in batch], max_new_tokens)
        for fact, text in zip(batch, texts, strict=True):
            if fact.target is None:
                raise BadFact(f"the fact about {fact.subject!r} has no target; give one")
            before = text_before_target(fact.target, text)
            if before is not None and SUBJECT_SLOT not in before:
                yield replace(fact, prompt=(fact.prompt + before).rstrip()), text
        progress(len(batch) / len(facts))


def text_before_target(target: str, text: str) -> str | None:
    """The text before the target; None if it is missing or a capitalised word precedes it."""
    match = re.search(rf"(?<!\w){re.escape(target.strip())}(?!\w)", text)
    if match is None:
        return None
    before = text[: match.start()]
    initials = re.findall(r"(?<!\w)[^\W\d_]", before)
    return None if any(letter.isupper() for letter in initials) else before
