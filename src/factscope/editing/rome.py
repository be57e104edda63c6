"""ROME: write one fact into one MLP output weight by a rank-one update (paper §3.1).

The weight W is seen as a linear associative memory W k ≈ v: a key k represents the subject, its
value v what the model knows about it. A fact is written in three steps:

    1. keys: at the subject's last token, of the bare prompt and, averaged, of several contexts
    2. δ: a change of the value that makes the model predict the new object (value_search.py)
    3. ΔW = δ wᵀ: the value of a key k changes by δ (wᵀk). Of all w with wᵀk = 1 for the rows k of
       K, w = C⁻¹Kᵀ (K C⁻¹Kᵀ)⁻¹ 1 has the smallest wᵀC w: it disturbs other keys least, C = E[k kᵀ]
       being their second moment

With the mean key k* as the only row this is eq. 2 of the paper: ΔW = Λ (C⁻¹k*)ᵀ with
Λ = (v* - W k*) / ((C⁻¹k*)ᵀ k*). The bare prompt, whose key differs from the mean, then receives
only a part of δ; so by default its key is the second row. w is known before the search, and the
search adds in each context the part of δ that the edit will add there.

C does not protect the keys that are closest to the fact's: those of other subjects with the same
last token ("Honda CB1100" beside "Honda ST1100"), and in some models those of the first tokens of
texts. `contrast_keys` are examples of both. With `contrast_tolerance` ε they are added to C, as
k kᵀ / (ε kᵀC⁻¹k), so that wᵀk is small for them. With `context_tolerance`, so are the differences
of the keys after many sentences from the mean key, so that wᵀk is about 1 for each of them: what
tells the fact from the contrast keys must not depend on the context.

For several facts at once, K has the rows of all of them, and the w of a fact has wᵀk = 1 for its
own rows and 0 for those of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.added_keys import SENTENCES, contrast_keys, sentence_keys
from factscope.editing.contexts import EditRequest, resolve_prefixes
from factscope.editing.defaults import resolve_layer, resolve_second_moment, rome_defaults
from factscope.editing.edit import Edit, LowRank
from factscope.editing.editor import results_or_errors
from factscope.editing.per_row import edited
from factscope.editing.settings import Rome
from factscope.editing.value_search import BoundValueEditor, ValueResult
from factscope.errors import FactscopeError
from factscope.facts import Fact
from factscope.progress import Progress, split

if TYPE_CHECKING:
    from factscope.lm.model import LM


EQUAL_KEYS = 1e-5
"""Keys whose relative difference is below this count as equal: it may be rounding."""
FACTS_AT_ONCE = 64
"""Facts whose w is computed at once."""
CONTEXT_TOLERANCE = 0.3
"""`context_tolerance` where contrast keys are added to C, at whose expense paraphrases would
otherwise receive less of δ."""


class BoundRome(BoundValueEditor[Rome]):
    """ROME bound to a model, every default resolved."""

    site = "mlp"

    def __init__(self, settings: Rome, lm: "LM", facts: Sequence[Fact]) -> None:
        self.lm = lm
        self.layer = resolve_layer(lm, settings.layer, facts, settings.second_moment)
        self.weight_name = lm.name_of(lm.mlp_out(self.layer)) + ".weight"
        self.prefixes = resolve_prefixes(lm, settings)
        defaults = rome_defaults(lm)
        self.search = settings.search.resolve(
            clamp=defaults.clamp, lr=defaults.lr, weight_decay=defaults.weight_decay
        )
        self.second_moment = resolve_second_moment(lm, self.layer, settings.second_moment)
        contrast = settings.contrast_tolerance or defaults.contrast_tolerance
        context = settings.context_tolerance or ("inf" if contrast == "inf" else CONTEXT_TOLERANCE)
        self.contrast_tolerance, self.context_tolerance = float(contrast), float(context)
        self.settings = replace(
            settings,
            layer=self.layer,
            prefixes=self.prefixes,
            contrast_tolerance=contrast,
            context_tolerance=context,
            search=self.search,
            second_moment=self.second_moment or "identity",
        )

    def unchecked_edit(self, facts: Sequence[Fact], progress: Progress) -> tuple[Edit, list[float]]:
        """One edit for all facts, jointly or one after the other, and their division factors."""
        if len(facts) == 1 or self.settings.many == "jointly":
            return super().unchecked_edit(facts, progress)
        # One update after the other, each computed on the model with those before it.
        total: Edit | None = None
        factors: list[float] = []
        for fact, part in zip(facts, split(progress, [1] * len(facts)), strict=True):
            with edited(self.lm, [total]):
                edit, factor = super().unchecked_edit([fact], part)
            total = edit if total is None else total + edit
            factors += factor
        assert total is not None
        return total, factors

    # ---- step 3

    def insert(self, values: Sequence[ValueResult]) -> Edit:
        """One edit for all facts."""
        constraints = self._constraints(*_keys_of(values), jointly=True)
        change = insert(*constraints, self.residuals(values))
        return self.new_edit(values, {self.weight_name: change})

    def insert_jointly(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """One update of all values."""
        return [self.insert(values)]

    def insert_each(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """A rank-one update of each value on its own."""
        w = self.update_directions(*_keys_of(values))
        changes = insert_each(w, self.residuals(values))
        return results_or_errors(
            lambda v, change: self.new_edit([v], {self.weight_name: change}), values, changes
        )

    def scales(
        self, keys: Float[Tensor, "fact row key"], added: Float[Tensor, "fact added key"]
    ) -> Float[Tensor, "fact row"] | None:
        """wᵀk of the contexts and of the KL prompt, which is the last row."""
        if not self.settings.scale_delta:
            return None
        w = self.update_directions(keys[:, :-1], added)
        return (keys.double() @ w[:, :, None])[:, :, 0]

    def added_keys(self, requests: Sequence[EditRequest]) -> list[Float[Tensor, "fact added key"]]:
        """What is added to C is computed from these: contrast keys, and keys after sentences."""
        facts = [request.fact for request in requests]
        kinds = ((self.contrast_tolerance, contrast_keys), (self.context_tolerance, sentence_keys))
        return [
            read(self.lm, facts, self.layer, self.settings.token, self.settings.seed)
            for tolerance, read in kinds
            if tolerance < math.inf
        ]

    def update_directions(
        self, keys: Float[Tensor, "fact context key"], added: Float[Tensor, "fact added key"]
    ) -> Float[Tensor, "fact key"]:
        """w of each fact on its own."""
        parts = zip(keys.split(FACTS_AT_ONCE), added.split(FACTS_AT_ONCE), strict=True)
        return torch.cat([update_directions(*self._constraints(k, a)) for k, a in parts])

    def residuals(self, values: Sequence[ValueResult]) -> Float[Tensor, "fact value"]:
        """v* - W k of each fact: δ, if v* and k are both means or both of the bare prompt."""
        bare = torch.stack([x.values[0] for x in values])
        mean = torch.stack([x.values.mean(0) for x in values])
        v = bare if self.settings.value == "bare" else mean
        W_k = bare if self.settings.key == "bare" else mean
        return v + torch.stack([x.delta for x in values]) - W_k

    def division_factors(self, values: Sequence[ValueResult]) -> list[float]:
        """The cosine between each fact's key and w: ‖ΔW‖ is inversely proportional to it."""
        keys, added = _keys_of(values)
        w, mean = self.update_directions(keys, added), keys.mean(1)
        k = keys[:, 0] if self.settings.key == "bare" else mean
        # The sign is that of the divisor, which is negative only where wᵀk* is.
        return torch.copysign(1 / (w.norm(dim=-1) * k.norm(dim=-1)), (w * mean).sum(-1)).tolist()

    def _constraints(
        self,
        keys: Float[Tensor, "fact context key"],
        added: Float[Tensor, "fact added key"],
        *,
        jointly: bool = False,
    ) -> tuple[Float[Tensor, "fact constraint key"], Float[Tensor, "fact constraint key"]]:
        """The keys k with wᵀk = 1, and the vectors C⁻¹k that w is composed of. `jointly`, what is
        added to C is that of all facts."""
        mean, bare = keys.mean(1, keepdim=True), keys[:, :1]
        rows = {"mean": [mean], "bare": [bare], "mean-and-bare": [mean, bare]}[self.settings.key]
        if keys.shape[1] == 1:  # without prefixes both are the same
            rows = [bare]
        K = torch.cat(rows, 1)
        source = mean if self.settings.key == "bare" else K
        R, solved, slack = self._soft_constraints(keys, added)
        if jointly:
            source, R, solved = (x.flatten(0, 1)[None] for x in (source, R, solved))
            slack = slack.flatten()[None]
        U = add_to_moment(self.directions(source.double()), R, solved, slack)
        return K, U.reshape(len(K), -1, K.shape[-1])

    def _soft_constraints(
        self, keys: Float[Tensor, "fact context key"], added: Float[Tensor, "fact added key"]
    ) -> tuple[
        Float[Tensor, "fact row key"], Float[Tensor, "fact row key"], Float[Tensor, "fact row"]
    ]:
        """Vectors r with small wᵀr, C⁻¹r, and the slack of each: the contrast keys, and the
        differences of the keys in all contexts from the mean key."""
        mean = keys.double().mean(1, keepdim=True)
        contrast, contexts = added.double(), keys[:, :0].double()
        if self.context_tolerance < math.inf:
            contrast, after_sentences = contrast.tensor_split([-SENTENCES], 1)
            contexts = torch.cat([keys, after_sentences], 1)
        R = torch.cat([contrast, contexts - mean], 1)
        solved = self.directions(R)
        size = (contrast * solved[:, : contrast.shape[1]]).sum(-1)
        mean_size = (mean * self.directions(mean)).sum(-1).expand(contexts.shape[:2])
        slack = [self.contrast_tolerance * size, self.context_tolerance * mean_size]
        return R, solved, torch.cat(slack, 1)

    def directions(self, keys: Float[Tensor, "fact n key"]) -> Float[Tensor, "fact n key"]:
        """C⁻¹k for each key."""
        if self.second_moment is None:
            return keys
        flat = self.second_moment.solve(keys.flatten(0, 1), ridge=self.settings.ridge)
        return flat.reshape(keys.shape)


def _keys_of(
    values: Sequence[ValueResult],
) -> tuple[Float[Tensor, "fact context key"], Float[Tensor, "fact added key"]]:
    return torch.stack([x.keys for x in values]), torch.stack([x.added for x in values])


# ---- the closed form
#
# K holds the keys of the constraints, U = K C⁻¹.


def insert(
    K: Float[Tensor, "fact constraint key"],
    U: Float[Tensor, "fact constraint key"],
    residuals: Float[Tensor, "fact value"],
) -> LowRank:
    """One update that changes the values of every fact's keys by its residual."""
    A = _dual(K.flatten(0, 1), U.flatten(0, 1)).unflatten(0, (len(K), -1)).sum(1)
    return LowRank(residuals.T.float().contiguous().cpu(), A.float().cpu())


def insert_each(
    directions: Float[Tensor, "fact key"], residuals: Float[Tensor, "fact value"]
) -> list[LowRank]:
    """A rank-one update for each fact on its own."""
    A, B = directions.float().cpu(), residuals.float().cpu()
    return [LowRank(b[:, None].clone(), a[None].clone()) for a, b in zip(A, B, strict=True)]


def update_directions(
    K: Float[Tensor, "fact constraint key"], U: Float[Tensor, "fact constraint key"]
) -> Float[Tensor, "fact key"]:
    """w of each fact on its own, in float64."""
    return _dual(K, U).sum(1)


def add_to_moment(
    U: Float[Tensor, "fact n key"],
    R: Float[Tensor, "fact row key"],
    solved: Float[Tensor, "fact row key"],
    slack: Float[Tensor, "fact row"],
) -> Float[Tensor, "fact n key"]:
    """C⁻¹k for each row k of U C, with C + Σ r rᵀ / slack over the rows r of R in the place of C,
    given R C⁻¹: by Woodbury's formula, or as (I + C⁻¹Σ)⁻¹C⁻¹k, which is smaller where R has more
    rows than columns."""
    _, rows, width = R.shape
    if rows == 0:
        return U
    U, R, solved = U.double(), R.double(), solved.double()
    # A key of zeros, which ReLU can give, has no slack and would make a matrix singular.
    slack = slack.clamp_min(torch.finfo(slack.dtype).tiny)
    if rows > width:
        factor = torch.eye(width).to(R) + (solved / slack[..., None]).mT @ R
        return torch.linalg.solve(factor, U.mT).mT
    return U - U @ R.mT @ torch.linalg.solve(R @ solved.mT + slack.diag_embed(), solved)


def _dual(
    K: Float[Tensor, "*fact constraint key"], U: Float[Tensor, "*fact constraint key"]
) -> Float[Tensor, "*fact constraint key"]:
    """(U Kᵀ)⁻¹ U in float64: of each constraint, the vector that is 1 on it and 0 on the others.

    The length of a row of U cancels, and C⁻¹k can be tiny. Keys may be equal: in the first layer of
    some families the mean key is the bare prompt's. The pseudo-inverse then counts them once.
    """
    U = U.double()
    U = U / U.norm(dim=-1, keepdim=True)
    return torch.linalg.pinv(U @ K.double().mT, rtol=EQUAL_KEYS**2) @ U
