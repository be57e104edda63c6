"""Attribution of MLP neurons: what each adds to an answer's probability (Dai et al., 2022).

A neuron is an entry of a layer's key k, the input of the MLP's output weight. At the token that the
answer follows, all of a layer's neurons grow together from nothing to what they are, and the slope
of the answer's probability is integrated on the way:

    IG(k) = k ⊙ ∫₀¹ ∂P[o](α k) / ∂k dα

The IG of a layer's neurons add up to what the probability gains along the path. That is how the
integral checks itself: a path that does not add up is halved and looked at more closely.

Neurons on their way from nothing to what they are: the slopes of an answer's probability there.

A point is a layer whose neurons, at the token that an answer follows, are at some share of what
they are. Only that token is computed again, with the keys and values left of it taken from one run
beforehand; and the points of all layers go through the model in one walk upwards, each joining
where its layer is reached.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.editing.batches import run_in_batches
from factscope.lm.forward import ActivationCache, forward
from factscope.lm.hooks import hook_io
from factscope.lm.memory import Budget
from factscope.lm.quadrature import Rule, quadrature
from factscope.lm.replay import PackedView, Replay
from factscope.progress import NestedProgress, Progress
from factscope.tracing.engine import token_probability

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "NeuronAttributions",
    "NeuronPath",
    "NeuronSite",
    "PathPoint",
    "Readout",
    "attribute_neurons",
    "start_path",
]

NeuronSite = Literal["key", "before"]
"""Which numbers are a layer's neurons: the key k, which the MLP's output weight reads; or what its
nonlinearity reads before that."""


@dataclass(frozen=True, kw_only=True)
class Readout:
    """A token of an answer, and the text that it is read after."""

    ids: tuple[int, ...]
    at: int
    """The token of the text that the answer's follows."""
    answer: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PathPoint:
    """What was seen at some points."""

    neurons: Float[Tensor, "point neuron"]
    """What the point's layer has at the end of the path."""
    slopes: Float[Tensor, "point neuron"]
    """∂P[o] / ∂k at the point."""
    p: Float[Tensor, " point"]
    """P[o] there."""


@torch.no_grad()
def start_path(lm: "LM", readings: Sequence[Readout], site: NeuronSite = "key") -> "NeuronPath":
    """One run over the readings' texts, from which walks can start."""
    texts = list(dict.fromkeys(reading.ids for reading in readings))
    number = {ids: i for i, ids in enumerate(texts)}
    length = max(map(len, texts))
    ids = [[*text, *[0] * (length - len(text))] for text in texts]  # nothing looks at the zeros
    return NeuronPath(
        lm=lm,
        run=forward(lm, torch.tensor(ids, device=lm.device)),
        site=site,
        row=torch.tensor([number[reading.ids] for reading in readings], device=lm.device),
        at=torch.tensor([reading.at for reading in readings], device=lm.device),
        answer=torch.tensor([reading.answer for reading in readings], device=lm.device),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class NeuronPath:
    """Readings, and the run over their texts."""

    lm: "LM"
    run: ActivationCache
    site: NeuronSite
    row: Int[Tensor, " reading"]
    """The row of the run that a reading belongs to."""
    at: Int[Tensor, " reading"]
    answer: Int[Tensor, " reading"]

    @torch.no_grad()
    def clean(self) -> Float[Tensor, " reading"]:
        """P of what is read, with every neuron as it is."""
        last = self.run.states[-1]
        ends = last[self.row.to(last.device), self.at.to(last.device)]
        return token_probability(self.lm, ends, self.answer).to(self.lm.device)

    def fitting(self) -> int:
        """How many points fit into memory: what the blocks keep of them for the slopes."""
        lm, length = self.lm, self.run.inputs.shape[1]
        keys = lm.mlp_weight(0).shape[1]
        heads, _, dim = self.run.keys[0].shape[1:]
        kept = 10 * lm.width + 3 * keys + 2 * heads * dim * length
        slots = 1 if lm.family.supports_packing else length
        return max(1, Budget.of(lm, None).bytes // (lm.n_layers * slots * kept * lm.dtype.itemsize))

    def look(
        self,
        reading: Int[Tensor, " point"],
        layer: Int[Tensor, " point"],
        share: Float[Tensor, " point"],
    ) -> PathPoint:
        """The slopes at some points, those of lower layers first."""
        joining = torch.bincount(layer, minlength=self.lm.n_layers).tolist()
        neurons: list[Tensor] = []
        points: list[Tensor] = []
        hidden, joined = self._entering(0, self._view(reading[:0])[0], slice(0)), 0
        with torch.enable_grad():
            for i, count in enumerate(joining):
                if not joined + count:
                    continue
                new = slice(joined, joined + count)
                joined += count
                view, spot = self._view(reading[:joined])
                hidden = torch.cat([hidden, self._entering(i, view, new).to(hidden.device)])
                with hook_io((self._module(i), self._grow(i, spot, new, share, neurons, points))):
                    hidden = Replay(self.lm, self.run, view)(i, hidden)
            spot = self._view(reading)[1].to(hidden.device)
            last = hidden[torch.arange(joined, device=hidden.device), spot]
        p, above = self._read(last.detach(), self.answer[reading])
        slopes = torch.autograd.grad(last, points, above)
        first = self.lm.device
        return PathPoint(
            neurons=torch.cat([x.to(first) for x in neurons]).float(),
            slopes=torch.cat([x.to(first) for x in slopes]).float(),
            p=p.to(first),
        )

    def _view(self, reading: Int[Tensor, " point"]) -> tuple[PackedView, Int[Tensor, " point"]]:
        """Each point's token alone, or, where a family cannot, its whole text; and its slot."""
        row, at = self.row[reading], self.at[reading]
        if self.lm.family.supports_packing:
            token = at[:, None]
            return PackedView(
                row=row, position=token, start=token, past=self._past
            ), torch.zeros_like(at)
        whole = PackedView.whole(len(row), self.run.inputs.shape[1], row.device)
        return PackedView(row=row, position=whole.position, start=whole.start, past=0), at

    @cached_property
    def _past(self) -> int:
        return int(self.at.max())

    def _entering(
        self, layer: int, view: PackedView, new: slice
    ) -> Float[Tensor, "point slot width"]:
        """The states of the clean run that enter a layer, for the points that join there."""
        states = self.run.inputs if layer == 0 else self.run.states[layer - 1]
        row, position = (x[new].to(states.device) for x in (view.row, view.position))
        return states[row[:, None], position]

    def _module(self, layer: int) -> torch.nn.Module:
        return self.lm.mlp_out(layer) if self.site == "key" else self.lm.mlp_act(layer)

    def _grow(
        self, layer: int, spot: Tensor, new: slice, share: Tensor,
        neurons: list[Tensor], points: list[Tensor],
    ) -> Callable[[Tensor, Tensor], Tensor | None]:  # fmt: skip
        """Sets the neurons of the points that join to their share; notes what they are."""
        module = self._module(layer)

        def grow(x: Tensor, output: Tensor) -> Tensor | None:
            if new.start == new.stop:
                return None
            seen, out = (t.reshape(len(spot), -1, t.shape[-1]) for t in (x, output))
            number, slot = torch.arange(new.start, new.stop), spot[new].to(x.device)
            end = seen[number, slot].detach()
            point = (share[new].to(end)[:, None] * end).requires_grad_()
            neurons.append(end)
            points.append(point)
            if self.site == "key":
                shift = (point - end) @ self.lm.mlp_weight(layer).T
            else:
                shift = module.forward(point) - module.forward(end)
            # Some families add in place to what comes out: never hand out the model's own tensor.
            moved = torch.zeros_like(out).index_put((number.to(out.device), slot), shift)
            return (out + moved).reshape(output.shape)

        return grow

    def _read(
        self, states: Float[Tensor, "row width"], answer: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, "row width"]]:
        """P of each row's answer and its slope by the state, a few rows of logits at a time."""
        size = Budget.of(self.lm, None).job(self.lm).logits
        found: list[tuple[Tensor, Tensor]] = []
        for some, wanted in zip(states.split(size), answer.split(size), strict=True):
            leaf = some.detach().requires_grad_()
            with torch.enable_grad():
                p = token_probability(self.lm, leaf, wanted)
            found.append((p.detach(), torch.autograd.grad(p.sum(), leaf)[0]))
        p, slopes = zip(*found, strict=True)
        return torch.cat(p), torch.cat(slopes)


DEEPEST = 16
"""How often a path is halved at most. Where a norm follows the MLP, as in Gemma 2, all of the
gain is at the path's very beginning."""
STRICTER = 0.7
"""How much of a piece's error each half may have: mostly one of them has nearly all of it."""
MINOR = 0.1
"""Gains below this share of the largest layer's need only add up as well as that share does."""
FIRST = 0.7
"""The share of the work that the first look is taken to be."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NeuronAttributions:
    """What the neurons of every layer add to the probability of what is read."""

    scores: Float[Tensor, "reading layer neuron"]
    """IG of each neuron."""
    neurons: Float[Tensor, "reading layer neuron"]
    """The neurons as they are, at the end of the path."""
    gains: Float[Tensor, "reading layer"]
    """P[o] with a layer's neurons as they are, less P[o] without them: what IG should add up to."""


@dataclass(frozen=True)
class _Piece:
    """A piece of the path of one layer's neurons."""

    reading: int
    layer: int
    begin: float
    end: float

    def halves(self) -> "tuple[_Piece, _Piece]":
        """The piece as two."""
        middle = (self.begin + self.end) / 2
        return replace(self, end=middle), replace(self, begin=middle)


@dataclass(frozen=True, eq=False)
class _Found:
    """What was found on pieces of paths, one after the other."""

    scores: Float[Tensor, "piece neuron"]
    neurons: Float[Tensor, "piece neuron"]
    begins: Float[Tensor, " piece"]
    """P at the piece's beginning."""


def attribute_neurons(
    lm: "LM",
    readings: Sequence[Readout],
    *,
    steps: int = 4,
    rule: Rule = "radau",
    tolerance: float | None = 0.02,
    site: NeuronSite = "key",
    facts_per_pass: int | None = None,
    progress: Progress = lambda share: None,
) -> NeuronAttributions:
    """The attribution of every neuron of every layer to each reading.

    A path whose IG do not add up to within `tolerance` of its gain is halved, and so are its
    halves; None leaves it at one piece. `at_once` is how many points go through the model together;
    None for what memory holds.
    """
    look = _Look(start_path(lm, readings, site), steps, rule, facts_per_pass)
    nested = NestedProgress(progress)
    pieces = [
        _Piece(i, layer, 0.0, 1.0) for i in range(len(readings)) for layer in range(lm.n_layers)
    ]
    found = look(pieces, nested.within(0.0, FIRST))
    ends = look.walk.clean().repeat_interleave(lm.n_layers)
    gains = (ends - found.begins).view(len(readings), -1)
    scores = found.scores.view(len(readings), lm.n_layers, -1).clone()
    if tolerance is not None:
        large = gains.abs().amax(1, keepdim=True)
        allowed = tolerance * gains.abs().maximum(MINOR * large).flatten()
        _refine_(scores, look, pieces, found, ends, allowed, nested)
    nested.within(0.0, 1.0)(1.0)
    neurons = found.neurons.view(len(readings), lm.n_layers, -1)
    return NeuronAttributions(scores=scores, neurons=neurons, gains=gains)


def _refine_(
    scores: Float[Tensor, "reading layer neuron"],
    look: "_Look",
    pieces: list[_Piece],
    found: _Found,
    ends: Float[Tensor, " piece"],
    allowed: Float[Tensor, " piece"],
    progress: NestedProgress,
) -> None:
    """Put in the place of each piece that does not add up what its halves say."""
    for depth in range(DEEPEST):
        gap = (found.scores.sum(-1) - (ends - found.begins)).abs()
        wrong = (gap > allowed).nonzero()[:, 0].tolist()
        if not wrong:
            return
        for i in wrong:
            scores[pieces[i].reading, pieces[i].layer] -= found.scores[i]
        pieces = [half for i in wrong for half in pieces[i].halves()]
        length = (1 - FIRST) / DEEPEST
        found = look(pieces, progress.within(FIRST + depth * length, length))
        for piece, score in zip(pieces, found.scores, strict=True):
            scores[piece.reading, piece.layer] += score
        # A first half ends where the second begins.
        ends = torch.stack([found.begins[1::2], ends[wrong]], dim=1).flatten()
        allowed = STRICTER * allowed[wrong].repeat_interleave(2)


class _Look:
    """Looks at pieces of paths: some points on each, as many at once as memory holds."""

    def __init__(
        self, walk: NeuronPath, steps: int, rule: Rule, facts_per_pass: int | None
    ) -> None:
        self.walk = walk
        self.share, self.weight = (x.to(walk.lm.device) for x in quadrature(steps, rule))
        self.size = max(1, math.ceil((facts_per_pass or walk.fitting()) / steps))

    def __call__(self, pieces: Sequence[_Piece], progress: Progress) -> _Found:
        """IG over each piece."""
        found = run_in_batches(pieces, self.size, self._some, progress)
        return _Found(*(torch.stack(part) for part in zip(*found, strict=True)))

    def _some(
        self, pieces: Sequence[_Piece], progress: Progress
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each piece IG over it, the neurons as they are, and P at its beginning."""
        order = sorted(range(len(pieces)), key=lambda i: pieces[i].layer)
        some = [pieces[i] for i in order]
        device, steps = self.share.device, len(self.share)

        def each(numbers: list[int] | list[float]) -> Tensor:
            return torch.tensor(numbers, device=device).repeat_interleave(steps)

        begin, length = each([p.begin for p in some]), each([p.end - p.begin for p in some])
        share = begin + length * self.share.repeat(len(some))
        looked = self.walk.look(
            each([p.reading for p in some]), each([p.layer for p in some]), share
        )
        weight = (length * self.weight.repeat(len(some)))[:, None].float()
        ig = (looked.neurons * looked.slopes * weight).unflatten(0, (-1, steps)).sum(1)
        progress(1.0)
        back = torch.tensor(order, device=device).argsort()
        parts = ig, looked.neurons[::steps], looked.p[::steps]
        return list(zip(*(part[back] for part in parts), strict=True))
