"""Attention in traces: the effects of heads, and of attention knockout; averages over facts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

from factscope.analysis.effects import LAST, effect_sign, one_metric, tokens_with
from factscope.analysis.estimate import Estimate, Estimates, column_estimates
from factscope.errors import BadRecord
from factscope.records import TraceRecord

# ---- heads


def head_effects(record: TraceRecord) -> Float[np.ndarray, "heads tokens layers"]:
    """The indirect effect of each head's output at each token and layer; NaN if not measured."""
    if not record.heads:
        raise BadRecord(f"the trace of {record.fact.text!r} has no heads; trace with --heads")
    cells = np.array(record.heads, dtype=float)
    return effect_sign(record) * (cells - record.base_value)


@dataclass(frozen=True, eq=False, kw_only=True)
class AverageHeads:
    """The average indirect effect of each head at the tokens of one role."""

    model: str
    metric: str
    direction: str
    role: str
    facts: int
    mean: Float[np.ndarray, "heads layers"]
    half_width: Float[np.ndarray, "heads layers"]
    n: Integer[np.ndarray, "heads layers"]

    def __getitem__(self, index: tuple[int, int]) -> Estimate:
        """The effect of a head at a layer."""
        mean, half_width = float(self.mean[index]), float(self.half_width[index])
        return Estimate(mean, half_width, int(self.n[index]), self.metric == "probability")

    def strongest(self, count: int) -> list[tuple[int, int]]:
        """Head and layer of the highest effects, the highest first."""
        order = np.argsort(-self.mean, axis=None, kind="stable")  # NaN is sorted to the end
        order = order[: min(count, np.count_nonzero(self.n))]
        return [divmod(int(i), self.mean.shape[1]) for i in order]


def average_heads(records: Iterable[TraceRecord], role: str = LAST) -> AverageHeads:
    """The mean over a fact's tokens of a role, then over the known facts that have heads."""
    known = [r for r in records if r.known and r.heads]
    if not known:
        raise BadRecord("no known fact was traced with heads; trace with --heads")
    metric, direction = one_metric(known)
    effects = [head_effects(r)[:, tokens_with(r, role)] for r in known]
    shapes = {(len(cells), cells.shape[2]) for cells in effects}
    if len(shapes) != 1:
        raise BadRecord(
            f"the traces have different numbers of heads and layers {sorted(shapes)}; "
            "average the traces of one model at a time"
        )
    shape = shapes.pop()
    # (fact, head · layer); the mean of a fact without tokens of the role is NaN.
    means = [column_estimates(x.transpose(1, 0, 2).reshape(x.shape[1], -1)).mean for x in effects]
    average = column_estimates(np.stack(means))
    return AverageHeads(
        model=known[0].model,
        metric=metric,
        direction=direction,
        role=role,
        facts=len(known),
        mean=average.mean.reshape(shape),
        half_width=average.half_width.reshape(shape),
        n=average.n.reshape(shape),
    )


# ---- knockout (Geva et al., 2023)


def knockout_changes(record: TraceRecord) -> dict[str, Float[np.ndarray, " layers"]]:
    """How attention knockout changes the metric, by group of blocked tokens.

    A probability changes by a fraction of its clean value, other metrics by a difference.
    """
    if not record.knockout:
        raise BadRecord(f"the trace of {record.fact.text!r} has no knockout; trace with --knockout")
    clean, relative = record.clean_value, record.metric == "probability"
    changes = {group: np.array(x, dtype=float) - clean for group, x in record.knockout.items()}
    return {group: x / clean if relative else x for group, x in changes.items()}


@dataclass(frozen=True, kw_only=True)
class AverageKnockout:
    """The mean change by attention knockout over facts, at each layer."""

    model: str
    metric: str
    window: int | None
    facts: int
    changes: Mapping[str, Estimates]  # by group of blocked tokens


def average_knockout(records: Iterable[TraceRecord]) -> AverageKnockout:
    """The mean of `knockout_changes` over the known facts that have them."""
    known = [r for r in records if r.known and r.knockout]
    if not known:
        raise BadRecord("no known fact was traced with knockout; trace with --knockout")
    metric, _ = one_metric(known)
    by_fact = [knockout_changes(record) for record in known]
    lengths = {len(change) for changes in by_fact for change in changes.values()}
    if len(lengths) != 1:
        raise BadRecord(
            f"the traces have different numbers of layers {sorted(lengths)}; "
            "average the traces of one model at a time"
        )
    groups = dict.fromkeys(group for changes in by_fact for group in changes)
    return AverageKnockout(
        model=known[0].model,
        metric=metric,
        window=known[0].settings.get("knockout_window"),
        facts=len(known),
        changes={
            group: column_estimates(
                np.stack([changes[group] for changes in by_fact if group in changes]),
                fraction=metric == "probability",
            )
            for group in groups
        },
    )
