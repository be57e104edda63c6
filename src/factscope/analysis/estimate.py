"""A mean with its 95 % confidence interval."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

Z95 = 1.96
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A mean, and the half width of its 95 % confidence interval.

    The half width is NaN for fewer than two values, the mean is NaN for none. Comparisons with
    such an interval are False.
    """

    mean: float
    half_width: float
    n: int
    fraction: bool = True
    """Whether `text` is in percent."""

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.mean + self.half_width

    def exceeds(self, other: "Estimate") -> bool:
        """Whether this interval is above the other, without overlap."""
        return self.low > other.high

    @property
    def text(self) -> str:
        """The interval in percent if the values are fractions, else as numbers: "1.26 ± 0.10"."""
        if self.fraction or math.isnan(self.mean):
            return self.percent
        return f"{self.mean:.2f}" + ("" if self.n < 2 else f" ± {self.half_width:.2f}")

    @property
    def percent(self) -> str:
        """The interval in percent: "18.6 ± 0.9 %"."""
        if math.isnan(self.mean):
            return "–"
        width = "" if math.isnan(self.half_width) else f" ± {100 * self.half_width:.1f}"
        return f"{round(100 * self.mean, 1) + 0.0:.1f}{width} %"  # adding 0.0 turns -0.0 into 0.0

    def __str__(self) -> str:
        """The interval in percent with its count: "18.6 ± 0.9 % (n=1000)"."""
        return f"{self.percent} (n={self.n})"


def to_dict(result: Any) -> dict[str, Any]:
    """A dataclass as JSON values: numbers that are not finite become None, and estimates lose
    `fraction`, which is about text."""

    def values(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        finite = {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in pairs}
        return {k: x for k, x in finite.items() if k != "fraction"}

    return asdict(result, dict_factory=values)


@dataclass(frozen=True, eq=False)
class Estimates:
    """One estimate per layer."""

    mean: Float[np.ndarray, " layers"]
    half_width: Float[np.ndarray, " layers"]
    n: Integer[np.ndarray, " layers"]
    fraction: bool = True

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.mean)

    def __getitem__(self, layer: int) -> Estimate:
        """The estimate of one layer."""
        mean, half_width = float(self.mean[layer]), float(self.half_width[layer])
        return Estimate(mean, half_width, int(self.n[layer]), self.fraction)


def estimate(values: Iterable[float], ddof: int = 1, *, fraction: bool = True) -> Estimate:
    """Mean ± 1.96·σ/√N, NaN ignored. σ is the sample's (`ddof=1`) or the population's (0)."""
    column = np.array(list(values), dtype=float).reshape(-1, 1)
    return column_estimates(column, ddof, fraction=fraction)[0]


def column_estimates(
    values: Float[np.ndarray, "values layers"], ddof: int = 1, *, fraction: bool = True
) -> Estimates:
    """The estimate of each column; NaN is a cell that was not measured and is ignored."""
    measured = ~np.isnan(values)
    n = measured.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(measured, values, 0.0).sum(axis=0) / n
        squares = np.where(measured, (values - mean) ** 2, 0.0).sum(axis=0)
        variance = np.where(n > 1, squares / np.maximum(n - ddof, 1), np.nan)
        return Estimates(mean, Z95 * np.sqrt(variance / n), n, fraction)
