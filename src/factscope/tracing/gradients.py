"""Integrated gradients of the cells that causal tracing restores (App. B, last figure).

For a state h of the clean run the path is the straight line from 0 to h, and the gradient of the
answer's probability is integrated along it with 50 Gauss-Legendre nodes:

    IG(h) = h ⊙ ∫₀¹ ∂P[o](α h) / ∂h dα

The figure shows the norm of IG at each token and layer. Along the path all states of a layer are
scaled together (`path="layer"`: their IG add up to the effect of the whole layer, one path per
layer), or one token's alone (`path="state"`: one path per cell, slower by the number of tokens).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.lm.forward import ActivationCache, forward, token_probability
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.quadrature import quadrature
from factscope.lm.replay import PackedView, Replay

NODES_PER_PASS = 64
"""Path nodes that go through the model together."""


def integrated_gradients(
    lm: LM,
    ids: tuple[int, ...],
    answer: int,
    kind: str = "states",
    *,
    path: Literal["layer", "state"] = "layer",
    steps: int = 50,
) -> Float[Tensor, "token layer"]:
    """Norms of the integrated gradients of all states, MLP outputs or attention outputs."""
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
    """Integrated gradients of one layer's states, MLP outputs or attention outputs."""
    keep = () if kind == "states" else (kind,)
    run = forward(lm, torch.tensor([ids], device=lm.device), keep=keep)
    end = (run.states if kind == "states" else run.contributions[kind])[layer]
    nodes, weights = quadrature(steps)
    scales = _scales(nodes, len(ids), path)
    weights = weights.repeat(len(scales) // steps)
    total = torch.zeros_like(end[0])
    for alpha, weight in zip(
        scales.split(NODES_PER_PASS), weights.split(NODES_PER_PASS), strict=True
    ):
        alpha = alpha.to(end)[:, :, None]
        gradient = _gradient(lm, run, end * alpha, answer, kind, layer)
        moved = (alpha != 1).to(end)  # with path="state", the states that stay at h do not count
        total += (gradient * moved * weight.to(end)[:, None, None]).sum(0)
    return (total * end[0]).float().cpu()


def _scales(nodes: Tensor, length: int, path: str) -> Float[Tensor, "node token"]:
    """The factor α of every token's state at each node of each path."""
    if path == "layer":
        return nodes[:, None].expand(-1, length)
    diagonal = torch.eye(length, dtype=torch.bool)
    return torch.where(diagonal[:, None, :], nodes[None, :, None], 1.0).flatten(0, 1)


def _gradient(
    lm: LM,
    run: ActivationCache,
    points: Float[Tensor, "node token width"],
    answer: int,
    kind: str,
    layer: int,
) -> Float[Tensor, "node token width"]:
    """∂P[o]/∂h with a layer's states or contributions set to the given points."""
    rows, length, _ = points.shape
    position = torch.arange(length, device=points.device)[None]
    view = PackedView(row=position[0, :1] * 0, position=position, start=position * 0, past=0)
    replay = Replay(lm, run, view)
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        hidden = points
        if kind != "states":
            before = run.inputs if layer == 0 else run.states[layer - 1]
            module = lm.contribution(kind, layer)
            with hook_outputs((module, lambda out: points.clone().view(out.shape))):
                hidden = replay(layer, before.expand(rows, -1, -1))
        for above in range(layer + 1, lm.n_layers):
            hidden = replay(above, hidden)
        p = token_probability(lm, hidden[:, -1], torch.full((rows,), answer, device=hidden.device))
        return torch.autograd.grad(p.sum(), points)[0]
