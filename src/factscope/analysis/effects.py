"""Average indirect effects of many traces, by token role and layer (paper §2.2, Figures 2 and 3).

1. A trace holds tables token × layer of restored probabilities. The indirect effect of a cell is
   IE = P*,clean h[o] - P*[o]. For other metrics and directions it is the distance by which the cell
   moves the metric from the run it is put into towards the other run.
2. Each token gets a role, such as "last subject token", so that different prompts line up.
3. The average indirect effect (AIE) is the mean of IE over a fact's tokens of a role, then over
   the facts that the model knows.
4. The early site is the peak of the AIE at the last subject token, the late site that at the last
   token of the prompt.
5. Severing the MLP or attention shows how much of a state's effect passes through that module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from jaxtyping import Float, Integer

from factscope.analysis.estimate import Estimate, Estimates, column_estimates, estimate
from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, CellTable, Lens, TraceRecord

LENS_RUNS = ("clean", "corrupted")
SEVERED = {"mlp": "states severed mlp", "attn": "states severed attn"}
"""Module that can be severed → the table of states restored while it is."""

TABLES = {
    **{kind: ("restored", kind) for kind in KINDS},
    **{name: ("severed", module) for module, name in SEVERED.items()},
    **{f"gradients {kind}": ("gradients", kind) for kind in KINDS},
    **{f"attribution {kind}": ("attribution", kind) for kind in KINDS},
    **{f"lens {run}": ("lens", run) for run in LENS_RUNS},
}
"""Table → its field of a record, and the key in that field.

"mlp": windows of MLP outputs restored. "states severed mlp": single states restored with the MLP
severed. "gradients mlp": integrated gradients. "attribution mlp": the table "mlp" estimated by
gradients. "lens clean": the answer's probability decoded from every state.
"""
CELL_FIELDS = ("restored", "severed", "attribution")
"""Fields whose tables hold the metric of an intervention; others have no baseline."""

LOWER_IS_BETTER = ("kl", "rank")
"""Metrics that are lowest in the clean run."""
NORMALISED = "normalised "
"""Before the name of a metric: its values in a record of `normalised`."""

LAST_SUBJECT, LAST = "last subject token", "last token"
ROLES = (
    "first subject token", "middle subject tokens", LAST_SUBJECT,
    "first subsequent token", "further tokens", LAST,
)  # fmt: skip
"""Token roles: the rows of Figure 2."""
PRECEDENCE = tuple(dict.fromkeys((LAST, LAST_SUBJECT, "first subject token", *ROLES)))
"""If several roles fit a token, the first of these counts."""

Pooling = Literal["facts", "tokens"]  # what is averaged over, and so what the interval is about


# ---- the tables of a trace


def has_table(record: TraceRecord, table: str) -> bool:
    """Whether the record has this table."""
    field, key = _location(table)
    return key in getattr(record, field)


def kinds_of(records: Iterable[TraceRecord]) -> tuple[str, ...]:
    """The kinds that at least one record restored, in the order of `KINDS`."""
    restored = {kind for record in records for kind in record.restored}
    return tuple(kind for kind in KINDS if kind in restored)


def cell_table(record: TraceRecord, table: str) -> Float[np.ndarray, "tokens layers"]:
    """A table as it was recorded; NaN where a cell was not measured."""
    field, key = _location(table)
    rows = getattr(record, field).get(key)
    if rows is None:
        raise BadRecord(f"the trace of {record.fact.text!r} has no table {table!r}; trace it first")
    rows = rows.answer if isinstance(rows, Lens) else rows
    widths = {len(row) for row in rows}
    if len(rows) != len(record.tokens) or len(widths) != 1:
        raise BadRecord(
            f"the table {table!r} of {record.fact.text!r} has {len(rows)} rows of lengths "
            f"{sorted(widths)} for {len(record.tokens)} tokens; trace the fact again"
        )
    return np.array(rows, dtype=float)


def baseline(record: TraceRecord, table: str) -> float:
    """The value of a cell without effect: P*[o], or the metric of the run that cells are put into;
    0 for tables without interventions."""
    return record.base_value if _location(table)[0] in CELL_FIELDS else 0.0


def effect_sign(record: TraceRecord, table: str = "states") -> int:
    """1 if an effect raises the metric; -1 if it lowers it, as corrupting a cell lowers P[o]."""
    if _location(table)[0] not in CELL_FIELDS:
        return 1
    lower_is_better = record.metric in LOWER_IS_BETTER
    return -1 if lower_is_better != (record.direction == "corrupt") else 1


def indirect_effects(record: TraceRecord, table: str) -> Float[np.ndarray, "tokens layers"]:
    """IE = P*,clean h[o] - P*[o] of every cell (§2.1), or the same distance in another metric.

    Tables without interventions as recorded.
    """
    return effect_sign(record, table) * (cell_table(record, table) - baseline(record, table))


def total_effect(record: TraceRecord) -> float:
    """TE, the distance between the corrupted and the clean run."""
    return (-1 if record.metric in LOWER_IS_BETTER else 1) * record.total_effect


def normalised(record: TraceRecord, total: float | None = None) -> TraceRecord:
    """The record with its metric on a scale from 0, the corrupted run, to 1, the clean run.

    It is for display: stored records hold raw values. `total` takes the place of the distance
    between the two runs. A record whose runs do not differ is returned as it is.
    """
    low, total = record.corrupted_value, record.total_effect if total is None else total
    if total == 0:
        return record

    def scale(rows: Iterable[Iterable[float | None]]) -> CellTable:
        return tuple(tuple(None if x is None else (x - low) / total for x in row) for row in rows)

    def scale_all(tables: Mapping[str, CellTable]) -> dict[str, CellTable]:
        return {name: scale(table) for name, table in tables.items()}

    return replace(
        record,
        metric=NORMALISED + record.metric,
        clean_metric=record.total_effect / total,
        corrupted_metric=0.0,
        restored=scale_all(record.restored),
        severed=scale_all(record.severed),
        heads=tuple(map(scale, record.heads)),
        attribution=scale_all(record.attribution),
        head_attribution=tuple(map(scale, record.head_attribution)),
        knockout={
            group: tuple((x - low) / total for x in row) for group, row in record.knockout.items()
        },
    )


def normalised_run(records: Iterable[TraceRecord]) -> list[TraceRecord]:
    """The records of a run on one scale, for averages: 0 is each fact's corrupted run, 1 is higher
    by the mean total effect of the known facts.

    A scale of each fact's own would give most weight to the facts with the smallest total effect.
    """
    records = list(records)
    totals = [record.total_effect for record in records if record.known]
    return [normalised(record, float(np.mean(totals))) for record in records] if totals else records


def _location(table: str) -> tuple[str, str]:
    if table not in TABLES:
        raise BadSetting(f"table is {table!r}; choose from {', '.join(TABLES)}")
    return TABLES[table]


# ---- token roles


def roles(record: TraceRecord, *, paper: bool = False) -> tuple[tuple[str, ...], ...]:
    """The roles of every token; none for tokens before the subject.

    If several roles fit, a token has the one nearer to the prediction. So the prompt's last token
    is "last token" even if it is the subject's last: there the last layers restore the answer
    whatever the subject, which must not count as an effect at the subject.

    With `paper` a token has every role that fits, as in the paper's figures: a subject of one
    token counts as first and as last.
    """
    start, stop = record.subject
    end = len(record.tokens) - 1
    by_token: list[tuple[str, ...]] = []
    for token in range(len(record.tokens)):
        fits = {
            "first subject token": token == start,
            "middle subject tokens": start < token < stop - 1,
            LAST_SUBJECT: token == stop - 1,
            "first subsequent token": token == stop,
            "further tokens": stop < token < end,
            LAST: token == end,
        }
        names = tuple(role for role in PRECEDENCE if fits[role])
        by_token.append(names if paper else names[:1])
    return tuple(by_token)


def tokens_with(record: TraceRecord, role: str, *, paper: bool = False) -> list[int]:
    """The tokens that have a role."""
    return [i for i, names in enumerate(roles(record, paper=paper)) if role in names]


# ---- averages


@dataclass(frozen=True, eq=False, kw_only=True)
class AverageEffects:
    """The average indirect effect (AIE) of each token role at each layer."""

    table: str  # which table was averaged: a key of `TABLES`
    model: str
    metric: str  # of the cells
    direction: str  # "restore" or "corrupt"
    window: int | None  # layers in a window of MLP or attention outputs, if the records say
    mean: Float[np.ndarray, "roles layers"]
    half_width: Float[np.ndarray, "roles layers"]
    n: Integer[np.ndarray, "roles layers"]
    facts: int  # known facts that have the table
    skipped: int  # facts left out because the model does not know them
    clean: Estimate  # P[o] over the facts, or another metric
    corrupted: Estimate  # P*[o] over the facts
    total: Estimate  # ATE, the average total effect P[o] - P*[o]
    best_at_subject: Estimate  # over facts: strongest cell at the last subject token (App. B)
    best_anywhere: Estimate  # over facts: strongest cell at any token
    roles: tuple[str, ...] = ROLES

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.mean.shape[1]

    def row(self, role: str) -> Estimates:
        """The AIE of a role at each layer."""
        if role not in self.roles:
            raise BadSetting(f"role is {role!r}; choose from {', '.join(self.roles)}")
        i, fraction = self.roles.index(role), self.clean.fraction
        return Estimates(self.mean[i], self.half_width[i], self.n[i], fraction)

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

    def stands_out(self) -> bool:
        """Whether the early site's AIE exceeds that of other roles at its layer.

        The intervals must not overlap. The last token, where the late site is, does not count.
        """
        layer, peak = self.peak(LAST_SUBJECT)
        others = [self.row(r)[layer] for r in self.roles if r not in (LAST_SUBJECT, LAST)]
        return all(peak.exceeds(other) for other in others if other.n)


def average_effects(
    records: Iterable[TraceRecord],
    table: str = "states",
    *,
    pooling: Pooling = "facts",
    paper_roles: bool = False,
) -> AverageEffects:
    """The average effects over the known facts that have the table.

    `pooling="facts"` takes the mean over a fact's tokens of a role, then over facts: each fact
    has the same weight and the interval is over facts. `pooling="tokens"` with `paper_roles` is
    how the paper's figures were made: the values of all tokens of a role are pooled, the mean
    baseline over facts is subtracted, and the interval is over tokens.
    """
    records = list(records)
    known = [r for r in records if r.known and has_table(r, table)]
    if not known:
        raise BadRecord(
            f"none of {len(records)} records is a known fact with the table {table!r}; "
            "trace more facts, or name another table"
        )
    layers = {cell_table(record, table).shape[1] for record in known}
    if len(layers) != 1:
        raise BadRecord(
            f"the traces have different numbers of layers {sorted(layers)}; "
            "average the traces of one model at a time"
        )
    metric, direction = one_metric(known)
    # The lens is about probabilities, whatever the metric.
    fraction = metric == "probability" or _location(table)[0] not in CELL_FIELDS
    over_facts = partial(estimate, fraction=fraction)
    rows = [_pool(known, table, role, pooling, paper_roles) for role in ROLES]
    return AverageEffects(
        table=table,
        model=known[0].model,
        metric=metric,
        direction=direction,
        window=known[0].settings.get("window"),
        mean=np.stack([row.mean for row in rows]),
        half_width=np.stack([row.half_width for row in rows]),
        n=np.stack([row.n for row in rows]),
        facts=len(known),
        skipped=sum(not r.known for r in records),
        clean=over_facts(r.clean_value for r in known),
        corrupted=over_facts(r.corrupted_value for r in known),
        total=over_facts(map(total_effect, known)),
        best_at_subject=over_facts(
            _strongest(r, table, slice(r.subject[1] - 1, r.subject[1]))
            for r in known
            if r.subject[1] < len(r.tokens)  # else that token is the late site
        ),
        best_anywhere=over_facts(_strongest(r, table) for r in known),
    )


def one_metric(records: Sequence[TraceRecord]) -> tuple[str, str]:
    """The metric and the direction of all records; BadRecord if they differ."""
    found = {(record.metric, record.direction) for record in records}
    if len(found) != 1:
        raise BadRecord(
            f"the traces have different metrics or directions {sorted(found)}; "
            "average the traces of one run at a time"
        )
    return found.pop()


def average_kinds(
    records: Iterable[TraceRecord], *, pooling: Pooling = "facts", paper_roles: bool = False
) -> dict[str, AverageEffects]:
    """The average effects of every kind that known facts restored."""
    records = list(records)
    return {
        kind: average_effects(records, kind, pooling=pooling, paper_roles=paper_roles)
        for kind in kinds_of(r for r in records if r.known)
    }


def _pool(
    records: Sequence[TraceRecord], table: str, role: str, pooling: Pooling, paper: bool
) -> Estimates:
    """The estimates of a role over facts or over tokens: see `average_effects`."""
    tokens = [tokens_with(record, role, paper=paper) for record in records]
    if pooling == "facts":
        effects = [indirect_effects(r, table)[own] for r, own in zip(records, tokens, strict=True)]
        # The mean of a fact without tokens of the role is NaN: it does not count.
        return column_estimates(np.stack([column_estimates(cells).mean for cells in effects]))
    values = [cell_table(r, table)[own] for r, own in zip(records, tokens, strict=True)]
    # The paper's code uses numpy's default: σ of the population.
    pooled = column_estimates(np.concatenate(values), ddof=0)
    mean_baseline = np.mean([baseline(r, table) for r in records])
    sign = effect_sign(records[0], table)
    return Estimates(sign * (pooled.mean - mean_baseline), pooled.half_width, pooled.n)


def _strongest(record: TraceRecord, table: str, tokens: slice = slice(None)) -> float:
    """The value of the measured cell with the highest effect; NaN if none was measured."""
    cells, sign = cell_table(record, table)[tokens], effect_sign(record, table)
    measured = sign * cells[~np.isnan(cells)]
    return sign * float(measured.max()) if measured.size else float("nan")


# ---- severed modules (Figure 3)


@dataclass(frozen=True, kw_only=True)
class SeveredComparison:
    """AIE of single states at the last subject token, with modules intact and severed."""

    model: str
    facts: int
    intact: Estimates
    severed: Mapping[str, Estimates]  # "mlp" or "attn": the AIE with that module severed
    lost: Mapping[str, Estimates]  # the same: the mean over facts of IE(intact) - IE(severed)


def has_severed(records: Iterable[TraceRecord]) -> bool:
    """Whether `severed_comparison` has a fact to compare."""
    return any(r.known and r.severed and tokens_with(r, LAST_SUBJECT) for r in records)


def severed_comparison(records: Iterable[TraceRecord]) -> SeveredComparison:
    """Compare intact and severed over the known facts that have all tables.

    A fact whose subject ends the prompt has no "last subject token" (see `roles`): it is left out.
    """
    usable = [r for r in records if r.known and tokens_with(r, LAST_SUBJECT)]
    modules = [m for m, table in SEVERED.items() if any(has_table(r, table) for r in usable)]
    tables = ["states", *(SEVERED[module] for module in modules)]
    traced = [r for r in usable if all(has_table(r, table) for table in tables)]
    if not modules or not traced:
        raise BadRecord("no known fact was traced with a severed module; trace with --sever")
    rows = {table: average_effects(traced, table).row(LAST_SUBJECT) for table in tables}

    def lost(table: str) -> Estimates:
        differences = [
            (cell_table(record, "states") - cell_table(record, table))[record.subject[1] - 1]
            for record in traced
        ]
        effects = effect_sign(traced[0], "states") * np.stack(differences)
        return column_estimates(effects, fraction=rows["states"].fraction)

    return SeveredComparison(
        model=traced[0].model,
        facts=len(traced),
        intact=rows["states"],
        severed={module: rows[SEVERED[module]] for module in modules},
        lost={module: lost(SEVERED[module]) for module in modules},
    )


# ---- can a trace be interpreted?

WEAK_ANSWER = 0.2
"""Below this clean probability the model hardly knows the fact."""
EMPTY_ANSWERS = frozenset(("the", "a", "an", "that", "of", "not", "also"))
"""Next tokens that name no object."""


def trace_warnings(record: TraceRecord) -> list[str]:
    """Reasons why the tables of a trace do not show where a fact is stored."""
    answer = record.answer.strip()
    warnings = []
    if not any(map(str.isalnum, answer)) or answer in EMPTY_ANSWERS:
        warnings.append(
            f"The most likely next token is {answer!r}, which names no object: the model does not "
            "state this fact here. Change the prompt so that the object comes next."
        )
    elif record.clean < WEAK_ANSWER:
        warnings.append(
            f"The model hardly knows this fact: P({answer!r}) is only {record.clean:.1%} in the "
            "clean run, so the tables are mostly noise."
        )
    corruption = record.settings.get("corruption", {})
    scaled = corruption.get("distribution") in ("gaussian", "uniform")
    if scaled and corruption.get("level") == 0 and not corruption.get("replace"):
        warnings.append("The noise level is 0: nothing is corrupted, so there is no effect.")
    elif record.clean <= record.corrupted:
        warnings.append(
            "The corruption does not make the answer less likely (total effect "
            f"{record.clean - record.corrupted:+.1%}): restored cells cannot bring it back. Use "
            "more noise, or another prompt."
        )
    return warnings


def strongest_subject_cell(record: TraceRecord, table: str) -> tuple[int, int, float]:
    """Token, layer and indirect effect of the subject's cell with the highest effect."""
    start, stop = record.subject
    effects = indirect_effects(record, table)[start:stop]
    token, layer = np.unravel_index(np.nanargmax(effects), effects.shape)
    return start + int(token), int(layer), float(effects[token, layer])
