"""MEMIT: many facts at once, spread over several layers (Meng et al., 2023).

For each fact a state z is searched at the last of the layers that makes the model name the new
object. Then, layer by layer, the MLP's output weight takes its share of what is still missing:

    ΔW = R Kᵀ (λ C + K Kᵀ)⁻¹

with the facts' keys K there, C the second moment of ordinary keys, and R the missing part of z
divided by the number of layers still to come.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.closed_form import (
    SecondMomentSetting,
    describe_second_moment,
    resolve_second_moment,
)
from factscope.editing.contexts import EditRequest, EditToken, PrefixLengths, pad_rows, prefixes_for
from factscope.editing.defaults import check_layer, memit_defaults
from factscope.editing.edit import Change, Dense, Edit, LowRank
from factscope.editing.editor import Editor, map_valid, raise_first_error
from factscope.editing.per_row import edited
from factscope.editing.value_search import ValueResult, ValueSearch, search_values
from factscope.errors import BadFact, BadSetting, FactscopeError
from factscope.facts import Fact
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.progress import Progress
from factscope.stats.second_moment import SecondMoment

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["PAPER", "BoundMemit", "Memit", "spread"]

FACTS = 32
"""How many facts' rows are looked at in one pass."""


@dataclass(frozen=True, kw_only=True)
class Memit(Editor):
    """The method with its settings."""

    layers: tuple[int, ...] | None = None
    """The layers that share the change, lowest first; None for the model's default."""
    weight: float | None = None
    """λ: how many keys of ordinary text C stands for; None for the model's default."""
    token: EditToken = "subject-last"
    """The token at which the facts are written."""
    prefixes: tuple[str, ...] | None = None
    """Texts to put before the prompt; None lets the model write them."""
    prefix_lengths: PrefixLengths = ((10, 5),)
    """(tokens, how many) of the prefixes that the model writes; () for none."""
    prefix_bos_counts: bool = False
    """Whether BOS is one of those tokens, as in MEMIT's own code."""
    seed: int = 0
    """For the prefixes."""
    key: Literal["mean", "half bare"] = "mean"
    """A fact's key: the mean over all contexts; or, as in MEMIT's own code, half of it the bare
    prompt's and half the mean after the prefixes."""
    second_moment: SecondMomentSetting = "find"
    """C of every layer."""
    ridge: float = 1e-3
    """What is added to C's diagonal, in units of its mean."""
    search: ValueSearch = field(default_factory=ValueSearch)
    facts_per_pass: int | None = None
    """How many facts are searched in one batch; None for what memory allows."""
    method: str = "memit"

    def __post_init__(self) -> None:
        if self.weight is not None and not self.weight > 0:
            raise BadSetting(f"weight is {self.weight}; it must be above 0")

    def __call__(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> Edit:
        """One edit that writes all the facts."""
        if not facts:
            raise BadFact("there is no fact to write; give at least one")
        ready = self.ready(lm)
        sought = raise_first_error(ready.sought(facts, progress))
        return with_checks(lm, ready.insert(sought, [list(range(len(sought)))]))[0]

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> list[Edit | FactscopeError]:
        """An edit for each fact alone, or why there is none."""
        ready = self.ready(lm)

        def insert(sought: list[ValueResult]) -> list[Edit]:
            return with_checks(lm, ready.insert(sought, [[i] for i in range(len(sought))]))

        return map_valid(ready.sought(facts, progress), insert)

    def resolve(self, lm: "LM") -> "Memit":
        """The same with layers, prefixes and statistics written out."""
        ready = self.ready(lm)
        moments = tuple(moment for moment in ready.moments if moment is not None) or "identity"
        return replace(self, layers=ready.layers, prefixes=ready.prefixes, second_moment=moments)

    def ready(self, lm: "LM") -> "BoundMemit":
        """The method on a model, with every default settled."""
        known = memit_defaults(lm)
        wanted = known.layers if self.layers is None else self.layers
        layers = tuple(check_layer(lm, i) for i in wanted)
        if not layers or list(layers) != sorted(set(layers)):
            raise BadSetting(f"the layers {layers} must go upwards, each once, at least one")
        bos_counts = self.prefix_bos_counts
        prefixes = prefixes_for(
            lm, self.prefixes, self.prefix_lengths, self.seed, bos_counts=bos_counts
        )
        return BoundMemit(
            memit=self,
            lm=lm,
            layers=layers,
            weight=self.weight or known.weight,
            prefixes=prefixes,
            search=self.search.resolve(steps=known.steps, clamp=known.clamp),
            moments=[resolve_second_moment(lm, layer, self.second_moment) for layer in layers],
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        return {**vars(self), "second_moment": describe_second_moment(self.second_moment),
                "search": asdict(self.search)}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundMemit:
    """The method on a model."""

    memit: Memit
    lm: "LM"
    layers: tuple[int, ...]
    weight: float
    prefixes: tuple[str, ...]
    search: ValueSearch
    moments: list[SecondMoment | None]

    def sought(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """z of each fact: a state of the last layer."""
        memit = self.memit
        return search_values(
            self.lm, facts, self.prefixes, self.layers[-1], "state", memit.token, self.search,
            facts_per_pass=memit.facts_per_pass, progress=progress,
        )  # fmt: skip

    def insert(self, sought: Sequence[ValueResult], groups: list[list[int]]) -> list[Edit]:
        """An edit for each group of facts: layer by layer, on top of the change below."""
        requests = [s.request for s in sought]
        z = torch.stack([s.values[0] + s.delta for s in sought])
        edits = [self._empty([sought[i] for i in group]) for group in groups]
        owner = {i: number for number, group in enumerate(groups) for i in group}
        for left, layer, moment in zip(
            range(len(self.layers), 0, -1), self.layers, self.moments, strict=True
        ):
            keys, states = self._observe(requests, layer, edits, owner)
            share = (z - states) / left
            name = self.lm.name_of(self.lm.mlp_out(layer)) + ".weight"
            for number, group in enumerate(groups):
                K, R = keys[group], share[group]
                directions = K if moment is None else moment.solve(K, ridge=self.memit.ridge)
                change = spread(K, R, directions, self.weight)
                changes = {**edits[number].changes, name: change.to("cpu")}
                edits[number] = replace(edits[number], changes=changes)
        return edits

    @torch.no_grad()
    def _observe(
        self,
        requests: Sequence[EditRequest],
        layer: int,
        edits: Sequence[Edit],
        owner: dict[int, int],
    ) -> tuple[Float[Tensor, "fact key"], Float[Tensor, "fact width"]]:
        """Each fact's key at a layer, and its bare prompt's state at the last, as edited."""
        lm, last = self.lm, self.layers[-1]
        keys: list[Tensor] = []
        states: list[Tensor] = []
        for begin in range(0, len(requests), FACTS):
            some = requests[begin : begin + FACTS]
            rows = [row for asked in some for row in asked.rows]
            whose = [owner[begin + i] for i, asked in enumerate(some) for _ in asked.rows]
            ids = pad_rows(rows, lm.device)
            seen: list[Tensor] = []
            with (
                edited(lm, edits, whose),
                hook_calls((lm.mlp_out(layer), lambda args, _, seen=seen: seen.append(args[0]))),
                hook_outputs((lm.blocks[last], lambda out, seen=seen: seen.append(out.clone()))),
            ):
                lm.model.base_model(ids, use_cache=False)
            place = torch.tensor([row.place for row in rows])
            number = torch.arange(len(rows))
            at_place, ends = (x.reshape(*ids.shape, -1)[number, place].float() for x in seen)
            size = len(some[0].rows)
            keys.append(self._key(at_place.unflatten(0, (-1, size))))
            states.append(ends.unflatten(0, (-1, size))[:, 0])
        return torch.cat(keys), torch.cat(states)

    def _key(self, keys: Float[Tensor, "fact row key"]) -> Float[Tensor, "fact key"]:
        """Each fact's key, from those of its rows, the bare prompt's first."""
        if self.memit.key == "mean" or keys.shape[1] == 1:
            return keys.mean(1)
        return (keys[:, 0] + keys[:, 1:].mean(1)) / 2

    def _empty(self, sought: Sequence[ValueResult]) -> Edit:
        return Edit(
            changes={},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.memit.method,
            facts=tuple(s.fact for s in sought),
            settings={**self.to_dict(), "losses": [list(s.losses) for s in sought]},
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, all settled."""
        resolve = {"layers": self.layers, "weight": self.weight, "prefixes": self.prefixes,
                   "search": asdict(self.search)}  # fmt: skip
        moments = [describe_second_moment(moment) for moment in self.moments]
        return {**self.memit.to_dict(), **resolve, "second_moment": moments}


def spread(
    keys: Float[Tensor, "fact key"],
    missing: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
    weight: float,
) -> Change:
    """R Kᵀ (λ C + K Kᵀ)⁻¹, by way of C⁻¹K so that the system is only as large as the facts."""
    K, U, R = keys.double(), directions.double(), missing.double()
    inner = weight * torch.eye(len(K), dtype=K.dtype, device=K.device) + K @ U.T
    A = torch.linalg.solve(inner, U)
    low = LowRank(R.T.float().contiguous(), A.float())
    smaller = low.rank * sum(low.shape) < low.shape[0] * low.shape[1]
    return low if smaller else Dense(low.matrix())


PAPER = Memit(
    prefix_bos_counts=True,
    key="half bare",
    ridge=0.0,
    search=ValueSearch(kl_position="place", weight_decay=0.5, weight_decay_form="paper"),
)
"""What MEMIT's own code computes."""
