"""Run folders: tied to their spec and weights, locked while a run writes, repaired on resume."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factscope.errors import BadRunFolder, FolderInUse, RunInterrupted
from factscope.facts import Fact
from factscope.io import locked
from factscope.records import CaseRecord, TraceRecord, TrainingRecord
from factscope.runs.folder import CHECKPOINT, RunFolder, locks_folder

from commands import Run, runner, saved_model
from counterfact import record as counterfact_record

FACTS = [Fact(subject="Ann", prompt="{} speaks", target="Thai", id=str(i)) for i in range(3)]
TRACES = [
    TraceRecord(
        fact=fact,
        model="tiny",
        tokens=("Ann", " speaks"),
        subject=(0, 1),
        answer=" Thai",
        answer_id=3,
        known=True,
        clean=0.9,
        corrupted=0.1,
        corrupted_samples=(0.1,),
    )
    for fact in FACTS
]
CASES = [
    CaseRecord(fact=fact, true=None, data="d", model="tiny", method="rome", phase=phase)
    for phase in ("edit", "end")
    for fact in FACTS
]
LOSSES = dict.fromkeys(
    (
        "seconds", "train_loss", "loss", "unedited_loss", "edit_loss", "rephrase_loss",
        "locality_loss", "edit_accuracy", "rephrase_accuracy", "locality_accuracy",
    ), 0.5,
)  # fmt: skip
TRAININGS = [TrainingRecord(step=step, **LOSSES) for step in range(3)]


def open_run(path: Path, command: str = "trace") -> RunFolder:
    return RunFolder.create_or_open(path, {"command": command}, {"model_fingerprint": "abc"})


def test_a_folder_is_tied_to_its_spec_and_to_the_weights(tmp_path: Path) -> None:
    spec, info = {"model": "m", "limit": None}, {"model_fingerprint": "abc"}
    RunFolder.create_or_open(tmp_path / "run", spec, info)
    RunFolder.create_or_open(tmp_path / "run", spec, info)
    with pytest.raises(BadRunFolder, match="other weights"):
        RunFolder.create_or_open(tmp_path / "run", spec, {"model_fingerprint": "def"})
    with pytest.raises(BadRunFolder, match="limit = 3"):
        RunFolder.create_or_open(tmp_path / "run", {"model": "m", "limit": 3}, info)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["info.json", "spec.toml"]


def test_a_folder_is_short_in_a_terminal_and_a_notebook(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "<run>")
    path = repr(str(tmp_path / "<run>"))
    assert repr(folder) == f"RunFolder({path}, trace: no records)"
    folder.append(TRACES[0])
    assert repr(folder) == f"RunFolder({path}, trace: 1 records)"
    assert "&lt;run&gt;" in folder._repr_html_()
    assert str(RunFolder.open(str(tmp_path / "<run>")).path) == str(tmp_path / "<run>")


def test_a_run_killed_while_its_folder_was_created_starts_again(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "spec.toml.partial").write_text("mod")
    (tmp_path / ".lock").write_text("process 1 on nowhere\n")  # of a killed process
    RunFolder.create_or_open(tmp_path, {"model": "m"}, {})
    assert RunFolder.open(tmp_path).trace_records() == []


@pytest.mark.parametrize(
    ("command", "records"), [("trace", TRACES), ("evaluate", CASES), ("train", TRAININGS)]
)
def test_doubled_and_incomplete_records_are_removed_on_resume(
    command: str, records: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_run(tmp_path, command)
    lines = [record.to_json().encode() for record in records]
    whole = b"".join(line + b"\n" for line in lines)
    folder.records_path.write_bytes(whole)
    open_run(tmp_path, command)
    assert not caplog.messages
    assert folder.records_path.read_bytes() == whole
    # Two processes wrote all records, one into a line of the other; later a third was killed.
    torn = lines[0][:20] + lines[1] + b"\n"
    folder.records_path.write_bytes(whole + whole + torn + b"\0\0\xff\n" + lines[0][:30])
    open_run(tmp_path, command)
    assert folder.records_path.read_bytes() == whole
    (message,) = caplog.messages
    assert f"removed 3 incomplete and {len(lines)} doubled records" in message
    assert str(folder.records_path) in message


def test_the_first_of_two_different_records_is_kept(tmp_path: Path) -> None:
    folder = open_run(tmp_path)
    for record in (TRACES[0], replace(TRACES[0], clean=0.8)):
        folder.append(record)
    assert open_run(tmp_path).trace_records() == TRACES[:1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bytes(range(256)), "records.jsonl has no record; delete it"),
        (b"x\ny\n", "records.jsonl has no record; delete it"),
        (TRACES[0].to_json().encode().replace(b"0.9", b"NaN") + b"\n", "line 1: .*clean is nan"),
    ],
)
def test_a_file_that_cannot_be_repaired_is_refused_and_left_alone(
    content: bytes, words: str, tmp_path: Path
) -> None:
    folder = open_run(tmp_path)
    folder.records_path.write_bytes(content)
    with pytest.raises(BadRunFolder, match=words):
        open_run(tmp_path)
    assert folder.records_path.read_bytes() == content


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[1]", b'{"format": NaN}'])
def test_a_damaged_info_file_is_refused(content: bytes, tmp_path: Path) -> None:
    open_run(tmp_path)
    (tmp_path / "info.json").write_bytes(content)
    with pytest.raises(BadRunFolder, match="give a new folder"):
        open_run(tmp_path)


def test_a_damaged_spec_is_another_run(tmp_path: Path) -> None:
    open_run(tmp_path)
    (tmp_path / "spec.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadRunFolder, match="belongs to another run"):
        open_run(tmp_path)


class Running:
    """A run whose work is a function."""

    @locks_folder
    def run(self, lm: Any, folder: RunFolder, work: Any) -> None:
        work()


def test_a_folder_in_use_is_neither_opened_nor_written(tmp_path: Path) -> None:
    folder = open_run(tmp_path)
    folder.records_path.write_bytes(b'{"half')  # the other process is just writing a record
    with locked(tmp_path):
        with pytest.raises(FolderInUse, match="is in use by process"):
            open_run(tmp_path)
        with pytest.raises(FolderInUse, match="is in use by process"):
            Running().run(None, folder, lambda: None)
    assert folder.records_path.read_bytes() == b'{"half'

    def second() -> None:
        with pytest.raises(FolderInUse):
            open_run(tmp_path)

    Running().run(None, folder, second)
    open_run(tmp_path)


@pytest.mark.parametrize(
    ("command", "file"),
    [("trace", "records.jsonl"), ("sweep", "points/a/records.jsonl"), ("train", CHECKPOINT)],
)
def test_ctrl_c_says_that_the_command_resumes_only_if_it_does(
    command: str, file: str, tmp_path: Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    folder = open_run(tmp_path, command)
    with pytest.raises(KeyboardInterrupt, match="nothing was finished yet"):
        Running().run(None, folder, interrupt)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(KeyboardInterrupt, match=r"^the same command resumes$"):
        Running().run(None, folder, interrupt)


def test_a_full_disk_leaves_a_folder_that_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_run(tmp_path)
    folder.append(TRACES[0])

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunInterrupted, match=r"No space left.*the same command resumes"):
        folder.append(TRACES[1])
    assert open_run(tmp_path).trace_records()[0] == TRACES[0]


# ---- as a user runs the commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture
def factscope(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_drawing: None,
) -> Run:
    """Commands on the tiny model, in a folder with cases and facts."""
    cases = [counterfact_record(i) for i in range(6)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "many.json").write_text(json.dumps([counterfact_record(i) for i in range(30)]))
    (tmp_path / "facts.jsonl").write_text('{"subject": "Ann", "prompt": "Ann speaks"}\n')
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


COMMANDS = {
    "trace": "--facts facts.jsonl --samples 2",
    "evaluate": "--data cases.json --method ft --layer 1 --steps 2 --text-length 0 --limit 2",
    "sweep": "--data cases.json --method ft --grid layer=0-1 --steps 2 --limit 1",
    "train": "mend --data text --layers 1 --steps 2 --limit 12 --target-tokens 2",
    "calibrate": "--data many.json --methods ft-l --num-cases 4 --minutes 0.001",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_locks_its_folder(
    command: str, factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (command, *COMMANDS[command].split(), "--model", model, "--device", "cpu", "-o", "run")
    append, appended = RunFolder.append, []

    def checked(self: RunFolder, record: Any) -> None:
        for folder in {self.path, Path("run")}:
            with pytest.raises(FolderInUse):
                locked(folder).__enter__()
        appended.append(record)
        append(self, record)

    monkeypatch.setattr(RunFolder, "append", checked)
    done = factscope(*words)
    assert done.code == 0, done.err
    assert appended
    assert not list(tmp_path.rglob("*.lock"))
    with locked("run"):
        refused = factscope(*words)
    assert refused.code == 1
    assert "factscope: run is in use by process" in refused.err


def test_a_run_with_doubled_records_is_repaired_by_its_command(
    factscope: Run, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("evaluate", *COMMANDS["evaluate"].split(), "--model", model, "--out", "run")
    assert factscope(*words).code == 0
    path = tmp_path / "run" / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole)
    refused = factscope("report", "run", "--out", "report")
    assert refused.code == 2
    assert "has two records of the case" in refused.err
    repaired = factscope(*words)
    assert repaired.code == 0, repaired.err
    assert "run/records.jsonl: removed 0 incomplete and 2 doubled records" in caplog.text
    assert path.read_text() == whole
    assert factscope("report", "run", "--out", "report").code == 0
