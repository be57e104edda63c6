"""ROME: write one fact into one MLP output weight by a rank-one update (paper §3.1).

The weight W is seen as a linear associative memory W k ≈ v: a key k represents the subject, its
value v what the model knows about it. A fact is written in three steps:

    1. k*: the mean key at the subject's last token over several contexts
    2. v*: a value that makes the model predict the new object (value_search.py)
    3. Ŵ = W + Λ (C⁻¹k*)ᵀ with Λ = (v* - W k*) / ((C⁻¹k*)ᵀ k*): of all updates with Ŵ k* = v*, the
       one that disturbs other keys least, C = E[k kᵀ] being their second moment (closed_form.py)
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.closed_form import (
    division_factors,
    insert,
    insert_each,
    resolve_second_moment,
)
from factscope.editing.contexts import resolve_prefixes
from factscope.editing.defaults import resolve_layer, rome_defaults
from factscope.editing.edit import Change, Edit
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.per_row import edited
from factscope.editing.settings import Rome, describe_second_moment
from factscope.editing.value_search import ValueResult, search_values
from factscope.errors import FactscopeError
from factscope.facts import Fact
from factscope.progress import NestedProgress, Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM


class BoundRome(BoundEditor):
    """ROME bound to a model, every default resolved."""

    def __init__(self, settings: Rome, lm: "LM", facts: Sequence[Fact]) -> None:
        self.settings = settings
        self.lm = lm
        self.layer = resolve_layer(lm, settings.layer, facts)
        self.weight_name = lm.name_of(lm.mlp_out(self.layer)) + ".weight"
        self.prefixes = resolve_prefixes(lm, settings)
        self.search = settings.search.resolve(clamp=rome_defaults(lm).clamp)
        self.second_moment = resolve_second_moment(lm, self.layer, settings.second_moment)

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

        def insert_all(values: list[ValueResult]) -> list[Edit]:
            keys, residuals, directions = self._system(values)
            changes = insert_each(keys, residuals, directions)
            edits = [self._edit([v], change) for v, change in zip(values, changes, strict=True)]
            return with_checks(self.lm, edits, division_factors(keys, directions))

        return map_valid(self.find_values(facts, progress), insert_all)

    def find_values(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """Steps 1 and 2: keys and values of each fact in every context, and δ."""
        settings = self.settings
        return search_values(
            self.lm, facts, self.prefixes, self.layer, "mlp", settings.token, self.search,
            facts_per_pass=settings.facts_per_pass, progress=progress,
        )  # fmt: skip

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
        return Edit(
            changes={self.weight_name: change},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=tuple(x.fact for x in values),
            settings={**self.to_dict(), "losses": [list(x.losses) for x in values]},
        )

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, every default resolved."""
        return {
            **self.settings.to_dict(),
            "layer": self.layer,
            "prefixes": self.prefixes,
            "search": asdict(self.search),
            "second_moment": describe_second_moment(self.second_moment),
        }


def _over_contexts(
    rows: Float[Tensor, "context width"], which: Literal["mean", "bare"]
) -> Float[Tensor, " width"]:
    """The mean over contexts, or the row of the bare prompt, which is the first."""
    return rows[0] if which == "bare" else rows.mean(0)
