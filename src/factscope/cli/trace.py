"""factscope trace: where is this fact? One prompt, or a file of facts into a run's folder."""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Device, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, progress, results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.facts import Fact
    from factscope.lm.model import LM
    from factscope.records import TraceRecord
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
        bool, typer.Option(help="Integrated gradients too.", rich_help_panel=Restored)
    ] = False,
) -> None:
    """Trace a fact: which states bring the answer back after the subject was hidden?"""
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
        },
    )  # fmt: skip
    bound = None if memory is None else parse_bytes(memory)
    if facts is not None:
        if prompt is not None or out is None:
            raise BadSetting("--facts FILE goes with --out FOLDER and without a prompt")
        _many(model, device, dtype, facts, limit, out, settings, bound, json)
        return
    if prompt is None or subject is None:
        raise BadSetting('give a prompt and its --subject "…", or --facts FILE --out FOLDER')
    fact = _fact(prompt, subject, occurrence, target)
    if out is not None:
        _check_suffix(out)
    _one(_load(model, device, dtype), fact, settings, bound, out, json)


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


def _load(model: str, device: str, dtype: str) -> "LM":
    from factscope.lm.load import load

    with doing(f"loading {model}"):
        return load(model, device=device, dtype=dtype)


def _one(
    lm: "LM", fact: "Fact", settings: "Tracing", memory: int | None, out: Path | None, json: bool
) -> None:
    from factscope.tracing.trace import trace as trace_one

    with doing(f"tracing {fact.text!r}"):
        record = trace_one(lm, fact, settings, memory=memory)
    if out is None and not json:
        out = Path("traces") / f"{_slug(fact.text)}.png"
    if out is not None:
        _draw(record, out)
    if json:
        print_json(record.to_json())
        return
    _print(record)
    results.print(f"Figure: {out}", soft_wrap=True)


def _print(record: "TraceRecord") -> None:
    """The answer, the three probabilities, the strongest cells, a small heat map."""
    from rich.text import Text

    from factscope.report.terminal import strongest_cells, trace_heatmap

    first = next(iter(record.restored), None)
    said = Text.assemble((record.fact.text, "bold"), f" →{record.answer}")
    results.print(said, soft_wrap=True)
    if not record.known:
        expected = f" {record.fact.target!r} was expected; averages leave such a fact out."
        results.print(Text.assemble(("Not known:", "yellow"), expected))
    best = max((x or 0) for row in record.restored[first] for x in row) if first else 0
    results.print(
        f"P clean {record.clean:.3f}   corrupted {record.corrupted:.3f}   "
        f"restored, at best {best:.3f}"
    )
    for kind in record.restored:
        results.print(trace_heatmap(record, kind))
    for kind in record.restored:
        results.print(strongest_cells(record, kind, count=3))


def _draw(record: "TraceRecord", out: Path) -> None:
    from factscope.report.figures import gradients_figure, save_figure, traces_figure
    from factscope.report.page import trace_page
    from factscope.report.save import save_text

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        save_text(out, trace_page(record))
    else:
        save_figure(gradients_figure(record) if record.gradients else traces_figure(record), out)


def _check_suffix(out: Path) -> None:
    if out.suffix not in (".png", ".svg", ".pdf", ".html"):
        raise BadSetting(f"--out {out} must end in .png, .svg, .pdf or .html")


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.casefold()).strip("-")[:60] or "trace"


def _many(
    model: str,
    device: str,
    dtype: str,
    facts: Path,
    limit: int | None,
    out: Path,
    settings: "Tracing",
    memory: int | None,
    json: bool,
) -> None:
    from factscope.runs.tracing import TraceRun

    run = TraceRun(model=model, dtype=dtype, facts=facts, limit=limit, settings=settings)
    file = run.read()
    for problem in file.problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    lm = _load(model, device, dtype)
    folder = run.begin(lm, out)
    with progress("tracing", len(file.facts)) as done:
        run.go_on(lm, folder, file.facts, memory=memory, done=done)
    records = folder.records()
    known = sum(record.known for record in records)
    if json:
        print_json({"run": str(out), "facts": len(records), "known": known,
                    "left_out": list(file.problems)})  # fmt: skip
        return
    summary = f"{len(records)} facts, {known} known to {model}: {folder.records_path}"
    results.print(f"{summary}\nNext: factscope report {out}", soft_wrap=True)
