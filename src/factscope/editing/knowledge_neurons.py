"""Knowledge Neurons: a fact moved by the neurons that speak for it (Dai et al., 2022; App. E.2).

    1. Attribution: what each MLP neuron of every layer adds to the old object's probability, after
       the fact's prompt and after the same prompt in other contexts (editing.neurons)
    2. Coarse selection: in each context, the neurons with at least a share of the highest score
    3. Fine selection: of those, the ones that most of the contexts share, about ten
    4. The edit: from what those neurons write, their columns of the MLP's output weight, the old
       object's embedding is subtracted, and the new one's is added

All the neurons of a layer write in one direction, so each layer's change has rank one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.batches import run_in_batches
from factscope.editing.checks import with_checks
from factscope.editing.contexts import (
    PrefixLengths,
    context_row,
    prefixes_for,
    target_ids,
    with_prefixes,
)
from factscope.editing.edit import Change, Edit, LowRank, add_changes
from factscope.editing.editor import Editor, map_valid, raise_first_error
from factscope.editing.neuron_attribution import (
    NeuronAttributions,
    NeuronSite,
    Readout,
    attribute_neurons,
)
from factscope.errors import BadFact, BadSetting, DidNotConverge, FactscopeError
from factscope.facts import Fact
from factscope.lm.memory import Budget
from factscope.lm.quadrature import Rule
from factscope.lm.tokens import continuation_ids, encode, encode_fact
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["KN", "PAPER", "BoundKN", "Neuron", "select_neurons"]

MOST = 64
"""How many facts are looked at together at most."""


@dataclass(frozen=True, kw_only=True)
class KN(Editor):
    """The method with its settings."""

    steps: int = 4
    """At how many points a piece of a neuron's path is looked at."""
    rule: Rule = "radau"
    """Which points: Radau's, or, as in the paper's code, equally spaced ones that all weigh the
    same, which overrates the ends of the path."""
    tolerance: float | None = 0.02
    """How far a layer's attributions may be from what the answer's probability gains along its
    path, before that is looked at in halves; None looks once, as the paper's code does."""
    site: NeuronSite = "key"
    """What is attributed: the key that the MLP's output weight reads, whose entries the edit
    changes the columns of; or, as in the paper's code, what the nonlinearity reads before that."""
    reads: Literal["each-token", "last-position"] = "each-token"
    """An answer of several tokens: each after the ones before it, or, as in the paper's code, all
    of them right after the prompt. Their attributions are averaged."""
    spaced: bool = True
    """Whether objects are coded as they continue the prompt, with the space before them; in the
    paper's code they are not, which makes them other tokens."""
    threshold: float = 0.2
    """Coarse selection: a context's neurons with more than this share of its highest score."""
    share: float = 0.7
    """Fine selection: of those, the ones that more than this share of the contexts have; where
    there are none, those that most contexts have."""
    most: int | None = 10
    """How many neurons are kept of those; None for all."""
    prefixes: tuple[str, ...] | None = None
    """Texts to put before the prompt; None lets the model write them."""
    prefix_lengths: PrefixLengths = ((10, 5),)
    """(tokens, how many) of the prefixes that the model writes; () for none."""
    prefix_bos_counts: bool = False
    """Whether BOS is one of those tokens."""
    seed: int = 0
    """For the prefixes."""
    new_weight: float = 0.5
    """How much of the new object's embedding is added. 0.5 moved as many of 16 CounterFact cases as
    1 on the default model, with fewer neighbours and within the guard rails."""
    old_weight: float = 0.5
    """How much of the old object's embedding is subtracted."""
    old: Literal["answer", "said"] = "answer"
    """Whose embedding is subtracted: the object's that the neurons speak for, or, as in the paper's
    code, that of the likeliest token after the prompt."""
    unit: Literal["column", "embedding"] = "column"
    """What a weight of one means: as long as the neuron's own column, which suits a model of any
    scale, as Dai et al. did; or, as in the paper's code, as long as the embedding."""
    signed: bool = True
    """Whether a neuron that is negative where the fact is asked for gets the opposite change: it
    writes its column with a minus. In the paper's code it gets the same, which then tells against
    the new object. Half of the neurons of a gated MLP are negative."""
    tokens: Literal["mean", "sum"] = "mean"
    """An object of several tokens: the mean of their embeddings, or, as in the paper's code, their
    sum."""
    embedding: Literal["output", "input"] = "output"
    """Which embeddings: those that logits are made with, or, as in the paper's code, those that
    tokens are read with. In many models they are the same."""
    facts_per_pass: int | None = None
    """How many facts are looked at together; None for what memory allows."""
    method: str = "kn"

    def __post_init__(self) -> None:
        choices = {"rule": Rule, "site": NeuronSite}
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise BadSetting(f"{name} is {getattr(self, name)!r}; choose from {known}")
        if self.steps < 2:
            raise BadSetting(f"steps is {self.steps}; a path needs at least two points")
        if self.rule == "gauss":
            raise BadSetting("rule is 'gauss', which leaves out the path's beginning; take 'radau'")
        if self.tolerance is not None and not self.tolerance > 0:
            raise BadSetting(f"tolerance is {self.tolerance}; it must be above 0, or None")
        for name in ("threshold", "share"):
            if not 0 <= getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be from 0 to below 1")
        for name in ("most", "facts_per_pass"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be at least 1")

    def __call__(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> Edit:
        """One edit that writes all the facts: the sum of their edits."""
        if not facts:
            raise BadFact("there is no fact to write; give at least one")
        ready = self.ready(lm)
        return with_checks(lm, [ready.edit(raise_first_error(ready.sought(facts, progress)))])[0]

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> list[Edit | FactscopeError]:
        """An edit for each fact alone, or why there is none."""
        ready = self.ready(lm)

        def edits(sought: list[FoundNeurons]) -> list[Edit]:
            return with_checks(lm, [ready.edit([one]) for one in sought])

        return map_valid(ready.sought(facts, progress), edits)

    def resolve(self, lm: "LM") -> "KN":
        """The same with the prefixes written out."""
        return replace(self, prefixes=self.ready(lm).prefixes)

    def ready(self, lm: "LM") -> "BoundKN":
        """The method on a model, with every default settled."""
        if self.embedding == "input" and lm.embed.embedding_dim != lm.width:
            raise BadSetting(
                f"tokens are read with embeddings of width {lm.embed.embedding_dim} in {lm.name}, "
                f"whose states have {lm.width}; take embedding='output'"
            )
        prefixes = prefixes_for(
            lm, self.prefixes, self.prefix_lengths, self.seed, bos_counts=self.prefix_bos_counts
        )
        return BoundKN(kn=self, lm=lm, prefixes=prefixes)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        return dict(vars(self))


# ---- what is asked


@dataclass(frozen=True, kw_only=True)
class NeuronRequest:
    """A fact to be moved, ready for the model."""

    fact: Fact
    target: tuple[int, ...]
    """The new object's tokens."""
    answer: tuple[int, ...]
    """The old object's tokens, which the neurons are to speak for."""
    said: int
    """The likeliest token after the prompt."""
    contexts: tuple[tuple[Readout, ...], ...]
    """What is read of the answer after each prefix; the bare prompt first."""

    @property
    def readings(self) -> list[Readout]:
        """All that is read."""
        return [reading for context in self.contexts for reading in context]


# ---- what is found


@dataclass(frozen=True, kw_only=True)
class Neuron:
    """A neuron that was chosen."""

    layer: int
    neuron: int
    attribution: float
    """What it adds to the answer's probability, on average over the contexts."""
    activation: float
    """What it is there, on average."""
    share: float
    """Of the contexts, how many it was selected in."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundNeurons:
    """What was found for one fact."""

    request: NeuronRequest
    neurons: tuple[Neuron, ...]
    coarse: tuple[float, ...]
    """By layer, how many neurons a context selected on average."""
    gap: float
    """How far attributions are from adding up: of all layers' gains in probability."""


def select_neurons(
    scores: Float[Tensor, "context layer neuron"],
    threshold: float,
    share: float,
    most: int | None,
) -> tuple[Int[Tensor, "chosen 2"], Bool[Tensor, "context layer neuron"]]:
    """The neurons (layer, number) that contexts share, best first; and what each context had.

    Best are those that more contexts have, and among these those with the higher mean score.
    """
    highest = scores.flatten(1).amax(1)[:, None, None]
    coarse = (scores > threshold * highest) & (highest > 0)
    count = coarse.sum(0)
    enough = min(share * len(scores), count.max().item() - 0.5)
    chosen = ((count > enough) & (count > 0)).nonzero()
    layer, number = chosen.T
    by_score = scores.mean(0)[layer, number].argsort(descending=True, stable=True)
    by_count = count[layer, number][by_score].argsort(descending=True, stable=True)
    return chosen[by_score[by_count]][:most], coarse


# ---- the method


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundKN:
    """The method on a model."""

    kn: KN
    lm: "LM"
    prefixes: tuple[str, ...]

    def sought(
        self, facts: Sequence[Fact], progress: Progress
    ) -> list[FoundNeurons | FactscopeError]:
        """The neurons of each fact, or why there are none."""

        def find(requests: list[NeuronRequest]) -> list[FoundNeurons | FactscopeError]:
            return run_in_batches(
                requests, self.kn.facts_per_pass or self._at_once(requests), self._find, progress
            )

        return map_valid(self.requests(facts), find)

    def edit(self, sought: Sequence[FoundNeurons]) -> Edit:
        """One edit that moves all the facts."""
        parts = [self._changes(one) for one in sought]
        names = dict.fromkeys(name for part in parts for name in part)
        changes = {
            name: reduce(add_changes, [part[name] for part in parts if name in part])
            for name in names
        }
        found = {
            "answers": [self.lm.tokenizer.decode(list(one.request.answer)) for one in sought],
            "neurons": [[dict(vars(neuron)) for neuron in one.neurons] for one in sought],
            "coarse": [list(one.coarse) for one in sought],
            "gaps": [one.gap for one in sought],
        }
        return Edit(
            changes=changes,
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.kn.method,
            facts=tuple(one.request.fact for one in sought),
            settings={**self.kn.to_dict(), "prefixes": self.prefixes, **found},
        )

    # ---- 1 the questions

    def requests(self, facts: Sequence[Fact]) -> list[NeuronRequest | FactscopeError]:
        """What is read of each fact's old object, or what is wrong with the fact."""
        asked: list[NeuronRequest | FactscopeError] = []
        for fact in facts:
            try:
                asked.append(self._request(fact))
            except BadFact as error:
                asked.append(error)
        return asked

    def _request(self, fact: Fact) -> NeuronRequest:
        said = self._said(fact)
        target = self._coded(fact, fact.target)
        answer = (said,) if fact.old is None else self._coded(fact, fact.old)
        if fact.old is not None and answer == target:
            raise BadFact(
                f"{fact.old!r} is both the old and the new object of {fact.text!r}; say what it "
                "shall be instead"
            )
        contexts = tuple(
            self._readings(context, answer) for context in with_prefixes(fact, self.prefixes)
        )
        return NeuronRequest(fact=fact, target=target, answer=answer, said=said, contexts=contexts)

    @torch.no_grad()
    def _said(self, fact: Fact) -> int:
        """The likeliest token after the fact's prompt."""
        prompt, _ = encode_fact(self.lm, fact)
        ids = torch.tensor([prompt.ids], device=self.lm.device)
        state = self.lm.model.base_model(ids, use_cache=False).last_hidden_state[:, -1]
        return int(self.lm.head(state).argmax())

    def _coded(self, fact: Fact, words: str | None) -> tuple[int, ...]:
        """An object's tokens."""
        if words is None or not words.strip():
            return target_ids(self.lm, replace(fact, target=words))  # which says what is wrong
        if not self.kn.spaced:
            return encode(self.lm, words.strip(), special=False).ids
        prompt, _ = encode_fact(self.lm, fact)
        return continuation_ids(self.lm, prompt, fact.text, words.strip())

    def _readings(self, fact: Fact, answer: tuple[int, ...]) -> tuple[Readout, ...]:
        row = context_row(self.lm, fact, answer, "last")
        if self.kn.reads == "each-token":
            return tuple(
                Readout(ids=row.ids[: at + 1], at=at, answer=token)
                for at, token in zip(row.reads, answer, strict=True)
            )
        end = row.reads[0]
        return tuple(Readout(ids=row.ids[: end + 1], at=end, answer=token) for token in answer)

    # ---- 2 the neurons

    def _at_once(self, requests: Sequence[NeuronRequest]) -> int:
        """How many facts' scores fit beside the walks; on a CPU one fills it."""
        lm = self.lm
        if lm.device.type == "cpu":
            return 1
        readings = max(len(request.readings) for request in requests)
        neurons = lm.n_layers * lm.mlp_weight(0).shape[1] * 4
        return max(1, min(MOST, Budget.of(lm, None).bytes // 8 // (4 * readings * neurons)))

    def _find(
        self, requests: Sequence[NeuronRequest], progress: Progress
    ) -> list[FoundNeurons | FactscopeError]:
        kn = self.kn
        readings = [reading for request in requests for reading in request.readings]
        found = attribute_neurons(
            self.lm, readings, steps=kn.steps, rule=kn.rule, tolerance=kn.tolerance, site=kn.site,
            progress=progress,
        )  # fmt: skip
        sizes = [len(request.readings) for request in requests]
        parts = zip(*(x.split(sizes) for x in vars(found).values()), strict=True)
        return [
            self._chosen(request, NeuronAttributions(**dict(zip(vars(found), part, strict=True))))
            for request, part in zip(requests, parts, strict=True)
        ]

    def _chosen(
        self, request: NeuronRequest, found: NeuronAttributions
    ) -> FoundNeurons | FactscopeError:
        """The neurons that a fact's contexts share."""
        contexts = len(request.contexts)
        # An answer has as many tokens in every context.
        scores, neurons = (
            x.unflatten(0, (contexts, -1)).mean(1) for x in (found.scores, found.neurons)
        )
        if trouble := _trouble(request, scores):
            return trouble
        kn = self.kn
        chosen, coarse = select_neurons(scores, kn.threshold, kn.share, kn.most)
        layer, number = chosen.T
        columns = [x.float().mean(0)[layer, number].tolist() for x in (scores, neurons, coarse)]
        gap = (found.scores.sum(-1) - found.gains).abs().sum() / found.gains.abs().sum()
        return FoundNeurons(
            request=request,
            neurons=tuple(
                Neuron(layer=i, neuron=n, attribution=a, activation=k, share=s)
                for (i, n), a, k, s in zip(chosen.tolist(), *columns, strict=True)
            ),
            coarse=tuple(coarse.sum(-1).float().mean(0).tolist()),
            gap=gap.item(),
        )

    # ---- 3 the edit

    def _changes(self, sought: FoundNeurons) -> dict[str, Change]:
        """In each layer with chosen neurons, their columns moved from the old object to the new."""
        kn, request = self.kn, sought.request
        old = request.answer if kn.old == "answer" else (request.said,)
        direction = kn.new_weight * self._embedding(request.target)
        direction = direction - kn.old_weight * self._embedding(old)
        changes: dict[str, Change] = {}
        for layer in sorted({neuron.layer for neuron in sought.neurons}):
            weight = self.lm.mlp_weight(layer)
            row = torch.zeros(1, weight.shape[1])
            for neuron in sought.neurons:
                if neuron.layer == layer:
                    row[0, neuron.neuron] = self._size(weight[:, neuron.neuron], neuron)
            name = self.lm.name_of(self.lm.mlp_out(layer)) + ".weight"
            changes[name] = LowRank(direction[:, None].clone(), row)
        return changes

    def _size(self, column: Float[Tensor, " value"], neuron: Neuron) -> float:
        """How much of the direction a neuron's column takes."""
        size = column.float().norm().item() if self.kn.unit == "column" else 1.0
        return -size if self.kn.signed and neuron.activation < 0 else size

    def _embedding(self, ids: Sequence[int]) -> Float[Tensor, " value"]:
        """An object as a direction of the residual stream."""
        lm = self.lm
        if self.kn.embedding == "input":
            rows = lm.embed.weight[list(ids)]
        else:
            rows = lm.model.get_output_embeddings().weight[list(ids)]
            for module in reversed(lm.norms):
                if isinstance(module, nn.Linear):  # some OPT have a projection before the head
                    rows = rows @ module.weight
        rows = rows.detach().float().cpu()
        vector = rows.mean(0) if self.kn.tokens == "mean" else rows.sum(0)
        return vector / vector.norm() if self.kn.unit == "column" else vector


def _trouble(
    request: NeuronRequest, scores: Float[Tensor, "context layer neuron"]
) -> DidNotConverge | None:
    """Some neuron must speak for the answer."""
    fact = request.fact
    old = "what the model says" if fact.old is None else repr(fact.old)
    if not scores.isfinite().all():
        return DidNotConverge(
            f"the attributions of {old} after {fact.text!r} are no numbers; load the model in "
            "float32"
        )
    if not scores.amax() > 0:
        return DidNotConverge(
            f"no neuron speaks for {old} after {fact.text!r}; give another old object or prompt"
        )
    return None


PAPER = KN(
    steps=20,
    rule="ends",
    tolerance=None,
    site="before",
    reads="last-position",
    spaced=False,
    share=0.0,
    most=None,
    prefix_lengths=(),
    new_weight=1.0,
    old_weight=2.0,
    old="said",
    unit="embedding",
    signed=False,
    tokens="sum",
    embedding="input",
)
"""What the paper's own code computes: one prompt, no fine selection, and where the new object's
embedding is added once, twice that of what the model says is subtracted."""
