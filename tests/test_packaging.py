"""What users get with the package: version, description, shell completion, recipes."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import factscope
from factscope.cli.app import run

ROOT = Path(__file__).parents[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == factscope.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", factscope.__version__)


def built(monkeypatch: pytest.MonkeyPatch, repository: str) -> tuple[str, dict[str, str]]:
    """The description and the addresses of a package built with FACTSCOPE_REPOSITORY."""
    monkeypatch.setenv("FACTSCOPE_REPOSITORY", repository)
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    return core.readme, core.urls


def relative_addresses(description: str) -> list[str]:
    """What a package index shows neither as an image nor as a link."""
    return re.findall(r"\]\((?!https://|#)[^)]*\)", description)


def test_without_a_repository_relative_images_and_links_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert relative_addresses((ROOT / "README.md").read_text("utf-8"))
    text, urls = built(monkeypatch, "")
    assert urls == {"Paper": "https://arxiv.org/abs/2202.05262"}
    assert not relative_addresses(text)
    assert "![" not in text
    assert "*A trace:" not in text  # the caption of an image that was dropped
    assert "[kmeng01/rome](https://github.com/kmeng01/rome)" in text
    assert "| try it in five minutes | Getting started |" in text
    assert "folder docs of the source distribution" in text


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_a_release_has_addresses_and_images(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    text, urls = built(monkeypatch, f"https://example.org/owner/factscope{end}")
    version = factscope.__version__
    files = f"https://example.org/owner/factscope/blob/v{version}"
    images = f"https://example.org/owner/factscope/raw/v{version}"
    assert urls == {
        "Paper": "https://arxiv.org/abs/2202.05262",
        "Repository": "https://example.org/owner/factscope",
        "Documentation": f"{files}/docs/index.md",
        "Changelog": f"{files}/CHANGELOG.md",
    }
    assert not relative_addresses(text)
    drawn = re.findall(r"^!\[[^\]]+\]\((.*)\)$", text, re.M)
    assert f"{images}/docs/figures/eiffel-tower.png" in drawn
    linked = re.findall(rf"\]\({re.escape(files)}/([^)#]*)", text)
    linked += [address.removeprefix(f"{images}/") for address in drawn]
    assert {"docs/start.md", "CONTRIBUTING.md", "LICENSE"} <= set(linked)
    for path in [*linked, "docs/index.md", "CHANGELOG.md"]:
        assert (ROOT / path).is_file()
    assert "*A trace:" in text
    assert "[kmeng01/rome](https://github.com/kmeng01/rome)" in text
    assert "folder docs of the source distribution" not in text


def test_an_address_without_https_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"FACTSCOPE_REPOSITORY is 'github\.com/x'; give an addr"):
        built(monkeypatch, "github.com/x")


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
