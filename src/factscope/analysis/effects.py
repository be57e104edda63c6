"""Average indirect effects: many facts' traces → one effect per token role and layer (§2.2).

1. Take the facts that the model knows; the others are counted and left out.
2. Give every token its role (`roles`), so that prompts of different words line up.
3. Average IE = P*,clean h[o] - P*[o] over the tokens of a role in a fact, then over facts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Integer

from factscope.analysis.estimate import Estimate, Estimates, column_estimates, estimate
from factscope.analysis.grids import baseline, grid, has_table, indirect_effects, kinds_of
from factscope.analysis.roles import ROLES, roles, tokens_with
from factscope.errors import BadRecord, BadSetting
from factscope.records import TraceRecord

__all__ = [
    "ROLES",
    "AverageEffects",
    "Pooling",
    "Site",
    "average_effects",
    "average_kinds",
    "early_site",
    "late_site",
    "roles",
]

Pooling = Literal["facts", "tokens"]
"""What is averaged over, and so what the interval is about."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AverageEffects:
    """The average indirect effect (AIE) of restoring each token role at each layer."""

    table: str
    """Which table was averaged: see `grids.TABLES`."""
    model: str
    window: int | None
    """How many layers a window of MLP or attention outputs spans, where the records say."""
    pooling: Pooling
    mean: Float[np.ndarray, "roles layers"]
    half_width: Float[np.ndarray, "roles layers"]
    n: Integer[np.ndarray, "roles layers"]
    facts: int
    """The known facts that have the table."""
    skipped: int
    """The facts left out because the model does not know them."""
    clean: Estimate
    """P[o] over the facts."""
    corrupted: Estimate
    """P*[o] over the facts."""
    total: Estimate
    """ATE, the average total effect P[o] - P*[o]."""
    best_at_subject: Estimate
    """The mean over facts of the best score at the subject's last token (App. B)."""
    best_anywhere: Estimate
    """The mean over facts of the best score at any token."""
    roles: tuple[str, ...] = ROLES

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.mean.shape[1]

    def row(self, role: str) -> Estimates:
        """The AIE of a role, layer by layer."""
        if role not in self.roles:
            raise BadSetting(f"no role {role!r}; there are: {', '.join(self.roles)}")
        i = self.roles.index(role)
        return Estimates(self.mean[i], self.half_width[i], self.n[i])

    def measured(self, role: str) -> bool:
        """Whether any fact has a measured cell of this role."""
        return bool(self.row(role).n.any())

    def peak(self, role: str) -> tuple[int, Estimate]:
        """The layer where the role's AIE is highest, and that AIE."""
        if not self.measured(role):
            raise BadRecord(f"no cell of the {role!r} was measured in {self.facts} facts")
        row = self.row(role)
        layer = int(np.nanargmax(row.mean))
        return layer, row[layer]


def average_effects(
    records: Iterable[TraceRecord],
    table: str = "states",
    *,
    pooling: Pooling = "facts",
    paper_roles: bool = False,
) -> AverageEffects:
    """The average effects of the known facts that have the table.

    `pooling="facts"` takes the mean over a fact's tokens of a role, then over facts, so that each
    fact weighs the same and the interval is over facts. `pooling="tokens"` with `paper_roles` is
    how the paper's figures were made: the scores of all tokens of a role are pooled, the mean
    corrupted score over facts is taken off, and the interval is that of the scores.
    """
    everyone = list(records)
    known = [r for r in everyone if r.known and has_table(r, table)]
    if not known:
        raise BadRecord(
            f"none of {len(everyone)} records is a known fact with the table {table!r}; "
            "trace more facts, or name another table"
        )
    layers = common_layers(known, table)
    pool = {"facts": pool_facts, "tokens": pool_tokens}[pooling]
    rows = [pool(known, table, role, paper_roles, layers) for role in ROLES]
    return AverageEffects(
        table=table,
        model=known[0].model,
        window=known[0].settings.get("window"),
        pooling=pooling,
        mean=np.stack([row.mean for row in rows]),
        half_width=np.stack([row.half_width for row in rows]),
        n=np.stack([row.n for row in rows]),
        facts=len(known),
        skipped=sum(not r.known for r in everyone),
        clean=estimate(r.clean for r in known),
        corrupted=estimate(r.corrupted for r in known),
        total=estimate(r.total_effect for r in known),
        best_at_subject=estimate(
            highest(grid(r, table)[r.subject[1] - 1])
            for r in known
            if r.subject[1] < len(r.tokens)  # else that token is the late site
        ),
        best_anywhere=estimate(highest(grid(r, table)) for r in known),
    )


def average_kinds(
    records: Iterable[TraceRecord], *, pooling: Pooling = "facts", paper_roles: bool = False
) -> dict[str, AverageEffects]:
    """The average effects of every kind that the known facts restored."""
    everyone = list(records)
    kinds = kinds_of(r for r in everyone if r.known)
    return {
        kind: average_effects(everyone, kind, pooling=pooling, paper_roles=paper_roles)
        for kind in kinds
    }


def common_layers(records: Sequence[TraceRecord], table: str) -> int:
    """The number of layers, which the records must share."""
    counts = {grid(record, table).shape[1] for record in records}
    if len(counts) != 1:
        raise BadRecord(
            f"the traces have different numbers of layers {sorted(counts)}; "
            "average the traces of one model at a time"
        )
    return counts.pop()


def pool_facts(
    records: Sequence[TraceRecord], table: str, role: str, paper: bool, layers: int
) -> Estimates:
    """Over facts: of each fact the mean effect over its tokens of the role."""
    means = [
        column_estimates(indirect_effects(r, table)[tokens]).mean
        for r in records
        if (tokens := tokens_with(r, role, paper=paper))
    ]
    return column_estimates(np.array(means, dtype=float).reshape(-1, layers))


def pool_tokens(
    records: Sequence[TraceRecord], table: str, role: str, paper: bool, layers: int
) -> Estimates:
    """Over tokens: all scores of the role, less the facts' mean corrupted score."""
    scores = [grid(r, table)[tokens_with(r, role, paper=paper)] for r in records]
    pooled = column_estimates(np.concatenate(scores).reshape(-1, layers), ddof=0)
    corrupted = np.mean([baseline(r, table) for r in records])
    return Estimates(pooled.mean - corrupted, pooled.half_width, pooled.n)


def highest(cells: np.ndarray) -> float:
    """The highest measured cell; NaN where none was measured."""
    measured = cells[~np.isnan(cells)]
    return float(measured.max()) if measured.size else float("nan")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the effect of a role peaks: the paper's early and late site."""

    role: str
    layer: int
    effect: Estimate
    stands_out: bool | None = None
    """Whether the effect exceeds that of every other role but the last token at this layer, the
    intervals not overlapping; None where it was not asked."""

    @property
    def excludes_zero(self) -> bool:
        """Whether the effect's interval excludes zero."""
        return self.effect.excludes_zero


def early_site(effects: AverageEffects) -> Site:
    """The peak at the subject's last token, and whether it stands out from the other tokens."""
    role = "last subject token"
    layer, peak = effects.peak(role)
    rivals = [effects.row(r)[layer] for r in effects.roles if r not in (role, "last token")]
    stands_out = all(peak.exceeds(rival) for rival in rivals if rival.n)
    return Site(role=role, layer=layer, effect=peak, stands_out=stands_out)


def late_site(effects: AverageEffects) -> Site:
    """The peak at the prompt's last token."""
    layer, peak = effects.peak("last token")
    return Site(role="last token", layer=layer, effect=peak)
