"""A run's folder: spec.toml says what was asked, info.json by what it was made, records.jsonl holds
the results, one a line, appended as they come. A killed run goes on where it stopped.

By what a run was made: versions, the device, the model's fingerprint.
"""

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from factscope.errors import BadRecord, BadRunFolder, RunInterrupted
from factscope.io import PARTIAL, write_atomic
from factscope.lm.model import LM
from factscope.records import (
    CaseRecord,
    TraceRecord,
    TrainingRecord,
    read_case_records,
    read_records,
    read_training_records,
)

__all__ = [
    "WEIGHTS",
    "Record",
    "RunFolder",
    "run_info",
]

WEIGHTS = "weights.safetensors"
"""What training leaves in its folder for `--weights`."""


@runtime_checkable
class Record(Protocol):
    """What a run writes down."""

    def to_json(self) -> str:
        """The record as one line of JSON."""
        ...


class RunFolder:
    """An open run: what is done already, and where the next record goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records_path = path / "records.jsonl"

    @classmethod
    def begin(cls, path: Path, spec: Mapping[str, Any], info: Mapping[str, Any]) -> "RunFolder":
        """Start a run in a new or empty folder, or take up the one that has the same spec."""
        import tomli_w

        wanted = tomli_w.dumps(_without_none(spec))
        folder = cls(path)
        if path.exists() and not path.is_dir():
            raise BadRunFolder(f"{path} is a file; give a folder for the run")
        if (path / "spec.toml").is_file():
            folder._must_match(wanted)
            folder._must_be_same_model(info)
            folder._drop_broken_line()
            return folder
        if path.is_dir() and any(not _unfinished(file) for file in path.iterdir()):
            raise BadRunFolder(f"{path} holds other files and no run; give a new or empty folder")
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / "info.json", json.dumps(info, indent=2) + "\n")
        write_atomic(path / "spec.toml", wanted)  # last: with it the folder is a run
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run, to read."""
        if not (path / "spec.toml").is_file():
            raise BadRunFolder(
                f"{path} is not a run's folder; "
                "`factscope trace`, `evaluate`, `sweep` or `train` with --out makes one"
            )
        return cls(path)

    def spec(self) -> dict[str, Any]:
        """What was asked for."""
        import tomllib

        try:
            return tomllib.loads((self.path / "spec.toml").read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadRunFolder(f"{self.path / 'spec.toml'} cannot be read ({error})") from error

    @property
    def command(self) -> str:
        """What was run: "trace", "evaluate", "sweep" or "train"."""
        return str(self.spec().get("command", "trace"))

    def records(self) -> list[TraceRecord]:
        """The traces that are done."""
        return list(read_records(self.records_path)) if self.records_path.is_file() else []

    def case_records(self) -> list[CaseRecord]:
        """The evaluated cases that are done."""
        return list(read_case_records(self.records_path)) if self.records_path.is_file() else []

    def training_records(self) -> list[TrainingRecord]:
        """What training wrote down so far."""
        return list(read_training_records(self.records_path)) if self.records_path.is_file() else []

    def append(self, record: Record) -> None:
        """Add a record; when this returns it is on the disk."""
        try:
            with self.records_path.open("a", encoding="utf-8") as file:
                file.write(record.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunInterrupted(
                f"cannot write to {self.records_path} ({error.strerror or error}); make room, and "
                "the same command goes on from here"
            ) from error

    def _must_match(self, wanted: str) -> None:
        import difflib

        there = (self.path / "spec.toml").read_text("utf-8")
        if there != wanted:
            lines = difflib.unified_diff(
                there.splitlines(), wanted.splitlines(), "there", "asked", lineterm="", n=0
            )
            changes = [x for x in lines if x[:1] in "+-" and x[:3] not in ("+++", "---")]
            raise BadRunFolder(
                f"{self.path} belongs to another run; give another folder, or the same settings. "
                "There (-) and asked for (+):\n  " + "\n  ".join(changes)
            )

    def _must_be_same_model(self, info: Mapping[str, Any]) -> None:
        """The same name may stand for other weights by now."""
        there = json.loads((self.path / "info.json").read_text("utf-8")).get("model_fingerprint")
        if there != info.get("model_fingerprint"):
            raise BadRunFolder(
                f"{self.path} was made with other weights of the same name; give another folder"
            )

    def _drop_broken_line(self) -> None:
        """Cut off a last line that a kill left half-written."""
        if not self.records_path.is_file():
            return
        data = self.records_path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(self.records_path, end)
        if end == 0 and data:
            return
        try:
            {"evaluate": self.case_records, "train": self.training_records}.get(
                self.command, self.records
            )()
        except BadRecord as error:
            raise BadRunFolder(
                f"{error}; delete that line to {self.command} its fact again"
            ) from error


def _without_none(value: Any) -> Any:
    """TOML has no null: what is not set is not written."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def _unfinished(file: Path) -> bool:
    """What a run that was killed at its very beginning leaves."""
    return file.name == "info.json" or file.name.endswith(PARTIAL)


def run_info(lm: LM) -> dict[str, Any]:
    """What a run's info.json says."""
    return {
        "factscope": _version("factscope"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "device": lm.device.type,
        "model_fingerprint": lm.fingerprint,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
