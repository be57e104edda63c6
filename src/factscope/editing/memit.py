"""MEMIT: many facts at once, spread over several layers (Meng et al., 2023).

For each fact, the value search (value_search.py) finds a state z at the last of the layers that
makes the model predict the new object. Then the MLP output weights are updated from the lowest
layer upwards:

    ΔW = R Kᵀ (λ C + K Kᵀ)⁻¹

K holds the keys of the facts at this layer, C is the second moment of other keys, and R is the
residual z - h divided by the number of layers left, h being the state with the updates below.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.contexts import EditRequest, pad_rows, resolve_prefixes
from factscope.editing.defaults import check_layer, memit_defaults, resolve_second_moment
from factscope.editing.edit import Change, Dense, Edit, LowRank
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.per_row import edited
from factscope.editing.settings import Memit, describe_second_moment
from factscope.editing.value_search import ValueResult, search_values
from factscope.errors import BadEdit, BadSetting, FactscopeError
from factscope.facts import Fact
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

FACTS_PER_PASS = 32
"""Facts per forward pass when keys and states are read."""


class BoundMemit(BoundEditor):
    """MEMIT bound to a model, every default resolved."""

    def __init__(self, settings: Memit, lm: "LM") -> None:
        defaults = memit_defaults(lm)
        layers = defaults.layers if settings.layers is None else settings.layers
        if not layers or list(layers) != sorted(set(layers)):
            raise BadSetting(f"layers is {layers}; give at least one, in ascending order")
        self.lm = lm
        self.layers = tuple(check_layer(lm, layer) for layer in layers)
        self.covariance_weight = settings.covariance_weight or defaults.covariance_weight
        self.prefixes = resolve_prefixes(lm, settings)
        self.search = settings.search.resolve(steps=defaults.steps, clamp=defaults.clamp)
        self.second_moments = [
            resolve_second_moment(lm, layer, settings.second_moment) for layer in self.layers
        ]
        self.settings = replace(
            settings,
            layers=self.layers,
            covariance_weight=self.covariance_weight,
            prefixes=self.prefixes,
            search=self.search,
            second_moment=tuple(C for C in self.second_moments if C is not None) or "identity",
        )

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts."""
        values = raise_first_error(self.find_values(facts, progress))
        edits = raise_first_error(self.insert(values, [list(range(len(values)))]))
        return with_checks(self.lm, edits)[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error."""

        def insert_all(values: list[ValueResult]) -> list[Edit | FactscopeError]:
            return self.insert(values, [[i] for i in range(len(values))])

        edits = map_valid(self.find_values(facts, progress), insert_all)
        return map_valid(edits, lambda edits: with_checks(self.lm, edits))

    def find_values(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """For each fact the state at the last layer, and δ such that z = h + δ."""
        return search_values(self.lm, facts, self.settings, self.layers[-1], "state", progress)

    def insert(
        self, values: Sequence[ValueResult], groups: list[list[int]]
    ) -> list[Edit | FactscopeError]:
        """An edit for each group of facts, updated layer by layer from the lowest."""
        requests = [x.request for x in values]
        z = torch.stack([x.values[0] + x.delta for x in values])
        edits = [self._empty_edit([values[i] for i in group]) for group in groups]
        group_of = {i: g for g, group in enumerate(groups) for i in group}
        errors: dict[int, FactscopeError] = {}
        for n, (layer, C) in enumerate(zip(self.layers, self.second_moments, strict=True)):
            keys, h = self._keys_and_states(requests, layer, edits, group_of)
            residuals = (z - h) / (len(self.layers) - n)
            name = self.lm.name_of(self.lm.mlp_out(layer)) + ".weight"
            for g, group in enumerate(groups):
                K, R = keys[group], residuals[group]
                directions = K if C is None else C.solve(K, ridge=self.settings.ridge)
                change = memit_update(K, R, directions, self.covariance_weight)
                changes = {**edits[g].changes, name: change.to("cpu")}
                try:
                    edits[g] = replace(edits[g], changes=changes)
                except BadEdit as error:  # NaN; the other groups go on
                    errors.setdefault(g, error)
        return [errors.get(g, edit) for g, edit in enumerate(edits)]

    @torch.no_grad()
    def _keys_and_states(
        self,
        requests: Sequence[EditRequest],
        layer: int,
        edits: Sequence[Edit],
        group_of: dict[int, int],
    ) -> tuple[Float[Tensor, "fact key"], Float[Tensor, "fact width"]]:
        """Each fact's key at a layer and the bare prompt's state at the last one, as edited."""
        lm, last = self.lm, self.layers[-1]
        keys: list[Tensor] = []
        states: list[Tensor] = []
        for begin in range(0, len(requests), FACTS_PER_PASS):
            batch = requests[begin : begin + FACTS_PER_PASS]
            rows = [row for request in batch for row in request.rows]
            edit_of = [group_of[begin + i] for i, request in enumerate(batch) for _ in request.rows]
            ids = pad_rows(rows, lm.device)
            read: list[Tensor] = []
            with (
                edited(lm, edits, edit_of),
                hook_calls((lm.mlp_out(layer), lambda args, _, read=read: read.append(args[0]))),
                hook_outputs((lm.blocks[last], lambda out, read=read: read.append(out.clone()))),
            ):
                lm.model.base_model(ids, use_cache=False)
            position = torch.tensor([row.edit_position for row in rows])
            row = torch.arange(len(rows))
            contexts = len(batch[0].rows)
            # Some families flatten rows and tokens before the MLP.
            by_row = [x.reshape(*ids.shape, -1)[row, position].float() for x in read]
            k, h = (x.unflatten(0, (-1, contexts)) for x in by_row)
            if self.settings.key == "mean" or contexts == 1:
                keys.append(k.mean(1))
            else:  # half the bare prompt's key, half the mean after the prefixes
                keys.append((k[:, 0] + k[:, 1:].mean(1)) / 2)
            states.append(h[:, 0])
        return torch.cat(keys), torch.cat(states)

    def _empty_edit(self, values: Sequence[ValueResult]) -> Edit:
        facts, losses = [x.request.fact for x in values], [list(x.losses) for x in values]
        second_moment = [describe_second_moment(C) for C in self.second_moments]
        return self.settings.new_edit(
            self.lm, {}, facts, second_moment=second_moment, losses=losses
        )


def memit_update(
    keys: Float[Tensor, "fact key"],
    residuals: Float[Tensor, "fact value"],
    directions: Float[Tensor, "fact key"],
    covariance_weight: float,
) -> Change:
    """R Kᵀ (λ C + K Kᵀ)⁻¹, given the directions C⁻¹k.

    With U = C⁻¹K this is R (λ I + Kᵀ U)⁻¹ Uᵀ: a system as large as the number of facts only.
    """
    K, U, R = keys.double(), directions.double(), residuals.double()
    identity = torch.eye(len(K), dtype=K.dtype, device=K.device)
    A = torch.linalg.solve(covariance_weight * identity + K @ U.T, U)
    low_rank = LowRank(R.T.float().contiguous(), A.float())
    rows, columns = low_rank.shape
    is_smaller = low_rank.rank * (rows + columns) < rows * columns
    return low_rank if is_smaller else Dense(low_rank.matrix())
