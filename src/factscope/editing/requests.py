"""A fact to be written, as rows of tokens: the prompt after each prefix, with the new object.

prefix. The Space Needle is in downtown Paris
                      ▲ place         ▲ reads: the token before each token of the object
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from factscope.errors import BadFact, BadSetting, FactscopeError
from factscope.facts import PLACE, Fact
from factscope.lm.tokens import continuation, encode_fact

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Request",
    "Row",
    "Token",
    "ask",
    "essence_row",
    "padded",
    "place_of",
    "request",
    "requests_of",
    "with_prefixes",
]

Token = Literal["subject-last", "subject-first", "after-subject", "last"]
"""The token at which a fact is written: where its key is read and its value set."""

ESSENCE = "{} is a"
"""What must still be said of the subject (the paper's essence prompt)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of tokens."""

    ids: tuple[int, ...]
    place: int
    """The token at which the fact is written."""
    reads: tuple[int, ...]
    """The tokens at which the loss reads what comes next."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A fact to be written, ready for the model."""

    fact: Fact
    target: tuple[int, ...]
    """The new object's tokens."""
    rows: tuple[Row, ...]
    """The fact's prompt with the new object, after each prefix; the bare prompt first."""


def request(
    lm: "LM", fact: Fact, prefixes: Sequence[str] = (), token: Token = "subject-last"
) -> Request:
    """The rows in which a fact's new object is taught."""
    target = target_ids(lm, fact)
    rows = tuple(ask(lm, f, target, token) for f in with_prefixes(fact, prefixes))
    return Request(fact=fact, target=target, rows=rows)


def with_prefixes(fact: Fact, prefixes: Sequence[str]) -> list[Fact]:
    """The bare fact, and the same after each prefix."""
    bare = replace(fact, target=None)
    return [bare, *(replace(bare, prompt=_no_places(x) + bare.prompt) for x in prefixes)]


def requests_of(
    lm: "LM", facts: Sequence[Fact], prefixes: Sequence[str] = (), token: Token = "subject-last"
) -> list[Request | FactscopeError]:
    """The rows of every fact, or what is wrong with it."""
    asked: list[Request | FactscopeError] = []
    for fact in facts:
        try:
            asked.append(request(lm, fact, prefixes, token))
        except BadFact as error:
            asked.append(error)
    return asked


def target_ids(lm: "LM", fact: Fact) -> tuple[int, ...]:
    """The tokens of the fact's new object, as they continue its prompt."""
    if fact.target is None or not fact.target.strip():
        raise BadFact(f"the new object for {fact.text!r} is empty; say what it shall be")
    prompt, _ = encode_fact(lm, fact)
    return continuation(lm, prompt, fact.text, fact.target.strip())


def ask(lm: "LM", fact: Fact, target: Sequence[int], token: Token) -> Row:
    """One row: the fact's prompt and all of the object but its last token."""
    prompt, subject = encode_fact(lm, fact)
    end = len(prompt) - 1
    ids = (*prompt.ids, *target[:-1])
    place = place_of(token, subject, end)
    return Row(ids=ids, place=place, reads=tuple(range(end, end + len(target))))


def essence_row(lm: "LM", fact: Fact, token: Token, *, at_place: bool) -> Row:
    """The essence prompt, read at its end or, as in the paper's code, where the fact is written."""
    prompt, subject = encode_fact(lm, replace(fact, prompt=ESSENCE, target=None))
    end = len(prompt) - 1
    place = place_of(token, subject, end)
    return Row(ids=prompt.ids, place=place, reads=(place if at_place else end,))


def place_of(token: Token, subject: tuple[int, int], end: int) -> int:
    """The token that a fact is written at, given the subject's tokens and the prompt's last."""
    places = {
        "subject-last": subject[1] - 1,
        "subject-first": subject[0],
        "after-subject": min(subject[1], end),
        "last": end,
    }
    if token not in places:
        raise BadSetting(f"no token {token!r}; choose one of {', '.join(get_args(Token))}")
    return places[token]


def padded(
    rows: Sequence[Row], device: torch.device, length: int | None = None
) -> Int[Tensor, "row token"]:
    """The rows' ids, filled up on the right with zeros, which nothing looks at.

    All become as long as the longest, or longer if a length says so.
    """
    length = length or max(len(row.ids) for row in rows)
    filled = [[*row.ids, *[0] * (length - len(row.ids))] for row in rows]
    return torch.tensor(filled, device=device)


def _no_places(prefix: str) -> str:
    """A prefix cannot bring a second place for the subject."""
    return prefix.replace(PLACE, "")
