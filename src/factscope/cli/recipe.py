"""factscope recipe: the runs of a table or figure, one after another, and then its reports."""

import difflib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from factscope.cli.evaluate import evaluate, sweep
from factscope.cli.flags import Command, Dtype, Options
from factscope.cli.output import note, print_json
from factscope.cli.report import report
from factscope.cli.stats import collect
from factscope.cli.trace import trace
from factscope.cli.train import train
from factscope.errors import BadInput, BadSetting
from factscope.io import check_output_folder, locked, read_json, write_atomic
from factscope.runs.folder import WEIGHTS
from factscope.runs.recipe import Flags, Recipe, Step, flag_words, read_recipe
from factscope.settings import Flag

COMMANDS = {
    "evaluate": evaluate, "sweep": sweep, "trace": trace, "train": train, "stats": collect,
    "report": report,
}  # fmt: skip
"""The commands that a recipe can run."""
RECIPES = Path(__file__).parents[1] / "recipes"
"""The recipes of the package."""
OWN_FLAGS = {"out", "json", "runs"}
"""Flags that the recipe command sets itself."""
FINISHED = "finished.json"
"""File of the finished runs, with their arguments."""


@dataclass(frozen=True, kw_only=True)
class Replacements:
    """Instead of the recipe's values."""

    model: Annotated[str | None, Flag(short="m")] = None
    """Another model."""
    data: str | None = None
    """Other cases."""
    limit: Annotated[int | None, Ge(1)] = None
    """Another number of cases or facts."""
    device: str | None = None
    """Another device."""
    dtype: Dtype | None = None
    """Another number format."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    recipe: Annotated[str, Flag(positional=True)]
    """A name that `factscope recipe list` prints, or a file (.toml)."""
    out: Annotated[Path, Flag(short="o")]
    """Folder for its runs and reports. An interrupted recipe resumes."""
    dry_run: bool = False
    """Only print the commands, and which are finished."""
    replacements: Replacements = Replacements()


def _words(step: Step) -> list[str]:
    """The command line of a run or report."""
    known = COMMANDS[step.command].settings(step.settings)
    positional = [name for name, setting in known.items() if setting.flag.positional]
    return [step.command, *flag_words(step.settings, positional)]


def included_recipes() -> dict[str, Path]:
    """The recipes of the package by name: the paper's, small/… for laptops, default/…"""
    paths = sorted(RECIPES.rglob("*.toml"), key=_natural)
    return {path.relative_to(RECIPES).with_suffix("").as_posix(): path for path in paths}


def _natural(path: Path) -> tuple[int, list[Any]]:
    """Sort key: upper folders first, figure-2 before figure-13."""
    words = re.split(r"(\d+)", path.as_posix())
    return len(path.parts), [int(word) if word.isdecimal() else word for word in words]


def find_recipe(name: str) -> Path:
    """The file of an included recipe, or the file itself."""
    included = included_recipes()
    if name.endswith(".toml") or name in included:
        return included.get(name, Path(name))
    similar = difflib.get_close_matches(name, included, n=1)
    guess = f"did you mean {similar[0]!r}? " if similar else ""
    raise BadSetting(
        f"RECIPE is {name!r}; {guess}`factscope recipe list` prints the names, and a file ends in "
        ".toml"
    )


@Command
def list_(options: Options) -> None:
    """List the recipes that are included: name and what each reproduces."""
    titles = {
        name: tomllib.loads(path.read_text("utf-8"))["title"]
        for name, path in included_recipes().items()
    }
    width = max(map(len, titles))
    options.print_result(
        [{"name": name, "title": title} for name, title in titles.items()],
        *(f"{name:{width}}  {title}" for name, title in titles.items()),
    )


@Command
def run(options: RecipeOptions) -> None:
    """Reproduce a table or figure of the paper: do the unfinished runs, then write the reports."""
    changed = {name: x for name, x in vars(options.replacements).items() if x is not None}
    contents, out = read_recipe(find_recipe(options.recipe), known_flags(), changed), options.out
    plan, finished = _plan(contents, out), _finished(out)
    for step in plan:  # check all before the first runs; weights may not be trained yet
        given = {name: value for name, value in step.settings.items() if name != "weights"}
        try:
            COMMANDS[step.command].options(given)
        except BadInput as error:
            raise BadSetting(f"{options.recipe}, {step.name}: {error}") from error
    if options.dry_run:
        commands = [(step.name, _words(step)) for step in plan]
        steps = [
            {"name": name, "words": ["factscope", *words], "finished": finished.get(name) == words}
            for name, words in commands
        ]
        lines = [shlex.join(x["words"]) + ("  # finished" if x["finished"] else "") for x in steps]
        options.print_result({"recipe": contents.title, "steps": steps}, contents.title, *lines)
        return
    check_output_folder(out)
    results: dict[str, Any] = {}
    try:
        with locked(out):
            for i, step in enumerate(plan, 1):
                words = _words(step)
                if finished.get(step.name) == words:
                    note(f"{i}/{len(plan)} {step.name}: finished")
                    continue
                note(f"{i}/{len(plan)} factscope {shlex.join(words)}")
                results[step.name] = _run(step, options.json)
                if step.command != "report":  # reports are written every time
                    finished[step.name] = words
                    text = json.dumps(finished, indent=2, ensure_ascii=False) + "\n"
                    write_atomic(out / FINISHED, text)
    except KeyboardInterrupt as error:
        advice = ["the same command resumes"] if finished else error.args
        raise KeyboardInterrupt(*advice) from None
    if options.json:
        print_json({"recipe": contents.title, "out": out, "results": results})


def _run(step: Step, as_json: bool) -> Any:
    """Run it in this process; with --json its result is returned."""
    command = COMMANDS[step.command]
    if not as_json:
        command(step.settings)
        return None
    with redirect_stdout(io.StringIO()) as written:
        command({**step.settings, "json": True})
    return json.loads(written.getvalue())


def known_flags() -> Flags:
    """Command → its flags that a recipe can give."""

    def flags(command: Command, given: Mapping[str, Any]) -> frozenset[str]:
        chosen = {name: x for name, x in given.items() if name in command.kind.chosen_by}
        return frozenset(command.settings(chosen)) - OWN_FLAGS

    return {name: partial(flags, command) for name, command in COMMANDS.items()}


def _plan(contents: Recipe, out: Path) -> list[Step]:
    """The commands of all runs and reports, in order."""
    trained = {step.name for step in contents.steps if step.command == "train"}
    plan = []
    for step in contents.steps:
        settings = dict(step.settings)
        if settings.get("weights") in trained:
            settings["weights"] = str(out / settings["weights"] / WEIGHTS)
        if step.command != "stats":  # statistics go to the user's cache, where edits find them
            figure = step.command == "trace" and "facts" not in settings
            settings["out"] = str(out / (f"{step.name}.pdf" if figure else step.name))
        plan.append(Step(name=step.name, command=step.command, settings=settings))
    for entry in contents.reports:
        runs = [str(out / name) for name in entry.runs]
        settings = {"runs": runs, **entry.settings, "out": str(out / entry.name)}
        plan.append(Step(name=f"report:{entry.name}", command="report", settings=settings))
    return plan


def _finished(out: Path) -> dict[str, list[str]]:
    """The arguments of the finished runs whose output still exists, by name.

    Statistics have no --out: the command itself looks them up in the cache.
    """
    try:
        recorded = dict(read_json(out / FINISHED))
    except (BadInput, TypeError, ValueError):
        return {}
    return {
        name: words
        for name, words in recorded.items()
        if isinstance(words, list)
        and "--out" in words
        and Path(words[words.index("--out") + 1]).exists()
    }
