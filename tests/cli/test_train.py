"""factscope train, and editing, evaluating and reporting with what it writes."""

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from factscope.editing.hypernet.model import load_weights
from factscope.records import read_training_records
from factscope.runs.folder import WEIGHTS

from commands import Run, reported_without_torch, runner, saved_model
from counterfact import record
from hypernets import EDITORS, write_towers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("data") / "towers.json")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


QUICK = ("--steps", 6, "--eval-every", 3, "--batch-size", 4)


@pytest.mark.parametrize("method", EDITORS)
def test_train_edit_and_evaluate(run: Run, model: Path, data: Path, method: str) -> None:
    own = ("--rank", 4) if method == "mend" else ()
    command = ("train", method, "--model", model, "--data", data, *QUICK, *own, "--out", "trained")
    done = run(*command)
    assert done.code == 0, done.err
    assert "step      6" in done.err
    assert f"factscope evaluate --method {method} --weights trained/weights" in done.out
    assert Path("trained/training.png").stat().st_size > 1000
    result = json.loads(run(*command, "--json").out)
    assert result["last"]["step"] == 6
    file = ("--method", method, "--weights", result["weights"])
    edited = run(
        "edit", "Tower 3 is in", "--subject", "Tower 3", "--to", "Oslo", "--model", model, *file,
        "--force", "--max-new-tokens", 0, "--out", "one.edit",
    )  # fmt: skip
    assert edited.code == 0, edited.err
    evaluate = ("evaluate", "--model", model, "--data", data, "--limit", 4, "--text-length", 0)
    evaluated = run(*evaluate, *file, "--out", "scores", "--json")
    assert evaluated.code == 0, evaluated.err
    rows = json.loads(evaluated.out)["summaries"]
    assert [row["method"] for row in rows] == ["none", f"{method}-towers"]
    more = run(*command[:-1], "other", "--seed", 1)
    assert more.code == 0, more.err
    other = ("--method", method, "--weights", "other/weights.safetensors")
    refused = run(*evaluate, *other, "--out", "scores")
    assert refused.code == 2
    assert "weights_sha256" in refused.err


def test_report_of_a_training_run(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("train", "mend", "--model", model, "--data", data, *QUICK, "--rank", 4, "--out", "t")
    assert run(*command).code == 0
    reported = run("report", "t")
    assert reported.code == 0, reported.err
    assert "MEND trained on towers" in reported.out
    assert "6 files; open t/report/index.html" in reported.out
    names = ("index.html", "table.md", "table.tex", "table.csv", "training.png", "training.pdf")
    assert {path.name for path in Path("t/report").iterdir()} == set(names)
    assert reported.out.startswith(Path("t/report/table.md").read_text())
    assert Path("t/report/training.png").read_bytes() == Path("t/training.png").read_bytes()
    result = json.loads(run("report", "t", "--out", "r", "--json").out)
    assert result["files"] == [f"r/{name}" for name in names]
    assert (result["training"], result["method"], result["data"], result["steps"]) == (
        "t", "mend", "towers", 6,
    )  # fmt: skip
    records = [asdict(record) for record in read_training_records(Path("t/records.jsonl"))]
    assert result["evaluations"] == records
    assert result["best"] == min(records, key=lambda record: record["loss"])
    assert result["best"]["step"] == load_weights(Path("t") / WEIGHTS).training["step"]
    with Path("r/table.csv").open() as file:
        losses = [float(row["edit_loss"]) for row in csv.DictReader(file)]
    assert losses == [record["edit_loss"] for record in records]
    shutil.copytree("t", "u")
    for args, message in (
        (("t", "--cases", "1"), "leave it out for other runs"),
        (("t", "--preset", "paper"), "leave it out for other runs"),
        (("t", "u"), "one training, or evaluations only; these are t (train), u (train)"),
    ):
        refused = run("report", *args)
        assert (refused.code, message in refused.err) == (2, True), refused.err
    reported_without_torch(tmp_path, "t")
    Path("u/records.jsonl").unlink()
    refused = run("report", "u", "--out", "none")
    assert refused.code == 2
    assert "training of mend on towers has no evaluation yet" in refused.err
    assert not Path("none").exists()


@pytest.mark.usefixtures("no_drawing")
def test_ray_gives_the_same_records(run: Run, model: Path, data: Path) -> None:
    pytest.importorskip("ray")
    command = ("train", "mend", "--model", model, "--data", data, *QUICK, "--rank", 4, "--out", "w")
    assert run(*command).code == 0
    evaluate = (
        "evaluate", "--model", model, "--data", data, "--limit", 4, "--text-length", 0, "--method",
        "mend", "--weights", "w/weights.safetensors",
    )  # fmt: skip
    assert run(*evaluate, "--out", "here").code == 0
    spread = run(*evaluate, "--engine", "ray", "--ray-workers", 1, "--out", "spread")
    assert spread.code == 0, spread.err
    here, there = (Path(f"{name}/records.jsonl").read_text() for name in ("here", "spread"))
    assert sorted(here.splitlines()) == sorted(there.splitlines())


def test_mistakes_are_one_message_each(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text(json.dumps([record(i) for i in range(3)]))
    command = ("train", "mend", "--model", model, "--out", "t")
    for args, message in (
        (("--data", small, *QUICK), "3 examples are too few"),
        (("--data", "nothing", *QUICK), "no data set or file"),
        (("--data", data, "--text", small), "--text goes with --data text"),
        (("--text", "no.txt"), "there is no such file"),
        (("--exclude", small), "--exclude goes with"),
        (("--data", data, "--locality", "far"), "--locality is 'far'"),
        (("--data", data, "--layers", 9, "--out", "u", *QUICK), "layer is 9"),
        (("--data", data, "--exclude", data, "--out", "v", *QUICK), "not excluded"),
    ):
        done = run(*command, *args)
        assert (done.code, "Traceback" in done.err) == (2, False), done.err
        assert message in done.err
        assert not any(Path(name).exists() for name in "tuv")  # a mistake leaves no folder
    done = run("train", "rome", "--model", model, "--out", "t", *QUICK)
    assert (done.code, "only these are trained: mend, ke" in done.err) == (2, True)
    assert run("train", "mend", "--model", model, *QUICK).code == 2
    evaluate = ("evaluate", "--model", model, "--data", data, "--out", "e", "--method")
    done = run(*evaluate, "mend")
    assert (done.code, "needs trained weights" in done.err) == (2, True)
    done = run(*evaluate, "rome", "--weights", data)
    assert (done.code, "rome has no --weights" in done.err) == (2, True)
    done = run(*evaluate, "mend", "--weights", data)
    assert (done.code, "cannot read" in done.err) == (2, True)
