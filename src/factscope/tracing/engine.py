"""The engine: every cell of a trace in one walk over the layers.

Restoring the state at (token t, layer l) changes nothing before layer l and nothing left of t.
So the clean and the corrupted run are made once and kept, and then one walk upwards carries all
*pending* restorations along: at each layer those that began below it advance by one block, over
their tokens t … T-1 only, looking back to the corrupted run's keys and values left of t; then the
layer's own restorations join. The weights of a layer are read once for all cells.

The stretches t … T-1 are packed into strands (see `tracing.strands`); what is pending is a block of
states: cell's layer × strand × slot × width.

Stretches of prompts packed into rows, so that blocks run on full batches.

A restoration at token t sends the tokens t … T-1 through the layers: a *stretch*. The stretches of
one corrupted row share *strands*, rows of about `SLOTS` slots, each blind to the others: hardly a
slot is empty, and attention works on full tiles.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.accel.linear import quick
from factscope.lm.forward import ActivationCache
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.replay import PackedView, Replay

__all__ = [
    "BatchSizes",
    "PackedSegments",
    "Restoration",
    "Segment",
    "lay_out_segments",
    "pack_segments",
    "propagate",
    "restore",
    "token_probability",
]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one prompt from a restored one to the last, in one row of the run."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSegments:
    """Stretches packed into rows: the view for the blocks, and where each stretch lies."""

    view: PackedView
    stretches: list[Segment]
    """In the order of the tensors below."""
    strand: Int[Tensor, " stretch"]
    first: Int[Tensor, " stretch"]
    """The slot of the restored token."""
    last: Int[Tensor, " stretch"]
    """The slot of the prompt's last token."""
    token: Int[Tensor, " stretch"]
    clean: Int[Tensor, " stretch"]
    row: Int[Tensor, " stretch"]
    answer: Int[Tensor, " stretch"]


SLOTS = 48
"""About how many slots a strand has: with its past it should fill one tile of 64 keys."""


def pack_segments(stretches: Sequence[Segment], alone: bool) -> list[list[Segment]]:
    """Put the stretches of each row into strands, longest first, each where it fits first.

    With `alone`, no two share a strand.
    """
    rows: dict[int, list[Segment]] = {}
    for stretch in sorted(stretches, key=len, reverse=True):
        rows.setdefault(stretch.row, []).append(stretch)
    if alone:
        return [[stretch] for row in rows.values() for stretch in row]
    width = max(map(_width, rows.values()))
    return [strand for row in rows.values() for strand in _fill(row, width)]


def _width(row: list[Segment]) -> int:
    """Slots for strands that share a row's stretches evenly."""
    total = sum(map(len, row))
    return max(len(row[0]), -(-total // -(-total // SLOTS)))


def _fill(row: list[Segment], width: int) -> list[list[Segment]]:
    strands: list[list[Segment]] = []
    for stretch in row:
        room = (held for held in strands if sum(map(len, held)) + len(stretch) <= width)
        held = next(room, None)
        if held is None:
            strands.append([stretch])
        else:
            held.append(stretch)
    return strands


def lay_out_segments(strands: list[list[Segment]], device: torch.device) -> PackedSegments:
    """The tensors that tell the blocks and the hooks where every stretch lies."""
    width = max(sum(map(len, held)) for held in strands)
    position = torch.zeros(len(strands), width, dtype=torch.long)
    start = torch.full((len(strands), width), -1)
    places: list[tuple[Segment, int, int]] = []
    for i, held in enumerate(strands):
        slot = 0
        for stretch in held:
            stop = slot + len(stretch)
            position[i, slot:stop] = torch.arange(stretch.start, stretch.stop)
            start[i, slot:stop] = stretch.start
            places.append((stretch, i, slot))
            slot = stop

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=device)

    return PackedSegments(
        view=PackedView(
            row=tensor([held[0].row for held in strands]),
            position=position.to(device),
            start=start.to(device),
            past=int(start.max()),
        ),
        stretches=[s for s, _, _ in places],
        strand=tensor([i for _, i, _ in places]),
        first=tensor([slot for _, _, slot in places]),
        last=tensor([slot + len(s) - 1 for s, _, slot in places]),
        token=tensor([s.start for s, _, _ in places]),
        clean=tensor([s.clean for s, _, _ in places]),
        row=tensor([s.row for s, _, _ in places]),
        answer=tensor([s.answer for s, _, _ in places]),
    )


@dataclass(frozen=True, kw_only=True)
class Restoration:
    """What every cell of a table puts back, and what is frozen meanwhile."""

    kind: str
    """`states`, `mlp` or `attn`."""
    windows: Sequence[tuple[int, int]]
    """The layers [start, stop) that the cell of each layer restores."""
    sever: str | None = None
    """The module that is frozen at its corrupted outputs, in all layers."""
    sever_every: bool = False
    """Whether it is frozen at every token, or only at the restored one."""

    def entry(self, layer: int) -> int:
        """The first block that the cell of a layer has to run through."""
        start = self.windows[layer][0]
        return start + 1 if self.kind == "states" else start


Done = Callable[[float], None]
"""Told, as work goes on, what share of it was just done."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """How much is done at once: chosen from the memory bound, see `tracing.memory`."""

    pending: int
    """Slots whose cells are pending together, counted once for all layers."""
    call: int
    """Slots that go through a block in one call."""
    logits: int
    """States decoded to logits at once."""

    def strands(self, width: int) -> int:
        """How many strands of a width to carry along."""
        return max(1, min(self.pending, self.call) // width)

    def copies(self, view: PackedView) -> int:
        """How many layers' cells of all strands to put through a block in one call."""
        return max(1, self.call // view.position.numel())


@torch.no_grad()
def restore(
    lm: LM,
    run: ActivationCache,
    stretches: Sequence[Segment],
    restoration: Restoration,
    job: BatchSizes,
    progress: Done = lambda share: None,
) -> Float[Tensor, "stretch layer"]:
    """The answer's probability with each stretch's first token restored at each layer."""
    table = torch.empty(len(stretches), lm.n_layers)
    place = {id(stretch): i for i, stretch in enumerate(stretches)}
    for group, alone in _groups(lm, stretches):
        packed = pack_segments(group, alone)
        size = job.strands(max(sum(map(len, held)) for held in packed))
        for i in range(0, len(packed), size):
            strands = lay_out_segments(packed[i : i + size], run.inputs.device)
            rows = [place[id(s)] for s in strands.stretches]
            share = len(rows) / len(stretches)
            table[rows] = _finite_walk(
                lm, run, strands, restoration, job, lambda part, share=share: progress(part * share)
            ).T.cpu()
    return table


def _groups(lm: LM, stretches: Sequence[Segment]) -> Iterator[tuple[list[Segment], bool]]:
    """Stretches that may go together: all of them, or, without packing, those of one token."""
    if lm.family.packs:
        yield list(stretches), False
        return
    for start in sorted({s.start for s in stretches}):
        yield [s for s in stretches if s.start == start], True


def _finite_walk(
    lm: LM,
    run: ActivationCache,
    strands: PackedSegments,
    restoration: Restoration,
    job: BatchSizes,
    progress: Done,
) -> Float[Tensor, "layer stretch"]:
    """A walk with quick products, or with the model's own where those left their range."""
    quickly = propagate(lm, run, strands, restoration, job, progress)
    if lm.dtype != torch.float32 or quickly.isfinite().all():
        return quickly
    return propagate(lm, run, strands, restoration, job, split_products=False)


def propagate(
    lm: LM,
    run: ActivationCache,
    strands: PackedSegments,
    restoration: Restoration,
    job: BatchSizes,
    progress: Done = lambda share: None,
    *,
    split_products: bool = True,
) -> Float[Tensor, "layer stretch"]:
    """Carry all cells of the strands through the layers and read the answer's probability."""
    view, layers = strands.view, lm.n_layers
    pending = run.inputs.new_empty(layers, *view.position.shape, run.inputs.shape[-1])
    replay, copies = Replay(lm, run, view), job.copies(view)
    work = sum(layers - restoration.entry(layer) for layer in range(layers))
    joined = 0
    for layer in range(layers + 1):
        while joined < layers and restoration.entry(joined) <= layer:
            pending[joined] = _joining(run, strands, restoration, joined)
            joined += 1
        if layer == layers:
            break
        with quick(lm.blocks[layer], split_products=split_products):
            for begin in range(0, joined, copies):
                some = pending[begin : min(joined, begin + copies)]
                with _intervened(lm, run, strands, restoration, layer, begin, len(some)):
                    some.copy_(replay(layer, some.flatten(0, 1)).view(some.shape))
        progress(joined / max(1, work))
    return _answers(lm, strands, pending, job)


def _joining(
    run: ActivationCache, strands: PackedSegments, restoration: Restoration, layer: int
) -> Float[Tensor, "strand slot width"]:
    """The corrupted states with which a layer's cells begin; a restored state is put in now."""
    entry = restoration.entry(layer)
    view = strands.view
    before = run.inputs if entry == 0 else run.states[entry - 1]
    states = _at(before, view.row[:, None], view.position).to(run.inputs.device)
    if restoration.kind == "states":
        clean = _at(run.states[layer], strands.clean, strands.token)
        states[strands.strand, strands.first] = clean.to(states.device)
    return states


def _at(x: Tensor, *where: Tensor) -> Tensor:
    """Entries of a tensor, wherever it lies: a large model's layers are on several devices."""
    return x[tuple(index.to(x.device) for index in where)]


@contextmanager
def _intervened(
    lm: LM,
    run: ActivationCache,
    strands: PackedSegments,
    restoration: Restoration,
    layer: int,
    begin: int,
    n: int,
) -> Iterator[None]:
    """Inside, a block call on cells begin … begin+n restores and freezes what it must."""
    hooks: list[tuple[torch.nn.Module, Callable[[Tensor], None]]] = []
    shape = (n, *strands.view.position.shape, -1)
    if restoration.sever is not None:
        module = restoration.sever
        frozen = _frozen(run.contributions[module][layer], strands, restoration.sever_every)
        hooks.append((lm.contribution(module, layer), lambda out: frozen(out.view(shape))))
    active = [
        i - begin
        for i in range(begin, begin + n)
        if restoration.windows[i][0] <= layer < restoration.windows[i][1]
    ]
    if restoration.kind != "states" and active:
        clean = _at(run.contributions[restoration.kind][layer], strands.clean, strands.token)
        strand, first = strands.strand.to(clean.device), strands.first.to(clean.device)
        some = slice(active[0], active[-1] + 1)  # windows move up one by one: a run of cells

        def put(out: Tensor) -> None:
            out.view(shape)[some, strand, first] = clean

        hooks.append((lm.contribution(restoration.kind, layer), put))
    with hook_outputs(*hooks):
        yield


def _frozen(corrupted: Tensor, strands: PackedSegments, every: bool) -> Callable[[Tensor], None]:
    """Write the corrupted contributions over a module's output."""
    view = strands.view
    if every:
        values = _at(corrupted, view.row[:, None], view.position)
        return lambda out: out.__setitem__(slice(None), values)
    values = _at(corrupted, strands.row, strands.token)
    strand, first = strands.strand.to(values.device), strands.first.to(values.device)
    return lambda out: out.__setitem__((slice(None), strand, first), values)


def _answers(
    lm: LM, strands: PackedSegments, pending: Tensor, job: BatchSizes
) -> Float[Tensor, "layer stretch"]:
    """The answer's probability after each cell's last state."""
    last = pending[:, strands.strand, strands.last]
    answer = strands.answer.expand(last.shape[:2]).flatten()
    pieces = zip(last.flatten(0, 1).split(job.logits), answer.split(job.logits), strict=True)
    return torch.cat([token_probability(lm, x, y) for x, y in pieces]).view(last.shape[:2])


def token_probability(
    lm: LM, states: Float[Tensor, "row width"], answer: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """P[answer] of each last state, in single precision."""
    logits = lm.decode(states).float()
    answer = answer.to(logits.device)
    return (logits.gather(1, answer[:, None])[:, 0] - logits.logsumexp(1)).exp()
