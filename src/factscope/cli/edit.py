"""factscope edit: write a fact into a model, and see what changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from factscope.cli import edit_files
from factscope.cli import edit_options as flags
from factscope.cli.edit_stats import with_statistics
from factscope.cli.edit_view import tell_many, tell_one
from factscope.cli.group import DefaultGroup
from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.show import doing, notes, working
from factscope.cli.trace import fact_from
from factscope.errors import BadFact, BadSetting

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.editing.editor import Editor
    from factscope.facts import Case
    from factscope.lm.model import LM

__all__ = ["edit", "made_safely"]

edit = typer.Typer(
    cls=DefaultGroup, help="Write facts into a model, and see what changed.", no_args_is_help=True
)


@edit.command("write")
def write(
    prompt: flags.Prompt = None,
    subject: flags.Subject = None,
    to: flags.To = None,
    occurrence: flags.Occurrence = None,
    facts: flags.Facts = None,
    limit: flags.Limit = None,
    out: flags.Out = None,
    page: flags.Page = None,
    figure: flags.Figure = None,
    force: flags.Force = False,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
    true: flags.TrueObject = None,
    paraphrase: flags.Paraphrase = None,
    neighbour: flags.Neighbour = None,
    generate_tokens: flags.GenerateTokens = 40,
    method: flags.MethodName = "rome",
    preset: flags.Preset = "default",
    layer: flags.LayerWord = None,
    token: flags.TokenName = None,
    stats: flags.Stats = None,
    no_stats: flags.NoStats = False,
    prefixes: flags.Prefixes = None,
    prefix_lengths: flags.PrefixLengths = None,
    ridge: flags.Ridge = None,
    seed: flags.Seed = None,
    steps: flags.Steps = None,
    lr: flags.Rate = None,
    clamp: flags.Clamp = None,
    max_change: flags.Bound = None,
    neurons: flags.Neurons = None,
    threshold: flags.Threshold = None,
    share: flags.Share = None,
    new_weight: flags.NewWeight = None,
    old_weight: flags.OldWeight = None,
    weights: flags.Weights = None,
    scale: flags.Scale = None,
) -> None:
    """Write a fact, or a file of facts, and show before and after; "write" can be left out."""
    from factscope.lm.load import load

    _check_files(out, page, figure, facts)
    if facts is None:
        cases = [_case(prompt, subject, to, occurrence, true, paraphrase, neighbour)]
    else:
        _check_alone(prompt, subject, to, occurrence, true, paraphrase, neighbour)
        cases = _cases(facts, limit)
    editor = flags.editor_of(
        method,
        preset,
        {
            "layer": layer, "token": token, "seed": seed, "steps": steps, "lr": lr,
            "clamp": clamp, "max_change": max_change, "ridge": ridge, "weights": weights,
            "scale": scale,
            "second_moment": flags.second_moment_of(stats, no_stats),
            **flags.prefixes_of(prefixes, prefix_lengths),
            **flags.neurons_of(neurons, threshold, share, new_weight, old_weight),
        },
    )  # fmt: skip
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    cases, said = (cases, []) if force else _unsaid(lm, cases, alone=facts is None)
    made = made_safely(lm, editor, cases, force=force)
    if facts is None:
        tell_one(lm, made, cases[0], generate_tokens, out, page, figure, json)
    else:
        tell_many(lm, made, cases, out, said, json)


# ---- what was asked for


def _case(
    prompt: str | None,
    subject: str | None,
    to: str | None,
    occurrence: int | None,
    true: str | None,
    paraphrases: list[str] | None,
    neighbours: list[str] | None,
) -> "Case":
    """The case that the flags describe."""
    from factscope.facts import Case

    if prompt is None or subject is None or to is None:
        raise BadSetting('give a prompt, its --subject "…" and the new object --to "…", or --facts')
    if not to.strip():
        raise BadFact(f"the new object --to {to!r} is empty; say what it shall be")
    if any(not text.strip() for text in [*(paraphrases or ()), *(neighbours or ())]):
        raise BadFact("a --paraphrase or --neighbour is empty; leave it out")
    fact = fact_from(prompt, subject, occurrence, to.strip())
    return Case(
        fact=fact,
        true=true.strip() or None if true else None,
        paraphrases=tuple(paraphrases or ()),
        neighbours=tuple(neighbours or ()),
    )


def _cases(path: Path, limit: int | None) -> "list[Case]":
    """The cases of a file; what is wrong with others is said."""
    from factscope.data.readers import read_cases
    from factscope.data.registry import find_data

    file = read_cases(find_data(str(path)))
    for problem in file.problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    return list(file.cases[:limit])


def _check_alone(*given: Any) -> None:
    if any(given):
        raise BadSetting("--facts FILE has the prompts, subjects and objects; leave those out")


def _check_files(
    out: Path | None, page: Path | None, figure: Path | None, facts: Path | None
) -> None:
    """Say at once that a file could not be written, not after the work."""
    if out is not None and out.is_dir():
        raise BadSetting(f"--out {out} is a folder; give the name of a file, such as rome.edit")
    if page is not None and page.suffix != ".html":
        raise BadSetting(f"--page {page} must end in .html")
    if figure is not None and figure.suffix not in (".png", ".svg", ".pdf"):
        raise BadSetting(f"--figure {figure} must end in .png, .svg or .pdf")
    if facts is not None and (page or figure):
        raise BadSetting("--page and --figure are for one fact; leave them out with --facts")


def _unsaid(lm: "LM", cases: "list[Case]", *, alone: bool) -> "tuple[list[Case], list[str]]":
    """The cases whose new object the model does not give already, and words about the others."""
    from factscope.evaluation.before_after import already_predicted

    with doing("asking the model as it is"):
        known = already_predicted(lm, [case.fact for case in cases])
    said = [
        f"{lm.name} says {case.fact.target!r} after {case.fact.text!r} already"
        for case, is_said in zip(cases, known, strict=True)
        if is_said
    ]
    if len(said) == len(cases):
        more = "" if alone else f", and so on for all {len(cases)} facts"
        raise BadFact(f"{said[0]}{more}; there is nothing to change (--force writes it anyhow)")
    for words in said:
        notes.print(f"left out: {words}", soft_wrap=True)
    return [case for case, is_said in zip(cases, known, strict=True) if not is_said], said


# ---- the edit


def made_safely(
    lm: "LM", editor: "Editor", cases: "Sequence[Case]", *, force: bool = False
) -> "Edit":
    """The edit that writes all the cases, refused beyond the guard rails unless forced."""
    from factscope.editing.checks import with_checks

    facts = [case.request for case in cases]
    editor = with_statistics(lm, editor, facts)
    what = repr(facts[0].text) if len(facts) == 1 else f"{len(facts)} facts"
    with working(f"editing {what}") as done:
        made = editor(lm, facts, progress=done)
    if made.checks is None:
        [made] = with_checks(lm, [made])
    assert made.checks is not None
    if not force:
        made.checks.refuse()
    for complaint in made.checks.complaints():
        notes.print(f"beyond the guard rails: {complaint}", style="bold red", soft_wrap=True)
    return made


edit.command("show")(edit_files.show)
edit.command("apply")(edit_files.apply)
edit.command("export")(edit_files.export)
edit.command("merge")(edit_files.merge)
