"""The command line: parse arguments, run a command, print errors on one line with an exit code."""

import logging
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from cyclopts.exceptions import MissingArgumentError, UnknownOptionError, UnusedCliTokensError

from factscope import __version__
from factscope.cli import (
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
from factscope.cli.flags import Command
from factscope.errors import BadInput, FactscopeError, OutOfMemory


class Group(dict[str, Command]):
    """Commands with a common first word; without a second word the default one runs."""

    def __init__(self, help: str, *commands: Command, default: str = "") -> None:
        super().__init__({command.name: command for command in commands})
        self.help = help
        self.default = default


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
    "train": train.train,
    "stats": Group(
        "Second moments of the keys of a layer.",
        stats.collect, stats.merge, stats.show, default="collect",
    ),
    "report": report.report,
    "recipe": recipe.recipe,
    "serve": serve.serve,
    "models": data.models,
    "data": Group(
        "Data sets and files of facts.",
        data.list_, data.get, data.show, data.find_known, data.build_counterfact, data.composition,
    ),
    "study": Group("Human evaluation: a blind form, and its results.", study.build, study.report),
    "check": check.check,
}  # fmt: skip
HELP = "Find where a language model stores a fact, edit it, and measure what changed."
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it."""


def app_for(words: Sequence[str]) -> App:
    """The cyclopts app; only the command in `words` gets flags, since building them is slow."""
    app = App(
        name="factscope", help=HELP, version=__version__, help_format="plaintext",
        suppress_keyboard_interrupt=False,  # `run` handles it
    )  # fmt: skip
    for i, (name, entry) in enumerate(COMMANDS.items()):
        named = words[:1] == [name]
        if isinstance(entry, Command):
            app.command(_function(entry, words[1:], named), name=name, sort_key=i)
            continue
        group = App(name=name, help=entry.help, sort_key=i)
        second = next(iter(words[1:]), None)
        for j, (word, command) in enumerate(entry.items()):
            chosen = named and (second == word or (second not in entry and word == entry.default))
            function = _function(command, words[1:], chosen)
            group.command(function, name=word, sort_key=j)
            if word == entry.default:
                group.default(function)
        app.command(group)
    return app


def _function(command: Command, words: Sequence[str], chosen: bool):
    """The function of a command; a stub with its help text if it is not the chosen one."""
    if chosen:
        return command.function(words)

    def stub() -> None:
        raise AssertionError

    stub.__doc__ = command.help
    return stub


def main() -> None:
    """Run the command of `sys.argv`, and exit."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    words = sys.argv[1:]
    if len(words) == 1 and isinstance(COMMANDS.get(words[0]), Group):
        words.append("--help")
    sys.exit(run(words))


def run(words: Sequence[str]) -> int:
    """Run a command; an error is one message on standard error. Returns the exit code."""
    try:
        app = app_for(words)
        app(words, exit_on_error=False, print_error=False, result_action="return_value")
        return 0
    except FactscopeError as error:
        return _failed(str(error), error.exit_code)
    except CycloptsError as error:
        return _failed(_message(error, words), BadInput.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted; the same command resumes", INTERRUPTED)
    except BrokenPipeError:  # as in `factscope … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FactscopeError.exit_code
    except RuntimeError as error:
        from factscope.lm.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        advice = "try --dtype bfloat16, --device cpu, or fewer facts, prompts or tokens at once"
        return _failed(f"out of memory; {advice}", OutOfMemory.exit_code)


def _failed(message: str, code: int) -> int:
    print(f"factscope: {message}", file=sys.stderr)
    return code


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
