"""The reference of the command line, made from the commands themselves.

python docs/tools/commands.py writes docs/commands.md; a test compares the two.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from factscope.cli.main import app

__all__ = ["reference"]

PAGE = Path(__file__).parents[1] / "commands.md"
HEAD = """# Commands

Every command with its arguments and flags, as `factscope COMMAND --help` lists them. This page is \
made from the commands themselves (`make commands`); the [tutorial](tutorial.md) explains what \
they are for.

"""


def reference() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    commands = list(walk(root, "factscope"))
    index = "\n".join(
        f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(first_line(command))} |"
        for name, command in commands
    )
    table = f"| command | what it does |\n|---|---|\n{index}\n"
    return HEAD + "\n".join([table, *(section(name, command) for name, command in commands)])


def walk(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, by its words."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def section(name: str, command: Any) -> str:
    """One command: what it does, and what it takes."""
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option" and p.name != "help"]
    words = " ".join([name, *map(usage, arguments), *(["[FLAGS]"] if options else [])])
    parts = [f"## {name}", " ".join((command.help or "").split("\n\n")[0].split())]
    parts += [" ".join(more.split()) for more in (command.help or "").split("\n\n")[1:]]
    parts.append(f"```\n{words}\n```")
    rows = [f"| `{p.name.upper()}` | {cell(p.help)} | |" for p in arguments]
    rows += [f"| {flags(p)} | {cell(p.help)} | {default(p)} |" for p in options]
    if rows:
        head = ["| argument or flag | what it says | default |", "|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def usage(argument: Any) -> str:
    """An argument as it stands in the command."""
    name = argument.name.upper() + ("…" if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def flags(option: Any) -> str:
    """A flag with its short form and whether it takes a value."""
    value = "" if option.is_flag else " " + max(option.opts, key=len).lstrip("-").upper()
    names = [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]
    many = "…" if option.multiple else ""
    return ", ".join(f"`{name}{value if i == 0 else ''}`" for i, name in enumerate(names)) + many


def default(option: Any) -> str:
    """What holds where a flag is not given."""
    value = option.default
    if option.required:
        return "needed"
    if value is None or value is False or value == () or value == [] or callable(value):
        return ""
    return f"`{' '.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def first_line(command: Any) -> str:
    """A command's help, its first sentence."""
    return " ".join((command.help or "").split("\n\n")[0].split())


def cell(text: str | None) -> str:
    """Text within a table."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
