"""MEMIT: many facts at once, spread over several layers (Meng et al., 2023).

For each fact, the value search (value_search.py) finds a state z at the last of the layers that
makes the model predict the new object. Then the MLP output weights are updated from the lowest
layer upwards:

    ΔW = R Kᵀ (λ C + K Kᵀ)⁻¹

K holds the keys of the facts at this layer, C is the second moment of other keys, and R is the
residual z - h divided by the number of layers left, h being the state with the updates below.

Some families normalise the MLP's output before it is added to the state (Gemma 2 and 3, OLMo 2), or
their sum (small OPT models). R is then the change of the norm's input after which its output is as
near as possible to its old output plus the residual (`input_change`): a norm cannot give a vector
of any length, and what one layer does not give is left to the next.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.contexts import EditRequest, pad_rows, resolve_prefixes
from factscope.editing.defaults import check_layer, memit_defaults, resolve_second_moment
from factscope.editing.edit import Change, Dense, Edit, LowRank
from factscope.editing.per_row import edited
from factscope.editing.settings import Memit, describe_second_moment
from factscope.editing.value_search import BoundValueEditor, ValueResult
from factscope.errors import BadEdit, BadSetting, FactscopeError
from factscope.lm.hooks import hook_io, hook_outputs

if TYPE_CHECKING:
    from factscope.lm.model import LM

FACTS_PER_PASS = 32
"""Facts per forward pass when keys and states are read."""


class BoundMemit(BoundValueEditor[Memit]):
    """MEMIT bound to a model, every default resolved."""

    site = "state"  # the state h at the last layer, and δ such that z = h + δ

    def __init__(self, settings: Memit, lm: "LM") -> None:
        defaults = memit_defaults(lm)
        layers = defaults.layers if settings.layers is None else settings.layers
        if not layers or list(layers) != sorted(set(layers)):
            raise BadSetting(f"layers is {layers}; give at least one, in ascending order")
        self.lm = lm
        self.layers = tuple(check_layer(lm, layer) for layer in layers)
        self.layer = self.layers[-1]
        self.covariance_weight = settings.covariance_weight or defaults.covariance_weight
        self.prefixes = resolve_prefixes(lm, settings)
        self.search = settings.search.resolve(
            steps=defaults.steps,
            clamp=defaults.clamp,
            lr=defaults.lr,
            weight_decay=defaults.weight_decay,
        )
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

    def insert_jointly(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """One update of all values."""
        return self.insert(values, [list(range(len(values)))])

    def insert_each(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """An update of each value on its own."""
        return self.insert(values, [[i] for i in range(len(values))])

    def insert(
        self, values: Sequence[ValueResult], groups: list[list[int]]
    ) -> list[Edit | FactscopeError]:
        """An edit for each group of facts, updated layer by layer from the lowest."""
        requests = [x.request for x in values]
        z = torch.stack([x.values[0] + x.delta for x in values])
        second_moment = [describe_second_moment(C) for C in self.second_moments]
        edits = [
            self.new_edit([values[i] for i in group], {}, second_moment=second_moment)
            for group in groups
        ]
        group_of = {i: g for g, group in enumerate(groups) for i in group}
        errors: dict[int, FactscopeError] = {}
        for n, (layer, C) in enumerate(zip(self.layers, self.second_moments, strict=True)):
            keys, h, norm_io = self._keys_and_states(requests, layer, edits, group_of)
            residuals = (z - h) / (len(self.layers) - n)
            if (norm := self.lm.mlp_norm(layer)) is not None:
                x, y = norm_io
                residuals = input_change(norm, x, y, residuals)
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
    ) -> tuple[Float[Tensor, "fact key"], Float[Tensor, "fact width"], list[Tensor]]:
        """Each fact's key at a layer and the bare prompt's state at the last one, as edited; also
        input and output of the norm after the layer's MLP, if there is one."""
        lm = self.lm
        norm = lm.mlp_norm(layer)
        batches: list[list[Tensor]] = []
        for begin in range(0, len(requests), FACTS_PER_PASS):
            batch = requests[begin : begin + FACTS_PER_PASS]
            rows = [row for request in batch for row in request.rows]
            edit_of = [group_of[begin + i] for i, request in enumerate(batch) for _ in request.rows]
            ids = pad_rows(rows, lm.device)
            keys, states, norm_io = [], [], []

            def read_norm(x: Tensor, y: Tensor, norm_io: list[Tensor] = norm_io) -> None:
                norm_io.extend((x.clone(), y.clone()))

            with (
                edited(lm, edits, edit_of),
                hook_io((lm.mlp_out(layer), lambda k, _, keys=keys: keys.append(k))),
                hook_outputs(
                    (lm.blocks[self.layer], lambda h, states=states: states.append(h.clone()))
                ),
                hook_io(*([] if norm is None else [(norm, read_norm)])),
            ):
                lm.model.base_model(ids, use_cache=False)
            position = torch.tensor([row.edit_position for row in rows])
            row = torch.arange(len(rows))
            contexts = len(batch[0].rows)
            # Some families flatten rows and tokens before the MLP.
            k, *others = (
                x.reshape(*ids.shape, -1)[row, position].float().unflatten(0, (-1, contexts))
                for x in (*keys, *states, *norm_io)
            )
            if self.settings.key == "mean" or contexts == 1:
                key = k.mean(1)
            else:  # half the bare prompt's key, half the mean after the prefixes
                key = (k[:, 0] + k[:, 1:].mean(1)) / 2
            batches.append([key, *(x[:, 0] for x in others)])
        keys, states, *norm_io = map(torch.cat, zip(*batches, strict=True))
        return keys, states, norm_io


def input_change(
    norm: nn.Module,
    x: Float[Tensor, "fact width"],
    y: Float[Tensor, "fact width"],
    change: Float[Tensor, "fact width"],
) -> Float[Tensor, "fact width"]:
    """The change of a norm's input x after which its output is as near as possible to y + change.

    A norm returns g ⊙ u + b, where g and b are its weights and u is x divided by its root mean
    square σ (in a LayerNorm, after its mean is subtracted): whatever x is, ‖u‖² is the width. The
    nearest such output to a target t has u = (g ⊙ t - ν) / (g² + μ), with μ for the length and, in
    a LayerNorm, ν for the mean of u. σ stays as it is.
    """
    g = norm(torch.ones_like(x[0], dtype=next(norm.parameters()).dtype)).double()
    x, t, mean = x.double(), (y + change).double(), torch.zeros(())
    centred = isinstance(norm, nn.LayerNorm)
    if centred:
        g, t, mean = norm.weight.double(), t - norm.bias.double(), x.mean(-1, keepdim=True)
    deviation = x - mean.to(x)

    def output(mu: Tensor) -> Tensor:
        weight = 1 / (g.square() + mu)
        nu = (weight * g * t).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
        return weight * (g * t - nu if centred else g * t)

    # ‖u‖ falls from ∞ to 0 as μ grows from -min g² on: bisect.
    low = -g.square().min().expand(len(x), 1)
    high = low + (g * t).norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
    for _ in range(80):
        middle = (low + high) / 2
        is_long = output(middle).square().mean(-1, keepdim=True) > 1
        low, high = torch.where(is_long, middle, low), torch.where(is_long, high, middle)
    sigma = deviation.square().mean(-1, keepdim=True).sqrt()
    return (sigma * output(high) - deviation).float()


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
