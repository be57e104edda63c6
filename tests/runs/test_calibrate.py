"""Calibration runs: the search keeps the best settings, the budget ends it, and it resumes."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calibration as bench
from factscope.analysis.calibration import Trial, rates, trial_of
from factscope.analysis.estimate import Estimate
from factscope.editing.calibration import (
    Calibration,
    calibrated_values,
    calibration_path,
    editor_with,
    load_calibration,
)
from factscope.editing.defaults import (
    CAUTIOUS_CLAMP,
    finetune_layer,
    finetune_max_change,
    has_own_defaults,
    memit_defaults,
    rome_defaults,
)
from factscope.editing.settings import PAPER_ROME, Memit, Rome
from factscope.errors import BadCalibration, BadFact, BadRunFolder, BadSetting
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import write_records
from factscope.runs import calibrate as calibrating
from factscope.runs.calibrate import (
    CalibrateRun,
    CalibrationSettings,
    candidate_layers,
    layer_ranges,
    trial_name,
)

from case_records import case, scores
from commands import saved_model
from counterfact import record

SETTINGS = {
    "rome": {
        "layer": 0,
        "clamp": 2.0,
        "lr": 0.25,
        "contrast_tolerance": 1.0,
        "weight_decay": 0.1,
    },
    "memit": {"layers": (0, 1), "clamp": 0.5, "covariance_weight": 100.0, "lr": 0.2},
    "ft-l": {"layer": 1, "max_change": 0.125},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def lm(model: Path) -> LM:
    return load(str(model), device="cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([record(i) for i in range(30)]))
    return path


def run_of(model: Path, data: Path, **settings: Any) -> CalibrateRun:
    given = CalibrationSettings(**{"cases": 4, "minutes": 60.0, **settings})
    return CalibrateRun(model=str(model), dtype="float32", data=data, name="cf", settings=given)


Scores = Callable[[str, str, dict[str, Any]], float]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scores], list[tuple[str, str, Any]]]:
    """Replace the evaluation of trials by a function; returns the trials that were run."""

    def patch(score: Scores) -> list[tuple[str, str, Any]]:
        calls = []

        def trial(
            self: Any, part: str, method: str, settings: Any, cases: Any, facts: int | None = None
        ) -> Trial:
            calls.append((part if facts is None else f"{part} {facts}", method, dict(settings)))
            value = Estimate(score(calls[-1][0], method, settings), 0.01, len(cases))
            metrics = {name: value for name in ("S", "ES", "PS", "NS")}
            done = Trial(
                method=method, settings=settings, cases=len(cases), metrics=metrics,
                unedited={"NS": Estimate(0.1, 0.0, 4)},
            )  # fmt: skip
            if part == "choose" and facts is None:
                self.trials.append(done)
            return done

        monkeypatch.setattr(calibrating._Search, "trial", trial)
        monkeypatch.setattr(calibrating._Search, "trace", lambda self, cases: ([0.1, 0.2, 0.3], 4))
        return calls

    return patch


def no_statistics(layers: Sequence[int], facts: Sequence[Any], seconds: float) -> None:
    """Statistics that no test here needs."""


def calibrated(run: CalibrateRun, lm: LM, folder: Path, **more: Any) -> Calibration:
    opened = run.create_or_open(lm, folder)
    statistics = more.pop("statistics", no_statistics)
    return run.run(lm, opened, run.read().cases, statistics, **more)


# ---- the search


def test_the_search_finds_the_best_value_of_each_axis_on_the_part_for_choosing(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    weight = 0.01 * lm.mlp_weight(0).shape[1]
    wanted = {"layer": 0, "clamp": 2.0, "lr": 0.25, "covariance_weight": weight}

    def score(part: str, method: str, settings: dict[str, Any]) -> float:
        good = sum(settings.get(name) == value for name, value in wanted.items())
        return 0.1 + 0.1 * good if part == "choose" else 0.9 - 0.1 * good

    calls = scored(score)
    found = calibrated(run_of(model, data), lm, tmp_path / "run")
    assert found.settings["rome"] == {
        "layer": 0, "clamp": 2.0, "lr": 0.25,
        "contrast_tolerance": "inf", "weight_decay": 0.01,
    }  # fmt: skip
    assert found.settings["memit"]["covariance_weight"] == weight
    assert found.settings["ft-l"]["layer"] == 0
    reported = [(method, settings) for part, method, settings in calls if part == "report"]
    assert [method for method, _ in reported] == ["rome", "rome", "memit", "memit", "ft-l", "ft-l"]
    assert reported[1][1] == found.settings["rome"]
    loaded = load_calibration(tmp_path / "run" / "calibration.json")
    assert (loaded.settings, loaded.fingerprint) == (found.settings, lm.fingerprint)
    assert len(loaded.evidence["trials"]) == sum(part == "choose" for part, _, _ in calls)


def test_settings_within_the_margin_stay(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    scored(lambda part, method, settings: 0.5 + 0.002 * (settings.get("clamp") == 2.0))
    found = calibrated(run_of(model, data, methods=("rome",)), lm, tmp_path / "run")
    assert found.settings["rome"]["clamp"] == CAUTIOUS_CLAMP


def test_without_time_only_defaults_are_evaluated(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    calls = scored(lambda *_: 0.5)
    ticks = iter(range(0, 10**6, 30))  # every look at the clock costs half a minute
    run = run_of(model, data, minutes=1.0)
    found = calibrated(run, lm, tmp_path / "run", clock=lambda: next(ticks))
    assert [part for part, _, _ in calls].count("choose") == 3
    assert [part for part, _, _ in calls].count("report") == 6
    assert len(calls) == 9
    assert set(found.settings) == {"rome", "memit", "ft-l"}
    assert found.evidence["best"] == {}
    assert found.best_method(1) is None


def test_the_best_method_is_chosen_on_one_part_and_reported_on_the_other(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    table = {
        "choose": {"rome": 0.6, "memit": 0.7, "ft-l": 0.5},
        "choose 1": {"memit": 0.5},
        "choose 10": {"rome": 0.65, "ft-l": 0.4},
    }

    def score(part: str, method: str, settings: dict[str, Any]) -> float:
        return table.get(part, {}).get(method, 0.2)

    calls = scored(score)
    found = calibrated(run_of(model, data), lm, tmp_path / "run")
    assert found.evidence["best"] == {"1": "rome", "10": "memit"}
    others = [(part, method) for part, method, _ in calls if " " in part]
    assert others == [
        ("choose 1", "memit"), ("report 1", "memit"), ("choose 10", "rome"), ("report 10", "rome"),
        ("choose 10", "ft-l"), ("report 10", "ft-l"),
    ]  # fmt: skip
    method, scores_ = found.best_method(1) or ("", {})
    assert method == "rome"
    assert {name: x["metrics"]["S"]["mean"] for name, x in scores_.items()} == {
        "rome": 0.2, "memit": 0.2, "ft-l": 0.2,
    }  # fmt: skip
    assert [(found.best_method(n) or "")[0] for n in (2, 9, 10, 500)] == [
        "rome", "rome", "memit", "memit",
    ]  # fmt: skip


def test_statistics_get_a_share_of_the_time_and_the_facts(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    scored(lambda *_: 0.5)
    now = [0.0]
    given: list[tuple[list[int], int, float]] = []

    def statistics(layers: Sequence[int], facts: Sequence[Any], seconds: float) -> None:
        given.append((list(layers), len(facts), seconds))
        now[0] += 100.0

    run = run_of(model, data, minutes=20.0, methods=("rome",))
    calibrated(run, lm, tmp_path / "run", statistics=statistics, clock=lambda: now[0])
    assert [n for _, n, _ in given] == [4] * len(given)
    assert [seconds for _, _, seconds in given][:3] == [300.0, 200.0, 100.0]
    assert min(seconds for _, _, seconds in given) == 0.0 or len(given) == 3
    assert given[0][0] == sorted({rome_defaults(lm).layer, *candidate_layers(1, [0.1, 0.2, 0.3])})


def test_the_two_parts_are_known_and_have_no_case_in_common(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    scored(lambda *_: 0.5)
    run = run_of(model, data)
    found = calibrated(run, lm, tmp_path / "run")
    parts = json.loads((tmp_path / "run" / "cases.json").read_text())
    assert found.evidence["cases"] == {"choose": 4, "report": 4}
    assert not set(parts["choose"]) & set(parts["report"])
    from factscope.evaluation.cases import score_cases

    cases = [run.read().cases[n] for n in parts["choose"] + parts["report"]]
    for x in score_cases(lm, cases, scoring=calibrating.SCORING):
        assert x.prompts["prompt"][0].true < x.prompts["prompt"][0].new


def test_too_few_known_cases_are_an_error(model: Path, lm: LM, tmp_path: Path) -> None:
    data = tmp_path / "few.json"
    data.write_text(json.dumps([record(i) for i in range(3)]))
    with pytest.raises(BadFact, match=r"knows \d of the 3 cases.*needs 8"):
        calibrated(run_of(model, data), lm, tmp_path / "run")


# ---- real trials


def test_trials_are_evaluations_and_a_second_run_reads_them(
    model: Path, lm: LM, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "CLAMPS", (2.0,))
    run = run_of(model, data, methods=("rome", "ft-l"), minutes=0.001)
    collected: list[int] = []
    from factscope.cli.stats import collect_statistics

    def statistics(layers: Sequence[int], facts: Sequence[Any], seconds: float) -> None:
        collected.extend(layers)
        collect_statistics(lm, layers, facts=facts, seconds=seconds)

    # Time is over after the defaults, also for the second run, which reads faster than the first.
    options = {"statistics": statistics, "clock": itertools.count().__next__}
    found = calibrated(run, lm, tmp_path / "run", **options)
    assert collected
    statistics_found = found.evidence["statistics"][0]
    assert statistics_found["layer"] == found.settings["rome"]["layer"]
    points = statistics_found["movement"]
    assert points
    assert points[-1][0] <= statistics_found["tokens"]
    default = found.evidence["report"]["rome"]["default"]
    assert (default["cases"], default["error"]) == (4, None)
    folder = tmp_path / "run" / "report" / trial_name("rome", default["settings"])
    records = calibrating.RunFolder(folder).case_records()
    assert len(records) == 4
    again = trial_of("rome", default["settings"], records).to_dict()
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(default))

    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(calibrating.EvaluateRun, "run", never)
    second = calibrated(run, lm, tmp_path / "run", **options)
    assert second.settings == found.settings
    with pytest.raises(BadRunFolder, match="another run"):
        calibrated(replace(run, name="other"), lm, tmp_path / "run")


def test_an_earlier_calibration_is_not_the_start_of_a_new_one(
    model: Path, lm: LM, data: Path, tmp_path: Path, scored: Any
) -> None:
    earlier = Calibration(model=lm.name, fingerprint=lm.fingerprint, settings=SETTINGS)
    earlier.save(calibration_path(lm.fingerprint))
    assert rome_defaults(lm).clamp == 2.0
    calls = scored(lambda *_: 0.5)
    calibrated(run_of(model, data, methods=("rome",)), lm, tmp_path / "run")
    assert calls[0][2]["clamp"] == CAUTIOUS_CLAMP
    assert rome_defaults(lm).clamp == 2.0


# ---- numbers


def test_the_interval_of_s_equals_the_jackknife() -> None:
    random = np.random.default_rng(0)
    cases = [scores(0.9 if random.random() < 0.8 else 0.01) for _ in range(60)]
    cases += [
        replace(x, prompts={**x.prompts, "neighbour": x.prompts["prompt"][:1]}) for x in cases[:25]
    ]
    found = rates(cases)
    n = len(cases)
    left_out = np.array([rates(cases[:i] + cases[i + 1 :])["S"].mean for i in range(n)])
    error = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    assert found["S"].half_width == pytest.approx(1.96 * error, rel=0.05)
    assert rates([]) == {}


def test_the_score_counts_failed_cases_and_a_lost_neighbourhood() -> None:
    good = trial_of("rome", {}, [case(i) for i in range(4)])
    failed = [case(0, after=None, error="no"), *(case(i) for i in range(1, 4))]
    assert trial_of("rome", {}, failed).score == pytest.approx(0.75 * good.score)
    lost = replace(good, metrics={**good.metrics, "NS": Estimate(0.7, 0.0, 4)})
    assert good.unedited["NS"].mean == 1
    assert lost.score == pytest.approx(good.metrics["S"].mean - 0.25)
    assert trial_of("rome", {}, [], error="no statistics").score == -1


def test_candidates_are_layers_in_which_a_value_can_act() -> None:
    assert candidate_layers(28, [0.0] * 20 + [0.9] + [0.1] * 8 + [5.0])[0] == 20
    for last in (0, 1, 5, 28):
        assert set(candidate_layers(last, [1.0] * (last + 2))) <= set(range(last + 1))
        for layers in layer_ranges(min(3, last), last):
            assert set(layers) <= set(range(last + 1))
    assert (1, 2, 3, 4, 5) in layer_ranges(5, 28)


# ---- files and defaults


def test_a_calibration_becomes_the_model_s_defaults(lm: LM) -> None:
    assert not has_own_defaults(lm)
    lm.cache.clear()
    Calibration(model="m", fingerprint=lm.fingerprint, settings=SETTINGS).save(
        calibration_path(lm.fingerprint)
    )
    assert has_own_defaults(lm)
    row, memit = rome_defaults(lm), memit_defaults(lm)
    assert (row.layer, row.clamp, row.lr, row.weight_decay) == (0, 2.0, 0.25, 0.1)
    assert (memit.layers, memit.clamp, memit.covariance_weight) == ((0, 1), 0.5, 100.0)
    assert (finetune_layer(lm, "ft-l"), finetune_max_change(lm, "ft-l", 1.0)) == (1, 0.125)
    assert (finetune_layer(lm, "ft"), finetune_max_change(lm, "ft", 1.0)) == (0, None)
    bound = Rome(prefixes=(), second_moment="identity").bind(lm, ())
    assert (bound.layer, bound.search.clamp, bound.search.lr) == (0, 2.0, 0.25)
    assert (bound.search.weight_decay, bound.settings.contrast_tolerance) == (0.1, 1.0)
    paper = replace(PAPER_ROME, prefixes=(), second_moment="identity").bind(lm, ())
    assert (paper.search.lr, paper.search.weight_decay) == (0.5, 0.5)
    assert paper.settings.contrast_tolerance == "inf"
    assert Memit(prefixes=(), second_moment="identity").bind(lm).search.lr == 0.2


def test_editors_get_the_settings_of_their_value_search() -> None:
    rome = editor_with("rome", SETTINGS["rome"])
    assert (rome.layer, rome.search.clamp, rome.search.lr) == (0, 2.0, 0.25)
    assert editor_with("memit", SETTINGS["memit"]).layers == (0, 1)
    assert editor_with("ft-l", SETTINGS["ft-l"]).method == "ft-l"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a calibration"),
        ('{"kind": "other"}', "another kind or version"),
        ({"settings": {"rome": {"speed": 1}}}, "has rome speed"),
        ({"settings": {"kn": {}}}, "has kn"),
        ({"settings": {"rome": {"clamp": -1.0}}}, "clamp is -1"),
        ({"settings": 3}, "is not a calibration"),
    ],
)
def test_bad_files_are_refused_with_the_reason(text: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    values = {"kind": "factscope calibration", "version": 1, "model": "m", "fingerprint": "f"}
    if isinstance(text, dict):
        text = json.dumps({**values, "evidence": {}, **text})
    path.write_text(text)
    with pytest.raises(BadCalibration, match=words):
        load_calibration(path)
    with pytest.raises(BadCalibration, match="there is no file"):
        load_calibration(tmp_path / "none.json")


def test_a_damaged_calibration_of_a_model_is_named(lm: LM) -> None:
    path = calibration_path(lm.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(BadCalibration, match="delete it"):
        calibrated_values(lm, "rome")


def test_settings_are_checked() -> None:
    with pytest.raises(BadSetting, match="minutes is 0"):
        CalibrationSettings(minutes=0.0)


def test_a_better_method_is_named(lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    from factscope.cli.edit import note_defaults

    def trial(S: float) -> dict[str, Any]:
        return {"metrics": {"S": {"mean": S}}}

    evidence = {
        "best": {"1": "rome", "10": "memit"},
        "methods": {
            "1": {"rome": trial(0.812), "memit": trial(0.7)},
            "10": {"rome": trial(0.5), "memit": trial(0.72), "ft-l": {"metrics": {}}},
        },
    }
    found = Calibration(model="m", fingerprint="f", settings=SETTINGS, evidence=evidence)
    lm.cache["calibration"] = found
    for editor, facts in ((Rome(), 1), (Memit(), 20), (editor_with("ft-l", {}), 20)):
        note_defaults(lm, editor, facts)
    assert capsys.readouterr().err == ""
    note_defaults(lm, Rome(), 20)
    told = " ".join(capsys.readouterr().err.split())
    assert "found memit best for several facts at once: S 72.0, rome 50.0. Try --method memit" in (
        told
    )


# ---- bench/calibration.py


def test_the_tables_of_several_models_come_from_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        out = tmp_path / name
        evidence = {
            "best": {"1": "rome", "10": "memit"}, "trials": [{"method": "rome"}],
            "statistics": [{"layer": 0, "tokens": 4096, "movement": [[4096, 0.08]]}],
        }  # fmt: skip
        found = Calibration(model=name, fingerprint="f", settings=SETTINGS, evidence=evidence)
        found.save(out / "calibration" / "calibration.json")
        (out / "model.json").write_text(json.dumps({"model": name}))
        runs = {
            ("rome", "default"): [case(i, new=0.1) for i in range(4)],
            ("rome", "calibrated"): [case(i) for i in range(4)],
            ("rome", "auto"): [
                *(case(i, new=0.6 if i else 0.1) for i in range(3)),
                case(3, after=None, error="no"),
            ],
        }  # fmt: skip
        for (method, label), records in runs.items():
            folder = bench.folder_of(out, method, label)
            folder.mkdir()
            write_records(folder / "records.jsonl", records)
    bench.main(["--show", str(tmp_path / "one"), str(tmp_path / "two")])
    text = capsys.readouterr().out
    assert text.count("| ROME, calibrated | 100.0 ± 0.0 |") == 2
    assert "layer 0: 4,096 tokens, 8.0 %" in text
    # One of three facts is not written at its traced layer; the fourth has none.
    rows = [line.split(" | ") for line in text.splitlines() if "auto minus calibrated" in line]
    assert [(row[3], row[-2]) for row in rows] == [("-33.3 ± 65.3", "3")] * 2
    assert [row[2].split(" ± ")[0] for row in rows] == ["-25.0"] * 2
    # The default edit writes none of them.
    rows = [line.split(" | ") for line in text.splitlines() if "auto minus default" in line]
    assert [row[3].split(" ± ")[0] for row in rows] == ["66.7"] * 2
