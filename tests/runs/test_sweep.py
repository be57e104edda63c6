"""Sweeps: each point equals the evaluation alone; interrupted sweeps resume; tables and figures."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import Summary, summarize
from factscope.analysis.sweep import Point, Sweep, grid_points, point_name
from factscope.errors import BadRecord, BadRunFolder, RunInterrupted
from factscope.evaluation.protocols import Evaluation
from factscope.records import read_case_records
from factscope.report.figures.evaluation import sweep_figure
from factscope.report.style import save_figure
from factscope.report.sweeps import all_points_table, sweep_table, sweep_to_dict, write_sweep_report
from factscope.report.tables import as_csv, as_markdown
from factscope.runs.folder import RunFolder
from factscope.runs.sweep import read_failures, read_sweep
from factscope.stats import covariance as collecting

from commands import Result, Run, reported_without_torch, runner, saved_model
from counterfact import record

TOKENS = "subject-last,subject-first,after-subject,last"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.fixture
def run(factscope: Run, model: Path, tmp_path: Path, no_drawing: None) -> Run:
    """A command on the tiny model and six cases, with short searches."""
    data = tmp_path / "cases.json"
    data.write_text(json.dumps([record(i) for i in range(6)]))
    tiny = ("--model", model, "--data", data, "--device", "cpu")

    def command(name: str, *words: object) -> Result:
        steps = "--integration-steps" if "kn" in words else "--steps"
        return factscope(name, *words, *tiny, steps, 3)

    return command


ROME = ("--stats", "none", "--prefix-lengths", "none")


def lines(folder: Path) -> list[Any]:
    return list(read_case_records(folder / "records.jsonl"))


def assert_refused(result: Result, *words: str) -> None:
    assert result.code == 2
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# ---- points


def test_each_point_equals_the_evaluation_run_alone(run: Run, tmp_path: Path) -> None:
    words = ("--grid", "layer=0,2", "--grid", "token=subject-last,last", *ROME)
    swept = run("sweep", *words, "--out", "sweep")
    assert swept.code == 0, swept.err
    for layer in (0, 2):
        for token in ("subject-last", "last"):
            alone = ("--layer", layer, "--token", token, "--text-length", 0, *ROME)
            assert run("evaluate", *alone, "--out", f"{layer}-{token}").code == 0
            point = tmp_path / "sweep" / "points" / f"layer-{layer:02},token-{token}"
            for name in ("spec.toml", "records.jsonl", "info.json"):
                mine, theirs = point / name, tmp_path / f"{layer}-{token}" / name
                assert mine.read_text() == theirs.read_text()


def test_prefix_lengths_of_knowledge_neurons_are_swept(run: Run, tmp_path: Path) -> None:
    kn = ("--method", "kn", "--limit", 1, "--max-neurons", 2)
    assert run("sweep", *kn, "--grid", "prefix-lengths=none;3x2", "--out", "sweep").code == 0
    points = tmp_path / "sweep" / "points"
    assert {path.name for path in points.iterdir()} == {
        "prefix-lengths-none", "prefix-lengths-3x2"
    }  # fmt: skip
    alone = (*kn, "--prefix-lengths", "3x2", "--text-length", 0, "--out", "alone")
    assert run("evaluate", *alone).code == 0
    assert lines(points / "prefix-lengths-3x2") == lines(tmp_path / "alone")
    assert_refused(run("sweep", *kn, "--grid", "layer=1", "--out", "no"), "kn has no --layer")


@pytest.mark.parametrize(
    ("method", "max_change", "same"),
    [("ft", "0.01", "ft-l"), ("ft-l", "none", "ft"), ("attn", "0.01", "attn")],
)
def test_ft_with_a_bound_is_ft_l_and_ft_l_without_one_is_ft(
    method: str, max_change: str, same: str, run: Run, tmp_path: Path
) -> None:
    words = (
        "--method",
        method,
        "--grid",
        "layer=1",
        "--grid",
        f"max-change={max_change}",
        "--limit",
        2,
    )
    assert run("sweep", *words, "--out", "sweep").code == 0
    more = () if max_change == "none" else ("--max-change", max_change)
    alone = ("--method", same, "--layer", 1, *more, "--text-length", 0, "--limit", 2)
    assert run("evaluate", *alone, "--out", "alone").code == 0
    (point,) = (tmp_path / "sweep" / "points").iterdir()
    assert point.name == f"layer-01,max-change-{max_change}"
    assert lines(point) == lines(tmp_path / "alone")
    assert lines(point)[0].method == same


def test_attention_is_edited_with_and_without_a_bound(run: Run, tmp_path: Path) -> None:
    words = (
        "--method",
        "attn",
        "--grid",
        "layer=1",
        "--grid",
        "max-change=1e-9,none",
        "--limit",
        2,
    )
    assert run("sweep", *words, "--out", "sweep").code == 0
    tight, free = read_sweep(tmp_path / "sweep").points
    assert tight.settings["max_change"] == 1e-9
    assert free.settings["max_change"] == "none"
    assert tight.summary != free.summary


def test_the_unedited_model_is_scored_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scored: list[int] = []
    score_unedited = Evaluation.score_unedited

    def counted(self: Evaluation, cases: Any, **more: Any) -> Any:
        scored.append(len(cases))
        return score_unedited(self, cases, **more)

    monkeypatch.setattr(Evaluation, "score_unedited", counted)
    assert run("sweep", "--method", "ft", "--grid", "layer=0-2", "--out", "sweep").code == 0
    assert sum(scored) == 6


def test_statistics_of_all_layers_are_collected_in_one_pass(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted: list[list[int]] = []
    collect = collecting.collect

    def watched(lm: Any, layers: Any, *args: Any, **more: Any) -> Any:
        wanted.append(list(layers))
        return collect(lm, layers, *args, **more)

    monkeypatch.setattr(collecting, "collect", watched)
    words = ("--grid", "layer=0-2", "--prefix-lengths", "none", "--limit", 2, "--out", "sweep")
    assert run("sweep", *words).code == 0
    assert wanted == [[0, 1, 2]]
    assert all(p.summary and p.error is None for p in read_sweep(tmp_path / "sweep").points)


def test_a_failing_point_is_noted_and_the_others_continue(run: Run, tmp_path: Path) -> None:
    for method, more in (("ft", ()), ("rome", ROME), ("rome", ("--prefix-lengths", "none"))):
        folder = tmp_path / f"sweep-{method}-{len(more)}"
        words = ("--method", method, "--grid", "layer=1,7,2", "--limit", 2, *more, "--out", folder)
        found = run("sweep", *words)
        assert found.code == 0, found.err
        good, last, bad = read_sweep(folder).points
        assert bad.error is not None
        assert bad.error.startswith("BadSetting")
        assert bad.summary is None
        assert good.summary is not None
        assert last.summary is not None
        assert "layer-07" in found.out
        assert list(read_failures(folder)) == [bad.name]
        assert run("sweep", *words).code == 0


# ---- interrupted


class Killed(BaseException):
    """A kill."""


def test_an_interrupted_sweep_resumes_to_the_same_records(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--method", "ft", "--grid", "layer=0-2", "--grid", "max-change=0.01,none")
    assert run("sweep", *words, "--out", "whole").code == 0
    append, count = RunFolder.append, iter(range(1, 1000))

    def deadly(self: RunFolder, record: Any) -> None:
        append(self, record)
        if next(count) % 8 == 0:
            raise Killed

    monkeypatch.setattr(RunFolder, "append", deadly)
    kills = 0
    while True:
        try:
            assert run("sweep", *words, "--out", "sweep").code == 0
            break
        except (Killed, pytest.fail.Exception):
            kills += 1
    assert kills == 4
    monkeypatch.undo()
    names = [p.name for p in sorted((tmp_path / "whole" / "points").iterdir())]
    assert len(names) == 6
    for name in names:
        assert lines(tmp_path / "sweep" / "points" / name) == lines(
            tmp_path / "whole" / "points" / name
        )


def test_a_complete_point_is_not_run_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--method", "ft", "--grid", "layer=0,1", "--out", "sweep")
    first = run("sweep", *words)
    shutil.rmtree(tmp_path / "sweep" / "points" / "layer-01")
    seen: list[str] = []
    single = Evaluation.single

    def watched(self: Evaluation, cases: Any, before: Any, **more: Any) -> Any:
        seen.append(str(getattr(self.editor, "layer", None)))
        return single(self, cases, before, **more)

    monkeypatch.setattr(Evaluation, "single", watched)
    assert run("sweep", *words).out == first.out
    assert set(seen) == {"1"}


def test_a_full_disk_stops_the_sweep(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, record: Any) -> None:
        raise RunInterrupted("No space left")

    monkeypatch.setattr(RunFolder, "append", full)
    stopped = run("sweep", "--method", "ft", "--grid", "layer=0,1", "--out", "sweep")
    assert stopped.code == 1
    assert "No space left" in stopped.err
    assert not read_failures(tmp_path / "sweep")


# ---- numbers


def test_tables_and_json_match_the_records(run: Run, tmp_path: Path) -> None:
    words = ("--method", "ft", "--grid", "layer=0,1", "--out", "sweep")
    shown = run("sweep", *words).out
    found = json.loads(run("sweep", *words, "--json").out)
    assert found["grid"] == {"layer": [0, 1]}
    for layer, point in enumerate(found["points"]):
        records = lines(tmp_path / "sweep" / "points" / f"layer-{layer:02}")
        before, after = summarize(records)
        assert point["settings"] == {"layer": layer}
        for name in ("S", "ES", "PS", "NS"):
            mean = after.metrics[name].mean
            assert point["metrics"][name]["mean"] == pytest.approx(mean)
            assert f"{100 * mean:.1f}" in shown
            assert found["unedited"][name]["mean"] == pytest.approx(before.metrics[name].mean)
    with (tmp_path / "sweep" / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "1"]
    assert float(rows[1]["ES"]) == pytest.approx(found["points"][1]["metrics"]["ES"]["mean"])
    written = json.loads((tmp_path / "sweep" / "report" / "sweep.json").read_text())
    assert written["points"] == found["points"]


def test_a_sweep_is_reported_without_torch(run: Run, tmp_path: Path) -> None:
    shown = run(
        "sweep", "--method", "ft", "--grid", "layer=0,1", "--limit", 2, "--out", "sweep"
    ).out
    shutil.rmtree(tmp_path / "sweep" / "report")
    again = reported_without_torch(tmp_path, "sweep")
    assert shown.splitlines()[:7] == again.splitlines()[:7]
    assert (tmp_path / "again" / "sweep.pdf").is_file()


def summary(**means: float) -> Summary:
    metrics = {name: Estimate(mean, 0.02, 50) for name, mean in means.items()}
    return Summary(model="m", data="counterfact", method="rome", cases=50, metrics=metrics)


def a_sweep(grid: dict[str, list[Any]], **more: Any) -> Sweep:
    points = [
        Point(settings=where, summary=summary(ES=0.9, PS=0.5 + i / 100, NS=0.7, RS=0.3, GE=6.2))
        for i, where in enumerate(grid_points(grid))
    ]
    fields = {"unedited": summary(ES=0.2, NS=0.8), "points": tuple(points), **more}
    return Sweep(model="m", data="counterfact", method="rome", grid=grid, **fields)


GRIDS: list[dict[str, list[Any]]] = [
    {"layer": [0, 5, 17], "token": TOKENS.split(",")},
    {"layer": list(range(48)), "max_change": [1e-3, 1e-4, "none"]},
    {"layer": [33], "max_change": [1e-3, 1e-4, "none"]},
    {"prefix_lengths": ["none", "5x10,10x10"]},
    {"token": ["last"]},
]


@pytest.mark.parametrize("grid", GRIDS)
def test_each_grid_has_a_figure_with_its_lines(grid: dict[str, Any], tmp_path: Path) -> None:
    sweep = a_sweep(grid)
    figure = sweep_figure(sweep)
    save_figure(figure, tmp_path / "figure.svg")
    panels = [ax.get_title() for ax in figure.axes]
    assert panels == [
        "Efficacy, ES (%)", "Paraphrases, PS (%)", "Neighbours, NS (%)", "Consistency, RS (%)",
        "Fluency, GE", "",
    ]  # fmt: skip
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(sweep.lines) + 1
    assert labels[-1] == "unedited"
    assert len(set(labels)) == len(labels)
    drawn = np.asarray(figure.axes[1].get_lines()[0].get_ydata())
    values = [point.metric("PS") for point in sweep.lines[0].points]
    assert list(drawn) == pytest.approx([100 * value.mean for value in values if value])


def test_the_x_axis_is_the_first_axis_with_several_values() -> None:
    assert [a_sweep(grid).x_axis for grid in GRIDS] == [
        "layer", "layer", "max_change", "prefix_lengths", "token"
    ]  # fmt: skip
    assert [len(a_sweep(grid).lines) for grid in GRIDS] == [4, 3, 1, 1, 1]
    assert a_sweep(GRIDS[2]).fixed == {"layer": 33}


def test_the_best_of_a_column_is_bold_and_a_failed_point_is_blank() -> None:
    sweep = a_sweep({"layer": [0, 1, 2]})
    lost = replace(sweep.points[1], summary=None, error="BadSetting: layer is 1")
    sweep = replace(sweep, points=(sweep.points[0], lost, sweep.points[2]))
    text = as_markdown(sweep_table(sweep))
    assert "**52.0 (2.0)**" in text
    assert "| 1 | – | – | – |" in text
    assert "layer-01: BadSetting: layer is 1" in text
    assert ",BadSetting: layer is 1," in as_csv(all_points_table(sweep))
    assert sweep_to_dict(sweep)["points"][1]["metrics"] == {}
    sweep_figure(sweep)


def test_a_sweep_without_scores_is_not_reported(tmp_path: Path) -> None:
    lost = Point(settings={"layer": 9}, summary=None, error="BadSetting: no layer 9")
    with pytest.raises(BadRecord, match="no layer 9"):
        write_sweep_report(a_sweep({"layer": [9]}, points=(lost,)), tmp_path)


def test_point_names_are_distinct() -> None:
    grid = {
        "layer": [3],
        "max_change": [1e-4, 5e-4, "none"],
        "prefix_lengths": ["none", "5x10,10x10"],
    }
    names = [point_name(where) for where in grid_points(grid)]
    assert names[0] == "layer-03,max-change-0.0001,prefix-lengths-none"
    assert names[-1] == "layer-03,max-change-none,prefix-lengths-5x10-10x10"
    assert len(set(names)) == 6


# ---- mistakes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "a sweep needs a grid"),
        (("--grid", "token= , "), "it has no values"),
        (("--grid", "token=middle"), "--token is 'middle'; choose from"),
        (("--grid", "layer=five"), "--layer is 'five'; write 5, 3-8"),
        (("--grid", "max-change=1e-4"), "rome has no --max-change"),
        (("--method", "ft", "--grid", "token=last"), "ft has no --token"),
        (("--method", "ft", "--prefix-lengths", "none"), "ft has no --prefix-lengths"),
        (("--method", "ft", "--grid", "max-change=wide"), "--max-change is 'wide'; give a number"),
        (("--method", "ft", "--grid", "max-change=0"), "more than 0"),
        (("--method", "memit", "--grid", "layer=0-2"), "it edits several layers at once"),
        (("--grid", "prefix-lengths=5by10"), "give pairs such as 5x10"),
        (("--grid", "steps=3"), "NAME=VALUES, with NAME from layer, token, max-change"),
        (("--grid", "layer=0", "--grid", "layer=1"), "--grid layer is given twice"),
        (("--grid", "layer=0", "--facts-per-edit", 2), "--facts-per-edit goes with"),
        (("--grid", "layer=0", "--engine", "mars"), "--engine is 'mars'"),
    ],
)
def test_a_bad_grid_is_refused(flags: tuple, message: str, run: Run) -> None:
    assert_refused(run("sweep", *flags, "--out", "sweep"), message)


def test_a_sweep_needs_a_folder(run: Run) -> None:
    assert_refused(run("sweep", "--grid", "layer=0"), "--out is required")


def test_another_grid_is_refused_and_the_difference_is_shown(run: Run, tmp_path: Path) -> None:
    words = ("--method", "ft", "--limit", 1, "--out", "sweep")
    assert run("sweep", "--grid", "layer=0", *words).code == 0
    assert_refused(run("sweep", "--grid", "layer=1", *words), "belongs to another run", "+")
    (tmp_path / "sweep" / "spec.toml").write_text('command = "sweep"\n')
    with pytest.raises(BadRunFolder, match="no grid"):
        read_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "spec.toml").write_text("[grid]\nbound = [0.1]\n")
    with pytest.raises(BadRunFolder, match=r"'bound'.*run folder format 1"):
        read_sweep(tmp_path / "sweep")


def test_a_sweep_is_reported_alone(run: Run, factscope: Run) -> None:
    assert run("sweep", "--method", "ft", "--grid", "layer=0", "--limit", 1, "--out", "a").code == 0
    assert (
        run("evaluate", "--method", "ft", "--limit", 1, "--text-length", 0, "--out", "b").code == 0
    )
    assert_refused(factscope("report", "a", "b"), "one sweep, one training, or evaluations only")
    assert_refused(factscope("report", "a", "--cases", "1"), "--cases is about evaluations")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("", "has no grid"),
        ("grid = 3", "has no grid"),
        ("[grid]\nlayer = 3", "sweeps layer over 3"),
        ("[grid]\nlayer = [[1], 2]", r"sweeps layer over \[\[1\], 2\]"),
        ("[grid]\ndepth = [1]", "'depth', which is not among layer"),
    ],
)
def test_a_sweep_with_a_damaged_grid_is_refused(tmp_path: Path, grid: str, message: str) -> None:
    (tmp_path / "spec.toml").write_text(f'command = "sweep"\n{grid}\n')
    with pytest.raises(BadRunFolder, match=message):
        read_sweep(tmp_path)
