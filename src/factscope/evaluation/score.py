"""Log-likelihood of targets after prompts, each under its own edit: raw scores, not averaged."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.lm.accel import accelerated
from factscope.lm.tokens import continuation_ids, encode
from factscope.progress import Progress, no_progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

TOKENS = 4096
"""Approximate number of tokens per batch."""


@dataclass(frozen=True)
class Query:
    """A prompt, a target that may follow it, and the edit to score it under."""

    text: str
    target: str
    edit: int | None = None
    """Index of the edit; None for the unedited model."""


@dataclass(frozen=True)
class QueryScore:
    """How likely the target is after the prompt."""

    nll: float
    """Mean negative log-likelihood of the target's tokens; exp(-nll) is the paper's P."""
    correct: tuple[bool, ...]
    """For each token of the target, whether it is the most likely one at its position."""
    top: str
    """The most likely next token after the prompt."""
    top_probability: float


@torch.no_grad()
def score_queries(
    lm: "LM",
    queries: Sequence[Query],
    edits: Sequence[Edit] = (),
    *,
    tokens: int = TOKENS,
    progress: Progress = no_progress,
) -> list[QueryScore]:
    """The score of every query, in order; rows of similar length share a batch.

    A row is a prompt with all but the last token of the target: queries with the same prompt and
    one-token targets share a row.
    """
    prompts = {text: encode(lm, text) for text in dict.fromkeys(query.text for query in queries)}
    targets: dict[_Row, dict[int, tuple[int, ...]]] = {}  # row → query → ids of its target
    for i, query in enumerate(queries):
        prompt = prompts[query.text]
        ids = continuation_ids(lm, prompt, query.text, query.target.strip())
        targets.setdefault(_Row((*prompt.ids, *ids[:-1]), query.edit), {})[i] = ids
    rows = sorted(targets, key=lambda row: len(row.ids))
    scores: dict[int, QueryScore] = {}
    while rows:
        batch = rows[-max(1, tokens // len(rows[-1].ids)) :]
        rows = rows[: -len(batch)]
        scores |= _score_batch(lm, {row: targets[row] for row in batch}, edits)
        progress(len(batch) / len(targets))
    return [scores[i] for i in range(len(queries))]


def edits_by_row(
    lm: "LM", edits: Sequence[Edit], indices: Sequence[int | None]
) -> AbstractContextManager[None]:
    """Context in which row i of each batch sees edits[indices[i]]; None is the unedited model."""
    used = sorted({i for i in indices if i is not None})
    place = {i: n for n, i in enumerate(used)}
    rows = [len(used) if i is None else place[i] for i in indices]
    return edited(lm, [*(edits[i] for i in used), None], rows)


class _Row(NamedTuple):
    ids: tuple[int, ...]
    edit: int | None


def _score_batch(
    lm: "LM", targets: Mapping[_Row, Mapping[int, tuple[int, ...]]], edits: Sequence[Edit]
) -> dict[int, QueryScore]:
    """One forward pass over the rows; logits only at positions that predict a target's token."""
    # Padding on the right needs no mask: attention is causal, and padded positions are not read.
    ids = pad_sequence([torch.tensor(row.ids) for row in targets], batch_first=True).to(lm.device)

    def forward(ids: Int[Tensor, "row token"]) -> Float[Tensor, "row token width"]:
        return lm.model.base_model(ids, use_cache=False).last_hidden_state

    with edits_by_row(lm, edits, [row.edit for row in targets]):
        states = accelerated(lm, forward, ids, batch=len(targets))
    # A row ends before the target's last token, so its last len(target) positions predict it.
    needed = [
        (n, len(row.ids) - len(target) + j)
        for n, (row, row_targets) in enumerate(targets.items())
        for target in row_targets.values()
        for j in range(len(target))
    ]
    positions = list(dict.fromkeys(needed))
    index = {position: k for k, position in enumerate(positions)}
    row, position = torch.tensor(positions, device=states.device).T
    log_probs = lm.head(states[row, position]).float().log_softmax(-1)
    best = log_probs.max(-1)
    top_ids, top_log_probs = best.indices.tolist(), best.values.tolist()
    scored = [item for row_targets in targets.values() for item in row_targets.items()]
    logit_rows = [index[position] for position in needed]
    labels = [token for _, target in scored for token in target]
    at = torch.tensor([logit_rows, labels], device=log_probs.device)
    tokens = iter(zip(logit_rows, (-log_probs[at[0], at[1]]).tolist(), strict=True))
    scores: dict[int, QueryScore] = {}
    for query, target in scored:
        logits, losses = zip(*islice(tokens, len(target)), strict=True)
        scores[query] = QueryScore(
            nll=sum(losses) / len(target),
            correct=tuple(top_ids[k] == token for k, token in zip(logits, target, strict=True)),
            top=lm.tokenizer.decode([top_ids[logits[0]]]),
            top_probability=math.exp(top_log_probs[logits[0]]),
        )
    return scores
