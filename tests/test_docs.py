"""The documentation: pages without a warning, commands up to date, links that lead somewhere."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)")


def tool(name: str) -> ModuleType:
    """A script of docs/tools."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_commands_is_up_to_date() -> None:
    there = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert there == tool("commands").reference(), "run `make commands`"


def test_the_reference_has_every_command_and_flag() -> None:
    text = tool("commands").reference()
    for words in ("trace", "edit write", "edit export", "study build", "data get"):
        assert f"\n## factscope {words}\n" in text
    assert "| `--num-cases N` | Number of cases, drawn at random. | `50` |" in text
    assert "| `--key PATH`, `-k` |" in text
    assert "factscope study build RUN_A RUN_B [FLAGS]" in text
    assert "factscope study report ANSWERS… [FLAGS]" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_ask_nobody_else_for_anything(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text("utf-8")
        assert not re.search(r'<(script|img|iframe)[^>]* src="?(https?:)?//', text), page
        assert not re.search(r'<link[^>]* rel="?stylesheet"?[^>]* href="?(https?:)?//', text), page


def test_formulas_are_set(site: Path) -> None:
    text = (site / "method.html").read_text("utf-8")
    assert text.count("<math") > 40
    assert "arithmatex" not in text
    assert "\\frac" not in text


def test_a_formula_that_cannot_be_read_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Page:
        class file:
            src_path = "some.md"

    hook = tool("mathml").on_page_content
    good = hook('<span class="arithmatex">\\(a &lt; b\\)</span>', Page)
    assert good.startswith("<math")
    assert "&lt;" in good or "&#x0003C;" in good
    assert not caplog.records
    hook('<div class="arithmatex">\\[\\left( a\\]</div>', Page)
    assert "cannot read the formula" in caplog.text


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(name: str) -> None:
    """Those within docs/ are looked at when the pages are built."""
    for path, anchor in LINK.findall((ROOT / name).read_text("utf-8")):
        if path.startswith("http"):
            continue
        target = ROOT / path
        assert target.exists(), f"{name}: {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{name}: {path}#{anchor}"
