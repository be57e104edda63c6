"""Measure good settings of editing methods for one model, into a run folder.

    spec.toml, info.json    settings of the calibration, versions, the model's fingerprint
    cases.json              which cases the model knows: one part to choose by, one to report on
    traces/                 traces of known facts: a run folder
    choose/, report/        a run folder for each combination of settings, by part
    calibration.json        the result

1. Cases that the model knows: it prefers the true object to the new one.
2. Traces of some of these facts propose layers for ROME, beside layers at regular depths.
3. Statistics of the layers to try, until the direction C⁻¹k of the cases' keys stops moving.
4. Each method's settings are searched one axis at a time on the first part of the cases, from the
   model's defaults: first the layer, then the clamp and so on.
5. Defaults and result are evaluated on the second part.
6. Which method is best, for one fact and for several at once, is chosen on the first part and
   reported on the second.

A time budget ends the search; what is reported is always evaluated. An interrupted calibration
resumes: combinations that were evaluated are read from the folder.
"""

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factscope.analysis.calibration import (
    MARGIN,
    Trial,
    estimates_to_dict,
    mlp_effects,
    trial_of,
)
from factscope.data.readers import CasesFile, read_cases
from factscope.editing.calibration import CACHE_KEY, CALIBRATED, Calibration, editor_with
from factscope.errors import BadFact, BadInput, BadRunFolder, FactscopeError
from factscope.evaluation.settings import MIN_CASES, CalibrationSettings, ScoringOptions
from factscope.facts import Case, Fact
from factscope.io import read_json, sha256, write_atomic
from factscope.progress import Progress, no_progress
from factscope.runs.evaluate import EvaluateRun
from factscope.runs.folder import Run, RunFolder, locks_folder, run_info
from factscope.runs.sweep import FATAL
from factscope.settings import check

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)

SCORING = ScoringOptions(length=0, attributes=False)
"""Only what S is made of."""
CASES_PER_PASS = 64
STATISTICS_SHARE = 0.25
"""Part of the time after which statistics that are enough to be used are not extended."""
SHARES = {"rome": 0.55, "memit": 0.35, "ft-l": 0.1}
"""How the time to search is divided among the methods."""
CLAMPS = (1.0, 0.5, 2.0, 4.0, 0.25, 8.0)
RATES = (0.25, 1.0, 0.1)
MEMIT_RATES = (0.2, 0.5)
CONTRAST_TOLERANCES = (3.0, "inf")
DECAYS = (0.1, 0.001)
WEIGHTS_PER_DIMENSION = (0.1, 0.01, 0.5, 3.0)
"""λ per dimension of a key (`editing.defaults.WEIGHT_PER_DIMENSION`)."""
MEMIT_CLAMPS = (0.75, 0.4, 1.5, 3.0)
FILE = "calibration.json"

Statistics = Callable[[Sequence[int], Sequence[Fact], float], None]
"""Makes sure that layers have statistics in the user's cache: until C⁻¹k of the facts stops moving,
within some seconds."""


@dataclass(frozen=True, kw_only=True)
class CalibrateRun(Run):
    """Which model to calibrate, on which cases, and how."""

    model: str
    """Model: a short name, a folder, a file or a hub id."""
    dtype: str
    """Number format of the weights."""
    data: Path
    """File of cases."""
    name: str
    """Name of the data set in records."""
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)

    __post_init__ = check

    def read(self) -> CasesFile:
        """The cases, and problems of those that cannot be read."""
        return read_cases(self.data)

    def spec(self) -> dict[str, Any]:
        """What identifies the run; more minutes continue the same run."""
        settings = asdict(self.settings)
        del settings["minutes"]
        return {
            "command": "calibrate",
            "model": self.model,
            "dtype": self.dtype,
            "data": self.name,
            "data_sha256": sha256(self.data),
            **settings,
        }

    @locks_folder
    def run(
        self,
        lm: "LM",
        folder: RunFolder,
        cases: Sequence[Case],
        statistics: Statistics,
        *,
        tell: Callable[[str], None] = log.info,
        progress: Progress = no_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> Calibration:
        """Search, report, and write calibration.json; `tell` gets a line for each trial."""
        search = _Search(self, lm, folder, statistics, tell, progress, clock)
        earlier = lm.cache.get(CACHE_KEY)
        lm.cache[CACHE_KEY] = None  # start from the defaults, not from an earlier calibration
        try:
            calibration = search.run(cases)
        finally:
            lm.cache[CACHE_KEY] = earlier
        calibration.save(folder.path / FILE)
        return calibration


class _Search:
    """The state of a calibration."""

    def __init__(
        self,
        run: CalibrateRun,
        lm: "LM",
        folder: RunFolder,
        statistics: Statistics,
        tell: Callable[[str], None],
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        from factscope.lm.accel import on_gpu

        gpu = on_gpu(lm)
        self.spec, self.lm, self.folder, self.statistics = run, lm, folder, statistics
        self.tell, self.progress, self.clock = tell, progress, clock
        self.count = run.settings.cases or (64 if gpu else 16)
        self.traced_count = 32 if gpu else 8
        self.seconds = 60 * (run.settings.minutes or (5 if gpu else 30))
        self.start = self.reported = clock()
        self.end = self.start + self.seconds
        self.method_end = self.end
        self.last_seconds: dict[str, float] = {}  # of one trial of a method
        self.trials: list[Trial] = []
        self.statistics_seconds = 0.0
        self.facts: list[Fact] = []

    def run(self, cases: Sequence[Case]) -> Calibration:
        """All steps."""
        choose, report = self.parts(cases)
        self.tell(
            f"{len(choose)} cases to choose by and {len(report)} to report on, all known to "
            f"{self.lm.name}"
        )
        self.facts = [case.fact for case in choose]
        effects, traced = self.trace(choose)
        chosen: dict[str, dict[str, Any]] = {}
        defaults: dict[str, dict[str, Any]] = {}
        methods = list(self.spec.settings.methods)
        for i, method in enumerate(methods):
            later = sum(SHARES[m] for m in methods[i:])
            left = self.end - self.reserve() - self.clock()
            self.method_end = self.clock() + max(0.0, left) * SHARES[method] / later
            defaults[method] = self.default_settings(method)
            chosen[method] = self.search(method, defaults[method], choose, effects, chosen)
        final = {
            method: {
                "default": self.trial("report", method, defaults[method], report),
                "calibrated": self.trial("report", method, chosen[method], report),
            }
            for method in methods
        }
        best, methods_report = self.best_methods(chosen, choose, report, final)
        evidence = {
            "data": self.spec.name,
            "cases": {"choose": len(choose), "report": len(report)},
            "unedited": estimates_to_dict(next(iter(final.values()))["default"].unedited),
            "report": {m: {k: t.to_dict() for k, t in both.items()} for m, both in final.items()},
            "trials": [trial.to_dict() for trial in self.trials],
            "best": best,
            "methods": methods_report,
            "trace": {"facts": traced, "effects": effects},
            "statistics": self.describe_statistics(chosen),
            "seconds": round(self.clock() - self.start, 1),
            **run_info(self.lm),
        }
        self.advance()
        return Calibration(
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            settings=chosen,
            evidence=evidence,
        )

    # ---- cases

    def parts(self, cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
        """The known cases, split: every other one to choose by, the rest to report on."""
        path = self.folder.path / "cases.json"
        if path.is_file():
            try:
                numbers = dict(read_json(path))
                return tuple([cases[n] for n in numbers[part]] for part in ("choose", "report"))  # pyright: ignore
            except (BadInput, KeyError, IndexError, TypeError, ValueError) as error:
                raise BadRunFolder(f"{path} cannot be read ({error}); delete it") from error
        known = self.known(cases, 2 * self.count)
        if len(known) < 2 * MIN_CASES:
            raise BadFact(
                f"{self.lm.name} knows {len(known)} of the {len(cases)} cases (the true object is "
                f"more likely than the new one); calibration needs {2 * MIN_CASES}. Give --data "
                "with cases that it knows"
            )
        parts = {"choose": known[::2], "report": known[1::2]}
        write_atomic(path, json.dumps(parts) + "\n")
        choose, report = ([cases[n] for n in numbers] for numbers in parts.values())
        return choose, report

    def known(self, cases: Sequence[Case], count: int) -> list[int]:
        """The numbers of the first known cases that have paraphrases and neighbours."""
        from factscope.evaluation.cases import score_cases

        usable = [
            n
            for n, case in enumerate(cases)
            if case.true and case.paraphrases and case.neighbours and case.fact.target
        ]
        found: list[int] = []
        for i in range(0, len(usable), CASES_PER_PASS):
            numbers = usable[i : i + CASES_PER_PASS]
            short = [replace(cases[n], paraphrases=(), neighbours=()) for n in numbers]
            for n, scores in zip(numbers, self.scored(short, score_cases), strict=True):
                if scores is not None and scores.prompts["prompt"][0].true < (
                    scores.prompts["prompt"][0].new
                ):
                    found.append(n)
            if len(found) >= count:
                break
        return found[:count]

    def scored(self, cases: Sequence[Case], score: Callable[..., Any]) -> list[Any]:
        """The scores of each case; None for one that the model cannot take."""
        try:
            return list(score(self.lm, cases, scoring=SCORING))
        except FactscopeError:
            if len(cases) == 1:
                return [None]
        return [x for case in cases for x in self.scored([case], score)]

    # ---- traces

    def trace(self, cases: Sequence[Case]) -> tuple[list[float], int]:
        """The mean effect of MLP outputs by layer, and the number of facts; none without ROME."""
        from factscope.tracing.settings import Tracing
        from factscope.tracing.trace import trace_many

        if "rome" not in self.spec.settings.methods:
            return [], 0
        settings = Tracing(kinds=("mlp",))
        facts = [_true_fact(case) for case in cases]
        spec = {"command": "trace", "model": self.spec.model, "tracing": settings.to_dict()}
        traces = RunFolder.create_or_open(self.folder.path / "traces", spec, run_info(self.lm))
        records = traces.trace_records()
        finished = {record.fact for record in records}
        known = sum(record.known for record in records)
        for record in trace_many(self.lm, facts, settings, finished=finished):
            traces.append(record)
            records.append(record)
            known += record.known
            self.advance()
            # A tenth of the time is enough: traces only propose layers.
            if known >= self.traced_count or self.clock() - self.start > 0.1 * self.seconds:
                break
        return mlp_effects(records)

    # ---- search

    def default_settings(self, method: str) -> dict[str, Any]:
        """The settings that the method has without a calibration."""
        from factscope.editing.defaults import memit_defaults, rome_defaults
        from factscope.editing.settings import FT_L

        if method == "ft-l":
            resolved = FT_L.resolve(self.lm)
            return {"layer": resolved.layer, "max_change": resolved.max_change}
        row = rome_defaults(self.lm) if method == "rome" else memit_defaults(self.lm)
        return {name: getattr(row, name) for name in CALIBRATED[method]}

    def search(
        self,
        method: str,
        default: dict[str, Any],
        cases: Sequence[Case],
        effects: Sequence[float],
        chosen: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """The settings with the highest score, one axis after another."""
        axes = list(self.axes(method, default, effects, chosen))
        if method != "ft-l":
            # All at once: one pass over the text collects any number of layers.
            first = axes[0][1](default) if self.has_time(method) else []
            self.collect([default[axes[0][0]], *first])
        best = self.trial("choose", method, default, cases)
        for name, values in axes:
            base, trials = best.settings, values(best.settings)
            if name in ("layer", "layers") and method != "ft-l" and self.has_time(method):
                self.collect(trials)
            for value in trials:
                settings = {**base, name: value}
                if settings == base or not self.has_time(method):
                    continue
                trial = self.trial("choose", method, settings, cases)
                if trial.score > best.score + MARGIN:
                    best = trial
        return dict(best.settings)

    def axes(
        self,
        method: str,
        default: Mapping[str, Any],
        effects: Sequence[float],
        chosen: Mapping[str, Mapping[str, Any]],
    ) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], Sequence[Any]]]]:
        """Each setting with the values to try, given the best settings so far."""
        last = max(0, self.lm.n_layers - 2)  # in the last layer a value cannot act

        def near(best: Mapping[str, Any]) -> list[int]:
            return [n for d in (1, -1, 2, -2) if 0 <= (n := best["layer"] + d) <= last]

        if method == "rome":
            layers = candidate_layers(last, effects)
            yield "layer", lambda best: layers
            yield "clamp", lambda best: CLAMPS
            yield "layer", near
            yield "lr", lambda best: RATES
            yield "contrast_tolerance", lambda best: CONTRAST_TOLERANCES
            yield "weight_decay", lambda best: DECAYS
        elif method == "memit":
            layer = chosen["rome"]["layer"] if "rome" in chosen else default["layers"][-1]
            yield "layers", lambda best: layer_ranges(layer, last)
            yield "clamp", lambda best: MEMIT_CLAMPS
            width = self.lm.mlp_weight(layer).shape[1]
            yield "covariance_weight", lambda best: [x * width for x in WEIGHTS_PER_DIMENSION]
            yield "lr", lambda best: MEMIT_RATES
        else:
            layer = chosen["rome"]["layer"] if "rome" in chosen else last // 4
            limit = default["max_change"]
            yield "layer", lambda best: list(dict.fromkeys((0, layer, last // 2)))
            yield "max_change", lambda best: [limit * x for x in (0.3, 3.0, 0.1, 10.0)]

    def collect(self, layers: Sequence[int | Sequence[int]]) -> None:
        """Make sure that all these layers have statistics."""
        flat = {x for item in layers for x in ([item] if isinstance(item, int) else item)}
        started = self.clock()
        left = STATISTICS_SHARE * self.seconds - self.statistics_seconds
        self.statistics(sorted(flat), self.facts, max(0.0, left))
        self.statistics_seconds += self.clock() - started

    def best_methods(
        self,
        chosen: Mapping[str, Mapping[str, Any]],
        choose: Sequence[Case],
        report: Sequence[Case],
        final: Mapping[str, Mapping[str, Trial]],
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """By number of facts in an edit, the method with the highest score on the cases to choose
        by, and the methods' scores on the others; less if there is no time."""
        best: dict[str, str] = {}
        reported: dict[str, dict[str, Any]] = {}
        several = self.spec.settings.facts_per_edit
        for count in dict.fromkeys((1, several)):
            scores: dict[str, float] = {}
            for method, settings in chosen.items():
                if self.facts_per_edit(method) == count:
                    scores[method] = self.tried(method, settings).score
                    trial = final[method]["calibrated"]
                elif self.clock() + 2 * self.last_seconds.get(method, 0.0) <= self.end:
                    scores[method] = self.trial("choose", method, settings, choose, count).score
                    trial = self.trial("report", method, settings, report, count)
                else:
                    continue
                reported.setdefault(str(count), {})[method] = trial.to_dict()
            if len(scores) == len(chosen):
                best[str(count)] = max(scores, key=scores.__getitem__)
        return best, reported

    def tried(self, method: str, settings: Mapping[str, Any]) -> Trial:
        """The trial of these settings on the cases to choose by."""
        found = (t for t in self.trials if (t.method, t.settings) == (method, settings))
        return next(found)

    def facts_per_edit(self, method: str) -> int:
        """How many facts an edit of the method has while its settings are searched."""
        return self.spec.settings.facts_per_edit if method == "memit" else 1

    def has_time(self, method: str) -> bool:
        """Whether another trial of the method ends in its share of the time."""
        return self.clock() + self.last_seconds.get(method, 0.0) <= self.method_end

    def reserve(self) -> float:
        """Estimated time of what follows the search: two trials of each method to report on, and
        two with another number of facts in an edit."""
        usual = max(self.last_seconds.values(), default=0.0)
        methods = self.spec.settings.methods
        return sum(4 * self.last_seconds.get(method, usual) for method in methods)

    # ---- one trial

    def trial(
        self,
        part: str,
        method: str,
        settings: Mapping[str, Any],
        cases: Sequence[Case],
        facts_per_edit: int | None = None,
    ) -> Trial:
        """Evaluate one combination of settings; a finished one is read from the folder."""
        usual = self.facts_per_edit(method)
        together = facts_per_edit or usual
        name = trial_name(method, settings)
        label = ""
        if together != usual:
            label = "one fact at a time, " if together == 1 else f"{together} facts at once, "
            name = f"{name},facts-{together}"
        folder = self.folder.path / part / name
        editor, error, started = editor_with(method, settings), None, self.clock()
        run = EvaluateRun(
            model=self.spec.model,
            dtype=self.spec.dtype,
            data=self.spec.data,
            name=self.spec.name,
            method=method,
            editor=editor,
            protocol="single" if together == 1 else "batch",
            batch_size=None if together == 1 else together,
            scoring=SCORING,
        )
        records = []
        try:
            opened = run.create_or_open(self.lm, folder)
            if not run.is_complete(opened, cases):
                if method != "ft-l":
                    self.collect(settings.get("layers") or [settings["layer"]])
                    started = self.clock()  # statistics are collected once
                run.run(self.lm, opened, cases)
                self.last_seconds[method] = self.clock() - started
            records = opened.case_records()
        except FATAL:
            raise
        except FactscopeError as problem:
            error = f"{type(problem).__name__}: {problem}"
        trial = trial_of(method, settings, records, error)
        self.tell(f"{part}: {label}{trial.text}")
        if part == "choose" and together == usual:
            self.trials.append(trial)
        self.advance()
        return trial

    def advance(self) -> None:
        """Report the time that has passed as progress."""
        now = min(self.clock(), self.end)
        if now > self.reported:
            self.progress((now - self.reported) / self.seconds)
            self.reported = now

    def describe_statistics(self, chosen: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """C at the layers that were chosen: its text, tokens, split-half difference, and by tokens
        the movement of C⁻¹k."""
        from factscope.stats.second_moment import find_second_moment

        layers = {chosen["rome"]["layer"]} if "rome" in chosen else set()
        layers |= set(chosen.get("memit", {}).get("layers", ()))
        found = {layer: find_second_moment(self.lm, layer) for layer in sorted(layers)}
        return [
            {
                "layer": layer,
                "corpus": moment.corpus,
                "tokens": moment.tokens,
                "split_half_difference": moment.split_half_difference,
                "movement": [
                    [n, x if math.isfinite(x) else None] for n, x in moment.movement_history
                ],
            }
            for layer, moment in found.items()
            if moment is not None
        ]


def _true_fact(case: Case) -> Fact:
    """The fact before the edit."""
    return replace(case.fact, target=case.true)


def candidate_layers(last: int, effects: Sequence[float], count: int = 6) -> list[int]:
    """Layers to try for ROME, most promising first: the two with the strongest traced effect, and
    some at regular depths in the lower two thirds, where published layers are."""
    traced = sorted(range(min(last + 1, len(effects))), key=lambda n: -effects[n])[:2]
    regular = [round(2 / 3 * last * i / max(1, count - 1)) for i in (2, 1, 3, 0, 4, 5)]
    return list(dict.fromkeys([*traced, *regular]))


def layer_ranges(layer: int, last: int) -> list[tuple[int, ...]]:
    """Ranges of layers to try for MEMIT around ROME's layer, all within 0 … last.

    Where the MLP's output is normalised, a layer can only give a bounded part of the residual, so
    there is a wide range, too.
    """
    bounds = ((-4, 0), (-2, 2), (-4, 4), (0, 4), (-2, 0), (0, 0))
    ranges = (range(max(0, layer + a), min(last, layer + b) + 1) for a, b in bounds)
    return list(dict.fromkeys(tuple(x) for x in ranges if len(x)))


def trial_name(method: str, settings: Mapping[str, Any]) -> str:
    """A trial as a folder name: "rome,layer-05,clamp-1"."""

    def text(value: Any) -> str:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return "-".join(map(str, value))
        number = f"{value:.6g}" if isinstance(value, int | float) else str(value or "none")
        return re.sub(r"[^A-Za-z0-9.]+", "-", number)

    parts = [f"{name.replace('_', '-')}-{text(x)}" for name, x in settings.items()]
    return ",".join([method, *parts])
