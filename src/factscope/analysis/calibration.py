"""Calibrations in numbers: S with its interval, and the score that settings are chosen by."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from factscope.analysis.estimate import Z95, Estimate
from factscope.analysis.metrics import (
    METRICS,
    SUCCESS_RATES,
    Summary,
    score_influences,
    summarize,
)
from factscope.records import CaseRecord, CaseScores, TraceRecord

NS_LOSS = 0.05
"""NS may fall by this much below the unedited model's; what it loses beyond lowers the score."""
MARGIN = 0.003
"""Settings are replaced by others only if their score is higher by more than this."""


@runtime_checkable
class CalibrationResult(Protocol):
    """What reports need of a calibration."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Method → setting → value."""
        ...

    @property
    def evidence(self) -> Mapping[str, Any]:
        """Trials, scores before and after, traces and statistics."""
        ...


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One combination of settings of a method, evaluated."""

    method: str
    settings: Mapping[str, Any]
    cases: int = 0
    failed: int = 0
    broken: int = 0
    metrics: Mapping[str, Estimate]
    """S, ES, PS and NS of the edited model."""
    unedited: Mapping[str, Estimate]
    error: str | None = None
    """Why the settings cannot be used."""

    @property
    def score(self) -> float:
        """What settings are chosen by: S, times the fraction of edits that did not fail, less what
        NS loses beyond `NS_LOSS`; -1 if nothing was measured."""
        if "S" not in self.metrics or not self.cases:
            return -1.0
        lost = self.unedited["NS"].mean - self.metrics["NS"].mean - NS_LOSS
        return self.metrics["S"].mean * (1 - self.failed / self.cases) - max(0.0, lost)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "method": self.method,
            "settings": dict(self.settings),
            "cases": self.cases,
            "failed": self.failed,
            "broken": self.broken,
            "score": self.score,
            "metrics": estimates_to_dict(self.metrics),
            "error": self.error,
        }

    @property
    def text(self) -> str:
        """The settings and scores on one line."""
        chosen = f"{self.method}, {settings_text(self.settings)}"
        if self.error is not None:
            return f"{chosen}: {self.error}"
        scores = ", ".join(f"{name} {100 * x.mean:.1f}" for name, x in self.metrics.items())
        broken = f", {self.broken} of {self.cases} broken" if self.broken else ""
        return f"{chosen}: {scores}{broken}"


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as text: "layer 5, clamp 1"."""

    def text(value: Any) -> str:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return f"{value[0]} to {value[-1]}" if len(value) > 1 else str(value[0])
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name.replace('_', ' ')} {text(x)}" for name, x in settings.items())


def estimates_to_dict(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Each metric's mean, half width of its interval (null if unknown) and number of cases."""
    return {
        name: {
            "mean": x.mean,
            "half_width": None if math.isnan(x.half_width) else x.half_width,
            "n": x.n,
        }
        for name, x in estimates.items()
    }


def trial_of(
    method: str,
    settings: Mapping[str, Any],
    records: Sequence[CaseRecord],
    error: str | None = None,
) -> Trial:
    """The trial of one evaluation."""
    rows = [row for row in summarize(records) if row.edited]
    row = rows[-1] if rows else Summary(model="", data="", method=method, cases=0)
    return Trial(
        method=method,
        settings=settings,
        cases=row.cases,
        failed=row.failed,
        broken=row.broken,
        metrics=rates([r.after for r in records if r.after is not None]),
        unedited=rates([r.before for r in records if r.before is not None]),
        error=error,
    )


def rates(cases: Sequence[CaseScores]) -> dict[str, Estimate]:
    """S, ES, PS and NS with 95 % intervals over the cases that have all three rates.

    The interval of S follows from `score_influences`.
    """
    values = np.array([[METRICS[name](scores) for name in SUCCESS_RATES] for scores in cases])
    values = values.reshape(-1, len(SUCCESS_RATES))
    values = values[~np.isnan(values).any(1)]
    n = len(values)
    if n == 0:
        return {}
    means = values.mean(0)
    S, influence = score_influences(values)
    columns = {"S": (S, influence)}
    columns |= {name: (means[i], values[:, i]) for i, name in enumerate(SUCCESS_RATES)}

    def half_width(of: np.ndarray) -> float:
        return Z95 * float(of.std()) / math.sqrt(n) if n > 1 else math.nan

    return {name: Estimate(float(m), half_width(of), n) for name, (m, of) in columns.items()}


def mlp_effects(records: Iterable[TraceRecord]) -> tuple[list[float], int]:
    """By layer, the mean effect of restoring MLP outputs at the last subject token, and how many
    known facts it is the mean of."""
    rows = [
        np.array(record.restored["mlp"][record.subject[1] - 1], dtype=float) - record.corrupted
        for record in records
        if record.known and "mlp" in record.restored
    ]
    return (np.mean(rows, axis=0).tolist() if rows else [], len(rows))
