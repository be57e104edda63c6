"""Every notebook runs from top to bottom and is stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from factscope.report import figures

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SHORTER = {
    "edit": {"generation_tokens=20": "generation_tokens=4", "* 3, 12)": "* 3, 4)"},
    "evaluate": {"()[::40]": "()[::80]", "length=24": "length=4", "steps=8": "steps=2"},
    "locate": {
        "samples=4": "samples=1",
        "samples=2": "samples=1",
        "()[:5]": "()[:2]",
        "is located in the city of": "is in",
    },
}
"""Replacements that make a notebook faster: fewer noise samples, facts, cases, steps, tokens."""


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path: Path):
    cells = code_cells(read(path))
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def shortened(path: Path) -> nbformat.NotebookNode:
    """The notebook with the replacements above."""
    notebook = read(path)
    for long, short in SHORTER.get(path.stem, {}).items():
        [cell] = [cell for cell in code_cells(notebook) if long in cell.source]
        cell.source = cell.source.replace(long, short)
    return notebook


def draws(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell ends in a figure."""
    last = cell.source.splitlines()[-1]
    return any(last.startswith(f"{name}(") for name in figures.__all__ if name != "save_figure")


@pytest.mark.model
@pytest.mark.filterwarnings("default")  # warnings of the notebook kernel
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws_its_figures(path: Path, tmp_path: Path):
    notebook = shortened(path)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    drawing = [cell for cell in code_cells(notebook) if draws(cell)]
    assert drawing
    for cell in drawing:
        assert any("image/png" in out.get("data", {}) for out in cell.outputs), cell.source
