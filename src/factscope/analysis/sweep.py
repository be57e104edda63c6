"""A sweep: one method on the same cases over a grid of settings (Figures 5, 17, 18, 23).

A grid has axes, such as the layer and the token; each of its points is an evaluation of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import Summary

__all__ = ["AXES", "NO_BOUND", "Line", "Point", "Setting", "Sweep", "SweepGrid", "grid_points"]

AXES = ("layer", "token", "max_change", "prefix_lengths")
"""What can be swept, in the order in which points are named."""
NO_BOUND = "none"
"""The value of an axis that says: none at all."""

Setting = int | float | str
SweepGrid = Mapping[str, Sequence[Setting]]
"""Axis → its values."""


def grid_points(grid: SweepGrid) -> list[dict[str, Setting]]:
    """Every combination of the axes' values, those of the last axis changing fastest."""
    axes = [axis for axis in AXES if axis in grid]
    return [dict(zip(axes, values, strict=True)) for values in product(*(grid[a] for a in axes))]


def point_name(settings: Mapping[str, Setting]) -> str:
    """A point as the name of a folder: "layer-05,token-last"."""
    return ",".join(f"{axis.replace('_', '-')}-{_in_name(x)}" for axis, x in settings.items())


def _in_name(value: Setting) -> str:
    if isinstance(value, int):
        return f"{value:02}"
    text = f"{value:g}" if isinstance(value, float) else value
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of settings, and how it scored."""

    settings: Mapping[str, Setting]
    summary: Summary | None
    """None where there is no record, or not yet."""
    error: str | None = None
    """Why its editor did not work at all."""

    @property
    def name(self) -> str:
        """The point as the name of a folder."""
        return point_name(self.settings)

    def metric(self, name: str) -> Estimate | None:
        """A metric's mean with its interval, if it was measured."""
        return None if self.summary is None else self.summary.metrics.get(name)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The points that differ in one axis only."""

    settings: Mapping[str, Setting]
    """What they share, among the other axes that have several values."""
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A grid with its points' scores, and the unedited model's."""

    model: str
    data: str
    method: str
    grid: SweepGrid
    points: tuple[Point, ...]
    unedited: Summary | None = None
    spec: Mapping[str, Any] | None = None
    """What was asked for, every setting."""

    @property
    def across(self) -> str:
        """The axis that figures put from left to right: the layer, if it has several values."""
        several = [axis for axis in AXES if len(self.grid.get(axis, ())) > 1]
        return (several or list(self.grid))[0]

    @property
    def lines(self) -> list[Line]:
        """The points by what they share beside `across`."""
        others = [axis for axis in AXES if axis != self.across and len(self.grid.get(axis, ())) > 1]
        found: dict[tuple[Setting, ...], list[Point]] = {}
        for point in self.points:
            found.setdefault(tuple(point.settings[axis] for axis in others), []).append(point)
        return [
            Line(settings=dict(zip(others, key, strict=True)), points=tuple(points))
            for key, points in found.items()
        ]

    @property
    def fixed(self) -> dict[str, Setting]:
        """The axes that have one value, beside `across`."""
        return {
            axis: values[0]
            for axis, values in self.grid.items()
            if len(values) == 1 and axis != self.across
        }

    def measured(self, names: Sequence[str]) -> list[str]:
        """Those of the metrics that some point has."""
        return [name for name in names if any(point.metric(name) for point in self.points)]
