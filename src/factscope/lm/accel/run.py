"""The entry point: run a computation through a model's blocks, accelerated."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from factscope.lm.accel.attention import (
    MAX_SLOTS,
    suffix_attention,
    supports_suffix_attention,
)
from factscope.lm.accel.device import on_gpu
from factscope.lm.accel.graphs import captured, copied
from factscope.lm.accel.linear import fast_blocks_in_turn, fast_forwards, replaced, splits_float32
from factscope.lm.accel.model_cache import model_cache

if TYPE_CHECKING:
    from factscope.lm.model import LM

T = TypeVar("T")

MIN_BATCH = 8
"""With fewer rows or facts a GPU is launch-bound, and building fast layers for one pass costs
more than it saves."""


def accelerated(
    lm: "LM",
    function: Callable[..., T],
    *inputs: Tensor,
    batch: int | None = None,
    key: Any = None,
    needed_again: range | None = None,
    check: Callable[[T], Tensor] | None = None,
    copy: bool = False,
    probe: Callable[[], Tensor] | None = None,
) -> T:
    """function(*inputs), a computation without gradients through the model's blocks.

    Large batches (at least `MIN_BATCH` rows or facts; None counts as large) run with fast linear
    layers, built for one block at a time, in half precision for the head too. Small ones with a
    `key` are captured as a CUDA graph at the second call; what differs between calls of one key
    must be among the inputs, and the next call overwrites the result unless `copy` is set. In
    float32 they use the fast layers that are cached on the model. Those of the blocks
    `needed_again` are built at the first call, those of all blocks at the second.

    In half precision, large batches also use suffix attention, if it does not change `probe()`: one
    block's output.

    Split-precision products overflow where activations exceed float16's range: a result that is
    not finite is computed again without them (`check` selects the tensor to test, if the result
    has several). On a CPU only GELU is faster, and only in computations of unknown size.
    """
    if not on_gpu(lm):
        with fast_blocks_in_turn(lm.blocks) if batch is None else nullcontext():
            return function(*inputs)
    if batch is None or batch >= MIN_BATCH:
        with fast_blocks_in_turn(lm.blocks), _fast_head(lm), _fast_attention(lm, probe):
            result = function(*inputs)
        return result if _finite(lm, result, check) else function(*inputs)
    if key is None:
        return function(*inputs)
    result = _captured(lm, function, inputs, key, needed_again, check)
    return copied(result) if copy else result


def _fast_head(lm: "LM") -> AbstractContextManager[Any]:
    if lm.dtype == torch.float32:
        return nullcontext()
    return replaced(fast_forwards(lm.model.get_output_embeddings()))


def _fast_attention(lm: "LM", probe: Callable[[], Tensor] | None) -> AbstractContextManager[Any]:
    one_device = next(lm.blocks[-1].parameters()).device == lm.device  # kernels run on one
    if probe is None or lm.dtype == torch.float32 or not one_device:
        return nullcontext()
    slots = probe().shape[1]
    right = slots <= MAX_SLOTS and supports_suffix_attention(
        lm, ("large batches", slots), lm.device, lambda: (probe(),)
    )
    return suffix_attention(lm.device) if right else nullcontext()


def _captured(
    lm: "LM",
    function: Callable[..., T],
    inputs: tuple[Tensor, ...],
    key: Any,
    needed_again: range | None,
    check: Callable[[T], Tensor] | None,
) -> T:
    """The result of a captured pass, with fast layers if they split float32 products."""
    cache = model_cache(lm) if splits_float32(lm.dtype) else None
    if cache is not None:
        blocks = needed_again if needed_again and not cache.forwards else range(lm.n_layers)
        forwards = cache.build(lm, blocks if needed_again else list(cache.forwards))

        def fast(*inputs: Tensor) -> T:
            with replaced(forwards):
                return function(*inputs)

        result = captured(lm, (key, cache.version), fast, *inputs)
        if _finite(lm, result, check):
            return result
    return captured(lm, key, function, *inputs)


def _finite(lm: "LM", result: Any, check: Callable[[Any], Tensor] | None) -> bool:
    """Whether no split-precision product overflowed; only float32 models use them."""
    if lm.dtype != torch.float32:
        return True
    return bool((result if check is None else check(result)).isfinite().all())
