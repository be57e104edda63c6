"""Steps of generation that are the same operations every time, so that a GPU can record them.

Keys and values have room for the whole text from the beginning, and the position is a tensor: a
step reads and writes the same places of memory whatever was written before (`lm.recorded`).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from factscope.lm.accel.attention import NAME, kernels_here, multiplies_halves
from factscope.lm.accel.graphs import CudaGraph
from factscope.lm.accel.linear import quick_blocks

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["steady_steps"]

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}
"""By how much a steady step's logits may differ from a plain one's, in units of the largest."""


def steady_steps(
    lm: "LM", tokens: Int[Tensor, " row"], cache: Any, position: int, next_: Any
) -> Int[Tensor, "row rest"] | None:
    """All tokens after `position`, where `tokens` stand, with a cache that ends before it.

    None where a steady step does not say what a plain one says: some families build their masks
    in ways of their own.
    """
    if any(size is not None and size < next_.length for size in _windows(lm)):
        log.info("no steady steps: attention reaches back less far than the texts are long")
        return None
    quick = lm.blocks if lm.device.type == "cuda" else ()
    for blocks, own in ((quick, True), (quick, False), ((), False)):
        if own and not kernels_here(lm.device):
            continue
        kind = torch.half if own and multiplies_halves(lm.dtype) else lm.dtype
        fixed = _Fixed(cache, next_.length, kind)
        with quick_blocks(blocks), _last_attention(fixed) if own else nullcontext():
            rest = _steps(lm, tokens, fixed, position, next_)
        if rest is not None:
            return rest
    return None


@contextmanager
def _last_attention(cache: "_Fixed") -> Iterator[None]:
    """Inside, transformers' default attention to these keys and values is our own kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from factscope.lm.accel.kernels import attend_last

    usual = ALL_ATTENTION_FUNCTIONS[NAME]
    ours = {keys.data_ptr() for keys, _ in cache.room}

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        asks_more = more.get("position_bias") is not None or more.get("softcap") is not None
        if key.data_ptr() not in ours or query.shape[2] != 1 or asks_more:
            return usual(module, query, key, value, attention_mask, scaling=scaling, **more)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_last(query, key, value, cache.position, scale), None

    ALL_ATTENTION_FUNCTIONS[NAME] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]  # back to the library's own


def _windows(lm: "LM") -> list[int | None]:
    """How far back a model's layers look, where they do not see everything."""
    config = lm.model.config
    return [getattr(config, name, None) for name in ("sliding_window", "window_size")]


def _steps(
    lm: "LM", tokens: Tensor, cache: "_Fixed", position: int, next_: Any
) -> Int[Tensor, "row rest"] | None:
    """The steps, or None where the first or the last is not right."""
    cache.position.fill_(position)
    try:
        first = _logits(lm, tokens, cache)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers and caches fail in many ways; plain steps are there
        log.info("no steady steps: %s", str(error).partition("\\n")[0])
        return None
    if not _agree(first, _plain(lm, tokens, cache, position)):
        log.info("no steady steps: they differ from plain ones")
        return None

    def step(tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = _logits(lm, tokens, cache)
        return next_(logits, cache.position + 1), logits

    look = CudaGraph(step)
    rest: list[Tensor] = []
    logits = first
    for at in range(position, next_.length - 1):
        cache.position.fill_(at)
        tokens, logits = look(tokens)
        tokens = tokens.clone()
        rest.append(tokens)
    return torch.stack(rest, dim=1) if bool(logits.isfinite().all()) else None


def _logits(
    lm: "LM", tokens: Int[Tensor, " row"], cache: "_Fixed"
) -> Float[Tensor, "row vocabulary"]:
    """One more token in every row."""
    mask = _mask(lm, cache).expand(len(tokens), 1, 1, -1)
    states = lm.model.base_model(
        tokens[:, None],
        attention_mask=mask,
        position_ids=cache.position.expand(len(tokens), 1),
        past_key_values=cache,
        use_cache=True,
    )
    return lm.head(states.last_hidden_state[:, -1])


def _mask(lm: "LM", cache: "_Fixed") -> Tensor:
    """What a token may see: True, or for attention that is spelled out, a 0 to add."""
    seen = cache.reach <= cache.position
    if lm.model.config._attn_implementation != "eager":
        return seen
    hidden = torch.finfo(lm.dtype).min
    return torch.zeros_like(seen, dtype=lm.dtype).masked_fill(~seen, hidden)


def _plain(
    lm: "LM", tokens: Tensor, cache: "_Fixed", position: int
) -> Float[Tensor, "row vocabulary"]:
    """The same by a cache that grows."""
    growing = DynamicCache()
    for layer, (keys, values) in enumerate(cache.room):
        k, v = (x[:, :, :position].to(lm.dtype, copy=True) for x in (keys, values))
        growing.update(k, v, layer)
    states = lm.model.base_model(tokens[:, None], past_key_values=growing, use_cache=True)
    return lm.head(states.last_hidden_state[:, -1])


def _agree(found: Tensor, wanted: Tensor) -> bool:
    gap = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return bool(gap <= TOLERANCE.get(wanted.dtype, 1e-1))


class _Fixed(DynamicCache):
    """A cache with room for a given number of tokens, which writes where `position` says."""

    def __init__(self, before: Any, length: int, kind: torch.dtype) -> None:
        super().__init__()
        self.room = [_roomy(layer.keys, layer.values, length, kind) for layer in before.layers]
        keys = self.room[0][0]
        self.length = length
        self.position = torch.zeros(1, dtype=torch.long, device=keys.device)
        self.reach = torch.arange(length, device=keys.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put a token's keys and values in their place; all of them are given back."""
        keys, values = self.room[layer_idx]
        at = self.position.to(keys.device)
        keys.index_copy_(2, at, key_states.to(keys.dtype))
        values.index_copy_(2, at, value_states.to(values.dtype))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As many as there is room for: nobody who asks here is told the position."""
        return self.length


def _roomy(keys: Tensor, values: Tensor, length: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same keys and values at the beginning of longer ones."""
    both = []
    for x in (keys, values):
        room = x.new_zeros(*x.shape[:2], length, x.shape[-1], dtype=kind)
        room[:, :, : x.shape[2]] = x
        both.append(room)
    return both[0], both[1]
