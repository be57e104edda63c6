"""factscope trace: where is this fact? One prompt, or a file of facts into a run's folder."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from factscope.cli import trace_options as flags
from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, progress, results, working
from factscope.cli.view import check_suffix, draw, print_trace
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.facts import Fact
    from factscope.lm.model import LM
    from factscope.runs.trace import TraceRun
    from factscope.tracing.settings import Tracing

__all__ = ["fact_from", "trace"]


def trace(
    prompt: flags.Prompt = None,
    subject: flags.Subject = None,
    occurrence: flags.Occurrence = None,
    target: flags.Target = None,
    facts: flags.Facts = None,
    limit: flags.Limit = None,
    out: flags.Out = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    memory: flags.Memory = None,
    json: Json = False,
    preset: flags.Preset = "default",
    noise: flags.Noise = None,
    corrupt: flags.Corrupt = None,
    replace: flags.Replace = False,
    extra_tokens: flags.ExtraTokens = None,
    samples: flags.Samples = None,
    seed: flags.Seed = None,
    kind: flags.Kind = None,
    window: flags.Window = None,
    alignment: flags.Alignment = None,
    sever: flags.Sever = None,
    sever_rows: flags.SeverRows = None,
    sever_at: flags.SeverAt = None,
    gradients: flags.Gradients = False,
    gradient_path: flags.GradientPath = None,
) -> None:
    """Trace a fact: which states bring the answer back after the subject was hidden?"""
    from factscope.data.registry import find_data
    from factscope.lm.load import load
    from factscope.lm.memory import parse_bytes
    from factscope.runs.trace import TraceRun

    settings = flags.settings_of(
        preset,
        noise,
        {"distribution": corrupt, "replace": replace, "extra_tokens": extra_tokens,
         "samples": samples, "seed": seed},
        {"kinds": kind, "window": window, "alignment": alignment, "sever": sever,
         "sever_rows": sever_rows, "sever_at": sever_at, "gradients": gradients,
         "gradient_path": gradient_path},
    )  # fmt: skip
    bound = None if memory is None else parse_bytes(memory)
    if facts is not None:
        if prompt is not None or out is None:
            raise BadSetting("--facts FILE goes with --out FOLDER and without a prompt")
        file = find_data(str(facts))
        run = TraceRun(model=model, dtype=dtype, facts=file, limit=limit, settings=settings)
        _many(run, device, device_map, out, bound, json)
        return
    if prompt is None or subject is None:
        raise BadSetting('give a prompt and its --subject "…", or --facts FILE --out FOLDER')
    fact = fact_from(prompt, subject, occurrence, target)
    if out is not None:
        check_suffix(out)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    _one(lm, fact, settings, bound, out, json)


def fact_from(prompt: str, subject: str, occurrence: int | None, target: str | None) -> "Fact":
    """The fact of a prompt; where its subject occurs twice, a note says which is taken."""
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
        record = trace_one(lm, fact, settings, memory=memory, progress=done)
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
        run.go_on(lm, folder, readable.facts, memory=memory, progress=done)
    records = folder.records()
    known = sum(record.known for record in records)
    if json:
        summary = {"run": str(out), "facts": len(records), "known": known, "left_out": problems}
        print_json(summary)
        return
    said = f"{len(records)} facts, {known} known to {run.model}: {folder.records_path}"
    results.print(f"{said}\nNext: factscope report {out}", soft_wrap=True)
