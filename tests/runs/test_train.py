"""Training runs: what they write, how they resume, and runs of earlier versions."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from factscope.data.readers import read_cases
from factscope.editing.hypernet import train as training_module
from factscope.editing.hypernet.model import load_weights
from factscope.editing.hypernet.settings import MendConfig
from factscope.editing.hypernet.train import Trainer
from factscope.editing.settings import Mend
from factscope.errors import BadRunFolder, BadSetting, DidNotConverge
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import TrainingRecord
from factscope.report.training import TrainingCurve
from factscope.runs import train as runs_module
from factscope.runs.folder import WEIGHTS, RunFolder
from factscope.runs.train import CHECKPOINT, FromCases, TrainRun

from commands import saved_model
from counterfact import record
from hypernets import EDITORS, quick_training, write_towers
from processes import start_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(scope="module")
def lm(model: Path) -> LM:
    return load(str(model), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_towers(tmp_path_factory.mktemp("data") / "towers.json")


def make_run(model: Path, data: Path, **fields: Any) -> TrainRun:
    return TrainRun(
        **{
            "model": str(model), "dtype": "float32", "source": FromCases(name="towers", path=data),
            "training": quick_training(), "steps": 12, "save_every": 0.0, **fields,
        }
    )  # fmt: skip


def test_excluded_subjects_are_not_trained_on(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "evaluated.json"
    other.write_text(json.dumps([record(i) for i in range(20)]))
    whole = FromCases(name="towers", path=data)
    part = replace(whole, exclude=((other, 8),))
    assert len(whole.cases()) == 40
    subjects = {case.fact.subject for case in part.cases()}
    assert subjects == {f"Tower {i}" for i in range(8, 40)}
    assert part.spec() != whole.spec()
    assert len(replace(part, limit=12).cases()) == 12
    with pytest.raises(BadSetting, match=r"has 40 cases, and 0 .* too few .*--exclude"):
        replace(whole, exclude=((data, None),)).cases()


def test_a_run_writes_weights_that_edit(lm: LM, model: Path, data: Path, tmp_path: Path) -> None:
    run = make_run(model, data)
    fractions: list[float] = []
    records: list[TrainingRecord] = []
    folder = run.create_or_open(lm, tmp_path / "run")
    path = run.run(lm, folder, progress=fractions.append, on_evaluation=records.append)
    assert sum(fractions) == pytest.approx(1)
    assert [r.step for r in records] == [0, 5, 10, 12]
    assert folder.training_records() == records
    assert (records[0].train_loss, records[1].train_loss is None) == (None, False)
    weights = load_weights(path)
    best = min(records, key=lambda r: r.loss)
    assert (weights.training["step"], weights.training["loss"]) == (best.step, best.loss)
    assert weights.row == "mend-towers"
    (edit,) = Mend.load(path).each(lm, [read_cases(data).cases[0].fact])
    assert len(edit.changes) == 6


def test_a_finished_run_continues_with_more_steps(
    lm: LM, model: Path, data: Path, tmp_path: Path
) -> None:
    long, short = make_run(model, data, steps=15), make_run(model, data, steps=10)
    whole = long.run(lm, long.create_or_open(lm, tmp_path / "whole"))
    short.run(lm, short.create_or_open(lm, tmp_path / "parts"))
    parts = long.run(lm, long.create_or_open(lm, tmp_path / "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    before = parts.read_bytes()
    long.run(lm, long.create_or_open(lm, tmp_path / "parts"))
    assert parts.read_bytes() == before
    other = make_run(model, data, training=quick_training(lr=1e-3))
    with pytest.raises(BadRunFolder, match="lr"):
        other.create_or_open(lm, tmp_path / "parts")


def train_and_kill(model: Path, data: Path, method: str, out: Path, last: int) -> None:
    """Save after every evaluation, and kill the process before the save at one step."""

    def kill(record: TrainingRecord) -> None:
        if record.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    runs_module.SAVE_PAUSE = 0
    run = make_run(model, data, steps=30, training=quick_training(method))
    lm = load(str(model), device="cpu")
    run.run(lm, run.create_or_open(lm, out), on_evaluation=kill)


@pytest.fixture(scope="module", params=EDITORS)
def whole(
    lm: LM, model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory, request: Any
) -> RunFolder:
    """The folder of an uninterrupted run of each method."""
    run = make_run(model, data, steps=30, training=quick_training(request.param))
    folder = run.create_or_open(lm, tmp_path_factory.mktemp("whole"))
    run.run(lm, folder)
    return folder


@pytest.mark.parametrize("last", [0, 5, 20])
def test_a_killed_run_resumes_bit_for_bit(
    lm: LM, model: Path, data: Path, tmp_path: Path, whole: RunFolder, last: int
) -> None:
    method = whole.spec()["training"]["method"]
    out = tmp_path / "killed"
    process = start_process(train_and_kill, model, data, method, out, last)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (out / CHECKPOINT).is_file() == (last > 0)
    with (out / "records.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line cut off by the kill
    run = make_run(model, data, steps=30, training=quick_training(method))
    records: list[TrainingRecord] = []
    resumed = run.run(lm, run.create_or_open(lm, out), on_evaluation=records.append)
    assert records[0].step == last
    assert resumed.read_bytes() == (whole.path / WEIGHTS).read_bytes()
    found = run.create_or_open(lm, out).training_records()
    assert [r.step for r in found] == list(range(0, 31, 5))
    for one, other in zip(found, whole.training_records(), strict=True):
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)


def test_saving_takes_a_small_fraction_of_the_time(
    lm: LM, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = 0.0, []

    def slow_save(trainer: Trainer, path: Path) -> None:
        nonlocal now
        now += 1
        saved.append(trainer.progress.step)

    def slow_evaluation(record: TrainingRecord) -> None:
        nonlocal now
        now += 4

    monkeypatch.setattr(runs_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(training_module, "write_checkpoint", slow_save)
    run = make_run(model, data, steps=30)
    run.run(lm, run.create_or_open(lm, tmp_path / "run"), on_evaluation=slow_evaluation)
    # Evaluations take 4 s and saves 1 s, after which the next save waits 20 s or for the end.
    assert saved == [0, 25, 30]


def test_a_nan_loss_stops_training_and_saves_the_best_network(
    lm: LM, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = training_module.training_pass, []

    def broken(*args: Any, train: bool) -> Any:
        losses = real(*args, train=train)
        steps.append(train)
        nan = replace(losses, edit_loss=losses.edit_loss * math.nan)
        return nan if sum(steps) == 8 else losses

    monkeypatch.setattr(training_module, "training_pass", broken)
    run = make_run(model, data, save_every=1e9)
    folder = run.create_or_open(lm, tmp_path / "run")
    with pytest.raises(DidNotConverge, match=r"loss .* is nan at step 7; .* of step 5, is saved"):
        run.run(lm, folder)
    assert load_weights(folder.path / WEIGHTS).training["step"] == 5
    monkeypatch.setattr(training_module, "training_pass", real)
    run.run(lm, run.create_or_open(lm, folder.path))
    assert [r.step for r in folder.training_records()] == [0, 5, 10, 12]


def test_training_stops_early_without_improvement(
    lm: LM, model: Path, data: Path, tmp_path: Path
) -> None:
    network = MendConfig(rank=8, edit_lr=1e-12)
    still = quick_training(lr=1e-12, network=network, eval_every=2, patience=3)
    run = make_run(model, data, training=still, steps=1000)
    folder = run.create_or_open(lm, tmp_path / "run")
    run.run(lm, folder)
    assert len(folder.training_records()) < 30


def test_minutes_limit_training(lm: LM, model: Path, data: Path, tmp_path: Path) -> None:
    run = make_run(model, data, steps=None, minutes=1e-3)
    folder = run.create_or_open(lm, tmp_path / "run")
    run.run(lm, folder)
    assert folder.training_records()[-1].step < 100


def test_steps_or_minutes_are_required(model: Path, data: Path) -> None:
    with pytest.raises(BadSetting, match="steps and minutes are None"):
        make_run(model, data, steps=None)
    with pytest.raises(BadSetting, match="minutes is -1"):
        make_run(model, data, minutes=-1.0)


# ---- runs of format 1


def test_a_run_of_format_1_is_reported_but_not_resumed(
    lm: LM, model: Path, data: Path, tmp_path: Path
) -> None:
    run = make_run(model, data)
    folder = run.create_or_open(lm, tmp_path)
    spec = 'command = "train"\nmodel = "m"\n[source]\ndata = "zsre"\n[training]\nmethod = "mend"\n'
    (tmp_path / "spec.toml").write_text(spec + "[training.design]\nrank = 8\n")
    old = {
        "step": 5, "seconds": 2.0, "trained": 3.0, "loss": 2.0, "before": 9.0, "edit": 1.0,
        "rephrased": 1.5, "local": 0.25, "said": 0.5, "said_rephrased": 0.375, "kept": 0.75,
    }  # fmt: skip
    (tmp_path / "info.json").write_text("{}")
    folder.records_path.write_text(json.dumps(old) + "\n")
    wanted = TrainingRecord(
        step=5, seconds=2.0, train_loss=3.0, loss=2.0, unedited_loss=9.0, edit_loss=1.0,
        rephrase_loss=1.5, locality_loss=0.25, edit_accuracy=0.5, rephrase_accuracy=0.375,
        locality_accuracy=0.75,
    )  # fmt: skip
    assert TrainingCurve.of(folder.spec(), folder.training_records()).best == wanted
    with pytest.raises(BadRunFolder, match="format 1, and this factscope resumes only format 2"):
        run.create_or_open(lm, tmp_path)
