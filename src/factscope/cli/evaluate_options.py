"""The flags that `factscope evaluate` and `sweep` share, and the run that they add up to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from factscope.cli import edit_options
from factscope.cli.show import doing
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.evaluation.cases import Consistency
    from factscope.lm.model import LM
    from factscope.runs.evaluate import EvaluateRun, Executor

__all__ = ["Worker", "check_protocol", "data_name", "editor_from", "row_name", "run_from"]


def _asked(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="What is asked", **more)


Data = Annotated[str, typer.Option(help="counterfact, zsre, everyday, or a file of cases.")]
Protocol = Annotated[
    str, typer.Option(help="single edits, sequential ones, or a batch of facts in one edit.")
]
BatchSize = Annotated[
    int | None, typer.Option(help="Facts to an edit, with --protocol batch; all if not given.")
]
Length = Annotated[
    int, _asked("How long texts become in tokens, openings included; 0 for no texts.", min=0)
]
Seed = Annotated[int, _asked("Seed of the texts.")]
References = Annotated[
    str | None,
    _asked("Texts by relation and object, for RS: a file, or snippets for the paper's."),
]
On = Annotated[str, typer.Option(help="here, or ray to spread cases over actors.")]
RayAddress = Annotated[
    str | None, typer.Option(help="Ray's cluster; one is started here if not given.")
]
Workers = Annotated[
    int | None, typer.Option(help="Ray's actors; one for each GPU if not given.", min=1)
]
PrefixSeed = Annotated[int | None, typer.Option(help="Seed of the prefixes.")]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Where the work is done: in this process, or by Ray's actors."""

    on: str
    device: str
    address: str | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.on not in ("here", "ray"):
            raise BadSetting(f"--on {self.on!r} is not known; choose from here, ray")

    def load(self, model: str, dtype: str, device_map: str | None) -> "LM":
        """The model here; Ray's actors have their own, on their own devices."""
        from factscope.lm.load import load

        device = "cpu" if self.on == "ray" else self.device
        with doing(f"loading {model}"):
            return load(model, device=device, dtype=dtype, device_map=device_map)

    @contextmanager
    def crew(self, lm: "LM", run: "EvaluateRun") -> "Iterator[Executor | None]":
        """Who does a run's pieces; None for this process."""
        if self.on == "here":
            yield None
            return
        from factscope.runs.ray import WorkerSetup, ray_executor

        start = WorkerSetup(replace(run, editor=run.editor.resolve(lm)), self.device)
        with ray_executor(start, run.protocol, address=self.address, workers=self.workers) as crew:
            yield crew


def check_protocol(protocol: str, batch_size: int | None) -> None:
    """A protocol that there is, with a batch's size only where there are batches."""
    from factscope.records import Protocol

    if protocol not in get_args(Protocol):
        known = ", ".join(get_args(Protocol))
        raise BadSetting(f"the protocol {protocol!r} is not known; choose from {known}")
    if batch_size is not None and protocol != "batch":
        raise BadSetting("--batch-size goes with --protocol batch")


def editor_from(
    method: str,
    preset: str,
    *,
    stats: list[Path] | None,
    no_stats: bool,
    prefixes: Path | None,
    prefix_lengths: str | None,
    prefix_seed: int | None,
    **settings: Any,
) -> "Editor":
    """The editor of the flags; None says nothing."""
    said = {
        **settings,
        "seed": prefix_seed,
        "second_moment": edit_options.second_moment_of(stats, no_stats),
        **edit_options.prefixes_of(prefixes, prefix_lengths),
    }
    return edit_options.editor_of(method, preset, said)


def run_from(
    editor: "Editor",
    method: str,
    *,
    model: str,
    dtype: str,
    data: str,
    limit: int | None,
    protocol: str,
    batch_size: int | None,
    length: int,
    seed: int,
    references: str | None,
) -> "EvaluateRun":
    """The evaluation of an editor whose row has that name; its files are found, or fetched."""
    from factscope.evaluation.cases import ScoringOptions
    from factscope.runs.evaluate import EvaluateRun

    path, compared = _found(data), None if references is None else _found(references)
    likeness = None if references is None else _consistency(references)
    return EvaluateRun(
        model=model,
        dtype=dtype,
        data=path,
        name=data_name(data),
        method=method,
        editor=editor,
        protocol=protocol,  # pyright: ignore[reportArgumentType]
        batch_size=batch_size,
        limit=limit,
        asking=ScoringOptions(length=length, seed=seed),
        likeness=likeness,
        references=compared,
    )


def _found(name: str) -> Path:
    """The file of a data set, fetched where it is not here."""
    from factscope.data.registry import find_data

    return find_data(name)


def _consistency(references: str) -> "Consistency":
    """What RS compares with; the paper's own snippets come with its table of words."""
    from factscope.evaluation.cases import load_consistency

    words = ("idf", "vocabulary") if references == "snippets" else ()
    with doing("reading reference texts"):
        return load_consistency(_found(references), *map(_found, words))


def data_name(data: str) -> str:
    """What a data set is called in records and tables: its name, or that of its file."""
    from factscope.data.registry import DATA_SETS

    file = Path(data).name.removesuffix(".gz")
    known = (name for name, one in DATA_SETS.items() if file in one.files)
    return next(known, file.partition(".")[0])


def row_name(editor: "Editor", method: str, preset: str) -> str:
    """What a method's row is called: its name, and the preset where that makes a difference.

    A learned editor's says what it was trained on, as in the paper.
    """
    from factscope.editing.hypernet.editor import HypernetEditor
    from factscope.editing.methods import EDITORS

    if isinstance(editor, HypernetEditor):
        return editor.row
    same = EDITORS[method][preset] == EDITORS[method]["default"]
    return method if same else f"{method}, {preset}"
