"""What commands share: where words go, and progress bars. Results to stdout, the rest to stderr."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

__all__ = ["doing", "notes", "print_json", "progress", "results", "working"]

# Without markup: prompts, paths and tokens may hold square brackets of their own.
results = Console(highlight=False, markup=False)
notes = Console(stderr=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """One JSON value on standard output, and nothing else."""
    print(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


class Rate(ProgressColumn):
    """How many a second, or seconds each."""

    def render(self, task: Task) -> Text:
        """The rate in whichever unit is above one."""
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left; call what it yields with how many were done."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), Rate(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=notes, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def working(what: str) -> Iterator[Callable[[float], None]]:
    """A bar for one piece of work; call what it yields with each share that was done."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.advance(task, share)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A spinner with the time, for a step of unknown length."""
    description = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), description, TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True) as bar:
        bar.add_task(what, total=None)
        yield
