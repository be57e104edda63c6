"""factscope generate: go on with texts, with edits in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.edit_files import EditModel, load_edits, model_for, total_of
from factscope.cli.options import Device, DeviceMap, Dtype, Json
from factscope.cli.show import doing, print_json, results
from factscope.errors import BadSetting, PromptTooLong

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.lm.model import LM

__all__ = ["generate"]


def generate(
    prompts: Annotated[list[str], typer.Argument(help="Texts to go on with.")],
    edit: Annotated[
        list[Path] | None, typer.Option("--edit", "-e", help="An edit to put on; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="How far to go.", min=1)] = 50,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="The likeliest token each time, instead of a draw.")
    ] = False,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among so many of the likeliest; 5 if not given.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Beside the model without the edits.")
    ] = False,
    model: EditModel = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Go on with texts, as the model is or with edits in place; no weights are written."""
    if greedy and top_k is not None:
        raise BadSetting("give --greedy or --top-k N, not both")
    if compare and not edit:
        raise BadSetting("--compare needs an --edit FILE to compare with")
    edits = load_edits(edit or [])
    total = total_of(edits) if edits else None
    lm = _load(edits, model, device, dtype, device_map)
    _check_room(lm, prompts, tokens)
    among = None if greedy else top_k or AMONG
    with doing("writing"):
        before = _say(lm, None, prompts, tokens, among, seed) if compare else None
        said = _say(lm, total, prompts, tokens, among, seed)
    if json:
        print_json({"model": lm.name, "edits": list(map(str, edit or [])),
                    "texts": _texts(prompts, said, before)})  # fmt: skip
        return
    _print(prompts, said, before, total)


AMONG = 5
"""Draws are among so many tokens, as in the paper."""


def _load(
    edits: "Sequence[Edit]", model: str | None, device: str, dtype: str, device_map: str | None
) -> "LM":
    from factscope.lm.load import load
    from factscope.lm.sources import DEFAULT_MODEL

    if edits:
        return model_for(edits, model, device, dtype, device_map)
    name = model or DEFAULT_MODEL
    with doing(f"loading {name}"):
        return load(name, device=device, dtype=dtype, device_map=device_map)


def _check_room(lm: "LM", prompts: Sequence[str], tokens: int) -> None:
    from factscope.lm.tokens import encode

    longest = max(len(encode(lm, text)) for text in prompts)
    if lm.context is not None and longest + tokens > lm.context:
        raise PromptTooLong(
            f"a prompt of {longest} tokens and {tokens} more do not fit: {lm.name} reads at most "
            f"{lm.context}; take fewer --tokens"
        )


def _say(
    lm: "LM", edit: "Edit | None", prompts: Sequence[str], tokens: int, among: int | None, seed: int
) -> list[str]:
    from factscope.editing.per_row import edited
    from factscope.lm.generate import argmax_choice, top_k_choice
    from factscope.lm.generate import generate as generate_texts

    choose = argmax_choice if among is None else top_k_choice(among, seed)
    with edited(lm, [edit]):
        return generate_texts(lm, prompts, tokens, choose)


def _texts(
    prompts: Sequence[str], said: Sequence[str], before: Sequence[str] | None
) -> list[dict[str, Any]]:
    rows = [{"text": text, "says": words} for text, words in zip(prompts, said, strict=True)]
    if before is None:
        return rows
    return [{**row, "unedited": words} for row, words in zip(rows, before, strict=True)]


def _print(
    prompts: Sequence[str], said: Sequence[str], before: Sequence[str] | None, total: "Edit | None"
) -> None:
    from rich.text import Text

    from factscope.records import Generation
    from factscope.report.terminal import side_by_side

    objects = [fact.target or "" for fact in total.facts] if total else []
    for i, (text, words) in enumerate(zip(prompts, said, strict=True)):
        if before is None:
            results.print(Text.assemble((text, "bold"), words), soft_wrap=True)
        else:
            results.print(
                side_by_side(Generation(text=text, before=before[i], after=words), objects)
            )
