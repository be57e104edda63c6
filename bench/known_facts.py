"""Where the default model stores the facts it knows: the runs behind docs/results.md.

    python bench/known_facts.py known_1000.json.gz RUNS --device cuda

Traces every fact of the file that the model knows, once for each corruption of the paper's main
text and appendix, into a run's folder each (RUNS/three-sigma, …); `factscope report
RUNS/three-sigma` draws one of them, and `python bench/known_facts.py --summary RUNS` prints the
tables of all.
"""

import argparse
import time
from pathlib import Path

from factscope.analysis.effects import (
    average_effects,
    average_kinds,
    has_severed,
    severed_comparison,
)
from factscope.records import TraceRecord, read_trace_records
from factscope.tracing.settings import PRESETS, Corruption, Tracing

SEVERED = Tracing(sever=("mlp", "attn"), sever_tokens="last-subject")
RUNS = {
    "three-sigma": SEVERED,
    "paper-preset": PRESETS["paper"],
    "extra-token": Tracing(corruption=Corruption(extra_tokens=1)),
    "embedding-noise": Tracing(corruption=Corruption(distribution="embedding")),
    "uniform": Tracing(corruption=Corruption(distribution="uniform")),
    "one-sigma": Tracing(corruption=Corruption(level=1.0)),
    "replaced": Tracing(corruption=Corruption(replace=True)),
}


def trace_all(args: argparse.Namespace) -> None:
    from factscope.lm.load import load
    from factscope.runs.trace import TraceRun

    lm = load(args.model, device=args.device)
    for name, settings in RUNS.items():
        if args.only and name not in args.only:
            continue
        run = TraceRun(
            model=args.model, dtype="float32", facts=args.facts, limit=args.limit, settings=settings
        )
        start = time.perf_counter()
        run.run(lm, run.create_or_open(lm, args.runs / name), run.read().facts)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


def best_states(records: list[TraceRecord]) -> str:
    effects = average_effects(records, "states")
    (early_layer, early), (late_layer, late) = map(
        effects.peak, ("last subject token", "last token")
    )
    return (
        f"{effects.facts} | {effects.clean.percent} | {effects.corrupted.percent} | "
        f"{effects.total.percent} | {early.percent} at {early_layer} | "
        f"{'yes' if effects.stands_out() else 'no'} | {late.percent} at {late_layer}"
    )


def summary(runs: Path) -> None:
    """The tables of docs/results.md."""
    folders = [runs / name for name in RUNS if (runs / name / "records.jsonl").is_file()]
    everything = {f.name: list(read_trace_records(f / "records.jsonl")) for f in folders}
    print(
        "| corruption | facts | clean, % | corrupted, % | total effect, % | early site: AIE of "
        "states at the last subject token, at layer | stands out | late site: last token |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, records in everything.items():
        print(f"| {name} | {best_states(records)} |")
    print("\n| corruption | kind | last subject token, %, at layer | last token, %, at layer |")
    print("|---|---|---|---|")
    for name, records in everything.items():
        for kind, effects in average_kinds(records).items():
            peaks = [effects.peak(role) for role in ("last subject token", "last token")]
            cells = " | ".join(f"{peak.percent} at {layer}" for layer, peak in peaks)
            print(f"| {name} | {kind} | {cells} |")
    for name, records in everything.items():
        if has_severed(records):
            comparison = severed_comparison(records)
            print(f"\n{name}: effect of a restored state at the last subject token, %, by layer\n")
            print("| layer | intact | MLP severed | attention severed |")
            print("|---|---|---|---|")
            for layer in range(len(comparison.intact)):
                severed = [comparison.severed[m][layer].percent for m in ("mlp", "attn")]
                print(f"| {layer} | {comparison.intact[layer].percent} | {' | '.join(severed)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trace the facts that the default model knows.")
    parser.add_argument("facts", type=Path, nargs="?")
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--summary", type=Path, metavar="RUNS", help="print the tables and stop")
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
