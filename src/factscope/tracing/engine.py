"""The tracing engine: every cell of a trace in one pass over the layers.

A cell puts activations of a *source* run into a *base* run at one token: the clean run's into the
corrupted one, or the other way round. That changes nothing below the cell's layer and nothing left
of its token t. So both runs are computed once, and one pass upwards carries all *pending* cells: at
each layer those that began below it advance by one block, over their tokens t … T-1 only, attending
to the base run's keys and values left of t; then the cells that begin at that layer join. The
weights of a layer are read once for all cells of all kinds.

The tokens t … T-1 are a *segment*. The segments of one base row are packed into rows of about
`SLOTS` slots, so that batches are dense and attention works on full tiles. The pending states are
one tensor: (cell, packed row, slot, width).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.lm.accel import accelerated
from factscope.lm.forward import ActivationCache
from factscope.lm.hooks import hook_outputs
from factscope.lm.memory import BatchSizes
from factscope.lm.model import LM
from factscope.lm.replay import PackedView, Replay
from factscope.progress import Progress, no_progress
from factscope.tracing.metrics import Metric

SLOTS = 48
"""About how many slots a packed row has: with its past it should fill one tile of 64 keys."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is set to the source run's value at a token, and what is frozen meanwhile."""

    kind: str  # states, mlp, attn or heads
    layers: tuple[int, int]  # the layers [start, stop) where it is set
    head: int = 0  # which head, for the kind heads
    sever: str | None = None  # the module that is frozen at the base run's outputs, in all layers
    freeze_all: bool = False  # whether it is frozen at every token, or only at the cell's own
    from_bottom: bool = False
    """Whether the cell runs through all blocks: outputs frozen at other values than the base run's
    change the layers below it too."""

    @property
    def entry(self) -> int:
        """The first block that the cell runs through."""
        if self.from_bottom:
            return 0
        return self.layers[0] + 1 if self.kind == "states" else self.layers[0]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one base row from the cell's own to the last.

    If the answer has several tokens, all but its last follow the prompt.
    """

    fact: int
    source: int  # the row whose activations are put in
    row: int  # the row of the base run
    start: int  # the cell's token
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@torch.no_grad()
def restore(
    lm: LM,
    run: ActivationCache,
    segments: Sequence[Segment],
    cells: Sequence[Cell],
    metric: Metric,
    sizes: BatchSizes,
    progress: Progress = no_progress,
    *,
    frozen: ActivationCache | None = None,
) -> Float[Tensor, "segment cell"]:
    """The metric with every cell restored at each segment's first token.

    Severed modules have the outputs of `frozen`, by default those of the run itself.
    """
    table = torch.empty(len(segments), len(cells))
    by_entry = sorted(range(len(cells)), key=lambda i: cells[i].entry)
    index_of = {id(segment): i for i, segment in enumerate(segments)}
    packable = lm.family.supports_packing
    groups = [segments]
    if not packable:  # only segments that start at the same token can share a batch
        starts = sorted({segment.start for segment in segments})
        groups = [[s for s in segments if s.start == start] for start in starts]
    for group in groups:
        rows = pack_segments(group, packable=packable)
        slots = max(sum(map(len, row)) for row in rows)
        at_once = max(1, min(sizes.call, sizes.pending // len(cells)) // slots)
        cells_at_once = max(1, sizes.pending // slots)
        for i in range(0, len(rows), at_once):
            packed = lay_out_segments(rows[i : i + at_once], run.inputs.device)
            where = torch.tensor([index_of[id(segment)] for segment in packed.segments])
            for j in range(0, len(cells), cells_at_once):
                part = by_entry[j : j + cells_at_once]
                weight = len(where) * len(part) / table.numel()
                compute = partial(
                    propagate, lm, run, frozen or run, packed, [cells[k] for k in part], metric,
                    sizes, lambda f, w=weight: progress(f * w),
                )  # fmt: skip
                probe = partial(_last_block, lm, run, packed.view)
                values = accelerated(lm, compute, probe=probe)
                table[where[:, None], torch.tensor(part)] = values.T.cpu()
    return table


def propagate(
    lm: LM,
    run: ActivationCache,
    frozen: ActivationCache,
    packed: "PackedSegments",
    cells: Sequence[Cell],
    metric: Metric,
    sizes: BatchSizes,
    progress: Progress = no_progress,
) -> Float[Tensor, "cell segment"]:
    """Carry cells, sorted by entry, of all packed segments through the layers; the metric."""
    layers, shape = lm.n_layers, packed.view.position.shape
    pending = run.inputs.new_empty(len(cells), *shape, run.inputs.shape[-1])
    replay, at_once = Replay(lm, run, packed.view), max(1, sizes.call // shape.numel())
    interventions = _Interventions(lm, run, frozen, packed, cells, at_once)
    entries = [cell.entry for cell in cells]
    work = sum(layers - entry for entry in entries)
    started = 0
    for layer in range(entries[0], layers + 1):
        joined = bisect_right(entries, layer)
        if joined > started:
            _first_states(run, packed, cells[started:joined], pending[started:joined])
            started = joined
        if layer == layers:
            break
        for first in range(0, started, at_once):
            batch = pending[first : min(started, first + at_once)]
            hidden = batch.flatten(0, 1)
            with hook_outputs(*interventions.hooks(layer, first)):
                output = lm.blocks[layer](hidden, **replay.arguments(layer, hidden))
            output = output[0] if isinstance(output, tuple) else output
            batch.copy_(output.view(batch.shape))
        progress(started / max(1, work))
    # The states that predict the answer's tokens: those at the last positions of the segment.
    n = metric.answer.shape[1]
    predicting = packed.last[:, None] + torch.arange(1 - n, 1, device=packed.last.device)
    last = pending[:, packed.packed_row[:, None], predicting]  # (cell, segment, token, width)
    fact = packed.fact.repeat(len(cells))
    return metric.in_parts(lm, last.flatten(0, 1), fact, sizes.logits).view(last.shape[:2])


def _last_block(lm: LM, run: ActivationCache, view: PackedView) -> Float[Tensor, "row slot width"]:
    """The last block's output for two copies of the base run's states."""
    before = run.states[-2] if lm.n_layers > 1 else run.inputs
    hidden = _take(before, view.row[:, None], view.position)
    return Replay(lm, run, view)(lm.n_layers - 1, hidden.repeat(2, 1, 1))


def _first_states(
    run: ActivationCache,
    packed: "PackedSegments",
    cells: Sequence[Cell],
    out: Float[Tensor, "cell packed slot width"],
) -> None:
    """The base run's states with which cells of one entry begin, with a source state put in."""
    entry, view = cells[0].entry, packed.view
    before = run.inputs if entry == 0 else run.states[entry - 1]
    out.copy_(_take(before, view.row[:, None], view.position))
    for cell, states in zip(cells, out, strict=True):
        if cell.kind == "states" and not cell.from_bottom:
            source = _take(run.states[entry - 1], packed.source, packed.token)
            states[packed.packed_row, packed.first] = source.to(states.device)


def _take(x: Tensor, *index: Tensor) -> Tensor:
    """x[index], on x's device: a large model's layers are on several devices."""
    return x[tuple(i.to(x.device) for i in index)]


class _Interventions:
    """Hooks that set and freeze module outputs in block calls.

    `active` lists, for each call and module, the cells that intervene, as indices in the call. All
    are moved to the device at once: many small transfers would stall it.
    """

    def __init__(
        self,
        lm: LM,
        run: ActivationCache,
        frozen: ActivationCache,
        packed: "PackedSegments",
        cells: Sequence[Cell],
        at_once: int,
    ) -> None:
        self.lm, self.run, self.frozen, self.packed = lm, run, frozen, packed
        calls: dict[tuple[int, int], dict[tuple[str, str], list[int]]]
        calls = defaultdict(lambda: defaultdict(list))
        for i, cell in enumerate(cells):
            first, index = i - i % at_once, i % at_once
            if cell.sever is not None:
                how = "freeze all" if cell.freeze_all else "freeze"
                for layer in range(cell.entry, lm.n_layers):
                    calls[layer, first][how, cell.sever].append(index)
            if cell.kind != "states" or cell.from_bottom:
                for layer in range(*cell.layers):
                    calls[layer, first]["set", cell.kind].append(index)
        lists = [(call, how, x) for call, hows in calls.items() for how, x in hows.items()]
        flat = torch.tensor([i for *_, x in lists for i in x], dtype=torch.long)
        indices = flat.to(packed.first.device).split([len(x) for *_, x in lists])
        self.active: dict[tuple[int, int], dict[tuple[str, str], Int[Tensor, " cell"]]]
        self.active = defaultdict(dict)
        self.first_head: dict[tuple[int, int], int] = {}
        for ((layer, first), how, x), index in zip(lists, indices, strict=True):
            self.active[layer, first][how] = index
            if how == ("set", "heads"):
                self.first_head[layer, first] = cells[first + x[0]].head

    def hooks(self, layer: int, first: int) -> list[tuple[nn.Module, Callable[[Tensor], None]]]:
        """The hooks of a block call on the cells from `first` on."""
        hooks = []
        for (how, kind), index in self.active.get((layer, first), {}).items():
            if kind == "heads":
                hooks.append(self._add_heads(layer, first, index))
            else:
                hooks.append(self._overwrite(layer, how, kind, index))
        return hooks

    def _overwrite(
        self, layer: int, how: str, module: str, index: Int[Tensor, " cell"]
    ) -> tuple[nn.Module, Callable[[Tensor], None]]:
        """Set the output (cell, packed row, slot) of a module or block to that of another run."""
        packed, view = self.packed, self.packed.view
        run = self.run if how == "set" else self.frozen
        outputs = run.states[layer] if module == "states" else run.contributions[module][layer]
        if how == "freeze all":
            values = _take(outputs, view.row[:, None], view.position)
            where = [index]
        else:
            row = packed.source if how == "set" else packed.row
            values = _take(outputs, row, packed.token)
            where = [index[:, None], packed.packed_row, packed.first]
        at = tuple(i.to(values.device) for i in where)

        def put(out: Tensor) -> None:
            out.view(-1, *view.position.shape, out.shape[-1])[at] = values

        block = module == "states"
        return self.lm.blocks[layer] if block else self.lm.contribution(module, layer), put

    def _add_heads(
        self, layer: int, first: int, index: Int[Tensor, " cell"]
    ) -> tuple[nn.Module, Callable[[Tensor], None]]:
        """Add what changes in the attention's output if one head has the source run's output."""
        packed, shape = self.packed, self.packed.view.position.shape
        z = self.run.contributions["heads"][layer].unflatten(-1, (self.lm.n_heads, -1))
        difference = _take(z, packed.source, packed.token) - _take(z, packed.row, packed.token)
        # The heads of a layer begin together, so those of a call are a range.
        chosen = slice(self.first_head[layer, first], self.first_head[layer, first] + len(index))
        weight = self.lm.head_weight(layer)[chosen]
        change = torch.einsum("shd,hdw->hsw", difference[:, chosen], weight)
        where = (index[:, None], packed.packed_row, packed.first)
        at = tuple(i.to(change.device) for i in where)

        def add(out: Tensor) -> None:
            outputs = out.view(-1, *shape, out.shape[-1])
            outputs[at] = outputs[at] + change

        return self.lm.contribution("attn", layer), add


# ---- packing


@dataclass(frozen=True, eq=False)
class PackedSegments:
    """Segments packed into rows: the view for the blocks, and where each segment is."""

    view: PackedView
    segments: list[Segment]  # in the order of the tensors below
    packed_row: Int[Tensor, " segment"]
    first: Int[Tensor, " segment"]  # the slot of the cell's token
    last: Int[Tensor, " segment"]  # the slot of the last token
    token: Int[Tensor, " segment"]  # the cell's token's position in the prompt
    fact: Int[Tensor, " segment"]
    source: Int[Tensor, " segment"]
    row: Int[Tensor, " segment"]


def pack_segments(segments: Sequence[Segment], *, packable: bool = True) -> list[list[Segment]]:
    """Distribute the segments of each base and source row to packed rows, first fit, longest first.

    If not `packable`, each segment gets its own row.
    """
    by_row: dict[tuple[int, int], list[Segment]] = {}
    for segment in sorted(segments, key=len, reverse=True):
        # A packed row tells its segments apart by their first token, so it takes one source.
        by_row.setdefault((segment.row, segment.source), []).append(segment)
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
            columns.append((i, slot, stop - 1, s.start, s.fact, s.source, s.row))
            slot = stop
    view = PackedView(
        row=torch.tensor([row[0].row for row in rows], device=device),
        position=position.to(device),
        start=start.to(device),
        past=int(start.max()),
    )
    located = torch.tensor(columns, device=device).T.contiguous()
    return PackedSegments(view, segments, *located)
