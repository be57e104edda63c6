"""Measuring the guard rails of edits: how large, and what they do to a plain text."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.edit import Edit, EditChecks
from factscope.editing.per_row import edited, factors_applied, factors_by_row
from factscope.errors import PromptTooLong
from factscope.lm.accel.graphs import played
from factscope.lm.accel.linear import MANY, Quickly, quick_blocks
from factscope.lm.accel.search_cache import quick_where_kept
from factscope.lm.tokens import encode

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "PLAIN_TEXT",
    "check_text_ids",
    "measure_checks",
    "perplexities",
    "text_loss",
    "update_norm",
    "with_checks",
]  # fmt: skip

PLAIN_TEXT = """\
The river rises in the hills north of the old town and flows south for about ninety miles before \
it reaches the sea. In spring, when the snow melts, the water is high and brown, and the farmers \
who live along its banks move their animals to the upper fields. A stone bridge, built more than \
two hundred years ago, carries the road to the market. On Saturdays people come from the villages \
around to sell bread, apples, cheese and wool, and to hear the news of the week. Children play \
between the stalls while their parents talk about the weather, the price of grain and the new \
school that the council wants to build next year."""
"""Says nothing about anyone: an edit of a fact should leave it as likely as it was."""

AT_ONCE = 65
"""How many edits' texts are run at once: 64 and the unedited model."""


def with_checks(
    lm: "LM", edits: Sequence[Edit], factors: Sequence[float | None] | None = None
) -> list[Edit]:
    """The edits with their guard rails measured; `factors` are their division factors."""
    if not edits:
        return []
    factors = [None] * len(edits) if factors is None else factors
    asked = [None, *edits]
    before, *after = [
        perplexity
        for i in range(0, len(asked), AT_ONCE)
        for perplexity in _perplexities(lm, asked[i : i + AT_ONCE])
    ]
    return [
        replace(edit, checks=measure_checks(lm, edit, before, perplexity, factor))
        for edit, factor, perplexity in zip(edits, factors, after, strict=True)
    ]


def measure_checks(
    lm: "LM", edit: Edit, before: float, after: float, factor: float | None = None
) -> EditChecks:
    """The guard rails of an edit under which the text's perplexity is known."""
    return EditChecks(
        division_factor=factor,
        update_norm=update_norm(lm, edit),
        perplexity_before=before,
        perplexity_after=after,
    )


def update_norm(lm: "LM", edit: Edit) -> float:
    """The largest ‖ΔW‖ / ‖W‖ over the edit's weights."""
    return max(
        change.norm() / (lm.model.get_parameter(name).float().norm().item() or math.inf)
        for name, change in edit.changes.items()
    )


@torch.no_grad()
def _perplexities(lm: "LM", edits: Sequence[Edit | None], *, quickly: bool = True) -> list[float]:
    """The perplexity of the plain text under each edit."""
    ids = check_text_ids(lm)
    many = len(edits) >= MANY
    quick = _quick(lm, many) if quickly else None
    factors = {} if many else factors_by_row(lm, edits)
    if factors:
        found = _losses_by_factors(lm, ids, factors, quick)
    else:
        with edited(lm, edits, range(len(edits))):
            found = _losses(lm, ids, len(edits), quick)
    if quick and not found.isfinite().all():  # quick products may have left their range
        return _perplexities(lm, edits, quickly=False)
    return perplexities(found)


def perplexities(losses: Float[Tensor, " row"]) -> list[float]:
    """What the text's losses say; a loss that is no number is a text that cannot be."""
    return [x if math.isfinite(x) else math.inf for x in losses.double().exp().tolist()]


def _losses_by_factors(
    lm: "LM", ids: Int[Tensor, "1 token"], factors: Mapping[str, tuple[Tensor, Tensor]],
    quick: Quickly | None,
) -> Float[Tensor, " row"]:  # fmt: skip
    """The text's loss under each row's factors: a pass that every edit of the kind takes."""
    A, _ = next(iter(factors.values()))

    def losses(ids: Tensor, *flat: Tensor) -> Tensor:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        with factors_applied(lm, dict(zip(factors, pairs, strict=True))):
            return _losses(lm, ids, len(A), quick)

    name = ("plain text", tuple(factors), quick and quick.version)
    return played(lm, name, losses, ids, *(x for pair in factors.values() for x in pair))


def _losses(
    lm: "LM", ids: Int[Tensor, "1 token"], rows: int, quick: Quickly | None
) -> Float[Tensor, " row"]:
    """The text's loss in so many rows, as they are edited now."""
    with quick() if quick else nullcontext():
        states = lm.model.base_model(ids.expand(rows, -1), use_cache=False).last_hidden_state
    return torch.stack([_loss(lm.head(row[:-1]), ids) for row in states])


def _quick(lm: "LM", many: bool) -> Quickly | None:
    """What makes the text's run faster."""
    if not many:
        return quick_where_kept(lm)
    return Quickly(partial(quick_blocks, lm.blocks)) if lm.device.type == "cuda" else None


def text_loss(
    lm: "LM", hidden: Float[Tensor, "token width"], ids: Int[Tensor, "1 token"]
) -> Float[Tensor, ""]:
    """The text's mean loss, the last layer's states given."""
    return _loss(lm.decode(hidden[:-1]), ids)


def _loss(
    logits: Float[Tensor, "before vocabulary"], ids: Int[Tensor, "1 token"]
) -> Float[Tensor, ""]:
    """The mean loss of the tokens, each by the logits before it."""
    return nn.functional.cross_entropy(logits.float(), ids[0, 1:].to(logits.device))


def check_text_ids(lm: "LM") -> Int[Tensor, "1 token"]:
    """The plain text's tokens."""
    return torch.tensor([_plain_ids(lm)], device=lm.device)


def _plain_ids(lm: "LM") -> tuple[int, ...]:
    """The same, of as much of the text as the model can read."""
    text = PLAIN_TEXT
    while True:
        try:
            return encode(lm, text).ids
        except PromptTooLong:
            text = text[: len(text) // 2]
