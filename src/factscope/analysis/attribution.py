"""Grade attribution patching: estimated cells against the measured ones of the same trace.

For each known fact that has both, over its cells from the subject's first token on:

1. Pearson and Spearman correlation of estimated and measured effects.
2. Missed: the fraction of the k cells with the largest measured effects that are not among the k
   with the largest estimated ones (false negatives). Effects count by magnitude.
3. To verify: how many cells, the largest estimates first, must be measured to find all those k.

Then the mean over facts with its 95 % interval: for each kind of cell, and within three bands of
layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from factscope.analysis.estimate import Estimate, Estimates, column_estimates, estimate
from factscope.errors import BadRecord
from factscope.records import KINDS, TraceRecord

TOP = 10
"""k: how many of the largest measured effects an estimate should find."""
BANDS = 3
"""Bands of layers, as equal as possible: early, middle, late."""
VERIFIED = 10
"""The recall is computed for up to this many times k verified cells."""

Cells = Float[np.ndarray, " cells"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """How well estimates agree with measured cells of one kind, in some layers."""

    kind: str  # states, mlp, attn or heads
    layers: tuple[int, int]  # [start, stop)
    facts: int
    cells: float  # per fact, the mean
    pearson: Estimate
    spearman: Estimate
    top: int  # k
    missed: Estimate  # fraction of the top k
    to_verify: Estimate  # cells
    recall: Estimates
    """Fraction of the top k found after verifying 1, 2, … cells, the largest estimates first."""


def has_attribution(record: TraceRecord) -> bool:
    """Whether the record has estimated cells besides measured ones of the same kind."""
    return bool(_kinds(record))


def attribution_methods(records: Iterable[TraceRecord]) -> tuple[str, ...]:
    """The methods of the estimates: "atp", "atp-star"."""
    found = (str(r.settings.get("attribution")) for r in records if has_attribution(r))
    return tuple(sorted(set(found)))


def compare_attribution(records: Iterable[TraceRecord], *, top: int = TOP) -> list[Agreement]:
    """For each kind the agreement over all layers, then in each band of layers."""
    known = [record for record in records if record.known and has_attribution(record)]
    if not known:
        raise BadRecord(
            "no known fact has both estimated and measured cells; trace with --attribution"
        )
    rows: list[Agreement] = []
    for kind in (*KINDS, "heads"):
        effects = [cell_effects(r, kind) for r in known if kind in _kinds(r)]
        if not effects:
            continue
        counts = {measured.shape[-1] for measured, _ in effects}
        if len(counts) > 1:
            raise BadRecord(
                f"the traces have different numbers of layers {sorted(counts)}; "
                "compare the traces of one model at a time"
            )
        [layers] = counts
        edges = np.linspace(0, layers, min(BANDS, layers) + 1).round().astype(int).tolist()
        bands = [(0, layers), *pairwise(edges)]
        rows += [_agreement(kind, band, effects, top) for band in dict.fromkeys(bands)]
    return rows


def over_all_layers(agreements: Iterable[Agreement]) -> list[Agreement]:
    """The agreement of each kind over all layers."""
    widest: dict[str, Agreement] = {}
    for agreement in agreements:
        widest.setdefault(agreement.kind, agreement)
    return list(widest.values())


def cell_effects(record: TraceRecord, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Measured and estimated effects of a kind: (…, token, layer), from the subject on."""
    pair = (
        (record.heads, record.head_attribution)
        if kind == "heads"
        else (record.restored[kind], record.attribution[kind])
    )
    first = record.subject[0]  # left of it both runs agree, so that every effect is zero
    measured, estimated = (
        np.array(table, dtype=float)[..., first:, :] - record.base_value for table in pair
    )
    if measured.shape != estimated.shape:
        raise BadRecord(
            f"the trace of {record.fact.text!r} has {measured.shape} measured and "
            f"{estimated.shape} estimated cells of {kind}; trace the fact again"
        )
    return measured, estimated


def _kinds(record: TraceRecord) -> list[str]:
    kinds = [kind for kind in record.attribution if kind in record.restored]
    return [*kinds, "heads"] if record.heads and record.head_attribution else kinds


def _agreement(
    kind: str,
    band: tuple[int, int],
    effects: Sequence[tuple[np.ndarray, np.ndarray]],
    top: int,
) -> Agreement:
    cells = [tuple(x[..., slice(*band)].ravel() for x in pair) for pair in effects]
    top = min(top, *(len(measured) for measured, _ in cells))
    places = [places_of_top(measured, estimated, top) for measured, estimated in cells]
    verified = np.arange(1, VERIFIED * top + 1)
    found = np.stack([(p[:, None] < verified).mean(0) for p in places])
    return Agreement(
        kind=kind,
        layers=band,
        facts=len(cells),
        cells=float(np.mean([len(measured) for measured, _ in cells])),
        pearson=estimate((correlation(*pair) for pair in cells), fraction=False),
        spearman=estimate((correlation(*map(ranks, pair)) for pair in cells), fraction=False),
        top=top,
        missed=estimate(float((p >= top).mean()) for p in places),
        to_verify=estimate((float(p.max() + 1) for p in places), fraction=False),
        recall=column_estimates(found),
    )


def places_of_top(measured: Cells, estimated: Cells, top: int) -> np.ndarray:
    """The places, from 0, that the estimates give to the cells with the largest measured effects;
    largest estimates first."""
    place = np.empty(len(estimated), dtype=int)
    place[np.argsort(-np.abs(estimated), kind="stable")] = np.arange(len(estimated))
    return place[np.argsort(-np.abs(measured), kind="stable")[:top]]


def correlation(x: Cells, y: Cells) -> float:
    """Pearson's correlation; NaN if either side is constant or has fewer than two values."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else float("nan")


def ranks(x: Cells) -> Cells:
    """The rank of each value; equal values share their mean rank."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]
