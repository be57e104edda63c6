"""Reports of calibrations: the scores before and after, every trial, and a figure by setting.

The tables need no matplotlib: `factscope calibrate` prints them.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factscope.analysis.calibration import CalibrationResult, settings_text
from factscope.analysis.estimate import Estimate
from factscope.report.labels import editor_name
from factscope.report.tables import Score, Table

METRICS = ("S", "ES", "PS", "NS")
NOTE = (
    "Values in percent, in parentheses half the width of the 95 % confidence interval. Measured on "
    "cases that were not used to choose the settings."
)
TRIALS_NOTE = (
    "On the cases that settings are chosen by. Score: S, less what NS loses beyond 5 points. Best: "
    "the highest score of a method."
)


def _estimates(values: Mapping[str, Any]) -> list[Score]:
    def estimate(x: Mapping[str, Any] | None) -> Estimate:
        if x is None:
            return Estimate(math.nan, math.nan, 0)
        return Estimate(x["mean"], math.nan if x["half_width"] is None else x["half_width"], x["n"])

    return [Score(estimate(values.get(name))) for name in METRICS]


def calibration_table(calibration: CalibrationResult) -> Table:
    """Each method with its default and its calibrated settings, and the unedited model."""
    evidence = calibration.evidence
    rows: list[Any] = [
        ("unedited", "", evidence["cases"]["report"], None, *_estimates(evidence["unedited"]))
    ]
    for method, both in evidence["report"].items():
        for name, trial in both.items():
            label = f"{editor_name(method)}, {name}"
            counts = trial["cases"], trial["broken"]
            text = settings_text(trial["settings"])
            rows.append((label, text, *counts, *_estimates(trial["metrics"])))
    return Table(
        f"Calibration of {calibration.model} on {evidence['data']}",
        ("editor", "settings", "cases", "broken", *(f"{name} ↑" for name in METRICS)),
        tuple(rows),
        note=NOTE,
        rules=(0,),
    )


def trials_table(calibration: CalibrationResult) -> Table:
    """Every combination of settings that was tried."""
    trials = calibration.evidence["trials"]
    best = {
        t["method"]: max(x["score"] for x in trials if x["method"] == t["method"]) for t in trials
    }
    rows = tuple(
        (
            editor_name(t["method"]),
            settings_text(t["settings"]) + (f": {t['error']}" if t["error"] else ""),
            t["broken"],
            Score(
                Estimate(t["score"], math.nan, t["cases"]),
                "best" if t["score"] == best[t["method"]] else None,
            ),
            *_estimates(t["metrics"]),
        )
        for t in trials
    )
    columns = ("editor", "settings", "broken", "score ↑", *(f"{name} ↑" for name in METRICS))
    return Table("Trials", columns, rows, note=TRIALS_NOTE)


def write_calibration_report(calibration: CalibrationResult, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    from factscope.report.figures.calibration import calibration_figure
    from factscope.report.html import embed_figure, render, table_files, write_files

    result, trials = calibration_table(calibration), trials_table(calibration)
    fig = calibration_figure(calibration)
    title, evidence = result.title, calibration.evidence
    page = render(
        "overview.html",
        title=title,
        numbers={
            "trials": len(evidence["trials"]),
            "cases to choose by": evidence["cases"]["choose"],
            "cases to report on": evidence["cases"]["report"],
        },
        figure=embed_figure(fig, f"Scores by setting: {title}"),
        table=result,
        more=trials,
        settings={**calibration.settings, "statistics": evidence["statistics"]},
    )
    tables = table_files("calibration", result, trials, full=trials)
    return write_files(folder, [("index.html", page), *tables, ("calibration", fig)])
