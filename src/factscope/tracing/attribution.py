"""Attribution patching: estimate the cells of a trace from gradients instead of measuring them.

AtP (Nanda, 2022). The base run is the one that a cell is patched in, the source run the one that
the patch comes from. The effect of a cell x is linearised at the base run:

    effect ≈ (x_source - x_base) · ∂metric/∂x

One backward pass over the base run gives all cells: states, MLP outputs, attention outputs, heads.

AtP* (Kramár et al., 2024) corrects two causes of false negatives:

1. Attention saturation. Where a softmax is saturated its gradient is almost zero, whatever a patch
   does to it. The paper patches queries and keys, recomputes the attention weights exactly and
   linearises from there. Our nodes are states and contributions. So we recompute the rest of the
   node's own block and the whole block above it exactly, and linearise from that block's output.
2. Cancellation. A positive direct effect and a negative indirect one can cancel. As in the paper,
   GradDrop repeats the backward pass once per layer, without the gradient through that layer's
   attention and MLP, and takes the mean of the absolute effects. The drop of a node's own layer
   leaves nothing of it, so the paper divides by L - 1; states belong to no layer: we divide by L.

GradDrop estimates magnitudes. The sign is that of the estimate without a drop, which is ours: it
makes the result comparable with measured cells.

All backward passes go down the layers together. At each block the gradients of all drops above it
are propagated in one batch, and the drop of this block joins.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.lm.forward import ActivationCache
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.replay import PackedView, Replay
from factscope.progress import Progress, no_progress

Metric = Callable[[Float[Tensor, "row token width"]], Float[Tensor, " row"]]
"""The metric of each base row as a function of its last-layer states."""

MODULES = ("attn", "mlp")


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """Which cells to estimate: base rows of a run, and the rows that their patches come from."""

    lm: LM
    run: ActivationCache
    base: Int[Tensor, " row"]
    source: Int[Tensor, " row"]
    start: int  # the first token whose state may differ between base and source
    metric: Metric
    kinds: Sequence[str] = ("states", *MODULES)  # which cells to estimate; also "heads"
    slots: int = 2**12  # tokens that go through a block in one call

    @cached_property
    def replay(self) -> Replay:
        """The blocks over the tokens from `start` on of the base rows."""
        length, device = self.run.inputs.shape[1], self.run.inputs.device
        position = torch.arange(self.start, length, device=device).expand(len(self.base), -1)
        start = torch.full_like(position, self.start)
        row = self.base.to(device)
        view = PackedView(row=row, position=position, start=start, past=self.start)
        return Replay(self.lm, self.run, view)

    def take(
        self, activations: Float[Tensor, "all all_tokens size"], rows: Int[Tensor, " row"]
    ) -> Float[Tensor, "row token size"]:
        """The activations of some rows, from token `start` on."""
        return activations[rows.to(activations.device), self.start :]

    def inputs(self, layer: int) -> Float[Tensor, "row token width"]:
        """The input of a block in the base rows."""
        before = self.run.inputs if layer == 0 else self.run.states[layer - 1]
        return self.take(before, self.base)

    def differences(self, kind: str, layer: int) -> Float[Tensor, "node row token width"]:
        """x_source - x_base of a layer's cells; for heads, what each adds to the contribution a."""
        run = self.run
        x = (run.states if kind == "states" else run.contributions[kind])[layer]
        difference = self.take(x, self.source) - self.take(x, self.base)
        if kind != "heads":
            return difference[None]
        by_head = difference.unflatten(-1, (self.lm.n_heads, -1))
        return torch.einsum("rthd,hdw->hrtw", by_head, self.lm.head_weight(layer))

    def chunks(self, copies: int) -> Iterator[slice]:
        """Slices of copies of the base rows, as many as go through a block in one call."""
        tokens = self.replay.view.position.numel()
        size = max(1, self.slots // tokens)
        return (slice(i, i + size) for i in range(0, copies, size))


def attribution_patching(
    work: Attribution, *, corrected: bool = False, progress: Progress = no_progress
) -> dict[str, Float[Tensor, "node row token layer"]]:
    """The estimated effect of each cell: AtP, or AtP* if `corrected`.

    For each kind, which has one node per token and layer; "heads" has one for each head.
    """
    layers, estimate = work.lm.n_layers, _estimate_corrected if corrected else _estimate
    effects: dict[str, list[Tensor]] = {}
    gradients, above = _metric_gradient(work)[None], None
    for layer in reversed(range(layers)):
        gradients = gradients.to(work.run.states[layer].device)
        below, at_modules = backward(work, layer, gradients)
        for kind, effect in estimate(work, layer, gradients, above, at_modules).items():
            effects.setdefault(kind, []).insert(0, effect.float().cpu())
        if corrected:
            dropped, _ = backward(work, layer, gradients[:1], drop=True)
            below = torch.cat([below, dropped])
        above, gradients = gradients, below
        progress(1 / layers)
    return {kind: torch.stack(columns, dim=-1) for kind, columns in effects.items()}


def _metric_gradient(work: Attribution) -> Float[Tensor, "row token width"]:
    """∂metric/∂h of the last layer's states."""
    states = work.run.states[-1]
    with torch.enable_grad():
        states = states[work.base.to(states.device)].requires_grad_()
        [gradient] = torch.autograd.grad(work.metric(states).sum(), states)
    return gradient[:, work.start :]


def backward(
    work: Attribution,
    layer: int,
    gradients: Float[Tensor, "drop row token width"],
    *,
    drop: bool = False,
) -> tuple[Float[Tensor, "drop row token width"], dict[str, Float[Tensor, "row token width"]]]:
    """Propagate gradients from a block's output to its input.

    Also return the gradients at the outputs of attention and MLP, without any drop: those of the
    first of `gradients`. With `drop`, no gradient passes through attention and MLP.
    """
    lm, inputs, below = work.lm, work.inputs(layer), []
    at_modules: dict[str, Tensor] = {}
    for some in work.chunks(len(gradients)):
        given = gradients[some]
        with torch.enable_grad():
            hidden = inputs.expand(len(given), *inputs.shape).flatten(0, 1).requires_grad_()
            added = {name: torch.zeros_like(hidden, requires_grad=True) for name in MODULES}
            hooks = [
                (lm.contribution(name, layer), Tensor.detach if drop else _adding(zero))
                for name, zero in added.items()
            ]
            with hook_outputs(*hooks):
                output = work.replay(layer, hidden)
            wanted = [hidden] if drop else [hidden, *added.values()]
            first, *others = torch.autograd.grad(output, wanted, given.flatten(0, 1))
        below.append(first.view(given.shape))
        if not at_modules and not drop:
            values = (x.view(given.shape)[0] for x in others)
            at_modules = dict(zip(added, values, strict=True))
    return torch.cat(below), at_modules


def _adding(change: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook that adds to a module's output."""
    return lambda out: out + change.view(out.shape)


# ---- AtP


def _estimate(
    work: Attribution,
    layer: int,
    gradients: Float[Tensor, "1 row token width"],
    above: Tensor | None,
    at_modules: dict[str, Float[Tensor, "row token width"]],
) -> dict[str, Float[Tensor, "node row token"]]:
    """Difference times gradient for every cell of a layer."""
    at_cells = {"states": gradients[0], "heads": at_modules["attn"], **at_modules}
    return {kind: _dot(work.differences(kind, layer), at_cells[kind]) for kind in work.kinds}


def _dot(x: Float[Tensor, "... width"], y: Float[Tensor, "... width"]) -> Float[Tensor, "..."]:
    return (x.float() * y.float()).sum(-1)


# ---- AtP*


def _estimate_corrected(
    work: Attribution,
    layer: int,
    gradients: Float[Tensor, "drop row token width"],
    above: Float[Tensor, "drop_above row token width"] | None,
    at_modules: dict[str, Float[Tensor, "row token width"]],
) -> dict[str, Float[Tensor, "node row token"]]:
    """The corrected effect of every cell of a layer.

    `gradients` are those at the output of this layer's block: the first without a drop, then one
    for each dropped layer above, the last for the next one. `above` are those at the output of the
    next block, in the same order, without its own drop.
    """
    lm, effects = work.lm, {}

    def combine(change: Float[Tensor, "row token width"], unaffected: int, drops: int) -> Tensor:
        """The mean of the absolute effects over all drops, with the sign of the first effect.

        `unaffected` is the number of layers, all below the node, whose drop does not affect it.
        """
        if above is None:
            by_drop = _dot(change, gradients)
        else:
            exact = _effects_through_block(work, layer + 1, change, above.to(change.device))
            by_drop = torch.cat([exact, _dot(change, gradients[-1:])])
        first = by_drop[0]
        return first.sign() * (unaffected * first.abs() + by_drop[1:].abs().sum(0)) / drops

    for kind in work.kinds:
        differences, drops = work.differences(kind, layer), max(1, lm.n_layers - 1)
        if kind == "states":
            effects[kind] = combine(differences[0], layer + 1, lm.n_layers)[None]
            continue
        module = lm.contribution("attn" if kind == "heads" else kind, layer)
        changes = (_change_of_states(work, layer, module, x) for x in differences)
        effects[kind] = torch.stack([combine(x, layer, drops) for x in changes])
    return effects


@torch.no_grad()
def _change_of_states(
    work: Attribution, layer: int, module: nn.Module, difference: Float[Tensor, "row token width"]
) -> Float[Tensor, "row token width"]:
    """What patching a contribution changes in the block's output, each token patched alone.

    Above the output projection of attention a block does not mix tokens, so that patching all
    tokens together gives the same.
    """
    with hook_outputs((module, _adding(difference))):
        patched = work.replay(layer, work.inputs(layer))
    return patched - work.take(work.run.states[layer], work.base)


@torch.no_grad()
def _effects_through_block(
    work: Attribution,
    layer: int,
    change: Float[Tensor, "row token width"],
    gradients: Float[Tensor, "drop row token width"],
) -> Float[Tensor, "drop row token"]:
    """The effect of changing one token's state below a block: exact through the block, linear
    above it."""
    inputs = work.inputs(layer)
    tokens = inputs.shape[1]
    output = work.take(work.run.states[layer], work.base)
    effects: list[Tensor] = []
    for some in work.chunks(tokens):
        patched_tokens = range(tokens)[some]
        hidden = inputs.repeat(len(patched_tokens), 1, 1).view(-1, *inputs.shape)
        for i, token in enumerate(patched_tokens):
            hidden[i, :, token] += change[:, token].to(hidden.device)
        changed = work.replay(layer, hidden.flatten(0, 1)).view(hidden.shape) - output
        effects.append(
            torch.einsum("prtw,drtw->drp", changed.float(), gradients.to(changed.device).float())
        )
    return torch.cat(effects, dim=-1)


def sum_windows(
    effects: Float[Tensor, "... layer"], windows: Sequence[tuple[int, int]]
) -> Float[Tensor, "... layer"]:
    """The estimate of a window of contributions: the sum over its layers."""
    return torch.stack([effects[..., start:stop].sum(-1) for start, stop in windows], dim=-1)
