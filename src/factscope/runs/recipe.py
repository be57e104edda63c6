"""Recipes: one TOML file for each table or figure, listing the runs and reports that make it.

title = "Table 4: editing on CounterFact, GPT-2 XL"

[common]                    # flags of every run whose command has them
model = "gpt2-xl"

[[run]]
name = "rome"               # its folder
command = "evaluate"
method = "rome"             # the command's flags, without dashes in front

[[run]]
name = "mend"
command = "evaluate"
method = "mend"
weights = "trained"         # a run of `train` before this one, or a file

[[report]]
runs = ["rome"]             # all runs but trainings, if not said
cases = "1,2"               # further flags of `factscope report`
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.errors import BadSetting

__all__ = ["Known", "Recipe", "Report", "Step", "flag_words", "read_recipe"]

Known = Mapping[str, Set[str]]
"""Command → the flags that it has."""

POSITIONAL = {"trace": ("prompt",), "train": ("method",)}
"""Command → what it takes without a flag."""
KEPT = {"train": ("data", "limit")}
"""Command → flags that keep what the recipe says, whatever is said instead: other cases to evaluate
are not other cases to learn from."""
FILES = ("data", "facts", "references", "prefixes", "text")
"""Flags that may name a file."""
TOP = ("title", "common", "run", "report")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One run of one command."""

    name: str
    command: str
    settings: Mapping[str, Any]
    """Flag → value."""

    @property
    def reported(self) -> bool:
        """Whether `factscope report` can read what it leaves."""
        return self.command in ("evaluate", "sweep", "train") or "facts" in self.settings


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is drawn of some of the runs."""

    name: str
    runs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The runs of a table or figure in order, and what is drawn of them."""

    title: str
    steps: tuple[Step, ...]
    reports: tuple[Report, ...]


def flag_words(settings: Mapping[str, Any], command: str = "") -> list[str]:
    """Settings as words of the command line."""
    bare = POSITIONAL.get(command, ())
    words = [str(settings[name]) for name in bare if name in settings]
    for name, value in settings.items():
        if name in bare or value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words


def read_recipe(path: Path, known: Known, changed: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe, checked; `changed` are flags that hold for every run instead of what it says."""
    said = _toml(path)
    _no_others(path, "", said, TOP)
    common = said.get("common", {})
    steps = [_step(path, i, run, common, known) for i, run in enumerate(_tables(path, said, "run"))]
    if not steps:
        raise BadSetting(f"{path} has no [[run]]; a recipe lists at least one")
    names = [step.name for step in steps]
    for i, step in enumerate(steps):
        _no_later_weights(path, step, steps[i:])
    if len(set(names)) < len(names):
        raise BadSetting(f"{path}: two runs have the same name, of {', '.join(names)}")
    unused = [key for key in common if not any(key in known[step.command] for step in steps)]
    if unused:
        raise BadSetting(f"{path}, [common]: no command of this recipe has {unused[0]!r}")
    return Recipe(
        title=_text(path, said, "title"),
        steps=tuple(_changed(step, changed or {}, known) for step in steps),
        reports=tuple(_report(path, x, steps, known) for x in _tables(path, said, "report")),
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"cannot read the recipe {path}: {error}") from error


def _tables(path: Path, said: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = said.get(name, [])
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise BadSetting(f"{path}: {name} must be tables, written [[{name}]]")
    return found


def _step(path: Path, i: int, run: dict, common: Mapping[str, Any], known: Known) -> Step:
    where = f", run {i + 1}"
    name, command = (_text(path, run, key, where) for key in ("name", "command"))
    if command not in known:
        raise BadSetting(f"{path}{where}: no command {command!r}; there are: {', '.join(known)}")
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise BadSetting(f"{path}{where}: {name!r} cannot name a folder")
    own = {key: value for key, value in run.items() if key not in ("name", "command")}
    _no_others(path, f"{where} ({name})", own, known[command])
    shared = {key: value for key, value in common.items() if key in known[command]}
    settings = {key: _beside(path, key, value) for key, value in {**shared, **own}.items()}
    return Step(name=name, command=command, settings=settings)


def _beside(path: Path, key: str, value: Any) -> Any:
    """A file that lies beside the recipe is meant, wherever the recipe is called from."""
    file = path.parent / value if key in FILES and isinstance(value, str) else None
    return str(file) if file is not None and file.is_file() else value


def _changed(step: Step, changed: Mapping[str, Any], known: Known) -> Step:
    can = known[step.command] - set(KEPT.get(step.command, ()))
    mine = {key: value for key, value in changed.items() if key in can}
    return Step(name=step.name, command=step.command, settings={**step.settings, **mine})


def _no_later_weights(path: Path, step: Step, later: Sequence[Step]) -> None:
    """Weights come from a run before."""
    wanted = step.settings.get("weights")
    if any(wanted == other.name for other in later):
        raise BadSetting(
            f"{path}: {step.name!r} takes the weights of {wanted!r}, which is trained after it; "
            "list that run first"
        )


def _report(path: Path, said: dict[str, Any], steps: Sequence[Step], known: Known) -> Report:
    own = {key: value for key, value in said.items() if key not in ("name", "runs")}
    _no_others(path, ", report", own, known["report"])
    possible = [step.name for step in steps if step.reported]
    results = [step.name for step in steps if step.reported and step.command != "train"]
    runs = said.get("runs", results or possible)
    lost = [name for name in runs if name not in possible]
    if lost or not runs:
        raise BadSetting(
            f"{path}, report: no run {lost[0] if lost else ''!r} that can be reported on; "
            f"there are: {', '.join(possible) or 'none'}"
        )
    return Report(name=str(said.get("name", "report")), runs=tuple(runs), settings=own)


def _text(path: Path, table: Mapping[str, Any], key: str, where: str = "") -> str:
    if not isinstance(table.get(key), str):
        raise BadSetting(f"{path}{where}: {key} is missing; it is a text")
    return table[key]


def _no_others(path: Path, where: str, table: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise BadSetting(
            f"{path}{where}: {unknown[0]!r} is not known; there are: {', '.join(sorted(known))}"
        )
