"""The flags of `factscope trace`, each explained once, and the settings that they add up to."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.tracing.settings import Tracing

__all__ = ["settings_of"]


def _corruption(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Corruption")


def _restoration(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Restoration")


Prompt = Annotated[str | None, typer.Argument(help="Text that leads up to the object.")]
Subject = Annotated[str | None, typer.Option(help="The words that name the subject.")]
Occurrence = Annotated[
    int | None, typer.Option(help="Which of the subject's places in the prompt, from 1.")
]
Target = Annotated[str | None, typer.Option(help="The answer that is expected.")]
Facts = Annotated[
    Path | None, typer.Option(help="Trace every fact of a file, or of a data set: known.")
]
Limit = Annotated[int | None, typer.Option(help="Only the first so many facts.", min=1)]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Figure (.png .svg .pdf .html), or folder of the run."),
]
Memory = Annotated[str | None, typer.Option(help="Bound on memory beside the model, such as 4GiB.")]
Preset = Annotated[str, typer.Option(help="default, or paper for what the paper's code computes.")]

Noise = Annotated[str | None, _corruption("3s for three σ, 0.25 for absolute.")]
Corrupt = Annotated[str | None, _corruption("gaussian, uniform or embedding.")]
Replace = Annotated[bool, _corruption("Noise instead of the embedding.", "--replace")]
ExtraTokens = Annotated[int | None, _corruption("Tokens after the subject to corrupt too.")]
Samples = Annotated[int | None, _corruption("Draws of the noise.")]
Seed = Annotated[int | None, _corruption("Seed of the noise.")]

Kind = Annotated[list[str] | None, _restoration("states, mlp or attn; repeatable.")]
Window = Annotated[int | None, _restoration("Layers restored together, mlp and attn.")]
Alignment = Annotated[str | None, _restoration("text (l-4 … l+5) or code (l-5 … l+4).")]
Sever = Annotated[list[str] | None, _restoration("Also sever mlp or attn; repeatable.")]
SeverRows = Annotated[str | None, _restoration("all tokens, or last_subject.")]
SeverAt = Annotated[str | None, _restoration("restored token, or every token.")]
Gradients = Annotated[bool, _restoration("Integrated gradients too.", "--gradients")]
GradientPath = Annotated[str | None, _restoration("layer, or state: each alone, dearer.")]


def settings_of(
    preset: str, noise: str | None, corruption: dict[str, Any], tracing: dict[str, Any]
) -> "Tracing":
    """The preset with what was said otherwise; an empty value says nothing."""
    from factscope.tracing.settings import PRESETS

    if preset not in PRESETS:
        raise BadSetting(f"the preset {preset!r} is not known; choose from {', '.join(PRESETS)}")
    base = PRESETS[preset]
    noise_said = {**_level(noise), **_said(corruption)}
    return replace(base, corruption=replace(base.corruption, **noise_said), **_said(tracing))


def _said(values: dict[str, Any]) -> dict[str, Any]:
    # By identity: a window of 0 was said, and is refused later; == would take it for False.
    said = {name: v for name, v in values.items() if v is not None and v is not False}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in said.items() if v != []}


def _level(noise: str | None) -> dict[str, Any]:
    from factscope.tracing.settings import parse_noise_level

    if noise is None:
        return {}
    level, in_sigmas = parse_noise_level(noise)
    return {"level": level, "in_sigmas": in_sigmas}
