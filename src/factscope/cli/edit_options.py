"""The flags of `factscope edit`, each explained once, and the editor that they add up to."""

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from factscope.cli.stats import parse_layers
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.editing.editor import Editor

__all__ = ["check_token", "editor_of", "neurons_of", "prefixes_of", "second_moment_of"]


def _method(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Method")


def _judging(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Before and after")


Prompt = Annotated[str | None, typer.Argument(help="Text that leads up to the object.")]
Subject = Annotated[str | None, typer.Option(help="The words that name the subject.")]
To = Annotated[str | None, typer.Option(help="The new object.")]
Occurrence = Annotated[
    int | None, typer.Option(help="Which of the subject's places in the prompt, from 1.")
]
Facts = Annotated[
    Path | None, typer.Option(help="Write many facts at once: a file, or a data set by name.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many facts.", min=1)]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Keep the edit in this file.")]
Page = Annotated[Path | None, typer.Option(help="A page about the edit (.html).")]
Figure = Annotated[Path | None, typer.Option(help="Before and after as a figure (.png .svg .pdf).")]
Force = Annotated[
    bool,
    typer.Option("--force", help="Go on beyond the guard rails, or where it is said already."),
]

Paraphrase = Annotated[
    list[str] | None, _judging("Another way to ask, that should follow; repeatable.")
]
Neighbour = Annotated[
    list[str] | None, _judging("About another subject, that should stay; repeatable.")
]
TrueObject = Annotated[
    str | None, _judging("The old object; what the model says if not given.", "--true")
]
GenerateTokens = Annotated[int, _judging("How far texts go on; 0 for none.")]

MethodName = Annotated[
    str, _method("rome, r-rome, memit, ft, ft-l, attn, kn, mend or ke.", "--method")
]
Preset = Annotated[str, _method("default, or paper for what the paper's code computes.")]
LayerWord = Annotated[
    str | None,
    _method("A layer, auto for a causal trace of the fact, or 3-8 for memit.", "--layer", "-l"),
]
TokenName = Annotated[
    str | None,
    _method("Where to write: subject-last, subject-first, after-subject or last.", "--token"),
]
Stats = Annotated[
    list[Path] | None, _method("Statistics: a file or folder of `factscope stats`; repeatable.")
]
NoStats = Annotated[
    bool, _method("Without statistics (C = 1): disturbs other facts more.", "--no-stats")
]
Ridge = Annotated[
    float | None, _method("What is added to the statistics' diagonal, in units of its mean.")
]
Prefixes = Annotated[
    Path | None, _method("Texts to put before the prompt, one a line; {} where it goes.")
]
PrefixLengths = Annotated[
    str | None, _method("Prefixes that the model writes, as 5x10,10x10 (TOKENSxCOUNT), or none.")
]
Seed = Annotated[int | None, _method("Seed of the prefixes.")]
Steps = Annotated[int | None, _method("Steps of the search or of fine-tuning, at most.")]
Rate = Annotated[float | None, _method("Its learning rate.")]
Clamp = Annotated[float | None, _method("How long the change of a value may be, in its lengths.")]
Bound = Annotated[float | None, _method("How far fine-tuning may move an entry of a weight.")]
Weights = Annotated[
    Path | None, _method("Of mend or ke: the file that `factscope train` made.", "--weights")
]
Scale = Annotated[float | None, _method("What edits by mend or ke are multiplied by.")]

Neurons = Annotated[int | None, _method("kn: how many neurons to change at most.")]
Threshold = Annotated[
    float | None, _method("kn: which share of the highest score a neuron needs in a context.")
]
Share = Annotated[float | None, _method("kn: which share of the contexts must have a neuron.")]
NewWeight = Annotated[float | None, _method("kn: how much of the new object is added.")]
OldWeight = Annotated[float | None, _method("kn: how much of the old object is subtracted.")]

TRACED = ("rome", "r-rome")
"""Methods whose one layer a causal trace can choose."""


def editor_of(method: str, preset: str, said: dict[str, Any]) -> "Editor":
    """The preset's editor with what was said otherwise; None says nothing."""
    from factscope.editing.hypernet.editor import HypernetEditor
    from factscope.editing.methods import editor

    base: Any = editor(method, preset)
    said = {name: value for name, value in said.items() if value is not None}
    known = {field.name for field in fields(base)}
    if "layer" in said:
        said |= _layers(method, said.pop("layer"), many="layers" in known)
    if "token" in said:
        check_token(said["token"])
    within = {field.name for field in fields(base.search)} if "search" in known else set()
    unknown = [name for name in said if name not in known | within]
    if unknown:
        flags = ", ".join(_flag(name, said[name]) for name in unknown)
        raise BadSetting(f"{method} has no {flags}; leave it out, or choose another --method")
    search = {name: value for name, value in said.items() if name not in known}
    if search:
        said = {name: value for name, value in said.items() if name in known}
        said["search"] = replace(base.search, **search)
    made = editor(method, preset, **said)
    if isinstance(made, HypernetEditor):
        made.trained  # noqa: B018 - says how to train it, before anything is loaded
    if made.method != method:  # pyright: ignore[reportAttributeAccessIssue]
        raise BadSetting(f"with --max-change this is ft-l; say --method ft-l instead of {method}")
    return made


def neurons_of(
    neurons: int | None,
    threshold: float | None,
    share: float | None,
    new_weight: float | None,
    old_weight: float | None,
) -> dict[str, Any]:
    """What the flags of Knowledge Neurons say."""
    return {
        "most": neurons, "threshold": threshold, "share": share, "new_weight": new_weight,
        "old_weight": old_weight,
    }  # fmt: skip


def _flag(name: str, value: Any) -> str:
    """The flag that said a setting."""
    if name == "second_moment":
        name = "no-stats" if value == "identity" else "stats"
    if name == "most":
        name = "neurons"
    return "--" + name.replace("_", "-")


def _layers(method: str, word: str, *, many: bool) -> dict[str, Any]:
    """A number, auto, or the layers that share an edit."""
    if word.strip() == "auto":
        if method not in TRACED:
            raise BadSetting(
                f"--layer auto is for {' and '.join(TRACED)}; give {method} the number of a layer"
            )
        return {"layer": "auto"}
    found = parse_layers([word])
    if many:
        return {"layers": tuple(found)}
    if len(found) > 1:
        raise BadSetting(f"{method} writes into one layer, not into {word!r}; memit takes several")
    return {"layer": found[0]}


def check_token(token: str, flag: str = "--token") -> None:
    """A token that can be written at."""
    from factscope.editing.contexts import EditToken

    if token not in get_args(EditToken):
        raise BadSetting(f"{flag} {token!r} is not one of {', '.join(get_args(EditToken))}")


def second_moment_of(stats: list[Path] | None, without: bool) -> Any:
    """What --stats and --no-stats say of C; None for nothing."""
    if stats and without:
        raise BadSetting("give --stats FILE or --no-stats, not both")
    lost = [path for path in stats or [] if not path.exists()]
    if lost:
        raise BadSetting(f"there are no statistics at {lost[0]}; make them with `factscope stats`")
    return "identity" if without else tuple(stats) if stats else None


def prefixes_of(file: Path | None, lengths: str | None) -> dict[str, Any]:
    """What --prefixes and --prefix-lengths say."""
    from factscope.editing.contexts import parse_lengths, read_prefixes

    if file is not None and lengths is not None:
        raise BadSetting("give --prefixes FILE or --prefix-lengths, not both")
    if file is not None:
        return {"prefixes": read_prefixes(file)}
    return {} if lengths is None else {"prefix_lengths": parse_lengths(lengths)}
