"""Which package may import which: data flows one way, and reading records needs no torch."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import factscope

ROOT = Path(next(iter(factscope.__path__)))
FILES = sorted(ROOT.rglob("*.py"))

LEVELS = (
    ("errors", "progress"),
    ("facts", "io", "settings"),
    ("records",),
    ("analysis",),
    ("extras.study",),
    ("report",),
    ("lm",),
    ("data",),
    ("extras.counterfact_builder",),
    ("stats",),
    ("tracing",),
    ("editing",),
    ("evaluation",),
    ("runs",),
    ("serve",),
    ("cli",),
)
"""A module imports from levels above its own in this list, or from its own part."""
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

LIGHT = (
    "errors", "facts", "io", "progress", "settings", "records", "analysis", "extras.study",
    "report",
)  # fmt: skip
"""Parts that need no torch."""


def part_of(path: Path) -> str:
    """The package or module directly below factscope; the modules of extras count on their own."""
    return part_named(".".join(path.relative_to(ROOT).with_suffix("").parts))


def part_named(module: str) -> str:
    """The part of a module, given without `factscope.`."""
    names = module.split(".")
    return ".".join(names[: 2 if names[0] == "extras" and len(names) > 1 else 1])


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All syntax nodes of a file."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


@functools.cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, also within functions and for types only."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written out in full"
            assert node.module is not None
            # `from factscope.lm import families` means factscope.lm.families
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def users_of(package: str) -> set[str]:
    """The parts of factscope that import a package."""
    return {part_of(f) for f in FILES if any(m.split(".")[0] == package for m in imports(f))}


def test_every_package_has_a_level() -> None:
    assert {part_of(f) for f in FILES} - {"__init__", "__main__", "extras.__init__"} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_imports_go_one_way(path: Path) -> None:
    here = part_of(path)
    if here.endswith("__init__") or here == "__main__":
        return
    ours = {part_named(m.partition(".")[2]) for m in imports(path) if m.startswith("factscope.")}
    ours -= {here, "extras", "__version__"}
    wrong = {part for part in ours if LEVEL[part] >= LEVEL[here]}
    assert not wrong, f"{here} is below {', '.join(sorted(wrong))}"


def test_there_are_no_import_cycles() -> None:
    """Within a package: what is imported when a module is loaded goes one way, too."""
    names = {".".join(("factscope", *f.relative_to(ROOT).with_suffix("").parts)): f for f in FILES}
    graph = {
        name: {m for m in _at_load(f) if m in names and m != name} for name, f in names.items()
    }
    while free := [name for name, needed in graph.items() if not needed & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph


def _at_load(path: Path) -> set[str]:
    body = ast.parse(path.read_text("utf-8")).body
    found = set()
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_reading_records_needs_no_torch() -> None:
    for package in ("torch", "transformers", "safetensors"):
        assert not users_of(package) & set(LIGHT)


def test_only_lm_imports_transformers() -> None:
    assert users_of("transformers") == {"lm"}


def test_only_cli_imports_cyclopts_and_only_cli_and_report_import_rich() -> None:
    assert users_of("cyclopts") == {"cli"}
    assert users_of("rich") <= {"cli", "report"}
    assert users_of("argparse") == set()


def test_only_serve_imports_web_packages() -> None:
    for package in ("fastapi", "starlette", "uvicorn", "pydantic"):
        assert users_of(package) == {"serve"}


def test_hooks_are_registered_in_one_file() -> None:
    users = [f for f in FILES if "register_forward" in f.read_text("utf-8")]
    assert users == [ROOT / "lm" / "hooks.py"]


def test_results_are_not_printed_below_the_command_line() -> None:
    for path in FILES:
        calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
        prints = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not prints or part_of(path) in ("cli", "__main__"), path


PROBE = """
import os, sys
before = dict(os.environ), os.getcwd(), sorted(os.listdir())
import logging
import {module}
assert (dict(os.environ), os.getcwd(), sorted(os.listdir())) == before, "the surroundings changed"
assert not logging.getLogger().handlers, "logging was set up"
known = {{"torch", "transformers", "matplotlib", "numpy", "gguf", "pandas", "fastapi"}}
heavy = known & set(sys.modules)
assert not heavy, f"loads {{heavy}}"
"""


@pytest.mark.parametrize("module", ["factscope", "factscope.cli.app"])
def test_importing_has_no_side_effects_and_loads_no_heavy_packages(
    module: str, tmp_path: Path
) -> None:
    probe = PROBE.format(module=module)
    words = [sys.executable, "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_report_loads_no_torch(tmp_path: Path) -> None:
    probe = "import sys, factscope.report.traces; assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_gpu_code_is_only_in_lm_accel() -> None:
    """No file outside lm/accel mentions CUDA, triton or CUDA graphs."""
    words = re.compile(r"cuda|triton|captur\w+ graph|graph captur", re.IGNORECASE)
    users = [f.relative_to(ROOT).as_posix() for f in FILES if words.search(f.read_text("utf-8"))]
    assert [user for user in users if not user.startswith("lm/accel/")] == []


def test_only_lm_imports_submodules_of_lm_accel() -> None:
    """Outside lm, acceleration is imported from `factscope.lm.accel` itself."""
    for path in FILES:
        if path.is_relative_to(ROOT / "lm"):
            continue
        modules = [n.module for n in nodes(path) if isinstance(n, ast.ImportFrom) and n.module]
        assert not [m for m in modules if m.startswith("factscope.lm.accel.")], path


LOADED = """
import sys
from factscope import Rome
Rome()
print(sum(name.split(".")[0] == "factscope" for name in sys.modules))
"""


def test_importing_rome_loads_few_modules(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOADED]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert int(done.stdout) <= 35


def test_the_code_map_is_up_to_date() -> None:
    docs = Path(__file__).parents[1] / "docs"
    spec = importlib.util.spec_from_file_location("code_map", docs / "tools" / "code_map.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.packages() == set(module.PACKAGES)
    assert module.code_map() == (docs / "code-map.md").read_text("utf-8"), "run `make code-map`"
