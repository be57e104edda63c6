"""How likely a model finds given words after given prompts: raw scores, nothing averaged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from factscope.editing.edit import Edit
from factscope.editing.rows import edited
from factscope.lm.tokens import continuation, encode

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Answer", "Ask", "answers"]

TOKENS = 4096
"""About how many tokens go through the model at once."""


@dataclass(frozen=True)
class Ask:
    """A prompt, words that may follow it, and the edit under which to ask."""

    text: str
    target: str
    edit: int | None = None
    """The number of the edit; None for the model as it is."""


@dataclass(frozen=True)
class Answer:
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
def answers(
    lm: "LM", asks: Sequence[Ask], edits: Sequence[Edit] = (), *, tokens: int = TOKENS
) -> list[Answer]:
    """Every question's answer, in the order asked; rows of like length go together."""
    coded: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for ask in asks:
        prompt = encode(lm, ask.text)
        coded.append((prompt.ids, continuation(lm, prompt, ask.text, ask.target.strip())))
    order = sorted(range(len(asks)), key=lambda i: len(coded[i][0]) + len(coded[i][1]))
    found: dict[int, Answer] = {}
    while order:
        longest = len(coded[order[-1]][0]) + len(coded[order[-1]][1])
        some = order[-max(1, tokens // longest) :]
        order = order[: -len(some)]
        rows = [coded[i] for i in some]
        whose = [asks[i].edit for i in some]
        for i, answer in zip(some, _batch(lm, rows, whose, edits), strict=True):
            found[i] = answer
    return [found[i] for i in range(len(asks))]


def _batch(
    lm: "LM",
    rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    whose: Sequence[int | None],
    edits: Sequence[Edit],
) -> list[Answer]:
    """One forward pass; the head only where a target's token is due."""
    length = max(len(prompt) + len(target) for prompt, target in rows) - 1
    full = [[*prompt, *target[:-1]] for prompt, target in rows]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in full], device=lm.device)
    used = sorted({i for i in whose if i is not None})
    seats = [used.index(i) if i is not None else len(used) for i in whose]
    with edited(lm, [*(edits[i] for i in used), None], seats):
        states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    due = [(i, len(p) - 1 + j) for i, (p, t) in enumerate(rows) for j in range(len(t))]
    row, slot = torch.tensor(due, device=states.device).T
    logs = lm.head(states[row, slot]).float().log_softmax(-1)
    labels = torch.tensor([token for _, target in rows for token in target], device=logs.device)
    losses = iter(nn.functional.nll_loss(logs, labels, reduction="none").tolist())
    rights = iter((logs.argmax(-1) == labels).tolist())
    firsts = [due.index((i, len(prompt) - 1)) for i, (prompt, _) in enumerate(rows)]
    best = logs[firsts].max(-1)
    tops = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
    result: list[Answer] = []
    for (_, target), (top, probability) in zip(rows, tops, strict=True):
        mine = list(islice(losses, len(target)))
        result.append(
            Answer(
                nll=sum(mine) / len(mine),
                first=math.exp(-mine[0]),
                right=tuple(islice(rights, len(target))),
                top=lm.tokenizer.decode([top]),
                top_probability=probability,
            )
        )
    return result
