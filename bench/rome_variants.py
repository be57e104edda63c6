"""Which ROME writes facts best? Variants of its settings on CounterFact cases, as a table.

    python bench/rome_variants.py --cases counterfact.json.gz --text wikipedia.txt.gz \\
        --json variants.jsonl
    python bench/rome_variants.py --cases … --text … --json … --slice report --limit 500 \\
        --variants "before;paper;default;search.steps=40"
    python bench/rome_variants.py --model MODEL --cases … --text … --json … --facts-per-edit 10 \\
        --variants "method=memit;method=memit+covariance_weight=100+layers=[2,3,4]"
    python bench/rome_variants.py --json variants.jsonl --show --against default

A variant is a name of `VARIANTS` or settings of its own. They change `BASE`, with "method=default"
the default ROME and with "method=memit" the default MEMIT. "protect=α" adds α E[k kᵀ] to C, where k
are the keys at the last subject tokens of the built-in facts, or of the facts of `--protect FILE`.
Each fact, or each `--facts-per-edit`, is written into the unedited model. Settings are chosen on
the tune slice (records 101 to 500) and reported on the others. "likely" is how often the
new object is the most likely one after the prompt; the other columns are the paper's metrics.
Intervals are 95 %, for S by bootstrap. "time" is the time of an edit, checks included, relative to
the variant "before", without the first batch, which warms up. Every finished variant is a line of
the JSON file; a variant that has one is skipped, so a run that was cut goes on where it stopped.
With `--same-values`, the first variant searches the values, and the others insert the same values:
variants of ROME's update are then compared within seconds per record, without continued searches.
With `--timing N`, the variants edit N batches in turn, the same ones, and nothing is scored: the
table has the median time of an edit, and the median over batches of its ratio to the first variant.
With `--records 501-600` only those of the slice are used, and `--show` joins several JSON files.
`--against NAME` also prints the mean difference to a variant on the cases that both have, with
95 % intervals of the paired differences.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edit_layers import collected
from factscope.analysis.estimate import estimate
from factscope.analysis.metrics import SUCCESS_RATES, case_metrics, harmonic_mean
from factscope.data.readers import everyday_facts, read_cases, read_facts
from factscope.editing.contexts import bare_keys
from factscope.editing.defaults import memit_defaults, rome_defaults
from factscope.editing.edit import Edit
from factscope.editing.editor import raise_first_error
from factscope.editing.settings import PAPER_ROME, Memit, Rome, ValueSearch
from factscope.editing.value_search import ValueResult
from factscope.errors import FactscopeError
from factscope.evaluation.cases import score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case, Fact
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.progress import no_progress
from factscope.records import CaseScores
from factscope.stats.second_moment import SecondMoment, find_second_moment

TUNE = slice(100, 500)
"""Records on which settings may be chosen."""
COLUMNS = {"ES": "ES", "EM": "EM", "likely": "prompt_correct", "PS": "PS", "NS": "NS"}

OLD_SEARCH = ValueSearch(retry=False, unit="fact", lr=0.5, lr_form="paper", steps=20, clamp=4.0)
BASE = Rome(
    key="mean-and-bare", scale_delta=True, context_tolerance="inf", contrast_tolerance="inf",
    search=ValueSearch(retry=False, steps=20, clamp=4.0, stop_probability=None),
)  # fmt: skip
"""Two keys, δ scaled in the search, settings relative to the layer's usual norm, nothing added to
C."""
BEFORE = replace(BASE, key="mean", scale_delta=False, search=OLD_SEARCH)
"""The default up to version 0.1: the mean key, the whole δ in every context."""
NAMED: dict[str, Any] = {"before": BEFORE, "default": Rome(), "paper": PAPER_ROME,
                         "memit": Memit()}  # fmt: skip
PROTECT = "protect"
"""A setting of this script only: α of C + α E[k kᵀ] over last subject tokens."""
FACTS_NORM = "search.unit=fact+search.lr=0.5+search.lr_form=paper"
"""‖v₀‖ as the unit, and an absolute learning rate."""
PLAIN = "method=default+contrast_tolerance=inf"
"""The default without contrast keys."""
NEIGHBOURS = {
    name: f"{PLAIN}+{settings}"
    for name, settings in {
        "lr 0.25": "search.lr=0.25",
        "lr 0.3": "search.lr=0.3",
        "lr 0.35, clamp 3": "search.lr=0.35+search.clamp=3.0",
        "lr 0.3, clamp 2": "search.lr=0.3+search.clamp=2.0",
        "lr 0.5": "search.lr=0.5",
        **{
            f"lr 0.5, {name}": f"search.lr=0.5+{settings}"
            for name, settings in {
                "clamp 3": "search.clamp=3.0",
                "clamp 2": "search.clamp=2.0",
                "kl 0.25": "search.kl_weight=0.25",
                "decay 0.05": "search.weight_decay=0.05",
                "stop 0.8": "search.stop_probability=0.8",
                "contexts 1": "context_tolerance=1.0",
                "contexts 10": "context_tolerance=10.0",
                **{f"layer {i}": f"layer={i}" for i in (1, 2, 3, 4, 7)},
                "layer 3, clamp 3": "layer=3+search.clamp=3.0",
                "layer 2, clamp 2": "layer=2+search.clamp=2.0",
                "protect 3": "protect=3",
            }.items()
        },
        "lr 0.25, layer 2": "search.lr=0.25+layer=2",
        "fact's norm": FACTS_NORM,
        "fact's norm, clamp 3": f"{FACTS_NORM}+search.clamp=3.0",
    }.items()
}
"""Variants of the plain default that might spare neighbours."""
SPARING = {
    "plain": PLAIN,
    "contexts only": f"{PLAIN}+context_tolerance=0.3",
    "contrast, no contexts": "method=default+contrast_tolerance=1.0+context_tolerance=inf",
    "contrast 1": "method=default+contrast_tolerance=1.0",
    "contrast 3": "method=default+contrast_tolerance=3.0",
    "contrast 0.3": "method=default+contrast_tolerance=0.3",
}
"""Variants of what is added to C: contrast keys, and differences between contexts."""
VARIANTS: dict[str, str] = {
    "two keys": "",
    "40 steps": "search.steps=40",
    "two keys, fact's norm": FACTS_NORM,
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
    **NEIGHBOURS,
    **SPARING,
}


def variant(name: str) -> tuple[Any, float]:
    """The editor of a variant, by name or as key=value+key=value, and α of its protected keys."""
    if name in NAMED:
        return NAMED[name], 0.0
    pairs = [x.partition("=")[::2] for x in VARIANTS.get(name, name).split("+") if x]
    base = next((NAMED[text] for key, text in pairs if key == "method"), BASE)
    own: dict[str, Any] = {}
    search: dict[str, Any] = {}
    protect = 0.0
    for key, text in pairs:
        value: Any = text
        with suppress(ValueError):
            value = json.loads({"False": "false", "True": "true"}.get(text, text))
        value = tuple(value) if isinstance(value, list) else value
        if key == PROTECT:
            protect = float(value)
        elif (short := key.removeprefix("search.")) != key:
            search[short] = value
        elif key != "method":
            own[key] = value
    for part, settings in ((own, base), (search, base.search)):
        for key in part:
            if key not in {x.name for x in fields(settings)}:
                raise SystemExit(f"{name!r} is neither a variant nor a setting; see --help")
    return replace(base, **own, search=replace(base.search, **search)), protect


def protected(lm: LM, moment: SecondMoment, alpha: float, facts: Sequence[Fact]) -> SecondMoment:
    """C + α E[k kᵀ], with the keys k at the last subject tokens of the facts."""
    k = bare_keys(lm, facts, [moment.layer])[moment.layer].double().cpu()
    return replace(moment, matrix=moment.matrix + (alpha / len(k) * k.T @ k).float())


def layers_of(lm: LM, editor: Rome | Memit) -> Sequence[int]:
    """The layers whose statistics an editor needs."""
    if isinstance(editor, Memit):
        return editor.layers or memit_defaults(lm).layers
    return [rome_defaults(lm).layer if editor.layer is None else int(editor.layer)]


def with_statistics(lm: LM, name: str, args: argparse.Namespace) -> Any:
    """The editor of a variant, with the statistics of `--text` if it is given."""
    editor, alpha = variant(name)
    layers = layers_of(lm, editor)
    if args.text is not None:
        collected(lm, layers, args.text, args.tokens, args.stats)
        editor = replace(editor, second_moment=(args.stats,))
    if alpha:
        facts = read_facts(args.protect).facts if args.protect else everyday_facts()
        found = find_second_moment(lm, layers[0], [args.stats] if args.text else [])
        assert found is not None
        editor = replace(editor, second_moment=protected(lm, found, alpha, facts))
    return editor


def edit_cases(
    lm: LM, editor: Rome | Memit, cases: Sequence[Case], batch: int, together: int
) -> tuple[list[Edit | Exception], float]:
    """Each case's edit or error, and the seconds per case without the first batch. With several
    facts in an edit, it is the edit of all its cases."""
    edits: list[Edit | Exception] = []
    seconds, timed = 0.0, 0
    batch = batch if together == 1 else together
    for i in range(0, len(cases), batch):
        part = cases[i : i + batch]
        start = time.perf_counter()
        facts = [case.request for case in part]
        if together == 1:
            edits += editor.attempt(lm, facts)
        else:
            try:
                edits += [editor(lm, facts)] * len(facts)
            except FactscopeError as error:
                edits += [error] * len(facts)
        if i or len(cases) <= batch:
            seconds, timed = seconds + time.perf_counter() - start, timed + len(part)
    return edits, seconds / timed


def time_edits(
    lm: LM, editors: dict[str, Any], batches: Sequence[Sequence[Case]]
) -> dict[str, list[float]]:
    """Seconds per edit of each editor in each batch but the first, which warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in editors}
    for i, batch in enumerate(batches):
        for name, editor in editors.items():
            start = time.perf_counter()
            editor.attempt(lm, [case.request for case in batch])
            if i:
                seconds[name].append((time.perf_counter() - start) / len(batch))
        if i:
            print({name: round(times[-1], 4) for name, times in seconds.items()}, flush=True)
    return seconds


def timing_table(seconds: dict[str, list[float]]) -> str:
    """Medians and ranges as a Markdown table."""
    first = np.array(next(iter(seconds.values())))
    lines = ["| variant | seconds per edit | ratio | range |", "|---" * 4 + "|"]
    for name, times in seconds.items():
        ratios = np.array(times) / first
        cells = [name, f"{np.median(times):.4f}", f"{np.median(ratios):.2f}",
                 f"{ratios.min():.2f} to {ratios.max():.2f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def search(lm: LM, editor: Rome, cases: Sequence[Case], batch: int) -> list[ValueResult]:
    """The values of all cases."""
    facts = [case.request for case in cases]
    batches = (facts[i : i + batch] for i in range(0, len(facts), batch))
    found = [x for part in batches for x in editor.bind(lm, part).search_values(part, no_progress)]
    return raise_first_error(found)


def insert_cases(
    lm: LM, editor: Rome, values: Sequence[ValueResult], batch: int
) -> list[Edit | FactscopeError]:
    """An edit of each value, which another variant may have found."""
    bound = editor.bind(lm, [x.request.fact for x in values])
    edits: list[Edit | FactscopeError] = []
    for i in range(0, len(values), batch):
        part = values[i : i + batch]
        none = torch.stack([x.keys[:0] for x in part])
        added = torch.cat([none, *bound.added_keys([x.request for x in part])], 1)
        edits += bound.insert_each([replace(x, added=a) for x, a in zip(part, added, strict=True)])
    return edits


def scores_of(
    lm: LM, cases: Sequence[Case], edits: Sequence[Edit | Exception | None], batch: int
) -> list[CaseScores]:
    """The scores of the cases whose edit did not fail; None stands for the unedited model."""
    usable = [(c, e) for c, e in zip(cases, edits, strict=True) if not isinstance(e, Exception)]
    options, scores = ScoringOptions(length=0, attributes=False), []
    for i in range(0, len(usable), batch):
        part = usable[i : i + batch]
        distinct = list({id(edit): edit for _, edit in part}.values())
        written = [edit.to(lm.device) for edit in distinct if isinstance(edit, Edit)]
        numbers = {id(edit): n for n, edit in enumerate(distinct)}
        index = [numbers[id(edit)] if isinstance(edit, Edit) else None for _, edit in part]
        scores += score_cases(lm, [case for case, _ in part], written, index, scoring=options)
    return scores


def by_case(scores: Sequence[CaseScores]) -> dict[str, list[float | None]]:
    """Every column's value in each case."""
    values = [case_metrics(x) for x in scores]
    return {name: [x[key] for x in values] for name, key in COLUMNS.items()}


def row_of(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Mean and half width of every column, given its values by case."""
    row = {name: estimate(column) for name, column in values.items()}
    rates = np.array([values[name] for name in SUCCESS_RATES]).T
    draws = np.random.default_rng(0).integers(len(rates), size=(1000, len(rates)))
    resampled = [harmonic_mean(list(rates[draw].mean(0))) for draw in draws]
    S = harmonic_mean(list(rates.mean(0)))
    return {
        **{name: [round(100 * x.mean, 2), round(100 * x.half_width, 2)] for name, x in row.items()},
        "S": [round(100 * S, 2), round(196 * float(np.std(resampled)), 2)],
        "cases": len(rates),
        "by_case": values,
    }


def joined(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each variant that every part has; the parts have different records."""
    if len(parts) < 2:
        return [row for part in parts for row in part]
    by_name = [{row["variant"]: row for row in part} for part in parts]
    rows: list[dict[str, Any]] = []
    for name in by_name[0]:
        if all(name in part for part in by_name):
            cases = [part[name]["by_case"] for part in by_name]
            values = {column: [x for case in cases for x in case[column]] for column in COLUMNS}
            rows.append({"variant": name, **row_of(values)})
    return rows


def differences(rows: Sequence[dict[str, Any]], name: str) -> str:
    """Each variant's mean paired difference to one of them, as a Markdown table."""
    base = next((row for row in rows if row["variant"] == name), None)
    if base is None:
        raise SystemExit(f"--against is {name!r}; there are {[row['variant'] for row in rows]}")
    lines = [f"| minus {name!r} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        # Without failures both have the same cases in the same order.
        if row is base or "by_case" not in row or row["cases"] != base["cases"]:
            continue
        both = {x: np.subtract(row["by_case"][x], base["by_case"][x]) for x in COLUMNS}
        found = [estimate(100 * x, fraction=False) for x in both.values()]
        cells = [f"{x.mean:+.1f} ± {x.half_width:.1f}" for x in found]
        lines.append(f"| {' | '.join([row['variant'], *cells])} |")
    return "\n".join(lines)


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


def numbered(text: str) -> slice:
    """The records of FIRST-LAST, counted from 1."""
    first, last = text.split("-")
    return slice(int(first) - 1, int(last))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--text", type=Path, help="collect statistics from this text")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of the text")
    parser.add_argument("--stats", type=Path, default=Path("stats"), help="folder for them")
    parser.add_argument("--slice", choices=("tune", "report"), default="tune")
    parser.add_argument("--records", type=numbered, help="FIRST-LAST, counted from 1 in the file")
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--variants", default="all", help="before; paper; default; memit; "
                        + "; ".join(VARIANTS))  # fmt: skip
    parser.add_argument(
        "--same-values", action="store_true", help="search with the first variant only"
    )
    parser.add_argument("--timing", type=int, metavar="N", help="only time N batches")
    parser.add_argument("--facts-per-edit", type=int, default=1, help="facts of one edit")
    parser.add_argument("--protect", type=Path, help="facts whose keys are protected")
    parser.add_argument("--against", help="also print differences to this variant")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no variant after this")
    parser.add_argument("--json", type=Path, default=[], nargs="+", help="one file, or with "
                        "--show several")  # fmt: skip
    parser.add_argument("--show", action="store_true", help="only print the tables of --json")
    args = parser.parse_args()
    if len(args.json) > 1 and not args.show:
        parser.error("several --json files need --show")
    if not args.json and not args.timing:
        parser.error("--json is needed")
    names = args.variants.split(";")
    only_rome = names != ["all"] and all(isinstance(variant(x)[0], Rome) for x in names)
    if args.same_values and not only_rome:
        parser.error("--same-values compares updates of ROME; name such variants in --variants")
    return args


def main() -> None:
    """Run every variant and print a line for each."""
    args = arguments()
    if args.show:
        for records in ("tune", "report"):
            parts = [rows_of(path, records) for path in args.json]
            if rows := joined([part for part in parts if part]):
                print(f"{records}, {rows[0]['cases']} cases\n{table(rows)}")
                if args.against:
                    print(f"\n{differences(rows, args.against)}")
        return

    everything = list(read_cases(args.cases).cases)
    wanted = range(len(everything))[args.records or slice(None)]
    tuning = range(len(everything))[TUNE]
    cases = [everything[i] for i in wanted if (i in tuning) == (args.slice == "tune")][: args.limit]
    began = time.perf_counter()
    lm = load(args.model, device=args.device, dtype=args.dtype)
    names = args.variants.split(";")
    if names == ["all"]:
        names = ["before", "paper", *VARIANTS, "memit"]
    if args.timing:
        batches = [cases[i : i + args.batch] for i in range(0, len(cases), args.batch)]
        if len(batches) < 2:
            raise SystemExit(f"{len(cases)} cases are one batch, which warms up; lower --batch")
        editors = {name: with_statistics(lm, name, args) for name in names}
        print(timing_table(time_edits(lm, editors, batches[: args.timing + 1])))
        return

    [path] = args.json
    done = {row["variant"] for row in rows_of(path, args.slice)}
    machine = torch.cuda.get_device_name() if lm.device.type == "cuda" else "CPU"
    print(f"{lm.name} on {machine}, {args.slice}, {len(cases)} cases", flush=True)

    def report(name: str, row: dict[str, Any]) -> None:
        row = {"variant": name, "slice": args.slice, "machine": machine, **row}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(table([row]).splitlines()[-1], f"{row.get('seconds', 0):.3f} s", flush=True)

    if "unedited" not in done:
        report("unedited", row_of(by_case(scores_of(lm, cases, [None] * len(cases), args.batch))))
    values: list[ValueResult] = []
    for name in (name for name in names if name not in done):
        if time.perf_counter() - began > 60 * args.minutes:
            break
        editor = with_statistics(lm, name, args)
        if args.same_values:
            values = values or search(lm, with_statistics(lm, names[0], args), cases, args.batch)
            edits, timing = insert_cases(lm, editor, values, args.batch), {}
        else:
            edits, seconds = edit_cases(lm, editor, cases, args.batch, args.facts_per_edit)
            timing = {"seconds": round(seconds, 4)}
        made = [edit for edit in edits if isinstance(edit, Edit)]
        checks = [edit.checks for edit in made if edit.checks is not None]
        norms = [x.update_norm for x in checks]
        steps = [len(losses) for edit in made for losses in edit.settings["losses"]]
        settings = {**editor.to_dict(), "search": asdict(editor.search), "prefixes": None}
        if not made:
            print(f"{name}: {edits[0]}")
            continue
        report(name, {
            **row_of(by_case(scores_of(lm, cases, edits, args.batch))),
            "failed": len(edits) - len(made),
            **timing,
            "steps": round(float(np.mean(steps)), 2),
            **({"update_norm": round(float(np.mean(norms)), 4)} if norms else {}),
            "beyond_limits": sum(bool(x.complaints()) for x in checks),
            "settings": json.loads(json.dumps(settings, default=str)),
        })  # fmt: skip
    rows = rows_of(path, args.slice)
    print(table(rows))
    if args.against:
        print(f"\n{differences(rows, args.against)}")


if __name__ == "__main__":
    main()
