"""Which layer, and which method? ES, PS and NS on CounterFact cases: the table of docs/results.md.

    python bench/edit_layers.py --cases counterfact.json.gz --text wikipedia.txt.gz --out all.jsonl
    python bench/edit_layers.py --out all.jsonl --show --figure edit_layers.png

Second moments of all layers are computed first, from `--tokens` tokens of the text, and cached in
`--stats`. Each line of the output is one method at one layer: settings, scores, seconds. A line
that exists is not computed again. Cases are taken in file order after the first `--skip`: settings
were chosen on other cases than those reported.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from factscope.analysis.estimate import Estimate, estimate
from factscope.analysis.metrics import SUCCESS_RATES, case_metrics, harmonic_mean
from factscope.data.readers import read_cases
from factscope.editing.edit import Edit
from factscope.editing.settings import editor
from factscope.evaluation.cases import score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.lm.load import load
from factscope.lm.model import LM

METHODS = {
    "rome": "default", "rome, paper": "paper", "r-rome": "default", "memit": "default",
    "ft": "default", "ft-l": "default", "attn": "default",
}  # fmt: skip
HEAD = ("method", "layer", "other settings", "S", "ES", "PS", "NS", "failed / beyond limits", "s")
SPAN = 5
"""MEMIT spreads over this many layers, the named one being the last."""


def plans(methods: Sequence[str], layers: Sequence[int], more: dict[str, Any]) -> Iterator[dict]:
    """What to run: method by method, layer by layer."""
    for name in methods:
        for layer in layers:
            where: dict[str, Any] = {"layer": layer}
            if name == "memit":
                where = {"layers": list(range(max(0, layer - SPAN + 1), layer + 1))}
            yield {"method": name, "layer": layer, "settings": {**where, **more}}


def made(lm: LM, plan: dict, cases: Sequence[Case], stats: Path) -> list[Edit | Exception]:
    """The edits of a plan, each fact alone, or why there is none."""
    method = plan["method"].partition(",")[0]
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in plan["settings"].items()}
    search = {k.removeprefix("search."): settings.pop(k) for k in list(settings) if "." in k}
    if method in ("rome", "r-rome", "memit"):
        settings["second_moment"] = [stats]
    made = editor(method, METHODS[plan["method"]], **settings)
    if search:
        plain: Any = made
        made = replace(plain, search=replace(plain.search, **search))
    return list(made.attempt(lm, [case.fact for case in cases]))


def scores(lm: LM, cases: Sequence[Case], edits: Sequence[Edit | Exception]) -> dict[str, Estimate]:
    """ES, PS and NS; a case without an edit is scored unedited."""
    usable = [edit.to(lm.device) for edit in edits if isinstance(edit, Edit)]
    number = iter(range(len(usable)))
    seats = [next(number) if isinstance(edit, Edit) else None for edit in edits]
    scoring = ScoringOptions(length=0, attributes=False)
    found = [case_metrics(x) for x in score_cases(lm, cases, usable, seats, scoring=scoring)]
    return {name: estimate([x[name] for x in found if name in x]) for name in SUCCESS_RATES}


def checks(edits: Sequence[Edit | Exception]) -> dict[str, Any]:
    """The checks of the edits."""
    seen = [edit.checks for edit in edits if isinstance(edit, Edit) and edit.checks is not None]
    factors = sorted(h.division_factor for h in seen if h.division_factor is not None)
    norms = sorted(h.update_norm for h in seen)
    growth = sorted(h.perplexity_growth for h in seen)
    middle = len(seen) // 2
    return {
        "failed": sum(not isinstance(edit, Edit) for edit in edits),
        "beyond limits": sum(bool(h.complaints()) for h in seen),
        "division factor, least": factors[0] if factors else None,
        "update norm, median and most": (norms[middle], norms[-1]) if norms else None,
        "perplexity growth, median and most": (growth[middle], growth[-1]) if growth else None,
    }


def collected(lm: LM, layers: Sequence[int], text: Path, tokens: int, folder: Path) -> None:
    """Second moments of the layers that are not in the folder yet."""
    from factscope.stats.covariance import collect
    from factscope.stats.second_moment import file_name, save_second_moment
    from factscope.stats.settings import StatsSettings
    from factscope.stats.text import documents, token_sequences

    missing = [layer for layer in layers if not (folder / file_name(layer)).is_file()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for moment in collect(
        lm,
        missing,
        token_sequences(lm, documents(text), 256),
        StatsSettings(tokens=tokens),
        corpus=text.name,
    ):
        save_second_moment(moment, folder / file_name(moment.layer))


def run(args: argparse.Namespace) -> None:
    lm = load(args.model, device=args.device, dtype=args.dtype)
    layers = args.layers or list(range(lm.n_layers))
    wanted = list(plans(args.methods, layers, json.loads(args.settings)))
    needed = sorted({n for p in wanted for n in p["settings"].get("layers", [p["layer"]])})
    collected(lm, needed, args.text, args.tokens, args.stats)
    cases = read_cases(args.cases).cases[args.skip : args.skip + args.limit]
    there = [json.loads(line) for line in lines(args.out)]
    if not any(row["method"] == "unedited" for row in there):
        row = {"method": "unedited", "layer": None, "settings": {}}
        write(args.out, row, scores(lm, cases, [ValueError()] * len(cases)), {}, 0.0, len(cases))
    done = [{k: row[k] for k in ("method", "layer", "settings")} for row in there]
    for plan in wanted:
        if plan in done:
            continue
        begin = time.perf_counter()
        edits = made(lm, plan, cases, args.stats)
        seconds = time.perf_counter() - begin
        write(args.out, plan, scores(lm, cases, edits), checks(edits), seconds, len(cases))
        del edits
        if lm.device.type == "cuda":
            torch.cuda.empty_cache()


def write(
    path: Path, plan: dict, found: dict[str, Estimate], seen: dict, seconds: float, cases: int
) -> None:
    numbers = {kind: [x.mean, x.half_width] for kind, x in found.items()}
    mean = harmonic_mean([x.mean for x in found.values()])
    row = {**plan, "cases": cases, "S": mean, **numbers, "checks": seen,
           "seconds": round(seconds, 2)}  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(as_row(row), flush=True)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def as_row(row: dict) -> str:
    """One line of the Markdown table."""
    cells = [row["method"], "–" if row["layer"] is None else str(row["layer"])]
    more = {k: v for k, v in row["settings"].items() if k not in ("layer", "layers")}
    cells.append(", ".join(f"{k} {v}" for k, v in more.items()) or "–")
    cells.append(f"{100 * row['S']:.1f}")
    cells += [f"{100 * row[k][0]:.1f} ± {100 * row[k][1]:.1f}" for k in ("ES", "PS", "NS")]
    seen = row["checks"]
    cells.append(f"{seen.get('failed', 0)} / {seen.get('beyond limits', 0)}")
    cells.append(f"{row['seconds']:.1f}")
    return "| " + " | ".join(cells) + " |"


def show(args: argparse.Namespace) -> None:
    """The table, by method and layer, and the figure."""
    names = ["unedited", *METHODS]
    rows = [json.loads(line) for line in lines(args.out)]
    rows = [row for row in rows if args.layers is None or row["layer"] in (None, *args.layers)]
    rows.sort(key=lambda row: (names.index(row["method"]), row["layer"] or 0))
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for row in rows:
        print(as_row(row))
    if args.figure:
        draw(rows, args.figure)


def draw(rows: Sequence[dict], path: Path) -> None:
    """S, ES, PS and NS by layer, a line for each method, with 95 % intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    methods = [m for m in METHODS if any(row["method"] == m for row in rows)]
    for panel, score in zip(panels, ("S", "ES", "PS", "NS"), strict=True):
        panel.set(title=score, xlabel="layer", ylim=(0, 102))
        for row in rows:
            if row["method"] == "unedited":
                value = row["S"] if score == "S" else row[score][0]
                panel.axhline(100 * value, color="grey", linewidth=1, linestyle=":")
        for number, method in enumerate(methods):
            mine = [row for row in rows if row["method"] == method]
            x = [row["layer"] for row in mine]
            found = [(row["S"], 0.0) if score == "S" else row[score] for row in mine]
            y, half = ([100 * v for v in some] for some in zip(*found, strict=True))
            color = f"C{number}"
            panel.plot(x, y, color=color, marker=".", markersize=4, linewidth=1.2, label=method)
            low, high = ([a + s * b for a, b in zip(y, half, strict=True)] for s in (-1, 1))
            panel.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
    panels[0].set_ylabel("%")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7)
    figure.savefig(path, dpi=150, metadata={"Software": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--stats", type=Path, default=Path("stats"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--settings", default="{}", help="JSON, e.g. '{\"search.lr\": 0.1}'")
    parser.add_argument("--show", action="store_true", help="only print the table of --out")
    parser.add_argument("--figure", type=Path, help="with --show, draw the scores by layer too")
    args = parser.parse_args()
    if args.show:
        show(args)
    else:
        run(args)


if __name__ == "__main__":
    main()
