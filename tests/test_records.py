"""Records: a round trip through JSON, and lines of other versions of the format."""

import json
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
    read_case_records,
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
