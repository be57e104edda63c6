"""Integrated gradients of the cells that causal tracing restores (App. B, last figure).

For a state h of the clean run the path is the straight line from 0 to h, and the gradient of the
answer's probability is integrated along it with 50 Gauss-Legendre nodes:

    IG(h) = h ⊙ ∫₀¹ ∂P[o](α h) / ∂h dα

The figure shows the norm of IG at each token and layer. Along the path all states of a layer are
scaled together (`path="layer"`: their IG add up to the effect of the whole layer, one path per
layer), or one token's alone (`path="state"`: one path per cell, slower by the number of tokens).
"""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from factscope.lm.forward import answer_probability, forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.replay import Replay

NODES_PER_PASS = 64
"""Path nodes that go through the model together."""


def integrated_gradients(
    lm: LM,
    ids: tuple[int, ...],
    answer: tuple[int, ...],
    kind: str = "states",
    *,
    path: Literal["layer", "state"] = "layer",
    steps: int = 50,
) -> Float[Tensor, "token layer"]:
    """Norms of the integrated gradients of all states, MLP outputs or attention outputs.

    If the answer has several tokens, all but its last must follow the prompt in `ids`.
    """
    layers = [
        attributions(lm, ids, answer, kind, layer, path=path, steps=steps).norm(dim=-1)
        for layer in range(lm.n_layers)
    ]
    return torch.stack(layers, dim=1)


def attributions(
    lm: LM,
    ids: tuple[int, ...],
    answer: tuple[int, ...],
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
    replay = Replay.whole(lm, run)

    def gradient(
        points: Float[Tensor, "node token width"],
    ) -> Float[Tensor, "node token width"]:
        """∂P[o]/∂h with the layer's states or contributions set to the given points."""
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            hidden = points
            if kind != "states":
                before = run.inputs if layer == 0 else run.states[layer - 1]
                module = lm.contribution(kind, layer)
                with hook_outputs((module, lambda out: points.clone().view(out.shape))):
                    hidden = replay(layer, before.expand(len(points), -1, -1))
            for above in range(layer + 1, lm.n_layers):
                hidden = replay(above, hidden)
            answers = torch.tensor(answer, device=hidden.device).expand(len(points), -1)
            p = answer_probability(lm, hidden[:, -len(answer) :], answers)
            return torch.autograd.grad(p.sum(), points)[0]

    nodes, weights = quadrature(steps)
    # The factor α of every token's state, at each node of each path.
    scales = nodes[:, None].expand(-1, len(ids))
    if path == "state":
        alone = torch.eye(len(ids), dtype=torch.bool)[:, None, :]
        scales = torch.where(alone, nodes[None, :, None], 1.0).flatten(0, 1)
        weights = weights.repeat(len(ids))
    total = torch.zeros_like(end[0])
    for alpha, weight in zip(
        scales.split(NODES_PER_PASS), weights.split(NODES_PER_PASS), strict=True
    ):
        alpha = alpha.to(end)[:, :, None]
        moved = (alpha != 1).to(end)  # with path="state", the states that stay at h do not count
        total += (gradient(end * alpha) * moved * weight.to(end)[:, None, None]).sum(0)
    return (total * end[0]).float().cpu()


def quadrature(
    steps: int, rule: Literal["gauss", "radau", "ends"] = "gauss"
) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """The nodes of a rule in [0, 1] and their weights, which sum to 1.

    `gauss`: Gauss-Legendre nodes, none at the ends. `radau`: Radau nodes, one of them at 0. `ends`:
    equally spaced nodes from 0 to 1 with equal weights, which gives the two ends too much weight.
    """
    if rule == "ends":
        nodes = torch.linspace(0, 1, steps, dtype=torch.float64)
        return nodes, torch.full_like(nodes, 1 / steps)
    legendre = np.polynomial.legendre
    if rule == "gauss":
        points, weights = legendre.leggauss(steps)
    else:  # -1, and the other roots of Pₙ₋₁ + Pₙ
        roots = legendre.legroots([0.0] * (steps - 1) + [1.0, 1.0])
        points = np.sort(roots.real)  # the roots are real; numpy may return complex numbers
        points[0] = -1.0
        previous = legendre.legval(points, [0.0] * (steps - 1) + [1.0])
        weights = (1 - points) / (steps * previous) ** 2
    return torch.tensor((points + 1) / 2), torch.tensor(weights / 2)
