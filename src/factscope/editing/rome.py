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
last token ("Honda CB1100" beside "Honda ST1100"). With `contrast_tolerance`, keys of this token
after other beginnings of the subject are further rows of K, and wᵀk should be 0 for them: a soft
constraint, whose tolerance ε makes the diagonal entry of K C⁻¹Kᵀ larger by the factor 1 + ε.

For several facts at once, K has the rows of all of them, and the w of a fact has wᵀk = 1 for its
own rows and 0 for those of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.contexts import EditRequest, contrast_keys, resolve_prefixes
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
        self.settings = replace(
            settings,
            layer=self.layer,
            prefixes=self.prefixes,
            contrast_tolerance=settings.contrast_tolerance or defaults.contrast_tolerance,
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
        change = insert(self.constraints(values), self.residuals(values))
        return self.new_edit(values, {self.weight_name: change})

    def insert_jointly(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """One update of all values."""
        return [self.insert(values)]

    def insert_each(self, values: list[ValueResult]) -> list[Edit | FactscopeError]:
        """A rank-one update of each value on its own."""
        changes = insert_each(update_directions(self.constraints(values)), self.residuals(values))
        return results_or_errors(
            lambda v, change: self.new_edit([v], {self.weight_name: change}), values, changes
        )

    def scales(
        self, keys: Float[Tensor, "fact row key"], contrast: Float[Tensor, "fact contrast key"]
    ) -> Float[Tensor, "fact row"] | None:
        """wᵀk of the contexts and of the KL prompt, which is the last row."""
        if not self.settings.scale_delta:
            return None
        w = update_directions(self._constraints(keys[:, :-1], contrast))
        return (keys.double() @ w[:, :, None])[:, :, 0]

    def contrast_keys(
        self, requests: Sequence[EditRequest]
    ) -> Float[Tensor, "fact contrast key"] | None:
        """Keys that should receive no δ; None without a tolerance for them."""
        if self.settings.contrast_tolerance in (None, "inf"):
            return None
        facts = [request.fact for request in requests]
        return contrast_keys(self.lm, facts, self.layer, self.settings.token, self.settings.seed)

    def residuals(self, values: Sequence[ValueResult]) -> Float[Tensor, "fact value"]:
        """v* - W k of each fact: δ, if v* and k are both means or both of the bare prompt."""
        bare = torch.stack([x.values[0] for x in values])
        mean = torch.stack([x.values.mean(0) for x in values])
        v = bare if self.settings.value == "bare" else mean
        W_k = bare if self.settings.key == "bare" else mean
        return v + torch.stack([x.delta for x in values]) - W_k

    def division_factors(self, values: Sequence[ValueResult]) -> list[float]:
        """The cosine between each fact's key and w: ‖ΔW‖ is inversely proportional to it."""
        constraints = self.constraints(values)
        w, k = update_directions(constraints), constraints.K[:, 0].double()
        # The sign is that of C⁻¹k* and the bare prompt's key, where the two are combined.
        sign = (constraints.U[:, 0] * k).sum(-1)
        return torch.copysign(1 / (w.norm(dim=-1) * k.norm(dim=-1)), sign).tolist()

    def constraints(self, values: Sequence[ValueResult]) -> "Constraints":
        """What the w of each fact must do."""
        keys, contrast = zip(*((x.keys, x.contrast) for x in values), strict=True)
        return self._constraints(torch.stack(keys), torch.stack(contrast))

    def _constraints(
        self, keys: Float[Tensor, "fact context key"], contrast: Float[Tensor, "fact contrast key"]
    ) -> "Constraints":
        mean, bare = keys.mean(1, keepdim=True), keys[:, :1]
        exact = {"mean": [mean], "bare": [bare], "mean-and-bare": [mean, bare]}[self.settings.key]
        sources = [mean] if self.settings.key == "bare" else exact
        tolerance, near = self.settings.context_tolerance, keys
        if keys.shape[1] == 1:  # without prefixes all of them are the same
            exact = sources = [bare]
        if keys.shape[1] == 1 or tolerance is None:
            near = keys[:, :0]
        U = self.directions(torch.cat([*sources, near, contrast], 1).flatten(0, 1))
        # The number of keys, their target and their tolerance.
        away = float(self.settings.contrast_tolerance or 0)
        groups = [(len(exact), 1.0, 0.0), (near.shape[1], 1.0, tolerance or 0.0)]
        groups += [(contrast.shape[1], 0.0, away)]
        targets = [target for n, target, _ in groups for _ in range(n)]
        tolerances = [tolerance for n, _, tolerance in groups for _ in range(n)]
        return Constraints(
            K=torch.cat([*exact, near, contrast], 1),
            U=U.unflatten(0, (len(keys), -1)),
            targets=torch.tensor(targets, device=keys.device),
            tolerances=torch.tensor(tolerances, device=keys.device),
        )

    def directions(self, keys: Float[Tensor, "n key"]) -> Float[Tensor, "n key"]:
        """C⁻¹k for each key."""
        if self.second_moment is None:
            return keys
        return self.second_moment.solve(keys, ridge=self.settings.ridge)


# ---- the closed form


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraints:
    """The values of wᵀk for the rows k of K."""

    K: Float[Tensor, "fact constraint key"]
    U: Float[Tensor, "fact constraint key"]
    """The vectors that w is composed of: C⁻¹k of each row, of the mean key for `key="bare"`."""
    targets: Float[Tensor, " constraint"]
    """wᵀk: 1 for the fact's own keys, 0 for contrast keys."""
    tolerances: Float[Tensor, " constraint"]
    """ε of soft constraints; 0 where wᵀk is exact."""


def insert(constraints: Constraints, residuals: Float[Tensor, "fact value"]) -> LowRank:
    """One update that changes the values of every fact's keys by its residual."""
    K, U, targets = constraints.K, constraints.U, constraints.targets
    dual = _dual(K.flatten(0, 1), U.flatten(0, 1), constraints.tolerances.repeat(len(K)))
    A = (dual.unflatten(0, (len(K), -1)) * targets[:, None]).sum(1)
    return LowRank(residuals.T.float().contiguous().cpu(), A.float().cpu())


def insert_each(
    directions: Float[Tensor, "fact key"], residuals: Float[Tensor, "fact value"]
) -> list[LowRank]:
    """A rank-one update for each fact on its own."""
    A, B = directions.float().cpu(), residuals.float().cpu()
    return [LowRank(b[:, None].clone(), a[None].clone()) for a, b in zip(A, B, strict=True)]


def update_directions(constraints: Constraints) -> Float[Tensor, "fact key"]:
    """w of each fact on its own, in float64."""
    dual = _dual(constraints.K, constraints.U, constraints.tolerances)
    return (dual * constraints.targets[:, None]).sum(1)


def _dual(
    K: Float[Tensor, "*fact constraint key"],
    U: Float[Tensor, "*fact constraint key"],
    tolerances: Float[Tensor, " constraint"],
) -> Float[Tensor, "*fact constraint key"]:
    """(U Kᵀ)⁻¹ U in float64: of each constraint, the vector that is 1 on it and 0 on the others.

    The length of a row of U cancels, and C⁻¹k can be tiny. Keys may be equal: in the first layer of
    some families the mean key is the bare prompt's. The pseudo-inverse then counts them once.
    """
    U = U.double()
    U = U / U.norm(dim=-1, keepdim=True)
    products = U @ K.double().mT * (1 + tolerances.double().diag())
    return torch.linalg.pinv(products, rtol=EQUAL_KEYS**2) @ U
