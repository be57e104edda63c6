"""Integrated gradients of the same cells that causal tracing restores (App. B, last figure).

For a state h of the clean run the path goes in a straight line from nothing to h, and the
gradient of the answer's probability is integrated along it with 50 Gauss–Legendre steps:

    IG(h) = h ⊙ ∫₀¹ ∂P[o](α h) / ∂h dα

What is drawn is the norm of IG at each token and layer. Along the path either all tokens' states of
a layer shrink together (`path="layer"`: their IG then add up to what the layer as a whole explains,
one path a layer) or one token's alone (`path="state"`: one path a cell, as many times dearer as the
prompt has tokens).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.lm.forward import ActivationCache, forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.quadrature import quadrature
from factscope.lm.replay import PackedView, Replay
from factscope.tracing.engine import token_probability

__all__ = ["attributions", "integrated_gradients"]

ROWS = 64
"""Rows of the path that go through the model at once."""


def integrated_gradients(
    lm: LM,
    ids: tuple[int, ...],
    answer: int,
    kind: str = "states",
    *,
    path: Literal["layer", "state"] = "layer",
    steps: int = 50,
) -> Float[Tensor, "token layer"]:
    """The norm of the integrated gradient at each state, MLP or attention output."""
    layers = [
        attributions(lm, ids, answer, kind, layer, path=path, steps=steps).norm(dim=-1)
        for layer in range(lm.n_layers)
    ]
    return torch.stack(layers, dim=1)


def attributions(
    lm: LM,
    ids: tuple[int, ...],
    answer: int,
    kind: str,
    layer: int,
    *,
    path: Literal["layer", "state"] = "layer",
    steps: int = 50,
) -> Float[Tensor, "token width"]:
    """IG of one layer's states, or of its MLP or attention outputs, entry by entry."""
    keep = () if kind == "states" else (kind,)
    run = forward(lm, torch.tensor([ids], device=lm.device), keep=keep)
    nodes, weights = quadrature(steps)
    scales = _scales(nodes, len(ids), path)
    share = weights.repeat(len(scales) // steps)
    end = (run.states if kind == "states" else run.contributions[kind])[layer]
    total = torch.zeros_like(end[0])
    for some, mine in zip(scales.split(ROWS), share.split(ROWS), strict=True):
        points = end * some.to(end)[:, :, None]
        moved = (some != 1).to(end)[:, :, None]
        gradient = _gradient(lm, run, points, answer, kind, layer)
        total += (gradient * moved * mine.to(end)[:, None, None]).sum(0)
    return (total * end[0]).float().cpu()


def _scales(alphas: Tensor, length: int, path: str) -> Float[Tensor, "point token"]:
    """For each point of each path, what every token's state is multiplied by."""
    if path == "layer":
        return alphas[:, None].expand(-1, length)
    one = torch.eye(length, dtype=torch.bool)
    return torch.where(one[:, None, :], alphas[None, :, None], 1.0).flatten(0, 1)


def _gradient(
    lm: LM,
    run: ActivationCache,
    points: Float[Tensor, "point token width"],
    answer: int,
    kind: str,
    layer: int,
) -> Float[Tensor, "point token width"]:
    """∂P[o]/∂h where a layer's states, or its contributions, are the given points."""
    rows, length, _ = points.shape
    position = torch.arange(length, device=points.device)[None]
    view = PackedView(row=position[0, :1] * 0, position=position, start=position * 0, past=0)
    replay = Replay(lm, run, view)
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        hidden, above = points, layer + 1
        if kind != "states":
            before = run.inputs if layer == 0 else run.states[layer - 1]
            module = lm.contribution(kind, layer)
            with hook_outputs((module, lambda out: points.clone().view(out.shape))):
                hidden = replay(layer, before.expand(rows, -1, -1))
        for i in range(above, lm.n_layers):
            hidden = replay(i, hidden)
        p = token_probability(lm, hidden[:, -1], torch.full((rows,), answer, device=hidden.device))
        return torch.autograd.grad(p.sum(), points)[0]
