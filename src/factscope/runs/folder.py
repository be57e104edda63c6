"""Run folders: spec.toml (settings), info.json (versions, device, model), records.jsonl (results).

Records are appended one by one as they are computed. An interrupted run resumes: the same command
opens the folder again and computes what is missing. A lock keeps other processes out meanwhile.
"""

import html
import json
import logging
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from factscope.errors import BadInput, BadRecord, BadRunFolder
from factscope.io import (
    LOCK,
    PARTIAL,
    locked,
    parse_json,
    read_json,
    resumable_write,
    write_atomic,
)
from factscope.records import (
    CaseRecord,
    Record,
    TraceRecord,
    TrainingRecord,
    read_case_records,
    read_trace_records,
    read_training_records,
)

if TYPE_CHECKING:
    from factscope.lm.model import LM

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the run folder's format; spec.toml of version 1 has other keys."""
WEIGHTS = "weights.safetensors"
"""File with a trained editor's weights, for `--weights`."""
CHECKPOINT = "checkpoint.safetensors"
"""File from which training resumes."""
RECORDS: dict[str, tuple[type[Record], tuple[str, ...]]] = {
    "trace": (TraceRecord, ("fact",)),
    "evaluate": (CaseRecord, ("fact", "phase")),
    "train": (TrainingRecord, ("step",)),
}
"""Command → its records, and the fields that identify one."""


class RunFolder:
    """The folder of a run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.records_path = self.path / "records.jsonl"

    def __repr__(self) -> str:
        records = "no"
        if self.records_path.is_file():
            records = str(self.records_path.read_bytes().count(b"\n"))
        return f"RunFolder({str(self.path)!r}, {self.command}: {records} records)"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    @classmethod
    def create_or_open(
        cls, path: str | Path, spec: Mapping[str, Any], info: Mapping[str, Any]
    ) -> "RunFolder":
        """Create a run in a new or empty folder, or open the run with the same spec to resume."""
        import tomli_w

        spec_text = tomli_w.dumps(_without_none(spec))
        folder = cls(path)
        path = folder.path
        if path.exists() and not path.is_dir():
            raise BadRunFolder(f"{path} is a file; give a folder for the run")
        with locked(path):
            if (path / "spec.toml").is_file():
                folder._check_same_run(spec_text, info)
                folder._repair_records()
                return folder
            # A run that was killed while its folder was created leaves info.json or partial files.
            names = {file.name for file in path.iterdir()} - {"info.json", LOCK}
            if any(not name.endswith(PARTIAL) for name in names):
                raise BadRunFolder(
                    f"{path} contains other files and no run; give a new or empty folder"
                )
            info = {"format": FORMAT, **info}
            write_atomic(path / "info.json", json.dumps(info, indent=2) + "\n")
            write_atomic(path / "spec.toml", spec_text)  # last: a folder with spec.toml is a run
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open an existing run to read it."""
        if not (Path(path) / "spec.toml").is_file():
            raise BadRunFolder(
                f"{path} is not a run folder; "
                "`factscope trace`, `evaluate`, `sweep`, `calibrate` or `train` creates one"
            )
        return cls(path)

    def spec(self) -> dict[str, Any]:
        """The run's settings."""
        import tomllib

        try:
            return tomllib.loads((self.path / "spec.toml").read_text("utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRunFolder(f"{self.path / 'spec.toml'} cannot be read ({error})") from error

    @property
    def command(self) -> str:
        """The command that was run: "trace", "evaluate", "sweep" or "train"."""
        return str(self.spec().get("command", "trace"))

    def trace_records(self) -> list[TraceRecord]:
        """The traces so far."""
        return list(read_trace_records(self.records_path)) if self.records_path.is_file() else []

    def case_records(self) -> list[CaseRecord]:
        """The evaluated cases so far."""
        return list(read_case_records(self.records_path)) if self.records_path.is_file() else []

    def training_records(self) -> list[TrainingRecord]:
        """The evaluations of training so far."""
        return list(read_training_records(self.records_path)) if self.records_path.is_file() else []

    def append(self, record: Record) -> None:
        """Append a record and flush it to disk."""
        line = record.to_json() + "\n"
        path = self.records_path
        with resumable_write(path), path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _check_same_run(self, spec_text: str, info: Mapping[str, Any]) -> None:
        """Refuse a folder of another format, spec or model."""
        import difflib

        try:
            old_info = dict(read_json(self.path / "info.json"))
        except (BadInput, TypeError, ValueError) as error:
            raise BadRunFolder(f"{error}; give a new folder") from error
        if (number := old_info.get("format", 1)) != FORMAT:
            raise BadRunFolder(
                f"{self.path} has run folder format {number}, and this factscope resumes only "
                f"format {FORMAT}; give a new folder (`factscope report` still reads this one)"
            )
        old_text = (self.path / "spec.toml").read_text("utf-8", errors="replace")
        if old_text != spec_text:
            diff = difflib.unified_diff(
                old_text.splitlines(), spec_text.splitlines(), lineterm="", n=0
            )
            changes = [x for x in diff if x[:1] in "+-" and x[:3] not in ("+++", "---")]
            raise BadRunFolder(
                f"{self.path} belongs to another run; give another folder, or the same settings. "
                "In the folder (-) and given now (+):\n  " + "\n  ".join(changes)
            )
        # The same model name may mean other weights by now.
        if old_info.get("model_fingerprint") != info.get("model_fingerprint"):
            raise BadRunFolder(
                f"{self.path} was created with other weights of this model; give another folder"
            )

    def _repair_records(self) -> None:
        """Remove the records that killed processes left incomplete, and records written twice."""
        if not self.records_path.is_file():
            return
        kind, identifying = RECORDS.get(self.command, RECORDS["trace"])
        *lines, rest = self.records_path.read_bytes().split(b"\n")  # the rest has no line end
        kept: dict[Any, bytes] = {}
        incomplete, doubled = int(bool(rest)), 0
        for number, line in enumerate(lines, start=1):
            try:
                parse_json(line, allow_nan=True)
            except ValueError:
                incomplete += 1
                continue
            try:
                record = kind.from_json(line)
            except BadRecord as error:
                raise BadRunFolder(
                    f"{self.records_path}, line {number}: {error}; delete that line to "
                    f"{self.command} its fact again"
                ) from error
            key = tuple(getattr(record, name) for name in identifying)
            doubled += key in kept
            kept.setdefault(key, line + b"\n")
        if lines and not kept:
            raise BadRunFolder(f"{self.records_path} has no record; delete it to start again")
        if incomplete or doubled:
            write_atomic(self.records_path, b"".join(kept.values()))
            log.warning(
                "%s: removed %d incomplete and %d doubled records; what is missing is computed "
                "again", self.records_path, incomplete, doubled,
            )  # fmt: skip


class Run(ABC):
    """A run: what identifies it, and the folder that it writes to."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """What identifies the run, for spec.toml."""

    def create_or_open(self, lm: "LM", path: str | Path) -> RunFolder:
        """Create the run's folder, or open it to resume."""
        return RunFolder.create_or_open(path, self.spec(), run_info(lm))


def locks_folder(run: F) -> F:
    """Make a method `run(lm, folder, …)` hold the folder's lock; Ctrl-C says whether it resumes."""

    @wraps(run)
    def locked_run(self: Any, lm: "LM", folder: RunFolder, *args: Any, **more: Any) -> Any:
        with locked(folder.path):
            try:
                return run(self, lm, folder, *args, **more)
            except KeyboardInterrupt:
                # In the folder itself, or in that of a sweep's point.
                saved = [CHECKPOINT] if folder.command == "train" else ["records.jsonl", "*.edit"]
                raise KeyboardInterrupt(
                    "the same command resumes"
                    if any(path for name in saved for path in folder.path.rglob(name))
                    else "nothing was finished yet, the same command starts again"
                ) from None

    return cast("F", locked_run)


def _without_none(value: Any) -> Any:
    """The value without None, which TOML cannot represent."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(v) for v in value]
    return value


def run_info(lm: "LM") -> dict[str, Any]:
    """Content of info.json: versions, the device, the model's fingerprint."""
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
