"""Checks of HTML pages."""

import re
from html.parser import HTMLParser
from typing import Any

from factscope.report.html import environment


def render_macro(name: str, *values: Any) -> str:
    """The HTML of one macro of the page templates."""
    return str(getattr(environment().get_template("macros.html").module, name)(*values))


def check_self_contained(page: str) -> None:
    """The page loads nothing from elsewhere."""
    assert re.findall(r"https?://|//[a-z]+\.", page) == []
    assert "default-src 'none'" in page
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith("data:image/png;base64,")


def check_escaped(page: str) -> None:
    """No text of a record became markup or a control character."""
    assert page.count("<script") == page.count("</script>")
    assert "<b>" not in page
    assert "alert(1)</script>" not in page
    assert "\x00" not in page


def check_well_formed(text: str) -> None:
    """Every tag is closed where it should be."""
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
