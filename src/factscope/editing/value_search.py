"""The value search as a problem: what each fact's δ costs.

A vector δ is added where a fact's value is made, in every context of the fact at once. Only what
depends on δ is computed: the layers above it, over the tokens from its own to the last, with the
keys and values left of them taken from one run beforehand. Many facts stand side by side, each
with its own δ.

The value v*: what a fact's token must carry so that the model names the new object.

δ is changed by gradient descent until the new object follows in every context; the essence term
keeps what else is said of the subject. Many facts are searched at once: steps, losses and stops of
one do not touch another's.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.batches import solve_in_batches
from factscope.editing.contexts import (
    ContextRow,
    EditRequest,
    EditToken,
    edit_requests,
    kl_row,
    pad_rows,
)
from factscope.editing.editor import map_valid
from factscope.errors import BadSetting, DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.accel.attention import multiplies_halves, short_attention
from factscope.lm.accel.buckets import LengthBuckets
from factscope.lm.accel.graphs import CudaGraph, played
from factscope.lm.accel.linear import MANY, Quickly, quick_blocks
from factscope.lm.accel.search_cache import Shelf, shelf_for
from factscope.lm.forward import ActivationCache, forward
from factscope.lm.hooks import hook_io, hook_outputs
from factscope.lm.replay import PackedView, Replay
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "EditSite",
    "PreparedSearch",
    "ValueObjective",
    "ValueResult",
    "ValueSearch",
    "prepare_search",
    "run_search",
    "search_values",
]

log = logging.getLogger(__name__)

EditSite = Literal["mlp", "state"]
"""Where δ is added: to the MLP's contribution m of a layer (ROME) or to its state h (MEMIT)."""


@dataclass(frozen=True, kw_only=True)
class ValueSearch:
    """How a value is searched."""

    steps: int | None = None
    """How often the loss is looked at; δ is changed after each but the last. None for the model's
    own number, mostly 20."""
    lr: float = 0.5
    """Adam's learning rate."""
    stop: float = 0.05
    """The loss at which a fact is done."""
    clamp: float | None = None
    """The most that ‖δ‖ may be, in units of ‖v₀‖; infinity for no bound. None for the model's own
    number, mostly 4."""
    kl_weight: float = 0.0625
    """The weight of the essence term KL(edited ‖ unedited)."""
    kl_position: Literal["end", "place"] = "end"
    """Where that term reads: after "{subject} is a", or, as in the paper's code, at the token that
    the fact is written at."""
    weight_decay: float = 0.01
    """The weight of the term that keeps δ small."""
    weight_decay_form: Literal["relative", "paper"] = "relative"
    """‖δ‖ / ‖v₀‖, which does not depend on the model's scale; or, as in the paper's code,
    ‖δ‖ / ‖v₀‖², which does."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise BadSetting(f"steps is {self.steps}; a search needs at least one")
        if not self.lr > 0:
            raise BadSetting(f"lr is {self.lr}; it must be above 0")
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

    def resolve(self, *, steps: int = 20, clamp: float = 4.0) -> "ValueSearch":
        """The same with a model's own numbers where none were given."""
        return replace(
            self,
            steps=steps if self.steps is None else self.steps,
            clamp=clamp if self.clamp is None else self.clamp,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueObjective:
    """Facts posed side by side: the loss of each as a function of its δ."""

    lm: "LM"
    search: ValueSearch
    layer: int
    site: EditSite
    run: ActivationCache
    view: PackedView
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
        power = 2 if self.search.weight_decay_form == "paper" else 1
        decay = norm / self.size**power
        return target + self.search.kl_weight * essence + self.search.weight_decay * decay

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

        with hook_outputs((self.lm.mlp_out(self.layer), add)):
            return self.replay(self.layer, self.hidden)

    def shortened(self) -> "ValueObjective":
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

    def only(self, facts: Int[Tensor, " some"]) -> "ValueObjective":
        """The same for some of the facts, in the given order."""
        number = torch.full_like(self.size, -1, dtype=torch.long)
        number[facts] = torch.arange(len(facts), device=facts.device)
        strands = (number[self.fact] >= 0).nonzero()[:, 0]
        strand_number = torch.full_like(self.fact, -1)
        strand_number[strands] = torch.arange(len(strands), device=facts.device)
        reads = (number[self.read_fact] >= 0).nonzero()[:, 0]
        view = PackedView(
            row=torch.arange(len(strands), device=facts.device),
            position=self.view.position[strands],
            start=self.view.start[strands],
            past=self.view.past,
        )
        return ValueObjective(
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
class PreparedSearch:
    """A problem, and what the run before it saw at the facts' tokens."""

    problem: ValueObjective
    keys: list[Float[Tensor, "row key"]]
    values: list[Float[Tensor, "row value"]]


@torch.no_grad()
def prepare_search(
    lm: "LM", requests: Sequence[EditRequest], layer: int, site: EditSite, token: EditToken,
    search: ValueSearch, quick: Quickly | None = None,
) -> PreparedSearch:  # fmt: skip
    """One run over every row of the facts, and the problem that it leaves.

    `quick` makes the run faster while inside (`lm.quick`).
    """
    at_place = search.kl_position == "place"
    room = LengthBuckets.of(lm, len(requests))
    rows: list[ContextRow] = []
    owner: list[int] = []
    for i, asked in enumerate(requests):
        rows += [*asked.rows, kl_row(lm, asked.fact, token, at_place=at_place)]
        owner += [i] * (len(asked.rows) + 1)
    starts = [row.place if lm.family.packs else 0 for row in rows]
    view = _view(rows, starts, lm, room)
    longest = max(view.past, *(len(row.ids) for row in rows))
    ids = pad_rows(rows, lm.device, room.for_tokens(longest, lm.context))
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
    return PreparedSearch(
        problem=_lightened(problem),
        keys=[keys[mine] for mine in taught],
        values=[values[mine] for mine in taught],
    )


def _run(
    lm: "LM", ids: Int[Tensor, "row token"], layer: int, quick: Quickly | None, *, single: bool
) -> tuple[ActivationCache, Float[Tensor, "row token key"], Float[Tensor, "row token value"]]:
    """The rows' run, and what went into and came out of the layer's MLP output weight."""

    def through(ids: Tensor) -> tuple[ActivationCache, Tensor, Tensor]:
        kept: list[Tensor] = []

        def keep(x: Tensor, output: Tensor) -> None:
            kept.extend((x.reshape(*ids.shape, -1), output.clone().reshape(*ids.shape, -1)))

        with hook_io((lm.mlp_out(layer), keep)), quick() if quick else nullcontext():
            run = forward(lm, ids)
        return run, kept[0], kept[1]

    name = ("rows", layer, quick and quick.version)
    run, keys, values = played(lm, name, through, ids) if single else through(ids)
    if quick and not run.states[-1].isfinite().all():  # quick products left their range
        return _run(lm, ids, layer, None, single=single)
    return run, keys, values


def _lightened(problem: ValueObjective) -> ValueObjective:
    """The problem without what its losses do not need."""
    if problem.site == "mlp":
        problem = problem.shortened()
    form = (problem.hidden.shape, problem.view.past, torch.get_float32_matmul_precision())
    known = problem.lm.cache.setdefault("takes short attention", {})
    if form not in known:
        known[form] = _takes_short_attention(problem)
    apart = known[form]
    run = replace(problem.run, states=[])
    if apart and multiplies_halves(problem.hidden.dtype):
        run = run.halved()  # so that attention need not round them at every step
    return replace(problem, run=run, apart=apart)


def _takes_short_attention(problem: ValueObjective) -> bool:
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


def _last_block(problem: ValueObjective) -> tuple[Tensor, Tensor]:
    """The last block's output, and a slope of it by its input."""
    hidden = problem.hidden.detach().requires_grad_()
    with torch.enable_grad():
        out = problem.replay(problem.lm.n_layers - 1, hidden)
        (slope,) = torch.autograd.grad(out, hidden, out.detach())
    return out.detach(), slope


def _problem(
    lm: "LM", requests: Sequence[EditRequest], rows: Sequence[ContextRow], owner: Sequence[int],
    starts: Sequence[int], run: ActivationCache, view: PackedView, layer: int, site: EditSite,
    search: ValueSearch, values: Tensor, room: LengthBuckets,
) -> ValueObjective:  # fmt: skip
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
    return ValueObjective(
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


def _view(
    rows: Sequence[ContextRow], starts: Sequence[int], lm: "LM", room: LengthBuckets
) -> PackedView:
    """Each row's tokens from its start on, as one stretch."""
    longest = max(len(row.ids) - start for row, start in zip(rows, starts, strict=True))
    width = room.for_slots(longest)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    start = torch.full((len(rows), width), -1)
    for i, (row, begin) in enumerate(zip(rows, starts, strict=True)):
        length = len(row.ids) - begin
        position[i, :length] = torch.arange(begin, len(row.ids))
        start[i, :length] = begin
    return PackedView(
        row=torch.arange(len(rows), device=lm.device),
        position=position.to(lm.device),
        start=start.to(lm.device),
        past=room.for_past(max(starts), lm.context),
    )


SCALE = 2.0**12
"""The loss is scaled by this before its slopes are taken, which brings them into the middle of
half precision's range (see `lm.products`)."""

HEAVY = 1.5e11
"""A block with so many products takes a GPU longer to compute than to be told."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueResult:
    """What a search found for one fact."""

    request: EditRequest
    delta: Float[Tensor, " value"]
    values: Float[Tensor, "row value"]
    """What was there before: the value (or state) at the fact's token after each prefix, the bare
    prompt first; v₀ is the first of them."""
    keys: Float[Tensor, "row key"]
    """The keys there: the input of the layer's MLP output weight."""
    losses: tuple[float, ...]
    """The loss at each step."""

    @property
    def fact(self) -> Fact:
        """The fact that it is for."""
        return self.request.fact


def search_values(
    lm: "LM", facts: Sequence[Fact], prefixes: Sequence[str], layer: int, site: EditSite,
    token: EditToken, settings: ValueSearch, *, facts_per_pass: int | None, progress: Progress,
) -> list[ValueResult | FactscopeError]:  # fmt: skip
    """The value of each fact, searched in batches; a fact that fails has its error there."""

    def solve(
        requests: Sequence[EditRequest], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        shelf = shelf_for(lm) if len(requests) == 1 else None
        quick = None if shelf is None else shelf.quick_run(lm, layer)
        posed = prepare_search(lm, requests, layer, site, token, settings, quick)
        return run_search(posed, requests, progress, shelf)

    def solve_all(requests: list[EditRequest]) -> list[ValueResult | FactscopeError]:
        return solve_in_batches(
            lm, requests, layer, solve, facts_per_pass=facts_per_pass, progress=progress
        )

    return map_valid(edit_requests(lm, facts, prefixes, token), solve_all)


def run_search(
    posed: PreparedSearch, requests: Sequence[EditRequest], progress: Progress = lambda share: None,
    shelf: Shelf | None = None,
) -> list[ValueResult | FactscopeError]:  # fmt: skip
    """Change every δ until its fact is told, or the steps are used up.

    A fact whose search led nowhere gets the error in place of a value. What is on the shelf is
    used, and what the search of a single fact made is put there.
    """
    problem = posed.problem
    delta, losses = _descend(problem, progress, shelf)
    if problem.hidden.is_cuda and not all(map(_is_finite, chain(*losses))):
        # Quick products may have left half precision's range; the model's own do not.
        delta, losses = _descend(problem, lambda share: None, None, split_products=False)
    found = [
        ValueResult(request=r, delta=d, values=v, keys=k, losses=tuple(mine))
        for r, d, v, k, mine in zip(requests, delta, posed.values, posed.keys, losses, strict=True)
    ]
    return [_trouble(one) or one for one in found]


def _descend(
    problem: ValueObjective, progress: Progress, shelf: Shelf | None, *, split_products: bool = True
) -> tuple[Float[Tensor, "fact width"], list[list[float]]]:
    """Adam on every δ; a fact that is done keeps its δ and, when that pays, leaves the batch."""
    steps = problem.search.looks
    corrections = problem.size.new_tensor(
        [[1 - 0.9**step, 1 - 0.999**step] for step in range(1, steps + 1)]
    )
    descent = _Descent(problem)
    with ExitStack() as stack:
        look = None if shelf is None else shelf.take(problem)
        if look is None:
            stack.enter_context(
                quick_blocks(problem.lm.blocks[problem.layer :], split_products=split_products)
                if shelf is None
                else shelf.quick_above(problem)()
            )
            if problem.apart:
                stack.enter_context(short_attention(problem.hidden.device))
            look = _looking(problem, None if shelf is None else shelf.memory)
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            last = step == steps
            if last and len(descent.batch) >= MANY:
                seen, moved = _only_losses(descent.problem, descent.state)
            else:
                seen, moved = look(descent.state, corrections[step - 1])
            descent.see(seen)
            progress(1 / steps)
            if last or descent.idle == 1:
                progress(1 - step / steps)
                break
            descent.move(moved)
            spared = (time.perf_counter() - begin) * descent.idle * (steps - step)
            if descent.idle and spared > look.cost:
                descent.leave()
                look = _looking(descent.problem)
        if shelf is not None and look.graph is not None:
            shelf.add(problem, look)
        elif shelf is not None and look.failed:
            shelf.leave_memory()
    return descent.found(), descent.losses


class _Descent:
    """The facts' δ on their way; one that is done stays where it is."""

    def __init__(self, problem: ValueObjective) -> None:
        facts, width = len(problem.size), problem.hidden.shape[-1]
        self.whole = self.problem = problem
        """All the facts, and those in the batch."""
        self.batch = list(range(facts))
        self.going = [True for _ in self.batch]
        """Which facts of the batch still move."""
        self.state = problem.size.new_zeros(3, facts, width)
        """Adam's: δ of the batch, and the two means of its slopes."""
        self.losses: list[list[float]] = [[] for _ in self.batch]
        self.left = problem.size.new_zeros(facts, width)
        """δ of the facts that left the batch."""

    def see(self, losses: Float[Tensor, " fact"]) -> None:
        """Note the losses at δ; a fact whose loss is low enough, or no number, is done."""
        for place, loss in enumerate(losses.tolist()):
            if self.going[place]:
                self.losses[self.batch[place]].append(loss)
                self.going[place] = loss >= self.whole.search.stop and _is_finite(loss)

    @property
    def idle(self) -> float:
        """The share of the batch that is done."""
        return 1 - sum(self.going) / len(self.going)

    def move(self, state: Float[Tensor, "3 fact width"]) -> None:
        """Go on to the given state, which the next look may overwrite."""
        if all(self.going):
            self.state.copy_(state)
        else:
            going = torch.tensor(self.going, device=state.device)[:, None]
            self.state = torch.where(going, state, self.state)

    def leave(self) -> None:
        """Take those that are done out of the batch."""
        self.left[self.batch] = self.state[0]
        places = [place for place, goes in enumerate(self.going) if goes]
        self.batch = [self.batch[place] for place in places]
        self.going = [True for _ in places]
        self.state = self.state[:, places]
        self.problem = self.whole.only(torch.tensor(self.batch, device=self.state.device))

    def found(self) -> Float[Tensor, "fact width"]:
        """δ of every fact."""
        self.left[self.batch] = self.state[0]
        return self.left


def _looking(problem: ValueObjective, memory: Any = None) -> CudaGraph:
    """The losses at δ, and where Adam goes from there; a recording computes in the memory.

    Adam's state is δ and the two means of its slopes. Those start at 0, which makes them too small
    at first, by the two factors of the correction.
    """
    problem.prepare()
    block = sum(weight.numel() for weight in problem.lm.blocks[-1].parameters())
    slots = problem.view.position.numel()

    def look(state: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        delta = state[0].detach().requires_grad_()
        with torch.enable_grad():
            losses = problem.losses(delta)
            slope = torch.autograd.grad(SCALE * losses.sum(), delta)[0]
        return losses.detach(), _moved(problem, state, slope / SCALE, correction)

    return CudaGraph(look, pays=slots * block < HEAVY, pool=memory)


def _moved(
    problem: ValueObjective, state: Float[Tensor, "3 fact width"],
    slope: Float[Tensor, "fact width"], correction: Float[Tensor, " 2"],
) -> Float[Tensor, "3 fact width"]:  # fmt: skip
    """Adam's next step, each δ kept no longer than its bound."""
    search = problem.search
    delta, first, second = state
    first = 0.9 * first + 0.1 * slope
    second = 0.999 * second + 0.001 * slope**2
    mean, spread = first / correction[0], second / correction[1]
    moved = delta - search.lr * mean / (spread.sqrt() + 1e-8)
    longest = search.longest * problem.size[:, None]
    norm = moved.norm(dim=-1, keepdim=True)
    return torch.stack([torch.where(norm > longest, moved * longest / norm, moved), first, second])


def _only_losses(problem: ValueObjective, state: Tensor) -> tuple[Tensor, Tensor]:
    """The losses at δ, for the last look, after which nothing moves."""
    with torch.no_grad():
        return problem.losses(state[0]), state


def _trouble(found: ValueResult) -> DidNotConverge | None:
    """A search must have led somewhere."""
    fact, losses = found.fact, found.losses
    shown = ", ".join(f"{loss:.3g}" for loss in losses)
    if not all(map(_is_finite, losses)):
        return DidNotConverge(
            f"the loss of {fact.text!r} → {fact.target!r} is no number (by step: {shown}); "
            "lower the rate, or load the model in float32"
        )
    if len(losses) > 1 and losses[-1] >= losses[0]:
        return DidNotConverge(
            f"no value makes the model say {fact.target!r} after {fact.text!r} "
            f"(loss by step: {shown}); try another layer, more steps or a larger clamp"
        )
    return None


def _is_finite(x: float) -> bool:
    return abs(x) < float("inf")
