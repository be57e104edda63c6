"""The reference of the command line, generated from the commands themselves.

python docs/tools/commands.py writes docs/commands.md; a test compares the two.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from factscope.cli.app import COMMANDS
from factscope.cli.flags import Command, metavar
from factscope.editing.hypernet.settings import NETWORK_CONFIGS
from factscope.editing.settings import EDITORS
from factscope.settings import Setting, settings_of

__all__ = ["reference"]

PAGE = Path(__file__).parents[1] / "commands.md"
HEAD = """# Commands

Every command with its arguments and flags, as `factscope COMMAND --help` lists them. This page is \
generated from the commands (`make commands`); the [user guide](tutorial.md) explains what they \
are for.

"""
METHODS = """## Settings of the methods

Flags of `edit write`, `evaluate` and `sweep` that depend on `--method`. Defaults are those of \
`--preset default`; `--method NAME --preset paper --help` lists those of the paper.
"""


def reference() -> str:
    """The whole page."""
    commands = list(walk())
    index = "\n".join(
        f"| [`{name}`](#{name.replace(' ', '-')}) | {cell(command.help.partition(chr(10))[0])} |"
        for name, command in commands
    )
    table = f"| command | what it does |\n|---|---|\n{index}\n"
    parts = [table, *(section(name, command) for name, command in commands), METHODS]
    for method, presets in EDITORS.items():
        parts.append(f"### --method {method}\n\n{rows(settings_of(presets['default']).values())}\n")
    return HEAD + "\n".join(parts)


def walk() -> Iterator[tuple[str, Command]]:
    """Every command, by its words."""
    for word, entry in COMMANDS.items():
        if isinstance(entry, Command):
            yield f"factscope {word}", entry
        else:
            yield from ((f"factscope {word} {second}", one) for second, one in entry.items())


def section(name: str, command: Command) -> str:
    """One command: what it does, and its flags."""
    settings = list(command.settings({}).values())
    if "method" in command.kind.chosen_by and not command.kind.chosen_first:
        settings = [s for s in settings if s.path[0] != "editor"]
    arguments = [s for s in settings if s.flag.positional]
    usage = " ".join([name, *map(argument, arguments), "[FLAGS]"])
    paragraphs = [" ".join(text.split()) for text in command.help.split("\n\n")]
    parts = [f"## {name}", *paragraphs, f"```\n{usage}\n```", rows(settings)]
    if "method" in command.kind.chosen_by:
        parts.append(more(command))
    return "\n\n".join(part for part in parts if part) + "\n"


def more(command: Command) -> str:
    """Where the flags that depend on the method are listed."""
    if not command.kind.chosen_first:
        return "Further flags: [settings of the methods](#settings-of-the-methods)."
    own = set(command.settings({}))
    others = (s for m in NETWORK_CONFIGS for s in command.settings({"method": m}).values())
    return "With `ke`:\n\n" + rows(s for s in others if s.name not in own)


def rows(settings: Iterable[Setting]) -> str:
    """A table of settings."""
    head = ["| argument or flag | what it does | default |", "|---|---|---|"]
    return "\n".join([*head, *map(row, settings)])


def row(s: Setting) -> str:
    """One line of a table."""
    default = s.text(s.default)
    hidden = s.switch or default == "none"
    shown = "required" if s.required else "" if hidden else f"`{default}`"
    help = re.sub(r"\bNone\b", "none", s.help)
    choices = f" Choices: {', '.join(f'`{word}`' for word in s.choices)}." if s.choices else ""
    return f"| {flags(s)} | {cell(help + choices)} | {shown} |"


def flags(s: Setting) -> str:
    """A flag with its short form and its value, or an argument."""
    if s.flag.positional:
        return f"`{argument(s)}`"
    if s.switch:
        return f"`--{s.name}`" + (f", `--no-{s.name}`" if s.default else "")
    short = f", `-{s.flag.short}`" if s.flag.short else ""
    # GitHub splits a table cell at "|", also within code.
    values = metavar(s).replace("|", "` or `")
    return f"`--{s.name} {values}`{short}"


def argument(s: Setting) -> str:
    """An argument in the usage line."""
    name = s.name.upper().replace("-", "_") + ("…" if s.repeated else "")
    return name if s.required else f"[{name}]"


def cell(text: str) -> str:
    """Text within a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
