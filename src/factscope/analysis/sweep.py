"""Sweeps: one method on the same cases over a grid of settings (Figures 5, 17, 18, 23).

A grid has axes, such as the layer and the token; each point of it is an evaluation of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import Summary

AXES = ("layer", "token", "max_change", "prefix_lengths")
"""Settings that can be swept, in the order of a point's name."""
NONE = "none"
"""Value of an axis: no limit (max_change) or no prefixes (prefix_lengths)."""

Setting = int | float | str
SweepGrid = Mapping[str, Sequence[Setting]]  # axis → its values


def grid_points(grid: SweepGrid) -> list[dict[str, Setting]]:
    """Every combination of the axes' values; the last axis changes fastest."""
    axes = [axis for axis in AXES if axis in grid]
    return [dict(zip(axes, values, strict=True)) for values in product(*(grid[a] for a in axes))]


def point_name(settings: Mapping[str, Setting]) -> str:
    """A point as a folder name: "layer-05,token-last"."""

    def text(value: Setting) -> str:
        if isinstance(value, int):
            return f"{value:02}"
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{value:g}" if isinstance(value, float) else value)

    return ",".join(f"{axis.replace('_', '-')}-{text(x)}" for axis, x in settings.items())


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of settings, and its scores."""

    settings: Mapping[str, Setting]
    summary: Summary | None  # None without records
    error: str | None = None  # why its editor cannot work

    @property
    def name(self) -> str:
        """The point as a folder name."""
        return point_name(self.settings)

    def metric(self, name: str) -> Estimate | None:
        """A metric's mean with its interval, if it was measured."""
        return None if self.summary is None else self.summary.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points that differ only on the x axis: a line of a figure."""

    settings: Mapping[str, Setting]  # their values on the other axes that have several
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid with the scores of its points, and those of the unedited model."""

    model: str
    data: str
    method: str
    grid: SweepGrid
    points: tuple[Point, ...]
    unedited: Summary | None = None
    spec: Mapping[str, Any] | None = None  # settings of the run

    @property
    def x_axis(self) -> str:
        """The axis that figures draw from left to right: the first one with several values."""
        several = [axis for axis in AXES if len(self.grid.get(axis, ())) > 1]
        return (several or list(self.grid))[0]

    @property
    def lines(self) -> list[Line]:
        """The points grouped by their settings on all other axes."""
        others = [axis for axis in AXES if axis != self.x_axis and len(self.grid.get(axis, ())) > 1]
        groups: dict[tuple[Setting, ...], list[Point]] = {}
        for point in self.points:
            groups.setdefault(tuple(point.settings[axis] for axis in others), []).append(point)
        return [
            Line(settings=dict(zip(others, key, strict=True)), points=tuple(points))
            for key, points in groups.items()
        ]

    @property
    def fixed(self) -> dict[str, Setting]:
        """Axes with a single value, without the x axis."""
        return {
            axis: values[0]
            for axis, values in self.grid.items()
            if len(values) == 1 and axis != self.x_axis
        }

    def measured(self, names: Sequence[str]) -> list[str]:
        """The metrics that at least one point has."""
        return [name for name in names if any(point.metric(name) for point in self.points)]
