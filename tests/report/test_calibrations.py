"""Reports of calibrations: methods, statistics and the figure's panels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from factscope.analysis.calibration import Trial, estimates_to_dict
from factscope.analysis.estimate import Estimate
from factscope.editing.calibration import Calibration
from factscope.report.calibrations import (
    methods_table,
    statistics_table,
    write_calibration_report,
)
from factscope.report.figures.calibration import calibration_figure
from factscope.report.tables import as_markdown

ROME = {"layer": 3, "clamp": 1.0, "lr": 0.5, "contrast_tolerance": "inf", "weight_decay": 0.01}
MEMIT = {"layers": (2, 3), "clamp": 0.75, "covariance_weight": 100.0, "lr": 0.1}


def trial(method: str, settings: dict[str, Any], S: float) -> dict[str, Any]:
    value = Estimate(S, 0.02, 8)
    metrics = {name: value for name in ("S", "ES", "PS", "NS")}
    return Trial(
        method=method, settings=settings, cases=8, metrics=metrics, unedited={"NS": value}
    ).to_dict()


def calibration(**evidence: Any) -> Calibration:
    rome, memit = trial("rome", ROME, 0.81), trial("memit", MEMIT, 0.72)
    usual: dict[str, Any] = {
        "data": "everyday",
        "cases": {"choose": 8, "report": 8},
        "unedited": estimates_to_dict({"S": Estimate(0.2, 0.1, 8)}),
        "report": {"rome": {"default": rome, "calibrated": rome},
                   "memit": {"default": memit, "calibrated": memit}},
        "trials": [rome, trial("rome", {**ROME, "clamp": 2.0}, 0.4), memit],
        "best": {"1": "rome", "10": "memit"},
        "methods": {"1": {"rome": rome, "memit": trial("memit", MEMIT, 0.63)},
                    "10": {"rome": trial("rome", ROME, 0.54), "memit": memit}},
        "trace": {"facts": 4, "effects": [0.1, 0.2, 0.3, 0.1]},
        "statistics": [
            {"layer": 3, "corpus": "a text", "tokens": 81_920, "split_half_difference": 0.21,
             "movement": [[20_480, None], [40_960, 0.163], [81_920, 0.094]]},
        ],
    }  # fmt: skip
    return Calibration(
        model="m", fingerprint="f" * 64, settings={"rome": ROME, "memit": MEMIT},
        evidence={**usual, **evidence},
    )  # fmt: skip


def test_the_best_method_is_marked_for_each_number_of_facts() -> None:
    table = methods_table(calibration())
    assert table is not None
    marked = [(row[0], row[1]) for row in table.rows if row[4].mark == "best"]  # pyright: ignore
    assert marked == [(1, "ROME"), (10, "MEMIT")]
    assert "63.0 (2.0)" in as_markdown(table)
    assert methods_table(calibration(best={}, methods={})) is None


def test_statistics_show_tokens_and_movement() -> None:
    rows = statistics_table(calibration()).rows
    assert rows == ((3, "81,920", "9.4 %", "21.0 %", "a text"),)
    old = {"layer": 3, "corpus": "t", "tokens": 10, "split_half_difference": None}
    assert statistics_table(calibration(statistics=[old])).rows[0][2:4] == ("not measured",) * 2


def test_the_figure_has_a_panel_with_the_movement() -> None:
    axes = [ax for ax in calibration_figure(calibration()).axes if ax.get_visible()]
    assert [ax.get_title() for ax in axes] == [
        "ROME: clamp", "movement of C⁻¹k in %, by tokens and layer",
    ]  # fmt: skip
    line = axes[-1].lines[0]
    assert [list(map(float, line.get_xdata())), list(line.get_ydata())] == [  # pyright: ignore
        [40_960.0, 81_920.0], [16.3, 9.4],
    ]  # fmt: skip


def test_no_contrast_is_named_in_the_figure() -> None:
    trials = [trial("rome", {**ROME, "contrast_tolerance": x}, 0.8) for x in ("inf", 1.0)]
    (ax, _) = calibration_figure(calibration(trials=trials)).axes
    assert ax.get_title() == "ROME: contrast tolerance"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "none"]


def test_a_report_has_all_tables(tmp_path: Path) -> None:
    files = write_calibration_report(calibration(), tmp_path)
    text = (tmp_path / "calibration.md").read_text()
    for title in ("Calibration of m", "Methods", "Statistics", "Trials"):
        assert title in text
        assert title in files[0].read_text()


def test_a_calibration_of_an_earlier_version_can_be_reported(tmp_path: Path) -> None:
    found = calibration()
    evidence = {k: x for k, x in found.evidence.items() if k not in ("best", "methods")}
    evidence["statistics"] = []
    write_calibration_report(replace(found, evidence=evidence), tmp_path)
    assert "Methods" not in (tmp_path / "calibration.md").read_text()
