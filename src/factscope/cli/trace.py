"""factscope trace: where is this fact? One prompt, or a file of facts into a run's folder."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, progress, results, working
from factscope.cli.view import check_suffix, draw, print_trace
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.facts import Fact
    from factscope.lm.model import LM
    from factscope.runs.tracing import TraceRun
    from factscope.tracing.settings import Tracing

__all__ = ["trace"]

Corrupted = "Corruption"
Restored = "Restoration"


def trace(
    prompt: Annotated[str | None, typer.Argument(help="Text that leads up to the object.")] = None,
    subject: Annotated[str | None, typer.Option(help="The words that name the subject.")] = None,
    occurrence: Annotated[
        int | None, typer.Option(help="Which of the subject's places in the prompt, from 1.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="The answer that is expected.")] = None,
    facts: Annotated[
        Path | None, typer.Option(help="Trace every fact of a JSON or JSON-lines file.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many facts.", min=1)] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Figure (.png .svg .pdf .html), or folder of the run."),
    ] = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    memory: Annotated[
        str | None, typer.Option(help="Bound on memory beside the model, such as 4GiB.")
    ] = None,
    json: Json = False,
    preset: Annotated[
        str, typer.Option(help="default, or paper for what the paper's code computes.")
    ] = "default",
    noise: Annotated[
        str | None,
        typer.Option(help="3s for three σ, 0.25 for absolute.", rich_help_panel=Corrupted),
    ] = None,
    corrupt: Annotated[
        str | None,
        typer.Option(help="gaussian, uniform or embedding.", rich_help_panel=Corrupted),
    ] = None,
    replace_: Annotated[
        bool,
        typer.Option(
            "--replace", help="Noise instead of the embedding.", rich_help_panel=Corrupted
        ),
    ] = False,
    extra_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens after the subject to corrupt too.", rich_help_panel=Corrupted),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Draws of the noise.", rich_help_panel=Corrupted)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the noise.", rich_help_panel=Corrupted)
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="states, mlp or attn; repeatable.", rich_help_panel=Restored),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Layers restored together, mlp and attn.", rich_help_panel=Restored),
    ] = None,
    alignment: Annotated[
        str | None,
        typer.Option(help="text (l-4 … l+5) or code (l-5 … l+4).", rich_help_panel=Restored),
    ] = None,
    sever: Annotated[
        list[str] | None,
        typer.Option(help="Also sever mlp or attn; repeatable.", rich_help_panel=Restored),
    ] = None,
    sever_rows: Annotated[
        str | None,
        typer.Option(help="all tokens, or last_subject.", rich_help_panel=Restored),
    ] = None,
    sever_at: Annotated[
        str | None,
        typer.Option(help="restored token, or every token.", rich_help_panel=Restored),
    ] = None,
    gradients: Annotated[
        bool,
        typer.Option("--gradients", help="Integrated gradients too.", rich_help_panel=Restored),
    ] = False,
    gradient_path: Annotated[
        str | None,
        typer.Option(help="layer, or state: each alone, dearer.", rich_help_panel=Restored),
    ] = None,
) -> None:
    """Trace a fact: which states bring the answer back after the subject was hidden?"""
    from factscope.lm.load import load
    from factscope.runs.tracing import TraceRun
    from factscope.tracing.memory import parse_bytes

    settings = _settings(
        preset,
        corruption={
            **_level(noise), "distribution": corrupt, "replace": replace_ or None,
            "extra_tokens": extra_tokens, "samples": samples, "seed": seed,
        },
        tracing={
            "kinds": tuple(kind) if kind else None, "window": window, "alignment": alignment,
            "sever": tuple(sever) if sever else None, "sever_rows": sever_rows,
            "sever_at": sever_at, "gradients": gradients or None,
            "gradient_path": gradient_path,
        },
    )  # fmt: skip
    bound = None if memory is None else parse_bytes(memory)
    if facts is not None:
        if prompt is not None or out is None:
            raise BadSetting("--facts FILE goes with --out FOLDER and without a prompt")
        run = TraceRun(model=model, dtype=dtype, facts=facts, limit=limit, settings=settings)
        _many(run, device, device_map, out, bound, json)
        return
    if prompt is None or subject is None:
        raise BadSetting('give a prompt and its --subject "…", or --facts FILE --out FOLDER')
    fact = _fact(prompt, subject, occurrence, target)
    if out is not None:
        check_suffix(out)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    _one(lm, fact, settings, bound, out, json)


def _settings(preset: str, corruption: dict[str, Any], tracing: dict[str, Any]) -> "Tracing":
    """The preset with what was said otherwise."""
    from factscope.tracing.settings import PRESETS

    if preset not in PRESETS:
        raise BadSetting(f"the preset {preset!r} is not known; choose from {', '.join(PRESETS)}")
    base = PRESETS[preset]
    given = {k: v for k, v in tracing.items() if v is not None}
    noise = {k: v for k, v in corruption.items() if v is not None}
    return replace(base, corruption=replace(base.corruption, **noise), **given)


def _level(noise: str | None) -> dict[str, Any]:
    from factscope.tracing.corrupt import parse_level

    if noise is None:
        return {}
    level, in_sigmas = parse_level(noise)
    return {"level": level, "in_sigmas": in_sigmas}


def _fact(prompt: str, subject: str, occurrence: int | None, target: str | None) -> "Fact":
    from factscope.facts import Fact, occurrences

    fact = Fact.from_text(prompt, subject, occurrence, target=target)
    places = len(occurrences(prompt, subject))
    if places > 1 and occurrence is None:
        notes.print(
            f"The subject occurs {places} times in the prompt; the last is taken. "
            "Choose with --occurrence."
        )
    return fact


def _one(
    lm: "LM", fact: "Fact", settings: "Tracing", memory: int | None, out: Path | None, json: bool
) -> None:
    from factscope.tracing.trace import trace as trace_one

    with working(f"tracing {fact.text!r}") as done:
        record = trace_one(lm, fact, settings, memory=memory, done=done)
    if out is None and not json:
        out = Path("traces") / f"{_slug(fact.text)}.png"
    drawn = [] if out is None else draw(record, out)
    if json:
        print_json(record.to_json())
        return
    print_trace(record)
    results.print(f"Figure: {', '.join(map(str, drawn))}", soft_wrap=True)


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.casefold()).strip("-")[:60] or "trace"


def _many(
    run: "TraceRun",
    device: str,
    device_map: str | None,
    out: Path,
    memory: int | None,
    json: bool,
) -> None:
    from factscope.lm.load import load

    file = run.read()
    with doing(f"loading {run.model}"):
        lm = load(run.model, device=device, dtype=run.dtype, device_map=device_map)
    readable = run.fitting(lm, file.facts)
    problems = [*file.problems, *readable.problems]
    for problem in problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    folder = run.begin(lm, out)
    with progress("tracing", len(readable.facts)) as done:
        run.go_on(lm, folder, readable.facts, memory=memory, done=done)
    records = folder.records()
    known = sum(record.known for record in records)
    if json:
        summary = {"run": str(out), "facts": len(records), "known": known, "left_out": problems}
        print_json(summary)
        return
    said = f"{len(records)} facts, {known} known to {run.model}: {folder.records_path}"
    results.print(f"{said}\nNext: factscope report {out}", soft_wrap=True)
