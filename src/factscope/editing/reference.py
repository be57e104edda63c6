"""Reference implementation of ROME: one fact, the full model at every step, like the paper's.

Tests compare the value search with it; bench/edit.py measures the speedup over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

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
    w = update_direction(bound, keys[:-1], bound.added_keys([request]))
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
    added: Sequence[Float[Tensor, "1 added key"]],
) -> Float[Tensor, " key"]:
    """w with ΔW = δ wᵀ, given the keys of the contexts, the bare prompt's first, and those that
    should receive no δ."""
    mean, bare = keys.mean(0), keys[0]

    width, moment = len(mean), bound.second_moment
    C = torch.eye(width, dtype=torch.double, device=keys.device)
    if moment is not None:
        matrix = moment.matrix.to(C)
        C = matrix + bound.settings.ridge * matrix.diagonal().mean() * C
    plain = C
    added = [*added]
    if bound.settings.contrast_tolerance != "inf":
        for k in added.pop(0)[0].double():
            size = k @ torch.linalg.solve(plain, k)
            C = C + torch.outer(k, k) / (float(bound.settings.contrast_tolerance or 0) * size)
    if bound.settings.context_tolerance not in (None, "inf"):
        size = mean.double() @ torch.linalg.solve(plain, mean.double())
        for difference in (torch.cat([keys, added.pop(0)[0]]) - mean).double():
            weight = 1 / (float(bound.settings.context_tolerance) * size)
            C = C + weight * torch.outer(difference, difference)

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
