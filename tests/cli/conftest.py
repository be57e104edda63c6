"""Fixtures for tests of commands: a tiny model in a folder, and a command runner."""

from pathlib import Path

import pytest

from commands import Run, runner, saved_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command in an empty folder, without a network; lines are not wrapped."""
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)
