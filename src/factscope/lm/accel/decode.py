"""Static decoding: every generation step runs the same operations on the same memory.

The KV cache has its full length from the beginning and the position is a tensor, so a step reads
and writes the same memory whatever was generated before, and a GPU can replay it as a graph.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from factscope.lm.accel.attention import has_kernels, rounds_to_half, with_attention
from factscope.lm.accel.device import on_gpu
from factscope.lm.accel.graphs import CudaGraph
from factscope.lm.accel.linear import fast_blocks

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}
"""How far a static step's logits may differ from a dynamic one's, relative to the largest."""
MIN_STEPS = 8
"""Fewer steps are not worth the set-up."""

Choose = Callable[[Float[Tensor, "row vocabulary"], Tensor], Int[Tensor, " row"]]
"""(logits, position) → the tokens at that position."""


def static_decode(
    lm: "LM",
    tokens: Int[Tensor, " row"],
    cache: DynamicCache,
    position: int,
    length: int,
    choose: Choose,
    *,
    force: bool = False,
) -> Int[Tensor, "row rest"] | None:
    """Generate the tokens after `position`, given `tokens` there and a cache of those before it.

    Returns None on a CPU (unless forced), for at most `MIN_STEPS` tokens, and where a static step's
    logits differ from a dynamic one's: some families build masks of their own.
    """
    if not (force or on_gpu(lm)) or length - position <= MIN_STEPS:
        return None
    config = lm.model.config
    windows = [getattr(config, name, None) for name in ("sliding_window", "window_size")]
    if any(window is not None and window < length for window in windows):
        log.info("static decoding is off: the attention window is shorter than the texts")
        return None
    fast = lm.blocks if on_gpu(lm) else ()
    for blocks, use_kernel in ((fast, True), (fast, False), ((), False)):
        if use_kernel and not has_kernels(lm.device):
            continue
        dtype = torch.half if use_kernel and rounds_to_half(lm.dtype) else lm.dtype
        static = _StaticCache(cache, length, dtype)
        with fast_blocks(blocks), _decode_attention(static) if use_kernel else nullcontext():
            rest = _decode(lm, tokens, static, position, choose)
        if rest is not None:
            return rest
    return None


def _decode_attention(cache: "_StaticCache") -> AbstractContextManager[None]:
    """Inside, transformers' default attention uses the decode kernel on this cache."""
    from factscope.lm.accel.kernels import decode_attention

    cached_keys = {keys.data_ptr() for keys, _ in cache.tensors}

    def make(default: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
            scaling: float | None = None, **more: Any,
        ) -> tuple[Tensor, None]:  # fmt: skip
            unsupported = more.get("position_bias") is not None or more.get("softcap") is not None
            if key.data_ptr() not in cached_keys or query.shape[2] != 1 or unsupported:
                return default(module, query, key, value, attention_mask, scaling=scaling, **more)
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            return decode_attention(query, key, value, cache.position, scale), None

        return attention

    return with_attention(make)


def _decode(
    lm: "LM", tokens: Tensor, cache: "_StaticCache", position: int, choose: Choose
) -> Int[Tensor, "row rest"] | None:
    """The generated tokens; None if the first logits are wrong or the last ones are not finite."""
    cache.position.fill_(position)
    try:
        logits = _logits(lm, tokens, cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and caches fail in many ways; dynamic steps always work
        log.info("static decoding is off: %s", str(error).partition("\n")[0])
        return None
    if not _agree(logits, _dynamic_logits(lm, tokens, cache, position)):
        log.info("static decoding is off: its logits differ from those of dynamic decoding")
        return None

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(lm, tokens, cache)
        return choose(logits, cache.position + 1), logits

    graph = CudaGraph(step)
    rest: list[Tensor] = []
    for at in range(position, cache.length - 1):
        cache.position.fill_(at)
        tokens, logits = graph(tokens)
        tokens = tokens.clone()
        rest.append(tokens)
    return torch.stack(rest, dim=1) if bool(logits.isfinite().all()) else None


def _logits(
    lm: "LM", tokens: Int[Tensor, " row"], cache: "_StaticCache"
) -> Float[Tensor, "row vocabulary"]:
    """The logits after one more token in every row."""
    states = lm.model.base_model(
        tokens[:, None],
        attention_mask=_mask(lm, cache).expand(len(tokens), 1, 1, -1),
        position_ids=cache.position.expand(len(tokens), 1),
        past_key_values=cache,
        use_cache=True,
    )
    return lm.head(states.last_hidden_state[:, -1])


def _mask(lm: "LM", cache: "_StaticCache") -> Tensor:
    """The attention mask: True where visible; for eager attention, a bias to add."""
    seen = cache.positions <= cache.position
    if lm.model.config._attn_implementation != "eager":
        return seen
    hidden = torch.finfo(lm.dtype).min
    return torch.zeros_like(seen, dtype=lm.dtype).masked_fill(~seen, hidden)


def _dynamic_logits(
    lm: "LM", tokens: Tensor, cache: "_StaticCache", position: int
) -> Float[Tensor, "row vocabulary"]:
    """The same logits, computed with a growing cache."""
    growing = DynamicCache()
    for layer, (keys, values) in enumerate(cache.tensors):
        k, v = (x[:, :, :position].to(lm.dtype, copy=True) for x in (keys, values))
        growing.update(k, v, layer)
    states = lm.model.base_model(tokens[:, None], past_key_values=growing, use_cache=True)
    return lm.head(states.last_hidden_state[:, -1])


def _agree(actual: Tensor, expected: Tensor) -> bool:
    gap = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return bool(gap <= TOLERANCE.get(expected.dtype, 1e-1))


class _StaticCache(DynamicCache):
    """A KV cache of fixed length that writes at a position held in a tensor.

    transformers' own StaticCache takes the position from its length, which a captured step cannot
    change.
    """

    def __init__(self, before: DynamicCache, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        layers: Any = before.layers
        self.tensors = [
            (_padded(layer.keys, length, dtype), _padded(layer.values, length, dtype))
            for layer in layers
        ]
        device = self.tensors[0][0].device
        self.length = length
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.positions = torch.arange(length, device=device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values; return all of them."""
        keys, values = self.tensors[layer_idx]
        at = self.position.to(keys.device)
        keys.index_copy_(2, at, key_states.to(keys.dtype))
        values.index_copy_(2, at, value_states.to(values.dtype))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The full length; the position is given to the model separately."""
        return self.length


def _padded(x: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    padded = x.new_zeros(*x.shape[:2], length, x.shape[-1], dtype=dtype)
    padded[:, :, : x.shape[2]] = x
    return padded
