"""Gradients of linear layers in factored form (MEND, §3), and the model that they come from.

For one row of tokens the gradient of a loss with respect to a weight is

    ∇W = Σ_t δ_t x_tᵀ

where x_t is the layer's input at token t and δ_t the gradient with respect to its output there.
The factors are small, each fact of a batch has its own, and an edit built from them has low rank:
ΔW = B A.

Edits never change the layers below the first edited one. `SplitModel` runs those once and repeats
only the layers above under each edit.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.contexts import TokenBatch
from factscope.editing.defaults import check_layer
from factscope.errors import BadSetting
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_calls, hook_io, hook_outputs
from factscope.lm.replay import PackedView, Replay

if TYPE_CHECKING:
    from factscope.lm.model import LM

EDITED_LAYERS = 3
"""Layers that are edited by default, as in MEND's own settings."""


# ---- the edited weights


class WeightShape(NamedTuple):
    """An edited weight: its name in the model and the widths of its input and output."""

    name: str
    keys: int
    values: int


class TargetModule(NamedTuple):
    """A linear layer whose weight is edited."""

    module: nn.Module
    layer: int
    shape: WeightShape


def target_modules(lm: "LM", layers: Sequence[int] | None = None) -> list[TargetModule]:
    """The linear layers of these layers' MLPs, lowest layer first; None: of the last layers."""
    if layers is None:
        layers = range(max(0, lm.n_layers - EDITED_LAYERS), lm.n_layers)
    if not layers:
        raise BadSetting("layers is empty; name at least one layer to edit")
    targets = []
    for layer in sorted({check_layer(lm, layer) for layer in layers}):
        for module in [*lm.mlp_in(layer), lm.mlp_out(layer)]:
            weight: Any = module.weight
            keys, values = weight.shape if lm.family.transposed else weight.shape[::-1]
            shape = WeightShape(f"{lm.name_of(module)}.weight", keys, values)
            targets.append(TargetModule(module, layer, shape))
    return targets


# ---- the model, split below the first edited layer


class SplitModel:
    """A model split below its first edited layer."""

    def __init__(self, lm: "LM", targets: Sequence[TargetModule]) -> None:
        self.lm, self.targets = lm, list(targets)
        self.first = targets[0].layer
        self._replays: dict[int, Replay] = {}
        """By row length: replay of the blocks on rows of that length."""

    @torch.no_grad()
    def below(
        self, ids: Int[Tensor, "row token"], lengths: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "row token width"], Float[Tensor, "row token width"]]:
        """The input of the first edited layer, and the unedited model's output of the last layer.

        With `lengths`, or for a single row, the pass also prepares `above` for rows of these
        lengths; otherwise `above` runs the model once for each new length.
        """
        lengths = lengths or ([ids.shape[1]] if len(ids) == 1 else [])
        if lengths:
            run = forward(self.lm, ids)
            for length in lengths:
                # Masks and positions of one row serve any number of rows.
                view = PackedView.whole(1, length, ids.device)
                self._replays[length] = Replay(self.lm, run, view)
            return (run.inputs, *run.states)[self.first], run.states[-1]
        entering: list[Tensor] = []
        last: list[Tensor] = []
        blocks = self.lm.blocks

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering.append(args[0] if args else kwargs["hidden_states"])

        with hook_calls((blocks[self.first], enter)), hook_outputs((blocks[-1], last.append)):
            self.lm.model.base_model(ids, use_cache=False)
        return entering[0], last[0]

    def above(self, hidden: Float[Tensor, "row token width"]) -> Float[Tensor, "row token width"]:
        """The output of the last layer, from the input of the first edited one."""
        length = hidden.shape[1]
        if length not in self._replays:
            self.below(torch.zeros(1, length, dtype=torch.long, device=self.lm.device))
        for layer in range(self.first, self.lm.n_layers):
            hidden = self._replays[length](layer, hidden)
        return hidden


# ---- gradients and changes


@dataclass(frozen=True, eq=False)
class GradientFactors:
    """The gradient of one weight for each fact: ∇W = Σ_t δ_t x_tᵀ."""

    x: Float[Tensor, "fact token key"]
    delta: Float[Tensor, "fact token value"]

    @cached_property
    def mask(self) -> Bool[Tensor, "fact token"]:
        """The tokens that contribute to the gradient."""
        return (self.delta != 0).any(-1)

    def select(self, table: Float[Tensor, "fact token width"]) -> Float[Tensor, "row width"]:
        """The rows of the tokens that are processed: of a single fact all, as in `TokenBatch`."""
        return table[0] if len(table) == 1 else table[self.mask]

    def scatter(self, rows: Float[Tensor, "row width"]) -> Float[Tensor, "fact token width"]:
        """The inverse of `select`, with zeros at tokens that do not contribute."""
        mask = self.mask[..., None]
        zeros = rows.new_zeros(*self.mask.shape, rows.shape[-1])
        single = len(self.x) == 1
        return torch.where(mask, rows, zeros) if single else zeros.masked_scatter(mask, rows)


@dataclass(frozen=True, eq=False)
class FactorChange:
    """The change of one weight for each fact: ΔW = B A."""

    B: Float[Tensor, "fact value rank"]
    A: Float[Tensor, "fact rank key"]


def gradient_factors(
    split: SplitModel, hidden: Float[Tensor, "fact token width"], batch: TokenBatch
) -> tuple[list[GradientFactors], Float[Tensor, " fact"]]:
    """The factors of each fact's loss for every target module, and the losses.

    `hidden` is the input of the first edited layer.
    """
    inputs: dict[int, Tensor] = {}
    probes: dict[int, Tensor] = {}

    def add_zeros(i: int, x: Tensor, output: Tensor) -> Tensor:
        # The gradient with respect to zeros added to the output is δ. No weight needs one.
        inputs[i] = x.detach()
        probes[i] = torch.zeros_like(output, requires_grad=True)
        return output + probes[i]

    numbers = range(len(split.targets))
    hooks = [(split.targets[i].module, partial(add_zeros, i)) for i in numbers]
    with torch.enable_grad(), hook_io(*hooks):
        losses = batch.losses(batch.log_probs(split.lm, split.above(hidden)))
        deltas = torch.autograd.grad(losses.sum(), [probes[i] for i in numbers])

    def by_fact(tensor: Tensor) -> Tensor:  # some families flatten rows and tokens in their MLPs
        return tensor.reshape(len(hidden), -1, tensor.shape[-1]).float().to(split.lm.device)

    factors = [GradientFactors(by_fact(inputs[i]), by_fact(deltas[i])) for i in numbers]
    return factors, losses.detach()


def changes_applied(
    targets: Sequence[TargetModule], changes: Sequence[FactorChange]
) -> AbstractContextManager[None]:
    """Inside, every fact's rows run with its own changes; rows of one fact are adjacent."""

    def add(change: FactorChange, x: Tensor, output: Tensor) -> Tensor:
        A, B = change.A.to(x.device), change.B.to(x.device)
        by_fact = x.reshape(len(A), -1, x.shape[-1]).float()
        shift = torch.bmm(torch.bmm(by_fact, A.mT), B.mT)
        return output + shift.reshape(output.shape).to(output.dtype)

    pairs = zip(targets, changes, strict=True)
    return hook_io(*((target.module, partial(add, change)) for target, change in pairs))
