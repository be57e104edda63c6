"""Collect C = E[k kᵀ] of MLP keys: several layers in one pass over a text.

The forward pass stops at the highest of the layers. Every token counts, as in the paper's code,
including the first of each sequence. In many models its key (often that of BOS) is an outlier with
a far larger norm; C must contain it, or an edit would change its output too.

Sums are kept for two halves of the text, the even and the odd sequences. Their relative difference
‖C₁ - C₂‖ / ‖C‖, the split-half difference, shows how well C is estimated. What matters to edits
is the direction C⁻¹k in which a fact with the key k is written: its difference between C₁ and C,
the movement, is how much it changed when the text doubled. A collection can end when that is small.
A long collection can save its running sums to a partial file and resume from it.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from factscope.errors import BadRunFolder, BadSetting, BadStats, OutOfMemory
from factscope.io import atomic_path, parse_json, resumable_write
from factscope.lm.accel import add_product_, on_gpu
from factscope.lm.hooks import hook_calls
from factscope.lm.model import LM
from factscope.progress import Progress, no_progress
from factscope.stats.second_moment import (
    SecondMoment,
    direction_difference,
    load_second_moment,
)
from factscope.stats.settings import StatsSettings
from factscope.stats.text import GeneratedText, TokenSequence, batched

FIRST_COMPARISON = 1000
"""Tokens after which the two halves are compared for the first time."""
GROWTH, GROWTH_WITH_THRESHOLD = 2.0, 1.2
"""Ratio of tokens between comparisons; smaller with a threshold, to stop soon after it is met."""
TOKENS_PER_DIMENSION = 10
"""With fewer tokens per dimension of a key, C is hardly an estimate."""
RIDGE = 1e-3
"""Ridge of C⁻¹k when its movement is measured: the editors' default."""


@torch.no_grad()
def collect(
    lm: LM,
    layers: Sequence[int],
    sequences: Iterable[TokenSequence] | GeneratedText,
    settings: StatsSettings,
    *,
    keys: Mapping[int, Float[Tensor, "fact key"]] | None = None,
    out_of_time: Callable[[], bool] = lambda: False,
    corpus: str = "unnamed text",
    partial: Path | None = None,
    save_interval: float = 30.0,
    progress: Progress = no_progress,
) -> list[SecondMoment]:
    """C of each layer over the first `settings.tokens` tokens of the text, or all it has.

    With n shards, shard i reads the sequences i, i + n, i + 2n, …; merged, the shards give C of the
    whole text. `settings.movement` needs the keys of some facts at each layer. `out_of_time` ends a
    collection that has enough tokens to be used. `corpus` describes the text in the results. The
    running sums are saved to `partial` every `save_interval` seconds; the caller deletes that file
    once the results are saved.
    """
    layers = sorted(set(layers))
    if not layers or layers[0] < 0 or layers[-1] >= lm.n_layers:
        raise BadSetting(f"layers is {layers}; {lm.name} has layers 0 to {lm.n_layers - 1}")
    spec = {
        "model": lm.fingerprint,
        "layers": layers,
        "tokens": settings.tokens,
        "batch_size": settings.batch_size,
        "corpus": corpus,
        "shard": settings.shard,
        "convergence": settings.convergence,
        "movement": settings.movement,
    }
    if settings.movement is not None and keys is None:
        raise BadSetting(f"movement is {settings.movement:g}; give the keys of some facts as keys")
    checkpoint = _PartialFile(partial, spec, save_interval)
    sums = checkpoint.load() or RunningSums(history={layer: [] for layer in layers})

    reported = 0.0

    def report(tokens: int | float) -> None:
        """Report the tokens read or generated so far as progress."""
        nonlocal reported
        reached = min(1.0, tokens * settings.n_shards / settings.tokens)
        progress(max(0.0, reached - reported))
        reported = max(reached, reported)

    report(sums.tokens)
    remaining = shard_of(sequences, settings, skip=sums.sequences, generated=report)
    batches = length_batches(lm, remaining, settings.batch_size)
    measured = keys if settings.movement is not None else None
    _add_batches_(lm, sums, batches, settings, measured, out_of_time, checkpoint, report)
    if not sums.tokens:
        raise BadStats("the text has no tokens; give a longer one")
    sums.compare_halves_()
    request = _request(settings, corpus)
    if settings.n_shards > 1:
        corpus = f"{corpus}, shard {settings.shard_index + 1} of {settings.n_shards}"
    return [
        SecondMoment(
            matrix=sums.mean(layer),
            layer=layer,
            tokens=sums.tokens,
            corpus=corpus,
            model=lm.name,
            fingerprint=lm.fingerprint,
            convergence_history=tuple(sums.history[layer]),
            movement_history=tuple(sums.movement.get(layer, ())),
            request=request,
        )
        for layer in layers
    ]


def _add_batches_(
    lm: LM,
    sums: "RunningSums",
    batches: Iterable[list[TokenSequence]],
    settings: StatsSettings,
    keys: Mapping[int, Float[Tensor, "fact key"]] | None,
    out_of_time: Callable[[], bool],
    checkpoint: "_PartialFile",
    report: Callable[[int], None],
) -> None:
    """Add batches to the sums until they converge; Ctrl-C saves the sums of whole batches."""
    threshold = settings.convergence
    comparison_due = float(FIRST_COMPARISON)
    enough = max(FIRST_COMPARISON, TOKENS_PER_DIMENSION * lm.mlp_weight(0).shape[1])
    movement_due = enough / 2.0
    complete = True  # whether the sums contain whole batches only
    try:
        for batch in batches:
            if sums.converged(threshold) or sums.steady(settings.movement):
                break
            if sums.tokens >= enough and out_of_time():
                break
            while comparison_due <= sums.tokens:
                comparison_due *= GROWTH if threshold is None else GROWTH_WITH_THRESHOLD
            while movement_due <= sums.tokens:
                movement_due *= GROWTH
            complete = False
            _add_batch_(lm, sums, batch)
            if sums.tokens >= comparison_due:
                sums.compare_halves_()
            if keys is not None and sums.tokens >= movement_due:
                sums.measure_movement_(keys)
            complete = True
            report(sums.tokens)
            checkpoint.save_if_due(sums)
    except KeyboardInterrupt:
        if complete and sums.tokens:
            checkpoint.save(sums)
        raise


def find_collected(
    path: Path, lm: LM, layer: int, settings: StatsSettings, corpus: str
) -> SecondMoment | None:
    """The second moment in a file, if a collection with the same settings wrote it."""
    with suppress(BadStats):
        moment = load_second_moment(path)
        moment.check(lm, layer)
        return moment if moment.request == _request(settings, corpus) else None
    return None


def _request(settings: StatsSettings, corpus: str) -> str:
    """What identifies a collection besides model and layer; `corpus` has the text, length, seed."""
    names = ["tokens", "convergence", "shard", "half_precision"]
    if settings.movement is not None:
        names.append("movement")
    return json.dumps({"corpus": corpus, **{name: getattr(settings, name) for name in names}})


# ---- running sums


@dataclass
class RunningSums:
    """Running sums of k kᵀ for each layer, over two halves of the text."""

    history: dict[int, list[tuple[int, float]]]
    """By layer: tokens so far and split-half difference."""
    movement: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """By layer: tokens so far and movement of C⁻¹k; infinite where one half has no inverse."""
    halves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By layer: the sums of both halves, allocated with the layer's first keys."""
    counts: tuple[int, int] = (0, 0)
    """Keys in each half, the same for all layers."""
    sequences: int = 0
    """Sequences read so far, of this shard."""

    @property
    def tokens(self) -> int:
        """Keys in both halves."""
        return sum(self.counts)

    def add_(self, layer: int, keys: Float[Tensor, "row token key"], first: int) -> None:
        """Add the keys of the first `first` rows to one half, those of the others to the other."""
        if layer not in self.halves:
            zeros = torch.zeros(keys.shape[-1], keys.shape[-1], device=keys.device)
            self.halves[layer] = zeros, zeros.clone()
        one, two = self.halves[layer]
        self.halves[layer] = one.to(keys.device), two.to(keys.device)  # resumed sums are on the CPU
        for total, rows in zip(self.halves[layer], (keys[:first], keys[first:]), strict=True):
            if len(rows):
                add_products_(total, rows.flatten(0, 1))

    def compare_halves_(self) -> None:
        """Append the split-half difference of every layer to the history."""
        if not all(self.counts):
            return
        for layer, history in self.history.items():
            one, two = self.halves[layer]
            if not history or history[-1][0] < self.tokens:
                difference = _norm(one / self.counts[0] - two / self.counts[1])
                history.append((self.tokens, difference / _norm((one + two) / self.tokens)))

    def converged(self, threshold: float | None) -> bool:
        """Whether the last split-half difference of every layer is within the threshold."""
        return threshold is not None and all(
            history and history[-1][1] <= threshold for history in self.history.values()
        )

    def measure_movement_(self, keys: Mapping[int, Float[Tensor, "fact key"]]) -> None:
        """Append the movement of C⁻¹k of every layer: between one half and both."""
        if not all(self.counts):
            return
        for layer in self.history:
            half = self.halves[layer][0].triu() / self.counts[0]
            one, both = (
                SecondMoment(
                    matrix=matrix, layer=layer, tokens=n, corpus="", model="", fingerprint=""
                )
                for matrix, n in (
                    (half + half.triu(1).T, self.counts[0]),
                    (self.mean(layer), self.tokens),
                )
            )
            try:
                moved = direction_difference(one, both, keys[layer].to(half.device), ridge=RIDGE)
            except BadStats:
                moved = math.inf
            self.movement.setdefault(layer, []).append((self.tokens, moved))

    def steady(self, bound: float | None) -> bool:
        """Whether the last movement of every layer is within the bound."""
        return bound is not None and all(
            (points := self.movement.get(layer)) and points[-1][1] <= bound
            for layer in self.history
        )

    def mean(self, layer: int) -> Float[Tensor, "key key"]:
        """C of both halves together."""
        one, two = self.halves[layer]
        upper = ((one + two) / self.tokens).triu_()
        if not upper.isfinite().all():
            raise BadStats(
                f"some keys of layer {layer} are infinite or NaN; load the model with "
                "--dtype bfloat16 or float32"
            )
        return upper.add_(upper.triu(1).T)


def _norm(upper: Float[Tensor, "key key"]) -> float:
    """The Frobenius norm of a symmetric matrix, from its upper triangle."""
    off_diagonal, diagonal = upper.triu(1).norm(), upper.diagonal().norm()
    return (2 * off_diagonal**2 + diagonal**2).sqrt().item()


STRIPS = 4
"""Strips of rows in which a product is computed, each from its diagonal block to the right."""


def add_products_(total: Float[Tensor, "key key"], keys: Float[Tensor, "token key"]) -> None:
    """Add Σ k kᵀ to the upper triangle of the total; entries below the diagonal are undefined.

    k kᵀ is symmetric: only blocks on and above its diagonal are computed, 5/8 of the work.
    """
    width = total.shape[0]
    strip = -(-width // STRIPS // 8) * 8  # tensor cores are fastest on multiples of 8
    for start in range(0, width, strip):
        stop = start + strip
        add_product_(total[start:stop, start:], keys[:, start:stop].T, keys[:, start:])


# ---- one pass over the text

TOKENS_PER_BATCH_CPU, TOKENS_PER_BATCH_GPU = 2048, 8192


def shard_of(
    sequences: Iterable[TokenSequence] | GeneratedText,
    settings: StatsSettings,
    skip: int,
    generated: Callable[[float], None] = lambda tokens: None,
) -> Iterator[TokenSequence]:
    """A shard's sequences among the first `tokens` of the text, without the first `skip`.

    `generated` is called with the number of tokens generated so far.
    """
    first, step = settings.shard_index, settings.n_shards
    if isinstance(sequences, GeneratedText):
        length = sequences.length
        indices = range(first, math.ceil(settings.tokens / length), step)
        return sequences.sequences(indices, skip, lambda count: generated(count * length))
    return islice(_first_tokens(sequences, settings.tokens), first + skip * step, None, step)


def _first_tokens(sequences: Iterable[TokenSequence], tokens: int) -> Iterator[TokenSequence]:
    """Sequences from the start of the text until they hold that many tokens."""
    so_far = 0
    for sequence in sequences:
        if so_far >= tokens:
            return
        so_far += len(sequence)
        yield sequence


def length_batches(
    lm: LM, sequences: Iterable[TokenSequence], batch_size: int | None
) -> Iterator[list[TokenSequence]]:
    """Batches of sequences of equal length; by default their size depends on the device."""
    tokens = TOKENS_PER_BATCH_GPU if on_gpu(lm) else TOKENS_PER_BATCH_CPU
    for length, group in groupby(sequences, key=len):
        yield from batched(group, batch_size or max(1, tokens // length))


def _add_batch_(lm: LM, sums: RunningSums, batch: Sequence[TokenSequence]) -> None:
    """Add a batch's keys to the sums: even and odd sequences of the text to one half each."""
    offset = sums.sequences % 2
    halves = batch[offset::2], batch[1 - offset :: 2]
    ids = torch.tensor([list(x) for half in halves for x in half], device=lm.device)
    first = len(halves[0])
    try:
        run_to_layer(lm, ids, sums.history, lambda layer, keys: sums.add_(layer, keys, first))
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"out of memory with {len(batch)} sequences of {len(batch[0])} tokens and "
            f"{len(sums.history)} layers; lower --batch-size, or collect fewer layers at once"
        ) from error
    one, two = sums.counts
    sums.counts = one + first * len(batch[0]), two + (len(batch) - first) * len(batch[0])
    sums.sequences += len(batch)


class _LastLayerReached(Exception):
    """Ends a forward pass early."""


def run_to_layer(
    lm: LM, ids: Tensor, layers: Iterable[int], use_keys: Callable[[int, Tensor], Any]
) -> None:
    """Run the model up to the highest of the layers; call the function with each layer's keys."""
    top = max(layers)

    def hook(layer: int) -> Callable[..., None]:
        def call(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            use_keys(layer, args[0].reshape(*ids.shape, -1))
            if layer == top:
                raise _LastLayerReached

        return call

    hooks = ((lm.mlp_out(layer), hook(layer)) for layer in layers)
    with suppress(_LastLayerReached), hook_calls(*hooks):
        lm.model.base_model(ids, use_cache=False)


# ---- resuming

PARTIAL_VERSION = 2
MAX_SAVE_OVERHEAD = 20
"""Saving takes at most 1/20 of the time: the sums of a large model are gigabytes."""


class _PartialFile:
    """The running sums of an unfinished collection; without a path, nothing is saved."""

    def __init__(self, path: Path | None, spec: Mapping[str, Any], interval: float) -> None:
        self.path = path
        self.spec = spec
        self.interval = interval
        self.due = time.monotonic() + interval

    def load(self) -> RunningSums | None:
        """The sums that an interrupted collection with the same settings saved, if any."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                state = parse_json((file.metadata() or {})["state"], allow_nan=True)
            if state.get("version") != PARTIAL_VERSION:
                raise ValueError(f"format version {state.get('version', 1)}, not {PARTIAL_VERSION}")
            changes = [
                f"\n  {name}: {state['spec'].get(name)!r} there, {value!r} now"
                for name, value in self.spec.items()
                if state["spec"].get(name) != value
            ]
            if changes:
                raise BadRunFolder(
                    f"{self.path} is from a collection with other settings; use those, another "
                    f"--out, or delete it to start over:{''.join(changes)}"
                )
            tensors = load_file(self.path)
            return RunningSums(
                halves={n: (tensors[f"{n}.0"], tensors[f"{n}.1"]) for n in self.spec["layers"]},
                counts=tuple(state["counts"]),
                sequences=state["sequences"],
                history={int(n): [(t, x) for t, x in h] for n, h in state["history"].items()},
                movement={
                    int(n): [(t, x) for t, x in h] for n, h in state.get("movement", {}).items()
                },
            )
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise BadRunFolder(
                f"cannot resume from {self.path} ({error}); delete it to start over"
            ) from error

    def save_if_due(self, sums: RunningSums) -> None:
        """Save the sums if the interval has passed."""
        start = time.monotonic()
        if start < self.due:
            return
        self.save(sums)
        now = time.monotonic()
        self.due = now + max(self.interval, MAX_SAVE_OVERHEAD * (now - start))

    def save(self, sums: RunningSums) -> None:
        """Save the sums."""
        if self.path is None:
            return
        state = {
            "version": PARTIAL_VERSION,
            "spec": self.spec,
            "sequences": sums.sequences,
            "counts": sums.counts,
            "history": sums.history,
            "movement": sums.movement,
        }
        tensors = {
            f"{layer}.{i}": half.cpu()
            for layer, halves in sums.halves.items()
            for i, half in enumerate(halves)
        }
        with resumable_write(self.path, self.path.is_file), atomic_path(self.path) as temporary:
            try:
                save_file(tensors, temporary, metadata={"state": json.dumps(state)})
            except SafetensorError as error:  # how it reports a full disk
                raise OSError(str(error)) from error
