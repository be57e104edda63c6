"""report, demo, study and data: damaged records, unusable output paths and full disks."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from factscope.extras.study import ANSWERS_KIND, build_study
from factscope.records import Record, TrainingRecord
from factscope.runs.folder import RunFolder

from case_records import case, scores
from commands import Result, Run, runner
from trace_records import trace

EVALUATE = {"command": "evaluate", "model": "m", "data": "counterfact", "method": "rome"}
TRAIN = {"command": "train", "model": "m", "source": {"data": "zsre"}, "training": {"method": "ke"}}


def evaluation(step: int) -> TrainingRecord:
    return TrainingRecord(
        step=step, seconds=1.0, train_loss=None, loss=2.0, unedited_loss=9.0, edit_loss=2.0,
        rephrase_loss=2.0, locality_loss=0.0, edit_accuracy=0.5, rephrase_accuracy=0.5,
        locality_accuracy=0.75,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run of each kind, tables for CounterFact, and a study with an answer."""
    base = tmp_path_factory.mktemp("made")

    def a_run(name: str, spec: dict[str, Any], *records: Record) -> None:
        folder = RunFolder.create_or_open(base / name, spec, {"model_fingerprint": "f"})
        for record in records:
            folder.append(record)

    texts = {"method": "ft", "after": scores(0.5, ("Curie is a doctor.", "Curie heals"))}
    cases, others = [case(), case(1)], [case(**texts), case(1, **texts)]
    a_run("trace", {"command": "trace", "model": "m"}, trace(0), trace(1, known=False))
    a_run("evaluate", EVALUATE, *cases)
    a_run("other", EVALUATE | {"method": "ft"}, *others)
    a_run("sweep", EVALUATE | {"command": "sweep", "grid": {"layer": [5]}})
    a_run("sweep/points/layer-05", EVALUATE, *cases)
    a_run("train", TRAIN, evaluation(0), evaluation(1))
    born = [["Ada", "Oslo"], ["Bob", "Oslo"], ["Cleo", "Rome"], ["Dan", "Rome"]]
    patterns = ["[X] was born in [Y].", "[X], born in [Y]."]
    (base / "facts.json").write_text(json.dumps({"P19": born}))
    (base / "patterns.json").write_text(json.dumps({"P19": patterns}))
    (base / "text.txt").write_text("Oslo\n\nOslo is a city. It is old and it is cold.\n")
    study = build_study({"a": cases, "b": others}, seed=0)
    (base / "study").mkdir()
    (base / "study" / "key.json").write_text(study.to_json())
    answers = [{"item": item.id, "left": 0, "fluent": 1} for item in study.items]
    sheet = {"kind": ANSWERS_KIND, "study": study.id, "rater": "Ada", "answers": answers}
    (base / "answers.json").write_text(json.dumps(sheet))
    return base


@pytest.fixture
def factscope(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], no_drawing: None,
) -> Run:  # fmt: skip
    """Commands in a copy of that folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def assert_refused(result: Result, *texts: str) -> None:
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("factscope: ")
    assert result.err.count("\n") == 1
    for text in texts:
        assert text in result.err


# ---- records that are not finite


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("run", "folder", "field"),
    [
        ("trace", "trace", "clean"),
        ("trace", "trace", "corrupted_samples[1]"),
        ("evaluate", "evaluate", "after.prompts.prompt[0].new"),
        ("sweep", "sweep/points/layer-05", "before.reference_similarity"),
    ],
)
def test_report_refuses_records_that_are_not_finite(
    factscope: Run, tmp_path: Path, run: str, folder: str, field: str, value: str
) -> None:
    path = tmp_path / folder / "records.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    line = json.loads(second)
    *parents, last = field.replace("[", ".").replace("]", "").split(".")
    inner: Any = line
    for name in parents:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = "number"
    path.write_text(first + json.dumps(line).replace('"number"', value) + "\n")
    before = contents(tmp_path)
    number = f"{field} is {float(value)}"
    assert_refused(factscope("report", run), f"{folder}/records.jsonl, line 2: ", number)
    assert contents(tmp_path) == before


def test_effects_are_reported_as_fractions_of_the_total_effect(factscope: Run) -> None:
    raw = json.loads(factscope("report", "trace", "--json").out)["summary"]["states"]
    result = factscope("report", "trace", "--normalised", "--json")
    assert result.code == 0, result.err
    shown = json.loads(result.out)["summary"]["states"]
    assert shown["average_total_effect"] == pytest.approx(1)
    for role, peak in shown["peaks"].items():
        expected = raw["peaks"][role]["effect"] / raw["average_total_effect"]
        assert peak["effect"] == pytest.approx(expected)
    assert_refused(factscope("report", "evaluate", "--normalised"), "--normalised is about traces")


def test_a_diverged_training_is_reported(factscope: Run, tmp_path: Path) -> None:
    path = tmp_path / "train" / "records.jsonl"
    path.write_text(path.read_text().replace('"loss": 2.0', '"loss": NaN'))
    result = factscope("report", "train", "--json")
    assert result.code == 0, result.err
    assert [x["loss"] for x in json.loads(result.out)["evaluations"]] == [None, None]


@pytest.mark.parametrize(
    ("flag", "value", "runs"),
    [
        ("--preset", "paper", "traces"),
        ("--cases", "1", "evaluations"),
        ("--traces", "trace", "one sweep over layers"),
    ],
)
def test_report_refuses_a_flag_for_other_runs(
    factscope: Run, tmp_path: Path, flag: str, value: str, runs: str
) -> None:
    spec = {"command": "calibrate", "model": "m"}
    RunFolder.create_or_open(tmp_path / "calibrate", spec, {"model_fingerprint": "f"})
    result = factscope("report", "calibrate", flag, value)
    assert_refused(result, f"{flag} is about {runs}; leave it out for other runs")


# ---- output paths

REPORTS = (
    "report trace", "report evaluate", "report sweep", "report train",
    "study build evaluate other", "study report answers.json",
)  # fmt: skip
FOLDERS = (*REPORTS, "demo")
"""Commands that write a folder."""
BUILD = "data build-counterfact --facts facts.json --patterns patterns.json --text text.txt"
FIND = "data find-known --facts facts.json --patterns patterns.json"
FILES = ((FIND, "--out"), (BUILD, "--out"), (f"{BUILD} --out set.json", "--references-out"))
"""Commands that write a file, with the flag of the file."""


@pytest.fixture
def no_work(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Fail as soon as a command loads a model or reads its input."""

    def start(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the work began before the output was checked")

    for name in (
        "factscope.cli.flags.ModelOptions.load",
        "factscope.runs.folder.RunFolder.trace_records",
        "factscope.runs.folder.RunFolder.case_records",
        "factscope.runs.folder.RunFolder.training_records",
        "factscope.extras.study.Study.from_json",
        "factscope.data.readers.read_relation_table",
        "factscope.data.readers.pararel_facts",
    ):
        monkeypatch.setattr(name, start)
    return factscope


@pytest.fixture
def bad_places(tmp_path: Path) -> list[Path]:
    """Paths that cannot be written."""
    (tmp_path / "taken").write_text("notes")
    (tmp_path / "loop").symlink_to("loop")
    return [tmp_path / "taken" / "x" / "y", tmp_path / "loop" / "x", Path("/proc/factscope/x")]


@pytest.mark.parametrize("command", FOLDERS)
def test_output_folders_are_checked_before_the_work(
    no_work: Run, tmp_path: Path, bad_places: list[Path], command: str
) -> None:
    before = contents(tmp_path)
    for out in (*bad_places, tmp_path / "taken", tmp_path / "loop"):
        assert_refused(no_work(*command.split(), "--out", out), f"--out is '{out}'")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("command", "flag"), FILES)
def test_output_files_are_checked_before_the_work(
    no_work: Run, tmp_path: Path, bad_places: list[Path], command: str, flag: str
) -> None:
    before = contents(tmp_path)
    for out in (*bad_places, tmp_path / "trace", tmp_path / "loop"):
        assert_refused(no_work(*command.split(), flag, out), f"{flag} is '{out}'")
    assert contents(tmp_path) == before


def test_an_input_is_never_the_output(no_work: Run, tmp_path: Path) -> None:
    before = contents(tmp_path)
    for words, message in (
        (f"{BUILD} -o facts.json", "--out is 'facts.json'"),
        (f"{BUILD} -o ./text.txt", "--out is 'text.txt'"),
        (f"{BUILD} -o set.json --references-out set.json", "--references-out is 'set.json'"),
        (f"{FIND} -o patterns.json", "--out is 'patterns.json'"),
    ):
        assert_refused(no_work(*words.split()), message)
    assert contents(tmp_path) == before


def test_report_next_to_a_run_that_cannot_be_written(factscope: Run, tmp_path: Path) -> None:
    (tmp_path / "trace" / "report").write_text("notes")
    assert_refused(factscope("report", "trace"), "--out is 'trace/report'", "a file")


def test_a_cache_that_cannot_be_written_is_no_traceback(
    factscope: Run, bad_places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> NoReturn:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    monkeypatch.setenv("FACTSCOPE_CACHE", str(bad_places[0]))
    for words in ("data get counterfact", "data show counterfact"):
        result = factscope(*words.split())
        assert result.code in (1, 2)
        assert "factscope: " in result.err
        assert "Traceback" not in result.err


# ---- full disks


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets the disk be full after some more files."""

    def fill(files: int) -> None:
        write, left = Path.write_bytes, iter(range(files))

        def limited(path: Path, data: bytes) -> int:
            if next(left, None) is not None:
                return write(path, data)
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        monkeypatch.setattr(Path, "write_bytes", limited)

    return fill


@pytest.mark.parametrize(
    ("command", "files"),
    [
        *((command, 1) for command in REPORTS),
        (f"{BUILD} --references-out r", 0),
        (f"{BUILD} --references-out r", 1),
    ],
)
def test_a_full_disk_leaves_the_folder_as_it_was(
    factscope: Run, tmp_path: Path, disk: Any, command: str, files: int
) -> None:
    out = "set.json" if command.startswith("data") else "new"
    before = contents(tmp_path)
    disk(files)
    result = factscope(*command.split(), "--out", out)
    assert (result.code, result.out) == (1, "")
    assert "No space left on device" in result.err
    assert "Traceback" not in result.err
    assert contents(tmp_path) == before
