"""HTML pages from jinja2 templates, and the files of a report: pages, tables and figures.

Every page is one self-contained file: figures, style and script are embedded, and the content
security policy of the page blocks all requests. The environment makes control characters visible
and escapes HTML in every value, so texts from records need no escaping in the templates.
"""

import base64
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from factscope.io import atomic_files
from factscope.report.labels import display_token, flatten_settings, printable, setting_text
from factscope.report.style import figure_bytes
from factscope.report.tables import (
    Table,
    as_csv,
    as_latex,
    as_markdown,
    cell_mark,
    cell_text,
    is_text_column,
)

FIGURE_DPI, CSS_DPI = 180, 100
"""Resolution of an embedded PNG, and CSS pixels per inch of the figure."""


def render(template: str, **values: Any) -> str:
    """Render a page template."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """The jinja2 environment: templates, filters, and automatic escaping of every value."""

    def finalize(value: Any) -> Any:
        """Applied to every value before it is escaped; Markup is inserted as it is."""
        plain = isinstance(value, str) and not isinstance(value, Markup)
        return printable(value) if plain else value

    environment = Environment(
        loader=PackageLoader("factscope.report"),
        autoescape=True,
        finalize=finalize,
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


def multiline(text: str) -> Markup:
    """The text, escaped, with its line breaks preserved."""
    return Markup("\n").join(escape(printable(line)) for line in text.split("\n"))


def asset(name: str) -> Markup:
    """A style sheet or script from the templates folder."""
    file = resources.files("factscope.report").joinpath("templates", name)
    return Markup(file.read_text(encoding="utf-8"))


def embed_figure(fig: Figure, description: str) -> dict[str, Any]:
    """The figure for the macro `figure`: a PNG, its width in CSS pixels, its alternative text."""
    source = image_uri(figure_bytes(fig, "png", FIGURE_DPI))
    width = round(CSS_DPI * fig.get_figwidth())
    return {"source": source, "width": width, "description": description}


def image_uri(png: bytes) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def table_files(name: str, *tables: Table, full: Table | None = None) -> list[tuple[str, str]]:
    """Tables as Markdown and LaTeX, and the full table, by default the same one, as CSV."""
    return [
        (f"{name}.md", "\n".join(map(as_markdown, tables))),
        (f"{name}.tex", "\n".join(map(as_latex, tables))),
        (f"{name}.csv", as_csv(full or tables[0])),
    ]


def write_files(folder: Path, files: Iterable[tuple[str, str | Figure]]) -> list[Path]:
    """Write texts by file name and figures by name, as PNG and PDF; return the paths.

    After an error, as on a full disk, the folder is as before.
    """
    names: list[str] = []
    with atomic_files(folder) as partial:
        for name, content in files:
            parts: dict[str, bytes] = (
                {name: content.encode(errors="replace")}
                if isinstance(content, str)
                else {f"{name}.{kind}": figure_bytes(content, kind) for kind in ("png", "pdf")}
            )
            for file, data in parts.items():
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                (partial / file).write_bytes(data)
                names.append(file)
    return [folder / name for name in names]
