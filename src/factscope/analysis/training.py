"""The course of a training: each look at the held-out examples, and which was the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factscope.errors import BadRecord
from factscope.records import TrainingRecord

__all__ = ["TrainingCurve"]


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """A learned editor's training as far as it has come."""

    model: str
    data: str
    method: str
    looks: tuple[TrainingRecord, ...]
    spec: Mapping[str, Any]
    """What was asked for, every setting."""

    def __post_init__(self) -> None:
        if not self.looks:
            raise BadRecord(
                f"the training of {self.method} on {self.data} has no look at its held-out "
                "examples yet; the same `factscope train` goes on, and then there is one to report"
            )

    @classmethod
    def of(cls, spec: Mapping[str, Any], looks: Sequence[TrainingRecord]) -> "TrainingCurve":
        """From what a training's folder holds."""
        try:
            model, data, method = spec["model"], spec["source"]["data"], spec["training"]["method"]
        except KeyError as error:
            raise BadRecord(
                f"the spec of the training has no {error}; `factscope train --out` writes it"
            ) from error
        return cls(model=model, data=data, method=method, looks=tuple(looks), spec=spec)

    @property
    def best(self) -> TrainingRecord:
        """The look with the least loss, the first of several: the network of then is kept."""
        return min(self.looks, key=lambda look: math.inf if math.isnan(look.loss) else look.loss)

    @property
    def steps(self) -> int:
        """How many steps it took so far."""
        return self.looks[-1].step

    @property
    def minutes(self) -> float:
        """And how long they took, interruptions not counted."""
        return self.looks[-1].seconds / 60
