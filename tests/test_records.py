"""Records: a round trip through JSON, and lines of other versions of the format."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import (
    VERSION,
    CaseRecord,
    CaseScores,
    ChangedWeight,
    EditRecord,
    Generation,
    Prediction,
    PromptChange,
    PromptScore,
    TraceRecord,
    TrainingRecord,
    read_case_records,
    read_trace_records,
    read_training_records,
    write_records,
)

FACT = Fact(subject="Ann", prompt="{} speaks", target="Thai", id="7")
SCORES = CaseScores(
    prompts={"prompt": (PromptScore(new=0.5, true=2.0, new_correct=True, true_correct=False),)},
    token_correct={"neighbour": (True, False)},
    texts=("Ann is",),
    reference_similarity=0.25,
)
CASE = CaseRecord(
    fact=FACT, true="Czech", data="counterfact", model="tiny", method="rome",
    protocol="sequential", phase="end", step=3, before=SCORES, after=SCORES,
    checks={"complaints": []},
)  # fmt: skip
PREDICTION = Prediction(new=0.9, old=0.1, top=" Thai", top_probability=0.9)
EDIT = EditRecord(
    fact=FACT, true="Czech", model="tiny", method="rome",
    changed_weights=(ChangedWeight(name="h.5.weight", shape=(4, 8), rank=1, norm=0.5),),
    prompts=(
        PromptChange(
            kind="prompt", text="Ann speaks", new="Thai", old="Czech", before=PREDICTION,
            after=PREDICTION,
        ),
    ),
    generations=(Generation(text="Ann", before=" is", after=" was"),),
    checks={"complaints": []}, settings={"layer": 5},
)  # fmt: skip
TRACE = TraceRecord(
    fact=FACT, model="tiny", tokens=("Ann", " speaks"), subject=(0, 1), answer=" Thai",
    answer_id=3, known=True, clean=0.9, corrupted=0.1, corrupted_samples=(0.1,),
    restored={"states": ((0.5, None), (0.1, 0.9))}, settings={"window": 10},
)  # fmt: skip

# The same records as version 1 wrote them.
OLD_FACT = (
    '{"subject": "Ann", "prompt": "{} speaks", "target": "Thai", "old": null, "id": "7", '
    '"relation": null}'
)
OLD_SCORES = (
    '{"prompts": {"prompt": [{"new": 0.5, "true": 2.0, "new_right": true, "true_right": false}]}, '
    '"tokens": {"neighbour": [true, false]}, "texts": ["Ann is"], "reference": 0.25}'
)
OLD_CASE = (
    f'{{"kind": "case", "fact": {OLD_FACT}, "true": "Czech", "data": "counterfact", '
    '"model": "tiny", "method": "rome", "protocol": "sequential", "moment": "end", "step": 3, '
    f'"before": {OLD_SCORES}, "after": {OLD_SCORES}, "error": null, '
    '"health": {"complaints": []}}'
)
OLD_PREDICTION = '{"new": 0.9, "old": 0.1, "top": " Thai", "top_probability": 0.9}'
OLD_EDIT = (
    f'{{"kind": "edit", "fact": {OLD_FACT}, "true": "Czech", "model": "tiny", "method": "rome", '
    '"places": [{"name": "h.5.weight", "shape": [4, 8], "rank": 1, "norm": 0.5}], '
    '"prompts": [{"kind": "prompt", "text": "Ann speaks", "new": "Thai", "old": "Czech", '
    f'"before": {OLD_PREDICTION}, "after": {OLD_PREDICTION}}}], '
    '"generations": [{"text": "Ann", "before": " is", "after": " was"}], '
    '"health": {"complaints": []}, "settings": {"layer": 5}}'
)
OLD_TRACE = (
    f'{{"fact": {OLD_FACT}, "model": "tiny", "tokens": ["Ann", " speaks"], "subject": [0, 1], '
    '"answer": " Thai", "answer_id": 3, "known": true, "clean": 0.9, "corrupted": 0.1, '
    '"corrupted_samples": [0.1], "restored": {"states": [[0.5, null], [0.1, 0.9]]}, '
    '"severed": {}, "gradients": {}, "settings": {"window": 10}}'
)


@pytest.mark.parametrize("record", [CASE, EDIT, TRACE])
def test_a_record_survives_json(record: CaseRecord | EditRecord | TraceRecord) -> None:
    line = record.to_json()
    assert type(record).from_json(line) == record
    assert json.loads(line)["version"] == VERSION


@pytest.mark.parametrize(
    ("line", "record"), [(OLD_CASE, CASE), (OLD_EDIT, EDIT), (OLD_TRACE, TRACE)]
)
def test_a_line_of_version_1_is_read(
    line: str, record: CaseRecord | EditRecord | TraceRecord
) -> None:
    assert type(record).from_json(line) == record


def test_a_line_of_a_later_version_is_refused(tmp_path: Path) -> None:
    later = json.dumps(json.loads(CASE.to_json()) | {"version": VERSION + 1})
    (tmp_path / "records.jsonl").write_text(f"{CASE.to_json()}\n{later}\n")
    with pytest.raises(BadRecord, match=r"line 2: .*format version 3.*reads versions 1 to 2"):
        list(read_case_records(tmp_path / "records.jsonl"))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(BadRecord, match=r"not a record of kind 'case' .*kind is 'edit'"):
        CaseRecord.from_json(EDIT.to_json())
    with pytest.raises(BadRecord, match=r"not a record of kind 'trace' .*kind is 'case'"):
        TraceRecord.from_json(OLD_CASE)
    with pytest.raises(BadRecord, match=r"not a record of kind 'edit' .*kind is None"):
        EditRecord.from_json(OLD_TRACE)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_not_written(value: float) -> None:
    bad = replace(SCORES, prompts={"prompt": (replace(SCORES.prompts["prompt"][0], new=value),)})
    with pytest.raises(BadRecord, match=rf"'case'.*after\.prompts\.prompt\[0\]\.new is {value}"):
        replace(CASE, after=bad).to_json()
    with pytest.raises(BadRecord, match=f"'trace'.*: corrupted is {value}"):
        replace(TRACE, corrupted=value).to_json()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"corrupted": 0.1', b'"corrupted": NaN', "corrupted is nan"),
        (b"[0.5, null]", b"[0.5, 1e999]", r"restored\.states\[0\]\[1\] is inf"),
        (b"[0.5, null]", b"[0.5, NaN]", r"restored\.states\[0\]\[1\] is nan"),
        (b'"tiny"', b'"\\ud800"', "model has a lone surrogate"),
        (b'"tiny"', b'"\xff\xfe"', "the byte 0xff is not UTF-8"),
        (b'"window": 10', b'"window": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_record_is_refused_with_its_line_and_field(
    old: bytes, new: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    line = TRACE.to_json().encode()
    assert old in line
    path.write_bytes(line + b"\n" + line.replace(old, new) + b"\n")
    with pytest.raises(BadRecord, match=rf"records\.jsonl, line 2: .*{words}"):
        list(read_trace_records(path))


def test_an_incomplete_last_line_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that still writes, or was killed, can be read."""
    path = tmp_path / "records.jsonl"
    path.write_text(CASE.to_json() + "\n" + CASE.to_json()[:40])
    assert list(read_case_records(path)) == [CASE]
    assert "the last line is incomplete" in caplog.text
    path.write_text(CASE.to_json()[:40] + "\n" + CASE.to_json())
    with pytest.raises(BadRecord, match="line 1"):
        list(read_case_records(path))


def test_a_binary_file_of_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(BadRecord, match=r"records\.jsonl, line 1: not a record of kind 'trace'"):
        list(read_trace_records(path))


def test_a_diverged_loss_is_null_in_the_file_and_nan_when_read(tmp_path: Path) -> None:
    names = (
        "seconds", "unedited_loss", "edit_loss", "rephrase_loss", "locality_loss",
        "edit_accuracy", "rephrase_accuracy", "locality_accuracy",
    )  # fmt: skip
    numbers = dict.fromkeys(names, 0.5)
    record = TrainingRecord(step=1, train_loss=None, loss=math.nan, **numbers)
    path = tmp_path / "records.jsonl"
    write_records(path, [record])
    assert '"loss": null' in path.read_text()
    assert "NaN" not in path.read_text()
    with path.open("a") as file:  # as earlier versions wrote it
        file.write(path.read_text().replace('"loss": null', '"loss": NaN'))
    for read in read_training_records(path):
        assert math.isnan(read.loss)
        assert replace(read, loss=0.0) == replace(record, loss=0.0)


def test_a_trace_is_short_in_a_terminal_and_a_heat_map_in_a_notebook() -> None:
    record = replace(
        TRACE, tokens=("<s>", "Ann"), restored={"states": ((0.2, None), (0.9, 0.45))}, clean=0.9
    )
    assert repr(record) == (
        "TraceRecord('Ann speaks' → ' Thai', tiny: P clean 0.900, corrupted 0.100; "
        "restored: states)"
    )
    page = record._repr_html_()
    assert page.count("<td") == 4
    assert [x for x in ("&lt;s&gt;", "0.22)", "1.00)", "0.50)", "0.00)") if x not in page] == []
    assert "not traced" in replace(record, restored={})._repr_html_()


def test_paths_may_be_strings(tmp_path: Path) -> None:
    write_records(str(tmp_path / "records.jsonl"), [TRACE])
    assert list(read_trace_records(str(tmp_path / "records.jsonl"))) == [TRACE]


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (TRACE, "model", None), (TRACE, "clean", "x"), (TRACE, "tokens", "The"),
        (TRACE, "subject", [0]), (TRACE, "restored", {"states": [[0.1], "x"]}),
        (TRACE, "known", 1), (EDIT, "prompts", [{"kind": "prompt"}]), (EDIT, "checks", []),
        (CASE, "protocol", "daily"), (CASE, "before", [1]), (CASE, "step", 1.5),
    ],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_refused(
    record: CaseRecord | EditRecord | TraceRecord, field: str, value: object
) -> None:
    fields = json.loads(record.to_json()) | {field: value}
    with pytest.raises(BadRecord, match=f"not a record of kind {record.KIND!r}"):
        type(record).from_json(json.dumps(fields))
