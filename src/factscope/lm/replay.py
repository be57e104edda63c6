"""Replay: call a model's blocks again after a forward pass, on selected tokens only.

After one forward pass a block can be called on any segment of a prompt: the tokens left of it are
present as keys and values, mask and positions are cut out of the block's first arguments. The real
transformers blocks run; nothing of a model is reimplemented.

A `PackedView` says which tokens a batch holds. Each packed row belongs to one row of the first run,
whose keys and values it may attend to, and holds one or several segments of that row's tokens.
Segments in one packed row do not see each other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from factscope.lm.accel.attention import splits_past
from factscope.lm.forward import ActivationCache
from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedView:
    """Which tokens of which rows a packed batch holds."""

    row: Int[Tensor, " packed"]  # the row of the first run that each packed row belongs to
    position: Int[Tensor, "packed slot"]  # the token in each slot; 0 in an empty one
    start: Int[Tensor, "packed slot"]
    """First token of the slot's segment: the slot sees the row's keys left of it; -1 if empty."""
    past: int  # how many of a row's keys and values the packed rows get
    complete: bool = False  # whether packed row i is known to belong to row i, for every row

    @classmethod
    def whole(cls, rows: int, length: int, device: torch.device) -> "PackedView":
        """Every token of every row."""
        position = torch.arange(length, device=device).expand(rows, length)
        return cls(
            row=torch.arange(rows, device=device),
            position=position,
            start=torch.zeros_like(position),
            past=0,
            complete=True,
        )

    @cached_property
    def key_position(self) -> Int[Tensor, "packed key"]:
        """The token of each key: the row's past, then the slots."""
        past = torch.arange(self.past, device=self.position.device)
        return torch.cat([past.expand(len(self.row), -1), self.position], dim=1)

    @cached_property
    def visible(self) -> Bool[Tensor, "packed slot key"]:
        """Which keys each slot sees; an empty slot sees itself, so that softmax is defined."""
        past = torch.arange(self.past, device=self.position.device)
        to_past = past < self.start[:, :, None]
        together = self.start[:, :, None] == self.start[:, None, :]
        before = self.position[:, None, :] <= self.position[:, :, None]
        itself = torch.eye(self.start.shape[1], dtype=torch.bool, device=self.start.device)
        filled = (self.start >= 0)[:, :, None]
        to_slots = (together & before & filled) | (itself & ~filled)
        return torch.cat([to_past, to_slots], dim=2)


class Replay:
    """The blocks of a finished run, callable on a packed view.

    `replay(layer, hidden)` takes the view's packed rows, or several copies of them stacked along
    the first axis, and returns the block's output.
    """

    def __init__(self, lm: LM, run: ActivationCache, view: PackedView) -> None:
        self.lm, self.run, self.view = lm, run, view
        self._cached: dict[tuple[Any, ...], Tensor] = {}
        self._used: dict[tuple[Any, ...], Tensor] = {}
        rows = torch.arange(len(run.inputs), device=view.row.device)
        self._all_rows = view.complete or torch.equal(view.row, rows)

    @classmethod
    def whole(cls, lm: LM, run: ActivationCache) -> "Replay":
        """The replay of all tokens of all rows."""
        rows, length, _ = run.inputs.shape
        return cls(lm, run, PackedView.whole(rows, length, run.inputs.device))

    def __call__(
        self, layer: int, hidden: Float[Tensor, "row slot width"]
    ) -> Float[Tensor, "row slot width"]:
        """The block's output for the given states."""
        output = self.lm.blocks[layer](hidden, **self.arguments(layer, hidden))
        return output[0] if isinstance(output, tuple) else output

    def tensors(
        self, layers: Iterable[int], hidden: Float[Tensor, "row slot width"]
    ) -> list[Tensor]:
        """The masks, positions and biases of these layers, in the order of their first use by them,
        whichever layers were called before."""
        self._used = {}
        for layer in layers:
            self.arguments(layer, hidden)
        return list(self._used.values())

    def arguments(self, layer: int, hidden: Float[Tensor, "row slot width"]) -> dict[str, Any]:
        """The block's arguments in the first run, cut to the view and repeated for each copy."""
        run, view, cached = self.run, self.view, self._memoised
        copies = len(hidden) // len(view.row)

        def stack(x: Tensor) -> Tensor:
            return x.expand(copies, *x.shape).flatten(0, 1)

        def at_slots(x: Tensor) -> Tensor:
            return stack(cached(lambda: x[0][view.position.to(x.device)], "positions", id(x)))

        arguments = dict(run.block_args[layer])
        del arguments["hidden_states"]
        arguments.setdefault("attention_mask", None)
        for name, value in arguments.items():
            if name in ("past_key_values", "layer_past"):
                rows = slice(None) if self._all_rows else view.row.to(run.keys[layer].device)
                keys, values = (x[layer][rows, :, : view.past] for x in (run.keys, run.values))
                arguments[name] = _Past(keys, values)
            elif name == "attention_mask":
                like = hidden if value is None else value
                mask = cached(partial(self._mask, value, like), "mask", id(value), like.device)
                arguments[name] = stack(mask)
            elif value is not None and name == "position_ids":
                arguments[name] = at_slots(value)
            elif value is not None and name == "position_embeddings":
                arguments[name] = tuple(at_slots(x) for x in value)
            elif value is not None and name == "alibi":
                biases = stack(cached(partial(self._alibi, value), "alibi", id(value)))
                arguments[name] = biases.flatten(0, 1) if value.dim() == 3 else biases
        return arguments

    def _memoised(self, compute: Callable[[], Tensor], *key: Any) -> Tensor:
        """A tensor that does not depend on the states, computed once for all layers."""
        if key not in self._cached:
            self._cached[key] = compute()
        self._used[key] = self._cached[key]
        return self._cached[key]

    def _mask(self, first: Tensor | None, like: Tensor) -> Tensor:
        """The view's mask in the form of the first run's: True where visible, or a bias to add."""
        visible = self.view.visible[:, None].to(like.device)
        if first is None:
            return like.new_zeros(visible.shape).masked_fill(~visible, torch.finfo(like.dtype).min)
        query = self.view.position[:, :, None].to(first.device)
        key = self.view.key_position[:, None, :].to(first.device)
        # (packed row, head, slot, key), the layout of the model's masks
        cut = first[0][:, query, key].transpose(0, 1)
        if first.dtype == torch.bool:
            empty = (self.view.start < 0)[:, None, :, None].to(first.device)
            return (cut & visible) | (visible & empty)
        return cut.masked_fill(~visible, torch.finfo(first.dtype).min)

    def _alibi(self, value: Tensor) -> Tensor:
        """ALiBi biases by key; some families flatten (row, head) to one axis."""
        heads = len(value) // len(self.run.inputs)
        first = value[:heads] if value.dim() == 3 else value[0]
        return first[:, :, self.view.key_position.to(value.device)].permute(2, 0, 1, 3)


@dataclass(frozen=True)
class _Past:
    """The keys and values left of the packed rows, as a transformers cache."""

    keys: Tensor
    values: Tensor

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The past and the new keys and values, concatenated; for suffix attention the new ones
        alone, with the past as an attribute."""
        if splits_past():
            annotated: Any = keys
            annotated.past = (self.keys, self.values)
            return keys, values
        return _concatenated(self.keys, keys), _concatenated(self.values, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The length of the past."""
        return self.keys.shape[2]


def _concatenated(past: Tensor, new: Tensor) -> Tensor:
    """The past in front of the new keys of each copy."""
    packed, heads, length, _ = past.shape
    new = new.to(past.dtype)  # the past may be in half precision
    if length == 0:
        return new
    if len(new) == packed:
        return torch.cat([past, new], dim=2)
    rows, _, slots, dim = new.shape
    both = new.new_empty(rows, heads, length + slots, dim)
    both.view(-1, packed, heads, length + slots, dim)[:, :, :, :length] = past
    both[:, :, length:] = new
    return both
