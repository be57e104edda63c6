"""The documentation: its examples run, its pages build, its reference is up to date.

Every `python` and `sh` block of README.md and docs/ is run, page by page, in the order of the page
and in one folder, so that a block can use the files of earlier ones. A Python block is complete on
its own, except on the pages adding-*. Models of any name are a tiny random one. A `json` block
with title="NAME" is the content of that file. A block that cannot run here (it needs a GPU, the
network or hours, or never returns) is marked: "```sh no-run".
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from factscope.editing.edit import EditChecks
from factscope.editing.settings import EDITORS
from factscope.lm.families import FAMILIES

import families
from commands import runner
from tokenizers_ import TEXT, tokenizer

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#([^)\s]+))?\)")

# ---- the blocks of all pages

FENCE = re.compile(r"^( *)```(\w+)?(?: (\S+))?$\n(.*?)^ *```$", re.M | re.S)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LAYERS = 12
"""More than any example names, and less than the default model's 30."""
SHORTER = {
    r"--limit \d+": "--limit 1",
    r"--minutes \d+(?![\d.])": "--steps 2",
    r"(factscope calibrate) (?=--minutes)": r"\1 --methods rome ",
    r"--tokens [\d_]+": "--tokens 2000",
    r"--grid layer=\S+": "--grid layer=5",
    r"--text-length [1-9]\d*": "",
    r"(factscope evaluate) (?!.*--text-length)": r"\1 --text-length 16 ",
    r"(factscope trace) (?!.*--samples)": r"\1 --samples 2 ",
    "The Colosseum": "The Tower Eiffel",  # as many tokens as The Eiffel Tower in any tokenizer
}
"""Changes to shell commands that make them fast: fewer cases, steps, tokens and so on."""


class Block(NamedTuple):
    """A fenced block of code."""

    page: Path
    line: int
    language: str
    marker: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The Python and shell blocks of a page, and those with the content of a file."""
    text = page.read_text("utf-8")
    found = []
    for fence in FENCE.finditer(text):
        indent, language, marker, code = fence.groups(default="")
        code = re.sub(rf"^{indent}", "", code, flags=re.M)
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(page, line, language, marker, code))
    return [x for x in found if x.language in ("python", "sh") or x.marker.startswith("title=")]


BLOCKS = {page: blocks_of(page) for page in PAGES}


def commands_of(code: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, shortened and without a redirection."""
    for line in code.replace("\\\n", " ").splitlines():
        for long, short in SHORTER.items():
            line = re.sub(long, short, line)
        if words := shlex.split(line, comments=True):
            yield words[: words.index(">")] if ">" in words else words


def test_every_block_is_run_or_marked():
    languages = set(re.findall(r"^ *```(\w+)", "".join(map(Path.read_text, PAGES)), re.M))
    assert languages <= {"python", "sh", "bibtex", "json", "toml", "text"}
    everything = [block for blocks in BLOCKS.values() for block in blocks]
    for block in everything:
        assert re.fullmatch(r'(no-run)?|title="[\w.-]+"', block.marker), block
        if block.language == "sh" and not block.marker:
            other = [words for words in commands_of(block.code) if words[0] != "factscope"]
            assert not other, f"{block}: mark the block no-run, or leave out {other}"
    not_run = Counter(block.page.name for block in everything if block.marker == "no-run")
    assert not_run == NOT_RUN, "update NOT_RUN if these blocks cannot run"


NOT_RUN = {
    "README.md": 1,  # pip
    "benchmarks.md": 9,  # bench/, mostly on a GPU
    "data.md": 1,  # downloads
    "editing.md": 1,  # a data set from the hub
    "evaluating.md": 4,  # Ray, answers of people, whole recipes
    "paper.md": 22,  # the paper's models and data
    "results.md": 16,  # hours on a GPU
    "serve.md": 2,  # a server does not return
    "start.md": 2,  # pip, files of the shell
    "tracing.md": 2,  # names to replace, data sets
}
"""Blocks that are marked no-run, by page."""


# ---- running them


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its statistics (in a cache), and the data of the examples."""
    from factscope.cli.app import run
    from factscope.data.readers import EVERYDAY_CASES

    root = tmp_path_factory.mktemp("docs")
    words = tokenizer("gpt2")
    (root / "text.txt").write_text("\n\n".join([TEXT] * 20))
    words.save_pretrained(root / "model")
    with pytest.MonkeyPatch.context() as patch:
        kind, settings = families.FAMILIES["llama"]
        deep = settings | {"num_hidden_layers": LAYERS, "max_position_embeddings": 256}
        patch.setitem(families.FAMILIES, "deep llama", (kind, deep))
        model = families.tiny_model("deep llama", vocabulary=len(words), spread=0.4)
        model.save_pretrained(root / "model")
        patch.setenv("FACTSCOPE_CACHE", str(root / "cache"))
        model, text = root / "model", root / "text.txt"
        given = f"stats --model {model} --layers 0-{LAYERS - 1} --tokens 4000 --text {text}"
        assert run(given.split()) == 0
    data = root / "data"
    data.mkdir()
    cases = [json.loads(line) for line in EVERYDAY_CASES.read_text("utf-8").splitlines()]
    for name, some in {"counterfact": cases[:10], "counterfact-train": cases[10:]}.items():
        (data / f"{name}.json").write_text(json.dumps(some))
    return root


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run a page in: any model name is the tiny model, and example data is there."""
    import factscope.lm.load

    named = factscope.lm.load.model_folder

    def model_folder(name: str | Path, *, check: bool = True) -> Path | None:
        return named(name, check=check) if Path(name).is_dir() else prepared / "model"

    monkeypatch.setattr(factscope.lm.load, "model_folder", model_folder)
    monkeypatch.setenv("FACTSCOPE_DATA", str(prepared / "data"))
    # Each figure is drawn once; files in further formats are dummies.
    savefig, drawn = Figure.savefig, weakref.WeakSet[Figure]()

    def draw_once(figure: Figure, file: Any, **options: Any) -> None:
        if figure in drawn:
            file.write(b"figure")
        else:
            drawn.add(figure)
            savefig(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", draw_once)
    # An edit that suits a trained model breaks a random one.
    monkeypatch.setattr(EditChecks, "raise_if_unsafe", lambda checks: None)
    mpl.rcParams["figure.max_open_warning"] = 0
    facts = [{"subject": name, "prompt": "{} is in"} for name in ("Rome", "Oslo", "Lima")]
    # Without targets: a random model knows no fact, but it always has an answer.
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    (tmp_path / "text.txt").symlink_to(prepared / "text.txt")
    editors, known_families = dict(EDITORS), dict(FAMILIES)
    yield tmp_path
    for table, entries in ((EDITORS, editors), (FAMILIES, known_families)):
        for added in set(table) - set(entries):  # by the pages on adding one
            del table[added]


def module_of(page: Path, folder: Path) -> ModuleType:
    """A module for the Python blocks of a page; in its file they have the lines of the page."""
    path = folder / f"{page.stem.replace('-', '_').lower()}_page.py"
    lines = [""] * len(page.read_text("utf-8").splitlines())
    for block in BLOCKS[page]:
        if block.language == "python":
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    path.write_text("\n".join(lines))
    module = ModuleType(path.stem)
    module.__file__ = str(path)  # where dataclasses find the help texts of their fields
    sys.modules[path.stem] = module
    return module


def run_python(block: Block, module: ModuleType) -> None:
    """Run a block in the module of its page."""
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, module.__file__ or "", "exec"), vars(module))


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCKS[p]], ids=lambda page: page.stem)
def test_examples_run(
    page: Path,
    folder: Path,
    prepared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    factscope = runner(folder, prepared / "cache", monkeypatch, capsys)
    module = module_of(page, folder)
    for block in BLOCKS[page]:
        if block.marker == "no-run":
            continue
        if block.marker:
            file = folder / block.marker.split('"')[1]
            if not file.exists():
                file.write_text(block.code)
        elif block.language == "python":
            if not page.stem.startswith("adding-"):  # these build one module step by step
                module = module_of(page, folder)
            try:
                run_python(block, module)
            except Exception as error:
                pytest.fail(f"{block}: {type(error).__name__}: {error}")
        else:
            for words in commands_of(block.code):
                done = factscope(*words[1:])
                assert done.code == 0, f"{block}: {shlex.join(words)}\n{done.err}"


def test_commands_in_other_blocks_have_valid_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from factscope.cli.app import run
    from factscope.cli.flags import Command

    monkeypatch.setattr(Command, "__call__", lambda command, given: command.options(given))
    for block in (x for blocks in BLOCKS.values() for x in blocks):
        if block.marker == "no-run" and block.language == "sh":
            for words in commands_of(block.code):
                code = run(words[1:]) if words[0] == "factscope" else 0
                message = capsys.readouterr().err
                missing_file = re.search("does not exist|there is no file", message)
                assert code == 0 or missing_file, f"{block}: {shlex.join(words)}\n{message}"


# ---- the reference and the pages


def tool(name: str) -> ModuleType:
    """A script of docs/tools."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_reference_is_up_to_date():
    written = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert written == tool("commands").reference(), "run `make commands`"


def test_command_reference_has_commands_arguments_and_flags():
    text = tool("commands").reference()
    for words in ("trace", "edit write", "edit export", "study build", "data get"):
        assert f"\n## factscope {words}\n" in text
    assert "| `--num-cases N` | Number of cases, drawn at random. | `50` |" in text
    assert "| `--key-file PATH`, `-k` |" in text
    assert "factscope study build RUN_A RUN_B [FLAGS]" in text
    assert "factscope study report ANSWERS… [FLAGS]" in text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The website, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_website_loads_nothing_from_other_hosts(site: Path):
    pages = list(site.glob("*.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text("utf-8")
        assert not re.search(r'<(script|img|iframe)[^>]* src="?(https?:)?//', text), page
        assert not re.search(r'<link[^>]* rel="?stylesheet"?[^>]* href="?(https?:)?//', text), page


def test_fences_with_a_marker_are_rendered(site: Path):
    for page in site.glob("*.html"):
        assert "```" not in page.read_text("utf-8"), page


def test_formulas_are_rendered(site: Path):
    text = (site / "method.html").read_text("utf-8")
    assert text.count("<math") > 40
    assert "arithmatex" not in text
    assert "\\frac" not in text


def test_unreadable_formula_gives_a_warning(caplog: pytest.LogCaptureFixture):
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
def test_links_exist(name: str):
    """mkdocs checks the links within docs/."""
    for path, anchor in LINK.findall((ROOT / name).read_text("utf-8")):
        if path.startswith("http"):
            continue
        target = ROOT / path
        assert target.exists(), f"{name}: {path}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.M)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{name}: {path}#{anchor}"


def test_readme_explains_the_files_that_its_commands_read():
    code = "".join(block.code for block in BLOCKS[ROOT / "README.md"])
    prose = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text("utf-8"), flags=re.S)
    given = set(re.findall(r"--(?:facts|data|text) (\S+)", code))
    assert {"facts.jsonl", "everyday"} <= given
    for name in given:
        assert f"`{name}`" in prose


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200
