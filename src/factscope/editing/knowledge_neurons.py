"""Knowledge Neurons: edit the MLP neurons that an answer is attributed to (Dai et al., 2022; App.
E.2).

    1. Attribution: integrated gradients of the old object's probability for every MLP neuron, after
       the bare prompt and after each prefix
    2. Coarse selection: in each context, the neurons above a fraction of the highest score
    3. Fine selection: of those, the neurons selected in most contexts, about ten
    4. Edit: a selected neuron multiplies one column of the MLP's output weight. To that column is
       added  new_weight · e(new object) - old_weight · e(old object), e being embeddings

All columns of a layer get the same direction, so each layer's change has rank one.

A neuron is an entry of a layer's key k, the input of the MLP's output weight. At the position that
predicts the answer o all neurons of a layer are scaled by α, from 0 to 1, and the gradient of P[o]
is integrated along that path:

    IG(k) = k ⊙ ∫₀¹ ∂P[o](α k) / ∂k dα

The IG of a layer's neurons sum to P[o](k) - P[o](0) (completeness). The difference is the error
estimate of an adaptive quadrature: a segment of the path whose IG do not sum to the gain of P[o]
along it is halved.

A point of a path is one α in one layer at one position. Only that position is recomputed, with the
keys and values to its left from one clean run; and the points of all layers share one pass, in
which each point enters at its own layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.checks import with_checks
from factscope.editing.contexts import (
    TokenRow,
    context_row,
    pad_rows,
    resolve_prefixes,
    target_ids,
    with_prefixes,
)
from factscope.editing.edit import Edit, LowRank
from factscope.editing.editor import (
    BoundEditor,
    map_valid,
    raise_first_error,
    results_or_errors,
    sum_edits,
)
from factscope.editing.settings import KN, NeuronSite
from factscope.errors import BadFact, BadSetting, DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.forward import forward, token_probability
from factscope.lm.hooks import hook_io
from factscope.lm.memory import Budget, run_in_batches
from factscope.lm.replay import PackedView, Replay
from factscope.lm.tokens import encode, encode_fact
from factscope.progress import NestedProgress, Progress, no_progress
from factscope.tracing.gradients import quadrature

if TYPE_CHECKING:
    from factscope.lm.model import LM

MAX_DEPTH = 16
"""Maximum number of times a segment is halved. Where a norm follows the MLP, as in Gemma 2, nearly
all of the gain is at the start of the path."""
HALF_TOLERANCE = 0.7
"""Fraction of a segment's tolerance that each half gets, not 0.5: usually one half has nearly all
of the error."""
MIN_GAIN = 0.1
"""The tolerance of a layer is relative to its gain, but to at least this fraction of the largest
layer's gain."""
FIRST_PASS = 0.7
"""Assumed fraction of the work before any segment is halved, for progress reports."""
MAX_FACTS = 64
"""Facts per batch at most."""


# ---- attribution: adaptive quadrature over segments of paths


class NeuronAttributions(NamedTuple):
    """Each neuron's contribution to P[o]. A readout is a position with the token o."""

    scores: Float[Tensor, "readout layer neuron"]
    """IG of each neuron."""
    neurons: Float[Tensor, "readout layer neuron"]
    """The activations of the neurons in the clean run."""
    gains: Float[Tensor, "readout layer"]
    """P[o](k) - P[o](0) of each layer, which the scores should sum to."""


class Segment(NamedTuple):
    """α from `start` to `end`, in one layer for one readout."""

    readout: int
    layer: int
    start: float
    end: float

    def halves(self) -> "tuple[Segment, Segment]":
        """The segment's first and second half."""
        middle = (self.start + self.end) / 2
        return self._replace(end=middle), self._replace(start=middle)


def attribute_neurons(
    lm: "LM",
    rows: Sequence[TokenRow],
    kn: KN,
    *,
    points_per_pass: int | None = None,
    progress: Progress = no_progress,
) -> NeuronAttributions:
    """IG of every neuron of every layer, for each position of the rows and its label."""
    paths = NeuronPaths(lm, rows, kn.site)
    nodes, weights = quadrature(kn.steps, kn.rule)
    size = max(1, math.ceil((points_per_pass or paths.max_points()) / kn.steps))
    nested = NestedProgress(progress)

    def solve(segments: Sequence[Segment], progress: Progress) -> list[tuple[Tensor, ...]]:
        parts = paths.integrate(segments, nodes, weights)
        progress(1.0)
        return list(zip(*parts, strict=True))

    def integrate(segments: Sequence[Segment], start: float, length: float) -> list[Tensor]:
        results = run_in_batches(segments, size, solve, nested.within(start, length))
        return [torch.stack(part) for part in zip(*results, strict=True)]

    readouts, layers = len(paths.label), lm.n_layers
    segments = [Segment(i, layer, 0.0, 1.0) for i in range(readouts) for layer in range(layers)]
    ig, neurons, start_p = integrate(segments, 0.0, FIRST_PASS)
    end_p = paths.clean_probability().repeat_interleave(layers)
    gains = (end_p - start_p).view(readouts, layers)
    scores = ig.view(readouts, layers, -1).clone()
    neurons = neurons.view(readouts, layers, -1)
    if kn.tolerance is not None:
        largest = gains.abs().amax(1, keepdim=True)
        allowed = kn.tolerance * gains.abs().maximum(MIN_GAIN * largest).flatten()
        for depth in range(MAX_DEPTH):
            error = (ig.sum(-1) - (end_p - start_p)).abs()
            inaccurate = (error > allowed).nonzero()[:, 0].tolist()
            if not inaccurate:
                break
            # Replace the score of each such segment by those of its halves.
            for i in inaccurate:
                scores[segments[i].readout, segments[i].layer] -= ig[i]
            segments = [half for i in inaccurate for half in segments[i].halves()]
            length = (1 - FIRST_PASS) / MAX_DEPTH
            ig, _, start_p = integrate(segments, FIRST_PASS + depth * length, length)
            for segment, score in zip(segments, ig, strict=True):
                scores[segment.readout, segment.layer] += score
            # A first half ends where the second one starts.
            end_p = torch.stack([start_p[1::2], end_p[inaccurate]], dim=1).flatten()
            allowed = HALF_TOLERANCE * allowed[inaccurate].repeat_interleave(2)
    nested.within(0.0, 1.0)(1.0)
    return NeuronAttributions(scores=scores, neurons=neurons, gains=gains)


class NeuronPaths:
    """The readouts of token rows, and the clean run over them."""

    def __init__(self, lm: "LM", rows: Sequence[TokenRow], site: NeuronSite) -> None:
        self.lm, self.site = lm, site
        self.run = forward(lm, pad_rows(rows, lm.device))
        readouts = [
            (i, position, label)
            for i, row in enumerate(rows)
            for position, label in zip(row.positions, row.labels, strict=True)
        ]
        self.row, self.position, self.label = torch.tensor(readouts, device=lm.device).T
        self.past = int(self.position.max())

    @torch.no_grad()
    def clean_probability(self) -> Float[Tensor, " readout"]:
        """P[o] of each readout in the clean run."""
        states = self.run.states[-1]
        at_readouts = states[self.row.to(states.device), self.position.to(states.device)]
        return token_probability(self.lm, at_readouts, self.label).to(self.lm.device)

    def max_points(self) -> int:
        """How many points fit into memory: the activations that their gradients need."""
        lm, length = self.lm, self.run.inputs.shape[1]
        keys = lm.mlp_weight(0).shape[1]
        heads, _, dim = self.run.keys[0].shape[1:]
        entries = 10 * lm.width + 3 * keys + 2 * heads * dim * length
        slots = 1 if lm.family.supports_packing else length
        point = lm.n_layers * slots * entries * lm.dtype.itemsize
        return max(1, Budget.of(lm, None).bytes // point)

    def integrate(
        self,
        segments: Sequence[Segment],
        nodes: Float[Tensor, " step"],
        weights: Float[Tensor, " step"],
    ) -> tuple[
        Float[Tensor, "segment neuron"], Float[Tensor, "segment neuron"], Float[Tensor, " segment"]
    ]:
        """IG over each segment; the neurons; P[o] at the start, where the rules have a node."""
        device, steps = self.lm.device, len(nodes)
        nodes, weights = nodes.to(device), weights.to(device)
        order = sorted(range(len(segments)), key=lambda i: segments[i].layer)
        columns = zip(*(segments[i] for i in order), strict=True)
        readout, layer, start, end = (
            torch.tensor(column, device=device).repeat_interleave(steps) for column in columns
        )
        alpha = start + (end - start) * nodes.repeat(len(order))
        neurons, gradients, p = self.evaluate(readout, layer, alpha)
        weight = ((end - start) * weights.repeat(len(order)))[:, None].float()
        ig = (neurons * gradients * weight).unflatten(0, (-1, steps)).sum(1)
        inverse = torch.tensor(order, device=device).argsort()
        return ig[inverse], neurons[::steps][inverse], p[::steps][inverse]

    def evaluate(
        self,
        readout: Int[Tensor, " point"],
        layer: Int[Tensor, " point"],
        alpha: Float[Tensor, " point"],
    ) -> tuple[
        Float[Tensor, "point neuron"], Float[Tensor, "point neuron"], Float[Tensor, " point"]
    ]:
        """The neurons k of each point's layer; ∂P[o] / ∂k and P[o] with them scaled by its alpha.

        Points must be in the order of their layers: the batch starts empty and grows on its way up.
        """
        lm = self.lm
        leaves: list[tuple[Tensor, Tensor]] = []
        hidden = self.run.inputs[:0, : 1 if lm.family.supports_packing else None]
        entered = 0
        with torch.enable_grad():
            for i, count in enumerate(torch.bincount(layer, minlength=lm.n_layers).tolist()):
                new = slice(entered, entered + count)
                entered += count
                if not entered:
                    continue
                view, slot = self._view(readout[:entered])
                # The clean run's states before the block, for the points that enter here.
                states = self.run.inputs if i == 0 else self.run.states[i - 1]
                row, position = (x[new].to(states.device) for x in (view.row, view.position))
                hidden = torch.cat([hidden, states[row[:, None], position].to(hidden.device)])
                hook = self._scale_neurons(i, new, slot[new], alpha[new], leaves)
                with hook_io(*([hook] if count else [])):
                    hidden = Replay(lm, self.run, view)(i, hidden)
            slot = self._view(readout)[1].to(hidden.device)
            last = hidden[torch.arange(entered, device=hidden.device), slot]
        p, gradient = self._read(last.detach(), self.label[readout])
        neurons, scaled = zip(*leaves, strict=True)
        gradients = torch.autograd.grad(last, scaled, gradient)
        k, dp_dk = (torch.cat([x.to(lm.device) for x in part]) for part in (neurons, gradients))
        return k.float(), dp_dk.float(), p.to(lm.device)

    def _view(self, readout: Int[Tensor, " point"]) -> tuple[PackedView, Int[Tensor, " point"]]:
        """The position of each point alone or, where the family cannot replay single positions, its
        whole row; and the slot that holds the position."""
        row, position = self.row[readout], self.position[readout]
        if self.lm.family.supports_packing:
            token = position[:, None]
            view = PackedView(row=row, position=token, start=token, past=self.past)
            return view, torch.zeros_like(position)
        whole = PackedView.whole(len(row), self.run.inputs.shape[1], row.device)
        return replace(whole, row=row, complete=False), position

    def _scale_neurons(
        self,
        layer: int,
        new: slice,
        slot: Int[Tensor, " new"],
        alpha: Float[Tensor, " new"],
        leaves: list[tuple[Tensor, Tensor]],
    ) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
        """A hook that scales the `new` points' neurons k; k and the leaf α k go to `leaves`."""
        at_key = self.site == "key"
        module = self.lm.mlp_out(layer) if at_key else self.lm.mlp_act(layer)

        def scale(x: Tensor, output: Tensor) -> Tensor:
            # Some families flatten rows and tokens.
            x, out = (t.reshape(new.stop, -1, t.shape[-1]) for t in (x, output))
            points, slots = torch.arange(new.start, new.stop), slot.to(x.device)
            k = x[points, slots].detach()
            scaled_k = (alpha.to(k)[:, None] * k).requires_grad_()
            leaves.append((k, scaled_k))
            if at_key:
                delta = (scaled_k - k) @ self.lm.mlp_weight(layer).T
            else:
                delta = module.forward(scaled_k) - module.forward(k)
            # Out of place: some families add in place to what a module returns.
            moved = torch.zeros_like(out).index_put((points.to(out.device), slots), delta)
            return (out + moved).reshape(output.shape)

        return module, scale

    def _read(
        self, states: Float[Tensor, "row width"], label: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, "row width"]]:
        """P[o] of each last-layer state and its gradient, for as many rows as logits fit."""
        size = Budget.of(self.lm, None).batch_sizes(self.lm).logits
        results: list[tuple[Tensor, Tensor]] = []
        for chunk, labels in zip(states.split(size), label.split(size), strict=True):
            leaf = chunk.detach().requires_grad_()
            with torch.enable_grad():
                p = token_probability(self.lm, leaf, labels)
            results.append((p.detach(), torch.autograd.grad(p.sum(), leaf)[0]))
        p, gradients = zip(*results, strict=True)
        return torch.cat(p), torch.cat(gradients)


# ---- selection


def select_neurons(
    scores: Float[Tensor, "context layer neuron"],
    threshold: float,
    context_fraction: float,
    max_neurons: int | None,
) -> tuple[Int[Tensor, "selected 2"], Bool[Tensor, "context layer neuron"]]:
    """The selected neurons as (layer, neuron), best first; and each context's coarse selection.

    Neurons are sorted by the number of contexts that selected them, then by mean score.
    """
    highest = scores.flatten(1).amax(1)[:, None, None]
    coarse = (scores > threshold * highest) & (highest > 0)
    count = coarse.sum(0)
    # If no neuron is in enough contexts, those in the most contexts are taken.
    enough = min(context_fraction * len(scores), count.max().item() - 0.5)
    selected = ((count > enough) & (count > 0)).nonzero()
    layer, neuron = selected.T
    by_score = scores.mean(0)[layer, neuron].argsort(descending=True, stable=True)
    by_count = count[layer, neuron][by_score].argsort(descending=True, stable=True)
    return selected[by_score[by_count]][:max_neurons], coarse


# ---- the editor


@dataclass(frozen=True, kw_only=True)
class NeuronRequest:
    """A fact to edit, tokenized."""

    fact: Fact
    target: tuple[int, ...]
    """Tokens of the new object."""
    answer: tuple[int, ...]
    """Tokens of the old object, whose probability is attributed."""
    predicted: int
    """The most likely token after the prompt."""
    rows: tuple[TokenRow, ...]
    """The bare prompt, then the prompt after each prefix, with the answer's tokens as labels."""

    @property
    def readouts(self) -> int:
        """The number of positions in all contexts."""
        return sum(len(row.positions) for row in self.rows)


class BoundKN(BoundEditor):
    """Knowledge Neurons bound to a model, every default resolved."""

    def __init__(self, settings: KN, lm: "LM") -> None:
        if settings.embedding == "input" and lm.embed.embedding_dim != lm.width:
            raise BadSetting(
                f"embedding is 'input', but the input embeddings of {lm.name} have width "
                f"{lm.embed.embedding_dim} and its states have {lm.width}; use output"
            )
        self.settings, self.lm = settings, lm
        self.prefixes = resolve_prefixes(lm, settings)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: the sum of their changes."""
        edits = raise_first_error(self._edits(facts, progress))
        total = sum_edits(edits, "answers", "neurons", "coarse", "gaps")
        return with_checks(self.lm, [total])[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error."""
        return map_valid(self._edits(facts, progress), lambda edits: with_checks(self.lm, edits))

    def _edits(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        requests = results_or_errors(self._request, facts)

        def solve(valid: list[NeuronRequest]) -> list[Edit | FactscopeError]:
            size = self.settings.facts_per_pass or self._facts_per_pass(valid)
            return run_in_batches(valid, size, self._edit_batch, progress)

        return map_valid(requests, solve)

    def _request(self, fact: Fact) -> NeuronRequest:
        prompt, _ = encode_fact(self.lm, fact)
        ids = torch.tensor([prompt.ids], device=self.lm.device)
        with torch.no_grad():
            state = self.lm.model.base_model(ids, use_cache=False).last_hidden_state[:, -1]
            predicted = int(self.lm.head(state).argmax())
        target = self._object_ids(fact, fact.target)
        answer = (predicted,) if fact.old is None else self._object_ids(fact, fact.old)
        if fact.old is not None and answer == target:
            raise BadFact(
                f"{fact.old!r} is both the old and the new object of {fact.text!r}; give another "
                "new object"
            )
        contexts = with_prefixes(fact, self.prefixes)
        rows = tuple(context_row(self.lm, context, answer, "last") for context in contexts)
        if self.settings.objective == "last-position":
            rows = tuple(row.at_last_position() for row in rows)
        return NeuronRequest(
            fact=fact, target=target, answer=answer, predicted=predicted, rows=rows
        )

    def _object_ids(self, fact: Fact, text: str | None) -> tuple[int, ...]:
        """The tokens of an object."""
        if text is not None and text.strip() and not self.settings.leading_space:
            return encode(self.lm, text.strip(), special=False).ids
        return target_ids(self.lm, replace(fact, target=text))

    def _facts_per_pass(self, requests: Sequence[NeuronRequest]) -> int:
        """Facts per batch whose scores fit into memory beside the attribution; one on a CPU."""
        lm = self.lm
        if lm.device.type == "cpu":
            return 1
        readouts = max(request.readouts for request in requests)
        scores = 4 * readouts * lm.n_layers * lm.mlp_weight(0).shape[1]
        # An eighth of the bound, for four tensors of that size.
        return max(1, min(MAX_FACTS, Budget.of(lm, None).bytes // 8 // (4 * scores)))

    def _edit_batch(
        self, requests: Sequence[NeuronRequest], progress: Progress
    ) -> list[Edit | FactscopeError]:
        rows = [row for request in requests for row in request.rows]
        attributions = attribute_neurons(self.lm, rows, self.settings, progress=progress)
        sizes = [request.readouts for request in requests]
        parts = zip(*(x.split(sizes) for x in attributions), strict=True)
        return results_or_errors(lambda r, part: self._edit(r, *part), requests, parts)

    def _edit(
        self,
        request: NeuronRequest,
        scores: Float[Tensor, "readout layer neuron"],
        neurons: Float[Tensor, "readout layer neuron"],
        gains: Float[Tensor, "readout layer"],
    ) -> Edit | FactscopeError:
        """Steps 2 to 4 for one fact, given the fields of its `NeuronAttributions`."""
        gap = (scores.sum(-1) - gains).abs().sum() / gains.abs().sum()
        # The answer has the same number of tokens in each context: average over them.
        contexts = len(request.rows)
        scores, neurons = (x.unflatten(0, (contexts, -1)).mean(1) for x in (scores, neurons))
        fact, kn = request.fact, self.settings
        answer = "the model's prediction" if fact.old is None else repr(fact.old)
        if not scores.isfinite().all():
            return DidNotConverge(
                f"the attributions of {answer} after {fact.text!r} are NaN or infinite; load the "
                "model in float32"
            )
        if not scores.amax() > 0:
            return DidNotConverge(
                f"no neuron adds to the probability of {answer} after {fact.text!r}; give another "
                "old object or prompt"
            )
        selected, coarse = select_neurons(scores, kn.threshold, kn.context_fraction, kn.max_neurons)
        layer, number = selected.T
        means = [x.float().mean(0)[layer, number].tolist() for x in (scores, neurons, coarse)]
        # Attribution and activation are means over the contexts; the context fraction is that of
        # the contexts in which coarse selection selected the neuron.
        found = [
            {"layer": i, "neuron": n, "attribution": a, "activation": k, "context_fraction": c}
            for (i, n), a, k, c in zip(selected.tolist(), *means, strict=True)
        ]
        return kn.new_edit(
            self.lm,
            self._changes(request, found),
            [fact],
            prefixes=self.prefixes,
            answers=[self.lm.tokenizer.decode(list(request.answer))],
            neurons=[found],
            # By layer, how many neurons coarse selection selected in a context on average.
            coarse=[coarse.sum(-1).float().mean(0).tolist()],
            # Relative error of the attributions: they should sum to the layers' gains.
            gaps=[gap.item()],
        )

    def _changes(
        self, request: NeuronRequest, neurons: Sequence[Mapping[str, Any]]
    ) -> dict[str, LowRank]:
        """ΔW = (new_weight e(new) - old_weight e(old)) sᵀ of each layer with selected neurons; s
        has an entry for each of them."""
        lm, kn = self.lm, self.settings
        old = request.answer if kn.old == "answer" else (request.predicted,)
        direction = kn.new_weight * self._embedding(request.target)
        direction = direction - kn.old_weight * self._embedding(old)
        changes: dict[str, LowRank] = {}
        for found in sorted(neurons, key=lambda found: found["layer"]):
            layer, neuron = found["layer"], found["neuron"]
            weight = lm.mlp_weight(layer)
            name = lm.name_of(lm.mlp_out(layer)) + ".weight"
            if name not in changes:
                changes[name] = LowRank(direction[:, None].clone(), torch.zeros(1, weight.shape[1]))
            size = weight[:, neuron].float().norm().item() if kn.unit == "column" else 1.0
            # A negative neuron writes its column with the opposite sign.
            negative = kn.signed and found["activation"] < 0
            changes[name].A[0, neuron] = -size if negative else size
        return changes

    def _embedding(self, ids: Sequence[int]) -> Float[Tensor, " value"]:
        """The embedding of an object, as a direction in the residual stream."""
        lm, kn = self.lm, self.settings
        if kn.embedding == "input":
            rows = lm.embed.weight[list(ids)]
        else:
            rows = lm.model.get_output_embeddings().weight[list(ids)]
            for module in reversed(lm.norms):
                if isinstance(module, nn.Linear):  # some OPT models project before the head
                    rows = rows @ module.weight
        rows = rows.detach().float().cpu()
        vector = rows.mean(0) if kn.pooling == "mean" else rows.sum(0)
        return vector / vector.norm() if kn.unit == "column" else vector
