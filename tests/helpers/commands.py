"""Commands run as a user runs them, on a tiny model in a folder."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from factscope.cli.app import main

from families import tiny_model
from tokenizers_ import tokenizer


class Result(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def saved_model(folder: Path, spread: float = 0.05) -> Path:
    """A folder with a tiny GPT-2."""
    words = tokenizer("gpt2")
    tiny_model("gpt2", vocabulary=len(words), spread=spread).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def runner(
    folder: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run commands in a folder, without a network; lines are not wrapped."""
    import huggingface_hub.constants

    monkeypatch.chdir(folder)
    monkeypatch.setenv("FACTSCOPE_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["factscope", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        return Result(int(stopped.value.code or 0), shown.out, shown.err)

    return run


def reported_without_torch(folder: Path, run: str) -> str:
    """The output of a new process that reports a run into `again` without loading torch."""
    probe = (
        f"import sys; sys.argv = ['factscope', 'report', {run!r}, '--out', 'again']\n"
        "from factscope.cli.app import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=folder, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
