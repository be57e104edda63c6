"""Remove the marker no-run from code fences (```sh no-run): tests read it, mkdocs cannot."""

import re
from typing import Any

__all__ = ["on_page_markdown"]

MARKED = re.compile(r"^([ \t]*```\w+) no-run[ \t]*$", re.M)


def on_page_markdown(text: str, **_: Any) -> str:
    """Called by mkdocs with the Markdown of each page."""
    return MARKED.sub(r"\1", text)
