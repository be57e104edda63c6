"""Integrated gradients of MLP neurons: the contribution of each to P[o], an answer's probability
(Dai et al., 2022).

A neuron is an entry of a layer's key k, the input of the MLP's output weight. At the position that
predicts the answer all neurons of a layer are scaled by α, from 0 to 1, and the gradient of P[o] is
integrated along that path:

    IG(k) = k ⊙ ∫₀¹ ∂P[o](α k) / ∂k dα

The IG of a layer's neurons sum to P[o](k) - P[o](0) (completeness). The difference is the error
estimate of an adaptive quadrature: a segment of the path whose IG do not sum to the gain of P[o]
along it is halved.

A point of a path is one α in one layer at one position. Only that position is recomputed, with the
keys and values to its left from one clean run; and the points of all layers share one pass, in
which each point enters at its own layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.contexts import TokenRow, pad_rows
from factscope.editing.settings import NeuronSite, PathRule
from factscope.lm.forward import ActivationCache, forward, token_probability
from factscope.lm.hooks import hook_io
from factscope.lm.memory import Budget, run_in_batches
from factscope.lm.quadrature import quadrature
from factscope.lm.replay import PackedView, Replay
from factscope.progress import NestedProgress, Progress, no_progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

MAX_DEPTH = 16
"""Maximum number of times a segment is halved. Where a norm follows the MLP, as in Gemma 2, nearly
all of the gain is at the start of the path."""
HALF_TOLERANCE = 0.7
"""Fraction of a segment's tolerance that each half gets, not 0.5: usually one half has nearly all
of the error."""
MIN_GAIN = 0.1
"""The tolerance of a layer is relative to its gain, but to at least this fraction of the largest
layer's gain."""
FIRST_PASS = 0.7
"""Assumed fraction of the work before any segment is halved, for progress reports."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NeuronAttributions:
    """Each neuron's contribution to P[o]. A readout is a position with the token o."""

    scores: Float[Tensor, "readout layer neuron"]
    """IG of each neuron."""
    neurons: Float[Tensor, "readout layer neuron"]
    """The activations of the neurons in the clean run."""
    gains: Float[Tensor, "readout layer"]
    """P[o](k) - P[o](0) of each layer, which the scores should sum to."""


def attribute_neurons(
    lm: "LM",
    rows: Sequence[TokenRow],
    *,
    steps: int = 4,
    rule: PathRule = "radau",
    tolerance: float | None = 0.02,
    site: NeuronSite = "key",
    points_per_pass: int | None = None,
    progress: Progress = no_progress,
) -> NeuronAttributions:
    """IG of every neuron of every layer, for each position of the rows and its label.

    A segment whose IG differ from its gain by more than `tolerance` (relative) is halved; None
    never halves. `points_per_pass` is None for what fits into memory.
    """
    paths = NeuronPaths(lm, rows, site)
    integrator = _Integrator(paths, steps, rule, points_per_pass)
    nested = NestedProgress(progress)
    readouts, layers = len(paths.label), lm.n_layers
    segments = [_Segment(i, layer, 0.0, 1.0) for i in range(readouts) for layer in range(layers)]
    integrals = integrator(segments, nested.within(0.0, FIRST_PASS))
    end_p = paths.clean_probability().repeat_interleave(layers)
    gains = (end_p - integrals.start_p).view(readouts, layers)
    scores = integrals.scores.view(readouts, layers, -1).clone()
    neurons = integrals.neurons.view(readouts, layers, -1)
    if tolerance is not None:
        largest = gains.abs().amax(1, keepdim=True)
        allowed = tolerance * gains.abs().maximum(MIN_GAIN * largest).flatten()
        for depth in range(MAX_DEPTH):
            error = (integrals.scores.sum(-1) - (end_p - integrals.start_p)).abs()
            inaccurate = (error > allowed).nonzero()[:, 0].tolist()
            if not inaccurate:
                break
            # Replace the score of each such segment by those of its halves.
            for i in inaccurate:
                scores[segments[i].readout, segments[i].layer] -= integrals.scores[i]
            segments = [half for i in inaccurate for half in segments[i].halves()]
            length = (1 - FIRST_PASS) / MAX_DEPTH
            integrals = integrator(segments, nested.within(FIRST_PASS + depth * length, length))
            for segment, score in zip(segments, integrals.scores, strict=True):
                scores[segment.readout, segment.layer] += score
            # A first half ends where the second one starts.
            end_p = torch.stack([integrals.start_p[1::2], end_p[inaccurate]], dim=1).flatten()
            allowed = HALF_TOLERANCE * allowed[inaccurate].repeat_interleave(2)
    nested.within(0.0, 1.0)(1.0)
    return NeuronAttributions(scores=scores, neurons=neurons, gains=gains)


# ---- quadrature over segments of paths


@dataclass(frozen=True)
class _Segment:
    """α from `start` to `end`, in one layer for one readout."""

    readout: int
    layer: int
    start: float
    end: float

    def halves(self) -> "tuple[_Segment, _Segment]":
        middle = (self.start + self.end) / 2
        return replace(self, end=middle), replace(self, start=middle)


@dataclass(frozen=True, eq=False)
class _Integrals:
    scores: Float[Tensor, "segment neuron"]
    """IG over the segment."""
    neurons: Float[Tensor, "segment neuron"]
    start_p: Float[Tensor, " segment"]
    """P[o] at the start of the segment: the rules have a node there."""


class _Integrator:
    """Integrates over segments, as many at once as fit into memory."""

    def __init__(
        self, paths: "NeuronPaths", steps: int, rule: PathRule, points_per_pass: int | None
    ) -> None:
        self.paths = paths
        self.nodes, self.weights = (x.to(paths.lm.device) for x in quadrature(steps, rule))
        self.size = max(1, math.ceil((points_per_pass or paths.max_points()) / steps))

    def __call__(self, segments: Sequence[_Segment], progress: Progress) -> _Integrals:
        results = run_in_batches(segments, self.size, self._batch, progress)
        return _Integrals(*(torch.stack(part) for part in zip(*results, strict=True)))

    def _batch(
        self, segments: Sequence[_Segment], progress: Progress
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The fields of `_Integrals` for each segment."""
        order = sorted(range(len(segments)), key=lambda i: segments[i].layer)
        ordered = [segments[i] for i in order]
        device, steps = self.nodes.device, len(self.nodes)

        def per_point(values: list[int] | list[float]) -> Tensor:
            return torch.tensor(values, device=device).repeat_interleave(steps)

        length = per_point([s.end - s.start for s in ordered])
        points = self.paths.evaluate(
            per_point([s.readout for s in ordered]),
            per_point([s.layer for s in ordered]),
            per_point([s.start for s in ordered]) + length * self.nodes.repeat(len(ordered)),
        )
        weight = (length * self.weights.repeat(len(ordered)))[:, None].float()
        ig = (points.neurons * points.gradients * weight).unflatten(0, (-1, steps)).sum(1)
        progress(1.0)
        inverse = torch.tensor(order, device=device).argsort()
        parts = ig, points.neurons[::steps], points.p[::steps]
        return list(zip(*(part[inverse] for part in parts), strict=True))


# ---- P[o] and its gradient at points of paths


@dataclass(frozen=True, kw_only=True, eq=False)
class PathPoints:
    """P[o] and its gradient at points of paths."""

    neurons: Float[Tensor, "point neuron"]
    """k: the neurons of the point's layer in the clean run."""
    gradients: Float[Tensor, "point neuron"]
    """∂P[o] / ∂k at α k."""
    p: Float[Tensor, " point"]
    """P[o] at α k."""


class NeuronPaths:
    """The readouts of token rows, and the clean run over them."""

    def __init__(self, lm: "LM", rows: Sequence[TokenRow], site: NeuronSite = "key") -> None:
        self.lm, self.site = lm, site
        self.run: ActivationCache = forward(lm, pad_rows(rows, lm.device))
        readouts = [
            (i, position, label)
            for i, row in enumerate(rows)
            for position, label in zip(row.positions, row.labels, strict=True)
        ]
        self.row, self.position, self.label = torch.tensor(readouts, device=lm.device).T
        self.past = int(self.position.max())

    @torch.no_grad()
    def clean_probability(self) -> Float[Tensor, " readout"]:
        """P[o] of each readout in the clean run."""
        states = self.run.states[-1]
        at_readouts = states[self.row.to(states.device), self.position.to(states.device)]
        return token_probability(self.lm, at_readouts, self.label).to(self.lm.device)

    def max_points(self) -> int:
        """How many points fit into memory: the activations that their gradients need."""
        lm, length = self.lm, self.run.inputs.shape[1]
        keys = lm.mlp_weight(0).shape[1]
        heads, _, dim = self.run.keys[0].shape[1:]
        entries = 10 * lm.width + 3 * keys + 2 * heads * dim * length
        slots = 1 if lm.family.supports_packing else length
        point = lm.n_layers * slots * entries * lm.dtype.itemsize
        return max(1, Budget.of(lm, None).bytes // point)

    def evaluate(
        self,
        readout: Int[Tensor, " point"],
        layer: Int[Tensor, " point"],
        alpha: Float[Tensor, " point"],
    ) -> PathPoints:
        """P[o] and its gradient with the neurons of each point's layer scaled by its alpha.

        Points must be in the order of their layers: the batch starts empty and grows on its way up.
        """
        lm = self.lm
        neurons: list[Tensor] = []
        scaled: list[Tensor] = []
        hidden = self.run.inputs[:0, : 1 if lm.family.supports_packing else None]
        entered = 0
        with torch.enable_grad():
            for i, count in enumerate(torch.bincount(layer, minlength=lm.n_layers).tolist()):
                new = slice(entered, entered + count)
                entered += count
                if not entered:
                    continue
                view, slot = self._view(readout[:entered])
                hidden = torch.cat([hidden, self._block_input(i, view, new).to(hidden.device)])
                scale = self._scale_neurons(i, slot[new], new, alpha[new], neurons, scaled)
                with hook_io(*([(self._module(i), scale)] if count else [])):
                    hidden = Replay(lm, self.run, view)(i, hidden)
            slot = self._view(readout)[1].to(hidden.device)
            last = hidden[torch.arange(entered, device=hidden.device), slot]
        p, gradient = self._read(last.detach(), self.label[readout])
        gradients = torch.autograd.grad(last, scaled, gradient)
        return PathPoints(
            neurons=torch.cat([x.to(lm.device) for x in neurons]).float(),
            gradients=torch.cat([x.to(lm.device) for x in gradients]).float(),
            p=p.to(lm.device),
        )

    def _view(self, readout: Int[Tensor, " point"]) -> tuple[PackedView, Int[Tensor, " point"]]:
        """The position of each point alone or, where the family cannot replay single positions, its
        whole row; and the slot that holds the position."""
        row, position = self.row[readout], self.position[readout]
        if self.lm.family.supports_packing:
            token = position[:, None]
            view = PackedView(row=row, position=token, start=token, past=self.past)
            return view, torch.zeros_like(position)
        whole = PackedView.whole(len(row), self.run.inputs.shape[1], row.device)
        return PackedView(row=row, position=whole.position, start=whole.start, past=0), position

    def _block_input(
        self, layer: int, view: PackedView, new: slice
    ) -> Float[Tensor, "point slot width"]:
        """The clean run's states before a block, for the points that enter there."""
        states = self.run.inputs if layer == 0 else self.run.states[layer - 1]
        row, position = (x[new].to(states.device) for x in (view.row, view.position))
        return states[row[:, None], position]

    def _module(self, layer: int) -> nn.Module:
        """The module whose input the neurons are."""
        return self.lm.mlp_out(layer) if self.site == "key" else self.lm.mlp_act(layer)

    def _scale_neurons(
        self, layer: int, slot: Tensor, new: slice, alpha: Tensor,
        neurons: list[Tensor], scaled: list[Tensor],
    ) -> Callable[[Tensor, Tensor], Tensor]:  # fmt: skip
        """A hook that scales the neurons of the points that enter at this layer.

        It appends k to `neurons` and α k, a leaf of the autograd tape, to `scaled`.
        """
        module = self._module(layer)

        def scale(x: Tensor, output: Tensor) -> Tensor:
            # Some families flatten rows and tokens.
            x, out = (t.reshape(new.stop, -1, t.shape[-1]) for t in (x, output))
            points, slots = torch.arange(new.start, new.stop), slot.to(x.device)
            k = x[points, slots].detach()
            scaled_k = (alpha.to(k)[:, None] * k).requires_grad_()
            neurons.append(k)
            scaled.append(scaled_k)
            if self.site == "key":
                delta = (scaled_k - k) @ self.lm.mlp_weight(layer).T
            else:
                delta = module.forward(scaled_k) - module.forward(k)
            # Out of place: some families add in place to what a module returns.
            moved = torch.zeros_like(out).index_put((points.to(out.device), slots), delta)
            return (out + moved).reshape(output.shape)

        return scale

    def _read(
        self, states: Float[Tensor, "row width"], label: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, "row width"]]:
        """P[o] of each last-layer state and its gradient, for as many rows as logits fit."""
        size = Budget.of(self.lm, None).batch_sizes(self.lm).logits
        results: list[tuple[Tensor, Tensor]] = []
        for chunk, labels in zip(states.split(size), label.split(size), strict=True):
            leaf = chunk.detach().requires_grad_()
            with torch.enable_grad():
                p = token_probability(self.lm, leaf, labels)
            results.append((p.detach(), torch.autograd.grad(p.sum(), leaf)[0]))
        p, gradients = zip(*results, strict=True)
        return torch.cat(p), torch.cat(gradients)
