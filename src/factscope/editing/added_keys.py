"""Keys that ROME adds to C (see rome.py): contrast keys, and the fact's keys after sentences."""

import math
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.editing.contexts import (
    ContextRow,
    TokenRow,
    context_row,
    context_rows,
    keys_of_rows,
    pad_rows,
    with_prefixes,
)
from factscope.editing.editor import raise_first_error
from factscope.editing.settings import EditToken
from factscope.errors import FactscopeError
from factscope.facts import Fact
from factscope.lm.tokens import encode, encode_fact
from factscope.stats.text import BUILT_IN, documents

if TYPE_CHECKING:
    from factscope.lm.model import LM

CONTRASTS, FIRST_TOKENS = 40, 20
"""Contrast keys at the edit token, and at first tokens."""
LIKELY = 100
"""Predicted tokens are drawn from this number of most likely ones."""
SENTENCES = 30
"""Contexts in which keys are read besides those of the value search."""


def contrast_keys(
    lm: "LM", facts: Sequence[Fact], layer: int, token: EditToken, seed: int
) -> Float[Tensor, "fact contrast key"]:
    """Keys that an edit should spare: of its edit token after other beginnings of the subject, and
    of first tokens.

    In other beginnings, a random fraction of the subject's tokens before the edit token, and at
    least one of them, are replaced: half of them by random tokens, half by tokens that the model
    finds likely there ("Airbus A380" for "Airbus A350"). Where there is none before it, the token
    itself is replaced. First tokens are random ones, or BOS where texts start with it. In many
    models they are attention sinks, with keys of their own kind; a subject at the start of its bare
    prompt can have such a key too.
    """
    # A tokenizer may have more tokens than the embedding has rows.
    ordinary = torch.arange(min(len(lm.tokenizer), lm.embed.weight.shape[0]))
    ordinary = ordinary[~torch.isin(ordinary, torch.tensor(lm.tokenizer.all_special_ids).long())]

    bare = [context_row(lm, fact, (), token) for fact in facts]
    spans: list[tuple[int, int]] = []
    for fact, row in zip(facts, bare, strict=True):
        _, (start, end) = encode_fact(lm, fact)
        before = row.edit_position > start
        spans.append((start, min(end, row.edit_position) if before else start + 1))
    likely = _likely_tokens(lm, bare, spans, ordinary)
    rows = [
        other
        for row, span, tokens in zip(bare, spans, likely, strict=True)
        for other in _other_beginnings(row, span, tokens, ordinary, seed)
    ]
    first = encode(lm, "A").ids[:1]
    if first[0] not in lm.tokenizer.all_special_ids:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(ordinary), (FIRST_TOKENS,), generator=generator)
        first = ordinary[drawn].tolist()
    firsts = [ContextRow((token_id,), (), (), 0) for token_id in first]
    keys, sinks = (keys_of_rows(lm, x, [layer])[layer] for x in (rows, firsts))
    return torch.cat([keys.unflatten(0, (len(facts), -1)), sinks.expand(len(facts), -1, -1)], 1)


def _other_beginnings(
    row: ContextRow,
    span: tuple[int, int],
    likely: "_LikelyTokens",
    ordinary: Int[Tensor, " ordinary"],
    seed: int,
) -> list[ContextRow]:
    """The row up to its edit token, with other tokens in the span."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(row.ids[: row.edit_position + 1]).repeat(CONTRASTS, 1)
    part = ids[:, slice(*span)]

    chosen = torch.multinomial(likely.weights, CONTRASTS, replacement=True, generator=generator)
    predicted = likely.ids.gather(1, chosen).T
    at_random = ordinary[torch.randint(len(ordinary), part.shape, generator=generator)]
    take_predicted = torch.rand(part.shape, generator=generator) < 0.5
    take_predicted &= torch.arange(*span) > 0  # the model does not predict the first token
    drawn = torch.where(take_predicted, predicted, at_random)

    fraction = torch.rand((CONTRASTS, 1), generator=generator)
    replaced = torch.rand(part.shape, generator=generator) < fraction
    one = torch.randint(part.shape[1], (CONTRASTS, 1), generator=generator)
    replaced.scatter_(1, one, True)
    ids[:, slice(*span)] = torch.where(replaced, drawn, part)
    return [ContextRow(tuple(x), (), (), row.edit_position) for x in ids.tolist()]


class _LikelyTokens(NamedTuple):
    """The most likely tokens at given positions, without special tokens and the text's own."""

    ids: Int[Tensor, "position likely"]
    weights: Float[Tensor, "position likely"]
    """Their probabilities."""


@torch.no_grad()
def _likely_tokens(
    lm: "LM",
    rows: Sequence[TokenRow],
    spans: Sequence[tuple[int, int]],
    ordinary: Int[Tensor, " ordinary"],
) -> list[_LikelyTokens]:
    """The likely tokens from start to end of each row; at the first position of a text, where the
    model predicts nothing, they mean nothing."""
    states = lm.model.base_model(pad_rows(rows, lm.device), use_cache=False).last_hidden_state
    places = [(i, t) for i, span in enumerate(spans) for t in range(*span)]
    row, position = torch.tensor(places, device=states.device).T
    logits = lm.head(states[row, (position - 1).clamp_min(0)]).float().nan_to_num()
    is_ordinary = torch.zeros(logits.shape[1], dtype=torch.bool, device=logits.device)
    is_ordinary[ordinary.to(logits.device)] = True
    own = torch.tensor([rows[i].ids[t] for i, t in places], device=logits.device)
    logits.masked_fill_(~is_ordinary, -math.inf).scatter_(1, own[:, None], -math.inf)
    best = logits.topk(min(LIKELY, len(ordinary) - 1))
    lengths = [end - start for start, end in spans]
    parts = (best.indices.cpu().split(lengths), best.values.softmax(-1).cpu().split(lengths))
    return [_LikelyTokens(*part) for part in zip(*parts, strict=True)]


def sentence_keys(
    lm: "LM", facts: Sequence[Fact], layer: int, token: EditToken, seed: int
) -> Float[Tensor, "fact sentence key"]:
    """Each fact's keys after sentences of the built-in text; after one that makes it too long, the
    key of the bare prompt."""
    in_contexts = [f for fact in facts for f in with_prefixes(fact, sentences(seed))]
    found = context_rows(lm, in_contexts, (), token)
    rows: list[ContextRow] = []
    for i in range(0, len(found), SENTENCES + 1):
        [bare] = raise_first_error(found[i : i + 1])
        others = found[i + 1 : i + 1 + SENTENCES]
        rows += [bare if isinstance(row, FactscopeError) else row for row in others]
    return keys_of_rows(lm, rows, [layer])[layer].unflatten(0, (len(facts), -1))


@cache
def sentences(seed: int) -> tuple[str, ...]:
    """Random sentences of the built-in text."""
    text = " ".join(" ".join(documents(BUILT_IN, seed)).split())
    found = [x for x in re.findall(r"[A-Z][^.{}]+\.", text) if 4 <= len(x.split()) <= 20]
    return tuple(x + " " for x in random.Random(seed).sample(found, SENTENCES))
