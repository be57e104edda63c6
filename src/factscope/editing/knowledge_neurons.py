"""Knowledge Neurons: edit the MLP neurons that an answer is attributed to (Dai et al., 2022; App.
E.2).

    1. Attribution: integrated gradients of the old object's probability for every MLP neuron, after
       the bare prompt and after each prefix (neuron_attribution.py)
    2. Coarse selection: in each context, the neurons above a fraction of the highest score
    3. Fine selection: of those, the neurons selected in most contexts, about ten
    4. Edit: a selected neuron multiplies one column of the MLP's output weight. To that column is
       added  new_weight · e(new object) - old_weight · e(old object), e being embeddings

All columns of a layer get the same direction, so each layer's change has rank one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.checks import with_checks
from factscope.editing.contexts import (
    TokenRow,
    context_row,
    resolve_prefixes,
    target_ids,
    with_prefixes,
)
from factscope.editing.edit import Change, Edit, LowRank, add_changes
from factscope.editing.editor import BoundEditor, map_valid, raise_first_error
from factscope.editing.neuron_attribution import NeuronAttributions, attribute_neurons
from factscope.editing.settings import KN
from factscope.errors import BadFact, BadSetting, DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.memory import Budget, run_in_batches
from factscope.lm.tokens import continuation_ids, encode, encode_fact
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

MAX_FACTS = 64
"""Facts per batch at most."""


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


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """A selected neuron; attribution and activation are means over the contexts."""

    layer: int
    neuron: int
    attribution: float
    """Its integrated gradient: its contribution to the answer's probability."""
    activation: float
    context_fraction: float
    """Fraction of the contexts in which coarse selection selected it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundNeurons:
    """The neurons selected for one fact."""

    request: NeuronRequest
    neurons: tuple[Neuron, ...]
    coarse: tuple[float, ...]
    """By layer, how many neurons coarse selection selected in a context on average."""
    gap: float
    """Relative error of the attributions: they should sum to the layers' gains."""


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


class BoundKN(BoundEditor):
    """Knowledge Neurons bound to a model, every default resolved."""

    def __init__(self, settings: KN, lm: "LM") -> None:
        if settings.embedding == "input" and lm.embed.embedding_dim != lm.width:
            raise BadSetting(
                f"embedding is 'input', but the input embeddings of {lm.name} have width "
                f"{lm.embed.embedding_dim} and its states have {lm.width}; use embedding='output'"
            )
        self.settings = settings
        self.lm = lm
        self.prefixes = resolve_prefixes(lm, settings)

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        """One edit for all facts: the sum of their changes."""
        found = raise_first_error(self.find_neurons(facts, progress))
        return with_checks(self.lm, [self._edit(found)])[0]

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        """An edit for each fact on its own, or its error."""

        def edits(found: list[FoundNeurons]) -> list[Edit]:
            return with_checks(self.lm, [self._edit([one]) for one in found])

        return map_valid(self.find_neurons(facts, progress), edits)

    def find_neurons(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[FoundNeurons | FactscopeError]:
        """Steps 1 to 3: the neurons of each fact, or its error."""
        requests: list[NeuronRequest | FactscopeError] = []
        for fact in facts:
            try:
                requests.append(self._request(fact))
            except BadFact as error:
                requests.append(error)

        def find(valid: list[NeuronRequest]) -> list[FoundNeurons | FactscopeError]:
            size = self.settings.facts_per_pass or self._facts_per_pass(valid)
            return run_in_batches(valid, size, self._find_batch, progress)

        return map_valid(requests, find)

    # ---- tokens

    def _request(self, fact: Fact) -> NeuronRequest:
        predicted = self._predicted(fact)
        target = self._object_ids(fact, fact.target)
        answer = (predicted,) if fact.old is None else self._object_ids(fact, fact.old)
        if fact.old is not None and answer == target:
            raise BadFact(
                f"{fact.old!r} is both the old and the new object of {fact.text!r}; give another "
                "new object"
            )
        rows = []
        for context in with_prefixes(fact, self.prefixes):
            row = context_row(self.lm, context, answer, "last")
            if self.settings.objective == "last-position":
                end = row.positions[0]
                row = TokenRow(row.ids[: end + 1], (end,) * len(answer), answer)
            rows.append(row)
        return NeuronRequest(
            fact=fact, target=target, answer=answer, predicted=predicted, rows=tuple(rows)
        )

    @torch.no_grad()
    def _predicted(self, fact: Fact) -> int:
        """The most likely token after the prompt."""
        prompt, _ = encode_fact(self.lm, fact)
        ids = torch.tensor([prompt.ids], device=self.lm.device)
        state = self.lm.model.base_model(ids, use_cache=False).last_hidden_state[:, -1]
        return int(self.lm.head(state).argmax())

    def _object_ids(self, fact: Fact, text: str | None) -> tuple[int, ...]:
        """The tokens of an object."""
        if text is None or not text.strip():
            return target_ids(self.lm, replace(fact, target=text))  # raises
        if not self.settings.leading_space:
            return encode(self.lm, text.strip(), special=False).ids
        prompt, _ = encode_fact(self.lm, fact)
        return continuation_ids(self.lm, prompt, fact.text, text.strip())

    # ---- steps 1 to 3: attribution and selection

    def _facts_per_pass(self, requests: Sequence[NeuronRequest]) -> int:
        """Facts per batch whose scores fit into memory beside the attribution; one on a CPU."""
        lm = self.lm
        if lm.device.type == "cpu":
            return 1
        readouts = max(request.readouts for request in requests)
        scores = 4 * readouts * lm.n_layers * lm.mlp_weight(0).shape[1]
        # An eighth of the bound, for four tensors of that size.
        return max(1, min(MAX_FACTS, Budget.of(lm, None).bytes // 8 // (4 * scores)))

    def _find_batch(
        self, requests: Sequence[NeuronRequest], progress: Progress
    ) -> list[FoundNeurons | FactscopeError]:
        kn = self.settings
        rows = [row for request in requests for row in request.rows]
        attributions = attribute_neurons(
            self.lm, rows, steps=kn.steps, rule=kn.rule, tolerance=kn.tolerance, site=kn.site,
            progress=progress,
        )  # fmt: skip
        sizes = [request.readouts for request in requests]
        parts = zip(*(x.split(sizes) for x in vars(attributions).values()), strict=True)
        return [
            self._select(
                request, NeuronAttributions(**dict(zip(vars(attributions), part, strict=True)))
            )
            for request, part in zip(requests, parts, strict=True)
        ]

    def _select(
        self, request: NeuronRequest, ig: NeuronAttributions
    ) -> FoundNeurons | FactscopeError:
        """Steps 2 and 3 for one fact."""
        # The answer has the same number of tokens in each context: average over them.
        contexts = len(request.rows)
        scores, neurons = (x.unflatten(0, (contexts, -1)).mean(1) for x in (ig.scores, ig.neurons))
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
        gap = (ig.scores.sum(-1) - ig.gains).abs().sum() / ig.gains.abs().sum()
        return FoundNeurons(
            request=request,
            neurons=tuple(
                Neuron(layer=i, neuron=n, attribution=a, activation=k, context_fraction=c)
                for (i, n), a, k, c in zip(selected.tolist(), *means, strict=True)
            ),
            coarse=tuple(coarse.sum(-1).float().mean(0).tolist()),
            gap=gap.item(),
        )

    # ---- step 4: the edit

    def _edit(self, found: Sequence[FoundNeurons]) -> Edit:
        """One edit for all facts; its settings include the selected neurons."""
        parts = [self._changes(one) for one in found]
        names = dict.fromkeys(name for part in parts for name in part)
        return Edit(
            changes={
                name: reduce(add_changes, [part[name] for part in parts if name in part])
                for name in names
            },
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=tuple(one.request.fact for one in found),
            settings={
                **self.settings.to_dict(),
                "prefixes": self.prefixes,
                "answers": [self.lm.tokenizer.decode(list(one.request.answer)) for one in found],
                "neurons": [[dict(vars(neuron)) for neuron in one.neurons] for one in found],
                "coarse": [list(one.coarse) for one in found],
                "gaps": [one.gap for one in found],
            },
        )

    def _changes(self, found: FoundNeurons) -> dict[str, Change]:
        """ΔW = (new_weight e(new) - old_weight e(old)) sᵀ of each layer with selected neurons; s
        has an entry for each of them."""
        kn, request = self.settings, found.request
        old = request.answer if kn.old == "answer" else (request.predicted,)
        direction = kn.new_weight * self._embedding(request.target)
        direction = direction - kn.old_weight * self._embedding(old)
        changes: dict[str, Change] = {}
        for layer in sorted({neuron.layer for neuron in found.neurons}):
            weight = self.lm.mlp_weight(layer)
            s = torch.zeros(1, weight.shape[1])
            for neuron in found.neurons:
                if neuron.layer == layer:
                    column = weight[:, neuron.neuron]
                    size = column.float().norm().item() if kn.unit == "column" else 1.0
                    # A negative neuron writes its column with the opposite sign.
                    negative = kn.signed and neuron.activation < 0
                    s[0, neuron.neuron] = -size if negative else size
            name = self.lm.name_of(self.lm.mlp_out(layer)) + ".weight"
            changes[name] = LowRank(direction[:, None].clone(), s)
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
