"""One model before and after its calibration, on CounterFact records that it did not use, and where
it stores the facts that it knows: the tables of docs/results.md for several models.

    python bench/calibration.py --model MODEL --data counterfact.json.gz --text wikipedia.txt.gz \
        --known known_1000.json.gz --minutes 5 --out OUT
    python bench/calibration.py --show OUT1 OUT2 OUT3 --figure models.png

The first command runs these stages, or some of them with `--stage`:

    trace      causal traces of the known facts (`--known`), as in bench/known_facts.py
    calibrate  `factscope calibrate` on the first 700 records, with statistics from the text
    evaluate   ROME, MEMIT (ten facts at once) and FT+L on 200 later records, with the defaults and
               calibrated; both with the same statistics
    auto       ROME at the layer that a causal trace of each record's true object finds
               (`--layer auto`) against the calibrated and the default layer, on the same records;
               those without a clear layer are counted and left out

OUT gets run folders, which `factscope report` reads. Every stage resumes from them, so it can be
cut at any time and run again. The second command, which needs no model, prints the tables of all
models in Markdown from what is there, and draws the traces. The stages `evaluate` and `auto` only
need OUT/calibration/calibration.json of the stage before.
"""

import argparse
import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from factscope.analysis.calibration import rates, settings_text, trial_of
from factscope.analysis.effects import LAST, LAST_SUBJECT, average_kinds
from factscope.analysis.estimate import Estimate, estimate
from factscope.analysis.metrics import METRICS, SUCCESS_RATES, harmonic_mean
from factscope.data.readers import read_cases
from factscope.editing.calibration import CACHE_KEY, editor_with, load_calibration
from factscope.evaluation.settings import ScoringOptions
from factscope.io import read_json, write_atomic
from factscope.lm.model import LM
from factscope.records import CaseRecord, CaseScores, read_case_records, read_trace_records
from factscope.report.tables import Table, as_markdown
from factscope.runs.calibrate import FILE, CalibrateRun, CalibrationSettings, trial_name
from factscope.runs.evaluate import EvaluateRun
from known_facts import trace_run

SKIPPED = 700
"""Records that the calibration may use; the later ones are evaluated."""
SCORING = ScoringOptions(length=0, attributes=False)
METHODS = {"rome": "ROME", "memit": "MEMIT", "ft-l": "FT+L"}
SETTINGS = ("default", "calibrated")
STAGES = ("trace", "calibrate", "evaluate", "auto")
TRACES, CALIBRATION, MODEL = "traces", "calibration", "model.json"


def settings_of(out: Path, method: str, label: str) -> dict[str, Any]:
    """The calibrated settings; none for the default."""
    if label == "default":
        return {}
    return dict(load_calibration(out / CALIBRATION / FILE).settings[method])


def editor_of(out: Path, method: str, label: str) -> Any:
    """The editor with these settings; None in one of them means the default."""
    return editor_with(method, settings_of(out, method, label))


def folder_of(out: Path, method: str, label: str) -> Path:
    """Its run folder: another one if a longer calibration has found other settings."""
    settings = settings_of(out, method, label)
    return out / (f"{label}-{trial_name(method, settings)}" if settings else f"{label}-{method}")


# ---- stages


class Stages:
    """One model with its folder."""

    def __init__(self, options: Namespace) -> None:
        from factscope.lm.load import load

        self.options = options
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.lm: LM = load(options.model, device=options.device, dtype=options.dtype)
        cases = read_cases(options.data).cases
        self.choosing, self.heldout = (
            list(cases[: options.skip]),
            list(cases[options.skip :][: options.limit]),
        )
        self.collected: set[int] = set()
        # The calibration that the user may have must not change the defaults.
        self.lm.cache[CACHE_KEY] = None
        name = Path(options.model).stem
        write_atomic(self.out / MODEL, json.dumps({"model": name, "device": str(self.lm.device)}))

    def statistics(
        self, layers: Sequence[int], facts: Sequence[Any] = (), seconds: float = math.inf
    ) -> None:
        """Collect those of layers that have none from this text, until C⁻¹k stops moving."""
        from factscope.cli.stats import collect_statistics

        new = sorted({n for n in layers if n not in self.collected})
        if new:
            given = facts or [case.fact for case in self.choosing[:64]]
            collect_statistics(self.lm, new, self.options.text, facts=given, seconds=seconds)
            self.collected |= set(new)

    def trace(self) -> None:
        """Trace the known facts."""
        from factscope.tracing.settings import Tracing

        if self.options.known is None:
            raise SystemExit("--stage trace needs --known FILE")
        options = self.options
        trace_run(
            self.lm, options.model, options.known, Tracing(), self.out / TRACES,
            dtype=options.dtype, limit=options.known_limit,
        )  # fmt: skip

    def calibrate(self) -> None:
        """Calibrate on the first records. More minutes continue a finished calibration."""
        options = self.options
        run = CalibrateRun(
            model=options.model, dtype=options.dtype, data=options.data, name="counterfact",
            settings=CalibrationSettings(minutes=options.minutes, cases=options.cases),
        )  # fmt: skip
        folder = run.create_or_open(self.lm, self.out / CALIBRATION)
        run.run(
            self.lm, folder, self.choosing, self.statistics,
            tell=lambda line: print(line, flush=True),
        )  # fmt: skip

    def evaluate(self) -> None:
        """Every method before and after the calibration."""
        for label in SETTINGS:
            for method in METHODS:
                folder = folder_of(self.out, method, label)
                self.evaluated(folder, editor_of(self.out, method, label))

    def auto(self) -> None:
        """The traced layer of each fact against the calibrated one."""
        from factscope.editing.defaults import traced_layers

        rome = editor_of(self.out, "rome", "calibrated")
        self.evaluated(folder_of(self.out, "rome", "calibrated"), rome)
        # Facts of one layer are edited together.
        layers = traced_layers(self.lm, [case.request for case in self.heldout])
        self.statistics([layer for layer in layers if isinstance(layer, int)])
        self.evaluated(folder_of(self.out, "rome", "auto"), replace(rome, layer="auto"))

    def evaluated(self, path: Path, own: Any) -> None:
        """Evaluate an editor on the held-out cases, into a run folder."""
        from factscope.editing.defaults import memit_defaults, rome_defaults

        batch, options = own.method == "memit", self.options
        if batch:
            self.statistics(own.layers or memit_defaults(self.lm).layers)
        elif own.method == "rome" and own.layer != "auto":
            self.statistics([rome_defaults(self.lm).layer if own.layer is None else own.layer])
        run = EvaluateRun(
            model=options.model, dtype=options.dtype, data=options.data, name="counterfact",
            method=path.name, editor=own, protocol="batch" if batch else "single",
            batch_size=10 if batch else None, scoring=SCORING,
        )  # fmt: skip
        folder = run.create_or_open(self.lm, path)
        if not run.is_complete(folder, self.heldout):
            run.run(self.lm, folder, self.heldout)
        print(trial_of(path.name, {}, folder.case_records()).text, flush=True)


# ---- tables


def records_of(out: Path, method: str, label: str) -> list[CaseRecord]:
    """The records of an evaluation, as far as it is."""
    if label != "default" and not (out / CALIBRATION / FILE).is_file():
        return []
    file = folder_of(out, method, label) / "records.jsonl"
    return list(read_case_records(file)) if file.is_file() else []


def show(folders: Sequence[Path]) -> None:
    """Print the tables of several models."""
    models = {str(read_json(folder / MODEL)["model"]): folder for folder in folders}
    tables: list[Callable[[Mapping[str, Path]], Table]] = [
        traces_table, editing_table, calibrations_table, auto_table,
    ]  # fmt: skip
    for table in tables:
        found = table(models)
        if found.rows:
            print(as_markdown(found))


def draw(folders: Sequence[Path], path: Path) -> None:
    """Draw the average effects of each model by depth, as fractions of its total effect."""
    from matplotlib.figure import Figure

    names = {"states": "one state", "mlp": "MLP outputs", "attn": "attention outputs"}
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True)
    for i, folder in enumerate(folders):
        model = read_json(folder / MODEL)["model"]
        averages = average_kinds(list(read_trace_records(folder / TRACES / "records.jsonl")))
        for ax, (kind, name) in zip(panels, names.items(), strict=True):
            effects = averages[kind]
            depth = (np.arange(effects.layers) + 0.5) / effects.layers
            for role, line in ((LAST_SUBJECT, "-"), (LAST, "--")):
                row, total = effects.row(role), effects.total.mean
                low, high = row.mean - row.half_width, row.mean + row.half_width
                ax.plot(depth, row.mean / total, line, color=f"C{i}", label=f"{model}, {role}")
                ax.fill_between(depth, low / total, high / total, color=f"C{i}", alpha=0.15, lw=0)
            ax.set(title=f"{name} restored", xlabel="depth of the layer / number of layers")
    panels[0].set_ylabel("average indirect / total effect")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150, metadata={"Software": ""})


def percent(value: Estimate) -> str:
    width = "" if math.isnan(value.half_width) else f" ± {100 * value.half_width:.1f}"
    return f"{100 * value.mean:.1f}{width}"


def traces_table(models: Mapping[str, Path]) -> Table:
    """Where the known facts of each model are restored best."""
    rows = []
    for model, folder in models.items():
        file = folder / TRACES / "records.jsonl"
        records = list(read_trace_records(file)) if file.is_file() else []
        if not any(record.known for record in records):
            continue
        for kind, effects in average_kinds(records).items():
            facts = f"{effects.facts} of {effects.facts + effects.skipped}"
            row: list[Any] = [model, facts, *map(percent, (effects.clean, effects.total)), kind]
            for role in (LAST_SUBJECT, LAST):
                layer, peak = effects.peak(role)
                row += [f"{layer} of {effects.layers}", percent(peak)]
            rows.append(tuple(row))
            model = facts = ""
    columns = (
        "model", "known facts", "P[o]", "total effect", "restored", "last subject token, layer",
        "AIE", "last token, layer", "AIE of the last token",
    )  # fmt: skip
    note = "Percent, with 95 % intervals over facts. AIE: the highest average indirect effect."
    return Table("Traces of known facts", columns, tuple(rows), note)


def editing_table(models: Mapping[str, Path]) -> Table:
    """Every method before and after the calibration."""
    rows = []
    for model, folder in models.items():
        unedited = False
        for method, name in METHODS.items():
            for label in SETTINGS:
                records = records_of(folder, method, label)
                if not records:
                    continue
                if not unedited:
                    before = [r.before for r in records if r.before is not None]
                    rows.append((model, "unedited", *score_cells(before), len(before), "", ""))
                    unedited = True
                after = [r.after for r in records if r.after is not None]
                taken = sum(x.prompts["prompt"][0].new_correct is True for x in after)
                broken = sum(bool(r.broken) for r in records)
                rows.append(
                    ("", f"{name}, {label}", *score_cells(after), len(records), taken, broken)
                )
    columns = ("model", "method", "S", *SUCCESS_RATES, "records", "taken", "broken")
    note = (
        "Percent, with 95 % intervals over records that were not used to calibrate. MEMIT writes "
        "ten facts at once. Taken: the new object is the most likely one after the prompt."
    )
    return Table("Editing before and after calibration", columns, tuple(rows), note)


def score_cells(scores: Sequence[CaseScores]) -> list[str]:
    found = rates(scores)
    return [percent(found[name]) if found else "" for name in ("S", *SUCCESS_RATES)]


def calibrations_table(models: Mapping[str, Path]) -> Table:
    """What was found, and what it took."""
    rows = []
    for model, folder in models.items():
        file = folder / CALIBRATION / FILE
        if not file.is_file():
            continue
        found = load_calibration(file)
        evidence = found.evidence
        best = "; ".join(
            f"{n} {'fact' if int(n) == 1 else 'facts'}: {METHODS[x]}"
            for n, x in evidence.get("best", {}).items()
        )
        moved = {
            x["layer"]: f"layer {x['layer']}: {x['tokens']:,} tokens, {100 * last:.1f} %"
            for x in evidence["statistics"]
            if x.get("movement") and (last := x["movement"][-1][1]) is not None
        }
        for method, values in found.settings.items():
            statistics = "; ".join(
                moved[n]
                for n in values.get("layers", [values.get("layer")])
                if n in moved and method != "ft-l"
            )
            tried = sum(t["method"] == method for t in evidence["trials"])
            text = settings_text(values)
            rows.append((model, METHODS[method], text, tried, statistics, best))
            model = best = ""
    columns = ("model", "method", "settings", "trials", "statistics, movement of C⁻¹k", "best")
    return Table("Calibrations", columns, tuple(rows))


def auto_table(models: Mapping[str, Path]) -> Table:
    """The layer by trace against the calibrated and the default layer, on the same facts."""
    rows = []
    for model, folder in models.items():
        records = records_of(folder, "rome", "auto")
        auto = {r.fact: r.after for r in records if r.after is not None}
        if records:
            rows.append((model, "auto", *score_cells(list(auto.values())), len(auto), len(records)))
        for label in reversed(SETTINGS):
            fixed = {r.fact: r.after for r in records_of(folder, "rome", label)}
            pairs = [(after, other) for x, after in auto.items() if (other := fixed.get(x))]
            if not pairs:
                continue
            differences = [paired_S(pairs)]
            differences += [
                estimate([METRICS[name](a) - METRICS[name](b) for a, b in pairs])
                for name in SUCCESS_RATES
            ]
            scores = score_cells([b for _, b in pairs])
            rows.append(("", label, *scores, len(pairs), ""))
            rows.append(("", f"auto minus {label}", *map(percent, differences), len(pairs), ""))
    columns = ("model", "layer", "S", *SUCCESS_RATES, "edited", "records")
    note = "95 % intervals; those of differences are of paired differences, of S by bootstrap."
    return Table("Layer by trace against a fixed layer", columns, tuple(rows), note)


def paired_S(pairs: Sequence[tuple[CaseScores, CaseScores]]) -> Estimate:
    """The difference of S, with a bootstrap over records."""
    values = np.array([[[METRICS[n](x) for n in SUCCESS_RATES] for x in pair] for pair in pairs])
    values = values[~np.isnan(values).any((1, 2))]

    def difference(rows: np.ndarray) -> float:
        auto, fixed = rows.mean(0)
        return harmonic_mean(auto.tolist()) - harmonic_mean(fixed.tolist())

    random = np.random.default_rng(0)
    draws = [difference(values[random.integers(len(values), size=len(values))]) for _ in range(999)]
    return Estimate(difference(values), 1.96 * float(np.std(draws)), len(values))


def main(words: Sequence[str] | None = None) -> None:
    """Run the stages, or print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", type=Path, nargs="+", metavar="OUT", help="print the tables")
    parser.add_argument("--figure", type=Path, help="with --show, draw the traces too")
    parser.add_argument("--model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, help="CounterFact")
    parser.add_argument("--known", type=Path, help="known facts to trace")
    parser.add_argument("--known-limit", type=int, help="trace only the first N of them")
    parser.add_argument("--text", type=Path, help="text for statistics; else the usual sources")
    parser.add_argument("--stage", choices=STAGES, nargs="+", help="all if not given")
    parser.add_argument("--minutes", type=float, help="of the calibration")
    parser.add_argument("--cases", type=int, help="cases of the calibration, for each part")
    parser.add_argument("--skip", type=int, default=SKIPPED, help="records for the calibration")
    parser.add_argument("--limit", type=int, default=200, help="records to evaluate")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if options.show:
        show(options.show)
        if options.figure:
            draw(options.show, options.figure)
        return
    if None in (options.model, options.data, options.out):
        parser.error("give --model, --data and --out, or --show")
    stages = Stages(options)
    usual = [stage for stage in STAGES if stage != "trace" or options.known is not None]
    for stage in options.stage or usual:
        getattr(stages, stage)()
    show([options.out])


if __name__ == "__main__":
    main()
