"""HTML pages from jinja2 templates; every page is one self-contained file.

Figures, style and script are embedded, and the content security policy of the page blocks all
requests. The environment makes control characters visible and escapes HTML in every value, so
texts from records need no escaping in the templates.
"""

import base64
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from factscope.report.labels import display_token, flatten_settings, printable, setting_text
from factscope.report.style import figure_bytes
from factscope.report.tables import cell_mark, cell_text, is_text_column

FIGURE_DPI, CSS_DPI = 180, 100
"""Resolution of an embedded PNG, and CSS pixels per inch of the figure."""


def render(template: str, **values: Any) -> str:
    """Render a page template."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """The jinja2 environment: templates, filters, and automatic escaping of every value."""
    environment = Environment(
        loader=PackageLoader("factscope.report"),
        autoescape=True,
        finalize=_printable_value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(asset=asset, is_text_column=is_text_column)
    environment.filters.update(
        cell_mark=cell_mark, cell_text=cell_text, flat=flatten_settings, multiline=multiline,
        setting_text=setting_text, token=display_token,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


def _printable_value(value: Any) -> Any:
    """Applied by jinja2 to every value before it is escaped; Markup is inserted as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def multiline(text: str) -> Markup:
    """The text, escaped, with its line breaks preserved."""
    return Markup("\n").join(escape(printable(line)) for line in text.split("\n"))


def asset(name: str) -> Markup:
    """A style sheet or script from the templates folder."""
    file = resources.files("factscope.report").joinpath("templates", name)
    return Markup(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class EmbeddedFigure:
    """A figure as a PNG within the page."""

    source: str
    """Data URI of the PNG."""
    width: int
    """In CSS pixels."""
    description: str
    """Alternative text."""


def embed_figure(fig: Figure, description: str) -> EmbeddedFigure:
    """Draw the figure for embedding in a page."""
    source = image_uri(figure_bytes(fig, "png", FIGURE_DPI))
    return EmbeddedFigure(source, round(CSS_DPI * fig.get_figwidth()), description)


def image_uri(png: bytes) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
