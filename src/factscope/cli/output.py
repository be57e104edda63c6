"""Output of commands: results to stdout; notes and progress bars to stderr."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box, progress
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from factscope.errors import BadSetting

# Without markup: prompts, paths and tokens may contain square brackets.
results = Console(highlight=False, markup=False)
notes = Console(stderr=True, highlight=False, markup=False)


def say(line: RenderableType, style: str | None = None) -> None:
    """Print a line or a table of the result on stdout."""
    results.print(line, style=style, soft_wrap=isinstance(line, str | Text))


def note(text: str, style: str | None = None) -> None:
    """Print a note on stderr."""
    notes.print(text, style=style, soft_wrap=True)


def skipped(problems: Iterable[str]) -> None:
    """Print on stderr what was skipped, and why."""
    for problem in problems:
        note(f"skipped: {problem}")


def print_json(value: Any) -> None:
    """Print one JSON value on stdout; paths become text, NaN and infinity become null."""
    if not isinstance(value, str):
        text = json.dumps(value, default=os.fspath)
        value = json.dumps(json.loads(text, parse_constant=lambda _: None), ensure_ascii=False)
    print(value)


def text_table(columns: Iterable[str], rows: Iterable[Iterable[str]], **options: Any) -> Table:
    """A table to print; options are those of `rich.table.Table`."""
    table = Table(*columns, box=box.SIMPLE, **options)
    for row in rows:
        table.add_row(*row)
    return table


def check_suffix(path: Path | None, flag: str, *suffixes: str) -> None:
    """Raise BadSetting for a file with another suffix: before the work, not after it."""
    if path is not None and path.suffix.lower() not in suffixes:
        raise BadSetting(f"--{flag} is {str(path)!r}; it must end in {' or '.join(suffixes)}")


FIRST_LINE = 1.0
"""Seconds until the first line of progress where there is no terminal; then every doubling."""
MAX_INTERVAL = 60.0
"""Seconds between two such lines at most."""


class Rate(progress.ProgressColumn):
    """Items per second, or seconds per item."""

    def render(self, task: progress.Task) -> Text:
        """The rate in whichever unit is above one."""
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:.1f}/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s each")


@contextmanager
def _bar(what: str, total: int | float | None, *columns: Any, **options: Any) -> Iterator[Callable]:
    """A bar with the elapsed time and, if the length is known, the ETA.

    Without a terminal, a plain line now and then, if the length is known.
    """
    columns = (
        progress.TextColumn("{task.description}", markup=False), *columns,
        progress.TimeElapsedColumn(),
    )  # fmt: skip
    if total is not None:
        columns = (*columns, progress.TextColumn("left"), progress.TimeRemainingColumn())
    plain = not notes.is_terminal or notes.is_dumb_terminal
    with progress.Progress(*columns, console=notes, disable=plain, **options) as bar:
        bar.add_task(what, total=total)
        (task,) = bar.tasks
        done, next_line = 0.0, FIRST_LINE

        def advance(amount: float) -> None:
            nonlocal done, next_line
            done += amount
            # Fractions do not add up exactly: 4.9999999 of 5 are 5.
            bar.update(task.id, completed=round(done, 6))
            elapsed = task.elapsed or 0.0
            if plain and elapsed >= (FIRST_LINE if task.finished else next_line):
                texts = (c.render(task) for c in columns if not isinstance(c, progress.BarColumn))
                note(" ".join(filter(None, (text.plain for text in texts))))
                next_line = elapsed + min(elapsed, MAX_INTERVAL)

        yield advance


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[float], None]]:
    """A bar with rate and ETA; call it with the number of items done."""
    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), Rate())
    with _bar(what, total, *columns, speed_estimate_period=300) as advance:
        yield advance


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[float], None]]:
    """A bar with ETA; call it with the fraction done. With a total it counts items, with rate."""
    if total is not None:
        with counting(what, total) as advance:
            yield lambda fraction: advance(fraction * total)
        return
    columns = (progress.BarColumn(), progress.TaskProgressColumn())
    with _bar(what, 1.0, *columns, transient=True) as advance:
        yield advance


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A spinner with the elapsed time, for work of unknown length."""
    with _bar(what, None, progress.SpinnerColumn(), transient=True):
        yield
