"""factscope train: the networks of learned editors, MEND and KE."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, results, working
from factscope.cli.stats import parse_layers
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.analysis.training import TrainingCurve
    from factscope.records import TrainingRecord
    from factscope.runs.train import FromCases, FromText

__all__ = ["train"]

SETS = {"counterfact": "counterfact-train", "zsre": "zsre-train"}
"""What is evaluated on → what is trained on, where it is there, without the evaluated subjects."""
MINUTES = 10.0
"""How long training takes where nothing is said."""


def _learning(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Learning", **more)


def train(
    method: Annotated[str, typer.Argument(help="mend or ke.")],
    data: Annotated[
        str, typer.Option(help="counterfact, zsre, text, or a file of cases to learn from.")
    ] = "text",
    text: Annotated[
        Path | None, typer.Option(help="With --data text: a text file; else the model's own text.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Cases not to learn from, as FILE or counterfact:7500; repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="How many examples at most.", min=1)] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; it can be gone on with.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train, at most.", min=1)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes to train, at most; 10 if neither is given.")
    ] = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
    layer: Annotated[
        list[str] | None,
        _learning("Layers whose MLPs are edited, as 27-29; the last three.", "--layer", "-l"),
    ] = None,
    rank: Annotated[int | None, _learning("Rank of MEND's layers.", min=1)] = None,
    lr: Annotated[float | None, _learning("Adam's learning rate.")] = None,
    batch: Annotated[int | None, _learning("Edits a step.")] = None,
    edit_weight: Annotated[float | None, _learning("What the edits' loss counts.")] = None,
    local_weight: Annotated[float | None, _learning("What changes elsewhere count.")] = None,
    locality: Annotated[
        str, _learning("What must stay: unrelated prompts, or neighbours of the same fact.")
    ] = "unrelated",
    tokens: Annotated[int, _learning("With --data text: tokens that an edit teaches.", min=1)] = 10,
    held_out: Annotated[int | None, _learning("Examples that are only looked at.")] = None,
    every: Annotated[int | None, _learning("Steps between looks at those.")] = None,
    patience: Annotated[int | None, _learning("Looks without progress before it stops.")] = None,
    seed: Annotated[int, _learning("Seed of the network and of the order of examples.")] = 0,
) -> None:
    """Train a learned editor for a model, into a folder that survives a kill.

    Then: factscope edit … --method mend --weights FOLDER/weights.safetensors
    """
    from factscope.analysis.training import TrainingCurve
    from factscope.editing.hypernet.train import Training
    from factscope.lm.load import load
    from factscope.runs.train import TrainRun

    if out is None:
        raise BadSetting("give --out FOLDER: the weights go there, and training goes on from there")
    if steps is None and minutes is None:
        minutes = MINUTES
    said = {
        "lr": lr, "batch": batch, "edit_weight": edit_weight, "local_weight": local_weight,
        "held_out": held_out, "every": every, "patience": patience,
    }  # fmt: skip
    training = Training(
        method=method,
        layers=None if layer is None else tuple(parse_layers(layer)),
        design=() if rank is None else (("rank", rank),),
        seed=seed,
        **{name: value for name, value in said.items() if value is not None},
    )
    source = _source(data, text, exclude, limit, locality, tokens, seed)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype, device_map=device_map)
    run = TrainRun(
        model=model, dtype=dtype, source=source, training=training, steps=steps, minutes=minutes
    )
    trainer = run.trainer(lm)  # a mistake leaves no folder
    folder = run.begin(lm, out)

    def seen(record: "TrainingRecord") -> None:
        notes.print(_line(record), soft_wrap=True)

    with working(f"training {method}") as done:
        weights = run.go_on(lm, folder, trainer, progress=done, seen=seen)
    _tell(TrainingCurve.of(folder.spec(), folder.training_records()), weights, json)


# ---- what was asked for


def _source(
    data: str, text: Path | None, exclude: list[str] | None, limit: int | None, locality: str,
    tokens: int, seed: int,
) -> "FromCases | FromText":  # fmt: skip
    """What to learn from."""
    from factscope.runs.train import FromText

    if data != "text":
        if text is not None:
            raise BadSetting("--text goes with --data text")
        return _cases(data, exclude, limit, locality, seed)
    if exclude:
        raise BadSetting("--exclude goes with --data counterfact, zsre or a file of cases")
    if text is not None and not text.is_file():
        raise BadSetting(f"there is no text file {text}")
    made = FromText(path=text, tokens=tokens, seed=seed)
    return made if limit is None else replace(made, count=limit)


def _cases(
    data: str, exclude: list[str] | None, limit: int | None, locality: str, seed: int
) -> "FromCases":
    from factscope.data.registry import find_data, find_local
    from factscope.editing.hypernet.examples import Locality
    from factscope.runs.train import FromCases

    if locality not in get_args(Locality):
        known = ", ".join(get_args(Locality))
        raise BadSetting(f"--locality {locality!r} is not one of {known}")
    left = [_excluded(word) for word in exclude or ()]
    apart = find_local(SETS[data]) if data in SETS else None
    path = find_data(data) if apart is None else apart.path
    if data in SETS and not left:
        if apart is None:
            raise BadSetting(
                f"{SETS[data]} is not here, and {data} is what is evaluated on; train on the rest "
                f"of it with --exclude {data}:7500 (the first 7500), or give a file of cases"
            )
        evaluated = find_local(data)
        if evaluated is None:
            notes.print(
                f"{data} is not here, so that its subjects cannot be left out; evaluate on none "
                "of what is trained on, or name it with --exclude",
                style="yellow",
                soft_wrap=True,
            )
        else:
            left = [(evaluated.path, None)]
    return FromCases(
        name=data if data in SETS else Path(data).name.partition(".")[0],
        path=path,
        exclude=tuple(left),
        limit=limit,
        locality=locality,  # pyright: ignore[reportArgumentType]
        seed=seed,
    )


def _excluded(word: str) -> tuple[Path, int | None]:
    """A file or a data set's name, and how many of its first cases."""
    from factscope.data.registry import find_data

    name, _, count = word.rpartition(":")
    if name and count.isdigit():
        return find_data(name), int(count)
    return find_data(word), None


# ---- what came out


def _line(record: "TrainingRecord") -> str:
    """A look at the held-out examples in a line."""
    rate = record.step / record.seconds if record.seconds else 0.0
    return (
        f"step {record.step:>6}  loss {record.loss:.4f}  said {record.said:.0%}, "
        f"in other words {record.said_rephrased:.0%}  elsewhere KL {record.local:.4f}, "
        f"unchanged {record.kept:.0%}  {rate:.2g} steps/s"
    )


def _tell(course: "TrainingCurve", weights: Path, json: bool) -> None:
    """The figure of the losses, and what to do next."""
    from factscope.report.figures.training import training_figure
    from factscope.report.style import save_figure

    figure = weights.with_name("training.png")
    save_figure(training_figure(course), figure)
    if json:
        files = {"weights": str(weights), "figure": str(figure)}
        print_json({**files, "best": asdict(course.best), "last": asdict(course.looks[-1])})
        return
    results.print(_line(course.best), soft_wrap=True)
    results.print(
        f"{weights}\nNext: factscope evaluate --method {course.method} --weights {weights} --out …",
        soft_wrap=True,
    )
