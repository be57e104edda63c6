"""A sweep's folder, read without torch: spec.toml with the grid, and a run's folder a point."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factscope.analysis.metrics import Summary, summaries
from factscope.analysis.sweep import AXES, Point, Setting, Sweep, grid_points, point_name
from factscope.errors import WrongRun
from factscope.files import write_whole
from factscope.records import CaseRecord
from factscope.runs.folder import RunFolder

__all__ = ["point_path", "read_failures", "read_sweep", "write_failures"]

FAILURES = "failures.json"
"""Point → why its editor did not work at all."""


def point_path(path: Path, settings: Mapping[str, Setting]) -> Path:
    """Where a point's run is."""
    return path / "points" / point_name(settings)


def read_failures(path: Path) -> dict[str, str]:
    """The points whose editor did not work at all."""
    file = path / FAILURES
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def write_failures(path: Path, failures: Mapping[str, str]) -> None:
    """Keep them, or take the file away if there are none."""
    if failures:
        write_whole(path / FAILURES, json.dumps(failures, indent=2, ensure_ascii=False) + "\n")
    else:
        (path / FAILURES).unlink(missing_ok=True)


def read_sweep(path: Path) -> Sweep:
    """The sweep as far as it has come."""
    spec = RunFolder.open(path).spec()
    grid = {axis: spec["grid"][axis] for axis in AXES if axis in spec.get("grid", {})}
    if not grid:
        raise WrongRun(f"{path / 'spec.toml'} has no grid; `factscope sweep --out` makes a sweep")
    failures = read_failures(path)
    everyone: list[CaseRecord] = []
    points: list[Point] = []
    for settings in grid_points(grid):
        records = _records(point_path(path, settings))
        everyone += records
        points.append(
            Point(
                settings=settings,
                summary=_last(summaries(records)),
                error=failures.get(point_name(settings)),
            )
        )
    return Sweep(
        model=everyone[0].model if everyone else str(spec["model"]),
        data=str(spec["data"]),
        method=str(spec["method"]),
        grid=grid,
        points=tuple(points),
        unedited=_unedited(everyone),
        spec=_without_hashes(spec),
    )


def _records(path: Path) -> list[CaseRecord]:
    return RunFolder.open(path).case_records() if (path / "spec.toml").is_file() else []


def _last(rows: list[Summary]) -> Summary | None:
    """The edits; of a sequence, as they are at its end."""
    edited = [row for row in rows if row.edited]
    return edited[-1] if edited else None


def _unedited(records: list[CaseRecord]) -> Summary | None:
    return next((row for row in summaries(_each_fact_once(records)) if not row.edited), None)


def _each_fact_once(records: list[CaseRecord]) -> list[CaseRecord]:
    return list({record.fact: record for record in records if record.before}.values())


def _without_hashes(spec: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in spec.items() if not name.endswith("sha256")}
