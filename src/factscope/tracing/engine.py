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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.lm.accel import accelerated
from factscope.lm.forward import ActivationCache, answer_probability
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

    kind: str  # states, mlp or attn
    windows: Sequence[tuple[int, int]]  # the layers [start, stop) that each layer's cell restores
    sever: str | None = None  # the module that is frozen at its corrupted outputs, in all layers
    freeze_all: bool = False  # whether it is frozen at every token, or only at the restored one

    def entry(self, layer: int) -> int:
        """The first block that the cell of a layer runs through."""
        start = self.windows[layer][0]
        return start + 1 if self.kind == "states" else start


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one corrupted row from the restored one to the last.

    If the answer has several tokens, all but its last follow the prompt.
    """

    clean: int  # the row of the clean run
    row: int  # the row of the corrupted run
    start: int  # the restored token
    stop: int
    answer: tuple[int, ...]

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
    packable = lm.family.supports_packing
    groups = [segments]
    if not packable:  # only segments that start at the same token can share a batch
        starts = sorted({segment.start for segment in segments})
        groups = [[s for s in segments if s.start == start] for start in starts]
    for group in groups:
        rows = pack_segments(group, packable=packable)
        size = max(1, sizes.pending // max(sum(map(len, row)) for row in rows))
        for i in range(0, len(rows), size):
            packed = lay_out_segments(rows[i : i + size], run.inputs.device)
            cells = [index_of[id(segment)] for segment in packed.segments]
            weight = len(cells) / len(segments)
            compute = partial(
                propagate, lm, run, packed, restoration, sizes, lambda f, w=weight: progress(f * w)
            )
            table[cells] = accelerated(lm, compute).T.cpu()
    return table


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
    replay, at_once = Replay(lm, run, packed.view), max(1, sizes.call // shape.numel())
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
            cells = range(first, first + len(batch))
            hooks = _interventions(lm, run, packed, restoration, layer, cells)
            with hook_outputs(*hooks):
                output = lm.blocks[layer](hidden, **replay.arguments(layer, hidden))
            output = output[0] if isinstance(output, tuple) else output
            batch.copy_(output.view(batch.shape))
        progress(started / max(1, work))
    # The states that predict the answer's tokens: those at the last positions of the segment.
    n = packed.answer.shape[1]
    predicting = packed.last[:, None] + torch.arange(1 - n, 1, device=packed.last.device)
    last = pending[:, packed.packed_row[:, None], predicting]  # (layer, segment, token, width)
    answer = packed.answer.expand(last.shape[:3]).flatten(0, 1)
    rows = max(1, sizes.logits // n)
    chunks = zip(last.flatten(0, 1).split(rows), answer.split(rows), strict=True)
    return torch.cat([answer_probability(lm, x, y) for x, y in chunks]).view(last.shape[:2])


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


def _interventions(
    lm: LM,
    run: ActivationCache,
    packed: "PackedSegments",
    restoration: Restoration,
    layer: int,
    cells: range,
) -> list[tuple[nn.Module, Callable[[Tensor], None]]]:
    """Hooks that restore and freeze module outputs in a block call on some layers' cells."""
    view = packed.view

    def overwrite(
        module: str, row: Tensor, token: Tensor, *where: slice | Tensor
    ) -> tuple[nn.Module, Callable[[Tensor], None]]:
        """A hook that sets a module's output (cell, packed row, slot) to that of another run."""
        values = _take(run.contributions[module][layer], row, token)
        index = tuple(w if isinstance(w, slice) else w.to(values.device) for w in where)

        def put(out: Tensor) -> None:
            out.view(len(cells), *view.position.shape, -1)[index] = values

        return lm.contribution(module, layer), put

    hooks, restored = [], (packed.packed_row, packed.first)
    if restoration.sever is not None and restoration.freeze_all:
        hooks = [overwrite(restoration.sever, view.row[:, None], view.position, slice(None))]
    elif restoration.sever is not None:
        hooks = [overwrite(restoration.sever, packed.row, packed.token, slice(None), *restored)]
    windows = [restoration.windows[cell] for cell in cells]
    active = [i for i, (start, stop) in enumerate(windows) if start <= layer < stop]
    if restoration.kind != "states" and active:
        # Windows of consecutive cells differ by one layer, so the active cells are a range.
        which = slice(active[0], active[-1] + 1)
        hooks.append(overwrite(restoration.kind, packed.clean, packed.token, which, *restored))
    return hooks


# ---- packing


@dataclass(frozen=True, eq=False)
class PackedSegments:
    """Segments packed into rows: the view for the blocks, and where each segment is."""

    view: PackedView
    segments: list[Segment]  # in the order of the tensors below
    answer: Int[Tensor, "segment token"]  # all answers have the same length
    packed_row: Int[Tensor, " segment"]
    first: Int[Tensor, " segment"]  # the slot of the restored token
    last: Int[Tensor, " segment"]  # the slot of the last token
    token: Int[Tensor, " segment"]  # the restored token's position in the prompt
    clean: Int[Tensor, " segment"]
    row: Int[Tensor, " segment"]


def pack_segments(segments: Sequence[Segment], *, packable: bool = True) -> list[list[Segment]]:
    """Distribute the segments of each corrupted row to packed rows, first fit, longest first.

    If not `packable`, each segment gets its own row.
    """
    by_row: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=len, reverse=True):
        by_row.setdefault(segment.row, []).append(segment)
    # As wide as a row needs if its segments are spread evenly over rows of about SLOTS.
    totals = [(sum(map(len, row)), len(row[0])) for row in by_row.values()]
    width = max(max(longest, -(-n // -(-n // SLOTS))) for n, longest in totals) if packable else 0
    packed: list[list[Segment]] = []
    for row in by_row.values():
        first = len(packed)
        for segment in row:
            for together in packed[first:]:
                if sum(map(len, together)) + len(segment) <= width:
                    together.append(segment)
                    break
            else:
                packed.append([segment])
    return packed


def lay_out_segments(rows: list[list[Segment]], device: torch.device) -> PackedSegments:
    """Build the tensors that locate every segment in the packed rows."""
    width = max(sum(map(len, row)) for row in rows)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    start = torch.full((len(rows), width), -1)
    segments: list[Segment] = []
    columns: list[tuple[int, ...]] = []
    """Each segment's fields of `PackedSegments`, from `packed_row` to `row`."""
    for i, row in enumerate(rows):
        slot = 0
        for s in row:
            stop = slot + len(s)
            position[i, slot:stop] = torch.arange(s.start, s.stop)
            start[i, slot:stop] = s.start
            segments.append(s)
            columns.append((i, slot, stop - 1, s.start, s.clean, s.row))
            slot = stop
    view = PackedView(
        row=torch.tensor([row[0].row for row in rows], device=device),
        position=position.to(device),
        start=start.to(device),
        past=int(start.max()),
    )
    answer = torch.tensor([s.answer for s in segments], device=device)
    located = torch.tensor(columns, device=device).T.contiguous()
    return PackedSegments(view, segments, answer, *located)
