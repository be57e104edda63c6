"""Average indirect effects: many facts' traces → one effect per token role and layer (§2.2).

1. Take the facts that the model knows; the others are counted and left out.
2. Give every token its role (`roles`), so that prompts of different words line up.
3. Average IE = P*,clean h[o] - P*[o] over the tokens of a role in a fact, then over facts.

The tables of a trace by name, as arrays: probabilities, and the indirect effects they mean.

A name says what was done: "mlp" restores windows of MLP outputs; "states severed mlp" restores
single states in the graph where the MLP is severed; "gradients mlp" holds integrated gradients.

The part that each token plays in its prompt, so that different prompts can be averaged.

What is left of a state's effect when the MLP or attention is severed (the paper's Figure 3).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Integer

from factscope.analysis.estimate import Estimate, Estimates, column_estimates, estimate
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord

__all__ = [
    "ROLES",
    "SEVERED",
    "TABLES",
    "AverageEffects",
    "PeakSite",
    "Pooling",
    "SeveredComparison",
    "average_effects",
    "average_kinds",
    "baseline",
    "cell_table",
    "early_site",
    "has_severed",
    "has_table",
    "indirect_effects",
    "kinds_of",
    "late_site",
    "roles",
    "severed_comparison",
    "tokens_with",
]

SEVERED = {"mlp": "states severed mlp", "attn": "states severed attn"}
"""The table of restored states for each module that can be severed."""

TABLES = {
    **{kind: ("restored", kind) for kind in KINDS},
    **{name: ("severed", module) for module, name in SEVERED.items()},
    **{f"gradients {kind}": ("gradients", kind) for kind in KINDS},
}
"""Where each table is in a record: the field, and the key in it."""

Cells = Float[np.ndarray, "tokens layers"]


def has_table(record: TraceRecord, table: str) -> bool:
    """Whether the record holds this table."""
    field, key = table_place(table)
    return key in getattr(record, field)


def kinds_of(records: Iterable[TraceRecord]) -> tuple[str, ...]:
    """The kinds that at least one of the records restored, in the order of `KINDS`."""
    found = {kind for record in records for kind in record.restored}
    return tuple(kind for kind in KINDS if kind in found)


def cell_table(record: TraceRecord, table: str) -> Cells:
    """The table token × layer as it was recorded; NaN where a cell was not measured."""
    field, key = table_place(table)
    grids: Any = getattr(record, field)
    if key not in grids:
        raise BadRecord(f"the trace of {record.fact.text!r} has no table {table!r}; trace it first")
    rows = grids[key]
    widths = {len(row) for row in rows}
    if len(rows) != len(record.tokens) or len(widths) != 1:
        raise BadRecord(
            f"the table {table!r} of {record.fact.text!r} has {len(rows)} rows of lengths "
            f"{sorted(widths)} for {len(record.tokens)} tokens; trace the fact again"
        )
    return np.array(rows, dtype=float)


def indirect_effects(record: TraceRecord, table: str) -> Cells:
    """IE = P*,clean h[o] - P*[o] of every cell (§2.1); integrated gradients are as recorded."""
    return cell_table(record, table) - baseline(record, table)


def baseline(record: TraceRecord, table: str) -> float:
    """What a cell without effect holds: P*[o], or 0 for integrated gradients."""
    return 0.0 if table_place(table)[0] == "gradients" else record.corrupted


def table_place(table: str) -> tuple[str, str]:
    """The field and key of a table."""
    if table not in TABLES:
        raise BadSetting(f"no table {table!r}; there are: {', '.join(TABLES)}")
    return TABLES[table]


ROLES = (
    "first subject token",
    "middle subject tokens",
    "last subject token",
    "first subsequent token",
    "further tokens",
    "last token",
)
"""The rows of the paper's Figure 2."""

PRECEDENCE = ("last token", "last subject token", "first subject token", *ROLES)


def roles(record: TraceRecord, *, paper: bool = False) -> tuple[tuple[str, ...], ...]:
    """For every token its roles; none for the tokens before the subject.

    A token has one role. Where several fit, it is the one nearer to the prediction:

    - the prompt's last token is "last token", even where it follows the subject directly or is
      itself the subject's last: at that token the last layers restore the answer whatever the
      subject, and must not count as an effect at the subject;
    - a subject of one token is its own "last subject token".

    With `paper` a token has every role that fits, as in the paper's own figures: a subject of
    one token counts as first and as last, a lone token after the subject as first subsequent and
    as last.
    """
    fitting = [fitting_roles(record, token) for token in range(len(record.tokens))]
    return tuple(names if paper else names[:1] for names in fitting)


def fitting_roles(record: TraceRecord, token: int) -> tuple[str, ...]:
    """Every role that fits a token, the one nearest to the prediction first."""
    start, stop = record.subject
    end = len(record.tokens) - 1
    fits = {
        "first subject token": token == start,
        "middle subject tokens": start < token < stop - 1,
        "last subject token": token == stop - 1,
        "first subsequent token": token == stop,
        "further tokens": stop < token < end,
        "last token": token == end,
    }
    return tuple(role for role in dict.fromkeys(PRECEDENCE) if fits[role])


def tokens_with(record: TraceRecord, role: str, *, paper: bool = False) -> list[int]:
    """The tokens that have a role."""
    return [i for i, names in enumerate(roles(record, paper=paper)) if role in names]


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
            highest(cell_table(r, table)[r.subject[1] - 1])
            for r in known
            if r.subject[1] < len(r.tokens)  # else that token is the late site
        ),
        best_anywhere=estimate(highest(cell_table(r, table)) for r in known),
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
    counts = {cell_table(record, table).shape[1] for record in records}
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
    scores = [cell_table(r, table)[tokens_with(r, role, paper=paper)] for r in records]
    pooled = column_estimates(np.concatenate(scores).reshape(-1, layers), ddof=0)
    corrupted = np.mean([baseline(r, table) for r in records])
    return Estimates(pooled.mean - corrupted, pooled.half_width, pooled.n)


def highest(cells: np.ndarray) -> float:
    """The highest measured cell; NaN where none was measured."""
    measured = cells[~np.isnan(cells)]
    return float(measured.max()) if measured.size else float("nan")


@dataclass(frozen=True, kw_only=True)
class PeakSite:
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


def early_site(effects: AverageEffects) -> PeakSite:
    """The peak at the subject's last token, and whether it stands out from the other tokens."""
    role = "last subject token"
    layer, peak = effects.peak(role)
    rivals = [effects.row(r)[layer] for r in effects.roles if r not in (role, "last token")]
    stands_out = all(peak.exceeds(rival) for rival in rivals if rival.n)
    return PeakSite(role=role, layer=layer, effect=peak, stands_out=stands_out)


def late_site(effects: AverageEffects) -> PeakSite:
    """The peak at the prompt's last token."""
    layer, peak = effects.peak("last token")
    return PeakSite(role="last token", layer=layer, effect=peak)


ROLE = "last subject token"


@dataclass(frozen=True, kw_only=True)
class SeveredComparison:
    """AIE of single states at the subject's last token, in the intact and the severed graphs."""

    model: str
    facts: int
    intact: Estimates
    severed: Mapping[str, Estimates]
    """For "mlp" or "attn": the AIE with that module severed."""
    lost: Mapping[str, Estimates]
    """For the same: the mean over facts of intact - severed, fact by fact."""


def has_severed(records: Iterable[TraceRecord]) -> bool:
    """Whether `severed_comparison` has a fact to compare."""
    return any(record.known and record.severed and ends_early(record) for record in records)


def severed_comparison(records: Iterable[TraceRecord]) -> SeveredComparison:
    """Compare the graphs over the known facts that were traced in all of them.

    A fact whose subject ends the prompt has no last subject token apart from the last token (see
    `roles`), and is left out.
    """
    everyone = [r for r in records if r.known and ends_early(r)]
    modules = [m for m, table in SEVERED.items() if any(has_table(r, table) for r in everyone)]
    tables = ["states", *(SEVERED[module] for module in modules)]
    traced = [r for r in everyone if all(has_table(r, table) for table in tables)]
    if not modules or not traced:
        raise BadRecord("no known fact was traced with a severed graph; trace with one severed")
    rows = {table: average_effects(traced, table).row(ROLE) for table in tables}
    return SeveredComparison(
        model=traced[0].model,
        facts=len(traced),
        intact=rows["states"],
        severed={module: rows[SEVERED[module]] for module in modules},
        lost={module: lost_effect(traced, SEVERED[module]) for module in modules},
    )


def lost_effect(records: list[TraceRecord], table: str) -> Estimates:
    """The mean over facts of the effect that severing takes away."""
    last = [tokens_with(record, ROLE)[0] for record in records]
    lost = [
        cell_table(record, "states")[i] - cell_table(record, table)[i]
        for record, i in zip(records, last, strict=True)
    ]
    return column_estimates(np.stack(lost))


def ends_early(record: TraceRecord) -> bool:
    """Whether the prompt goes on after the subject."""
    return bool(tokens_with(record, ROLE))
