"""factscope on the command line: words → functions."""

import logging
import sys

import typer

from factscope.cli.data import data
from factscope.cli.demo import demo
from factscope.cli.edit import edit
from factscope.cli.evaluate import evaluate
from factscope.cli.generate import generate
from factscope.cli.models import models
from factscope.cli.recipe import recipe
from factscope.cli.report import report
from factscope.cli.serve import serve
from factscope.cli.stats import stats
from factscope.cli.study import study
from factscope.cli.sweep import sweep
from factscope.cli.trace import trace
from factscope.cli.train import train
from factscope.errors import FactscopeError, OutOfMemory

__all__ = ["app", "main"]

app = typer.Typer(
    name="factscope",
    help="Find where a language model keeps a fact, rewrite it, and measure what changed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(trace)
app.command()(evaluate)
app.command()(sweep)
app.command()(train)
app.command()(recipe)
app.command()(report)
app.command()(generate)
app.command()(models)
app.command()(serve)
app.command()(demo)
app.add_typer(stats, name="stats")
app.add_typer(edit, name="edit")
app.add_typer(data, name="data")
app.add_typer(study, name="study")


INTERRUPTED = 130
"""The exit code that typer makes of Ctrl-C."""


def main() -> None:
    """Run a command; what goes wrong is one message on standard error and an exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        app()
    except FactscopeError as error:
        print(f"factscope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        print(
            "factscope: memory ran out; try --dtype bfloat16, --device cpu, or fewer facts, "
            "prompts or tokens at once",
            file=sys.stderr,
        )
        sys.exit(OutOfMemory.exit_code)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            print("factscope: stopped; the same command goes on from here", file=sys.stderr)
        raise


def _is_out_of_memory(error: RuntimeError) -> bool:
    from factscope.lm.memory import is_out_of_memory

    return is_out_of_memory(error)


if __name__ == "__main__":
    main()
