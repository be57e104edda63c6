"""The value search: v*, the value at the edit token that makes the model predict the new object.

A vector δ is added to a layer's MLP output m (ROME) or hidden state h (MEMIT) at the edit token, in
every context of the fact. It minimises (paper eq. 4)

    L(δ) = mean over contexts and target tokens of -log P[o* | context; δ]
         + kl_weight · KL(P[· | "{subject} is a"; δ] ‖ P[· | "{subject} is a"])
         + weight_decay · ‖δ‖ / n

by Adam with ‖δ‖ at most clamp · n, and v* = v₀ + δ. n is the usual norm of values at this layer
(`usual_norm`), so that the settings suit residual streams of any scale; in the paper it is ‖v₀‖.
ROME knows before the search which fraction of δ its update will add in each context, and adds that
fraction (`BoundRome.scales`).

Only what depends on δ is recomputed at each step: the layers above it, over the tokens from the
edit token on, with the keys and values left of it from one run beforehand. Many facts are searched
in one batch; their steps, losses and stops are independent.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.data.readers import everyday_facts
from factscope.editing.checks import facts_taken, with_checks
from factscope.editing.contexts import (
    ContextRow,
    EditRequest,
    context_row,
    edit_requests,
    kl_row,
    pad_rows,
)
from factscope.editing.edit import Change, Edit
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.settings import EditToken, Memit, Rome, ValueSearch
from factscope.errors import DidNotConverge, FactscopeError, PromptTooLong
from factscope.facts import Fact
from factscope.lm.accel import MIN_BATCH, LengthBuckets, Step, accelerated, accelerated_search
from factscope.lm.forward import ActivationCache, forward
from factscope.lm.hooks import hook_io, hook_outputs
from factscope.lm.memory import Budget, run_in_batches
from factscope.lm.replay import PackedView, Replay
from factscope.progress import Progress, split

if TYPE_CHECKING:
    from factscope.lm.model import LM

EditSite = Literal["mlp", "state"]
"""Where δ is added: to the MLP output m of a layer (ROME) or to its hidden state h (MEMIT)."""

MAX_FACTS = 64
"""Facts per batch at most: more do not make a GPU faster."""

SEARCHES = (9, 1)
"""Weights of progress: the search, and its continuation for the facts that are not taken."""

LOSS_SCALE = 2.0**12
"""The loss is multiplied by this power of two for the backward pass, as in mixed-precision
training: gradients then lie well within float16's range. In float32 it changes nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueResult:
    """The result of the search for one fact."""

    request: EditRequest
    delta: Float[Tensor, " value"]
    values: Float[Tensor, "row value"]
    """The unedited value (or state) at the edit token in each context; v₀ is the first, of the
    bare prompt."""
    keys: Float[Tensor, "row key"]
    """The keys there: the input of the layer's MLP output weight."""
    added: Float[Tensor, "added key"]
    """Further keys that ROME's update depends on (`BoundRome.added_keys`)."""
    losses: tuple[float, ...]
    """The loss at each step."""


S = TypeVar("S", bound=Rome | Memit)


class BoundValueEditor(BoundEditor, Generic[S]):
    """ROME or MEMIT bound to a model: a value is searched for each fact, then all are inserted."""

    site: ClassVar[EditSite]

    lm: "LM"
    settings: S
    layer: int
    """The layer of the values."""
    prefixes: tuple[str, ...]
    search: ValueSearch

    def scales(
        self, keys: Float[Tensor, "fact row key"], added: Float[Tensor, "fact added key"]
    ) -> Float[Tensor, "fact row"] | None:
        """Factors of δ in each row, given the keys of the contexts and, last, of the KL prompt, and
        the added keys; None adds the whole δ."""
        return None

    def added_keys(self, requests: Sequence[EditRequest]) -> list[Float[Tensor, "fact added key"]]:
        """Further keys that the update depends on."""
        return []

    @abstractmethod
    def insert_jointly(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """One edit of all values."""

    @abstractmethod
    def insert_each(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """An edit of each value on its own."""

    def division_factors(self, values: Sequence[ValueResult]) -> list[float]:
        """The division factor of each value; none if the method does not divide."""
        return []

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts."""
        edit, factors = self.unchecked_edit(facts, progress)
        return with_checks(self.lm, [edit], [min(factors, default=None)])[0]

    def unchecked_edit(self, facts: Sequence[Fact], progress: Progress) -> tuple[Edit, list[float]]:
        """One edit for all facts, and their division factors."""
        searching, continuing = split(progress, SEARCHES)
        values = raise_first_error(self.search_values(facts, searching))
        edits = self.insert_until_taken(values, self.insert_jointly, continuing)
        continuing(1.0)
        return raise_first_error(edits)[0], self.division_factors(values)

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error."""
        searching, continuing = split(progress, SEARCHES)

        def insert_and_check(values: list[ValueResult]) -> list[Edit | FactscopeError]:
            edits = self.insert_until_taken(values, self.insert_each, continuing)
            pairs = zip(self.division_factors(values), edits, strict=False)
            factors = [factor for factor, edit in pairs if isinstance(edit, Edit)]
            return map_valid(edits, lambda valid: with_checks(self.lm, valid, factors or None))

        results = map_valid(self.search_values(facts, searching), insert_and_check)
        continuing(1.0)
        return results

    def insert_until_taken(
        self,
        values: list[ValueResult],
        insert: Callable[[list[ValueResult]], list[Edit | FactscopeError]],
        progress: Progress,
    ) -> list[Edit | FactscopeError]:
        """The edits of the values. Where a fact is not taken, its search continues once."""
        edits = insert(values)
        valid = [edit for edit in edits if isinstance(edit, Edit)]
        if not valid or not self.search.retry:
            return edits
        taken = iter(facts_taken(self.lm, valid))
        by_fact = [x for edit in edits for x in (next(taken) if isinstance(edit, Edit) else [True])]
        missed = [value for value, is_taken in zip(values, by_fact, strict=True) if not is_taken]
        if not missed:
            return edits
        found = iter(self._search_on(missed, progress))
        return insert([v if t else next(found) for v, t in zip(values, by_fact, strict=True)])

    def new_edit(
        self, values: Sequence[ValueResult], changes: Mapping[str, Change], **results: Any
    ) -> Edit:
        """An edit of the values' facts that records the losses of their searches."""
        facts, losses = [x.request.fact for x in values], [list(x.losses) for x in values]
        return self.settings.new_edit(self.lm, changes, facts, **results, losses=losses)

    # ---- the search

    def search_values(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[ValueResult | FactscopeError]:
        """Search the value of each fact, in batches; a fact that fails gets its error."""
        requests = edit_requests(self.lm, facts, self.prefixes, self.settings.token)
        return map_valid(requests, lambda valid: self._search(valid, progress))

    def _search_on(self, values: Sequence[ValueResult], progress: Progress) -> list[ValueResult]:
        """Continue the search from each δ; where the loss does not fall, the value stays."""
        results = self._search([x.request for x in values], progress, values)
        return [
            replace(new, losses=old.losses + new.losses) if isinstance(new, ValueResult) else old
            for old, new in zip(values, results, strict=True)
        ]

    def _search(
        self,
        requests: Sequence[EditRequest],
        progress: Progress,
        earlier: Sequence[ValueResult] | None = None,
    ) -> list[ValueResult | FactscopeError]:
        # Requests of similar length share a batch; results in the order of the requests.
        order = sorted(range(len(requests)), key=lambda i: _suffix_length(requests[i]))

        def solve(batch: Sequence[int], progress: Progress) -> list[ValueResult | FactscopeError]:
            part = None if earlier is None else [earlier[i] for i in batch]
            return self._solve([requests[i] for i in batch], part, progress)

        size = self.settings.facts_per_pass or _batch_size(self.lm, requests, self.layer)
        results = run_in_batches(order, size, solve, progress)
        by_index = dict(zip(order, results, strict=True))
        return [by_index[i] for i in range(len(requests))]

    def _solve(
        self,
        requests: Sequence[EditRequest],
        earlier: Sequence[ValueResult] | None,
        progress: Progress,
    ) -> list[ValueResult | FactscopeError]:
        """One batch, from δ = 0 or from the results of an earlier search."""
        token = self.settings.token
        objective, keys, values = prepare_search(
            self.lm, requests, self.layer, self.site, token, self.search
        )
        if self.search.unit == "layer":
            norm = usual_norm(self.lm, self.layer, self.site, token)
            objective = replace(objective, norm=torch.full_like(objective.norm, norm))
        if earlier is None:
            start = None
            added = torch.cat([keys[:, :0], *self.added_keys(requests)], 1)
        else:
            start = torch.stack([x.delta for x in earlier])
            added = torch.stack([x.added for x in earlier])
        if (scales := self.scales(keys, added)) is not None:
            objective = replace(objective, scale=scales.flatten().to(objective.scale))
        delta, losses = accelerated_search(
            objective, lambda objective, make_step: minimise(objective, make_step, progress, start)
        )
        return [
            _failure(request.fact, by_step)
            or ValueResult(
                request=request, delta=d, values=v, keys=k[:-1], added=a, losses=tuple(by_step)
            )
            for request, d, v, k, a, by_step in zip(
                requests, delta, values, keys, added, losses, strict=True
            )
        ]


def minimise(
    objective: "ValueObjective",
    make_step: Callable[["ValueObjective"], Step],
    progress: Progress,
    start: Float[Tensor, "fact width"] | None = None,
) -> tuple[Float[Tensor, "fact width"], list[list[float]]]:
    """Adam on every δ, from 0 or `start`; returns each fact's δ and its loss at every step.

    A fact keeps its δ once its loss is below `stop_loss` or not finite, or its new object has
    `stop_probability`. It leaves the batch when that saves more time than setting up a step for
    the smaller batch takes.
    """
    search, steps = objective.search, objective.search.max_steps
    losses: list[list[float]] = [[] for _ in range(objective.facts)]
    final = objective.norm.new_zeros(objective.facts, objective.hidden.shape[-1])
    batch, numbers = objective, list(range(objective.facts))  # the facts in the batch
    active = [True] * len(numbers)  # those of them whose δ still changes
    # Adam's state: δ, and the running means of its gradient and squared gradient.
    state = final.new_zeros(3, *final.shape)
    if start is not None:
        state[0] = start
    enough = math.inf if search.stop_probability is None else math.log(search.stop_probability)
    step = make_step(objective)
    for i in range(1, steps + 1):
        began = time.perf_counter()
        last = i == steps
        if last and objective.facts >= MIN_BATCH:  # nothing changes any more: no gradient
            with torch.no_grad():
                found, new_state = torch.stack(batch.evaluate(state[0])), state
        else:
            found, new_state = step(state, objective.bias_corrections[i - 1])
        for n, (loss, log_prob) in enumerate(zip(*found.tolist(), strict=True)):
            if active[n]:
                losses[numbers[n]].append(loss)
                unfinished = loss >= search.stop_loss and log_prob < enough
                active[n] = unfinished and math.isfinite(loss)
        progress(1 / steps)
        if last or not any(active):
            progress(1 - i / steps)
            break
        if all(active):
            state.copy_(new_state)  # the next step may overwrite `new_state`
            continue
        keep = torch.tensor(active, device=state.device)
        state = torch.where(keep[:, None], new_state, state)
        finished = active.count(False) / len(active)
        if (time.perf_counter() - began) * finished * (steps - i) > step.capture_seconds:
            final[numbers] = state[0]
            state = state[:, keep]
            numbers = [number for number, stays in zip(numbers, active, strict=True) if stays]
            active = [True] * len(numbers)
            batch = objective.select(torch.tensor(numbers, device=state.device))
            step = make_step(batch)
    final[numbers] = state[0]
    return final, losses


def _failure(fact: Fact, losses: Sequence[float]) -> DidNotConverge | None:
    """The error of a search whose loss is not finite or did not fall."""
    by_step = ", ".join(f"{loss:.3g}" for loss in losses)
    if not all(map(math.isfinite, losses)):
        return DidNotConverge(
            f"the loss of {fact.text!r} → {fact.target!r} is NaN or infinite (by step: {by_step}); "
            "lower the learning rate, or load the model in float32"
        )
    if len(losses) > 1 and losses[-1] >= losses[0]:
        return DidNotConverge(
            f"no value makes the model predict {fact.target!r} after {fact.text!r} "
            f"(loss by step: {by_step}); try another layer, more steps or a larger clamp"
        )
    return None


# ---- batches


def _suffix_length(request: EditRequest) -> int:
    """Tokens of the longest row from the edit position on."""
    return max(len(row.ids) - row.edit_position for row in request.rows)


def _batch_size(lm: "LM", requests: Sequence[EditRequest], layer: int) -> int:
    """Facts per batch: as few batches as fit into memory, of nearly equal size."""
    if lm.device.type == "cpu":
        return 1  # larger batches are not faster
    keys, vocabulary = lm.mlp_weight(0).shape[1], lm.embed.weight.shape[0]
    item = lm.dtype.itemsize
    largest = max(requests, key=lambda r: _suffix_length(r) * len(r.rows))
    rows = len(largest.rows) + 1  # and the row of the KL term
    suffixes = _suffix_length(largest) * rows
    tokens = max(len(row.ids) for row in largest.rows) * rows
    activations = suffixes * (lm.n_layers - layer) * (10 * lm.width + 3 * keys) * item
    caches = tokens * lm.n_layers * 2 * lm.width * item
    logits = 4 * 4 * len(largest.rows) * len(largest.target) * vocabulary
    fit = Budget.of(lm, None).bytes // (activations + caches + logits)
    batches = math.ceil(len(requests) / max(1, min(MAX_FACTS, fit)))
    return math.ceil(len(requests) / batches)


# ---- the objective


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueObjective:
    """The loss of every fact as a function of its δ."""

    lm: "LM"
    search: ValueSearch
    layer: int
    site: EditSite
    run: ActivationCache
    """The unedited run over all rows: each fact's contexts, then its KL prompt."""
    view: PackedView
    """The tokens of each row from the edit token on."""
    hidden: Float[Tensor, "row slot width"]
    """The states that enter the first block that δ changes."""
    fact: Int[Tensor, " row"]
    """The fact that each row belongs to."""
    edit_slot: Int[Tensor, " row"]
    """The slot that δ is added to."""
    scale: Float[Tensor, " row"]
    """The factor of δ in each row."""
    target_row: Int[Tensor, " target"]
    target_slot: Int[Tensor, " target"]
    target_fact: Int[Tensor, " target"]
    target_weight: Float[Tensor, " target"]
    """1 / (contexts · target tokens); 0 for padding."""
    target_id: Int[Tensor, " target"]
    """The token of the new object that should follow."""
    kl_row: Int[Tensor, " fact"]
    kl_slot: Int[Tensor, " fact"]
    kl_reference: Float[Tensor, "fact vocabulary"]
    """Log-probabilities of the unedited model."""
    norm: Float[Tensor, " fact"]
    """What the settings are relative to: ‖v₀‖, or the usual norm at this layer."""
    suffix_attention: bool = False
    """Whether steps run with suffix attention (set by `lm.accel`)."""

    @property
    def facts(self) -> int:
        """The number of facts in the batch."""
        return len(self.norm)

    @property
    def lowest_block(self) -> int:
        """The lowest block that a step runs."""
        return self.layer + (self.site == "state")

    @cached_property
    def bias_corrections(self) -> Float[Tensor, "step 2"]:
        """Adam's running means start at 0 and are too small at first, by these factors."""
        return self.norm.new_tensor(
            [[1 - 0.9**i, 1 - 0.999**i] for i in range(1, self.search.max_steps + 1)]
        )

    def step(
        self, state: Float[Tensor, "3 fact width"], correction: Float[Tensor, " 2"]
    ) -> tuple[Float[Tensor, "2 fact"], Float[Tensor, "3 fact width"]]:
        """`evaluate` at δ, and Adam's next state with every ‖δ‖ clamped."""
        delta, mean, square = state
        delta = delta.detach().requires_grad_()
        with torch.enable_grad():
            losses, log_probs = self.evaluate(delta)
            (gradient,) = torch.autograd.grad(LOSS_SCALE * losses.sum(), delta)
        gradient = gradient / LOSS_SCALE
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        denominator = (square / correction[1]).sqrt() + 1e-8
        step_size = self.search.step_size(self.norm, delta.shape[-1])[:, None]
        new_delta = delta.detach() - step_size * (mean / correction[0]) / denominator
        max_norm = self.search.max_norm * self.norm[:, None]
        norm = new_delta.norm(dim=-1, keepdim=True)
        new_delta = torch.where(norm > max_norm, new_delta * max_norm / norm, new_delta)
        return torch.stack([losses.detach(), log_probs]), torch.stack([new_delta, mean, square])

    def evaluate(
        self, delta: Float[Tensor, "fact width"]
    ) -> tuple[Float[Tensor, " fact"], Float[Tensor, " fact"]]:
        """L(δ) of every fact, and the lowest log P of a token of its new object in any context."""
        shift = self._shift(delta)
        hidden = self.hidden + shift if self.site == "state" else self._edited_block(shift)
        for layer in range(self.layer + 1, self.lm.n_layers):
            hidden = self.replay(layer, hidden)
        row = torch.cat([self.target_row, self.kl_row]).to(hidden.device)
        slot = torch.cat([self.target_slot, self.kl_slot]).to(hidden.device)
        log_probs = self.lm.decode(hidden[row, slot]).float().log_softmax(-1).to(delta.device)
        targets, kl_log_probs = log_probs.split([len(self.target_id), self.facts])
        target_log_probs = targets.gather(1, self.target_id[:, None])[:, 0]
        nll = -target_log_probs * self.target_weight
        target = torch.zeros_like(self.norm).index_add(0, self.target_fact, nll)
        real = torch.where(self.target_weight > 0, target_log_probs.detach(), 0.0)
        lowest = torch.zeros_like(self.norm).scatter_reduce(0, self.target_fact, real, "amin")
        kl = (kl_log_probs.exp() * (kl_log_probs - self.kl_reference)).sum(-1)
        # The gradient of the square root at 0 is infinite; the small constant makes it 0 there.
        length = (delta.square().sum(-1) + 1e-30).sqrt()
        power = 2 if self.search.weight_decay_form == "paper" else 1
        decay = length / self.norm**power
        return target + self.search.kl_weight * kl + self.search.decay_weight * decay, lowest

    def _shift(self, delta: Float[Tensor, "fact width"]) -> Float[Tensor, "row slot width"]:
        """Each row's fraction of δ in its edit slot, 0 elsewhere."""
        by_row = self.scale[:, None] * delta[self.fact]
        return self._at_edit_slot * by_row[:, None].to(self.hidden.dtype)

    @cached_property
    def _at_edit_slot(self) -> Float[Tensor, "row slot 1"]:
        slots = torch.arange(self.hidden.shape[1], device=self.edit_slot.device)
        return (slots == self.edit_slot[:, None])[:, :, None].to(self.hidden)

    def _edited_block(
        self, shift: Float[Tensor, "row slot width"]
    ) -> Float[Tensor, "row slot width"]:
        """The output of the edited layer's block, with the shift added to its MLP's output."""

        def add(output: Tensor) -> Tensor:
            return output + shift.reshape(output.shape).to(output.device)

        with hook_outputs((self.lm.mlp_out(self.layer), add)):
            return self.replay(self.layer, self.hidden)

    @cached_property
    def replay(self) -> Replay:
        """The blocks, callable on these rows."""
        return Replay(self.lm, self.run, self.view)

    def select(self, facts: Int[Tensor, " selected"]) -> "ValueObjective":
        """The objective of the selected facts, in the given order."""
        number = torch.full_like(self.norm, -1, dtype=torch.long)
        number[facts] = torch.arange(len(facts), device=facts.device)
        rows = (number[self.fact] >= 0).nonzero()[:, 0]
        row_number = torch.full_like(self.fact, -1)
        row_number[rows] = torch.arange(len(rows), device=facts.device)
        targets = (number[self.target_fact] >= 0).nonzero()[:, 0]
        view = PackedView(
            row=torch.arange(len(rows), device=facts.device),
            position=self.view.position[rows],
            start=self.view.start[rows],
            past=self.view.past,
        )
        return replace(
            self,
            run=self.run.select(rows), view=view, hidden=self.hidden[rows],
            fact=number[self.fact[rows]], edit_slot=self.edit_slot[rows], scale=self.scale[rows],
            target_row=row_number[self.target_row[targets]],
            target_slot=self.target_slot[targets],
            target_fact=number[self.target_fact[targets]],
            target_weight=self.target_weight[targets], target_id=self.target_id[targets],
            kl_row=row_number[self.kl_row[facts]], kl_slot=self.kl_slot[facts],
            kl_reference=self.kl_reference[facts], norm=self.norm[facts],
        )  # fmt: skip

    # What `lm.accel` needs to run steps faster.

    def key(self) -> tuple[Any, ...]:
        """Everything beside the tensors that a captured step depends on."""
        return (
            self.layer, self.site, self.suffix_attention, astuple(self.search), self.view.past,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step reads and that differs between facts."""
        _ = self._at_edit_slot, self.bias_corrections  # cached on first use: compute them now
        fields = [x for x in vars(self).values() if isinstance(x, Tensor)]
        above, past = slice(self.layer, None), self.view.past
        keys = [x[:, :, :past] for x in (*self.run.keys[above], *self.run.values[above])]
        arguments = self.replay.tensors(range(self.layer, self.lm.n_layers), self.hidden)
        return [*fields, *arguments, *keys]

    def modules(self) -> list[nn.Module]:
        """Every module that a step runs."""
        heads = [*self.lm.norms, self.lm.model.get_output_embeddings()]
        parts = (*self.lm.blocks[self.lowest_block :], *heads)
        return [module for part in parts for module in part.modules()]

    def last_block(
        self, hidden: Float[Tensor, "row slot width"]
    ) -> Float[Tensor, "row slot width"]:
        """The last block's output for given states."""
        return self.replay(self.lm.n_layers - 1, hidden)

    def with_suffix_attention(self, *, half: bool) -> "ValueObjective":
        """The same with suffix attention, and with `half` the past's keys in float16."""
        run = self.run.with_half_keys() if half else self.run
        return replace(self, run=run, suffix_attention=True)


# ---- preparing the objective

USUAL_FACTS = 16
"""Built-in facts whose values define the usual norm."""


@torch.no_grad()
def usual_norm(lm: "LM", layer: int, site: EditSite, token: EditToken) -> float:
    """The median norm, over built-in facts, of the value or state at the edit token."""
    known = lm.cache.setdefault("usual norms", {})
    if (layer, site, token) not in known:
        rows = []
        for fact in everyday_facts()[:USUAL_FACTS]:
            with suppress(PromptTooLong):
                rows.append(context_row(lm, replace(fact, target=None), (), token))
        run, _, values = _unedited_run(lm, pad_rows(rows, lm.device), layer, facts=len(rows))
        at_token = (torch.arange(len(rows)), torch.tensor([row.edit_position for row in rows]))
        found = (run.states[layer] if site == "state" else values)[at_token]
        known[layer, site, token] = found.float().norm(dim=-1).median().item()
    return known[layer, site, token]


@torch.no_grad()
def prepare_search(
    lm: "LM", requests: Sequence[EditRequest], layer: int, site: EditSite, token: EditToken,
    search: ValueSearch,
) -> tuple[
    ValueObjective, Float[Tensor, "fact row key"], Float[Tensor, "fact context value"]
]:  # fmt: skip
    """One unedited run over all rows: the objective, the keys at the edit tokens of the contexts
    and (last) of the KL prompt, and the values at those of the contexts."""
    rows = [
        row
        for request in requests
        for row in (*request.rows, kl_row(lm, request.fact, token, search.kl_position))
    ]
    per_fact = len(rows) // len(requests)  # all facts have the same contexts, and one KL prompt
    buckets = LengthBuckets.of(lm, len(requests))
    # Families that mask by a key's index in the row need all tokens of a row.
    starts = [row.edit_position if lm.family.supports_packing else 0 for row in rows]
    view = _suffix_view(lm, rows, starts, buckets)
    longest = max(view.past, *(len(row.ids) for row in rows))
    ids = pad_rows(rows, lm.device, buckets.for_tokens(longest, lm.context))
    run, keys, values = _unedited_run(lm, ids, layer, facts=len(requests))
    number, edited = torch.arange(len(rows)), torch.tensor([row.edit_position for row in rows])
    values = run.states[layer] if site == "state" else values
    keys, values = (x[number, edited].float().unflatten(0, (-1, per_fact)) for x in (keys, values))
    values = values[:, :-1]

    device = run.inputs.device
    start = torch.tensor(starts)
    # Row, slot, fact, weight and token of each target; a KL prompt has no labels.
    targets = [
        (i, position - starts[i], i // per_fact, 1 / (len(row.labels) * (per_fact - 1)), label)
        for i, row in enumerate(rows)
        for position, label in zip(row.positions, row.labels, strict=False)
    ]
    targets += [(0, 0, 0, 0.0, 0)] * (buckets.for_targets(len(targets)) - len(targets))
    target = [torch.tensor(column, device=device) for column in zip(*targets, strict=True)]
    kl = number[per_fact - 1 :: per_fact]
    kl_position = torch.tensor([row.positions[0] for row in rows[per_fact - 1 :: per_fact]])
    reference = lm.decode(run.states[-1][kl, kl_position]).float().log_softmax(-1)
    entering = run.states[layer] if site == "state" else (run.inputs, *run.states)[layer]
    objective = ValueObjective(
        lm=lm, search=search, layer=layer, site=site, run=run, view=view,
        hidden=entering.to(device)[view.row[:, None], view.position],
        fact=(number // per_fact).to(device), edit_slot=(edited - start).to(device),
        scale=torch.ones(len(rows), device=device),
        target_row=target[0], target_slot=target[1], target_fact=target[2],
        target_weight=target[3], target_id=target[4],
        kl_row=kl.to(device), kl_slot=(kl_position - start[kl]).to(device),
        kl_reference=reference.to(device), norm=values[:, 0].norm(dim=-1).to(device),
    )  # fmt: skip
    if site == "mlp":
        objective = _without_first_block(objective)
    # Of the run only keys and values are needed from here on.
    return replace(objective, run=replace(run, states=[])), keys, values


def _suffix_view(
    lm: "LM", rows: Sequence[ContextRow], starts: Sequence[int], buckets: LengthBuckets
) -> PackedView:
    """The tokens of each row from its start on, as one segment."""
    start = torch.tensor(starts)[:, None]
    length = torch.tensor([len(row.ids) for row in rows])[:, None]
    position = start + torch.arange(buckets.for_slots(int((length - start).max())))
    return PackedView(
        row=torch.arange(len(rows), device=lm.device),
        position=torch.where(position < length, position, 0).to(lm.device),
        start=torch.where(position < length, start, -1).to(lm.device),
        past=buckets.for_past(max(starts), lm.context),
    )


def _unedited_run(
    lm: "LM", ids: Int[Tensor, "row token"], layer: int, *, facts: int
) -> tuple[ActivationCache, Float[Tensor, "row token key"], Float[Tensor, "row token value"]]:
    """The run, and the input and output of the layer's MLP output weight."""

    def compute(ids: Tensor) -> tuple[ActivationCache, Tensor, Tensor]:
        recorded: list[Tensor] = []

        def record(x: Tensor, output: Tensor) -> None:
            # Falcon adds to the output in place, so copy it.
            recorded.extend((x.reshape(*ids.shape, -1), output.clone().reshape(*ids.shape, -1)))

        with hook_io((lm.mlp_out(layer), record)):
            run = forward(lm, ids)
        return run, recorded[0], recorded[1]

    key = ("edit contexts", layer) if facts == 1 else None
    return accelerated(
        lm, compute, ids, batch=facts, key=key, needed_again=range(layer, lm.n_layers),
        check=lambda result: result[0].states[-1],
    )  # fmt: skip


def _without_first_block(objective: ValueObjective) -> ValueObjective:
    """The same objective without the edited layer's block, where that is exact.

    Most families add the MLP's output to the residual stream unchanged: then δ can be added to the
    block's output as well. Gemma 2 and 3 and OLMo 2 normalise it first; they keep the block.
    """
    rows, positions = objective.view.row[:, None], objective.view.position
    after = objective.run.states[objective.layer].to(objective.hidden.device)[rows, positions]
    probe = torch.ones_like(objective.hidden[: objective.facts, 0].float())
    probe *= (objective.norm / probe.shape[-1] ** 0.5)[:, None]
    shift = objective._shift(probe)
    gap = (objective._edited_block(shift) - (after + shift)).abs().max()
    precise = objective.hidden.dtype == torch.float32
    precise = precise and torch.get_float32_matmul_precision() == "highest"
    if gap > (1e-4 if precise else 2e-2) * shift.abs().max():
        return objective
    return replace(objective, site="state", hidden=after)
