"""What users get with the package: version, description, shell completion, recipes."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import factscope
from factscope.cli.app import run

ROOT = Path(__file__).parents[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == factscope.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", factscope.__version__)


def test_description_on_the_package_index_has_no_relative_addresses() -> None:
    """A package index shows no image and no link whose address is relative."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    hook = settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text("utf-8")
    assert "](docs/" in text
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", text)
    assert "*A trace:" not in text  # the caption of an image that was dropped
    assert "[kmeng01/rome](https://github.com/kmeng01/rome)" in text


BASH = """
source ./script
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _factscope; echo ${{COMPREPLY[@]}}
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("factscope tr", "trace train"),
        ("factscope edit ex", "export"),
        ("factscope trace --max-m", "--max-memory"),
        ("factscope data find-known --pat", "--patterns"),
    ],
)
def test_shell_completes_commands_and_flags(
    words: str, completed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    command = ["bash", "-c", BASH.format(words=words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


@pytest.mark.parametrize("shell", ["zsh", "fish", "powershell"])
def test_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "max-memory" in script
    assert "find-known" in script


def test_recipes_and_data_are_inside_the_package() -> None:
    package = Path(factscope.__file__).parent
    assert len(list((package / "recipes").rglob("*.toml"))) > 40
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/factscope"]}  # all files of the folder, nothing else
