"""Calibrate a model, and evaluate what that changes on CounterFact records that it did not use.

    python bench/calibration.py --model MODEL --data counterfact.json.gz --text wikipedia.txt.gz \
        --minutes 2 --out OUT

1. `factscope calibrate` on the first 700 records, with statistics from the text.
2. ROME, MEMIT (ten facts at once) and FT+L on 200 later records, with the defaults and calibrated.
3. ROME at the layer that a causal trace of each record's true object finds (`--layer auto`) against
   the calibrated layer, on the same records; those without a clear layer are counted and left out.

OUT gets run folders, which `factscope report` reads, and results.json with every number.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from factscope.analysis.calibration import estimates_to_dict, rates, trial_of
from factscope.analysis.estimate import estimate
from factscope.analysis.metrics import METRICS, SUCCESS_RATES
from factscope.cli.stats import collect_statistics
from factscope.data.readers import read_cases
from factscope.editing.calibration import CACHE_KEY, Calibration
from factscope.editing.defaults import memit_defaults, rome_defaults, traced_layers
from factscope.editing.settings import Rome, editor
from factscope.evaluation.settings import ScoringOptions
from factscope.io import write_atomic
from factscope.lm.load import load
from factscope.records import CaseRecord
from factscope.runs.calibrate import CalibrateRun, CalibrationSettings
from factscope.runs.evaluate import EvaluateRun

SKIPPED = 700
"""Records that the calibration may use; the later ones are evaluated."""
SCORING = ScoringOptions(length=0, attributes=False)

parser = argparse.ArgumentParser(description="Calibrate a model and evaluate what that changes.")
parser.add_argument("--model", required=True)
parser.add_argument("--data", type=Path, required=True, help="CounterFact")
parser.add_argument("--text", type=Path, help="text for statistics; else the usual sources")
parser.add_argument("--minutes", type=float, help="of the calibration")
parser.add_argument("--cases", type=int, help="cases of the calibration, for each part")
parser.add_argument("--skip", type=int, default=SKIPPED, help="records for the calibration")
parser.add_argument("--limit", type=int, default=200, help="records to evaluate")
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", type=Path, required=True)
options = parser.parse_args()

lm = load(options.model, dtype=options.dtype)
cases = read_cases(options.data).cases
heldout = cases[options.skip :][: options.limit]
collected: set[int] = set()
results: dict[str, object] = {"model": lm.name, "device": str(lm.device), "data": options.data.name}


def statistics(layers: object) -> None:
    """Collect those that were not collected yet, from the text if it is given."""
    new = [n for n in layers if n not in collected]  # pyright: ignore
    if new:
        collect_statistics(lm, new, options.text)
        collected.update(new)


def keep(name: str, value: object) -> None:
    """Store a result at once: a cut run keeps what it has."""
    results[name] = value
    write_atomic(options.out / "results.json", json.dumps(results, indent=1) + "\n")
    print(f"{time.perf_counter() - started:7.1f} s  {name}: {json.dumps(value)[:600]}", flush=True)


def evaluated(name: str, own: object, count: int = len(heldout)) -> list[CaseRecord]:
    """The records of an editor on the held-out cases, into a run folder."""
    batch = own.method == "memit"  # pyright: ignore
    run = EvaluateRun(
        model=options.model, dtype=options.dtype, data=options.data, name="counterfact",
        method=name, editor=own, protocol="batch" if batch else "single",  # pyright: ignore
        batch_size=10 if batch else None, scoring=SCORING,
    )  # fmt: skip
    folder = run.create_or_open(lm, options.out / name)
    if not run.is_complete(folder, heldout[:count]):
        run.run(lm, folder, heldout[:count])
    return folder.case_records()


def scores(records: list[CaseRecord]) -> dict[str, object]:
    """S, ES, PS and NS with intervals, and counts."""
    value = trial_of("", {}, records).to_dict()
    value["unedited"] = estimates_to_dict(rates([r.before for r in records if r.before]))
    value["taken"] = sum(
        bool(r.after and r.after.prompts["prompt"][0].new_correct) for r in records
    )
    return {k: value[k] for k in ("cases", "failed", "broken", "taken", "metrics", "unedited")}


options.out.mkdir(parents=True, exist_ok=True)
started = time.perf_counter()
calibrate = CalibrateRun(
    model=options.model, dtype=options.dtype, data=options.data, name="counterfact",
    settings=CalibrationSettings(minutes=options.minutes, cases=options.cases),
)  # fmt: skip
folder = calibrate.create_or_open(lm, options.out / "calibration")
calibration: Calibration = calibrate.run(
    lm, folder, cases[: options.skip], statistics, tell=lambda line: print(line, flush=True)
)
keep("settings", calibration.settings)

for label, used in (("default", None), ("calibrated", calibration)):
    lm.cache[CACHE_KEY] = used
    statistics([rome_defaults(lm).layer, *memit_defaults(lm).layers])
    for method in ("rome", "memit", "ft-l"):
        keep(f"{method}, {label}", scores(evaluated(f"{method}-{label}", editor(method))))

# The layer by trace: facts of one layer are edited together.
lm.cache[CACHE_KEY] = calibration
fixed = rome_defaults(lm).layer
layers = traced_layers(lm, [case.request for case in heldout])
chosen = Counter(layer for layer in layers if isinstance(layer, int))
statistics(sorted(chosen))
auto = evaluated("rome-auto", Rome(layer="auto"))
by_fact = {r.fact: r for r in evaluated("rome-calibrated", editor("rome"))}
pairs = [(a.after, b.after) for a in auto if a.after and (b := by_fact[a.fact]).after]
keep(
    "auto layer",
    {
        "records": len(heldout),
        "without a clear layer": sum(not isinstance(layer, int) for layer in layers),
        "edited both ways": len(pairs),
        "fixed layer": fixed,
        "traced layers": {str(k): n for k, n in sorted(chosen.items())},
        "auto": estimates_to_dict(rates([a for a, _ in pairs])),
        "fixed": estimates_to_dict(rates([b for _, b in pairs if b])),
        "auto minus fixed": estimates_to_dict(
            {
                name: estimate(METRICS[name](a) - METRICS[name](b) for a, b in pairs if b)
                for name in SUCCESS_RATES
            }
        ),
    },
)
