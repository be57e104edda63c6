"""factscope train: the hypernetworks of MEND and KE."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt

from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import note, working
from factscope.editing.hypernet.settings import Locality, MendConfig, Training, network_config
from factscope.errors import BadSetting
from factscope.io import check_output_folder
from factscope.settings import Flag

if TYPE_CHECKING:
    from factscope.records import TrainingRecord
    from factscope.runs.train import FromCases, FromText

TRAINING_SETS = {"counterfact": "counterfact-train", "zsre": "zsre-train"}
"""Data set for evaluation → its training split, used without the subjects of the former."""
MINUTES = 10.0
"""Training time if neither --steps nor --minutes is given."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    method: Annotated[Literal["mend", "ke"], Flag(positional=True, required=True)] = "mend"
    """The method whose network is trained."""
    data: str = "text"
    """Training data: counterfact, zsre, text, or a file of cases."""
    text: Path | None = None
    """With --data text: a text file; text that the model generates if not given."""
    exclude: tuple[str, ...] = ()
    """Cases not to train on, as FILE or counterfact:7500 for the first 7500. Repeatable."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use at most N examples."""
    locality: Locality = "unrelated"
    """Prompts that an edit must not change: of unrelated facts, or of neighbours of the same
    fact."""
    target_tokens: Annotated[int, Ge(1)] = 10
    """With --data text: tokens that an edit teaches."""
    out: Annotated[Path, Flag(short="o", required=True)] = Path()
    """Run folder. An interrupted run resumes."""
    steps: Annotated[int | None, Ge(1)] = None
    """Train for at most N steps."""
    minutes: Annotated[float | None, Gt(0)] = None
    """Train for at most this long; 10 if neither --steps nor --minutes is given."""
    model: ModelOptions = field(default_factory=ModelOptions)
    training: Training = field(default_factory=lambda: Training(network=MendConfig()))

    chosen_by, chosen_first = ("method",), True

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "TrainOptions":
        """The settings of the method."""
        return cls(training=Training(network=network_config(given.get("method", "mend"))))

    def source(self) -> "FromCases | FromText":
        """The training data."""
        from factscope.runs.train import FromText

        if self.data != "text":
            if self.text is not None:
                raise BadSetting("--text goes with --data text")
            return self._cases()
        if self.exclude:
            raise BadSetting("--exclude goes with --data counterfact, zsre or a file of cases")
        if self.text is not None:
            from factscope.stats.text import check_text

            check_text(self.text)
        source = FromText(path=self.text, target_tokens=self.target_tokens, seed=self.training.seed)
        return source if self.limit is None else replace(source, limit=self.limit)

    def _cases(self) -> "FromCases":
        from factscope.data.registry import find_data, find_local
        from factscope.runs.train import FromCases

        data, excluded = self.data, []
        for word in self.exclude:
            name, _, count = word.rpartition(":")
            first = (name, int(count)) if name and count.isdigit() else (word, None)
            excluded.append((find_data(first[0]), first[1]))
        split = find_local(TRAINING_SETS[data]) if data in TRAINING_SETS else None
        path = find_data(data) if split is None else split.path
        if data in TRAINING_SETS and not excluded:
            if split is None:
                raise BadSetting(
                    f"{TRAINING_SETS[data]} is missing, and {data} is for evaluation; train on the "
                    f"rest of it with --exclude {data}:7500 (the first 7500), or give a file of "
                    "cases"
                )
            evaluated = find_local(data)
            if evaluated is None:
                note(
                    f"{data} is missing, so its subjects cannot be excluded; evaluate on no case "
                    "that is trained on, or name the cases with --exclude",
                    style="yellow",
                )
            else:
                excluded = [(evaluated.path, None)]
        name = data if data in TRAINING_SETS else Path(data).name.partition(".")[0]
        return FromCases(
            name=name, path=path, exclude=tuple(excluded), limit=self.limit,
            locality=self.locality, seed=self.training.seed,
        )  # fmt: skip


@Command
def train(options: TrainOptions) -> None:
    """Train a hypernetwork for a model: MEND or KE.

    Then: factscope edit … --method mend --weights FOLDER/weights.safetensors
    """
    from factscope.report.style import save_figure
    from factscope.report.training import TrainingCurve, training_figure
    from factscope.runs.train import TrainRun

    minutes = MINUTES if options.steps is None and options.minutes is None else options.minutes
    check_output_folder(options.out)
    source = options.source()
    lm = options.model.load()
    run = TrainRun(
        model=options.model.model, dtype=options.model.dtype, source=source,
        training=options.training, steps=options.steps, minutes=minutes,
    )  # fmt: skip
    trainer = run.trainer(lm)  # before the folder, so that a mistake leaves none
    folder = run.create_or_open(lm, options.out)
    with working(f"training {options.method}") as done:
        weights = run.run(
            lm, folder, trainer, progress=done, on_evaluation=lambda record: note(_line(record))
        )
    curve = TrainingCurve.of(folder.spec(), folder.training_records())
    figure = weights.with_name("training.png")
    save_figure(training_figure(curve), figure)
    options.print_result(
        {
            "weights": weights, "figure": figure, "best": asdict(curve.best),
            "last": asdict(curve.evaluations[-1]),
        },
        _line(curve.best),
        f"{weights}\nNext: factscope evaluate --method {curve.method} --weights {weights} --out …",
    )  # fmt: skip


def _line(record: "TrainingRecord") -> str:
    """An evaluation on the validation examples in one line."""
    rate = record.step / record.seconds if record.seconds else 0.0
    return (
        f"step {record.step:>6}  loss {record.loss:.4f}  success {record.edit_accuracy:.0%}, "
        f"paraphrases {record.rephrase_accuracy:.0%}  locality KL {record.locality_loss:.4f}, "
        f"unchanged {record.locality_accuracy:.0%}  {rate:.2g} steps/s"
    )
