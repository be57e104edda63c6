"""Files to take away: each with its type, and as an attachment that a browser saves."""

import re
from pathlib import PurePath

from starlette.responses import Response

__all__ = ["MEDIA", "attached"]

MEDIA = {
    ".json": "application/json",
    ".html": "text/html; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".zip": "application/zip",
    ".safetensors": "application/octet-stream",
}


def attached(file: str, content: bytes, name: str) -> Response:
    """A file's contents, to be saved under a name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return Response(
        content,
        media_type=MEDIA[PurePath(file).suffix],
        headers={
            "content-disposition": f'attachment; filename="{safe}"',
            "cache-control": "no-store",
        },
    )
