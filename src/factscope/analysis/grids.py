"""The tables of a trace by name, as arrays: probabilities, and the indirect effects they mean.

A name says what was done: "mlp" restores windows of MLP outputs; "states severed mlp" restores
single states in the graph where the MLP is severed; "gradients mlp" holds integrated gradients.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

from factscope.errors import BadRecord, BadSetting
from factscope.records import KINDS, TraceRecord

__all__ = ["SEVERED", "TABLES", "baseline", "grid", "has_table", "indirect_effects", "kinds_of"]

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
    field, key = place(table)
    return key in getattr(record, field)


def kinds_of(records: Iterable[TraceRecord]) -> tuple[str, ...]:
    """The kinds that at least one of the records restored, in the order of `KINDS`."""
    found = {kind for record in records for kind in record.restored}
    return tuple(kind for kind in KINDS if kind in found)


def grid(record: TraceRecord, table: str) -> Cells:
    """The table token × layer as it was recorded; NaN where a cell was not measured."""
    field, key = place(table)
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
    return grid(record, table) - baseline(record, table)


def baseline(record: TraceRecord, table: str) -> float:
    """What a cell without effect holds: P*[o], or 0 for integrated gradients."""
    return 0.0 if place(table)[0] == "gradients" else record.corrupted


def place(table: str) -> tuple[str, str]:
    """The field and key of a table."""
    if table not in TABLES:
        raise BadSetting(f"no table {table!r}; there are: {', '.join(TABLES)}")
    return TABLES[table]
