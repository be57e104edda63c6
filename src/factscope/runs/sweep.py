"""One method over a grid of settings: every point an ordinary evaluation, in a folder of its own.

A sweep that was broken off goes on in the middle of a point. A point whose editor does not work at
all, as with a layer that the model does not have, is noted, and tried again the next time.

A sweep's folder, read without torch: spec.toml with the grid, and a run's folder a point.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.analysis.metrics import Summary, summaries
from factscope.analysis.sweep import AXES, Point, Setting, Sweep, SweepGrid, grid_points, point_name
from factscope.errors import BadRunFolder, FactscopeError, OutOfMemory, RunInterrupted
from factscope.facts import Case
from factscope.io import write_atomic
from factscope.lm.model import LM
from factscope.records import CaseRecord
from factscope.runs.evaluate import EvaluateRun, Executor
from factscope.runs.folder import RunFolder, run_info

__all__ = [
    "Crews",
    "SweepPoint",
    "SweepRun",
    "point_path",
    "read_failures",
    "read_sweep",
    "write_failures",
]

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
        write_atomic(path / FAILURES, json.dumps(failures, indent=2, ensure_ascii=False) + "\n")
    else:
        (path / FAILURES).unlink(missing_ok=True)


def read_sweep(path: Path) -> Sweep:
    """The sweep as far as it has come."""
    spec = RunFolder.open(path).spec()
    grid = {axis: spec["grid"][axis] for axis in AXES if axis in spec.get("grid", {})}
    if not grid:
        raise BadRunFolder(
            f"{path / 'spec.toml'} has no grid; `factscope sweep --out` makes a sweep"
        )
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


log = logging.getLogger(__name__)

Crews = Callable[[EvaluateRun], AbstractContextManager[Executor | None]]
"""Who does the work of a point; None for this process."""

STOPPING = (OutOfMemory, RunInterrupted, BadRunFolder)
"""What is not the editor's failure: it would meet the next point as well."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A combination of settings, and its evaluation or why there can be none."""

    settings: Mapping[str, Setting]
    run: EvaluateRun | FactscopeError

    @property
    def name(self) -> str:
        """The point as the name of a folder."""
        return point_name(self.settings)


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """What is the same at every point, and the grid."""

    base: EvaluateRun
    grid: SweepGrid

    def spec(self) -> dict[str, Any]:
        """What makes two sweeps the same."""
        grid = {axis: list(values) for axis, values in self.grid.items()}
        return {**self.base.spec(), "command": "sweep", "grid": grid}

    def begin(self, lm: LM, path: Path) -> RunFolder:
        """A new sweep in a folder, or the same sweep taken up again."""
        return RunFolder.begin(path, self.spec(), run_info(lm))

    def go_on(
        self,
        lm: LM,
        folder: RunFolder,
        points: Sequence[SweepPoint],
        cases: Sequence[Case],
        *,
        crews: Crews = lambda run: nullcontext(None),
        progress: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Evaluate what is not yet in the folder, point by point."""
        for point in points:
            failures = read_failures(folder.path)
            try:
                _go_on(lm, folder.path, point, cases, crews, progress)
                failures.pop(point.name, None)
            except STOPPING:
                raise
            except FactscopeError as error:
                log.info("%s: %s", point.name, error)
                failures[point.name] = f"{type(error).__name__}: {error}"
                progress(len(cases))
            write_failures(folder.path, failures)


def _go_on(
    lm: LM,
    path: Path,
    point: SweepPoint,
    cases: Sequence[Case],
    crews: Crews,
    progress: Callable[[int], None],
) -> None:
    """One point, if it is not complete."""
    if isinstance(point.run, FactscopeError):
        raise point.run
    folder = point.run.begin(lm, point_path(path, point.settings))
    if point.run.complete(folder, cases):
        progress(len(cases))
        return
    with crews(point.run) as crew:
        point.run.go_on(lm, folder, cases, crew=crew, progress=progress)
