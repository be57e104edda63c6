"""The command line: parse arguments, run a command, print errors on one line with an exit code."""

import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import App, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from factscope import __version__
from factscope.cli import (
    calibrate,
    check,
    data,
    edit,
    evaluate,
    recipe,
    report,
    serve,
    stats,
    study,
    trace,
    train,
)
from factscope.cli.flags import Command, Options
from factscope.cli.output import print_json
from factscope.errors import BadInput, FactscopeError, OutOfMemory
from factscope.settings import Flag


class Group(dict[str, Command]):
    """Commands with a common first word; without a second word the default one runs."""

    def __init__(self, help: str, *commands: Command, default: str = "") -> None:
        super().__init__({command.name: command for command in commands})
        self.help = help
        self.default = default


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(Options):
    """Options."""

    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], Flag(positional=True)]
    """Shell to complete commands and flags in."""


@Command
def completion(options: CompletionOptions) -> None:
    """Print a script that completes commands and flags in a shell."""
    script = app_for(None).generate_completion(shell=options.shell)
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print(script)


COMMANDS: dict[str, Command | Group] = {
    "demo": serve.demo,
    "trace": trace.trace,
    "edit": Group(
        "Write facts into a model.",
        edit.write, edit.show, edit.apply, edit.export, edit.merge, default="write",
    ),
    "generate": edit.generate,
    "evaluate": evaluate.evaluate,
    "sweep": evaluate.sweep,
    "calibrate": Group(
        "Measure good settings for a model, and keep them.",
        calibrate.run, calibrate.use, calibrate.show, default="run",
    ),
    "train": train.train,
    "stats": Group(
        "Second moments of the keys of a layer.",
        stats.collect, stats.merge, stats.show, default="collect",
    ),
    "report": report.report,
    "recipe": Group(
        "Reproduce a table or figure of the paper.", recipe.run, recipe.list_, default="run"
    ),
    "serve": serve.serve,
    "models": data.models,
    "data": Group(
        "Data sets and files of facts.",
        data.list_, data.get, data.show, data.find_known, data.build_counterfact, data.composition,
    ),
    "study": Group("Human evaluation: a blind form, and its results.", study.build, study.report),
    "check": check.check,
    "completion": completion,
}  # fmt: skip
HELP = "Find where a language model stores a fact, edit it, and measure what changed."
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""
OUT_OF_MEMORY = (
    "out of memory; try --dtype bfloat16, --device cpu, or fewer facts, prompts or tokens at once"
)


def app_for(words: Sequence[str] | None) -> App:
    """The cyclopts app; only the command in `words` gets flags, since building them is slow.

    With None all commands get them.
    """
    complete, words = words is None, words or ()
    app = App(
        name="factscope", help=HELP, version=__version__, help_format="plaintext",
        suppress_keyboard_interrupt=False,  # `run` handles it
    )  # fmt: skip
    for i, (name, entry) in enumerate(COMMANDS.items()):
        named = words[:1] == [name]
        if isinstance(entry, Command):
            function = _function(entry, words[1:], chosen=named, complete=complete)
            app.command(function, name=name, sort_key=i)
            continue
        group = App(name=name, help=entry.help, sort_key=i)
        second = next(iter(words[1:]), None)
        for j, (word, command) in enumerate(entry.items()):
            chosen = named and (second == word or (second not in entry and word == entry.default))
            function = _function(command, words[1:], chosen=chosen, complete=complete)
            group.command(function, name=word, sort_key=j)
            if word == entry.default:
                group.default(function)
        app.command(group)
    return app


def _function(command: Command, words: Sequence[str], *, chosen: bool, complete: bool):
    """The function of a command; a stub with its help text if it is not the chosen one."""
    if chosen or complete:
        return command.function(words, for_completion=complete)

    def stub() -> None:
        raise AssertionError

    stub.__doc__ = command.help
    return stub


class Once(logging.Filter):
    """Drops messages that were printed before, such as those of a method for each of many cases."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        new = record.getMessage() not in self.printed
        self.printed.add(record.getMessage())
        return new


def main() -> None:
    """Run the command of `sys.argv`, and exit."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Once())
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler])
    if isinstance(sys.stdout, io.TextIOWrapper):  # for terminals that cannot show every character
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:]
    if len(words) == 1 and isinstance(COMMANDS.get(words[0]), Group):
        words.append("--help")
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    """Run a command; an error is one message on standard error. Returns the exit code."""
    try:
        _check_unicode(words)
        app = app_for(words)
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
        return 0
    except FactscopeError as error:
        return _failed(str(error), error.exit_code)
    except CycloptsError as error:
        return _failed(_message(error, words), BadInput.exit_code)
    except KeyboardInterrupt as error:  # where a run resumes, its text says so
        return _failed("; ".join(["interrupted", *map(str, error.args)]), INTERRUPTED)
    except BrokenPipeError:  # as in `factscope … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FactscopeError.exit_code
    except OSError as error:
        return _failed(_os_message(error), FactscopeError.exit_code)
    except UnicodeError as error:
        return _failed(f"a text is not valid Unicode ({error}); give UTF-8", BadInput.exit_code)
    except RecursionError:
        advice = "the input is nested too deeply; give JSON or TOML with fewer levels"
        return _failed(advice, BadInput.exit_code)
    except MemoryError:
        return _failed(OUT_OF_MEMORY, OutOfMemory.exit_code)
    except RuntimeError as error:
        from factscope.lm.memory import is_out_of_memory

        if str(error).startswith("Symlink loop"):  # Path.resolve before Python 3.13
            return _failed(f"{error}; give another path", BadInput.exit_code)
        if not is_out_of_memory(error):
            raise
        return _failed(OUT_OF_MEMORY, OutOfMemory.exit_code)


def _failed(message: str, code: int) -> int:
    print(f"factscope: {message}", file=sys.stderr)
    return code


def _check_unicode(words: Sequence[str]) -> None:
    """Raise BadInput for an argument that was not UTF-8: no file or model can store it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise BadInput(f"the argument {word!r} is not valid UTF-8; type it again") from None


def _os_message(error: OSError) -> str:
    """The message for a file that cannot be read or written."""
    reason = error.strerror or str(error)
    files = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' → '.join(map(repr, files))}: " if files else ""
    advice = "give another path, or change its permissions"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space, or give a path on another disk"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "raise the limit with `ulimit -n`"
    elif not files:
        advice = "check the disk and the network, then run the command again"
    return f"{where}{reason}; {advice}"


def _message(error: CycloptsError, words: Sequence[str]) -> str:
    """The message for arguments that cyclopts rejects."""
    match error:
        case UnknownOptionError(target=target) if hasattr(target, "unknown_flags"):
            message = vars(target)["unknown_flags"](words)
            if message is not None:
                return message
        case MissingArgumentError(argument=argument) if argument is not None:
            name = error.keyword or argument.name
            missing = "needs a value" if error.keyword else "is required"
            return f"{name} {missing}: {argument.parameter.help}"
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"unexpected argument {first!r}; put a text with spaces into quotes"
    text = str(error).strip()
    return text[:1].lower() + text[1:]
