"""The report of a training run: table, page and figure."""

import json
import math

import numpy as np
import pytest

from factscope.errors import BadRecord
from factscope.records import TrainingRecord
from factscope.report.training import (
    TrainingCurve,
    training_figure,
    training_page,
    training_table,
    training_to_dict,
)

SPEC = {"model": "m", "source": {"data": "zsre"}, "training": {"method": "ke", "lr": 0.25}}


def evaluation(step: int, loss: float) -> TrainingRecord:
    return TrainingRecord(
        step=step, seconds=6.0 * step, train_loss=None, loss=loss, unedited_loss=9.0,
        edit_loss=loss, rephrase_loss=2 * loss, locality_loss=0.0, edit_accuracy=1 - loss / 10,
        rephrase_accuracy=0.5, locality_accuracy=0.75,
    )  # fmt: skip


def test_the_best_evaluation_is_marked() -> None:
    losses = (math.nan, 4.0, 2.5, 3.0, 2.5)
    curve = TrainingCurve.of(SPEC, [evaluation(12_345 * i, x) for i, x in enumerate(losses)])
    assert curve.best.step == 24_690
    rows = training_table(curve).rows
    assert [{getattr(cell, "mark", None) for cell in row} for row in rows] == [
        {None}, {None}, {"best"}, {None}, {None},
    ]  # fmt: skip
    assert list(map(str, rows[2])) == ["24690", "2469", "2.5", "75.0", "50.0", "75.0", "0"]
    page = training_page(curve)
    for text in ("KE trained on zsRE, m, 49380 steps", '<td class="number best">2.5</td>',
                 "<dt>best step</dt><dd>24690</dd>", "<td>training.lr</td>"):  # fmt: skip
        assert text in page
    values = json.loads(json.dumps(training_to_dict(curve), allow_nan=False))
    assert (values["best"]["step"], values["evaluations"][0]["loss"]) == (24_690, None)


def test_the_figure_shows_every_evaluation_and_the_best_step() -> None:
    losses = (4.0, 2.5, 3.0)
    curve = TrainingCurve.of(SPEC, [evaluation(10 * i, loss) for i, loss in enumerate(losses)])
    left, right = training_figure(curve).axes
    drawn = [
        {x.get_label(): np.array(x.get_data()) for x in ax.get_lines()} for ax in (left, right)
    ]
    assert drawn[0]["rephrase"][1].tolist() == [8.0, 5.0, 6.0]
    assert drawn[1]["edit"][1].tolist() == pytest.approx([0.6, 0.75, 0.7])
    for lines in drawn:
        assert lines["best step"][0].tolist() == [10, 10]


def test_a_spec_without_its_source_is_an_error() -> None:
    with pytest.raises(BadRecord, match="no 'source'"):
        TrainingCurve.of({"model": "m"}, [evaluation(0, 1.0)])
