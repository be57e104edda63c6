"""A fact to be written, as rows of tokens: the prompt after each prefix, with the new object.

prefix. The Space Needle is in downtown Paris
                      ▲ place         ▲ reads: the token before each token of the object

Prefixes: texts put before a fact's prompt, so that its key and value hold in any context.

The model writes them itself (paper §3.1, App. E.5): so many of this length, so many of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from factscope.errors import BadFact, BadSetting, FactscopeError
from factscope.facts import PLACE, Fact
from factscope.lm.generate import generate_ids, top_k_choice
from factscope.lm.tokens import continuation_ids, encode_fact

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "ContextRow",
    "EditRequest",
    "EditToken",
    "PrefixLengths",
    "context_row",
    "edit_position",
    "edit_request",
    "edit_requests",
    "generate_prefixes",
    "kl_row",
    "pad_rows",
    "parse_lengths",
    "prefixes_for",
    "read_prefixes",
    "with_prefixes",
]

EditToken = Literal["subject-last", "subject-first", "after-subject", "last"]
"""The token at which a fact is written: where its key is read and its value set."""

ESSENCE = "{} is a"
"""What must still be said of the subject (the paper's essence prompt)."""


@dataclass(frozen=True, kw_only=True)
class ContextRow:
    """A row of tokens."""

    ids: tuple[int, ...]
    place: int
    """The token at which the fact is written."""
    reads: tuple[int, ...]
    """The tokens at which the loss reads what comes next."""


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """A fact to be written, ready for the model."""

    fact: Fact
    target: tuple[int, ...]
    """The new object's tokens."""
    rows: tuple[ContextRow, ...]
    """The fact's prompt with the new object, after each prefix; the bare prompt first."""


def edit_request(
    lm: "LM", fact: Fact, prefixes: Sequence[str] = (), token: EditToken = "subject-last"
) -> EditRequest:
    """The rows in which a fact's new object is taught."""
    target = target_ids(lm, fact)
    rows = tuple(context_row(lm, f, target, token) for f in with_prefixes(fact, prefixes))
    return EditRequest(fact=fact, target=target, rows=rows)


def with_prefixes(fact: Fact, prefixes: Sequence[str]) -> list[Fact]:
    """The bare fact, and the same after each prefix."""
    bare = replace(fact, target=None)
    return [bare, *(replace(bare, prompt=_no_places(x) + bare.prompt) for x in prefixes)]


def edit_requests(
    lm: "LM", facts: Sequence[Fact], prefixes: Sequence[str] = (), token: EditToken = "subject-last"
) -> list[EditRequest | FactscopeError]:
    """The rows of every fact, or what is wrong with it."""
    asked: list[EditRequest | FactscopeError] = []
    for fact in facts:
        try:
            asked.append(edit_request(lm, fact, prefixes, token))
        except BadFact as error:
            asked.append(error)
    return asked


def target_ids(lm: "LM", fact: Fact) -> tuple[int, ...]:
    """The tokens of the fact's new object, as they continue its prompt."""
    if fact.target is None or not fact.target.strip():
        raise BadFact(f"the new object for {fact.text!r} is empty; say what it shall be")
    prompt, _ = encode_fact(lm, fact)
    return continuation_ids(lm, prompt, fact.text, fact.target.strip())


def context_row(lm: "LM", fact: Fact, target: Sequence[int], token: EditToken) -> ContextRow:
    """One row: the fact's prompt and all of the object but its last token."""
    prompt, subject = encode_fact(lm, fact)
    end = len(prompt) - 1
    ids = (*prompt.ids, *target[:-1])
    place = edit_position(token, subject, end)
    return ContextRow(ids=ids, place=place, reads=tuple(range(end, end + len(target))))


def kl_row(lm: "LM", fact: Fact, token: EditToken, *, at_place: bool) -> ContextRow:
    """The essence prompt, read at its end or, as in the paper's code, where the fact is written."""
    prompt, subject = encode_fact(lm, replace(fact, prompt=ESSENCE, target=None))
    end = len(prompt) - 1
    place = edit_position(token, subject, end)
    return ContextRow(ids=prompt.ids, place=place, reads=(place if at_place else end,))


def edit_position(token: EditToken, subject: tuple[int, int], end: int) -> int:
    """The token that a fact is written at, given the subject's tokens and the prompt's last."""
    places = {
        "subject-last": subject[1] - 1,
        "subject-first": subject[0],
        "after-subject": min(subject[1], end),
        "last": end,
    }
    if token not in places:
        raise BadSetting(f"no token {token!r}; choose one of {', '.join(get_args(EditToken))}")
    return places[token]


def pad_rows(
    rows: Sequence[ContextRow], device: torch.device, length: int | None = None
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


PrefixLengths = tuple[tuple[int, int], ...]
"""(tokens, how many) for each group of prefixes."""

AMONG = 5
"""Prefixes are drawn from the five likeliest tokens at each step."""
JOIN = ". "
"""What stands between a prefix and the prompt."""


def generate_prefixes(
    lm: "LM", lengths: PrefixLengths, seed: int, *, bos_counts: bool = False
) -> tuple[str, ...]:
    """Texts that the model writes from nothing, each ready to stand before a prompt."""
    choose = top_k_choice(AMONG, seed)
    written: list[str] = []
    for tokens, count in lengths:
        new = tokens - 1 if bos_counts else tokens
        rows = generate_ids(lm, [[_first(lm)]] * count, new, choose, stop=False)
        written += [_plain(lm.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
    return tuple(text + JOIN for text in written)


def prefixes_for(
    lm: "LM",
    given: tuple[str, ...] | None,
    lengths: PrefixLengths,
    seed: int,
    *,
    bos_counts: bool,
) -> tuple[str, ...]:
    """The given prefixes, or those that the model writes."""
    return generate_prefixes(lm, lengths, seed, bos_counts=bos_counts) if given is None else given


def read_prefixes(path: Path) -> tuple[str, ...]:
    """Prefixes from a file, one a line: a text, or a template with {} where the prompt goes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"cannot read the prefixes in {path}: {error}") from error
    prefixes = [line.split(PLACE)[0] if PLACE in line else line + JOIN for line in lines if line]
    return tuple(prefix for prefix in prefixes if prefix.strip())  # "{}" alone is always there


def parse_lengths(text: str) -> PrefixLengths:
    """Lengths as people write them: "5x10,10x10" is ten of 5 tokens and ten of 10; "none"."""
    if text.strip() in ("", "none"):
        return ()
    groups = [part.strip().partition("x") for part in text.split(",")]
    try:
        lengths = tuple((int(tokens), int(count)) for tokens, _, count in groups)
    except ValueError:
        lengths = ((0, 0),)
    if min(min(group) for group in lengths) < 1:
        raise BadSetting(f"the prefixes {text!r} are not TOKENSxCOUNT, such as 5x10,10x10 or none")
    return lengths


def _first(lm: "LM") -> int:
    """The token that a text begins with; where a family has none, the one that ends texts."""
    known = (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id)
    return next((token for token in known if token is not None), 0)


def _plain(text: str) -> str:
    """Without blank lines, and without braces, which would look like a place for the subject."""
    text = text.replace("\n\n", " ")
    return "".join(character for character in text if character not in "{}")
