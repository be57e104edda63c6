"""Reference implementation of ROME: one fact, the full model at every step, like the paper's.

Tests compare the value search with it; bench/edit.py measures the speedup over it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.contexts import ContextRow, edit_request, kl_row, pad_rows
from factscope.editing.rome import BoundRome
from factscope.editing.settings import ValueSearch
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
    # 1. keys and values of every context, and k*
    all_keys = mlp_keys(lm, pad_rows(request.rows, lm.device), layer)
    positions = [row.edit_position for row in request.rows]
    keys = all_keys[range(len(positions)), positions].float()
    bias = getattr(lm.mlp_out(layer), "bias", None)
    values = keys @ lm.mlp_weight(layer).T.float() + (0 if bias is None else bias.float())
    k_star = keys.mean(0)
    # 2. v*
    delta, losses = search_delta(lm, rows, lm.mlp_out(layer), bound.search, values[0].norm())
    v_star = (values[0] if settings.value == "bare" else values.mean(0)) + delta
    # 3. the closed form
    u = bound.directions(k_star[None])[0]
    k, W_k = (keys[0], values[0]) if settings.key == "bare" else (k_star, values.mean(0))
    change = torch.outer(v_star - W_k, u) / (u @ k)
    return ReferenceEdit(delta=delta, change=change, losses=losses)


def search_delta(
    lm: "LM",
    rows: list[ContextRow],
    module: nn.Module,
    search: ValueSearch,
    v0_norm: Float[Tensor, ""],
) -> tuple[Float[Tensor, " value"], list[float]]:
    """Adam on δ, added to a module's output at the edit tokens. The last row is the KL term's."""
    delta = torch.zeros(lm.width, device=lm.device, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=search.lr)
    ids = pad_rows(rows, lm.device)
    at_edit_token = torch.zeros(*ids.shape, 1, device=lm.device, dtype=lm.dtype)
    for i, row in enumerate(rows):
        at_edit_token[i, row.edit_position] = 1

    def add_delta(output: Tensor) -> Tensor:
        return output + (at_edit_token * delta.to(lm.dtype)).reshape(output.shape)

    unedited: Tensor | None = None
    losses: list[float] = []
    for step in range(search.max_steps):
        with hook_outputs((module, add_delta)):
            log_p = lm.model(ids, use_cache=False).logits.float().log_softmax(-1)
        nll = [
            -log_p[i, list(row.positions), list(row.labels)].mean()
            for i, row in enumerate(rows[:-1])
        ]
        now = log_p[-1, rows[-1].positions[0]]
        unedited = now.detach() if unedited is None else unedited
        kl = (now.exp() * (now - unedited)).sum()
        power = 2 if search.weight_decay_form == "paper" else 1
        decay = delta.norm() / v0_norm**power
        loss = torch.stack(nll).mean() + search.kl_weight * kl + search.weight_decay * decay
        losses.append(loss.item())
        if losses[-1] < search.stop_loss or step == search.max_steps - 1:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
        if delta.norm() > search.max_norm * v0_norm:
            with torch.no_grad():
                delta *= search.max_norm * v0_norm / delta.norm()
    return delta.detach(), losses
