"""The tracing engine: every cell of a trace in one pass over the layers.

Restoring the state at (token t, layer l) changes nothing below layer l and nothing left of t. So
the clean and the corrupted run are computed once, and one pass upwards carries all *pending*
restorations: at each layer those that began below it advance by one block, over their tokens
t … T-1 only, attending to the corrupted run's keys and values left of t; then the restorations
at that layer join. The weights of a layer are read once for all cells.

A restoration's tokens t … T-1 are a *segment*. The segments of one corrupted row are packed into
rows of about `SLOTS` slots, so that batches are dense and attention works on full tiles. The
pending states are one tensor: (cell's layer, packed row, slot, width).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.accel import accelerated
from factscope.lm.forward import ActivationCache, token_probability
from factscope.lm.hooks import hook_outputs
from factscope.lm.memory import BatchSizes
from factscope.lm.model import LM
from factscope.lm.replay import PackedView, Replay
from factscope.progress import Progress, no_progress

SLOTS = 48
"""About how many slots a packed row has: with its past it should fill one tile of 64 keys."""


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """What the cells of a table restore, and what is frozen meanwhile."""

    kind: str
    """`states`, `mlp` or `attn`."""
    windows: Sequence[tuple[int, int]]
    """The layers [start, stop) that the cell of each layer restores."""
    sever: str | None = None
    """The module that is frozen at its corrupted outputs, in all layers."""
    freeze_all: bool = False
    """Whether it is frozen at every token, or only at the restored one."""

    def entry(self, layer: int) -> int:
        """The first block that the cell of a layer runs through."""
        start = self.windows[layer][0]
        return start + 1 if self.kind == "states" else start


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one corrupted row from the restored one to the last."""

    clean: int
    """The row of the clean run."""
    row: int
    """The row of the corrupted run."""
    start: int
    """The restored token."""
    stop: int
    answer: int

    def __len__(self) -> int:
        return self.stop - self.start


@torch.no_grad()
def restore(
    lm: LM,
    run: ActivationCache,
    segments: Sequence[Segment],
    restoration: Restoration,
    sizes: BatchSizes,
    progress: Progress = no_progress,
) -> Float[Tensor, "segment layer"]:
    """The answer's probability with each segment's first token restored at each layer."""
    table = torch.empty(len(segments), lm.n_layers)
    index_of = {id(segment): i for i, segment in enumerate(segments)}
    for group, packable in _groups(lm, segments):
        rows = pack_segments(group, packable=packable)
        size = sizes.rows(max(sum(map(len, row)) for row in rows))
        for i in range(0, len(rows), size):
            packed = lay_out_segments(rows[i : i + size], run.inputs.device)
            cells = [index_of[id(segment)] for segment in packed.segments]
            weight = len(cells) / len(segments)
            compute = partial(
                propagate, lm, run, packed, restoration, sizes, lambda f, w=weight: progress(f * w)
            )
            table[cells] = accelerated(lm, compute).T.cpu()
    return table


def _groups(lm: LM, segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], bool]]:
    """Segments that can share a batch: all of them, or, without packing, those of one token."""
    if lm.family.supports_packing:
        yield list(segments), True
        return
    for start in sorted({s.start for s in segments}):
        yield [s for s in segments if s.start == start], False


def propagate(
    lm: LM,
    run: ActivationCache,
    packed: "PackedSegments",
    restoration: Restoration,
    sizes: BatchSizes,
    progress: Progress = no_progress,
) -> Float[Tensor, "layer segment"]:
    """Carry all cells of the packed segments through the layers; the answer's probability."""
    layers, shape = lm.n_layers, packed.view.position.shape
    pending = run.inputs.new_empty(layers, *shape, run.inputs.shape[-1])
    replay, at_once = Replay(lm, run, packed.view), sizes.layers(shape.numel())
    work = sum(layers - restoration.entry(layer) for layer in range(layers))
    started = 0
    for layer in range(layers + 1):
        while started < layers and restoration.entry(started) <= layer:
            pending[started] = _first_states(run, packed, restoration, started)
            started += 1
        if layer == layers:
            break
        for first in range(0, started, at_once):
            batch = pending[first : min(started, first + at_once)]
            hidden = batch.flatten(0, 1)
            with _intervened(lm, run, packed, restoration, layer, first, len(batch)):
                output = lm.blocks[layer](hidden, **replay.arguments(layer, hidden))
            output = output[0] if isinstance(output, tuple) else output
            batch.copy_(output.view(batch.shape))
        progress(started / max(1, work))
    return _answer_probabilities(lm, packed, pending, sizes)


def _first_states(
    run: ActivationCache, packed: "PackedSegments", restoration: Restoration, layer: int
) -> Float[Tensor, "packed slot width"]:
    """The corrupted states with which a layer's cells begin, with the clean state restored."""
    entry = restoration.entry(layer)
    view = packed.view
    before = run.inputs if entry == 0 else run.states[entry - 1]
    states = _take(before, view.row[:, None], view.position).to(run.inputs.device)
    if restoration.kind == "states":
        clean = _take(run.states[layer], packed.clean, packed.token)
        states[packed.packed_row, packed.first] = clean.to(states.device)
    return states


def _take(x: Tensor, *index: Tensor) -> Tensor:
    """x[index], on x's device: a large model's layers are on several devices."""
    return x[tuple(i.to(x.device) for i in index)]


@contextmanager
def _intervened(
    lm: LM,
    run: ActivationCache,
    packed: "PackedSegments",
    restoration: Restoration,
    layer: int,
    first: int,
    count: int,
) -> Iterator[None]:
    """Inside, a block call on `count` cells from `first` on restores and freezes module outputs."""
    hooks: list[tuple[torch.nn.Module, Callable[[Tensor], None]]] = []
    shape = (count, *packed.view.position.shape, -1)
    if restoration.sever is not None:
        module = restoration.sever
        freeze = _freeze(run.contributions[module][layer], packed, restoration.freeze_all)
        hooks.append((lm.contribution(module, layer), lambda out: freeze(out.view(shape))))
    active = [
        i - first
        for i in range(first, first + count)
        if restoration.windows[i][0] <= layer < restoration.windows[i][1]
    ]
    if restoration.kind != "states" and active:
        clean = _take(run.contributions[restoration.kind][layer], packed.clean, packed.token)
        row, slot = packed.packed_row.to(clean.device), packed.first.to(clean.device)
        # Windows of consecutive cells differ by one layer, so the active cells are a range.
        cells = slice(active[0], active[-1] + 1)

        def put_clean(out: Tensor) -> None:
            out.view(shape)[cells, row, slot] = clean

        hooks.append((lm.contribution(restoration.kind, layer), put_clean))
    with hook_outputs(*hooks):
        yield


def _freeze(
    corrupted: Tensor, packed: "PackedSegments", all_tokens: bool
) -> Callable[[Tensor], None]:
    """A function that overwrites a module's output with its corrupted values."""
    view = packed.view
    if all_tokens:
        values = _take(corrupted, view.row[:, None], view.position)
        return lambda out: out.__setitem__(slice(None), values)
    values = _take(corrupted, packed.row, packed.token)
    row, slot = packed.packed_row.to(values.device), packed.first.to(values.device)
    return lambda out: out.__setitem__((slice(None), row, slot), values)


def _answer_probabilities(
    lm: LM, packed: "PackedSegments", pending: Tensor, sizes: BatchSizes
) -> Float[Tensor, "layer segment"]:
    """The answer's probability after each cell's last token."""
    last = pending[:, packed.packed_row, packed.last]
    answer = packed.answer.expand(last.shape[:2]).flatten()
    chunks = zip(last.flatten(0, 1).split(sizes.logits), answer.split(sizes.logits), strict=True)
    return torch.cat([token_probability(lm, x, y) for x, y in chunks]).view(last.shape[:2])


# ---- packing


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSegments:
    """Segments packed into rows: the view for the blocks, and where each segment is."""

    view: PackedView
    segments: list[Segment]
    """In the order of the tensors below."""
    packed_row: Int[Tensor, " segment"]
    first: Int[Tensor, " segment"]
    """The slot of the restored token."""
    last: Int[Tensor, " segment"]
    """The slot of the prompt's last token."""
    token: Int[Tensor, " segment"]
    """The restored token's position in the prompt."""
    clean: Int[Tensor, " segment"]
    row: Int[Tensor, " segment"]
    answer: Int[Tensor, " segment"]


def pack_segments(segments: Sequence[Segment], *, packable: bool = True) -> list[list[Segment]]:
    """Distribute the segments of each corrupted row to packed rows, first fit, longest first.

    If not `packable`, each segment gets its own row.
    """
    by_row: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=len, reverse=True):
        by_row.setdefault(segment.row, []).append(segment)
    if not packable:
        return [[segment] for row in by_row.values() for segment in row]
    width = max(map(_even_width, by_row.values()))
    return [packed for row in by_row.values() for packed in _first_fit(row, width)]


def _even_width(row: list[Segment]) -> int:
    """Slots per packed row if a row's segments are spread evenly."""
    total = sum(map(len, row))
    return max(len(row[0]), -(-total // -(-total // SLOTS)))


def _first_fit(row: list[Segment], width: int) -> list[list[Segment]]:
    packed: list[list[Segment]] = []
    for segment in row:
        for segments in packed:
            if sum(map(len, segments)) + len(segment) <= width:
                segments.append(segment)
                break
        else:
            packed.append([segment])
    return packed


def lay_out_segments(rows: list[list[Segment]], device: torch.device) -> PackedSegments:
    """Build the tensors that locate every segment in the packed rows."""
    width = max(sum(map(len, row)) for row in rows)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    start = torch.full((len(rows), width), -1)
    placed: list[tuple[Segment, int, int]] = []
    for i, row in enumerate(rows):
        slot = 0
        for segment in row:
            stop = slot + len(segment)
            position[i, slot:stop] = torch.arange(segment.start, segment.stop)
            start[i, slot:stop] = segment.start
            placed.append((segment, i, slot))
            slot = stop

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return PackedSegments(
        view=PackedView(
            row=tensor([row[0].row for row in rows]),
            position=position.to(device),
            start=start.to(device),
            past=int(start.max()),
        ),
        segments=[segment for segment, _, _ in placed],
        packed_row=tensor([i for _, i, _ in placed]),
        first=tensor([slot for _, _, slot in placed]),
        last=tensor([slot + len(segment) - 1 for segment, _, slot in placed]),
        token=tensor([segment.start for segment, _, _ in placed]),
        clean=tensor([segment.clean for segment, _, _ in placed]),
        row=tensor([segment.row for segment, _, _ in placed]),
        answer=tensor([segment.answer for segment, _, _ in placed]),
    )
