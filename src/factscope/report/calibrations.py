"""Reports of calibrations: scores before and after, the best method, statistics, every trial.

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


METHODS_NOTE = (
    "The calibrated methods on the cases for reporting, in percent, in parentheses half the width "
    "of the 95 % confidence interval. Marked: the highest score on the cases for choosing."
)
STATISTICS_NOTE = (
    "Movement: how much the direction C⁻¹k in which facts are written changed when the text "
    "doubled, relative to its length (median over facts)."
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


def methods_table(calibration: CalibrationResult) -> Table | None:
    """The calibrated methods with one fact and with several facts in an edit; the one that scored
    best on the cases for choosing is marked."""
    evidence = calibration.evidence
    if not evidence.get("best"):
        return None
    rows: list[Any] = []
    for count, trials in evidence["methods"].items():
        for method, trial in trials.items():
            mark = "best" if evidence["best"].get(count) == method else None
            scores = [Score(x.value, mark) for x in _estimates(trial["metrics"])]
            rows.append(
                (int(count), editor_name(method), trial["cases"], trial["broken"],
                 *scores)
            )  # fmt: skip
    columns = ("facts per edit", "editor", "cases", "broken", *(f"{name} ↑" for name in METRICS))
    return Table("Methods", columns, tuple(rows), note=METHODS_NOTE)


def statistics_table(calibration: CalibrationResult) -> Table:
    """The statistics of the chosen layers: how much text, and whether C⁻¹k still moves."""
    rows = []
    for x in calibration.evidence["statistics"]:
        last = (x.get("movement") or [(0, None)])[-1][1]
        moved, halves = (
            "not measured" if value is None else f"{100 * value:.1f} %"
            for value in (last, x["split_half_difference"])
        )
        rows.append((x["layer"], f"{x['tokens']:,}", moved, halves, x["corpus"]))
    columns = ("layer", "tokens", "movement of C⁻¹k ↓", "split-half difference ↓", "text")
    return Table("Statistics", columns, tuple(rows), note=STATISTICS_NOTE)


def write_calibration_report(calibration: CalibrationResult, folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    from factscope.report.figures.calibration import calibration_figure
    from factscope.report.html import embed_figure, render, table_files, write_files

    result, trials = calibration_table(calibration), trials_table(calibration)
    methods, statistics = methods_table(calibration), statistics_table(calibration)
    more = [table for table in (methods, statistics, trials) if table is not None and table.rows]
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
        more=more,
        settings=calibration.settings,
    )
    tables = table_files("calibration", result, *more, full=trials)
    return write_files(folder, [("index.html", page), *tables, ("calibration", fig)])
