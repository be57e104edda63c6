"""Progress of commands: plain lines without a terminal, and counts that end at the total."""

from collections.abc import Callable

import pytest

from factscope.cli import output


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the clock of progress bars."""
    now = [0.0]
    monkeypatch.setattr(output.notes, "get_time", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_without_a_terminal_progress_is_a_plain_line_now_and_then(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.working("evaluating", 20) as done:
        done(0.25)  # five cases were done before: they do not count for the rate
        for _ in range(150):
            wait(2)
            done(0.75 / 150)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "evaluating  5/20 20.0 s each 0:00:02 left 0:04:59"
    assert lines[-1] == "evaluating 20/20 20.0 s each 0:05:00 left 0:00:00"
    assert 5 < len(lines) < 15


def test_short_work_prints_nothing_without_a_terminal(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.working("tracing") as done, output.doing("loading"):
        wait(0.9)
        done(1.0)
    assert capsys.readouterr().err == ""


def test_a_single_trace_shows_percent_and_time_left(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.working("tracing") as done:
        for _ in range(4):
            wait(1)
            done(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "tracing  50% 0:00:02 left 0:00:02"
    assert lines[-1] == "tracing 100% 0:00:04 left 0:00:00"


def test_the_count_reaches_the_total_although_fractions_are_rounded(
    wait: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with output.working("evaluating", 49) as done:
        for _ in range(49):
            wait(1)
            done(1 / 49)
    assert "evaluating 49/49" in capsys.readouterr().err
