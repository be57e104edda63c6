"""Where the default model stores the facts it knows: the runs behind docs/results.md.

    python bench/known_facts.py known_1000.json.gz RUNS --device cuda
    python bench/known_facts.py --summary RUNS

The first command traces every fact of the file that the model knows, with each of the settings in
`RUNS`, into a run folder each (RUNS/three-sigma, …). The second prints the tables of all runs that
are there. `factscope report RUNS/three-sigma` draws one of them. Neither command needs matplotlib.

`--pack FOLDER` also writes each finished run to FOLDER/NAME.tar.gz, with numbers rounded to six
digits: to trace on one machine and report on another. `tar xzf NAME.tar.gz -C RUNS` unpacks it.
"""

import argparse
import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from factscope.analysis.attention import average_heads, average_knockout
from factscope.analysis.attribution import compare_attribution, has_attribution
from factscope.analysis.effects import (
    LAST,
    LAST_SUBJECT,
    AverageEffects,
    average_effects,
    average_kinds,
    has_severed,
    indirect_effects,
    severed_comparison,
    tokens_with,
)
from factscope.analysis.estimate import Estimate, estimate
from factscope.records import TraceRecord, read_trace_records
from factscope.report.tables import (
    Cell,
    Table,
    as_markdown,
    attribution_table,
    heads_table,
    knockout_table,
    lens_table,
    severed_table,
)
from factscope.tracing.settings import PRESETS, Corruption, Tracing

if TYPE_CHECKING:
    from factscope.lm.model import LM

TOKENS = Corruption(distribution="tokens")
LOGITS = Tracing(corruption=TOKENS, metric="logit-difference")
# Attribution patching estimates single layers, so it is graded on windows of one layer.
SINGLE = Tracing(corruption=TOKENS, metric="logit-difference", window=1, heads=True)
RUNS = {
    "three-sigma": Tracing(sever=("mlp", "attn"), sever_tokens="last-subject"),
    "paper-preset": PRESETS["paper"],
    "extra-token": Tracing(corruption=Corruption(extra_tokens=1)),
    "embedding-noise": Tracing(corruption=Corruption(distribution="embedding")),
    "uniform": Tracing(corruption=Corruption(distribution="uniform")),
    "one-sigma": Tracing(corruption=Corruption(level=1.0)),
    "replaced": Tracing(corruption=Corruption(replace=True)),
    "noise-logits": Tracing(metric="logit-difference"),
    "tokens": Tracing(corruption=TOKENS, knockout=True, lens=True),
    "tokens-logits": LOGITS,
    "tokens-corrupt": Tracing(corruption=TOKENS, metric="logit-difference", direction="corrupt"),
    "heads-atp": replace(SINGLE, attribution="atp"),
    "heads-atp-star": replace(SINGLE, attribution="atp-star"),
}
PAIRS = (("three-sigma", "tokens"), ("noise-logits", "tokens-logits"))
"""Runs with noise and with token replacement, in the same metric."""

Records = Sequence[TraceRecord]


# ---- tracing


def trace_all(args: argparse.Namespace) -> None:
    from factscope.lm.load import load

    lm = load(args.model, device=args.device)
    for name in args.only or RUNS:
        folder = args.runs / name
        trace_run(lm, args.model, args.facts, RUNS[name], folder, limit=args.limit)
        if args.pack:
            pack(folder, args.pack)


def trace_run(
    lm: "LM",
    model: str,
    facts: Path,
    settings: Tracing,
    path: Path,
    *,
    dtype: str = "float32",
    limit: int | None = None,
) -> None:
    """Trace the facts of a file into a run folder, or go on with it."""
    from factscope.runs.trace import TraceRun

    run = TraceRun(model=model, dtype=dtype, facts=facts, limit=limit, settings=settings)
    readable = run.readable_facts(lm, run.read().facts)
    folder = run.create_or_open(lm, path)
    start = time.perf_counter()
    run.run(lm, folder, readable.facts)
    seconds = time.perf_counter() - start
    print(f"{path.name}: {len(readable.facts)} facts, {seconds:.0f} s", flush=True)
    if readable.problems:
        print(f"  {len(readable.problems)} left out, the first: {readable.problems[0]}", flush=True)


def pack(run: Path, folder: Path) -> None:
    """Write a run folder to a compressed archive, its numbers rounded to six digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.6g}")
        if isinstance(value, list):
            return [rounded(x) for x in value]
        if isinstance(value, dict):
            return {key: rounded(x) for key, x in value.items()}
        return value

    lines = (run / "records.jsonl").read_text("utf-8").splitlines()
    records = "".join(
        json.dumps(rounded(json.loads(line)), ensure_ascii=False) + "\n" for line in lines
    )
    contents = {"records.jsonl": records.encode()}
    contents |= {name: (run / name).read_bytes() for name in ("spec.toml", "info.json")}
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{run.name}.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"{run.name}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


# ---- tables


def summary(runs: Path) -> None:
    """Print the tables of docs/results.md."""
    found = {name: runs / name / "records.jsonl" for name in RUNS}
    records = {n: list(read_trace_records(f)) for n, f in found.items() if f.is_file()}
    print(as_markdown(sites_table(records)))
    print(as_markdown(peaks_table(records)))
    for noise, tokens in PAIRS:
        if noise in records and tokens in records:
            print(as_markdown(moved_table(noise, records[noise], tokens, records[tokens])))
    tables: dict[Callable[[TraceRecord], Any], Callable[[Records], Table]] = {
        lambda r: r.heads: lambda x: heads_table(
            [average_heads(x, role) for role in (LAST, LAST_SUBJECT)], count=10
        ),
        lambda r: r.knockout: lambda x: knockout_table(average_knockout(x), every_layer=True),
        lambda r: r.lens: lambda x: lens_table(
            {run: average_effects(x, f"lens {run}") for run in ("clean", "corrupted")}
        ),
        has_attribution: lambda x: attribution_table(compare_attribution(x)),
    }
    for name, own in records.items():
        known = [record for record in own if record.known]
        if has_severed(known):
            print(f"{name}: ", as_markdown(severed_table(severed_comparison(known))))
        for present, table in tables.items():
            if any(map(present, known)):
                print(f"{name}: ", as_markdown(table(known)))


def _peak(effects: AverageEffects, role: str) -> tuple[Cell, Cell]:
    layer, peak = effects.peak(role)
    return layer, peak


def sites_table(records: Mapping[str, Records]) -> Table:
    """The runs, and the peaks of single states: the early and the late site."""
    rows = []
    for name, own in records.items():
        effects = average_effects(own, "states")
        stands_out = "yes" if effects.stands_out() else "no"
        rows.append(
            (
                name, effects.metric, effects.facts, effects.clean, effects.corrupted,
                effects.total, *_peak(effects, LAST_SUBJECT), stands_out, *_peak(effects, LAST),
            )
        )  # fmt: skip
    columns = (
        "run", "metric", "facts", "clean", "corrupted", "total effect", "early site, layer", "AIE",
        "stands out", "late site, layer", "AIE of the late site",
    )  # fmt: skip
    return Table("Sites of single states", columns, tuple(rows))


def peaks_table(records: Mapping[str, Records]) -> Table:
    """Where each kind's average effect peaks, also as a fraction of the total effect."""
    rows = []
    for name, own in records.items():
        for kind, effects in average_kinds(own).items():
            for role in (LAST_SUBJECT, LAST):
                layer, peak = effects.peak(role)
                rows.append((name, kind, role, layer, peak, _fraction(peak, effects.total)))
    columns = ("run", "kind", "token", "layer", "AIE", "of total effect")
    return Table("Peaks by kind", columns, tuple(rows))


def _fraction(effect: Estimate, total: Estimate) -> Estimate:
    return Estimate(effect.mean / total.mean, effect.half_width / total.mean, effect.n)


def moved_table(noise: str, first: Records, tokens: str, second: Records) -> Table:
    """How far the layer of the strongest cell moves from noise to replacement, fact by fact."""

    def by_fact(records: Records) -> dict[tuple[str, str], TraceRecord]:
        return {(r.fact.subject, r.fact.text): r for r in records if r.known and r.restored}

    one, two = by_fact(first), by_fact(second)
    both = [key for key in one if key in two]
    rows: list[tuple[Cell, ...]] = []
    for kind in ("states", "mlp", "attn"):
        for role in (LAST_SUBJECT, LAST):
            pairs = [(_strongest_layer(one[f], kind, role), _strongest_layer(two[f], kind, role))
                     for f in both]  # fmt: skip
            measured = [(a, b) for a, b in pairs if a is not None and b is not None]
            columns = list(zip(*measured, strict=True)) or [(), ()]
            shift = [b - a for a, b in measured]
            rows.append((kind, role, *(estimate(x, fraction=False) for x in (*columns, shift)),
                         len(measured)))  # fmt: skip
    names = ("kind", "token", f"layer, {noise}", f"layer, {tokens}", "moved by", "facts")
    note = (
        "Mean over facts of the layer with the strongest cell; 95 % intervals over facts. States "
        "of the last layer always restore the answer at the last token, so they do not count."
    )
    return Table(f"From {noise} to {tokens}", names, tuple(rows), note)


def _strongest_layer(record: TraceRecord, kind: str, role: str) -> float | None:
    tokens = tokens_with(record, role)
    if not tokens or kind not in record.restored:
        return None
    effects = indirect_effects(record, kind)[tokens].mean(0)
    return float(np.argmax(effects[:-1] if kind == "states" else effects))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace the facts that the default model knows.")
    parser.add_argument("facts", type=Path, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--summary", type=Path, metavar="RUNS", help="print the tables and stop")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="write archives of the runs")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS))
    args = parser.parse_args()
    if args.summary:
        summary(args.summary)
        return
    if args.facts is None or args.runs is None:
        parser.error("give the facts file and a folder for the runs")
    trace_all(args)


if __name__ == "__main__":
    main()
