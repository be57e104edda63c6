"""Edit checks: whether an edit took, how large it is, and how it changes unrelated text."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.data.readers import everyday_cases, everyday_facts
from factscope.editing.contexts import TokenRow, edit_request, pad_rows
from factscope.editing.edit import Edit, EditChecks
from factscope.editing.per_row import edited, factors_applied, factors_by_row, linear_of
from factscope.errors import PromptTooLong
from factscope.facts import Fact
from factscope.lm.accel import MIN_BATCH, accelerated
from factscope.lm.tokens import Prompt, encode, encode_each

if TYPE_CHECKING:
    from factscope.lm.model import LM

CHECK_TEXT = """\
The river rises in the hills north of the old town and flows south for about ninety miles before \
it reaches the sea. In spring, when the snow melts, the water is high and brown, and the farmers \
who live along its banks move their animals to the upper fields. A stone bridge, built more than \
two hundred years ago, carries the road to the market. On Saturdays people come from the villages \
around to sell bread, apples, cheese and wool, and to hear the news of the week. Children play \
between the stalls while their parents talk about the weather, the price of grain and the new \
school that the council wants to build next year."""
"""Mentions no person or place: an edit of a fact should leave its perplexity unchanged."""

EDITS_PER_PASS = 65
"""How many models read the text in one batch: 64 edited ones and the unedited one."""


def with_checks(
    lm: "LM", edits: Sequence[Edit], division_factors: Sequence[float | None] | None = None
) -> list[Edit]:
    """The edits with their checks measured."""
    if not edits:
        return []
    factors = [None] * len(edits) if division_factors is None else division_factors
    models = [None, *edits]
    if any(linear_of(lm, name) is None for edit in edits for name in edit.changes):
        # Rows cannot have edits of embeddings: write each edit to the weights.
        before, after = text_perplexity(lm), []
        for edit in edits:
            with edit.applied(lm, force=True):
                after.append(text_perplexity(lm))
    else:
        before, *after = [
            perplexity
            for i in range(0, len(models), EDITS_PER_PASS)
            for perplexity in _text_perplexities(lm, models[i : i + EDITS_PER_PASS])
        ]
    checked = [
        replace(edit, checks=measure_checks(lm, edit, before, perplexity, factor))
        for edit, factor, perplexity in zip(edits, factors, after, strict=True)
    ]
    return with_predictions(lm, checked)


# ---- predictions: the edit's own prompts, and prompts about other subjects

NEIGHBOURS = 16
"""Prompts about other subjects, for each edit."""
MIN_PROBABILITY = 0.1
"""A neighbour counts if the unedited model's most likely token has at least this probability: small
changes decide between tokens that are all unlikely."""
TOKENS_PER_PASS = 8192


def with_predictions(lm: "LM", edits: Sequence[Edit]) -> list[Edit]:
    """The edits with what prompts predict added to their checks: whether their facts took, and how
    many neighbours changed. All edits share one batch."""
    own = _fact_rows(lm, edits)
    neighbours = [_neighbour_rows(lm, edit.facts) for edit in edits]
    distinct = list(dict.fromkeys(row for rows in neighbours for row in rows))
    rows = [*own, *((i, row) for i, of_edit in enumerate(neighbours) for row in of_edit)]
    tops = _top_tokens(lm, [*rows, *((None, row) for row in distinct)], edits)
    unedited = dict(zip(distinct, tops[len(rows) :], strict=True))
    taken: list[list[bool]] = [[] for _ in edits]
    changed: list[list[bool]] = [[] for _ in edits]
    for n, ((i, row), top) in enumerate(zip(rows, tops, strict=False)):
        if n < len(own):
            taken[i].append(top.tokens == row.labels)
        elif unedited[row].probability >= MIN_PROBABILITY:
            changed[i].append(top.tokens != unedited[row].tokens)
    return [
        replace(
            edit,
            checks=edit.checks
            and replace(edit.checks, taken=_mean(taken[i]), neighbours_changed=_mean(changed[i])),
        )
        for i, edit in enumerate(edits)
    ]


def facts_taken(lm: "LM", edits: Sequence[Edit]) -> list[list[bool]]:
    """For each fact of each edit: is every token of its new object the most likely one after its
    prompt? (`value_search` continues a search by this.)"""
    rows = _fact_rows(lm, edits)
    taken: list[list[bool]] = [[] for _ in edits]
    for (i, row), top in zip(rows, _top_tokens(lm, rows, edits), strict=True):
        taken[i].append(top.tokens == row.labels)
    return taken


def _fact_rows(lm: "LM", edits: Sequence[Edit]) -> list[tuple[int, TokenRow]]:
    """The bare prompt and new object of each fact, with the index of its edit."""
    facts = [(i, fact) for i, edit in enumerate(edits) for fact in edit.facts if fact.target]
    return [(i, edit_request(lm, fact).rows[0]) for i, fact in facts]


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def neighbour_prompts(facts: Sequence[Fact]) -> list[str]:
    """Built-in prompts about other subjects: half of them as similar to the facts' prompts as
    possible, most of these of the same relation; the others of all kinds."""
    texts = [fact.text for fact in facts]
    relations = {fact.relation for fact in facts} - {None}
    templates = [set(t.split()) for t in dict.fromkeys(fact.prompt for fact in facts)]

    def similarity(fact: Fact) -> float:
        words = set(fact.prompt.split())
        overlap = max((len(words & x) / len(words | x) for x in templates), default=0.0)
        return overlap + (fact.relation in relations)

    pool = [
        fact
        for fact in (*everyday_facts(), *(case.fact for case in everyday_cases()))
        if not any(fact.subject in text for text in texts)
        and not any(other.subject in fact.text for other in facts)
    ]
    similar = sorted(pool, key=similarity, reverse=True)[: NEIGHBOURS // 2]
    rest = [fact for fact in pool if fact not in similar]
    general = rest[:: max(1, len(rest) // (NEIGHBOURS - len(similar)))]
    return [fact.text for fact in [*similar, *general][:NEIGHBOURS]]


def _neighbour_rows(lm: "LM", facts: Sequence[Fact]) -> list[TokenRow]:
    """The neighbours' prompts as tokens; those that the model's context is too short for are left
    out."""
    prompts = encode_each(lm, neighbour_prompts(facts))
    fitting = [prompt.ids for prompt in prompts if isinstance(prompt, Prompt)]
    return [TokenRow(ids, (len(ids) - 1,), ()) for ids in fitting]


class _Top(NamedTuple):
    """The most likely tokens at a row's positions."""

    tokens: tuple[int, ...]
    probability: float  # of the first


@torch.no_grad()
def _top_tokens(
    lm: "LM", rows: Sequence[tuple[int | None, TokenRow]], edits: Sequence[Edit]
) -> list[_Top]:
    """The most likely token at each row's positions, with the edit of that index or with None."""
    tops: dict[int, _Top] = {}
    if any(linear_of(lm, name) is None for edit in edits for name in edit.changes):
        for which in (None, *range(len(edits))):
            numbers = [n for n, (i, _) in enumerate(rows) if i == which]
            with nullcontext() if which is None else edits[which].applied(lm, force=True):
                found = _top_tokens(lm, [(None, rows[n][1]) for n in numbers], [])
            tops |= dict(zip(numbers, found, strict=True))
        return [tops[n] for n in range(len(rows))]
    order = sorted(range(len(rows)), key=lambda n: len(rows[n][1].ids))
    while order:
        numbers = order[-max(1, TOKENS_PER_PASS // len(rows[order[-1]][1].ids)) :]
        order = order[: -len(numbers)]
        batch = [rows[n][1] for n in numbers]
        ids = pad_rows(batch, lm.device)
        lengths = [len(row.positions) for row in batch]
        row = torch.arange(len(batch)).repeat_interleave(torch.tensor(lengths))
        position = torch.tensor([x for row in batch for x in row.positions])

        def logits(ids: Tensor = ids, row: Tensor = row, position: Tensor = position) -> Tensor:
            states = lm.model.base_model(ids, use_cache=False).last_hidden_state
            return lm.head(states[row.to(states.device), position.to(states.device)])

        used = sorted({i for n in numbers if (i := rows[n][0]) is not None})
        models = [None, *(edits[i] for i in used)]
        index = [0 if (i := rows[n][0]) is None else used.index(i) + 1 for n in numbers]
        with edited(lm, models, index):
            top = accelerated(lm, logits, batch=len(batch)).float().softmax(-1).max(-1)
        tokens, probabilities = (x.cpu().split(lengths) for x in (top.indices, top.values))
        for n, ids, values in zip(numbers, tokens, probabilities, strict=True):
            tops[n] = _Top(tuple(ids.tolist()), values[0].item())
    return [tops[n] for n in range(len(rows))]


# ---- the check text


def measure_checks(
    lm: "LM", edit: Edit, before: float, after: float, division_factor: float | None = None
) -> EditChecks:
    """The checks of an edit, given the text's perplexity without and with it."""
    return EditChecks(
        division_factor=division_factor,
        update_norm=max(
            (
                change.norm() / (lm.model.get_parameter(name).float().norm().item() or math.inf)
                for name, change in edit.changes.items()
            ),
            default=0.0,
        ),
        perplexity_before=before,
        perplexity_after=after,
    )


def raise_if_unsafe(lm: "LM", edit: Edit) -> None:
    """Refuse an edit for another model, and one that fails its checks.

    A sum or a multiple has no checks: the perplexity of its parts says nothing about it. Missing
    checks are measured here. That takes one pass of a text of about 130 tokens, as when an edit is
    made, which makes hundreds of such passes. It is measured on the model as it is, with the edits
    that are applied.
    """
    edit.check_model(lm)
    [checked] = [edit] if edit.checks is not None else with_checks(lm, [edit])
    assert checked.checks is not None
    checked.checks.raise_if_unsafe()


def text_perplexity(lm: "LM") -> float:
    """The text's perplexity under the model as it is, with the edits that are applied."""
    return _text_perplexities(lm, [None])[0]


@torch.no_grad()
def _text_perplexities(lm: "LM", edits: Sequence[Edit | None]) -> list[float]:
    """The text's perplexity under each edit, all in one batch of per-row edits."""
    ids = check_text_ids(lm)
    # A few low-rank edits are passed as tensors of few shapes, so that the pass can be captured.
    factors = factors_by_row(lm, edits) if len(edits) < MIN_BATCH else {}
    if factors:

        def losses(ids: Tensor, *flat: Tensor) -> Tensor:
            pairs = zip(flat[::2], flat[1::2], strict=True)
            with factors_applied(lm, dict(zip(factors, pairs, strict=True))):
                return _text_losses(lm, ids, len(edits))

        flat = [tensor for pair in factors.values() for tensor in pair]
        key = ("check text", tuple(factors))
        by_row = accelerated(lm, losses, ids, *flat, batch=len(edits), key=key)
    else:
        with edited(lm, edits, range(len(edits))):
            by_row = accelerated(lm, lambda: _text_losses(lm, ids, len(edits)), batch=len(edits))
    return perplexities(by_row)


def _text_losses(lm: "LM", ids: Int[Tensor, "1 token"], rows: int) -> Float[Tensor, " row"]:
    """The text's loss in each row, under the edits that are active."""
    states = lm.model.base_model(ids.expand(rows, -1), use_cache=False).last_hidden_state
    return torch.stack([_mean_loss(lm.head(row[:-1]), ids) for row in states])


def perplexities(losses: Float[Tensor, " row"]) -> list[float]:
    """exp(loss); infinite where the loss is NaN."""
    return [x if math.isfinite(x) else math.inf for x in losses.double().exp().tolist()]


def text_loss(
    lm: "LM", hidden: Float[Tensor, "token width"], ids: Int[Tensor, "1 token"]
) -> Float[Tensor, ""]:
    """The text's mean loss, given its last-layer states."""
    return _mean_loss(lm.decode(hidden[:-1]), ids)


def _mean_loss(
    logits: Float[Tensor, "before vocabulary"], ids: Int[Tensor, "1 token"]
) -> Float[Tensor, ""]:
    """The mean cross-entropy of the tokens after the first."""
    return nn.functional.cross_entropy(logits.float(), ids[0, 1:].to(logits.device))


def check_text_ids(lm: "LM") -> Int[Tensor, "1 token"]:
    """The text's tokens; half of the text, a quarter, … where the model's context is short."""
    text = CHECK_TEXT
    while True:
        try:
            return torch.tensor([encode(lm, text).ids], device=lm.device)
        except PromptTooLong:
            text = text[: len(text) // 2]
