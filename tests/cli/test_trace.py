"""factscope trace: prompts as users type them, answers, edits and chat templates."""

import json
from pathlib import Path

import pytest

from commands import Run, runner, saved_model

CITY = "The Eiffel Tower is located in the city of"
TOWER = "The Eiffel Tower"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command in an empty folder, without a network."""
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.fixture
def trace(factscope: Run, model: Path) -> Run:
    """`factscope trace --json` of the tower's city, with few samples."""
    quick = ("--kinds", "states", "--samples", 2, "--device", "cpu", "--json", "-m", model)
    return lambda text, *words: factscope("trace", text, "--subject", TOWER, *words, *quick)


def test_a_space_at_the_end_of_the_prompt_is_removed_with_a_note(trace: Run) -> None:
    spaced, plain = trace(CITY + " "), trace(CITY)
    assert json.loads(spaced.out) == json.loads(plain.out)
    assert f"space at the end of the prompt is removed: {CITY!r}" in spaced.err
    assert "removed" not in plain.err


def test_invalid_utf8_in_a_prompt_is_refused(trace: Run) -> None:
    result = trace(f"{TOWER} of \udce9 is in")  # how Python decodes the byte E9 in arguments
    assert result.code == 2
    assert "not valid Unicode" in result.err
    assert "Traceback" not in result.err
