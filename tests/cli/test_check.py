"""factscope check: every item is reported, and a failing one is the exit code."""

import json
from pathlib import Path

import pytest

from factscope.cli.check import CHECKS
from factscope.editing.edit import Edit
from factscope.runs.trace import TraceRun

from commands import Run, runner


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Commands with an empty cache: the default model is not there."""
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def failed(factscope: Run) -> dict[str, str]:
    """The failed checks and their details; the exit code is 1."""
    done = factscope("check", "--device", "cpu", "--json")
    assert done.code == 1
    result = json.loads(done.out)
    assert result["ok"] is False
    assert [item["check"] for item in result["checks"]] == list(CHECKS)
    found = {item["check"]: item["detail"] for item in result["checks"] if not item["ok"]}
    assert done.err.splitlines()[-1] == f"factscope: these checks failed: {', '.join(found)}"
    assert "Traceback" not in done.err
    return found


def test_every_check_passes_without_a_download(factscope: Run, tmp_path: Path) -> None:
    done = factscope("check", "--device", "cpu")
    assert done.code == 0, done.out + done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[:2] for line in lines] == [["ok", name] for name in CHECKS]
    assert all(float(line[2]) >= 0 and line[3] == "s" for line in lines)
    assert str(tmp_path / "cache") in done.out
    assert "smollm2-135m is downloaded at first use (98 MB)" in done.out


def test_unknown_model(factscope: Run) -> None:
    done = factscope("check", "--model", "nowhere/nothing.gguf", "--json")
    assert done.code == 1
    items = {item["check"]: item for item in json.loads(done.out)["checks"]}
    assert "no model 'nowhere/nothing.gguf'" in items["model"]["detail"]
    assert items["trace"]["detail"] == "not run, since model failed"
    assert items["revert"]["detail"] == "not run, since edit failed"
    assert items["cache"]["ok"]


def test_cache_that_cannot_be_written(
    factscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factscope.cli.check.cache_folder", lambda: tmp_path / "file" / "cache")
    (tmp_path / "file").write_text("")
    assert list(failed(factscope)) == ["cache"]


def test_package_that_is_too_old(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import factscope.cli.check as module

    found = module.version
    old = {"rich": "1.0"}
    monkeypatch.setattr(module, "version", lambda name: old.get(name) or found(name))
    problems = failed(factscope)
    assert list(problems) == ["versions"]
    assert "rich is 1.0, needs >=" in problems["versions"]


def test_edit_that_is_not_reverted(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Edit, "revert", lambda edit, lm: None)
    assert failed(factscope) == {"revert": "reverting did not restore the weights"}


def test_run_that_does_not_resume(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = TraceRun.run, []

    def only_once(self: TraceRun, *args: object, **more: object) -> None:
        calls.append(self)
        if len(calls) == 1:
            run(self, *args, **more)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(TraceRun, "run", only_once)
    problems = failed(factscope)
    assert problems == {"resume": "a resumed run has other records than an uninterrupted one"}
