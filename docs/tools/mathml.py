"""Formulas as MathML when the pages are built: browsers set them, without a script or a font.

In the sources they are $…$ and $$…$$. A formula that cannot be read is a warning, which `make docs`
treats as an error.
"""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

__all__ = ["on_page_content"]

log = logging.getLogger("mkdocs.hooks.mathml")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\(?:\(|\[)(.*?)\\(?:\)|\])</\1>', re.S)


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""

    def formula(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        try:
            return convert(latex, display="block" if found[1] == "div" else "inline")
        except Exception as error:
            log.warning("%s: cannot read the formula %r (%s)", page.file.src_path, latex, error)
            return found[0]

    return FORMULA.sub(formula, text)
