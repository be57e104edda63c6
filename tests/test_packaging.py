"""What users get from the package index: version, description, recipes."""

import re
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
