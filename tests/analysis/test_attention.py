"""Average effects of heads and of attention knockout, against numbers computed by hand."""

import numpy as np
import pytest

from factscope.analysis.attention import (
    average_heads,
    average_knockout,
    head_effects,
    knockout_changes,
)
from factscope.errors import BadRecord

from trace_records import trace


def heads(*last: tuple[float, ...]) -> tuple:
    """Tables of heads: the last token has the given values, the other tokens the corrupted one."""
    return tuple(((0.1,) * len(row),) * 5 + (row,) for row in last)


def test_heads_are_averaged_over_facts():
    first, second = (
        trace(heads=heads((0.1, 0.3), (0.5, 0.1))),
        trace(heads=heads((0.3, 0.3), (0.7, 0.1))),
    )
    assert head_effects(first)[1, 5] == pytest.approx([0.4, 0.0])
    average = average_heads([first, second, trace(known=False)])
    assert average.facts == 2
    assert average.mean == pytest.approx(np.array([[0.1, 0.2], [0.5, 0.0]]))
    assert average[1, 0].half_width == pytest.approx(1.96 * 0.1)
    assert average.strongest(2) == [(1, 0), (0, 1)]
    assert average_heads([first], "last subject token").mean == pytest.approx(0.0, abs=1e-12)


def test_effects_of_heads_follow_the_metric_and_the_direction():
    values = {"metric": "kl", "clean_metric": 0.0, "corrupted_metric": 2.0}
    record = trace(heads=heads((0.5, 2.0)), **values)
    assert head_effects(record)[0, 5] == pytest.approx([1.5, 0.0])
    noised = trace(heads=heads((0.5, 2.0)), **values, settings={"direction": "corrupt"})
    assert head_effects(noised)[0, 5] == pytest.approx([0.5, 2.0])


def test_knockout_changes_a_probability_by_a_fraction_of_its_clean_value():
    record = trace(clean=0.5, knockout={"subject": (0.5, 0.1), "last": (0.6, 0.5)})
    changes = knockout_changes(record)
    assert changes["subject"] == pytest.approx([0.0, -0.8])
    assert changes["last"] == pytest.approx([0.2, 0.0])


def test_knockout_is_averaged_over_the_facts_that_have_the_group():
    first = trace(clean=0.5, knockout={"subject": (0.5, 0.1), "relation": (0.25, 0.5)})
    second = trace(clean=0.4, knockout={"subject": (0.2, 0.4)})
    average = average_knockout([first, second])
    assert average.changes["subject"].mean == pytest.approx([-0.25, -0.4])
    assert average.changes["subject"].half_width == pytest.approx([1.96 * 0.25, 1.96 * 0.4])
    assert average.changes["relation"].n.tolist() == [1, 1]
    assert average.changes["subject"][1].text == "-40.0 ± 78.4 %"


def test_knockout_changes_other_metrics_by_a_difference():
    record = trace(metric="logit-difference", clean_metric=4.0, knockout={"subject": (3.0, -1.0)})
    assert knockout_changes(record)["subject"] == pytest.approx([-1.0, -5.0])
    assert "%" not in average_knockout([record, record]).changes["subject"][0].text


def test_traces_without_heads_or_knockout_are_refused():
    with pytest.raises(BadRecord, match="--heads"):
        average_heads([trace()])
    with pytest.raises(BadRecord, match="--knockout"):
        average_knockout([trace()])
    with pytest.raises(BadRecord, match="numbers of heads"):
        average_heads([trace(heads=heads((0.1, 0.2))), trace(heads=heads((0.1,)))])
