"""report: attribution against measured cells, and a layer sweep with traces of the same facts."""

import json
from pathlib import Path
from typing import Any

import pytest

from factscope.analysis.localization import localizations
from factscope.records import Record
from factscope.runs.folder import RunFolder
from localization_records import LAYERS, random_values, runs

from commands import Run, runner

SWEEP = {"command": "sweep", "model": "m", "data": "counterfact", "method": "rome"}
TRACES, CASES = runs(random_values(0), random_values(1))


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    no_drawing: None,
) -> Run:  # fmt: skip
    """Commands in a folder with a sweep and traces."""

    def a_run(name: str, spec: dict[str, Any], *records: Record) -> None:
        folder = RunFolder.create_or_open(tmp_path / name, spec, {"model_fingerprint": "f"})
        for record in records:
            folder.append(record)

    a_run("sweep", SWEEP | {"grid": {"layer": list(LAYERS)}})
    for layer, cases in CASES.items():
        a_run(f"sweep/points/layer-{layer:02}", SWEEP | {"command": "evaluate"}, *cases)
    a_run("tokens", SWEEP | {"grid": {"layer": [0, 2], "token": ["last", "subject-last"]}})
    a_run("traces", {"command": "trace", "model": "m"}, *TRACES)
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def test_a_sweep_with_traces_relates_effect_and_success(factscope: Run, tmp_path: Path) -> None:
    result = factscope("report", "sweep", "--traces", "traces", "--json")
    assert result.code == 0, result.err
    [relation] = json.loads(result.out)["localization"]
    [wanted] = localizations(TRACES, CASES)
    assert relation["across_layers"]["value"] == pytest.approx(wanted.across_layers.value)
    assert [row["layer"] for row in relation["layers"]] == list(LAYERS)
    page = (tmp_path / "sweep/report/index.html").read_text()
    assert "Trace effect and edit success" in page
    assert {f.suffix for f in (tmp_path / "sweep/report").glob("localization.*")} == {
        ".csv", ".md", ".pdf", ".png", ".tex"
    }  # fmt: skip
    alone = factscope("report", "sweep", "--json")
    assert "localization" not in json.loads(alone.out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("tokens", "--traces", "traces"), "sweep over layers only"),
        (("sweep", "--traces", "sweep"), "a run of sweep"),
        (("traces", "--traces", "traces"), "--traces is about one sweep"),
        (("sweep", "--traces", "nowhere"), "nowhere"),
    ],
)
def test_other_runs_cannot_be_compared(factscope: Run, words: tuple, message: str) -> None:
    result = factscope("report", *words)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err
