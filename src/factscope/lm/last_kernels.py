"""Attention of one token in every row to all before it, as one GPU kernel.

Keys and values have room for a whole text; how far they are filled stands in a tensor, so that a
recording can play every step. Only what is filled is read.
"""
# What stands in a kernel is triton's language, which a checker of Python's types cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.half_kernels import kernel

__all__ = ["attend_last"]

BLOCK = 32
"""How many tokens are looked at in one go."""


def attend_last(
    query: Float[Tensor, "row head 1 dim"],
    keys: Float[Tensor, "row key_head room dim"],
    values: Float[Tensor, "row key_head room dim"],
    position: Int[Tensor, " 1"],
    scale: float,
) -> Float[Tensor, "row 1 head dim"]:
    """softmax(q kᵀ · scale) v over the keys up to `position`."""
    rows, heads, _, dim = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = torch.empty(rows, 1, heads, dim, dtype=query.dtype, device=query.device)
    strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    _last[(rows * heads,)](
        query, keys, values, position, out, *strides, scale, heads, heads // keys.shape[1], dim,
        DIM=max(16, triton.next_power_of_2(dim)), BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return out


@kernel
def _last(
    query, keys, values, position, out,
    q_row, q_head, k_row, k_head, k_slot, v_row, v_head, v_slot,
    scale, heads, groups, dim, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    of = head // groups
    d = tl.arange(0, DIM)
    inside = d < dim
    q = tl.load(query + row * q_row + head * q_head + d, mask=inside, other=0.0)
    q = q.to(tl.float32) * scale
    filled = tl.load(position) + 1
    keys += row * k_row + of * k_head
    values += row * v_row + of * v_head
    most = -1e30
    total = 0.0
    result = tl.zeros([DIM], dtype=tl.float32)
    for first in range(0, filled, BLOCK):
        t = first + tl.arange(0, BLOCK)
        seen = (t < filled)[:, None] & inside[None, :]
        k = tl.load(keys + t[:, None] * k_slot + d[None, :], mask=seen, other=0.0).to(tl.float32)
        v = tl.load(values + t[:, None] * v_slot + d[None, :], mask=seen, other=0.0).to(tl.float32)
        score = tl.where(t < filled, tl.sum(q[None, :] * k, 1), float("-inf"))
        new = tl.maximum(most, tl.max(score, 0))
        shrink = tl.exp(most - new)
        weight = tl.exp(score - new)
        total = total * shrink + tl.sum(weight, 0)
        result = result * shrink + tl.sum(weight[:, None] * v, 0)
        most = new
    tl.store(out + (row * heads + head) * dim + d, result / total, mask=inside)
