"""Pages of edits, and records of edits."""

import subprocess
import sys
from pathlib import Path

import pytest

from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import (
    EditRecord,
    TraceRecord,
    read_edit_records,
    read_trace_records,
    write_records,
)
from factscope.report.edits import edit_page, trace_and_edit_page

from edit_records import CHECKS, ODD, odd, record
from pages import check_escaped, check_self_contained, check_well_formed

# ---- records


@pytest.mark.parametrize("made", [record(), odd(), odd(None), record(checks={}, generations=())])
def test_edit_record_round_trips_through_json(made: EditRecord) -> None:
    line = made.to_json()
    assert "\n" not in line
    assert '"kind": "edit"' in line
    assert EditRecord.from_json(line) == made


def test_edit_records_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    write_records(path, [record(), record(method="memit")])
    assert [r.method for r in read_edit_records(path)] == ["rome", "memit"]
    with pytest.raises(BadRecord, match="line 1: not a record of kind 'trace'"):
        list(read_trace_records(path))
    path.write_text('{"fact": 1}\n')
    with pytest.raises(BadRecord, match="not a record of kind 'edit'"):
        list(read_edit_records(path))
    with pytest.raises(BadRecord, match="no records at"):
        list(read_edit_records(tmp_path / "lost.jsonl"))


@pytest.mark.parametrize("line", ["", "[]", '{"kind": "edit"}', '{"kind": "edit", "fact": {}}'])
def test_invalid_edit_records_are_rejected(line: str) -> None:
    with pytest.raises(BadRecord, match="not a record of kind 'edit'"):
        EditRecord.from_json(line)


# ---- pages


def check_page(page: str) -> None:
    """The page is self-contained, and no text became markup."""
    check_self_contained(page)
    check_escaped(page)
    check_well_formed(page)


def test_edit_page_is_self_contained_and_escaped() -> None:
    assert "The edit" not in edit_page(record())
    page = edit_page(record(checks=CHECKS | {"verdict": "took"}))
    assert "The edit took." in page
    check_page(page)
    assert '<span class="old">Paris</span> <mark>Rome</mark>' in page
    assert 'in <mark class="was">Paris</mark> is' in page
    assert "in <mark>Rome</mark> is" in page
    assert "1.0% → 98.0%" in page
    assert "at least 0.02" in page
    assert "search.steps" in page
    check_page(edit_page(odd()))
    check_page(edit_page(odd(None)))
    assert "not measured" in edit_page(record(checks={}, generations=()))


def test_trace_and_edit_on_one_page() -> None:
    traced = TraceRecord(
        fact=Fact(subject=ODD, prompt="{} is in", target="Paris"), model="tiny", tokens=(ODD, "is"),
        subject=(0, 1), answer=" Paris", answer_id=1, known=True, clean=0.7, corrupted=0.1,
        corrupted_samples=(0.1,), restored={"states": ((0.1, 0.2), (0.3, 0.4))},
    )  # fmt: skip
    page = trace_and_edit_page(traced, odd())
    check_page(page)
    assert page.index("Impact of restoring") < page.index("Edit checks")


def test_edit_report_does_not_import_torch(tmp_path: Path) -> None:
    probe = (
        "import sys, factscope.report.edits, factscope.report.terminal; "
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
