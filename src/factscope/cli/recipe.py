"""factscope recipe: the runs of a table or figure, one after another, and then its reports."""

import io
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from factscope.cli.evaluate import EVALUATE, SWEEP
from factscope.cli.flags import Command, Options
from factscope.cli.output import note, print_json, say
from factscope.cli.report import REPORT
from factscope.cli.stats import COMMANDS as STATS
from factscope.cli.trace import TRACE
from factscope.cli.train import TRAIN
from factscope.errors import BadInput, BadSetting
from factscope.runs.folder import WEIGHTS
from factscope.runs.recipe import Flags, Recipe, flag_words, read_recipe
from factscope.settings import Flag

COMMANDS = {
    "evaluate": EVALUATE, "sweep": SWEEP, "trace": TRACE, "train": TRAIN,
    "stats": STATS["collect"], "report": REPORT,
}  # fmt: skip
"""The commands that a recipe can run."""
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
    dtype: str | None = None
    """Another number format."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """Options."""

    file: Annotated[Path, Flag(positional=True)]
    """A recipe (.toml); see recipes/."""
    out: Annotated[Path, Flag(short="o")]
    """Folder for its runs and reports. An interrupted recipe resumes."""
    dry_run: bool = False
    """Only print the commands, and which are finished."""
    replacements: Replacements = Replacements()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A run or a report as a command with its flags."""

    name: str
    command: str
    settings: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """The command line."""
        known = COMMANDS[self.command].settings(self.settings)
        positional = [name for name, setting in known.items() if setting.flag.positional]
        return [self.command, *flag_words(self.settings, positional)]

    @property
    def is_report(self) -> bool:
        """Whether it is a report; reports are written every time."""
        return self.command == "report"

    def run(self, as_json: bool) -> Any:
        """Run it in this process; with --json its result is returned."""
        command = COMMANDS[self.command]
        if not as_json:
            command(self.settings)
            return None
        with redirect_stdout(io.StringIO()) as written:
            command({**self.settings, "json": True})
        return json.loads(written.getvalue())


def recipe(options: RecipeOptions) -> None:
    """Reproduce a table or figure of the paper: do the unfinished runs, then write the reports."""
    changed = {name: x for name, x in vars(options.replacements).items() if x is not None}
    contents = read_recipe(options.file, known_flags(), changed)
    plan, finished = _plan(contents, options.out), _finished(options.out)
    for planned in plan:  # check all before the first runs; weights may not be trained yet
        given = {name: value for name, value in planned.settings.items() if name != "weights"}
        try:
            COMMANDS[planned.command].options(given)
        except BadInput as error:
            raise BadSetting(f"{options.file}, {planned.name}: {error}") from error
    if options.dry_run:
        _show(contents.title, plan, finished, options.json)
        return
    results: dict[str, Any] = {}
    for i, planned in enumerate(plan, 1):
        words = planned.words
        if finished.get(planned.name) == words:
            note(f"{i}/{len(plan)} {planned.name}: finished")
            continue
        note(f"{i}/{len(plan)} factscope {shlex.join(words)}")
        results[planned.name] = planned.run(options.json)
        if not planned.is_report:
            finished[planned.name] = words
            _save_finished(options.out, finished)
    if options.json:
        print_json({"recipe": contents.title, "out": str(options.out), "results": results})


RECIPE = Command(run=recipe, base=lambda given: RecipeOptions)


def known_flags() -> Flags:
    """Command → its flags that a recipe can give."""

    def flags_of(command: Command):
        def flags(given: Mapping[str, Any]) -> frozenset[str]:
            chosen = {name: x for name, x in given.items() if name in command.chosen_by}
            return frozenset(command.settings(chosen)) - OWN_FLAGS

        return flags

    return {name: flags_of(command) for name, command in COMMANDS.items()}


def _plan(contents: Recipe, out: Path) -> list[Planned]:
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
        plan.append(Planned(name=step.name, command=step.command, settings=settings))
    for report in contents.reports:
        runs = [str(out / name) for name in report.runs]
        settings = {"runs": runs, **report.settings, "out": str(out / report.name)}
        plan.append(Planned(name=f"report:{report.name}", command="report", settings=settings))
    return plan


def _finished(out: Path) -> dict[str, list[str]]:
    """The arguments of the finished runs whose output still exists, by name."""
    try:
        recorded = json.loads((out / FINISHED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        name: words
        for name, words in recorded.items()
        if "--out" not in words or Path(words[words.index("--out") + 1]).exists()
    }


def _save_finished(out: Path, finished: dict[str, list[str]]) -> None:
    from factscope.io import write_atomic

    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / FINISHED, json.dumps(finished, indent=2, ensure_ascii=False) + "\n")


def _show(
    title: str, plan: Sequence[Planned], finished: Mapping[str, list[str]], as_json: bool
) -> None:
    """Print the commands, and which are finished."""
    steps = [
        {
            "name": planned.name,
            "words": ["factscope", *planned.words],
            "finished": finished.get(planned.name) == planned.words,
        }
        for planned in plan
    ]
    if as_json:
        print_json({"recipe": title, "steps": steps})
        return
    say(title)
    for step in steps:
        say(shlex.join(step["words"]) + ("  # finished" if step["finished"] else ""))
