"""factscope serve and demo: trace and edit in a browser, and a first example."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from factscope.cli.edit import draw_edit, make_edit, print_edit
from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import doing, note, print_json, say, working
from factscope.cli.trace import draw_trace, print_trace
from factscope.editing.settings import editor
from factscope.errors import BadSetting
from factscope.facts import Case, Fact
from factscope.io import atomic_files, check_output_folder, write_atomic
from factscope.records import write_records
from factscope.serve.limits import ServerLimits
from factscope.settings import INTERNAL, Flag
from factscope.tracing.settings import Tracing


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options):
    """Options."""

    json: Annotated[bool, INTERNAL] = False
    runs: Path | None = None
    """Folder of runs to compare, written by trace, evaluate or sweep."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines."""
    port: Annotated[int, Ge(0), Le(65535)] = 8321
    """Port; 0 for any that is free."""
    allowed_host: tuple[str, ...] = ()
    """Name under which the server is reached, besides its address. Repeatable."""
    model: ModelOptions = field(default_factory=ModelOptions)
    limits: ServerLimits = field(default_factory=ServerLimits)


@Command
def serve(options: ServeOptions) -> None:
    """Open a page to trace, edit and compare, for several people at once."""
    try:
        from factscope.serve.app import listen, run
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"the page needs the package {error.name!r}; install it with "
            "`pip install 'factscope[serve]'`"
        ) from error
    from factscope.serve.sessions import ServerState

    if options.runs is not None and not options.runs.is_dir():
        raise BadSetting(f"--runs is {str(options.runs)!r}; give a folder of runs")
    listen(options.host, options.port).close()  # an address that is taken fails before loading
    lm = options.model.load()
    state = ServerState(lm=lm, runs=options.runs, limits=options.limits)
    # The page itself warns of a missing C; a client that disconnects is not an error.
    with _errors_only("factscope.editing.defaults", "asyncio"), suppress(KeyboardInterrupt):
        run(
            state, host=options.host, port=options.port, allowed_hosts=options.allowed_host,
            ready=lambda address: say(f"{lm.name} at {address} (Ctrl-C stops)"),
        )  # fmt: skip


@contextmanager
def _errors_only(*names: str) -> Iterator[None]:
    """Inside, these loggers report errors only."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# ---- demo

SUBJECT, PROMPT = "The Eiffel Tower", "{} is located in the city of"
PARAPHRASES = (
    "To see the Eiffel Tower, travel to the city of",
    "Where is the Eiffel Tower? It is in",
)
NEIGHBOURS = (
    "The Louvre is located in the city of",
    "The Brandenburg Gate is located in the city of",
)


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """Options."""

    out: Annotated[Path, Flag(short="o")] = Path("demo")
    """Folder for the figures."""
    model: ModelOptions = field(default_factory=ModelOptions)


@Command
def demo(options: DemoOptions) -> None:
    """Trace where the model stores the Eiffel Tower's city, move it to Rome, and draw both."""
    from factscope.evaluation.before_after import before_after
    from factscope.report.edits import trace_and_edit_page
    from factscope.tracing.trace import trace

    out = options.out
    check_output_folder(out)
    note(f"Loading {options.model.model}; the first time it is downloaded and converted.")
    lm = options.model.load()
    fact = Fact(subject=SUBJECT, prompt=PROMPT, target="Paris")
    with working(f"tracing {fact.text!r}") as done:
        traced = trace(lm, fact, Tracing(sever=("mlp", "attn")), progress=done)
    new = Fact(subject=SUBJECT, prompt=PROMPT, target="Rome")
    case = Case(fact=new, paraphrases=PARAPHRASES, neighbours=NEIGHBOURS)
    edit = make_edit(lm, editor("rome"), [case])
    with doing("predicting before and after"):
        edited = before_after(lm, edit, case)
    with atomic_files(out) as partial:
        write_records(partial / "trace.jsonl", [traced])
        edit.save(partial / "rome.edit")
        write_atomic(partial / "edit.json", edited.to_json() + "\n")
        write_atomic(partial / "index.html", trace_and_edit_page(traced, edited))
        figures = draw_trace(traced, partial / "trace.png")
        figures += draw_edit(edited, None, partial / "edit.png")
    names = ["index.html", *(path.name for path in figures), "trace.jsonl", "edit.json"]
    files = [out / name for name in (*names, "rome.edit")]
    if options.json:
        print_json({"files": files})
        return
    print_trace(traced)
    say("")
    print_edit(edited)
    say("")
    say(f"Files: {', '.join(str(path) for path in files)}")
    say(f"Open {files[0]}")
