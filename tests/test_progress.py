"""Progress callbacks: the parts of nested work add up to one."""

import pytest

from factscope.progress import NestedProgress, split


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
