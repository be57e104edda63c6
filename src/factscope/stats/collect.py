"""Collect second moments: all wanted layers in one pass over a text, as far up as they need.

Tokens are counted, not articles, and every token counts, as in the paper's code. The first
token of a window (BOS, where there is one) is an outlier in many models: one key, far longer than
all others, in each window. It is left in, since an edit's C must know of it to leave it alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factscope.errors import BadSetting, BadStats, OutOfMemory
from factscope.lm.hooks import on_call
from factscope.stats.moment import SecondMoment
from factscope.stats.partial import Partial, State
from factscope.stats.sums import Sums
from factscope.stats.text import Window, WrittenText

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["batches", "collect", "rows_of", "run_to"]

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 8192}
"""Tokens that go through the model together, where nothing else was said."""
FIRST_LOOK = 1000
"""Tokens after which the halves are compared for the first time; then at each doubling."""
GROWTH, GROWTH_UNTIL = 2.0, 1.2
"""How much longer until the next look; with `until` looks are closer, to stop in time."""

Shard = tuple[int, int]
"""Which part, from 0, of how many."""


class _Enough(Exception):
    """Raised within a forward pass when the highest wanted layer was seen."""


@torch.no_grad()
def collect(
    lm: "LM",
    layers: Sequence[int],
    windows: Iterable[Window] | WrittenText,
    *,
    tokens: int,
    rows: int | None = None,
    corpus: str = "a text without a name",
    shard: Shard = (0, 1),
    until: float | None = None,
    partial: Path | None = None,
    every: float = 30.0,
    done: Callable[[int], None] | None = None,
) -> list[SecondMoment]:
    """C of each layer over the first so many tokens of the windows, or as many as there are.

    `rows` windows go through the model at once. Shard (i, n) takes every n-th window from the
    i-th on (from 0); the shards' moments merge to the whole's. With `until`, collection ends when
    the halves of the text are no further apart than that. `partial` is where the state is kept
    `every` so many seconds; the caller deletes it when the results are safe.
    """
    layers = _checked(lm, layers, tokens, shard)
    spec = {
        "model": lm.fingerprint, "layers": layers, "tokens": tokens, "rows": rows,
        "corpus": corpus, "shard": shard, "until": until,
    }  # fmt: skip
    keeper = Partial(partial, spec, every)
    state = keeper.read(State(sums=Sums(layers=layers), history={n: [] for n in layers}))
    done = done or (lambda _: None)
    done(state.sums.tokens)
    left = batches(chosen(windows, tokens, shard, state.windows), rows_of(lm, rows))
    growth = GROWTH if until is None else GROWTH_UNTIL
    for batch in takewhile(lambda _: not _converged(state, until), left):
        look = _next_look(state.sums.tokens, growth)
        _add_(lm, state, batch)
        if state.sums.tokens >= look:
            _compare_(state)
        done(sum(map(len, batch)))
        keeper.keep(state)
    if not state.sums.tokens:
        raise BadStats("the text has no tokens; give a longer one")
    _compare_(state)
    words = corpus if shard == (0, 1) else f"{corpus}, shard {shard[0] + 1} of {shard[1]}"
    return [_moment(lm, state, layer, words) for layer in layers]


def chosen(
    windows: Iterable[Window] | WrittenText, tokens: int, shard: Shard, start: int
) -> Iterator[Window]:
    """A shard's windows until the whole has so many tokens, without the first `start` of them."""
    first, step = shard
    if isinstance(windows, WrittenText):
        count = math.ceil(tokens / windows.window)
        return windows.pick_after(range(first, count, step), start)
    return islice(_until(windows, tokens), first + start * step, None, step)


def _until(windows: Iterable[Window], tokens: int) -> Iterator[Window]:
    so_far = 0
    for window in windows:
        if so_far >= tokens:
            return
        so_far += len(window)
        yield window


def batches(windows: Iterable[Window], rows: Callable[[int], int]) -> Iterator[list[Window]]:
    """Windows of one length together, as many as `rows` says for that length."""
    batch: list[Window] = []
    for window in windows:
        if batch and (len(window) != len(batch[0]) or len(batch) >= rows(len(window))):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def run_to(lm: "LM", ids: Tensor, see: dict[int, Callable[[Tensor], Any]]) -> None:
    """Run the model over rows of ids as far as the highest of the layers; show each its keys."""
    top = max(see)

    def show(layer: int) -> Callable[..., None]:
        def call(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            see[layer](args[0].reshape(*ids.shape, -1))
            if layer == top:
                raise _Enough

        return call

    try:
        with on_call(*((lm.mlp_out(layer), show(layer)) for layer in see)):
            lm.model.base_model(ids, use_cache=False)
    except _Enough:
        pass


def _add_(lm: "LM", state: State, batch: Sequence[Window]) -> None:
    """Add a batch: windows of odd and of even number to one half each."""
    swap = state.windows % 2
    halves = batch[swap::2], batch[1 - swap :: 2]
    ids = torch.tensor([list(window) for half in halves for window in half], device=lm.device)
    first = len(halves[0])

    def add(layer: int) -> Callable[[Tensor], None]:
        return lambda keys: state.sums.add_(layer, keys, first)

    try:
        run_to(lm, ids, {layer: add(layer) for layer in state.sums.layers})
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"no memory for {len(batch)} windows of {len(batch[0])} tokens and "
            f"{len(state.sums.layers)} layers; try fewer --rows, or fewer layers at once"
        ) from error
    state.sums.count_(first * len(batch[0]), (len(batch) - first) * len(batch[0]))
    state.windows += len(batch)


def _compare_(state: State) -> None:
    """Note how far the halves are apart, once for each number of tokens."""
    for layer, history in state.history.items():
        gap = state.sums.gap(layer)
        if gap is not None and (not history or history[-1][0] < state.sums.tokens):
            history.append((state.sums.tokens, gap))


def _converged(state: State, until: float | None) -> bool:
    """Whether all layers' halves are as close as they should be."""
    gaps = [history[-1][1] for history in state.history.values() if history]
    return until is not None and len(gaps) == len(state.history) and max(gaps) <= until


def _next_look(tokens: int, growth: float) -> float:
    look = float(FIRST_LOOK)
    while look <= tokens:
        look *= growth
    return look


def _moment(lm: "LM", state: State, layer: int, corpus: str) -> SecondMoment:
    return SecondMoment(
        matrix=state.sums.mean(layer),
        layer=layer,
        tokens=state.sums.tokens,
        corpus=corpus,
        model=lm.name,
        fingerprint=lm.fingerprint,
        halves=tuple(state.history[layer]),
    )


def rows_of(lm: "LM", rows: int | None) -> Callable[[int], int]:
    """How many windows of a length go together."""
    at_once = TOKENS_AT_ONCE.get(lm.device.type, TOKENS_AT_ONCE["cpu"])
    return lambda length: rows or max(1, at_once // length)


def _checked(lm: "LM", layers: Sequence[int], tokens: int, shard: Shard) -> list[int]:
    """The layers in order, each once; what cannot be is refused."""
    wrong = [layer for layer in layers if not 0 <= layer < lm.n_layers]
    if wrong or not layers:
        raise BadSetting(f"layers {list(layers)}; {lm.name} has layers 0 to {lm.n_layers - 1}")
    if tokens < 1:
        raise BadSetting(f"{tokens} tokens; give at least 1")
    if not 0 <= shard[0] < shard[1]:
        raise BadSetting(f"shard {shard[0] + 1} of {shard[1]}; write 1/4 to 4/4 for four shards")
    return sorted(set(layers))
