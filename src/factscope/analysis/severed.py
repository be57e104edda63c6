"""What is left of a state's effect when the MLP or attention is severed (the paper's Figure 3)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from factscope.analysis.effects import average_effects
from factscope.analysis.estimate import Estimates, column_estimates
from factscope.analysis.grids import SEVERED, grid, has_table
from factscope.analysis.roles import tokens_with
from factscope.errors import BadRecord
from factscope.records import TraceRecord

__all__ = ["SeveredComparison", "has_severed", "severed_comparison"]

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
        grid(record, "states")[i] - grid(record, table)[i]
        for record, i in zip(records, last, strict=True)
    ]
    return column_estimates(np.stack(lost))


def ends_early(record: TraceRecord) -> bool:
    """Whether the prompt goes on after the subject."""
    return bool(tokens_with(record, ROLE))
