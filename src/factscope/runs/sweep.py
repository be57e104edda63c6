"""Sweep a method over a grid of settings: each point is an evaluation in a folder of its own.

    spec.toml              the evaluation's settings and the grid
    failures.json          points whose editor cannot work, such as a layer that does not exist
    points/layer-05/       a run folder for each point

An interrupted sweep resumes in the middle of a point, and tries failed points again.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factscope.analysis.metrics import UNEDITED, summarize
from factscope.analysis.sweep import AXES, Point, Setting, Sweep, SweepGrid, grid_points, point_name
from factscope.errors import (
    BadInput,
    BadRunFolder,
    FactscopeError,
    FolderInUse,
    OutOfMemory,
    RunInterrupted,
)
from factscope.facts import Case
from factscope.io import read_json, resumable_write, write_atomic
from factscope.progress import Progress, no_progress, split
from factscope.records import CaseRecord
from factscope.runs.evaluate import EvaluateRun, Executor
from factscope.runs.folder import Run, RunFolder, locks_folder

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)

POINTS = "points"
FAILURES = "failures.json"
"""File with the error of each failed point."""
FATAL = (OutOfMemory, RunInterrupted, BadRunFolder, FolderInUse)
"""Errors that would repeat at every point: they stop the sweep."""
MakeExecutor = Callable[[EvaluateRun], AbstractContextManager[Executor | None]]
"""Opens an executor for a point's run; None runs it in this process."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """A combination of settings with its evaluation, or the error of its editor."""

    settings: Mapping[str, Setting]
    run: EvaluateRun | FactscopeError


@dataclass(frozen=True, kw_only=True)
class SweepRun(Run):
    """A sweep: what all points share, and the grid."""

    base: EvaluateRun
    grid: SweepGrid

    def spec(self) -> dict[str, Any]:
        """What identifies the sweep."""
        grid = {axis: list(values) for axis, values in self.grid.items()}
        return {**self.base.spec(), "command": "sweep", "grid": grid}

    @locks_folder
    def run(
        self,
        lm: "LM",
        folder: RunFolder,
        points: Sequence[SweepPoint],
        cases: Sequence[Case],
        *,
        make_executor: MakeExecutor = lambda run: nullcontext(None),
        progress: Progress = no_progress,
    ) -> None:
        """Evaluate what is not yet in the folder, point by point."""
        for point, part in zip(points, split(progress, [1] * len(points)), strict=True):
            name, failures = point_name(point.settings), read_failures(folder.path)
            try:
                if isinstance(point.run, FactscopeError):
                    raise point.run
                point_folder = point.run.create_or_open(lm, folder.path / POINTS / name)
                if not point.run.is_complete(point_folder, cases):
                    with make_executor(point.run) as executor:
                        point.run.run(lm, point_folder, cases, executor=executor, progress=part)
                failures.pop(name, None)
            except FATAL:
                raise
            except FactscopeError as error:
                log.info("%s: %s", name, error)
                failures[name] = f"{type(error).__name__}: {error}"
            part(1.0)
            with resumable_write(folder.path / FAILURES):
                if failures:
                    text = json.dumps(failures, indent=2, ensure_ascii=False) + "\n"
                    write_atomic(folder.path / FAILURES, text)
                else:
                    (folder.path / FAILURES).unlink(missing_ok=True)


def read_sweep(path: Path) -> Sweep:
    """Read a sweep folder, finished or not. No torch."""
    spec = RunFolder.open(path).spec()
    grid = spec.get("grid")
    if not isinstance(grid, dict) or not grid:
        raise BadRunFolder(
            f"{path / 'spec.toml'} has no grid; `factscope sweep --out` creates a sweep"
        )
    for axis, values in grid.items():
        if not isinstance(values, list) or not all(isinstance(x, Setting) for x in values):
            raise BadRunFolder(
                f"{path / 'spec.toml'} sweeps {axis} over {values!r}, which is not a list of "
                "numbers and texts; correct the file"
            )
    if unknown := [axis for axis in grid if axis not in AXES]:
        raise BadRunFolder(
            f"{path / 'spec.toml'} sweeps {unknown[0]!r}, which is not among {', '.join(AXES)}; "
            "it is of run folder format 1, so run the sweep again in a new folder"
        )
    failures = read_failures(path)
    records: list[CaseRecord] = []
    points: list[Point] = []
    for settings in grid_points(grid):
        name = point_name(settings)
        point_records = RunFolder(path / POINTS / name).case_records()
        records += point_records
        rows = [row for row in summarize(point_records) if row.edited]
        points.append(
            Point(
                settings=settings,
                summary=rows[-1] if rows else None,  # of a sequence, the scores at its end
                error=failures.get(name),
            )
        )
    # Every point has the same unedited scores: count each fact once.
    by_fact = {record.fact: record for record in records if record.before}
    unedited = [row for row in summarize(by_fact.values()) if not row.edited]
    return Sweep(
        model=records[0].model if records else str(spec.get("model")),
        data=str(spec.get("data")),
        method=str(spec.get("method")),
        grid={axis: grid[axis] for axis in AXES if axis in grid},
        points=tuple(points),
        unedited=unedited[0] if unedited else None,
        spec={name: value for name, value in spec.items() if not name.endswith("sha256")},
    )


def records_by_layer(path: Path) -> dict[int, list[CaseRecord]]:
    """The records of a sweep over layers, after each case's own edit. No torch."""
    sweep = read_sweep(path)
    several = [axis for axis, values in sweep.grid.items() if len(values) > 1]
    if several != ["layer"]:
        raise BadRunFolder(
            f"{path} sweeps {', '.join(several) or 'one point'}; comparing it with traces needs a "
            "sweep over layers only"
        )
    return {
        int(point.settings["layer"]): [
            record
            for record in RunFolder(path / POINTS / point.name).case_records()
            if record.phase == "edit" and record.method != UNEDITED
        ]
        for point in sweep.points
    }


def read_failures(path: Path) -> dict[str, str]:
    """The error of each failed point, by its name."""
    file = path / FAILURES
    try:
        return dict(read_json(file)) if file.is_file() else {}
    except (BadInput, TypeError, ValueError) as error:
        raise BadRunFolder(f"{error}; delete {file} to try the failed points again") from error
