"""Edit checks: how large an edit is, and how much it changes the perplexity of unrelated text."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.edit import Edit, EditChecks
from factscope.editing.per_row import edited, factors_applied, factors_by_row, linear_of
from factscope.errors import PromptTooLong
from factscope.lm.accel import MIN_BATCH, accelerated
from factscope.lm.tokens import encode

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
        [before] = _text_perplexities(lm, [None])
        after = [_perplexity_applied(lm, edit) for edit in edits]
    else:
        before, *after = [
            perplexity
            for i in range(0, len(models), EDITS_PER_PASS)
            for perplexity in _text_perplexities(lm, models[i : i + EDITS_PER_PASS])
        ]
    return [
        replace(edit, checks=measure_checks(lm, edit, before, perplexity, factor))
        for edit, factor, perplexity in zip(edits, factors, after, strict=True)
    ]


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


def _perplexity_applied(lm: "LM", edit: Edit) -> float:
    """The text's perplexity with the edit in the weights: rows cannot have edits of embeddings."""
    with edit.applied(lm, force=True):
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
