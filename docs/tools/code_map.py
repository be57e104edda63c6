"""Write docs/code-map.md: every module with the first line of its docstring."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "factscope"
PAGE = ROOT / "docs" / "code-map.md"

HEAD = """# Code map

Every module of `src/factscope` with the first line of its docstring, in the order in which packages
may import each other. Data flows one way: facts → lm → tracing, editing → evaluation → records →
analysis → report. `make code-map` writes this page; a test compares it with the code.
"""

PACKAGES = (
    "", "lm", "lm/accel", "data", "stats", "tracing", "editing", "editing/hypernet", "evaluation",
    "analysis", "report", "report/figures", "runs", "serve", "cli", "extras",
)  # fmt: skip


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(doc.partition("\n\n")[0].split())


def code_map() -> str:
    """The page."""
    parts = [HEAD]
    for package in PACKAGES:
        folder = SOURCE / package
        files = sorted(f for f in folder.glob("*.py") if f.name != "__init__.py")
        title = f"factscope/{package}".rstrip("/")
        parts.append(f"\n## {title}\n\n{summary(folder / '__init__.py')}\n\n| file | contents |")
        parts.append("\n|---|---|\n")
        parts += [f"| `{f.name}` | {summary(f)} |\n" for f in files]
    return "".join(parts)


def packages() -> set[str]:
    """The packages that there are."""
    found = (f.parent.relative_to(SOURCE).as_posix() for f in SOURCE.rglob("*.py"))
    return {"" if name == "." else name for name in found}


if __name__ == "__main__":
    if missing := packages() - set(PACKAGES):
        sys.exit(f"packages without a section: {', '.join(sorted(missing))}")
    PAGE.write_text(code_map(), encoding="utf-8")
