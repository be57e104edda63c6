"""ROME: one fact into one matrix by a rank-one change (paper §3.1).

The MLP's output weight W is an associative memory: a key k that selects the subject, a value v
that carries what is known of it. To write a fact,

    1. k*: the mean key at the subject's last token over several contexts
    2. v*: a value that makes the model name the new object (editing.values)
    3. Ŵ = W + Λ (C⁻¹k*)ᵀ with Λ = (v* - W k*) / ((C⁻¹k*)ᵀ k*): of all changes that give Ŵ k* = v*,
       the one that disturbs other keys least, C being their second moment
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.closed_form import (
    SecondMomentSetting,
    describe_second_moment,
    division_factors,
    insert,
    insert_each,
    resolve_second_moment,
)
from factscope.editing.contexts import EditToken, PrefixLengths, prefixes_for
from factscope.editing.defaults import Layer, layer_for, rome_defaults
from factscope.editing.edit import Change, Edit
from factscope.editing.editor import Editor, map_valid, raise_first_error
from factscope.editing.per_row import edited
from factscope.editing.value_search import ValueResult, ValueSearch, search_values
from factscope.errors import BadFact, FactscopeError
from factscope.facts import Fact
from factscope.progress import Progress
from factscope.stats.second_moment import SecondMoment

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["PAPER", "R_ROME", "BoundRome", "Rome"]


@dataclass(frozen=True, kw_only=True)
class Rome(Editor):
    """The method with its settings."""

    layer: Layer = None
    """The layer whose MLP output weight receives the fact: a number, "auto" for the one that a
    causal trace of the fact points to, None for the model's default."""
    token: EditToken = "subject-last"
    """The token at which the fact is written."""
    prefixes: tuple[str, ...] | None = None
    """Texts to put before the prompt; None lets the model write them."""
    prefix_lengths: PrefixLengths = ((5, 10), (10, 10))
    """(tokens, how many) of the prefixes that the model writes; () for none."""
    prefix_bos_counts: bool = False
    """Whether BOS is one of those tokens, as in the paper's code."""
    seed: int = 0
    """For the prefixes."""
    key: Literal["mean", "bare"] = "mean"
    """Which key the update is divided by, and whose value it replaces: the mean over contexts, as
    in u, or the bare prompt's, as in the paper's code, where the mismatch now and then makes an
    update that disables the model."""
    value: Literal["mean", "bare"] = "mean"
    """The value that δ is added to: the mean over contexts, or the bare prompt's."""
    second_moment: SecondMomentSetting = "find"
    """C: given, found for the model and layer, or left out, which is not the paper's method."""
    ridge: float = 1e-3
    """What is added to C's diagonal, in units of its mean."""
    search: ValueSearch = field(default_factory=ValueSearch)
    many: Literal["jointly", "in turn"] = "jointly"
    """Several facts in one edit: one change with Ŵ k = v for all of them, or one change after the
    other, each seeing those before it, as in the paper's code."""
    facts_per_pass: int | None = None
    """How many facts are searched in one batch; None for what memory allows."""
    method: str = "rome"

    def __call__(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> Edit:
        """One edit that writes all the facts."""
        if not facts:
            raise BadFact("there is no fact to write; give at least one")
        ready = self.ready(lm, facts)
        if len(facts) > 1 and self.many == "in turn":
            return ready.in_turn(facts, progress)
        edit, factor = ready.edit(raise_first_error(ready.sought(facts, progress)))
        return with_checks(lm, [edit], [factor])[0]

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> list[Edit | FactscopeError]:
        """An edit for each fact alone, or why there is none."""
        if self.layer == "auto":
            return [
                result
                for fact in facts
                for result in replace(self, layer=layer_for(lm, "auto", [fact])).attempt(
                    lm, [fact], progress=lambda share: progress(share / len(facts))
                )
            ]
        ready = self.ready(lm, facts)
        return map_valid(ready.sought(facts, progress), ready.edits)

    def resolve(self, lm: "LM") -> "Rome":
        """The same with prefixes and, where the layer is known, statistics written out."""
        prefixes = prefixes_for(
            lm, self.prefixes, self.prefix_lengths, self.seed, bos_counts=self.prefix_bos_counts
        )
        if self.layer == "auto":
            return replace(self, prefixes=prefixes)
        layer = layer_for(lm, self.layer, ())
        moment = resolve_second_moment(lm, layer, self.second_moment) or "identity"
        return replace(self, prefixes=prefixes, layer=layer, second_moment=moment)

    def ready(self, lm: "LM", facts: Sequence[Fact]) -> "BoundRome":
        """The method on a model, with every default settled."""
        layer = layer_for(lm, self.layer, facts)
        known = rome_defaults(lm)
        bos_counts = self.prefix_bos_counts
        prefixes = prefixes_for(
            lm, self.prefixes, self.prefix_lengths, self.seed, bos_counts=bos_counts
        )
        return BoundRome(
            rome=self,
            lm=lm,
            layer=layer,
            prefixes=prefixes,
            search=self.search.resolve(clamp=known.clamp),
            second_moment=resolve_second_moment(lm, layer, self.second_moment),
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        return {**vars(self), "second_moment": describe_second_moment(self.second_moment),
                "search": asdict(self.search)}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundRome:
    """The method on a model."""

    rome: Rome
    lm: "LM"
    layer: int
    prefixes: tuple[str, ...]
    search: ValueSearch
    second_moment: SecondMoment | None

    def in_turn(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One change after the other, each computed on the model that has those before it."""
        total: Edit | None = None
        factors: list[float] = []
        for fact in facts:
            with edited(self.lm, [total]):
                sought = self.sought([fact], lambda share: progress(share / len(facts)))
            one, factor = self.edit(raise_first_error(sought))
            total = one if total is None else total + one
            factors.append(factor)
        assert total is not None
        return with_checks(self.lm, [total], [min(factors)])[0]

    def sought(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """The value of each fact: what the layer's MLP shall put out."""
        rome = self.rome
        return search_values(
            self.lm, facts, self.prefixes, self.layer, "mlp", rome.token, self.search,
            facts_per_pass=rome.facts_per_pass, progress=progress,
        )  # fmt: skip

    def edit(self, sought: Sequence[ValueResult]) -> tuple[Edit, float]:
        """One edit for all the facts, and its smallest division factor."""
        keys, moved, directions = self._system(sought)
        change = insert(keys, moved, directions)
        return self._edit(sought, change), min(division_factors(keys, directions))

    def edits(self, sought: Sequence[ValueResult]) -> list[Edit]:
        """An edit for each fact alone, its guard rails measured."""
        keys, moved, directions = self._system(sought)
        changes = insert_each(keys, moved, directions)
        edits = [self._edit([one], change) for one, change in zip(sought, changes, strict=True)]
        return with_checks(self.lm, edits, division_factors(keys, directions))

    def _system(self, sought: Sequence[ValueResult]) -> tuple[Tensor, Tensor, Tensor]:
        """The keys whose values move, by how much, and in which directions."""
        rome = self.rome
        k_star = torch.stack([s.keys.mean(0) for s in sought])
        keys = torch.stack([_chosen(s.keys, rome.key) for s in sought])
        now = torch.stack([_chosen(s.values, rome.key) for s in sought])
        v_star = torch.stack([_chosen(s.values, rome.value) + s.delta for s in sought])
        return keys, v_star - now, self.directions(k_star)

    def _edit(self, sought: Sequence[ValueResult], change: Change) -> Edit:
        return Edit(
            changes={self.name: change},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.rome.method,
            facts=tuple(s.fact for s in sought),
            settings={**self.to_dict(), "losses": [list(s.losses) for s in sought]},
        )

    @cached_property
    def name(self) -> str:
        """The full name of the weight that is changed."""
        return self.lm.name_of(self.lm.mlp_out(self.layer)) + ".weight"

    def directions(self, keys: Float[Tensor, "fact key"]) -> Float[Tensor, "fact key"]:
        """C⁻¹k for each key."""
        if self.second_moment is None:
            return keys
        return self.second_moment.solve(keys, ridge=self.rome.ridge)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, all settled."""
        resolve = {"layer": self.layer, "prefixes": self.prefixes, "search": asdict(self.search)}
        return {
            **self.rome.to_dict(),
            **resolve,
            "second_moment": describe_second_moment(self.second_moment),
        }


def _chosen(rows: Float[Tensor, "row width"], which: str) -> Float[Tensor, " width"]:
    """The bare prompt's row, or the mean of all."""
    return rows[0] if which == "bare" else rows.mean(0)


PAPER = Rome(
    prefix_bos_counts=True,
    key="bare",
    value="bare",
    ridge=0.0,
    many="in turn",
    search=ValueSearch(kl_position="place", weight_decay=0.5, weight_decay_form="paper"),
)
"""What the paper's own code computes; `Rome()` is the corrected method."""

R_ROME = replace(PAPER, key="mean", method="r-rome")
"""r-ROME: the paper's code with one key, the mean, everywhere (Gupta et al., 2024)."""
