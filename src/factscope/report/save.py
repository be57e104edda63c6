"""Figures as files."""

import io
import warnings
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from factscope.errors import BadSetting
from factscope.files import write_whole

__all__ = ["FIGURE_FORMATS", "figure_bytes", "save_figure"]

FIGURE_FORMATS = ("png", "svg", "pdf")
DPI = 200

UNDATED = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""Without date and version, the same records give the same file."""


def save_figure(fig: Figure, path: Path) -> None:
    """Write the figure in the format that the path's suffix names."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in FIGURE_FORMATS:
        known = ", ".join(f".{name}" for name in FIGURE_FORMATS)
        raise BadSetting(f"cannot write a figure as {path.name!r}; the suffix can be {known}")
    write_whole(path, figure_bytes(fig, kind))


def figure_bytes(fig: Figure, kind: str, dpi: int = DPI) -> bytes:
    """The figure as a file's contents. A character that no font has is drawn as a box."""
    buffer = io.BytesIO()
    # Publishers ask for TrueType in PDFs; a fixed salt gives SVGs ids that do not change.
    settings = matplotlib.rc_context({"pdf.fonttype": 42, "svg.hashsalt": "factscope"})
    with warnings.catch_warnings(), settings:
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        warnings.filterwarnings("ignore", message=r"Matplotlib currently does not support .*")
        fig.savefig(buffer, format=kind, dpi=dpi, metadata=UNDATED[kind])
    return buffer.getvalue()
