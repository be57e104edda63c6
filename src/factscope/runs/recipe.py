"""Recipes: one TOML file for each table or figure, listing the runs and reports that produce it.

title = "Table 4: editing on CounterFact, GPT-2 XL"

[common]                    # flags of every run whose command has them
model = "gpt2-xl"

[[run]]
name = "rome"               # its folder
command = "evaluate"
method = "rome"             # the flags of the command, without dashes

[[run]]
name = "mend"
command = "evaluate"
method = "mend"
weights = "trained"         # a run of `train` before this one, or a file

[[report]]
runs = ["rome"]             # all runs but trainings, if not given
cases = "1,2"               # further flags of `factscope report`
"""

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from factscope.errors import BadSetting

Flags = Mapping[str, Callable[[Mapping[str, Any]], Set[str]]]
"""Command → the names of its flags, which may depend on settings such as the method."""

FIXED = {"train": ("data", "limit")}
"""Command → flags that always have the recipe's value: other evaluation cases must not change
training."""
FILES = ("data", "facts", "references", "prefixes", "text")
"""Flags that may name a file."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of one command."""

    name: str
    command: str
    settings: Mapping[str, Any]
    """Flag → value."""

    @property
    def reported(self) -> bool:
        """Whether `factscope report` can read its folder."""
        return self.command in ("evaluate", "sweep", "train") or "facts" in self.settings


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report on some of the runs."""

    name: str
    runs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The runs of a table or figure in order, and the reports on them."""

    title: str
    steps: tuple[Step, ...]
    reports: tuple[Report, ...]


def flag_words(settings: Mapping[str, Any], positional: Collection[str] = ()) -> list[str]:
    """Settings as command-line arguments."""
    words: list[str] = []
    for name in (*positional, *(name for name in settings if name not in positional)):
        value = settings.get(name, False)
        for element in value if isinstance(value, list) else [value]:
            flag = [] if name in positional else [f"--{name}"]
            words += [] if element is False else flag if element is True else [*flag, str(element)]
    return words


def read_recipe(path: Path, flags: Flags, changed: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe, checked; `changed` are flags that replace those of every run."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSetting(f"cannot read the recipe {path}: {error}") from error
    _check_known(path, "", content, ("title", "common", "run", "report"))
    common, tables = content.get("common", {}), _tables(path, content, "run")
    steps = [_step(path, f", run {i}", run, common, flags) for i, run in enumerate(tables, 1)]
    _check_steps(path, steps)
    for key in common:
        if not any(key in step.settings for step in steps):
            raise BadSetting(f"{path}, [common]: no command of this recipe has {key!r}")
    return Recipe(
        title=_text(path, content, "title"),
        steps=tuple(_override(step, changed or {}, flags) for step in steps),
        reports=tuple(_report(path, x, steps, flags) for x in _tables(path, content, "report")),
    )


def _tables(path: Path, content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    tables = content.get(name, [])
    tables = [tables] if isinstance(tables, dict) else tables
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadSetting(f"{path}: {name} must be tables, written [[{name}]]")
    return tables


def _step(path: Path, where: str, run: dict, common: Mapping[str, Any], flags: Flags) -> Step:
    name, command = (_text(path, run, key, where) for key in ("name", "command"))
    if command not in flags:
        raise BadSetting(f"{path}{where}: no command {command!r}; choose from {', '.join(flags)}")
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise BadSetting(f"{path}{where}: {name!r} cannot name a folder")
    run_settings = {key: value for key, value in run.items() if key not in ("name", "command")}
    known = flags[command]({**common, **run_settings})
    _check_known(path, f"{where} ({name})", run_settings, known)
    settings = {key: x for key, x in {**common, **run_settings}.items() if key in known}
    for key in FILES:  # a file in the recipe's folder is found from any working directory
        value = settings.get(key)
        if isinstance(value, str) and (path.parent / value).is_file():
            settings[key] = str(path.parent / value)
    return Step(name=name, command=command, settings=settings)


def _override(step: Step, changed: Mapping[str, Any], flags: Flags) -> Step:
    known = flags[step.command](step.settings) - set(FIXED.get(step.command, ()))
    applicable = {key: value for key, value in changed.items() if key in known}
    return replace(step, settings={**step.settings, **applicable})


def _check_steps(path: Path, steps: Sequence[Step]) -> None:
    names = [step.name for step in steps]
    if not steps:
        raise BadSetting(f"{path} has no [[run]]; a recipe lists at least one")
    if len(set(names)) < len(names):
        raise BadSetting(f"{path}: two runs have the same name, of {', '.join(names)}")
    for i, step in enumerate(steps):
        if step.settings.get("weights") in names[i:]:
            raise BadSetting(
                f"{path}: {step.name!r} uses the weights of {step.settings['weights']!r}, which is "
                "trained after it; list that run first"
            )


def _report(path: Path, table: dict[str, Any], steps: Sequence[Step], flags: Flags) -> Report:
    settings = {key: value for key, value in table.items() if key not in ("name", "runs")}
    _check_known(path, ", report", settings, flags["report"](settings))
    reportable = [step.name for step in steps if step.reported]
    default = [step.name for step in steps if step.reported and step.command != "train"]
    runs = table.get("runs", default or reportable)
    missing = [name for name in runs if name not in reportable]
    if missing or not runs:
        raise BadSetting(
            f"{path}, report: no run {missing[0] if missing else ''!r} that can be reported on; "
            f"choose from {', '.join(reportable) or 'none'}"
        )
    return Report(name=str(table.get("name", "report")), runs=tuple(runs), settings=settings)


def _text(path: Path, table: Mapping[str, Any], key: str, where: str = "") -> str:
    if not isinstance(table.get(key), str):
        raise BadSetting(f"{path}{where}: {key} is missing; give a text")
    return table[key]


def _check_known(path: Path, where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    for key in table:
        if key not in known:
            names = ", ".join(sorted(known))
            raise BadSetting(f"{path}{where}: {key!r} is not known; choose from {names}")
