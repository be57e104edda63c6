"""Training learned editors: it learns, it sees what edits do, and no kill spoils it."""

import csv
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from factscope.analysis.training import TrainingCurve
from factscope.data.readers import read_cases
from factscope.editing.contexts import edit_request
from factscope.editing.hypernet import train as training_module
from factscope.editing.hypernet.editor import Ke, Mend
from factscope.editing.hypernet.examples import (
    BatchCache,
    CaseExamples,
    Example,
    TextExamples,
    split_examples,
    without_overlap,
)
from factscope.editing.hypernet.gradients import TokenRow, token_row
from factscope.editing.hypernet.train import Trainer, Training, training_pass
from factscope.editing.hypernet.weights import load_weights
from factscope.errors import BadRecord, BadRunFolder, BadSetting, DidNotConverge
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import TrainingRecord
from factscope.report.figures.training import training_figure
from factscope.report.training import looks_table, training_page, training_values
from factscope.runs import train as runs_module
from factscope.runs.folder import WEIGHTS
from factscope.runs.train import CHECKPOINT, FromCases, FromText, TrainRun

from commands import Run, reported_without_torch, runner, saved_model
from counterfact import record
from processes import begun

EDITORS = {"mend": Mend, "ke": Ke}
DESIGNS = {"mend": (("rank", 8), ("lr", 1e-3)), "ke": (("lstm", 8), ("condition", 8))}


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


def quick(method: str = "mend", **settings: Any) -> Training:
    own = {"method": method, "design": DESIGNS[method], "batch": 4, "every": 5, "held_out": 6}
    return Training(**{**own, "lr": 3e-3, "warm_up": 2, **settings})


def a_run(model: Path, data: Path, **fields: Any) -> TrainRun:
    return TrainRun(
        **{
            "model": str(model), "dtype": "float32", "source": FromCases(name="towers", path=data),
            "training": quick(), "steps": 12, "save_every": 0.0, **fields,
        }
    )  # fmt: skip


def lessons_of(data: Path, **how: Any) -> CaseExamples:
    return CaseExamples(read_cases(data).cases, **how)


# ---- it learns


@pytest.mark.parametrize("method", EDITORS)
def test_edits_of_held_out_facts_get_better(lm: LM, data: Path, method: str) -> None:
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    found = {}
    for local_weight in (0.01, 1.0):
        trainer = Trainer(lm, lessons_of(data), quick(method, local_weight=local_weight))
        first = trainer.look()
        for _ in range(60):
            trainer.step()
        found[local_weight] = last = trainer.look()
        assert trainer.progress.best_step == 60
        assert last.loss < first.loss
        assert first.before == pytest.approx(last.before, rel=1e-5)
    assert found[0.01].edit < 0.6 * found[0.01].before
    assert found[0.01].rephrased < 0.6 * found[0.01].before
    assert found[0.01].said > 0
    assert found[1.0].edit < 0.95 * found[1.0].before
    assert found[1.0].local < 0.5 * found[0.01].local
    for name, weight in lm.model.named_parameters():  # embeddings and vocabulary, too
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("locality", ["unrelated", "neighbours"])
def test_what_training_sees_is_what_the_edits_do(
    lm: LM, data: Path, method: str, locality: Any
) -> None:
    """Losses, answers and divergence, as of models whose weights were really written."""
    trainer = Trainer(lm, lessons_of(data, locality=locality), quick(method))
    for _ in range(8):
        trainer.step()
    group = trainer.held.group(0)
    assert group is not None
    seen = training_pass(lm, trainer.places, trainer.halves, trainer.network, group, 1, learn=False)
    trainer.look()
    weights = trainer.weights({})
    weights.network.load_state_dict(trainer.network.state_dict())
    cases = [trainer.held.lessons.cases[i] for i in trainer.held.numbers[0]]  # type: ignore
    edits = EDITORS[method](weights=weights).each(lm, [case.fact for case in cases])
    examples = trainer.held.lessons.made(lm, trainer.held.numbers[0])
    for i, (edit, example) in enumerate(zip(edits, examples, strict=True)):
        # In turn 1 a fact is shown beside the one two places before it.
        local = example.local or examples[(i - 2) % len(examples)].edit
        unedited = _logs(lm, local)
        assert seen.before[i].item() == pytest.approx(_loss(lm, example.edit), rel=1e-4)
        with edit.applied(lm, force=True):
            assert seen.edit[i].item() == pytest.approx(_loss(lm, example.edit), rel=1e-3)
            assert seen.rephrased[i].item() == pytest.approx(_loss(lm, example.rephrased), rel=1e-3)
            now = _logs(lm, local)
            apart = (unedited.exp() * (unedited - now)).sum(-1).mean().item()
            assert seen.local[i].item() == pytest.approx(apart, rel=1e-2, abs=1e-6)
            same = (unedited.argmax(-1) == now.argmax(-1)).float().mean().item()
            assert seen.kept[i].item() == pytest.approx(same)
            said = _logs(lm, example.edit).argmax(-1).tolist() == list(example.edit.labels)
            assert bool(seen.said[i]) == said


def _logs(lm: LM, line: TokenRow) -> torch.Tensor:
    return lm.model(torch.tensor([line.ids])).logits[0, list(line.reads)].log_softmax(-1)


def _loss(lm: LM, line: TokenRow) -> float:
    return torch.nn.functional.nll_loss(_logs(lm, line), torch.tensor(line.labels)).item()


def test_states_that_found_no_room_are_made_again_bit_by_bit(lm: LM, data: Path) -> None:
    trainers = [Trainer(lm, lessons_of(data), quick()) for _ in range(2)]
    trainers[1].shelf.room = 0
    losses = [[trainer.step() for _ in range(20)] for trainer in trainers]
    assert losses[0] == losses[1]
    assert len(trainers[0].shelf.kept) == 9
    assert not trainers[1].shelf.kept


def test_every_turn_brings_every_group_and_another_neighbour(lm: LM, data: Path) -> None:
    trainer = Trainer(lm, lessons_of(data), quick())
    shelf = trainer.shelf
    assert sorted(i for numbers in shelf.numbers for i in numbers) == list(range(34))
    assert len(shelf) == 9
    for turn in range(2):
        found = [shelf.at(step, 0) for step in range(9 * turn, 9 * turn + 9)]
        assert [t for _, t in found] == [turn] * 9
        assert len({id(group) for group, _ in found}) == 9
    group = shelf.group(0)
    assert group is not None
    for turn in range(4):
        ids = group.local(turn)[0].ids
        assert all(not torch.equal(a, b) for a, b in zip(ids, group.edit.ids, strict=True))
    assert not torch.equal(group.local(0)[0].ids, group.local(1)[0].ids)


# ---- what it is trained on


def test_cases_are_examples(lm: LM, tmp_path: Path) -> None:
    towers = tmp_path / "one.json"
    towers.write_text(json.dumps([record(1)]))
    (case,) = read_cases(towers).cases
    edit = token_row(edit_request(lm, case.fact))
    (example,) = CaseExamples((case,)).made(lm, [0])
    assert (example.edit, example.local) == (edit, None)
    assert lm.tokenizer.decode(example.rephrased.ids).startswith("One finds Tower 1 in")
    assert example.rephrased.labels == edit.labels
    (example,) = CaseExamples((case,), "neighbours").made(lm, [0])
    assert example.local is not None
    assert lm.tokenizer.decode(example.local.ids).startswith("The Louvre is in")
    bare = replace(case, paraphrases=(), neighbours=())
    assert CaseExamples((bare,)).made(lm, [0]) == [Example(edit, edit, None)]
    question = replace(bare, true=None, neighbours=("Who?",), neighbour_answers=("Miles",))
    (example,) = CaseExamples((question,)).made(lm, [0])  # zsRE's question is unrelated as it is
    assert example.local is not None
    assert lm.tokenizer.decode(example.local.labels).strip() == "Miles"


def test_a_case_that_cannot_be_read_is_left_out(lm: LM, data: Path) -> None:
    cases = list(read_cases(data).cases[:3])
    long = replace(cases[1].fact, prompt="{} " + "is in " * 100)
    lessons = CaseExamples((cases[0], replace(cases[1], fact=long), cases[2]))
    assert len(lessons.made(lm, [0, 1, 2])) == 2
    shelf = BatchCache(lm, Trainer(lm, lessons_of(data), quick()).halves, lessons, range(1, 3), 2)
    assert shelf.group(0) is None


def test_what_is_evaluated_is_not_trained_on(data: Path, tmp_path: Path) -> None:
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
    loud = replace(case, fact=replace(case.fact, subject="TOWER  0"))
    assert without_overlap([case], [loud]) == ()


@pytest.mark.parametrize("count", [1, 9])
def test_a_set_too_small_to_split_is_named(lm: LM, data: Path, count: int) -> None:
    with pytest.raises(BadSetting, match=f"{count} examples are too few"):
        Trainer(lm, CaseExamples(read_cases(data).cases[:count]), quick())
    assert split_examples(10, 64) == (range(8), range(8, 10))


def test_text_is_continued_by_the_model(lm: LM, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 40)
    source = FromText(path=text, count=12, stretch=8, tokens=3)
    lessons = source.lessons(lm)
    first, second = lessons.made(lm, [0, 1])
    assert first.edit == first.rephrased
    assert first.local is None
    assert len(first.edit.ids) == 8 + 2
    assert first.edit.reads == (7, 8, 9)
    assert len(first.edit.labels) == 3
    assert source.lessons(lm).made(lm, [1]) == [second]
    own = replace(source, path=None).lessons(lm)
    assert len(own) == 12
    assert isinstance(own, TextExamples)
    assert replace(source, path=None).lessons(lm).made(lm, [4]) == own.made(lm, [3, 4])[1:]
    trainer = Trainer(lm, own, quick())
    first_look = trainer.look()
    for _ in range(20):
        trainer.step()
    assert trainer.look().edit < first_look.edit
    with pytest.raises(BadSetting, match="tokens is 0"):
        replace(source, tokens=0).lessons(lm)
    with pytest.raises(BadSetting, match="reads 64"):
        replace(source, tokens=60).lessons(lm)


# ---- runs


def test_a_run_leaves_weights_that_edit(lm: LM, model: Path, data: Path, tmp_path: Path) -> None:
    run = a_run(model, data)
    shares: list[float] = []
    seen: list[TrainingRecord] = []
    folder = run.begin(lm, tmp_path / "run")
    path = run.go_on(lm, folder, progress=shares.append, seen=seen.append)
    assert sum(shares) == pytest.approx(1)
    assert [r.step for r in seen] == [0, 5, 10, 12]
    assert folder.training_records() == seen
    assert (seen[0].trained, seen[1].trained is None) == (None, False)
    weights = load_weights(path)
    best = min(seen, key=lambda r: r.loss)
    assert (weights.trained["step"], weights.trained["loss"]) == (best.step, best.loss)
    assert weights.row == "mend-towers"
    (edit,) = Mend.load(path).each(lm, [read_cases(data).cases[0].fact])
    assert len(edit.changes) == 6


def test_a_finished_run_goes_on_with_more_steps(
    lm: LM, model: Path, data: Path, tmp_path: Path
) -> None:
    long, short = a_run(model, data, steps=15), a_run(model, data, steps=10)
    whole = long.go_on(lm, long.begin(lm, tmp_path / "whole"))
    short.go_on(lm, short.begin(lm, tmp_path / "parts"))
    parts = long.go_on(lm, long.begin(lm, tmp_path / "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    there = parts.read_bytes()
    long.go_on(lm, long.begin(lm, tmp_path / "parts"))
    assert parts.read_bytes() == there
    other = a_run(model, data, training=quick(lr=1e-3))
    with pytest.raises(BadRunFolder, match="lr"):
        other.begin(lm, tmp_path / "parts")


def go(model: Path, data: Path, method: str, out: Path, last: int) -> None:
    """A training that writes a checkpoint after every look, killed before that of one step."""

    def fatal(record: TrainingRecord) -> None:
        if record.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    runs_module.SHARE = 0
    run = a_run(model, data, steps=30, training=quick(method))
    lm = load(str(model), device="cpu")
    run.go_on(lm, run.begin(lm, out), seen=fatal)


@pytest.mark.parametrize("last", [0, 5, 20])
@pytest.mark.parametrize("method", EDITORS)
def test_a_killed_training_goes_on_bit_by_bit(
    lm: LM, model: Path, data: Path, tmp_path: Path, method: str, last: int
) -> None:
    out = tmp_path / "killed"
    process = begun(go, model, data, method, out, last)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (out / CHECKPOINT).is_file() == (last > 0)
    with (out / "records.jsonl").open("a") as file:
        file.write('{"step": 9')  # what a kill leaves of a line
    run = a_run(model, data, steps=30, training=quick(method))
    seen: list[TrainingRecord] = []
    found = run.go_on(lm, run.begin(lm, out), seen=seen.append)
    assert seen[0].step == last
    whole = run.begin(lm, tmp_path / "whole")
    wanted = run.go_on(lm, whole)
    assert found.read_bytes() == wanted.read_bytes()
    steps = [r.step for r in run.begin(lm, out).training_records()]
    assert steps == list(range(0, 31, 5))
    for name in ("loss", "edit", "local"):
        pairs = zip(run.begin(lm, out).training_records(), whole.training_records(), strict=True)
        assert all(getattr(a, name) == getattr(b, name) for a, b in pairs)


def test_writing_takes_a_share_of_the_time_only(
    lm: LM, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = 0.0, []

    def slowly(trainer: Trainer, path: Path) -> None:
        nonlocal now
        now += 1
        written.append(trainer.progress.step)

    def seen(record: TrainingRecord) -> None:
        nonlocal now
        now += 4

    monkeypatch.setattr(runs_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(runs_module, "write_checkpoint", slowly)
    run = a_run(model, data, steps=30)
    run.go_on(lm, run.begin(lm, tmp_path / "run"), seen=seen)
    assert written == [0, 25, 30]  # looks take 4 s, writing 1 s and not within the next 20; the end


def test_a_loss_that_is_no_number_stops_and_keeps_the_best(
    lm: LM, model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = training_module.training_pass, []

    def broken(*words: Any, learn: bool) -> Any:
        seen = real(*words, learn=learn)
        steps.append(learn)
        return replace(seen, edit=seen.edit * math.nan) if sum(steps) == 8 else seen

    monkeypatch.setattr(training_module, "training_pass", broken)
    run = a_run(model, data, save_every=1e9)
    folder = run.begin(lm, tmp_path / "run")
    with pytest.raises(
        DidNotConverge, match=r"at step 7 the loss .* no number .*up to step 5 is kept"
    ):
        run.go_on(lm, folder)
    assert load_weights(folder.path / WEIGHTS).trained["step"] == 5
    monkeypatch.setattr(training_module, "training_pass", real)
    run.go_on(lm, run.begin(lm, folder.path))
    assert [r.step for r in folder.training_records()] == [0, 5, 10, 12]


def test_training_stops_where_it_gets_no_better(
    lm: LM, model: Path, data: Path, tmp_path: Path
) -> None:
    still = quick(lr=1e-12, design=(("rank", 8), ("lr", 1e-12)), every=2, patience=3)
    run = a_run(model, data, training=still, steps=1000)
    folder = run.begin(lm, tmp_path / "run")
    run.go_on(lm, folder)
    assert len(folder.training_records()) < 30


def test_minutes_bound_training(lm: LM, model: Path, data: Path, tmp_path: Path) -> None:
    run = a_run(model, data, steps=None, minutes=1e-3)
    folder = run.begin(lm, tmp_path / "run")
    run.go_on(lm, folder)
    assert folder.training_records()[-1].step < 100


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 1}, "batch is 1"),
        ({"lr": 0.0}, "lr is 0"),
        ({"design": (("depth", 3),)}, "no 'depth'"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        Training(**{"method": "mend", **settings})


def test_how_long_must_be_said(model: Path, data: Path) -> None:
    with pytest.raises(BadSetting, match="how long"):
        a_run(model, data, steps=None)
    with pytest.raises(BadSetting, match="minutes is -1"):
        a_run(model, data, minutes=-1.0)


# ---- what is told of it

SPEC = {"model": "m", "source": {"data": "zsre"}, "training": {"method": "ke", "lr": 0.25}}


def a_look(step: int, loss: float) -> TrainingRecord:
    return TrainingRecord(
        step=step, seconds=6.0 * step, trained=None, loss=loss, before=9.0, edit=loss,
        rephrased=2 * loss, local=0.0, said=1 - loss / 10, said_rephrased=0.5, kept=0.75,
    )  # fmt: skip


def test_the_best_look_is_marked() -> None:
    losses = (math.nan, 4.0, 2.5, 3.0, 2.5)
    course = TrainingCurve.of(SPEC, [a_look(12_345 * i, loss) for i, loss in enumerate(losses)])
    assert course.best.step == 24_690
    rows = looks_table(course).rows
    assert [{getattr(cell, "mark", None) for cell in row} for row in rows] == [
        {None}, {None}, {"best"}, {None}, {None},
    ]  # fmt: skip
    assert list(map(str, rows[2])) == ["24690", "2469", "2.5", "75.0", "50.0", "75.0", "0"]
    page = training_page(course)
    for words in ("KE trained on zsRE, m, 49380 steps", '<td class="number best">2.5</td>',
                  "<dt>best step</dt><dd>24690</dd>", "<td>training.lr</td>"):  # fmt: skip
        assert words in page
    values = json.loads(json.dumps(training_values(course), allow_nan=False))
    assert (values["best"]["step"], values["looks"][0]["loss"]) == (24_690, None)


def test_the_figure_shows_each_look_and_the_best() -> None:
    losses = (4.0, 2.5, 3.0)
    course = TrainingCurve.of(SPEC, [a_look(10 * i, loss) for i, loss in enumerate(losses)])
    left, right = training_figure(course).axes
    drawn = [
        {x.get_label(): np.array(x.get_data()) for x in ax.get_lines()} for ax in (left, right)
    ]
    assert drawn[0]["in other words"][1].tolist() == [8.0, 5.0, 6.0]
    assert drawn[1]["new object said"][1].tolist() == pytest.approx([0.6, 0.75, 0.7])
    for lines in drawn:
        assert lines["best look"][0].tolist() == [10, 10]


def test_a_spec_without_its_settings_is_named() -> None:
    with pytest.raises(BadRecord, match="no 'source'"):
        TrainingCurve.of({"model": "m"}, [a_look(0, 1.0)])


# ---- on the command line


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


def test_a_training_is_reported(run: Run, model: Path, data: Path, tmp_path: Path) -> None:
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
    looks = [json.loads(line) for line in Path("t/records.jsonl").read_text().splitlines()]
    assert said["looks"] == looks
    assert said["best"] == min(looks, key=lambda look: look["loss"])
    assert said["best"]["step"] == load_weights(Path("t") / WEIGHTS).trained["step"]
    with Path("r/table.csv").open() as file:
        assert [float(row["edit"]) for row in csv.DictReader(file)] == [x["edit"] for x in looks]
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
    assert "training of mend on towers has no look at its held-out examples yet" in refused.err
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
        (("--data", data, "--layer", 9, "--out", "u", *QUICK), "layer 9 is out of range"),
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
    assert (done.code, "must be trained first" in done.err) == (2, True)
    done = run(*ask, "rome", "--weights", data)
    assert (done.code, "rome has no --weights" in done.err) == (2, True)
    done = run(*ask, "mend", "--weights", data)
    assert (done.code, "cannot be read" in done.err) == (2, True)
