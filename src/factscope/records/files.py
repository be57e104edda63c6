"""Files of records: one a line."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from factscope.errors import BadRecord
from factscope.files import write_whole
from factscope.records.case import CaseRecord
from factscope.records.edit import EditRecord
from factscope.records.trace import TraceRecord
from factscope.records.training import TrainingRecord

__all__ = [
    "read_case_records",
    "read_edit_records",
    "read_records",
    "read_training_records",
    "write_records",
]

T = TypeVar("T")


def write_records(
    path: Path, records: Iterable[TraceRecord | EditRecord | CaseRecord | TrainingRecord]
) -> None:
    """Write the records, one a line; the file appears whole or not at all."""
    write_whole(path, "".join(r.to_json() + "\n" for r in records))


def read_records(path: Path) -> Iterator[TraceRecord]:
    """The traces of a file, in order."""
    return _read(path, TraceRecord.from_json, "factscope trace --out")


def read_edit_records(path: Path) -> Iterator[EditRecord]:
    """The edits of a file, in order."""
    return _read(path, EditRecord.from_json, "factscope edit --json")


def read_case_records(path: Path) -> Iterator[CaseRecord]:
    """The evaluated cases of a file, in order."""
    return _read(path, CaseRecord.from_json, "factscope evaluate --out")


def read_training_records(path: Path) -> Iterator[TrainingRecord]:
    """How a training went, in order."""
    return _read(path, TrainingRecord.from_json, "factscope train --out")


def _read(path: Path, from_json: Callable[[str], T], maker: str) -> Iterator[T]:
    if not path.is_file():
        raise BadRecord(f"no records at {path}; `{maker}` writes them")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(line)
            except BadRecord as error:
                raise BadRecord(f"{path}, line {number}: {error}") from error
