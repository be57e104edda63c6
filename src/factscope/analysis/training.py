"""The learning curve of a hypernetwork: its evaluations on the validation examples."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from factscope.errors import BadRecord
from factscope.records import TrainingRecord


@dataclass(frozen=True, kw_only=True)
class TrainingCurve:
    """The evaluations of a training run so far."""

    model: str
    data: str
    method: str
    evaluations: tuple[TrainingRecord, ...]
    spec: Mapping[str, Any]
    """All settings of the run."""

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise BadRecord(
                f"the training of {self.method} on {self.data} has no evaluation yet; resume it "
                "with the same `factscope train` command"
            )

    @classmethod
    def of(cls, spec: Mapping[str, Any], evaluations: Sequence[TrainingRecord]) -> "TrainingCurve":
        """From the spec and the records of a run folder."""
        try:
            model, data, method = spec["model"], spec["source"]["data"], spec["training"]["method"]
        except KeyError as error:
            raise BadRecord(
                f"the spec of the training run has no {error}; `factscope train --out` writes it"
            ) from error
        return cls(model=model, data=data, method=method, evaluations=tuple(evaluations), spec=spec)

    @property
    def best(self) -> TrainingRecord:
        """The first evaluation with the lowest loss; the weights file holds its network."""
        return min(self.evaluations, key=lambda e: math.inf if math.isnan(e.loss) else e.loss)

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self.evaluations[-1].step

    @property
    def minutes(self) -> float:
        """Minutes of training so far, without interruptions."""
        return self.evaluations[-1].seconds / 60
