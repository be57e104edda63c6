"""Training of hypernetworks: it learns, measures what edits do, resumes exactly, is reported."""

import csv
import json
import math
import os
import shutil
import signal
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from factscope.analysis.training import TrainingCurve
from factscope.data.readers import read_cases
from factscope.editing.contexts import TokenRow, edit_request
from factscope.editing.hypernet import train as training_module
from factscope.editing.hypernet.examples import (
    BatchCache,
    CaseExamples,
    Example,
    TextExamples,
    split_examples,
    without_overlap,
)
from factscope.editing.hypernet.settings import KeConfig, MendConfig, Training, network_config
from factscope.editing.hypernet.train import Trainer, load_checkpoint_, training_pass
from factscope.editing.hypernet.weights import load_weights, pack_tensors
from factscope.editing.settings import Ke, Mend
from factscope.errors import (
    BadEditorWeights,
    BadRecord,
    BadRunFolder,
    BadSetting,
    DidNotConverge,
)
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import TrainingRecord, read_training_records
from factscope.report.figures.training import training_figure
from factscope.report.training import training_page, training_table, training_to_dict
from factscope.runs import train as runs_module
from factscope.runs.folder import WEIGHTS
from factscope.runs.train import CHECKPOINT, FromCases, FromText, TrainRun

from commands import Run, reported_without_torch, runner, saved_model
from counterfact import record
from processes import start_process

EDITORS = {"mend": Mend, "ke": Ke}
NETWORKS = {
    "mend": MendConfig(rank=8, edit_lr=1e-3),
    "ke": KeConfig(lstm_width=8, condition_width=8),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(scope="module")
def lm(model: Path) -> LM:
    return load(str(model), device="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "towers.json"
    path.write_text(json.dumps([record(i) for i in range(40)]))
    return path


def quick_training(method: str = "mend", **settings: Any) -> Training:
    own = {"network": NETWORKS[method], "batch_size": 4, "eval_every": 5, "validation_examples": 6}
    return Training(**{**own, "lr": 3e-3, "warmup_steps": 2, **settings})


def make_run(model: Path, data: Path, **fields: Any) -> TrainRun:
    return TrainRun(
        **{
            "model": str(model), "dtype": "float32", "source": FromCases(name="towers", path=data),
            "training": quick_training(), "steps": 12, "save_every": 0.0, **fields,
        }
    )  # fmt: skip


def examples_of(data: Path, **settings: Any) -> CaseExamples:
    return CaseExamples(read_cases(data).cases, **settings)


# ---- steps and evaluations


@pytest.mark.parametrize("method", EDITORS)
def test_training_improves_edits_of_validation_facts(lm: LM, data: Path, method: str) -> None:
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    found = {}
    for weight in (0.01, 1.0):
        trainer = Trainer(lm, examples_of(data), quick_training(method, locality_weight=weight))
        first = trainer.evaluate()
        for _ in range(60):
            trainer.step()
        found[weight] = last = trainer.evaluate()
        assert trainer.progress.best_step == 60
        assert last.loss < first.loss
        assert first.unedited_loss == pytest.approx(last.unedited_loss, rel=1e-5)
    assert found[0.01].edit_loss < 0.6 * found[0.01].unedited_loss
    assert found[0.01].rephrase_loss < 0.6 * found[0.01].unedited_loss
    assert found[0.01].edit_accuracy > 0
    assert found[1.0].edit_loss < 0.95 * found[1.0].unedited_loss
    assert found[1.0].locality_loss < 0.5 * found[0.01].locality_loss
    for name, weight in lm.model.named_parameters():  # also the embeddings
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("locality", ["unrelated", "neighbours"])
def test_training_losses_equal_those_of_edited_models(
    lm: LM, data: Path, method: str, locality: Any
) -> None:
    """Losses, accuracies and KL, compared with models whose weights were changed."""
    trainer = Trainer(lm, examples_of(data, locality=locality), quick_training(method))
    for _ in range(8):
        trainer.step()
    batch = trainer.validation.batch(0)
    assert batch is not None
    losses = training_pass(trainer.split, trainer.network, batch, 1, train=False)
    trainer.evaluate()
    weights = trainer.weights({})
    weights.network.load_state_dict(trainer.network.state_dict())
    source: Any = trainer.validation.examples
    indices = trainer.validation.batches[0]
    edits = EDITORS[method](weights=weights).each(lm, [source.cases[i].fact for i in indices])
    examples = source.load(lm, indices)
    for i, (edit, example) in enumerate(zip(edits, examples, strict=True)):
        # In epoch 1 a fact's locality row is the edit row of the fact two before it.
        local = example.locality or examples[(i - 2) % len(examples)].edit
        unedited = log_probs(lm, local)
        assert losses.unedited_loss[i].item() == pytest.approx(loss_of(lm, example.edit), rel=1e-4)
        with edit.applied(lm, force=True):
            edit_loss, rephrase_loss = loss_of(lm, example.edit), loss_of(lm, example.rephrase)
            assert losses.edit_loss[i].item() == pytest.approx(edit_loss, rel=1e-3)
            assert losses.rephrase_loss[i].item() == pytest.approx(rephrase_loss, rel=1e-3)
            now = log_probs(lm, local)
            kl = (unedited.exp() * (unedited - now)).sum(-1).mean().item()
            assert losses.locality_loss[i].item() == pytest.approx(kl, rel=1e-2, abs=1e-6)
            same = (unedited.argmax(-1) == now.argmax(-1)).float().mean().item()
            assert losses.locality_accuracy[i].item() == pytest.approx(same)
            predicted = log_probs(lm, example.edit).argmax(-1).tolist()
            assert bool(losses.edit_accuracy[i]) == (predicted == list(example.edit.labels))


def log_probs(lm: LM, row: TokenRow) -> torch.Tensor:
    return lm.model(torch.tensor([row.ids])).logits[0, list(row.positions)].log_softmax(-1)


def loss_of(lm: LM, row: TokenRow) -> float:
    return torch.nn.functional.nll_loss(log_probs(lm, row), torch.tensor(row.labels)).item()


def test_recomputed_states_equal_cached_ones_bit_for_bit(lm: LM, data: Path) -> None:
    trainers = [Trainer(lm, examples_of(data), quick_training()) for _ in range(2)]
    trainers[1].batches.free_bytes = 0
    losses = [[trainer.step() for _ in range(20)] for trainer in trainers]
    assert losses[0] == losses[1]
    assert len(trainers[0].batches.cached) == 9
    assert not trainers[1].batches.cached


def test_every_epoch_has_every_batch_and_other_locality_rows(lm: LM, data: Path) -> None:
    cache = Trainer(lm, examples_of(data), quick_training()).batches
    assert sorted(i for indices in cache.batches for i in indices) == list(range(34))
    assert len(cache) == 9
    for epoch in range(2):
        found = [cache.at_step(step, 0) for step in range(9 * epoch, 9 * epoch + 9)]
        assert [e for _, e in found] == [epoch] * 9
        assert len({id(batch) for batch, _ in found}) == 9
    batch = cache.batch(0)
    assert batch is not None
    rows = [batch.locality_rows(epoch)[0].ids for epoch in range(4)]
    for ids in rows:
        assert all(not torch.equal(a, b) for a, b in zip(ids, batch.edit.ids, strict=True))
    assert not torch.equal(rows[0], rows[1])


# ---- examples


def test_examples_from_cases(lm: LM, tmp_path: Path) -> None:
    towers = tmp_path / "one.json"
    towers.write_text(json.dumps([record(1)]))
    (case,) = read_cases(towers).cases
    edit = edit_request(lm, case.fact).rows[0]
    (example,) = CaseExamples((case,)).load(lm, [0])
    assert (example.edit, example.locality) == (edit, None)
    assert lm.tokenizer.decode(example.rephrase.ids).startswith("One finds Tower 1 in")
    assert example.rephrase.labels == edit.labels
    (example,) = CaseExamples((case,), "neighbours").load(lm, [0])
    assert example.locality is not None
    assert lm.tokenizer.decode(example.locality.ids).startswith("The Louvre is in")
    bare = replace(case, paraphrases=(), neighbours=())
    assert CaseExamples((bare,)).load(lm, [0]) == [Example(edit, edit, None)]
    question = replace(bare, true=None, neighbours=("Who?",), neighbour_answers=("Miles",))
    (example,) = CaseExamples((question,)).load(lm, [0])  # zsRE: the question is unrelated
    assert example.locality is not None
    assert lm.tokenizer.decode(example.locality.labels).strip() == "Miles"


def test_cases_that_the_model_cannot_read_are_skipped(lm: LM, data: Path) -> None:
    cases = list(read_cases(data).cases[:3])
    long = replace(cases[1].fact, prompt="{} " + "is in " * 100)
    examples = CaseExamples((cases[0], replace(cases[1], fact=long), cases[2]))
    assert len(examples.load(lm, [0, 1, 2])) == 2
    split = Trainer(lm, examples_of(data), quick_training()).split
    assert BatchCache(split, examples, range(1, 3), 2).batch(0) is None


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
    (case,) = read_cases(data).cases[:1]
    same = replace(case, fact=replace(case.fact, subject="TOWER  0"))
    assert without_overlap([case], [same]) == ()


@pytest.mark.parametrize("count", [1, 9])
def test_too_few_examples_to_split_are_an_error(lm: LM, data: Path, count: int) -> None:
    with pytest.raises(BadSetting, match=f"{count} examples are too few"):
        Trainer(lm, CaseExamples(read_cases(data).cases[:count]), quick_training())
    assert split_examples(10, 64) == (range(8), range(8, 10))


def test_examples_from_text_have_sampled_continuations(lm: LM, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 40)
    source = FromText(path=text, limit=12, seq_length=8, target_tokens=3)
    first, second = source.examples(lm).load(lm, [0, 1])
    assert first.edit == first.rephrase
    assert first.locality is None
    assert len(first.edit.ids) == 8 + 2
    assert first.edit.positions == (7, 8, 9)
    assert len(first.edit.labels) == 3
    assert source.examples(lm).load(lm, [1]) == [second]
    generated = replace(source, path=None).examples(lm)
    assert len(generated) == 12
    assert isinstance(generated, TextExamples)
    again = replace(source, path=None).examples(lm)
    assert again.load(lm, [4]) == generated.load(lm, [3, 4])[1:]
    trainer = Trainer(lm, generated, quick_training())
    before = trainer.evaluate()
    for _ in range(20):
        trainer.step()
    assert trainer.evaluate().edit_loss < before.edit_loss
    for settings in (source, generated):
        with pytest.raises(BadSetting, match="target_tokens is 0"):
            replace(settings, target_tokens=0)
    with pytest.raises(BadSetting, match="has 64 tokens"):
        replace(source, target_tokens=60).examples(lm)


# ---- runs


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


@pytest.mark.parametrize("last", [0, 5, 20])
@pytest.mark.parametrize("method", EDITORS)
def test_a_killed_run_resumes_bit_for_bit(
    lm: LM, model: Path, data: Path, tmp_path: Path, method: str, last: int
) -> None:
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
    whole = run.create_or_open(lm, tmp_path / "whole")
    uninterrupted = run.run(lm, whole)
    assert resumed.read_bytes() == uninterrupted.read_bytes()
    found = run.create_or_open(lm, out).training_records()
    assert [r.step for r in found] == list(range(0, 31, 5))
    for one, other in zip(found, whole.training_records(), strict=True):
        assert replace(one, seconds=0) == replace(other, seconds=0)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1}, "batch_size is 1; give 2 or more"),
        ({"lr": 0.0}, "lr is 0"),
        ({"eval_every": 0}, "eval_every is 0"),
    ],
)
def test_settings_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        quick_training(**settings)


def test_network_settings_are_checked() -> None:
    assert network_config("ke", lstm_width=8) == KeConfig(lstm_width=8)
    with pytest.raises(BadSetting, match="no setting 'depth'; use edit_lr, hidden_layers, rank"):
        network_config("mend", depth=3)
    with pytest.raises(BadSetting, match="method is 'rome'; only these are trained: mend, ke"):
        network_config("rome")
    with pytest.raises(BadSetting, match="rank is 0"):
        network_config("mend", rank=0)


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
    folder.records_path.write_text(json.dumps(old) + "\n")
    wanted = TrainingRecord(
        step=5, seconds=2.0, train_loss=3.0, loss=2.0, unedited_loss=9.0, edit_loss=1.0,
        rephrase_loss=1.5, locality_loss=0.25, edit_accuracy=0.5, rephrase_accuracy=0.375,
        locality_accuracy=0.75,
    )  # fmt: skip
    assert TrainingCurve.of(folder.spec(), folder.training_records()).best == wanted
    with pytest.raises(BadRunFolder, match=r"earlier factscope \(format 1\).*another folder"):
        run.create_or_open(lm, tmp_path)


def test_a_checkpoint_of_format_1_is_an_error(lm: LM, data: Path, tmp_path: Path) -> None:
    path = tmp_path / CHECKPOINT
    header = {"format": "factscope-checkpoint 1", "progress": {"step": 3}}
    path.write_bytes(pack_tensors({"network.x": torch.zeros(1)}, header))
    with pytest.raises(BadEditorWeights, match=r"has format 1, and this factscope reads 2"):
        load_checkpoint_(Trainer(lm, examples_of(data), quick_training()), path)


# ---- reports

SPEC = {"model": "m", "source": {"data": "zsre"}, "training": {"method": "ke", "lr": 0.25}}


def evaluation(step: int, loss: float) -> TrainingRecord:
    return TrainingRecord(
        step=step, seconds=6.0 * step, train_loss=None, loss=loss, unedited_loss=9.0,
        edit_loss=loss, rephrase_loss=2 * loss, locality_loss=0.0, edit_accuracy=1 - loss / 10,
        rephrase_accuracy=0.5, locality_accuracy=0.75,
    )  # fmt: skip


def test_the_best_evaluation_is_marked() -> None:
    losses = (math.nan, 4.0, 2.5, 3.0, 2.5)
    curve = TrainingCurve.of(SPEC, [evaluation(12_345 * i, x) for i, x in enumerate(losses)])
    assert curve.best.step == 24_690
    rows = training_table(curve).rows
    assert [{getattr(cell, "mark", None) for cell in row} for row in rows] == [
        {None}, {None}, {"best"}, {None}, {None},
    ]  # fmt: skip
    assert list(map(str, rows[2])) == ["24690", "2469", "2.5", "75.0", "50.0", "75.0", "0"]
    page = training_page(curve)
    for text in ("KE trained on zsRE, m, 49380 steps", '<td class="number best">2.5</td>',
                 "<dt>best step</dt><dd>24690</dd>", "<td>training.lr</td>"):  # fmt: skip
        assert text in page
    values = json.loads(json.dumps(training_to_dict(curve), allow_nan=False))
    assert (values["best"]["step"], values["evaluations"][0]["loss"]) == (24_690, None)


def test_the_figure_shows_every_evaluation_and_the_best_step() -> None:
    losses = (4.0, 2.5, 3.0)
    curve = TrainingCurve.of(SPEC, [evaluation(10 * i, loss) for i, loss in enumerate(losses)])
    left, right = training_figure(curve).axes
    drawn = [
        {x.get_label(): np.array(x.get_data()) for x in ax.get_lines()} for ax in (left, right)
    ]
    assert drawn[0]["rephrase"][1].tolist() == [8.0, 5.0, 6.0]
    assert drawn[1]["edit"][1].tolist() == pytest.approx([0.6, 0.75, 0.7])
    for lines in drawn:
        assert lines["best step"][0].tolist() == [10, 10]


def test_a_spec_without_its_source_is_an_error() -> None:
    with pytest.raises(BadRecord, match="no 'source'"):
        TrainingCurve.of({"model": "m"}, [evaluation(0, 1.0)])


# ---- command line


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


QUICK = ("--steps", 6, "--every", 3, "--batch", 4)


@pytest.mark.parametrize("method", EDITORS)
def test_train_edit_and_evaluate(run: Run, model: Path, data: Path, method: str) -> None:
    own = ("--rank", 4) if method == "mend" else ()
    words = ("train", method, "--model", model, "--data", data, *QUICK, *own, "--out", "trained")
    done = run(*words)
    assert done.code == 0, done.err
    assert "step      6" in done.err
    assert f"factscope evaluate --method {method} --weights trained/weights" in done.out
    assert Path("trained/training.png").stat().st_size > 1000
    said = json.loads(run(*words, "--json").out)
    assert said["last"]["step"] == 6
    file = ("--method", method, "--weights", said["weights"])
    edited = run(
        "edit", "Tower 3 is in", "--subject", "Tower 3", "--to", "Oslo", "--model", model, *file,
        "--force", "--generate-tokens", 0, "--out", "one.edit",
    )  # fmt: skip
    assert edited.code == 0, edited.err
    ask = ("evaluate", "--model", model, "--data", data, "--limit", 4, "--length", 0)
    evaluated = run(*ask, *file, "--out", "scores", "--json")
    assert evaluated.code == 0, evaluated.err
    rows = json.loads(evaluated.out)["summaries"]
    assert [row["method"] for row in rows] == ["none", f"{method}-towers"]
    more = run(*words[:-1], "other", "--seed", 1)
    assert more.code == 0, more.err
    other = ("--method", method, "--weights", "other/weights.safetensors")
    refused = run(*ask, *other, "--out", "scores")
    assert refused.code == 2
    assert "weights_sha256" in refused.err


def test_report_of_a_training_run(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    words = ("train", "mend", "--model", model, "--data", data, *QUICK, "--rank", 4, "--out", "t")
    assert run(*words).code == 0
    told = run("report", "t")
    assert told.code == 0, told.err
    assert "MEND trained on towers" in told.out
    assert "6 files; open t/report/index.html" in told.out
    names = ("index.html", "table.md", "table.tex", "table.csv", "training.png", "training.pdf")
    assert {path.name for path in Path("t/report").iterdir()} == set(names)
    assert told.out.startswith(Path("t/report/table.md").read_text())
    assert Path("t/report/training.png").read_bytes() == Path("t/training.png").read_bytes()
    said = json.loads(run("report", "t", "--out", "r", "--json").out)
    assert said["files"] == [f"r/{name}" for name in names]
    assert (said["training"], said["method"], said["data"], said["steps"]) == (
        "t", "mend", "towers", 6,
    )  # fmt: skip
    records = [asdict(record) for record in read_training_records(Path("t/records.jsonl"))]
    assert said["evaluations"] == records
    assert said["best"] == min(records, key=lambda record: record["loss"])
    assert said["best"]["step"] == load_weights(Path("t") / WEIGHTS).training["step"]
    with Path("r/table.csv").open() as file:
        losses = [float(row["edit_loss"]) for row in csv.DictReader(file)]
    assert losses == [record["edit_loss"] for record in records]
    shutil.copytree("t", "u")
    for asked, why in (
        (("t", "--cases", "1"), "say nothing of a training"),
        (("t", "--preset", "paper"), "say nothing of a training"),
        (("t", "u"), "one training, or evaluations only; these are: t (train), u (train)"),
    ):
        refused = run("report", *asked)
        assert (refused.code, why in refused.err) == (2, True), refused.err
    reported_without_torch(tmp_path, "t")
    Path("u/records.jsonl").unlink()
    refused = run("report", "u", "--out", "none")
    assert refused.code == 2
    assert "training of mend on towers has no evaluation yet" in refused.err
    assert not Path("none").exists()


def test_ray_gives_the_same_records(run: Run, model: Path, data: Path) -> None:
    pytest.importorskip("ray")
    words = ("train", "mend", "--model", model, "--data", data, *QUICK, "--rank", 4, "--out", "w")
    assert run(*words).code == 0
    ask = (
        "evaluate", "--model", model, "--data", data, "--limit", 4, "--length", 0, "--method",
        "mend", "--weights", "w/weights.safetensors",
    )  # fmt: skip
    assert run(*ask, "--out", "here").code == 0
    spread = run(*ask, "--on", "ray", "--workers", 1, "--out", "spread")
    assert spread.code == 0, spread.err
    here, there = (Path(f"{name}/records.jsonl").read_text() for name in ("here", "spread"))
    assert sorted(here.splitlines()) == sorted(there.splitlines())


def test_each_mistake_is_one_message(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.json"
    small.write_text(json.dumps([record(i) for i in range(3)]))
    words = ("train", "mend", "--model", model, "--out", "t")
    for more, said in (
        (("--data", small, *QUICK), "3 examples are too few"),
        (("--data", "nothing", *QUICK), "no data set or file"),
        (("--data", data, "--text", small), "--text goes with --data text"),
        (("--text", "no.txt"), "there is no text file"),
        (("--exclude", small), "--exclude goes with"),
        (("--data", data, "--locality", "far"), "--locality 'far'"),
        (("--data", data, "--layer", 9, "--out", "u", *QUICK), "layer is 9"),
        (("--data", data, "--exclude", data, "--out", "v", *QUICK), "not excluded"),
    ):
        done = run(*words, *more)
        assert (done.code, "Traceback" in done.err) == (2, False), done.err
        assert said in done.err
        assert not any(Path(name).exists() for name in "tuv")  # so that it can be said rightly
    done = run("train", "rome", "--model", model, "--out", "t", *QUICK)
    assert (done.code, "no learned method" in done.err) == (2, True)
    assert run("train", "mend", "--model", model, *QUICK).code == 2
    ask = ("evaluate", "--model", model, "--data", data, "--out", "e", "--method")
    done = run(*ask, "mend")
    assert (done.code, "needs trained weights" in done.err) == (2, True)
    done = run(*ask, "rome", "--weights", data)
    assert (done.code, "rome has no --weights" in done.err) == (2, True)
    done = run(*ask, "mend", "--weights", data)
    assert (done.code, "cannot be read" in done.err) == (2, True)
