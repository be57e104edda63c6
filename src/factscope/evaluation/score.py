"""How likely a model finds given words after given prompts: raw scores, nothing averaged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.lm.accel.linear import MANY, quick_blocks
from factscope.lm.tokens import continuation_ids, encode

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Query", "QueryScore", "score_queries"]

TOKENS = 4096
"""About how many tokens go through the model at once."""


@dataclass(frozen=True)
class Query:
    """A prompt, words that may follow it, and the edit under which to ask."""

    text: str
    target: str
    edit: int | None = None
    """The number of the edit; None for the model as it is."""


@dataclass(frozen=True)
class QueryScore:
    """What the model thinks of the words."""

    nll: float
    """Mean negative log-likelihood of the target's tokens; exp(-nll) is what the paper calls P."""
    first: float
    """The probability of the target's first token."""
    right: tuple[bool, ...]
    """Of each of its tokens, whether it is the likeliest where it stands."""
    top: str
    """The likeliest next token."""
    top_probability: float


@torch.no_grad()
def score_queries(
    lm: "LM", asks: Sequence[Query], edits: Sequence[Edit] = (), *, tokens: int = TOKENS
) -> list[QueryScore]:
    """Every question's answer, in the order asked; rows of like length go together.

    Words of one token are looked up behind the prompt alone, so that all such words after the same
    prompt take one row.
    """
    prompts = {text: encode(lm, text) for text in dict.fromkeys(ask.text for ask in asks)}
    questions: dict[_Row, list[tuple[int, tuple[int, ...]]]] = {}
    for i, ask in enumerate(asks):
        prompt = prompts[ask.text]
        target = continuation_ids(lm, prompt, ask.text, ask.target.strip())
        row = _Row((*prompt.ids, *target[:-1]), ask.edit)
        questions.setdefault(row, []).append((i, target))
    order = sorted(questions, key=lambda row: len(row.ids))
    found: dict[int, QueryScore] = {}
    while order:
        some = order[-max(1, tokens // len(order[-1].ids)) :]
        order = order[: -len(some)]
        found |= _batch(lm, some, [questions[row] for row in some], edits)
    return [found[i] for i in range(len(asks))]


@dataclass(frozen=True)
class _Row:
    """Tokens to be read, and the edit under which."""

    ids: tuple[int, ...]
    edit: int | None


def _batch(
    lm: "LM",
    rows: Sequence[_Row],
    questions: Sequence[Sequence[tuple[int, tuple[int, ...]]]],
    edits: Sequence[Edit],
) -> dict[int, QueryScore]:
    """One forward pass; the head only where a target's token is due."""
    states = _states(lm, rows, edits)
    asked = [(n, i, target) for n, mine in enumerate(questions) for i, target in mine]
    due = [
        (n, len(rows[n].ids) - len(target) + j)
        for n, _, target in asked
        for j in range(len(target))
    ]
    places = list(dict.fromkeys(due))
    number = {place: k for k, place in enumerate(places)}
    row, slot = torch.tensor(places, device=states.device).T
    logs = lm.head(states[row, slot]).float().log_softmax(-1)
    best = logs.max(-1)
    tops, highest = best.indices.tolist(), best.values.tolist()
    reads = [number[place] for place in due]
    labels = [token for _, _, target in asked for token in target]
    at = torch.tensor([reads, labels], device=logs.device)
    said = zip(reads, (-logs[at[0], at[1]]).tolist(), labels, strict=True)
    result: dict[int, QueryScore] = {}
    for _, i, target in asked:
        mine = list(islice(said, len(target)))
        first, losses = mine[0][0], [loss for _, loss, _ in mine]
        result[i] = QueryScore(
            nll=sum(losses) / len(losses),
            first=math.exp(-losses[0]),
            right=tuple(tops[read] == token for read, _, token in mine),
            top=lm.tokenizer.decode([tops[first]]),
            top_probability=math.exp(highest[first]),
        )
    return result


def _states(
    lm: "LM", rows: Sequence[_Row], edits: Sequence[Edit], *, quickly: bool = True
) -> Float[Tensor, "row token width"]:
    """The last layer's states, each row under its own edit."""
    length = max(len(row.ids) for row in rows)
    ids = torch.tensor([[*row.ids, *[0] * (length - len(row.ids))] for row in rows]).to(lm.device)
    used = sorted({row.edit for row in rows if row.edit is not None})
    place = {edit: n for n, edit in enumerate(used)}
    seats = [len(used) if row.edit is None else place[row.edit] for row in rows]
    quickly = quickly and lm.device.type == "cuda" and len(rows) >= MANY
    with (
        edited(lm, [*(edits[i] for i in used), None], seats),
        quick_blocks(lm.blocks if quickly else ()),
    ):
        states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    if quickly and not states.isfinite().all():  # quick products left their range
        return _states(lm, rows, edits, quickly=False)
    return states
