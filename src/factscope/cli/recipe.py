"""factscope recipe: the runs of a table or figure, one after another, and then its report."""

import io
import json as json_
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.evaluate import evaluate
from factscope.cli.options import Json
from factscope.cli.report import report
from factscope.cli.show import notes, print_json, results
from factscope.cli.stats import collect
from factscope.cli.sweep import sweep
from factscope.cli.trace import trace
from factscope.cli.train import train
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.runs.recipe import Recipe, Step

__all__ = ["commands", "known_flags", "recipe"]

OURS = ("out", "json", "help")
"""Flags that a recipe does not say: where things go is said once."""
FINISHED = "finished.json"
"""Which runs are finished, and with which words."""


def _instead(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Instead of what the recipe says")


def recipe(
    file: Annotated[Path, typer.Argument(help="A recipe (.toml); see recipes/.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of its runs; it can be gone on with.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the commands, and what is finished.")
    ] = False,
    model: Annotated[str | None, _instead("Another model.", "--model", "-m")] = None,
    data: Annotated[str | None, _instead("Other cases.")] = None,
    limit: Annotated[int | None, _instead("Another number of cases or facts.")] = None,
    device: Annotated[str | None, _instead("cpu, cuda, mps or auto.")] = None,
    dtype: Annotated[str | None, _instead("float32, tf32, bfloat16, float16 or auto.")] = None,
    json: Json = False,
) -> None:
    """Make a table or figure of the paper: every run of a recipe that is not finished, then draw.

    The same command goes on where it stopped.
    """
    from factscope.runs.recipe import read_recipe

    if out is None:
        raise BadSetting("give --out FOLDER: a recipe's runs and reports go there")
    instead = {"model": model, "data": data, "limit": limit, "device": device, "dtype": dtype}
    changed = {name: value for name, value in instead.items() if value is not None}
    known = commands()
    made = read_recipe(file, known_flags(known), changed)
    plan = _plan(made, out)
    for name, words in plan:
        _check(known, file, name, words)
    finished = _finished(out)
    if dry_run:
        _show(made.title, plan, finished, json)
        return
    said: dict[str, Any] = {}
    for i, (name, words) in enumerate(plan):
        if finished.get(name) == words:
            notes.print(f"{i + 1}/{len(plan)} {name}: finished", soft_wrap=True)
            continue
        notes.print(f"{i + 1}/{len(plan)} factscope {shlex.join(words)}", soft_wrap=True)
        said[name] = _run(known, words, json)
        if not name.startswith(REPORT):
            finished[name] = words
            _keep(out, finished)
    if json:
        print_json({"recipe": made.title, "out": str(out), "results": said})


REPORT = "report:"
"""Marks a report's name among those of the runs; reports are drawn every time."""


def commands() -> dict[str, Any]:
    """The commands that a recipe can name, as click knows them."""
    app = typer.Typer(add_completion=False)
    for name, command in (
        ("evaluate", evaluate), ("sweep", sweep), ("trace", trace), ("train", train),
        ("stats", collect), ("report", report),
    ):  # fmt: skip
        app.command(name)(command)
    return dict(typer.main.get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]


def known_flags(known: dict[str, Any]) -> dict[str, set[str]]:
    """Command → its flags without dashes in front, and its argument."""
    found = {}
    for name, command in known.items():
        flags = {
            word.lstrip("-")
            for parameter in command.params
            for word in (*parameter.opts, *parameter.secondary_opts)
            if len(word.lstrip("-")) > 1
        }
        found[name] = flags - set(OURS) - {"runs"}
    return found


def _plan(made: "Recipe", out: Path) -> list[tuple[str, list[str]]]:
    """Every run and every report, as words of the command line."""
    from factscope.runs.recipe import flag_words

    trained = {step.name for step in made.steps if step.command == "train"}
    plan = [(step.name, _words(step, out, trained)) for step in made.steps]
    for one in made.reports:
        runs = [str(out / name) for name in one.runs]
        words = ["report", *runs, *flag_words(one.settings), "--out", str(out / one.name)]
        plan.append((REPORT + one.name, words))
    return plan


def _words(step: "Step", out: Path, trained: set[str]) -> list[str]:
    from factscope.runs.folder import WEIGHTS
    from factscope.runs.recipe import flag_words

    settings = dict(step.settings)
    if settings.get("weights") in trained:
        settings["weights"] = out / settings["weights"] / WEIGHTS
    words = [step.command, *flag_words(settings, step.command)]
    if step.command == "stats":
        return words  # into the user's cache, where edits look for them
    figure = step.command == "trace" and "facts" not in step.settings
    return [*words, "--out", str(out / (f"{step.name}.pdf" if figure else step.name))]


def _check(known: dict[str, Any], file: Path, name: str, words: list[str]) -> None:
    """Let the command read its words, before the first of them runs."""
    try:
        known[words[0]].make_context(words[0], list(words[1:]))
    except Exception as error:
        if not hasattr(error, "format_message"):  # what click says of wrong words
            raise
        said = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        raise BadSetting(f"{file}, {name}: {said}") from error


def _run(known: dict[str, Any], words: list[str], json: bool) -> Any:
    """One command in this process; with --json what it says comes back as a value."""
    command, rest = words[0], _located(words[1:])
    if not json:
        known[command].main(rest, prog_name=command, standalone_mode=False)
        return None
    with redirect_stdout(io.StringIO()) as written:
        known[command].main([*rest, "--json"], prog_name=command, standalone_mode=False)
    return json_.loads(written.getvalue())


def _located(words: list[str]) -> list[str]:
    """Facts by the name of their data set; `trace` itself takes a file only."""
    from factscope.data.registry import DATA_SETS, find_data

    place = words.index("--facts") + 1 if "--facts" in words else None
    if place is None or words[place] not in DATA_SETS:
        return words
    return [*words[:place], str(find_data(words[place])), *words[place + 1 :]]


def _finished(out: Path) -> dict[str, list[str]]:
    """The runs that came to their end, if what they left is still there."""
    try:
        noted = json_.loads((out / FINISHED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        name: words
        for name, words in noted.items()
        if "--out" not in words or Path(words[words.index("--out") + 1]).exists()
    }


def _keep(out: Path, finished: dict[str, list[str]]) -> None:
    from factscope.io import write_atomic

    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / FINISHED, json_.dumps(finished, indent=2, ensure_ascii=False) + "\n")


def _show(
    title: str, plan: list[tuple[str, list[str]]], finished: dict[str, list[str]], json: bool
) -> None:
    """The commands, and which are finished."""
    steps = [
        {"name": name, "words": ["factscope", *words], "finished": finished.get(name) == words}
        for name, words in plan
    ]
    if json:
        print_json({"recipe": title, "steps": steps})
        return
    results.print(title, soft_wrap=True)
    for step in steps:
        done = "  # finished" if step["finished"] else ""
        results.print(shlex.join(step["words"]) + done, soft_wrap=True)
