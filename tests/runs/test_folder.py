"""Run folders: tied to their spec and to the model's weights."""

from pathlib import Path

import pytest

from factscope.errors import BadRunFolder
from factscope.runs.folder import RunFolder


def test_a_folder_is_tied_to_its_spec_and_to_the_weights(tmp_path: Path) -> None:
    spec, info = {"model": "m", "limit": None}, {"model_fingerprint": "abc"}
    RunFolder.create_or_open(tmp_path / "run", spec, info)
    RunFolder.create_or_open(tmp_path / "run", spec, info)
    with pytest.raises(BadRunFolder, match="other weights"):
        RunFolder.create_or_open(tmp_path / "run", spec, {"model_fingerprint": "def"})
    with pytest.raises(BadRunFolder, match="limit = 3"):
        RunFolder.create_or_open(tmp_path / "run", {"model": "m", "limit": 3}, info)


def test_a_run_killed_while_its_folder_was_created_starts_again(tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "spec.toml.partial").write_text("mod")
    RunFolder.create_or_open(tmp_path, {"model": "m"}, {})
    assert RunFolder.open(tmp_path).trace_records() == []
