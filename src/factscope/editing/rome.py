"""ROME: write one fact into one MLP output weight by a rank-one update (paper §3.1).

The weight W is seen as a linear associative memory W k ≈ v: a key k represents the subject, its
value v what the model knows about it. A fact is written in three steps:

    1. k*: the mean key at the subject's last token over several contexts
    2. v*: a value that makes the model predict the new object (value_search.py)
    3. Ŵ = W + Λ (C⁻¹k*)ᵀ with Λ = (v* - W k*) / ((C⁻¹k*)ᵀ k*): of all updates with Ŵ k* = v*, the
       one with the smallest ‖ΔW C^½‖: it disturbs other keys least, C = E[k kᵀ] being their second
       moment (eq. 2)

For several facts at once, ΔW = R (U Kᵀ)⁻¹ U, with the directions C⁻¹k* as the rows of U.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.contexts import resolve_prefixes
from factscope.editing.defaults import resolve_layer, resolve_second_moment, rome_defaults
from factscope.editing.edit import Change, Edit, LowRank
from factscope.editing.editor import (
    BoundEditor,
    map_valid,
    raise_first_error,
    results_or_errors,
)
from factscope.editing.per_row import edited
from factscope.editing.settings import Rome
from factscope.editing.value_search import ValueResult, search_values
from factscope.errors import FactscopeError
from factscope.facts import Fact
from factscope.progress import NestedProgress, Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM


class BoundRome(BoundEditor):
    """ROME bound to a model, every default resolved."""

    def __init__(self, settings: Rome, lm: "LM", facts: Sequence[Fact]) -> None:
        self.lm = lm
        self.layer = resolve_layer(lm, settings.layer, facts)
        self.weight_name = lm.name_of(lm.mlp_out(self.layer)) + ".weight"
        self.prefixes = resolve_prefixes(lm, settings)
        self.search = settings.search.resolve(clamp=rome_defaults(lm).clamp)
        self.second_moment = resolve_second_moment(lm, self.layer, settings.second_moment)
        self.settings = replace(
            settings,
            layer=self.layer,
            prefixes=self.prefixes,
            search=self.search,
            second_moment=self.second_moment or "identity",
        )

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: jointly, or one fact after the other."""
        if len(facts) > 1 and self.settings.many == "sequentially":
            edit, division_factor = self._sequentially(facts, progress)
        else:
            values = raise_first_error(self.find_values(facts, progress))
            edit, division_factor = self.insert(values)
        return with_checks(self.lm, [edit], [division_factor])[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """A rank-one edit for each fact on its own, or its error."""

        def insert_all(values: list[ValueResult]) -> list[Edit | FactscopeError]:
            keys, residuals, directions = self._system(values)
            changes = insert_each(keys, residuals, directions)
            edits = results_or_errors(lambda v, change: self._edit([v], change), values, changes)
            factors = division_factors(keys, directions)
            factors = [x for x, edit in zip(factors, edits, strict=True) if isinstance(edit, Edit)]
            return map_valid(edits, lambda valid: with_checks(self.lm, valid, factors))

        return map_valid(self.find_values(facts, progress), insert_all)

    def find_values(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """Steps 1 and 2: keys and values of each fact in every context, and δ."""
        return search_values(self.lm, facts, self.settings, self.layer, "mlp", progress)

    def insert(self, values: Sequence[ValueResult]) -> tuple[Edit, float]:
        """Step 3 for all facts jointly; also returns the smallest division factor."""
        keys, residuals, directions = self._system(values)
        change = insert(keys, residuals, directions)
        return self._edit(values, change), min(division_factors(keys, directions))

    def _sequentially(self, facts: Sequence[Fact], progress: Progress) -> tuple[Edit, float]:
        """One update after the other, each computed on the model with those before it."""
        total: Edit | None = None
        factors: list[float] = []
        nested = NestedProgress(progress)
        for i, fact in enumerate(facts):
            part = nested.within(i / len(facts), 1 / len(facts))
            with edited(self.lm, [total]):
                values = raise_first_error(self.find_values([fact], part))
            edit, factor = self.insert(values)
            total = edit if total is None else total + edit
            factors.append(factor)
        assert total is not None
        return total, min(factors)

    def _system(
        self, values: Sequence[ValueResult]
    ) -> tuple[
        Float[Tensor, "fact key"], Float[Tensor, "fact value"], Float[Tensor, "fact key"]
    ]:  # fmt: skip
        """Keys k, residuals v* - W k and directions C⁻¹k* of the facts."""
        key, value = self.settings.key, self.settings.value
        k_star = torch.stack([x.keys.mean(0) for x in values])
        k = torch.stack([_over_contexts(x.keys, key) for x in values])
        W_k = torch.stack([_over_contexts(x.values, key) for x in values])
        v_star = torch.stack([_over_contexts(x.values, value) + x.delta for x in values])
        return k, v_star - W_k, self.directions(k_star)

    def directions(self, keys: Float[Tensor, "fact key"]) -> Float[Tensor, "fact key"]:
        """C⁻¹k for each key."""
        if self.second_moment is None:
            return keys
        return self.second_moment.solve(keys, ridge=self.settings.ridge)

    def _edit(self, values: Sequence[ValueResult], change: Change) -> Edit:
        facts, losses = [x.request.fact for x in values], [list(x.losses) for x in values]
        return self.settings.new_edit(self.lm, {self.weight_name: change}, facts, losses=losses)


def _over_contexts(
    rows: Float[Tensor, "context width"], which: Literal["mean", "bare"]
) -> Float[Tensor, " width"]:
    """The mean over contexts, or the row of the bare prompt, which is the first."""
    return rows[0] if which == "bare" else rows.mean(0)


# ---- the closed form


def insert(
    keys: Float[Tensor, "fact key"],
    residuals: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> LowRank:
    """One update that changes the value of every key by its residual."""
    U = _normalised(directions)
    A = torch.linalg.solve(U @ keys.double().T, U)
    return LowRank(residuals.T.float().contiguous().cpu(), A.float().cpu())


def insert_each(
    keys: Float[Tensor, "fact key"],
    residuals: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
) -> list[LowRank]:
    """A rank-one update for each key on its own."""
    U = _normalised(directions)
    A = (U / (U * keys.double()).sum(-1, keepdim=True)).float().cpu()
    B = residuals.float().cpu()
    return [LowRank(b[:, None].clone(), a[None].clone()) for a, b in zip(A, B, strict=True)]


def division_factors(
    keys: Float[Tensor, "fact key"], directions: Float[Tensor, "fact key"]
) -> list[float]:
    """The cosine between each key and its direction: the update is divided by it."""
    K = keys.double()
    return ((_normalised(directions) * K).sum(-1) / K.norm(dim=-1)).tolist()


def _normalised(directions: Float[Tensor, "fact key"]) -> Float[Tensor, "fact key"]:
    """Unit vectors in float64: the length of a direction cancels, and C⁻¹k can be tiny."""
    U = directions.double()
    return U / U.norm(dim=-1, keepdim=True)
