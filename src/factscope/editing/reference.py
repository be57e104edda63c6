"""Reference implementation of ROME: one fact, the full model at every step, like the paper's.

Tests compare the value search with it; bench/edit.py measures the speedup over it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.added_keys import contrast_keys, sentence_keys
from factscope.editing.contexts import ContextRow, edit_request, kl_row, pad_rows
from factscope.editing.rome import EQUAL_KEYS, BoundRome
from factscope.editing.settings import ValueSearch
from factscope.editing.value_search import usual_norm
from factscope.facts import Fact
from factscope.lm.forward import mlp_keys
from factscope.lm.hooks import hook_outputs

if TYPE_CHECKING:
    from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceEdit:
    """The reference result for one fact."""

    delta: Float[Tensor, " value"]
    change: Float[Tensor, "value key"]
    """ΔW"""
    losses: list[float]


def reference_rome(bound: BoundRome, fact: Fact) -> ReferenceEdit:
    """The rank-one update for one fact."""
    lm, settings, layer = bound.lm, bound.settings, bound.layer
    request = edit_request(lm, fact, bound.prefixes, settings.token)
    rows = [*request.rows, kl_row(lm, fact, settings.token, bound.search.kl_position)]
    # 1. keys and values of every context (the last row is the KL prompt), and w
    all_keys = mlp_keys(lm, pad_rows(rows, lm.device), layer)
    keys = all_keys[range(len(rows)), [row.edit_position for row in rows]].float()
    bias = getattr(lm.mlp_out(layer), "bias", None)
    values = keys @ lm.mlp_weight(layer).T.float() + (0 if bias is None else bias.float())
    contrast = contexts = keys[:0]
    at = layer, settings.token, settings.seed
    if settings.contrast_tolerance != "inf":
        contrast = contrast_keys(lm, [fact], *at)[0]
    if settings.context_tolerance != "inf":
        contexts = torch.cat([keys[:-1], sentence_keys(lm, [fact], *at)[0]])
    w = update_direction(bound, keys[:-1], contrast, contexts)
    # 2. δ
    scale = keys @ w if settings.scale_delta else torch.ones(len(rows), device=lm.device)
    by_layer = bound.search.unit == "layer"
    norm = usual_norm(lm, layer, "mlp", settings.token) if by_layer else values[0].norm().item()
    delta, losses = search_delta(lm, rows, lm.mlp_out(layer), bound.search, norm, scale)
    # 3. the update
    bare, mean = values[0], values[:-1].mean(0)
    v_star = (bare if settings.value == "bare" else mean) + delta
    W_k = bare if settings.key == "bare" else mean
    return ReferenceEdit(delta=delta, change=torch.outer(v_star - W_k, w), losses=losses)


def update_direction(
    bound: BoundRome,
    keys: Float[Tensor, "context key"],
    contrast: Float[Tensor, "contrast key"],
    contexts: Float[Tensor, "more key"],
) -> Float[Tensor, " key"]:
    """w with ΔW = δ wᵀ, given the keys of the contexts, the bare prompt's first, keys that should
    receive no δ, and keys that should receive about all of it."""
    mean, bare = keys.mean(0), keys[0]
    width, moment = len(mean), bound.second_moment
    C = torch.eye(width, dtype=torch.double, device=keys.device)
    if moment is not None:
        matrix = moment.matrix.to(C)
        C = matrix + bound.settings.ridge * matrix.diagonal().mean() * C
    plain = C

    def size(key: Float[Tensor, " key"]) -> Float[Tensor, ""]:
        return key.double() @ torch.linalg.solve(plain, key.double())

    for k in contrast.double():
        C = C + torch.outer(k, k) / (bound.contrast_tolerance * size(k))
    for r in (contexts - mean).double():
        C = C + torch.outer(r, r) / (bound.context_tolerance * size(mean))

    def direction(key: Float[Tensor, " key"]) -> Float[Tensor, " key"]:
        return torch.linalg.solve(C, key.double()).float()

    u = direction(mean)
    if bound.settings.key == "bare":
        return u / (u @ bare)
    if bound.settings.key == "mean" or (bare - mean).norm() < EQUAL_KEYS * mean.norm():
        return u / (u @ mean)
    # From the direction of the mean key, in the plane of both.
    other = direction(bare)
    a, b = torch.linalg.solve(
        torch.stack([u @ mean, other @ mean, u @ bare, other @ bare]).double().reshape(2, 2),
        torch.ones(2, dtype=torch.double, device=keys.device),
    ).float()
    return a * u + b * other


def search_delta(
    lm: "LM",
    rows: list[ContextRow],
    module: nn.Module,
    search: ValueSearch,
    norm: float,
    scale: Float[Tensor, " row"],
) -> tuple[Float[Tensor, " value"], list[float]]:
    """Adam on δ, which is added to a module's output at the edit tokens, times each row's scale.
    The last row is the KL term's."""
    delta = torch.zeros(lm.width, device=lm.device, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=search.step_size(norm, lm.width))
    ids = pad_rows(rows, lm.device)
    at_edit_token = torch.zeros(*ids.shape, 1, device=lm.device, dtype=lm.dtype)
    for i, row in enumerate(rows):
        at_edit_token[i, row.edit_position] = scale[i]

    def add_delta(output: Tensor) -> Tensor:
        return output + (at_edit_token * delta.to(lm.dtype)).reshape(output.shape)

    unedited: Tensor | None = None
    losses: list[float] = []
    for step in range(search.max_steps):
        with hook_outputs((module, add_delta)):
            log_p = lm.model(ids, use_cache=False).logits.float().log_softmax(-1)
        targets = [
            log_p[i, list(row.positions), list(row.labels)] for i, row in enumerate(rows[:-1])
        ]
        nll = [-log_probs.mean() for log_probs in targets]
        now = log_p[-1, rows[-1].positions[0]]
        unedited = now.detach() if unedited is None else unedited
        kl = (now.exp() * (now - unedited)).sum()
        power = 2 if search.weight_decay_form == "paper" else 1
        decay = delta.norm() / norm**power
        loss = torch.stack(nll).mean() + search.kl_weight * kl + search.decay_weight * decay
        losses.append(loss.item())
        probable = search.stop_probability is not None and (
            torch.cat(targets).min().exp() >= search.stop_probability
        )
        if losses[-1] < search.stop_loss or probable or step == search.max_steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
        if delta.norm() > search.max_norm * norm:
            with torch.no_grad():
                delta *= search.max_norm * norm / delta.norm()
    return delta.detach(), losses
