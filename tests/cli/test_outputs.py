"""Output paths that cannot be written are refused before the model is loaded."""

import shlex
from pathlib import Path

import pytest
import torch

from factscope.cli.flags import ModelOptions
from factscope.editing.edit import Edit, LowRank
from factscope.stats.second_moment import save_second_moment
from second_moments import second_moment

from commands import Run, runner
from edits import FACT

FACTS = '{"subject": "Ann", "prompt": "Ann speaks", "attribute": "Thai"}\n'
RECIPE = """
title = "One trace"
[[run]]
name = "trace"
command = "trace"
prompt = "Ann speaks"
subject = "Ann"
"""

PROMPT = '"Ann speaks" --subject Ann'
FILES = {
    f"trace {PROMPT} --out": ".png",
    f"trace {PROMPT} -o": ".html",
    f"edit {PROMPT} --to Thai -o": ".edit",
    f"edit {PROMPT} --to Thai --page": ".html",
    f"edit {PROMPT} --to Thai --figure": ".svg",
    "edit merge a.edit -o": ".edit",
    "stats --layers 1 --text text.txt --out": ".safetensors",
    "stats --layers 1 --text text.txt --figure": ".pdf",
    "stats show c.safetensors --figure": ".pdf",
    "stats merge c.safetensors -o": ".safetensors",
}
"""Command → suffix of the file that it writes."""
FOLDERS = (
    "demo --out", "trace --facts facts.jsonl --out", "edit export a.edit --peft",
    "edit export a.edit --checkpoint", "edit merge a.edit -o", "evaluate --data everyday --out",
    "sweep --data everyday --grid layer=0-1 --out", "train mend --out",
    "stats --layers 1-2 --text text.txt --out", "recipe recipe.toml --out",
    "calibrate --data everyday --out",
)  # fmt: skip
"""Commands that write a folder."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Commands in a folder with all inputs, a file and a loop of links; none may load a model."""

    def load(self: ModelOptions, device: str | None = None) -> None:
        raise AssertionError("the model is loaded before the output path is checked")

    monkeypatch.setattr(ModelOptions, "load", load)
    (tmp_path / "facts.jsonl").write_text(FACTS)
    (tmp_path / "text.txt").write_text("A text.\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder.png", "folder.edit"):
        (tmp_path / name).mkdir()
    changes = {"w": LowRank(torch.ones(4, 1), torch.ones(1, 4))}
    Edit(changes=changes, model="m", fingerprint="f", method="rome", facts=(FACT,)).save(
        tmp_path / "a.edit"
    )
    save_second_moment(second_moment(), tmp_path / "c.safetensors")
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.mark.parametrize(("command", "suffix"), [*FILES.items(), *((x, "") for x in FOLDERS)])
def test_an_output_that_cannot_be_written(
    run: Run, command: str, suffix: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    for place in ("/proc/x", "/sys/x", "file/x", "loop/x"):
        done = run(*shlex.split(command), place + suffix)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("factscope: ")
        assert repr(place + suffix) in done.err
        assert done.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        *(f"{command} {place}" for command in FOLDERS for place in ("file", "loop")),
        f"trace {PROMPT} -o folder.png",
        f"edit {PROMPT} --to Thai -o folder.edit",
        f"edit {PROMPT} --to Thai -o text.txt",
        f"edit {PROMPT} --to Thai --figure folder.png",
    ],
)
def test_a_path_of_the_wrong_kind(run: Run, command: str) -> None:
    done = run(*shlex.split(command))
    assert (done.code, done.out) == (2, "")
    assert command.split()[-1] in done.err
    assert done.err.count("\n") == 1
