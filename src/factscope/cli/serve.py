"""factscope serve: locate, edit and compare in a browser."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from factscope.cli.options import Device, DeviceMap, Dtype, Model
from factscope.cli.show import doing, results
from factscope.errors import BadSetting

__all__ = ["serve"]


def _limit(text: str, *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=text, rich_help_panel="ServerLimits", min=1)


def serve(
    runs: Annotated[
        Path | None, typer.Option(help="A folder of runs to compare: trace, evaluate, sweep.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any that is free.", min=0, max=65535)] = 8321,
    name: Annotated[
        list[str] | None,
        typer.Option(help="A name that the server goes by, besides its address; repeatable."),
    ] = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    samples: Annotated[int, _limit("Samples of the noise in a trace.", "--max-samples")] = 10,
    tokens: Annotated[int, _limit("Tokens of a prompt.", "--max-tokens")] = 48,
    waiting: Annotated[int, _limit("Jobs that wait or run.", "--max-waiting")] = 24,
    edits: Annotated[int, _limit("Edits of one visitor.", "--max-edits")] = 12,
) -> None:
    """Open a page on which to locate, edit and compare; for several people at once."""
    try:
        from factscope.serve.app import run
    except ModuleNotFoundError as error:
        raise BadSetting(
            f"the page needs the package {error.name!r}; install it with "
            "`pip install 'factscope[serve]'`"
        ) from error
    from factscope.lm.load import load
    from factscope.serve.app import LOCAL
    from factscope.serve.schemas import ServerLimits
    from factscope.serve.sessions import ServerState

    if runs is not None and not runs.is_dir():
        raise BadSetting(f"there is no folder {runs}; give one that holds runs")
    limits = ServerLimits(samples=samples, tokens=tokens, waiting=waiting, edits=edits)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    served = ServerState(lm=lm, runs=runs, limits=limits)

    def ready(address: str) -> None:
        results.print(f"{lm.name} at {address} (Ctrl-C ends)", soft_wrap=True)

    # The page says itself where C is left out, and that someone left is no news.
    with _quiet("factscope.editing.closed_form", "asyncio"):
        run(served, host=host, port=port, names=[*LOCAL, *(name or [])], ready=ready)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Inside, these loggers tell errors only."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
