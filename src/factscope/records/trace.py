"""A causal trace as it is written down: three runs, and every cell's restored probability."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from factscope.errors import BadRecord
from factscope.facts import Fact

__all__ = ["KINDS", "Grid", "TraceRecord", "as_grid"]

KINDS = ("states", "mlp", "attn")
"""What a trace restores: single states, or windows of MLP or of attention outputs."""

Grid = tuple[tuple[float | None, ...], ...]
"""A table token × layer; None where the cell was not measured."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """One fact's causal trace (paper §2.1): three runs, and every cell's restored probability."""

    fact: Fact
    model: str
    tokens: tuple[str, ...]
    """The prompt's tokens as text, special tokens included."""
    subject: tuple[int, int]
    """The subject's tokens, as [start, stop)."""
    answer: str
    """The token that the clean run predicts, as text; its probability is what is traced."""
    answer_id: int
    known: bool
    """Whether the answer is what the fact's target says; True where no target was given."""
    clean: float
    """P[o], the answer's probability in the clean run."""
    corrupted: float
    """P*[o], its mean probability over the corrupted runs."""
    corrupted_samples: tuple[float, ...]
    """The same for each sample of the noise."""
    restored: Mapping[str, Grid] = field(default_factory=dict)
    """For each kind of `KINDS`: token × layer of P*[o] with that cell restored."""
    severed: Mapping[str, Grid] = field(default_factory=dict)
    """For "mlp" or "attn": restored *states* in the graph where that module is severed at the
    restored token (the paper's Figure 3)."""
    gradients: Mapping[str, Grid] = field(default_factory=dict)
    """For each kind: the norm of the integrated gradient at each state (App. B)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was traced: corruption, window, samples, seed, preset."""

    @property
    def total_effect(self) -> float:
        """TE = P[o] - P*[o]."""
        return self.clean - self.corrupted

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "TraceRecord":
        """The record of one line of JSON."""
        try:
            fields = json.loads(line)
            fields["fact"] = Fact(**fields["fact"])
            for name in ("restored", "severed", "gradients"):
                fields[name] = {kind: as_grid(rows) for kind, rows in fields[name].items()}
            for name in ("tokens", "subject", "corrupted_samples"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"not a trace record ({error}): {line[:80]!r}") from error


def as_grid(rows: Iterable[Sequence[float | None]]) -> Grid:
    """A table of plain numbers; what is not a number becomes None."""
    return tuple(
        tuple(None if x is None or math.isnan(x) else float(x) for x in row) for row in rows
    )
