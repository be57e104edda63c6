"""The value search as a problem: what each fact's δ costs.

A vector δ is added where a fact's value is made, in every context of the fact at once. Only what
depends on δ is computed: the layers above it, over the tokens from its own to the last, with the
keys and values left of them taken from one run beforehand. Many facts stand side by side, each
with its own δ.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.requests import Request, Row, Token, essence_row, padded
from factscope.editing.room import Room
from factscope.errors import BadSetting
from factscope.lm.forward import Run, forward
from factscope.lm.hooks import on_output, on_pass
from factscope.lm.played import played
from factscope.lm.quick import MANY, Quickly, quick_blocks
from factscope.lm.replay import Replay, View
from factscope.lm.short_attention import multiplies_halves, short_attention

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Posed", "Problem", "Site", "ValueSearch", "pose"]

log = logging.getLogger(__name__)

Site = Literal["mlp", "state"]
"""Where δ is added: to the MLP's contribution m of a layer (ROME) or to its state h (MEMIT)."""


@dataclass(frozen=True, kw_only=True)
class ValueSearch:
    """How a value is searched."""

    steps: int | None = None
    """How often the loss is looked at; δ is changed after each but the last. None for the model's
    own number, mostly 20."""
    rate: float = 0.5
    """Adam's learning rate."""
    stop: float = 0.05
    """The loss at which a fact is done."""
    clamp: float | None = None
    """The most that ‖δ‖ may be, in units of ‖v₀‖; infinity for no bound. None for the model's own
    number, mostly 4."""
    essence: float = 0.0625
    """The weight of the essence term KL(edited ‖ unedited)."""
    essence_at: Literal["end", "place"] = "end"
    """Where that term reads: after "{subject} is a", or, as in the paper's code, at the token that
    the fact is written at."""
    decay: float = 0.01
    """The weight of the term that keeps δ small."""
    decay_form: Literal["relative", "paper"] = "relative"
    """‖δ‖ / ‖v₀‖, which does not depend on the model's scale; or, as in the paper's code,
    ‖δ‖ / ‖v₀‖², which does."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise BadSetting(f"steps is {self.steps}; a search needs at least one")
        if not self.rate > 0:
            raise BadSetting(f"rate is {self.rate}; it must be above 0")
        if self.clamp is not None and not self.clamp > 0:
            raise BadSetting(f"clamp is {self.clamp}; it must be above 0, or infinite for no bound")

    @property
    def looks(self) -> int:
        """How often the loss is looked at, settled."""
        return 20 if self.steps is None else self.steps

    @property
    def longest(self) -> float:
        """The bound of ‖δ‖ / ‖v₀‖, settled."""
        return 4.0 if self.clamp is None else self.clamp

    def settled(self, *, steps: int = 20, clamp: float = 4.0) -> "ValueSearch":
        """The same with a model's own numbers where none were given."""
        return replace(
            self,
            steps=steps if self.steps is None else self.steps,
            clamp=clamp if self.clamp is None else self.clamp,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Facts posed side by side: the loss of each as a function of its δ."""

    lm: "LM"
    search: ValueSearch
    layer: int
    site: Site
    run: Run
    view: View
    """A strand for each row: its tokens from the fact's own to the last."""
    hidden: Float[Tensor, "strand slot width"]
    """The states that enter the first block that δ changes."""
    fact: Int[Tensor, " strand"]
    spot: Int[Tensor, " strand"]
    """The slot that δ is added to."""
    read_strand: Int[Tensor, " read"]
    read_slot: Int[Tensor, " read"]
    read_fact: Int[Tensor, " read"]
    read_weight: Float[Tensor, " read"]
    label: Int[Tensor, " read"]
    """The token of the new object that should follow each read."""
    essence_strand: Int[Tensor, " fact"]
    essence_slot: Int[Tensor, " fact"]
    essence_before: Float[Tensor, "fact vocabulary"]
    """Log-probabilities of the unedited model."""
    size: Float[Tensor, " fact"]
    """‖v₀‖"""
    apart: bool = False
    """Whether attention takes the past apart from the strands' own keys (`short_attention`)."""

    @cached_property
    def replay(self) -> Replay:
        """The blocks above, on these strands."""
        return Replay(self.lm, self.run, self.view, apart=self.apart)

    @property
    def first_block(self) -> int:
        """The lowest block that its losses run."""
        return self.layer + (self.site == "state")

    @cached_property
    def modules(self) -> list[nn.Module]:
        """All modules that its losses run."""
        heads = [*self.lm.norms, self.lm.model.get_output_embeddings()]
        return [m for part in (*self.lm.blocks[self.first_block :], *heads) for m in part.modules()]

    def prepare(self) -> None:
        """Make everything that does not depend on δ: a recording would make it again each time."""
        _ = self.at_spot
        self.replay.prepare(range(self.layer, self.lm.n_layers), self.hidden)

    @cached_property
    def at_spot(self) -> Float[Tensor, "strand slot 1"]:
        """1 in the slots that δ is added to."""
        slots = torch.arange(self.hidden.shape[1], device=self.spot.device)
        return (slots == self.spot[:, None])[:, :, None].to(self.hidden)

    def losses(self, delta: Float[Tensor, "fact width"]) -> Float[Tensor, " fact"]:
        """What every fact's δ still costs."""
        states = self._states(delta)
        device = states.device
        strand = torch.cat([self.read_strand, self.essence_strand]).to(device)
        slot = torch.cat([self.read_slot, self.essence_slot]).to(device)
        logs = self.lm.decode(states[strand, slot]).float().log_softmax(-1).to(delta.device)
        reads = len(self.label)
        said = logs[:reads].gather(1, self.label[:, None])[:, 0]
        target = torch.zeros_like(self.size).index_add(0, self.read_fact, -said * self.read_weight)
        now = logs[reads:]
        essence = (now.exp() * (now - self.essence_before)).sum(-1)
        # The root's slope at 0 is infinite; a tiny number under it makes it 0 there.
        norm = (delta.square().sum(-1) + 1e-30).sqrt()
        power = 2 if self.search.decay_form == "paper" else 1
        decay = norm / self.size**power
        return target + self.search.essence * essence + self.search.decay * decay

    def _states(self, delta: Float[Tensor, "fact width"]) -> Float[Tensor, "strand slot width"]:
        """The last layer's states with every fact's δ in place."""
        shift = self._shift(delta)
        hidden = self.hidden + shift if self.site == "state" else self.through_first(shift)
        for layer in range(self.layer + 1, self.lm.n_layers):
            hidden = self.replay(layer, hidden)
        return hidden

    def _shift(self, delta: Float[Tensor, "fact width"]) -> Float[Tensor, "strand slot width"]:
        return self.at_spot * delta[self.fact][:, None].to(self.hidden.dtype)

    def through_first(
        self, shift: Float[Tensor, "strand slot width"]
    ) -> Float[Tensor, "strand slot width"]:
        """The block that δ enters, with δ added to its MLP's output."""

        def add(output: Tensor) -> Tensor:
            return output + shift.reshape(output.shape).to(output.device)

        with on_output((self.lm.mlp_out(self.layer), add)):
            return self.replay(self.layer, self.hidden)

    def shortened(self) -> "Problem":
        """The same without the first block, where δ can as well be added to what comes out of it.

        That is so wherever a block adds its MLP's output as it is; some families normalise it.
        """
        after = self.run.states[self.layer].to(self.hidden.device)
        after = after[self.view.row[:, None], self.view.position]
        probe = torch.ones_like(self.hidden[: len(self.size), 0].float())
        shift = self._shift(probe * (self.size / probe.shape[-1] ** 0.5)[:, None])
        gap = (self.through_first(shift) - (after + shift)).abs().max()
        exact = self.hidden.dtype == torch.float32 and not multiplies_halves(torch.float32)
        tolerance = 1e-4 if exact else 2e-2
        if gap > tolerance * shift.abs().max():
            return self
        return replace(self, site="state", hidden=after)

    def only(self, facts: Int[Tensor, " some"]) -> "Problem":
        """The same for some of the facts, in the given order."""
        number = torch.full_like(self.size, -1, dtype=torch.long)
        number[facts] = torch.arange(len(facts), device=facts.device)
        strands = (number[self.fact] >= 0).nonzero()[:, 0]
        strand_number = torch.full_like(self.fact, -1)
        strand_number[strands] = torch.arange(len(strands), device=facts.device)
        reads = (number[self.read_fact] >= 0).nonzero()[:, 0]
        view = View(
            row=torch.arange(len(strands), device=facts.device),
            position=self.view.position[strands],
            start=self.view.start[strands],
            past=self.view.past,
        )
        return Problem(
            lm=self.lm, search=self.search, layer=self.layer, site=self.site,
            run=self.run.only(strands), view=view, hidden=self.hidden[strands],
            fact=number[self.fact[strands]], spot=self.spot[strands],
            read_strand=strand_number[self.read_strand[reads]],
            read_slot=self.read_slot[reads], read_fact=number[self.read_fact[reads]],
            read_weight=self.read_weight[reads], label=self.label[reads],
            essence_strand=strand_number[self.essence_strand[facts]],
            essence_slot=self.essence_slot[facts], essence_before=self.essence_before[facts],
            size=self.size[facts], apart=self.apart,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Posed:
    """A problem, and what the run before it saw at the facts' tokens."""

    problem: Problem
    keys: list[Float[Tensor, "row key"]]
    values: list[Float[Tensor, "row value"]]


@torch.no_grad()
def pose(
    lm: "LM", requests: Sequence[Request], layer: int, site: Site, token: Token,
    search: ValueSearch, quick: Quickly | None = None,
) -> Posed:  # fmt: skip
    """One run over every row of the facts, and the problem that it leaves.

    `quick` makes the run faster while inside (`lm.quick`).
    """
    at_place = search.essence_at == "place"
    room = Room.of(lm, len(requests))
    rows: list[Row] = []
    owner: list[int] = []
    for i, asked in enumerate(requests):
        rows += [*asked.rows, essence_row(lm, asked.fact, token, at_place=at_place)]
        owner += [i] * (len(asked.rows) + 1)
    starts = [row.place if lm.arch.packs else 0 for row in rows]
    view = _view(rows, starts, lm, room)
    longest = max(view.past, *(len(row.ids) for row in rows))
    ids = padded(rows, lm.device, room.for_tokens(longest, lm.context))
    if quick is None and len(requests) >= MANY and lm.device.type == "cuda":
        quick = Quickly(partial(quick_blocks, lm.blocks))
    run, keys, values = _run(lm, ids, layer, quick, single=len(requests) == 1)
    place = torch.tensor([row.place for row in rows])
    number = torch.arange(len(rows))
    keys, values = (x[number, place].float() for x in (keys, values))
    if site == "state":
        values = run.states[layer][number, place].float()
    ends = [i for i in range(len(rows)) if i + 1 == len(rows) or owner[i + 1] != owner[i]]
    taught = [slice(end - len(asked.rows), end) for end, asked in zip(ends, requests, strict=True)]
    problem = _problem(
        lm, requests, rows, owner, starts, run, view, layer, site, search, values, room
    )
    return Posed(
        problem=_lightened(problem),
        keys=[keys[mine] for mine in taught],
        values=[values[mine] for mine in taught],
    )


def _run(
    lm: "LM", ids: Int[Tensor, "row token"], layer: int, quick: Quickly | None, *, single: bool
) -> tuple[Run, Float[Tensor, "row token key"], Float[Tensor, "row token value"]]:
    """The rows' run, and what went into and came out of the layer's MLP output weight."""

    def through(ids: Tensor) -> tuple[Run, Tensor, Tensor]:
        kept: list[Tensor] = []

        def keep(x: Tensor, output: Tensor) -> None:
            kept.extend((x.reshape(*ids.shape, -1), output.clone().reshape(*ids.shape, -1)))

        with on_pass((lm.mlp_out(layer), keep)), quick() if quick else nullcontext():
            run = forward(lm, ids)
        return run, kept[0], kept[1]

    name = ("rows", layer, quick and quick.version)
    run, keys, values = played(lm, name, through, ids) if single else through(ids)
    if quick and not run.states[-1].isfinite().all():  # quick products left their range
        return _run(lm, ids, layer, None, single=single)
    return run, keys, values


def _lightened(problem: Problem) -> Problem:
    """The problem without what its losses do not need."""
    if problem.site == "mlp":
        problem = problem.shortened()
    form = (problem.hidden.shape, problem.view.past, torch.get_float32_matmul_precision())
    known = problem.lm.kept.setdefault("takes short attention", {})
    if form not in known:
        known[form] = _takes_short_attention(problem)
    apart = known[form]
    run = replace(problem.run, states=[])
    if apart and multiplies_halves(problem.hidden.dtype):
        run = run.halved()  # so that attention need not round them at every step
    return replace(problem, run=run, apart=apart)


def _takes_short_attention(problem: Problem) -> bool:
    """Whether short attention works here: one block with it says what it says without.

    This also compiles its kernels, which a recording could not do.
    """
    try:
        with short_attention(problem.hidden.device) as use:
            if not use.possible:
                return False
            found = _last_block(problem)
        wanted = _last_block(problem)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways; the usual attention is always there
        log.warning("short attention does not work here (%s); the usual one is used", error)
        return False
    exact = problem.hidden.dtype == torch.float32 and not multiplies_halves(torch.float32)
    tolerance = 1e-4 if exact else 3e-2
    gaps = [(x - y).abs().max() / y.abs().max() for x, y in zip(found, wanted, strict=True)]
    right = all(bool(gap <= tolerance) for gap in gaps)
    if not right:
        log.warning("short attention is wrong here (by %s); the usual one is used", gaps)
    return use.seen and right


def _last_block(problem: Problem) -> tuple[Tensor, Tensor]:
    """The last block's output, and a slope of it by its input."""
    hidden = problem.hidden.detach().requires_grad_()
    with torch.enable_grad():
        out = problem.replay(problem.lm.n_layers - 1, hidden)
        (slope,) = torch.autograd.grad(out, hidden, out.detach())
    return out.detach(), slope


def _problem(
    lm: "LM", requests: Sequence[Request], rows: Sequence[Row], owner: Sequence[int],
    starts: Sequence[int], run: Run, view: View, layer: int, site: Site, search: ValueSearch,
    values: Tensor, room: Room,
) -> Problem:  # fmt: skip
    """The reads and the unedited essence."""
    device = run.inputs.device

    def tensor(numbers: Sequence[int] | Sequence[float]) -> Tensor:
        return torch.tensor(numbers, device=device)

    essence = [i for i in range(len(rows)) if i + 1 == len(rows) or owner[i + 1] != owner[i]]
    first = [i for i in range(len(rows)) if i == 0 or owner[i - 1] != owner[i]]
    reads = [
        (i, read - starts[i], owner[i], 1 / (len(request.target) * len(request.rows)), label)
        for f, request in enumerate(requests)
        for i in range(first[f], essence[f])
        for read, label in zip(rows[i].reads, request.target, strict=True)
    ]
    reads += [(0, 0, 0, 0.0, 0)] * (room.for_reads(len(reads)) - len(reads))
    strand, slot, fact, weight, label = zip(*reads, strict=True)
    entering = run.states[layer] if site == "state" else (run.inputs, *run.states)[layer]
    last = run.states[-1]
    before = last[essence, [rows[i].reads[0] for i in essence]]
    return Problem(
        lm=lm, search=search, layer=layer, site=site, run=run, view=view,
        hidden=entering.to(device)[view.row[:, None], view.position],
        fact=tensor(owner), spot=tensor([r.place - s for r, s in zip(rows, starts, strict=True)]),
        read_strand=tensor(strand), read_slot=tensor(slot), read_fact=tensor(fact),
        read_weight=tensor(weight), label=tensor(label),
        essence_strand=tensor(essence),
        essence_slot=tensor([rows[i].reads[0] - starts[i] for i in essence]),
        essence_before=lm.decode(before).float().log_softmax(-1).to(device),
        size=values[first].norm(dim=-1).to(device),
    )  # fmt: skip


def _view(rows: Sequence[Row], starts: Sequence[int], lm: "LM", room: Room) -> View:
    """Each row's tokens from its start on, as one stretch."""
    longest = max(len(row.ids) - start for row, start in zip(rows, starts, strict=True))
    width = room.for_slots(longest)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    start = torch.full((len(rows), width), -1)
    for i, (row, begin) in enumerate(zip(rows, starts, strict=True)):
        length = len(row.ids) - begin
        position[i, :length] = torch.arange(begin, len(row.ids))
        start[i, :length] = begin
    return View(
        row=torch.arange(len(rows), device=lm.device),
        position=position.to(lm.device),
        start=start.to(lm.device),
        past=room.for_past(max(starts), lm.context),
    )
