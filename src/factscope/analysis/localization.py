"""Does localization inform editing? Trace effects and edit success by layer (Hase et al., 2023).

1. Trace effect of a fact at a layer: the indirect effect of the cell at the last subject token.
2. Edit success of the fact at that layer: the rewrite score (P'(o*) - P(o*)) / (1 - P(o*)), where P
   is the unedited and P' the edited model; 1 means that the new object became certain. For zsRE,
   where only tokens are scored, it is the fraction of the answer's tokens that are correct.
3. If tracing says where to edit, facts with a larger effect at a layer are easier to edit there:
   the correlation over facts within a layer is positive. The paper finds it near zero.
4. How much of the success does the layer alone explain (R² of a linear regression on the layer),
   and how much more the layer and the trace effect together?

The facts of a run of traces are joined with the cases of a layer sweep.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from factscope.analysis.attribution import correlation
from factscope.analysis.effects import indirect_effects, kinds_of
from factscope.analysis.estimate import Z95, Estimate, Estimates, column_estimates, estimate
from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import CaseRecord, TraceRecord


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Pearson's correlation with its 95 % confidence interval (Fisher's transformation)."""

    value: float
    low: float  # NaN for fewer than four pairs
    high: float
    n: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Localization:
    """The relation of trace effects of one kind and edit success, over facts and layers."""

    kind: str
    layers: tuple[int, ...]
    facts: int
    effect: Estimates  # by layer: mean over facts
    success: Estimates
    across_layers: Correlation  # of the two means
    within_layer: tuple[Correlation, ...]  # over facts, at each layer
    within_fact: Estimate  # over facts: the correlation over the layers of one fact
    explained_by_layer: float  # R²
    explained_by_both: float


def localizations(
    traces: Iterable[TraceRecord], cases: Mapping[int, Sequence[CaseRecord]]
) -> list[Localization]:
    """The relation for each kind of trace; `cases` are a sweep's records by layer."""
    # Facts that are known and whose subject does not end the prompt (see `effects.roles`).
    usable = [r for r in traces if r.known and r.restored and r.subject[1] < len(r.tokens)]
    edited = [record for records in cases.values() for record in records]
    by_id = all(record.fact.id for record in (*usable, *edited))

    def name(fact: Fact) -> tuple[str, str | None]:
        """What a fact has in common with its edit: `find-known` extends prompts but keeps ids."""
        return fact.subject, fact.id if by_id else fact.text

    scores = {layer: {name(r.fact): edit_success(r) for r in cases[layer]} for layer in cases}
    measured = {layer for layer in cases if not all(map(math.isnan, scores[layer].values()))}
    layers = tuple(sorted(measured))
    joined: list[TraceRecord] = []
    success: list[list[float]] = []
    for record in usable:
        row = [scores[layer].get(name(record.fact), math.nan) for layer in layers]
        if not all(map(math.isnan, row)):
            joined.append(record)
            success.append(row)
    if len(layers) < 2 or len(joined) < 2:
        raise BadRecord(
            f"{len(joined)} traced facts were also edited, at {len(layers)} layers; two of each "
            "are needed: trace and sweep the same facts"
        )
    kinds = kinds_of(joined)
    effects = {kind: np.stack([_effects(r, kind, layers) for r in joined]) for kind in kinds}
    return [_relation(kind, layers, effects[kind], np.array(success)) for kind in kinds]


def edit_success(record: CaseRecord) -> float:
    """The rewrite score, or the fraction of correct tokens; NaN if it was not measured."""
    if record.after is None:
        return math.nan
    if correct := record.after.token_correct.get("prompt"):
        return sum(correct) / len(correct)
    after = record.after.prompts.get("prompt")
    before = record.before.prompts.get("prompt") if record.before else None
    if not after or not before:
        return math.nan
    old, new = math.exp(-before[0].new), math.exp(-after[0].new)
    return (new - old) / (1 - old) if old < 1 else math.nan


def _effects(record: TraceRecord, kind: str, layers: Sequence[int]) -> Float[np.ndarray, " layers"]:
    """The effects at the last subject token; NaN without a table of this kind."""
    if kind not in record.restored:
        return np.full(len(layers), np.nan)
    row = indirect_effects(record, kind)[record.subject[1] - 1]
    if layers[-1] >= len(row):
        raise BadRecord(
            f"the sweep edits layer {layers[-1]}, but {record.model} was traced at {len(row)} "
            "layers; give the traces and the sweep of one model"
        )
    return row[list(layers)]


def _relation(
    kind: str,
    layers: tuple[int, ...],
    effects: Float[np.ndarray, "facts layers"],
    success: Float[np.ndarray, "facts layers"],
) -> Localization:
    both = ~np.isnan(effects) & ~np.isnan(success)
    effects, success = (np.where(both, x, np.nan) for x in (effects, success))
    mean_effect, mean_success = column_estimates(effects), column_estimates(success)
    pairs = [(x[used], y[used]) for x, y, used in zip(effects, success, both, strict=True)]
    within = [
        correlate(x[used], y[used]) for x, y, used in zip(effects.T, success.T, both.T, strict=True)
    ]
    return Localization(
        kind=kind,
        layers=layers,
        facts=int(both.any(axis=1).sum()),
        effect=mean_effect,
        success=mean_success,
        across_layers=correlate(mean_effect.mean, mean_success.mean),
        within_layer=tuple(within),
        within_fact=estimate((correlation(x, y) for x, y in pairs if len(x) > 1), fraction=False),
        explained_by_layer=_explained(effects, success, both, with_effect=False),
        explained_by_both=_explained(effects, success, both, with_effect=True),
    )


def correlate(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> Correlation:
    """Pearson's correlation with its interval: tanh(artanh(r) ± 1.96 / √(n - 3))."""
    n = len(x)
    value = correlation(x, y) if n else math.nan
    if n < 4 or math.isnan(value):
        return Correlation(value=value, low=math.nan, high=math.nan, n=n)
    z, half = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value))), Z95 / math.sqrt(n - 3)
    return Correlation(value=value, low=math.tanh(z - half), high=math.tanh(z + half), n=n)


def _explained(
    effects: Float[np.ndarray, "facts layers"],
    success: Float[np.ndarray, "facts layers"],
    used: np.ndarray,
    *,
    with_effect: bool,
) -> float:
    """R² of a linear regression of edit success on the layer, as a category, and on the effect."""
    layer = np.nonzero(used)[1]
    columns = np.eye(effects.shape[1])[layer]
    if with_effect:
        columns = np.column_stack([columns, effects[used]])
    y = success[used]
    residual = y - columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
    total = ((y - y.mean()) ** 2).sum()
    return float(1 - (residual**2).sum() / total) if total > 0 else math.nan
