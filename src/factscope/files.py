"""Files that appear whole or not at all."""

from pathlib import Path

__all__ = ["PARTIAL", "write_whole"]

PARTIAL = ".partial"
"""What a file's name ends in while it is being written."""


def write_whole(path: Path, data: str | bytes) -> None:
    """Write beside the path, then take its place; text as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(data.encode(errors="replace") if isinstance(data, str) else data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
