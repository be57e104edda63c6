"""Collect second moments: all wanted layers in one pass over a text, as far up as they need.

Tokens are counted, not articles, and every token counts, as in the paper's code. The first
token of a window (BOS, where there is one) is an outlier in many models: one key, far longer than
all others, in each window. It is left in, since an edit's C must know of it to leave it alone.

Sums of k kᵀ over two halves of a text, in float32 on the device of the keys.

k kᵀ is symmetric: only the blocks on and above its diagonal are summed, five eighths of the work.

What a collection has so far, on the disk: a killed run goes on from it.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from factscope.errors import BadRunFolder, BadSetting, BadStats, OutOfMemory
from factscope.lm.accel.matmul import MIXED, available
from factscope.lm.hooks import hook_calls
from factscope.stats.second_moment import SecondMoment
from factscope.stats.text import GeneratedText, Window

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "MomentSums",
    "PartialCollection",
    "PartialState",
    "add_products_",
    "batches",
    "collect",
    "rows_of",
    "run_to",
]

STRIPS = 4
"""A product is made in so many strips of rows, each from its diagonal block rightwards."""


def add_products_(total: Float[Tensor, "key key"], keys: Float[Tensor, "token key"]) -> None:
    """Add Σ k kᵀ to the upper triangle of the total; what is below it is not to be read.

    Float32 keys are multiplied as torch's matmul precision says, so TF32 only where that was
    chosen. Half-precision keys are multiplied as they are: their products are exact in float32.
    """
    mixed = keys.dtype != torch.float32 and keys.is_cuda and available(keys.device)
    keys = keys if mixed else keys.float()
    width = total.shape[0]
    strip = -(-width // STRIPS // 8) * 8  # tensor cores like multiples of eight
    for start in range(0, width, strip):
        part = total[start : start + strip, start:]
        left, right = keys[:, start : start + strip].T, keys[:, start:]
        if mixed:
            torch.addmm(part, left, right, out=part, **MIXED)
        else:
            part.addmm_(left, right)


@dataclass
class MomentSums:
    """Two half sums for each of some layers, and how many keys each half has."""

    layers: Sequence[int]
    halves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer; made where the layer's first keys are found."""
    counts: tuple[int, int] = (0, 0)
    """Keys in each half, the same for all layers."""

    @property
    def tokens(self) -> int:
        """Keys in both halves."""
        return sum(self.counts)

    def add_(self, layer: int, keys: Float[Tensor, "row token key"], first: int) -> None:
        """Add a batch's keys: its first rows to one half, the others to the other."""
        one, other = self.halves.get(layer) or (_zeros(keys), _zeros(keys))
        self.halves[layer] = one.to(keys.device), other.to(keys.device)  # a resumed run's: CPU
        for half, some in zip(self.halves[layer], (keys[:first], keys[first:]), strict=True):
            if len(some):
                add_products_(half, some.flatten(0, 1))

    def count_(self, first: int, second: int) -> None:
        """Say how many keys the batch had in each half."""
        self.counts = (self.counts[0] + first, self.counts[1] + second)

    def gap(self, layer: int) -> float | None:
        """‖C₁ - C₂‖ / ‖C‖ of the two halves; None while one is empty."""
        if not all(self.counts):
            return None
        one, other = self.halves[layer]
        apart = _norm(one / self.counts[0] - other / self.counts[1])
        return apart / _norm((one + other) / self.tokens)

    def mean(self, layer: int) -> Float[Tensor, "key key"]:
        """C of both halves together, where they are."""
        one, other = self.halves[layer]
        upper = ((one + other) / self.tokens).triu_()
        if not upper.isfinite().all():
            raise BadStats(
                f"the keys of layer {layer} are not all finite; load the model with "
                "--dtype bfloat16 or float32"
            )
        return upper.add_(upper.triu(1).T)


def _zeros(keys: Float[Tensor, "row token key"]) -> Float[Tensor, "key key"]:
    return torch.zeros(keys.shape[-1], keys.shape[-1], device=keys.device)


def _norm(upper: Float[Tensor, "key key"]) -> float:
    """The Frobenius norm of a symmetric matrix, from its upper triangle."""
    beside, diagonal = upper.triu(1).norm(), upper.diagonal().norm()
    return (2 * beside**2 + diagonal**2).sqrt().item()


History = dict[int, list[tuple[int, float]]]

SHARE = 20
"""Writing may take one part in so many of the time: the sums of large models are gigabytes."""


@dataclass
class PartialState:
    """How far a collection is."""

    sums: MomentSums
    windows: int = 0
    """Windows done, of this shard."""
    history: History = field(default_factory=dict)
    """By layer: tokens so far and the gap between the halves."""


class PartialCollection:
    """The file of a collection under way; without a path nothing is written."""

    def __init__(self, path: Path | None, spec: Mapping[str, Any], every: float) -> None:
        self.path = path
        self.spec = spec
        self.every = every
        self.due = time.monotonic() + every

    def read(self, fresh: PartialState) -> PartialState:
        """What an earlier run with the same settings left, or the fresh state."""
        if self.path is None or not self.path.is_file():
            return fresh
        try:
            with safe_open(self.path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["state"])
            self._must_match(header["spec"])
            tensors = load_file(self.path)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise BadRunFolder(
                f"{self.path} cannot be gone on from ({error}); delete it to begin anew"
            ) from error
        sums = MomentSums(layers=fresh.sums.layers, counts=tuple(header["counts"]))
        for layer in fresh.sums.layers:
            sums.halves[layer] = tensors[f"{layer}.0"], tensors[f"{layer}.1"]
        history = {int(k): [(n, gap) for n, gap in v] for k, v in header["history"].items()}
        return PartialState(sums=sums, windows=header["windows"], history=history)

    def keep(self, state: PartialState) -> None:
        """Write the state where it is time to."""
        if self.path is None or time.monotonic() < self.due:
            return
        began = time.monotonic()
        self._write(self.path, state)
        now = time.monotonic()
        self.due = now + max(self.every, SHARE * (now - began))

    def _write(self, path: Path, state: PartialState) -> None:
        from factscope.io import atomic_path

        header = {
            "spec": self.spec,
            "windows": state.windows,
            "counts": state.sums.counts,
            "history": state.history,
        }
        tensors = {
            f"{layer}.{i}": half.cpu()
            for layer, halves in state.sums.halves.items()
            for i, half in enumerate(halves)
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata={"state": json.dumps(header)})

    def _must_match(self, there: Mapping[str, Any]) -> None:
        asked = json.loads(json.dumps(self.spec))
        names = [name for name in {**there, **asked} if there.get(name) != asked.get(name)]
        if names:
            changes = [f"{n}: there {there.get(n)!r}, asked {asked.get(n)!r}" for n in names]
            raise BadRunFolder(
                f"{self.path} was left by a run with other settings; give those, another --out, "
                "or delete it to begin anew:\n  " + "\n  ".join(changes)
            )


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
    windows: Iterable[Window] | GeneratedText,
    *,
    tokens: int,
    rows: int | None = None,
    corpus: str = "a text without a name",
    shard: Shard = (0, 1),
    until: float | None = None,
    partial: Path | None = None,
    every: float = 30.0,
    progress: Callable[[int], None] | None = None,
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
    keeper = PartialCollection(partial, spec, every)
    state = keeper.read(
        PartialState(sums=MomentSums(layers=layers), history={n: [] for n in layers})
    )
    progress = progress or (lambda _: None)
    progress(state.sums.tokens)
    left = batches(chosen(windows, tokens, shard, state.windows), rows_of(lm, rows))
    growth = GROWTH if until is None else GROWTH_UNTIL
    for batch in takewhile(lambda _: not _converged(state, until), left):
        look = _next_look(state.sums.tokens, growth)
        _add_(lm, state, batch)
        if state.sums.tokens >= look:
            _compare_(state)
        progress(sum(map(len, batch)))
        keeper.keep(state)
    if not state.sums.tokens:
        raise BadStats("the text has no tokens; give a longer one")
    _compare_(state)
    words = corpus if shard == (0, 1) else f"{corpus}, shard {shard[0] + 1} of {shard[1]}"
    return [_moment(lm, state, layer, words) for layer in layers]


def chosen(
    windows: Iterable[Window] | GeneratedText, tokens: int, shard: Shard, start: int
) -> Iterator[Window]:
    """A shard's windows until the whole has so many tokens, without the first `start` of them."""
    first, step = shard
    if isinstance(windows, GeneratedText):
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
        with hook_calls(*((lm.mlp_out(layer), show(layer)) for layer in see)):
            lm.model.base_model(ids, use_cache=False)
    except _Enough:
        pass


def _add_(lm: "LM", state: PartialState, batch: Sequence[Window]) -> None:
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


def _compare_(state: PartialState) -> None:
    """Note how far the halves are apart, once for each number of tokens."""
    for layer, history in state.history.items():
        gap = state.sums.gap(layer)
        if gap is not None and (not history or history[-1][0] < state.sums.tokens):
            history.append((state.sums.tokens, gap))


def _converged(state: PartialState, until: float | None) -> bool:
    """Whether all layers' halves are as close as they should be."""
    gaps = [history[-1][1] for history in state.history.values() if history]
    return until is not None and len(gaps) == len(state.history) and max(gaps) <= until


def _next_look(tokens: int, growth: float) -> float:
    look = float(FIRST_LOOK)
    while look <= tokens:
        look *= growth
    return look


def _moment(lm: "LM", state: PartialState, layer: int, corpus: str) -> SecondMoment:
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
    facts_per_pass = TOKENS_AT_ONCE.get(lm.device.type, TOKENS_AT_ONCE["cpu"])
    return lambda length: rows or max(1, facts_per_pass // length)


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
