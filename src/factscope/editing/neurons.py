"""Attribution of MLP neurons: what each adds to an answer's probability (Dai et al., 2022).

A neuron is an entry of a layer's key k, the input of the MLP's output weight. At the token that the
answer follows, all of a layer's neurons grow together from nothing to what they are, and the slope
of the answer's probability is integrated on the way:

    IG(k) = k ⊙ ∫₀¹ ∂P[o](α k) / ∂k dα

The IG of a layer's neurons add up to what the probability gains along the path. That is how the
integral checks itself: a path that does not add up is halved and looked at more closely.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.batches import Progress, halving
from factscope.editing.editor import Done
from factscope.editing.neuron_paths import Reading, Site, Walk, start
from factscope.tracing.gradients import Rule, quadrature

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Attributed", "Reading", "attribute"]

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
class Attributed:
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


def attribute(
    lm: "LM",
    readings: Sequence[Reading],
    *,
    steps: int = 4,
    rule: Rule = "radau",
    tolerance: float | None = 0.02,
    site: Site = "key",
    at_once: int | None = None,
    done: Done = lambda share: None,
) -> Attributed:
    """The attribution of every neuron of every layer to each reading.

    A path whose IG do not add up to within `tolerance` of its gain is halved, and so are its
    halves; None leaves it at one piece. `at_once` is how many points go through the model together;
    None for what memory holds.
    """
    look = _Look(start(lm, readings, site), steps, rule, at_once)
    progress = Progress(done)
    pieces = [
        _Piece(i, layer, 0.0, 1.0) for i in range(len(readings)) for layer in range(lm.n_layers)
    ]
    found = look(pieces, progress.within(0.0, FIRST))
    ends = look.walk.clean().repeat_interleave(lm.n_layers)
    gains = (ends - found.begins).view(len(readings), -1)
    scores = found.scores.view(len(readings), lm.n_layers, -1).clone()
    if tolerance is not None:
        large = gains.abs().amax(1, keepdim=True)
        allowed = tolerance * gains.abs().maximum(MINOR * large).flatten()
        _refine_(scores, look, pieces, found, ends, allowed, progress)
    progress.within(0.0, 1.0)(1.0)
    neurons = found.neurons.view(len(readings), lm.n_layers, -1)
    return Attributed(scores=scores, neurons=neurons, gains=gains)


def _refine_(
    scores: Float[Tensor, "reading layer neuron"],
    look: "_Look",
    pieces: list[_Piece],
    found: _Found,
    ends: Float[Tensor, " piece"],
    allowed: Float[Tensor, " piece"],
    progress: Progress,
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

    def __init__(self, walk: Walk, steps: int, rule: Rule, at_once: int | None) -> None:
        self.walk = walk
        self.share, self.weight = (x.to(walk.lm.device) for x in quadrature(steps, rule))
        self.size = max(1, math.ceil((at_once or walk.fitting()) / steps))

    def __call__(self, pieces: Sequence[_Piece], done: Done) -> _Found:
        """IG over each piece."""
        found = halving(pieces, self.size, self._some, done)
        return _Found(*(torch.stack(part) for part in zip(*found, strict=True)))

    def _some(self, pieces: Sequence[_Piece], done: Done) -> list[tuple[Tensor, Tensor, Tensor]]:
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
        done(1.0)
        back = torch.tensor(order, device=device).argsort()
        parts = ig, looked.neurons[::steps], looked.p[::steps]
        return list(zip(*(part[back] for part in parts), strict=True))
