"""ROME as the paper's code does it: one fact, one whole hooked forward a step. Slow and obvious.

The twin that the fast search must equal (tests), and the reference of bench/edit.py.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.contexts import ContextRow, edit_request, kl_row, pad_rows
from factscope.editing.rome import BoundRome
from factscope.editing.value_search import ValueSearch
from factscope.facts import Fact
from factscope.lm.forward import mlp_keys
from factscope.lm.hooks import hook_outputs

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["ReferenceEdit", "reference_rome"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceEdit:
    """What the plain procedure found for one fact."""

    delta: Float[Tensor, " value"]
    change: Float[Tensor, "value key"]
    """ΔW"""
    losses: list[float]


def reference_rome(ready: BoundRome, fact: Fact) -> ReferenceEdit:
    """The rank-one change for one fact."""
    lm, rome, layer = ready.lm, ready.rome, ready.layer
    asked = edit_request(lm, fact, ready.prefixes, rome.token)
    essence = kl_row(lm, fact, rome.token, at_place=ready.search.kl_position == "place")
    rows = [*asked.rows, essence]
    keys = _at_places(mlp_keys(lm, pad_rows(asked.rows, lm.device), layer), asked.rows).float()
    bias = getattr(lm.mlp_out(layer), "bias", None)
    values = keys @ lm.mlp_weight(layer).T.float() + (0 if bias is None else bias.float())
    delta, losses = _descend(lm, rows, asked.target, layer, ready.search, values[0].norm())
    k_star = keys.mean(0)
    u = ready.directions(k_star[None])[0]
    there, now = (keys[0], values[0]) if rome.key == "bare" else (k_star, values.mean(0))
    v_star = (values[0] if rome.value == "bare" else values.mean(0)) + delta
    return ReferenceEdit(
        delta=delta, change=torch.outer(v_star - now, u) / (u @ there), losses=losses
    )


def _descend(
    lm: "LM", rows: list[ContextRow], target: tuple[int, ...], layer: int, search: ValueSearch,
    size: Tensor,
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """Adam on δ, the whole model and all its logits at every step."""
    delta = torch.zeros(lm.width, device=lm.device, requires_grad=True)
    adam = torch.optim.Adam([delta], lr=search.lr)
    ids = pad_rows(rows, lm.device)
    at = torch.zeros(*ids.shape, 1, device=lm.device, dtype=lm.dtype)
    for i, row in enumerate(rows):
        at[i, row.place] = 1
    labels = torch.tensor(target, device=lm.device)

    def add(output: Tensor) -> Tensor:
        return output + (at * delta.to(lm.dtype)).reshape(output.shape)

    before: Tensor | None = None
    losses: list[float] = []
    for step in range(search.looks):
        with hook_outputs((lm.mlp_out(layer), add)):
            logs = lm.model(ids, use_cache=False).logits.float().log_softmax(-1)
        now = logs[-1, rows[-1].reads[0]]
        before = now.detach() if before is None else before
        said = [
            -logs[i, list(row.reads)].gather(1, labels[:, None]).mean()
            for i, row in enumerate(rows[:-1])
        ]
        essence = (now.exp() * (now - before)).sum()
        decay = delta.norm() / size ** (2 if search.weight_decay_form == "paper" else 1)
        loss = torch.stack(said).mean() + search.kl_weight * essence + search.weight_decay * decay
        losses.append(loss.item())
        if losses[-1] < search.stop or step == search.looks - 1:
            break
        adam.zero_grad()
        loss.backward()
        adam.step()
        if delta.norm() > search.longest * size:
            with torch.no_grad():
                delta *= search.longest * size / delta.norm()
    return delta.detach(), losses


def _at_places(x: Tensor, rows: tuple[ContextRow, ...]) -> Tensor:
    return torch.stack([x[i, row.place] for i, row in enumerate(rows)])
