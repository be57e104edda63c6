"""factscope evaluate and report, as a user runs them."""

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from factscope.cli.app import main
from factscope.cli.evaluate import data_name
from factscope.data.readers import read_cases
from factscope.editing.settings import KN
from factscope.evaluation.cases import score_cases
from factscope.evaluation.settings import ScoringOptions
from factscope.lm.load import load
from factscope.records import read_case_records

from commands import Run, runner, saved_model
from counterfact import record
from processes import start_process

QUICK = ("--method", "ft", "--layer", "1", "--steps", "2", "--text-length", "12")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([record(i) for i in range(6)]))
    return path


def test_evaluate_and_report(run: Run, model: Path, cases: Path) -> None:
    done = run("evaluate", "--model", model, "--data", cases, *QUICK, "--out", "a")
    assert done.code == 0, done.err
    assert "| FT " in done.out
    assert "unedited" in done.out
    assert "Next: factscope report a" in done.out
    rome = ("--method", "rome", "--layer", "1", "--stats", "none", "--prefix-lengths", "none")
    again = run(
        "evaluate", "--model", model, "--data", cases, *rome, "--steps", 2, "--text-length", 12,
        "--out", "b", "--json",
    )  # fmt: skip
    assert again.code == 0, again.err
    said = json.loads(again.out)
    assert [row["method"] for row in said["summaries"]] == ["none", "rome"]
    assert {"S", "ES", "PS", "NS", "EM", "GE"} <= said["summaries"][1]["metrics"].keys()
    assert said["summaries"][1]["cases"] == 6
    both = run("report", "a", "b", "--out", "both", "--cases", "3")
    assert both.code == 0, both.err
    page = Path("both/index.html").read_text("utf-8")
    assert "ROME" in page
    assert "Tower 3" in page


def test_knowledge_neurons_get_the_true_object(run: Run, model: Path, cases: Path) -> None:
    kn = ("--method", "kn", "--prefix-lengths", "none", "--limit", 2, "--text-length", 0)
    done = run("evaluate", "--model", model, "--data", cases, *kn, "--out", "kn", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["summaries"][1]["method"] == "kn"
    lm, given = load(str(model), device="cpu"), read_cases(cases).cases[:2]
    records = list(read_case_records(Path("kn/records.jsonl")))
    for case, made in zip(given, records, strict=True):
        assert made.fact == case.fact
        fact = replace(case.fact, old=case.true)
        (edit,) = KN(prefixes=()).each(lm, [fact])
        alone = score_cases(lm, [case], [edit], [0], scoring=ScoringOptions(length=0))[0]
        assert made.after is not None
        for kind, asked in alone.prompts.items():
            for one, other in zip(asked, made.after.prompts[kind], strict=True):
                assert one.new == pytest.approx(other.new, rel=1e-4)


def test_the_same_command_resumes_and_another_is_refused(
    run: Run, model: Path, cases: Path
) -> None:
    words = ("evaluate", "--model", model, "--data", cases, *QUICK, "--out", "a")
    assert run(*words).code == 0
    path = Path("a/records.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:40])
    assert run(*words).code == 0
    assert path.read_text() == "".join(lines)
    other = run(*words, "--seed", 5)
    assert other.code == 2
    assert "+seed = 5" in other.err


def stopping_at(fraction: float) -> Callable[..., AbstractContextManager[Any]]:
    """In place of a progress bar: Ctrl-C when this fraction of the work is done."""

    @contextmanager
    def working(what: str, total: int | None = None) -> Iterator[Callable[[float], None]]:
        done = 0.0

        def advance(part: float) -> None:
            nonlocal done
            done += part
            if done > fraction:
                raise KeyboardInterrupt

        yield advance

    return working


@pytest.mark.parametrize("command", ["single", "sequential", "batch", "sweep"])
def test_ctrl_c_loses_at_most_one_case_and_the_same_command_resumes(
    command: str, run: Run, model: Path, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", model, "--data", cases, *QUICK]
    words = ["sweep", *words, "--grid", "layer=0,1"] if command == "sweep" else [
        "evaluate", *words, "--protocol", command
    ]  # fmt: skip
    assert run(*words, "--out", "whole").code == 0
    for twelfths in (7, 11):
        with monkeypatch.context() as patch:
            patch.setattr("factscope.cli.evaluate.working", stopping_at(twelfths / 12 + 0.02))
            stopped = run(*words, "--out", "a")
        assert (stopped.code, stopped.out) == (130, "")
        assert stopped.err.splitlines()[-1] == "factscope: interrupted; the same command resumes"
        if command in ("single", "sweep"):
            written = sum(x.read_bytes().count(b"\n") for x in Path("a").rglob("records.jsonl"))
            assert written == twelfths // (1 if command == "sweep" else 2)
    assert run(*words, "--out", "a").code == 0
    assert contents("a") == contents("whole")


def contents(folder: str) -> dict[str, bytes]:
    """The records of a run or sweep, by file."""
    files = sorted(Path(folder).rglob("records.jsonl"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def evaluate(words: list[str], cache: str) -> None:
    """Run a command in a process of its own."""
    os.environ["FACTSCOPE_CACHE"] = cache
    sys.argv = ["factscope", *words]
    main()


def test_a_real_interrupt_ends_with_130_and_complete_records(
    run: Run, model: Path, cases: Path, tmp_path: Path
) -> None:
    cases.write_text(json.dumps([record(i) for i in range(100)]))
    words = ["evaluate", "--model", model, "--data", cases, *QUICK, "--out", tmp_path / "a"]
    process = start_process(evaluate, [str(word) for word in words], str(tmp_path / "cache"))
    records = tmp_path / "a" / "records.jsonl"
    while process.is_alive() and not (records.is_file() and records.stat().st_size):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    assert records.read_bytes().endswith(b"\n")
    assert 1 <= len(list(read_case_records(records))) < 100


@pytest.mark.parametrize("command", ["evaluate", "sweep"])
def test_missing_ray_is_noticed_before_the_model_is_loaded(
    command: str, run: Run, model: Path, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "ray" else find_spec(name)
    )
    monkeypatch.setattr("factscope.lm.load.load", None)
    grid = ("--grid", "layer=0") if command == "sweep" else ()
    done = run(command, "--model", model, "--data", cases, *grid, "--engine", "ray", "--out", "a")
    assert done.code == 2
    assert done.err == "factscope: Ray is not installed; pip install 'factscope[ray]'\n"
    assert not Path("a").exists()


def test_a_run_of_broken_models_is_an_error(
    run: Run, model: Path, cases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "factscope.editing.checks._text_perplexities",
        lambda lm, edits: [20.0 if edit is None else 900.0 for edit in edits],
    )
    words = ("evaluate", "--model", model, "--data", cases, "--limit", 2, *QUICK, "--out", "a")
    done = run(*words)
    assert done.code == 1
    assert "broken: case 0: perplexity of unrelated text from 20 to 900" in done.err
    assert "every edited model is broken (case 1:" in done.err
    assert "| broken |" in done.out
    assert run(*words, "--force").code == 0


def test_broken_cases_are_skipped(run: Run, model: Path, tmp_path: Path) -> None:
    broken = [record(0), {"case_id": 1}, record(2)]
    (tmp_path / "cases.json").write_text(json.dumps(broken))
    words = ("evaluate", "--model", model, "--data", "cases.json", *QUICK, "--out", "a")
    done = run(*words, "--json")
    assert done.code == 0, done.err
    (problem,) = json.loads(done.out)["left_out"]
    assert "record 2" in problem
    assert json.loads(done.out)["summaries"][1]["cases"] == 2


@pytest.mark.parametrize("protocol", ["sequential", "batch"])
def test_other_protocols(run: Run, model: Path, cases: Path, protocol: str) -> None:
    more = ("--facts-per-edit", 3) if protocol == "batch" else ()
    done = run(
        "evaluate", "--model", model, "--data", cases, *QUICK, "--protocol", protocol, *more,
        "--out", "a", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = json.loads(done.out)["summaries"]
    moments = [row["phase"] for row in rows if row["method"] != "none"]
    assert moments == (["edit", "end"] if protocol == "sequential" else ["edit"])


def test_the_default_cases_with_reference_texts(run: Run, model: Path, tmp_path: Path) -> None:
    texts = {"city": {"Rome": ["The city of Rome is old."]}, "P131": {"Rome": ["Rome is old."]}}
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    done = run(
        "evaluate", "--model", model, *QUICK, "--limit", 3, "--references", "texts.json",
        "--out", "a", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads(done.out)["summaries"][0]["data"] == "everyday"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "magic"), "--method is 'magic'; choose from rome"),
        (
            ("--method", "kn", "--integration-steps", "1"),
            "--integration-steps is 1; give 2",
        ),
        (("--data", "nowhere"), "nowhere"),
        (("--protocol", "double"), "--protocol is 'double'; choose from single"),
        (("--facts-per-edit", "3"), "--protocol batch"),
        (("--ray-workers", "3"), "--engine ray"),
        (("--engine", "ray", "--protocol", "sequential"), "--protocol is sequential"),
        (("--out", "/proc/a"), "--out is '/proc/a'"),
        (("--engine", "mars"), "--engine is 'mars'; choose from local, ray"),
        (("--layer", "99"), "99"),
        (("--references", "nothing.json"), "nothing.json"),
    ],
)
def test_bad_input_is_one_message(
    run: Run, model: Path, cases: Path, words: tuple[str, ...], said: str
) -> None:
    given = {"--data": str(cases), "--method": "ft", "--text-length": "0"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    done = run("evaluate", "--model", model, "--out", "a", *[w for x in given.items() for w in x])
    assert done.code == 2
    assert said in done.err
    assert not Path("a").exists()


def test_out_is_required(run: Run, model: Path) -> None:
    done = run("evaluate", "--model", model)
    assert done.code == 2
    assert "--out is required" in done.err


def test_trace_and_edit_take_data_sets_by_name(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    known = {"known_id": 0, "subject": "Oslo", "prompt": "Oslo is in", "attribute": "Norway"}
    (tmp_path / "mine" / "known_1000.json").write_text(json.dumps([known]))
    (tmp_path / "mine" / "counterfact.json").write_text(json.dumps([record(0)]))
    monkeypatch.setenv("FACTSCOPE_DATA", "mine")
    traced = run("trace", "--model", model, "--facts", "known", "--out", "traces", "--json")
    assert traced.code == 0, traced.err
    assert json.loads(traced.out)["facts"] == 1
    quick = ("--method", "ft", "--layer", 1, "--steps", 2)
    written = run("edit", "--model", model, "--facts", "counterfact", *quick, "-o", "one.edit")
    assert written.code == 0, written.err
    assert run("trace", "--model", model, "--facts", "unknown", "--out", "t").code == 2


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("zsre", "zsre"),
        ("there/zsre_eval.json.gz", "zsre"),
        ("counterfact.json", "counterfact"),
        ("my-cases.jsonl", "my-cases"),
    ],
)
def test_the_name_of_a_data_file(said: str, name: str) -> None:
    assert data_name(said) == name
