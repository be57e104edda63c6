"""Progress callbacks: the parts of nested work add up to one."""

import sys
from types import ModuleType

import pytest
import tqdm

from factscope.progress import NestedProgress, no_progress, shown, split


def test_parts_add_up_in_proportion_to_their_weights() -> None:
    reports: list[float] = []
    first, second, third = split(reports.append, [1, 3, 0])
    first(0.5)
    second(1.0)  # also completes the first part
    third(1.0)
    assert reports == pytest.approx([0.125, 0.875])


def test_a_part_reports_no_more_than_its_own_work() -> None:
    reports: list[float] = []
    part = NestedProgress(reports.append).within(0.25, 0.5)
    part(0.75)
    part(1.0)  # completes it
    part(1.0)
    assert sum(reports) == pytest.approx(0.75)


def test_a_notebook_shows_a_bar_unless_a_callback_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tqdm.tqdm] = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options: object) -> None:
            super().__init__(**options, disable=False)  # pyright: ignore
            bars.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with shown(None) as progress:
        assert progress is no_progress
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    reports: list[float] = []
    with shown(reports.append) as progress:
        progress(1.0)
    assert (reports, bars) == ([1.0], [])
    with shown(None) as progress:
        progress(0.25)
        progress(0.5)
    assert [bar.n for bar in bars] == [0.75]
