"""One method over a grid of settings: every point an ordinary evaluation, in a folder of its own.

A sweep that was broken off goes on in the middle of a point. A point whose editor does not work at
all, as with a layer that the model does not have, is noted, and tried again the next time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.analysis.sweep import Grid, Setting, point_name
from factscope.errors import FactscopeError, OutOfMemory, RunStopped, WrongRun
from factscope.facts import Case
from factscope.lm.model import LM
from factscope.runs.evaluating import Crew, EvaluateRun
from factscope.runs.folder import RunFolder
from factscope.runs.info import info
from factscope.runs.sweep_folder import point_path, read_failures, write_failures

__all__ = ["Crews", "SweepPoint", "SweepRun"]

log = logging.getLogger(__name__)

Crews = Callable[[EvaluateRun], AbstractContextManager[Crew | None]]
"""Who does the work of a point; None for this process."""

STOPPING = (OutOfMemory, RunStopped, WrongRun)
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
    grid: Grid

    def spec(self) -> dict[str, Any]:
        """What makes two sweeps the same."""
        grid = {axis: list(values) for axis, values in self.grid.items()}
        return {**self.base.spec(), "command": "sweep", "grid": grid}

    def begin(self, lm: LM, path: Path) -> RunFolder:
        """A new sweep in a folder, or the same sweep taken up again."""
        return RunFolder.begin(path, self.spec(), info(lm))

    def go_on(
        self,
        lm: LM,
        folder: RunFolder,
        points: Sequence[SweepPoint],
        cases: Sequence[Case],
        *,
        crews: Crews = lambda run: nullcontext(None),
        done: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Evaluate what is not yet in the folder, point by point."""
        for point in points:
            failures = read_failures(folder.path)
            try:
                _go_on(lm, folder.path, point, cases, crews, done)
                failures.pop(point.name, None)
            except STOPPING:
                raise
            except FactscopeError as error:
                log.info("%s: %s", point.name, error)
                failures[point.name] = f"{type(error).__name__}: {error}"
                done(len(cases))
            write_failures(folder.path, failures)


def _go_on(
    lm: LM,
    path: Path,
    point: SweepPoint,
    cases: Sequence[Case],
    crews: Crews,
    done: Callable[[int], None],
) -> None:
    """One point, if it is not complete."""
    if isinstance(point.run, FactscopeError):
        raise point.run
    folder = point.run.begin(lm, point_path(path, point.settings))
    if point.run.complete(folder, cases):
        done(len(cases))
        return
    with crews(point.run) as crew:
        point.run.go_on(lm, folder, cases, crew=crew, done=done)
