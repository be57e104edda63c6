"""Progress callbacks: the parts of nested work add up to one."""

import sys
from types import ModuleType

import pytest
import tqdm

from factscope.editing.settings import FineTune
from factscope.progress import NestedProgress, no_progress, shown, split
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import find_known, trace, trace_many

from editing_facts import FACTS, text_lm


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


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[tqdm.tqdm]:
    """The progress bars that are shown, as in a notebook."""
    made: list[tqdm.tqdm] = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options: object) -> None:
            super().__init__(**options, disable=False)  # pyright: ignore
            made.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    return made


def test_a_notebook_shows_a_bar_unless_a_callback_is_given(
    bars: list[tqdm.tqdm], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[float] = []
    with shown(reports.append) as progress:
        progress(1.0)
    assert (reports, bars) == ([1.0], [])
    with shown(None) as progress:
        progress(0.25)
        progress(0.5)
    assert [bar.n for bar in bars] == [0.75]
    monkeypatch.delitem(sys.modules, "ipykernel")
    with shown(None) as progress:
        assert progress is no_progress


def test_traces_and_edits_show_a_bar_in_a_notebook(bars: list[tqdm.tqdm]) -> None:
    lm, tracing = text_lm("gpt2"), Tracing(kinds=("states",), corruption=Corruption(samples=1))
    tune = FineTune(layer=1, steps=2, lr=1e-3)
    trace(lm, FACTS[0], tracing)
    list(trace_many(lm, FACTS[:1], tracing))
    list(find_known(lm, FACTS[:1], max_new_tokens=2))
    tune(lm, FACTS[:1])
    tune.each(lm, FACTS[:1])
    assert [round(bar.n, 6) for bar in bars] == [1.0] * 5
