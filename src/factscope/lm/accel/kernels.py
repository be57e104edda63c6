"""GPU kernels in triton: splitting into halves, suffix attention, decode attention.

*Splitting* writes the high and low float16 parts of float32 numbers in one pass (see `matmul`).

*Suffix attention* is attention of a few queries to a few keys, forward and backward in one kernel
each. Keys and values come in two parts that are never concatenated: the past, which needs no
gradient, and the new ones. One program handles one row and head: its queries and new keys as one
tile, the past in blocks.

*Decode attention* is attention of one query per row to a static cache. How far the cache is filled
is a tensor, so that one captured graph serves every step; only the filled part is read.

triton comes with torch on NVIDIA GPUs. The tests run these kernels on a CPU in its interpreter.
"""
# Kernels are written in triton's language, which a type checker cannot follow.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import inspect
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float16, Int
from torch import Tensor

SPLIT_BLOCK = 1024
"""How many numbers of a row one program splits."""


def kernel(function: Any) -> Any:
    """Compile a kernel; tests wrap functions to check types, which triton cannot read."""
    return triton.jit(inspect.unwrap(function))


def split_into(
    x: Float[Tensor, "row column"], out: Float16[Tensor, "row wider"], *, low: bool
) -> None:
    """Write the high parts of x followed by ones; or, with `low`, the high parts into the left half
    of each row and the low parts into the right half, both padded with zeros."""
    if x.stride(1) != 1:
        x = x.contiguous()
    wide = out.shape[1] // 2 if low else out.shape[1]
    grid = (len(x), triton.cdiv(wide, SPLIT_BLOCK))
    _split[grid](x, out, x.stride(0), x.shape[1], wide, LOW=low, BLOCK=SPLIT_BLOCK)


@kernel
def _split(x, out, stride, columns, wide, LOW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + c, mask=c < columns, other=0.0 if LOW else 1.0)
    high = value.to(tl.float16)
    if LOW:
        tl.store(out + row * 2 * wide + c, high, mask=c < wide)
        rest = (value - high.to(tl.float32)).to(tl.float16)
        tl.store(out + row * 2 * wide + wide + c, rest, mask=c < wide)
    else:  # ones beyond the last column
        tl.store(out + row * wide + c, high, mask=c < wide)


SUFFIX_BLOCK = 32
"""Tokens of the past per iteration of suffix attention."""
PRODUCTS: tl.constexpr = tl.constexpr("tf32x3")
"""float32 products as three TF32 products, nearly exact."""
TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def suffix_attention(
    query: Float[Tensor, "row head slot dim"],
    key: Float[Tensor, "row key_head slot dim"],
    value: Float[Tensor, "row key_head slot dim"],
    past_key: Float[Tensor, "past_row key_head past dim"],
    past_value: Float[Tensor, "past_row key_head past dim"],
    bias: Float[Tensor, "row bias_head slot token"],
    scale: float,
) -> Float[Tensor, "row slot head dim"]:
    """softmax(q kᵀ · scale + bias) v over the past and the new keys, in the bias's precision.

    Row i has the past i mod n of n. `bias` has a column for each token of the past, then for each
    slot, and one head or all.
    """
    return _Attention.apply(query, key, value, past_key, past_value, bias, scale)  # pyright: ignore


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor,
        bias: Tensor, scale: float,
    ) -> Tensor:  # fmt: skip
        tensors = [_row_major(x) for x in (query, key, value, past_key, past_value, bias)]
        query = tensors[0]
        rows, heads, slots, dim = query.shape
        out = torch.empty(rows, slots, heads, dim, dtype=query.dtype, device=query.device)
        log_sums = torch.empty(rows, heads, slots, dtype=torch.float32, device=query.device)
        _suffix_forward[(rows * heads,)](
            *_arguments(*tensors), out, log_sums, scale, **_sizes(*tensors)
        )
        ctx.save_for_backward(*tensors, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *tensors, out, log_sums = ctx.saved_tensors
        query, key, value = tensors[:3]
        rows, heads, slots, dim = query.shape
        gradients = torch.empty(3, rows, slots, heads, dim, dtype=query.dtype, device=query.device)
        _suffix_backward[(rows * heads,)](
            *_arguments(*tensors), out, log_sums, _row_major(gradient),
            gradients[0], gradients[1], gradients[2], ctx.scale, **_sizes(*tensors),
        )  # fmt: skip
        groups = heads // key.shape[1]
        q, k, v = gradients.transpose(2, 3)
        if groups > 1:  # each key serves several heads
            k, v = (x.unflatten(1, (-1, groups)).sum(2) for x in (k, v))
        return q, k.to(key.dtype), v.to(value.dtype), None, None, None, None


def _row_major(x: Tensor) -> Tensor:
    """x with a contiguous last axis, copied if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, bias: Tensor
) -> tuple[Any, ...]:
    """The tensors, and the strides of their rows, heads and tokens."""
    strides = [s for x in (query, key, value, past_key, past_value, bias) for s in x.stride()[:3]]
    if bias.shape[1] == 1:
        strides[-2] = 0
    return (query, key, value, past_key, past_value, bias, *strides)


def _sizes(
    query: Tensor, key: Tensor, value: Tensor, past_key: Tensor, past_value: Tensor, bias: Tensor
) -> dict[str, Any]:
    _, heads, slots, dim = query.shape
    return {
        "heads": heads, "groups": heads // key.shape[1], "slots": slots,
        "past_rows": len(past_key), "past": past_key.shape[2], "dim": dim,
        "SLOTS": max(16, triton.next_power_of_2(slots)),
        "DIM": max(16, triton.next_power_of_2(dim)),
        "BLOCK": SUFFIX_BLOCK, "DTYPE": TRITON_TYPES[bias.dtype],
        "num_warps": 1 if slots <= 16 and bias.dtype != torch.float32 else 4,
    }  # fmt: skip


@kernel
def _tile(start, first, stride, rows, dim, ROWS: tl.constexpr, DIM: tl.constexpr):
    """A tile of a matrix from its row `first` on, zeros where it ends."""
    r = first + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    inside = (r < rows)[:, None] & (d < dim)[None, :]
    return tl.load(start + r[:, None] * stride + d[None, :], mask=inside, other=0.0)


@kernel
def _scores(q, k, bias, stride, first, slots, tokens, scale,
            SLOTS: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """q kᵀ · scale + bias for a tile of keys; -∞ beyond the last."""
    s = tl.arange(0, SLOTS)
    t = tl.arange(0, TOKENS)
    inside = (s < slots)[:, None] & (t < tokens)[None, :]
    b = tl.load(bias + s[:, None] * stride + first + t[None, :], mask=inside, other=0.0)
    product = tl.dot(q.to(DTYPE), tl.trans(k.to(DTYPE)), input_precision=PRODUCTS)
    return tl.where((t < tokens)[None, :], product * scale + b, float("-inf"))


@kernel
def _suffix_forward(
    query, key, value, past_key, past_value, bias,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot,
    pk_row, pk_head, pk_slot, pv_row, pv_head, pv_slot, b_row, b_head, b_slot,
    out, log_sums, scale, heads, groups, slots, past_rows, past, dim,
    SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)  # tensors may have 2³¹ elements
    head = tl.program_id(0) % heads
    key_head = head // groups
    q = _tile(query + row * q_row + head * q_head, 0, q_slot, slots, dim, SLOTS, DIM)
    k = _tile(key + row * k_row + key_head * k_head, 0, k_slot, slots, dim, SLOTS, DIM)
    v = _tile(value + row * v_row + key_head * v_head, 0, v_slot, slots, dim, SLOTS, DIM)
    bias += row * b_row + head * b_head
    score = _scores(q, k, bias, b_slot, past, slots, slots, scale, SLOTS, SLOTS, DTYPE)
    highest = tl.max(score, 1)
    weight = tl.exp(score - highest[:, None])
    total = tl.sum(weight, 1)
    result = tl.dot(weight.to(DTYPE), v.to(DTYPE), input_precision=PRODUCTS)
    past_key += row % past_rows * pk_row + key_head * pk_head
    past_value += row % past_rows * pv_row + key_head * pv_head
    for first in range(0, past, BLOCK):  # new names: a loop cannot change a tile's shape
        pk = _tile(past_key, first, pk_slot, past, dim, BLOCK, DIM)
        pv = _tile(past_value, first, pv_slot, past, dim, BLOCK, DIM)
        scores = _scores(
            q, pk, bias, b_slot, first, slots, past - first, scale, SLOTS, BLOCK, DTYPE
        )
        # Online softmax: rescale the running sums to the new maximum.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        rescale = tl.exp(highest - new_highest)
        weights = tl.exp(scores - new_highest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        result = result * rescale[:, None] + tl.dot(
            weights.to(DTYPE), pv.to(DTYPE), input_precision=PRODUCTS
        )
        highest = new_highest
    s = tl.arange(0, SLOTS)
    d = tl.arange(0, DIM)
    offset = ((row * slots + s[:, None]) * heads + head) * dim + d[None, :]
    inside = (s < slots)[:, None] & (d < dim)[None, :]
    tl.store(out + offset, result / total[:, None], mask=inside)
    tl.store(log_sums + (row * heads + head) * slots + s, highest + tl.log(total), mask=s < slots)


@kernel
def _suffix_backward(
    query, key, value, past_key, past_value, bias,
    q_row, q_head, q_slot, k_row, k_head, k_slot, v_row, v_head, v_slot,
    pk_row, pk_head, pk_slot, pv_row, pv_head, pv_slot, b_row, b_head, b_slot,
    out, log_sums, gradient, query_gradient, key_gradient, value_gradient,
    scale, heads, groups, slots, past_rows, past, dim,
    SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)  # tensors may have 2³¹ elements
    head = tl.program_id(0) % heads
    key_head = head // groups
    q = _tile(query + row * q_row + head * q_head, 0, q_slot, slots, dim, SLOTS, DIM)
    k = _tile(key + row * k_row + key_head * k_head, 0, k_slot, slots, dim, SLOTS, DIM)
    v = _tile(value + row * v_row + key_head * v_head, 0, v_slot, slots, dim, SLOTS, DIM)
    base = (row * slots * heads + head) * dim
    output = _tile(out + base, 0, heads * dim, slots, dim, SLOTS, DIM)
    g = _tile(gradient + base, 0, heads * dim, slots, dim, SLOTS, DIM)
    s = tl.arange(0, SLOTS)
    log_sum = tl.load(log_sums + (row * heads + head) * slots + s, mask=s < slots, other=0.0)
    # Σ_j weight_j · d_weight_j, which is also output · gradient.
    row_dot = tl.sum(output.to(tl.float32) * g.to(tl.float32), 1)
    bias += row * b_row + head * b_head
    score = _scores(q, k, bias, b_slot, past, slots, slots, scale, SLOTS, SLOTS, DTYPE)
    weight = tl.exp(score - log_sum[:, None])
    d_weight = tl.dot(g.to(DTYPE), tl.trans(v.to(DTYPE)), input_precision=PRODUCTS)
    d_score = weight * (d_weight - row_dot[:, None])
    dv = tl.dot(tl.trans(weight.to(DTYPE)), g.to(DTYPE), input_precision=PRODUCTS)
    dk = tl.dot(tl.trans(d_score.to(DTYPE)), q.to(DTYPE), input_precision=PRODUCTS) * scale
    dq = tl.dot(d_score.to(DTYPE), k.to(DTYPE), input_precision=PRODUCTS)
    past_key += row % past_rows * pk_row + key_head * pk_head
    past_value += row % past_rows * pv_row + key_head * pv_head
    for first in range(0, past, BLOCK):
        pk = _tile(past_key, first, pk_slot, past, dim, BLOCK, DIM)
        pv = _tile(past_value, first, pv_slot, past, dim, BLOCK, DIM)
        scores = _scores(
            q, pk, bias, b_slot, first, slots, past - first, scale, SLOTS, BLOCK, DTYPE
        )
        weights = tl.exp(scores - log_sum[:, None])
        d_weights = tl.dot(g.to(DTYPE), tl.trans(pv.to(DTYPE)), input_precision=PRODUCTS)
        d_scores = weights * (d_weights - row_dot[:, None])
        dq += tl.dot(d_scores.to(DTYPE), pk.to(DTYPE), input_precision=PRODUCTS)
    d = tl.arange(0, DIM)
    offset = base + s[:, None] * heads * dim + d[None, :]
    inside = (s < slots)[:, None] & (d < dim)[None, :]
    tl.store(query_gradient + offset, dq * scale, mask=inside)
    tl.store(key_gradient + offset, dk, mask=inside)
    tl.store(value_gradient + offset, dv, mask=inside)


DECODE_BLOCK = 32
"""Tokens per iteration of decode attention."""


def decode_attention(
    query: Float[Tensor, "row head 1 dim"],
    keys: Float[Tensor, "row key_head capacity dim"],
    values: Float[Tensor, "row key_head capacity dim"],
    position: Int[Tensor, " 1"],
    scale: float,
) -> Float[Tensor, "row 1 head dim"]:
    """softmax(q kᵀ · scale) v over the keys up to `position`."""
    rows, heads, _, dim = query.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = torch.empty(rows, 1, heads, dim, dtype=query.dtype, device=query.device)
    strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    _decode[(rows * heads,)](
        query, keys, values, position, out, *strides, scale, heads, heads // keys.shape[1], dim,
        DIM=max(16, triton.next_power_of_2(dim)), BLOCK=DECODE_BLOCK, num_warps=2,
    )  # fmt: skip
    return out


@kernel
def _decode(
    query, keys, values, position, out,
    q_row, q_head, k_row, k_head, k_slot, v_row, v_head, v_slot,
    scale, heads, groups, dim, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    key_head = head // groups
    d = tl.arange(0, DIM)
    inside = d < dim
    q = tl.load(query + row * q_row + head * q_head + d, mask=inside, other=0.0)
    q = q.to(tl.float32) * scale
    filled = tl.load(position) + 1
    keys += row * k_row + key_head * k_head
    values += row * v_row + key_head * v_head
    highest = -1e30
    total = 0.0
    result = tl.zeros([DIM], dtype=tl.float32)
    for first in range(0, filled, BLOCK):
        t = first + tl.arange(0, BLOCK)
        seen = (t < filled)[:, None] & inside[None, :]
        k = tl.load(keys + t[:, None] * k_slot + d[None, :], mask=seen, other=0.0).to(tl.float32)
        v = tl.load(values + t[:, None] * v_slot + d[None, :], mask=seen, other=0.0).to(tl.float32)
        score = tl.where(t < filled, tl.sum(q[None, :] * k, 1), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(score, 0))
        rescale = tl.exp(highest - new_highest)
        weight = tl.exp(score - new_highest)
        total = total * rescale + tl.sum(weight, 0)
        result = result * rescale + tl.sum(weight[:, None] * v, 0)
        highest = new_highest
    tl.store(out + (row * heads + head) * dim + d, result / total, mask=inside)
