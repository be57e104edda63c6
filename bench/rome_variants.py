"""Which ROME writes facts best? Variants of its settings on CounterFact cases, as a table.

    python bench/rome_variants.py --cases counterfact.json.gz --text wikipedia.txt.gz \\
        --json variants.jsonl
    python bench/rome_variants.py --cases … --text … --json … --slice report --limit 500 \\
        --variants "before;paper;default;search.steps=40"
    python bench/rome_variants.py --json variants.jsonl --show

A variant is a name of `VARIANTS` or settings of its own, which change `BASE`. Each fact is written
alone into the unedited model. Settings are chosen on the tune slice (records 101 to 500) and
reported on the others. "likely" is how often the new object is the most likely one after the
prompt; the other columns are the paper's metrics. Intervals are 95 %, for S by bootstrap. "time"
is the time of an edit, checks included, relative to the variant "before", without the first
batch, which warms up. Every finished variant is a line of the JSON file; a variant that has one
is skipped, so a run that was cut goes on where it stopped.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edit_layers import collected
from factscope.analysis.estimate import estimate
from factscope.analysis.metrics import SUCCESS_RATES, case_metrics, harmonic_mean
from factscope.data.readers import read_cases
from factscope.editing.defaults import memit_defaults, rome_defaults
from factscope.editing.edit import Edit
from factscope.editing.settings import PAPER_ROME, Memit, Rome, ValueSearch
from factscope.evaluation.cases import score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import CaseScores

TUNE = slice(100, 500)
"""Records on which settings may be chosen."""
COLUMNS = {"ES": "ES", "EM": "EM", "likely": "prompt_correct", "PS": "PS", "NS": "NS"}

OLD_SEARCH = ValueSearch(retry=False, unit="fact", lr=0.5, lr_form="paper", steps=20, clamp=4.0)
BASE = Rome(
    key="mean-and-bare", scale_delta=True, context_tolerance=None,
    search=ValueSearch(retry=False, steps=20, clamp=4.0, stop_probability=None),
)  # fmt: skip
"""Two keys, δ scaled in the search, settings relative to the layer's usual norm."""
BEFORE = replace(BASE, key="mean", scale_delta=False, search=OLD_SEARCH)
"""The default up to version 0.1: the mean key, the whole δ in every context."""
NAMED: dict[str, Any] = {"before": BEFORE, "default": Rome(), "paper": PAPER_ROME,
                         "memit": Memit()}  # fmt: skip
VARIANTS: dict[str, str] = {
    "two keys": "",
    "40 steps": "search.steps=40",
    "two keys, fact's norm": "search.unit=fact+search.lr=0.5+search.lr_form=paper",
    "30 steps": "search.steps=30",
    "25 steps": "search.steps=25",
    "retry": "search.retry=True",
    "stop 0.7": "search.steps=40+search.stop_probability=0.7",
    "40 steps, clamp 3": "search.steps=40+search.clamp=3.0",
    "40 steps, clamp 6": "search.steps=40+search.clamp=6.0",
    "two keys, whole delta": "scale_delta=False",
    "mean key, scaled": "key=mean",
    "contexts 1": "context_tolerance=1.0",
    **{f"40 steps, layer {i}": f"search.steps=40+layer={i}" for i in (0, 1, 2, 3, 4, 6, 7)},
    "bare key, scaled": "key=bare+value=bare",
    "contexts 10": "context_tolerance=10.0",
    "contexts 0.1": "context_tolerance=0.1",
    "40 steps, clamp 2": "search.steps=40+search.clamp=2.0",
    "40 steps, clamp 8": "search.steps=40+search.clamp=8.0",
    "stop 0.5": "search.steps=40+search.stop_probability=0.5",
    "stop 0.9": "search.steps=40+search.stop_probability=0.9",
    "40 steps, lr 0.2": "search.steps=40+search.lr=0.2",
    "lr 1": "search.lr=1.0",
    "40 steps, decay 0.05": "search.steps=40+search.weight_decay=0.05",
    "40 steps, decay 0.2": "search.steps=40+search.weight_decay=0.2",
    "40 steps, no kl": "search.steps=40+search.kl_weight=0.0",
    "40 steps, kl 0.25": "search.steps=40+search.kl_weight=0.25",
    "40 steps, ridge 0.01": "search.steps=40+ridge=0.01",
    "40 steps, ridge 0.1": "search.steps=40+ridge=0.1",
}


def variant(name: str) -> Rome | Memit:
    """The settings of a variant, by name or as key=value+key=value."""
    if name in NAMED:
        return NAMED[name]
    rome: dict[str, Any] = {}
    search: dict[str, Any] = {}
    for pair in filter(None, VARIANTS.get(name, name).split("+")):
        key, _, text = pair.partition("=")
        part, settings = (search, ValueSearch) if key.startswith("search.") else (rome, Rome)
        key = key.removeprefix("search.")
        if key not in {x.name for x in fields(settings)}:
            raise SystemExit(f"{name!r} is neither a variant nor a setting; see --help")
        try:
            part[key] = json.loads({"False": "false", "True": "true"}.get(text, text))
        except ValueError:
            part[key] = text
    return replace(BASE, **rome, search=replace(BASE.search, **search))


def layers_of(lm: LM, editor: Rome | Memit) -> Sequence[int]:
    """The layers whose statistics an editor needs."""
    if isinstance(editor, Memit):
        return editor.layers or memit_defaults(lm).layers
    return [rome_defaults(lm).layer if editor.layer is None else int(editor.layer)]


def edit_cases(
    lm: LM, rome: Rome | Memit, cases: Sequence[Case], batch: int
) -> tuple[list[Edit | Exception], float]:
    """An edit or error for each case, and the seconds per edit without the first batch."""
    edits: list[Edit | Exception] = []
    seconds, timed = 0.0, 0
    for i in range(0, len(cases), batch):
        part = cases[i : i + batch]
        start = time.perf_counter()
        edits += rome.attempt(lm, [case.request for case in part])
        if i or len(cases) <= batch:
            seconds, timed = seconds + time.perf_counter() - start, timed + len(part)
    return edits, seconds / timed


def scores_of(
    lm: LM, cases: Sequence[Case], edits: Sequence[Edit | Exception | None], batch: int
) -> list[CaseScores]:
    """The scores of the cases whose edit did not fail; None stands for the unedited model."""
    usable = [(c, e) for c, e in zip(cases, edits, strict=True) if not isinstance(e, Exception)]
    options, scores = ScoringOptions(length=0, attributes=False), []
    for i in range(0, len(usable), batch):
        part = usable[i : i + batch]
        written = [edit.to(lm.device) for _, edit in part if isinstance(edit, Edit)]
        index = list(range(len(part))) if written else [None] * len(part)
        scores += score_cases(lm, [case for case, _ in part], written, index, scoring=options)
    return scores


def row_of(scores: Sequence[CaseScores]) -> dict[str, Any]:
    """Mean and half width of every column."""
    values = [case_metrics(x) for x in scores]
    row = {name: estimate([x[key] for x in values]) for name, key in COLUMNS.items()}
    rates = np.array([[x[name] for name in SUCCESS_RATES] for x in values])
    draws = np.random.default_rng(0).integers(len(rates), size=(1000, len(rates)))
    resampled = [harmonic_mean(list(rates[draw].mean(0))) for draw in draws]
    S = harmonic_mean(list(rates.mean(0)))
    return {
        **{name: [round(100 * x.mean, 2), round(100 * x.half_width, 2)] for name, x in row.items()},
        "S": [round(100 * S, 2), round(196 * float(np.std(resampled)), 2)],
        "cases": len(scores),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The variants as a Markdown table."""
    before = next((row["seconds"] for row in rows if row["variant"] == "before"), None)
    lines = ["| variant | ES | EM | likely | PS | NS | S | steps | time |", "|---" * 9 + "|"]
    for row in rows:
        cells = [row["variant"], *(f"{row[x][0]:.1f} ± {row[x][1]:.1f}" for x in (*COLUMNS, "S"))]
        timed = before and "seconds" in row
        cells += [f"{row['steps']:.1f}" if "steps" in row else "–",
                  f"{row['seconds'] / before:.2f}" if timed else "–"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(path: Path, records: str) -> list[dict[str, Any]]:
    """The rows of one slice."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["slice"] == records]


def main() -> None:
    """Run every variant and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--text", type=Path, help="collect statistics from this text")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the text")
    parser.add_argument("--stats", type=Path, default=Path("stats"), help="folder for them")
    parser.add_argument("--slice", choices=("tune", "report"), default="tune")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--variants", default="all", help="before; paper; default; memit; "
                        + "; ".join(VARIANTS))  # fmt: skip
    parser.add_argument("--minutes", type=float, default=60.0, help="start no variant after this")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--show", action="store_true", help="only print the tables of --json")
    args = parser.parse_args()
    if args.show:
        for records in ("tune", "report"):
            if rows := rows_of(args.json, records):
                print(f"{records}, {rows[0]['cases']} cases\n{table(rows)}")
        return

    everything = list(read_cases(args.cases).cases)
    tune = everything[TUNE]
    cases = tune if args.slice == "tune" else [*everything[: TUNE.start], *everything[TUNE.stop :]]
    cases = cases[: args.limit]
    began = time.perf_counter()
    lm = load(args.model, device=args.device)
    names = args.variants.split(";")
    if names == ["all"]:
        names = ["before", "paper", *VARIANTS, "memit"]
    done = {row["variant"] for row in rows_of(args.json, args.slice)}
    machine = torch.cuda.get_device_name() if lm.device.type == "cuda" else "CPU"
    print(f"{lm.name} on {machine}, {args.slice}, {len(cases)} cases", flush=True)

    def report(name: str, row: dict[str, Any]) -> None:
        row = {"variant": name, "slice": args.slice, "machine": machine, **row}
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], f"{row.get('seconds', 0):.3f} s", flush=True)

    if "unedited" not in done:
        report("unedited", row_of(scores_of(lm, cases, [None] * len(cases), args.batch)))
    for name in (name for name in names if name not in done):
        if time.perf_counter() - began > 60 * args.minutes:
            break
        editor = variant(name)
        if args.text is not None:
            layers = layers_of(lm, editor)
            collected(lm, layers, args.text, args.tokens, args.stats)
            editor = replace(editor, second_moment=(args.stats,))
        edits, seconds = edit_cases(lm, editor, cases, args.batch)
        made = [edit for edit in edits if isinstance(edit, Edit)]
        checks = [edit.checks for edit in made if edit.checks is not None]
        steps = [len(losses) for edit in made for losses in edit.settings["losses"]]
        settings = {**editor.to_dict(), "search": asdict(editor.search), "prefixes": None}
        report(name, {
            **row_of(scores_of(lm, cases, edits, args.batch)),
            "failed": len(edits) - len(made),
            "seconds": round(seconds, 4),
            "steps": round(float(np.mean(steps)), 2),
            "beyond_limits": sum(bool(x.complaints()) for x in checks),
            "update_norm": round(float(np.mean([x.update_norm for x in checks])), 4),
            "settings": json.loads(json.dumps(settings, default=str)),
        })  # fmt: skip
    print(table(rows_of(args.json, args.slice)))


if __name__ == "__main__":
    main()
