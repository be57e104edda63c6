"""factscope evaluate and sweep: an editor on many cases, into a run folder."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from factscope.cli.edit import MethodOptions, advice, note_defaults
from factscope.cli.flags import Command
from factscope.cli.output import doing, note, skipped, working
from factscope.cli.report import print_sweep
from factscope.cli.stats import each_with_statistics, with_statistics
from factscope.editing.settings import EDITORS, HypernetEditor, Memit
from factscope.errors import BadSetting, FactscopeError, UnsafeEdit
from factscope.evaluation.settings import ScoringOptions
from factscope.io import check_output_folder
from factscope.settings import Flag, settings_of

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.lm.model import LM
    from factscope.runs.evaluate import EvaluateRun, Executor


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(MethodOptions):
    data: str = "everyday"
    """counterfact, zsre, everyday, or a file of cases."""
    out: Annotated[Path, Flag(short="o", required=True)] = Path()
    """Run folder. An interrupted run resumes."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only the first N cases."""
    protocol: Literal["single", "sequential", "batch"] = "single"
    """One edit per fact, facts one after another into the same model, or many facts in one edit."""
    facts_per_edit: Annotated[int | None, Ge(1)] = None
    """With --protocol batch: facts in one edit; all if not given."""
    references: str | None = None
    """Reference texts for RS: a file, or snippets for the paper's."""
    engine: Literal["local", "ray"] = "local"
    """Compute in this process, or spread the cases over Ray actors."""
    ray_address: str | None = None
    """Address of a Ray cluster; started on this machine if not given."""
    ray_workers: Annotated[int | None, Ge(1)] = None
    """Ray actors; one per GPU if not given."""
    scoring: ScoringOptions = field(default_factory=ScoringOptions)

    def __post_init__(self) -> None:
        if self.facts_per_edit is not None and self.protocol != "batch":
            raise BadSetting("--facts-per-edit goes with --protocol batch")
        if self.engine == "ray":  # before any work, and in a recipe before its first run
            from factscope.runs.ray import check_ray

            check_ray(self.protocol)
        elif self.ray_address is not None or self.ray_workers is not None:
            raise BadSetting("--ray-address and --ray-workers go with --engine ray")

    def evaluation(self) -> "EvaluateRun":
        """The run; its data files are found, or downloaded."""
        from factscope.data.registry import find_data
        from factscope.evaluation.cases import load_reference_similarity
        from factscope.runs.evaluate import EvaluateRun

        check_output_folder(self.out)
        editor = self.checked_editor()
        data, references, similarity = find_data(self.data), None, None
        if self.references is not None:
            references = find_data(self.references)
            more = ("idf", "vocabulary") if self.references == "snippets" else ()
            with doing("reading reference texts"):
                similarity = load_reference_similarity(references, *map(find_data, more))
        return EvaluateRun(
            model=self.model.model, dtype=self.model.dtype, data=data, name=data_name(self.data),
            method=_row_name(editor, self.preset), editor=editor, protocol=self.protocol,
            batch_size=self.facts_per_edit, limit=self.limit, scoring=self.scoring,
            similarity=similarity, references=references,
        )  # fmt: skip

    def load(self) -> "LM":
        """The model for this process; Ray actors load it on their own devices."""
        return self.model.load(device="cpu" if self.engine == "ray" else None)

    def executor(self, lm: "LM", run: "EvaluateRun") -> "AbstractContextManager[Executor | None]":
        """The executor of a run's work items; None for this process."""
        if self.engine == "local":
            return nullcontext()
        from factscope.runs.ray import make_evaluation, ray_executor

        resolved = replace(run, editor=run.editor.resolve(lm))
        make = partial(make_evaluation, resolved, self.model.device)
        return ray_executor(make, run.protocol, address=self.ray_address, workers=self.ray_workers)


def data_name(data: str) -> str:
    """Name of a data set in records and tables: its own, or that of its file."""
    from factscope.data.registry import DATA_SETS

    file = Path(data).name.removesuffix(".gz")
    known = (name for name, data_set in DATA_SETS.items() if file in data_set.files)
    return next(known, file.partition(".")[0])


def _row_name(editor: "Editor", preset: str) -> str:
    """Name of a method in tables: with the preset where that differs from the default.

    A hypernetwork's name depends on its training data, as in the paper.
    """
    if isinstance(editor, HypernetEditor):
        return editor.row
    presets = EDITORS[editor.method]
    is_default = presets[preset] == presets["default"]
    return editor.method if is_default else f"{editor.method}, {preset}"


@dataclass(frozen=True, kw_only=True)
class EvaluateCommandOptions(EvaluateOptions):
    force: bool = False
    """Exit with code 0 even if every edited model is broken."""


@Command
def evaluate(options: EvaluateCommandOptions) -> None:
    """Edit and score many cases: the metrics of the paper, into a run folder."""
    from factscope.analysis.estimate import to_dict
    from factscope.analysis.metrics import summarize
    from factscope.report.evaluations import evaluation_tables
    from factscope.report.tables import as_markdown

    run = options.evaluation()
    file = run.read()
    skipped(file.problems)
    lm = options.load()
    facts = [case.request for case in file.cases]
    note_defaults(lm, run.editor, (run.batch_size or len(facts)) if run.protocol == "batch" else 1)
    run = replace(run, editor=with_statistics(lm, run.editor, facts))
    resolved = replace(run, editor=run.editor.resolve(lm))
    folder = run.create_or_open(lm, options.out)
    with options.executor(lm, resolved) as executor, working("evaluating", len(file.cases)) as done:
        resolved.run(lm, folder, file.cases, executor=executor, progress=done)
    records = folder.case_records()
    summaries, problems = summarize(records), list(file.problems)
    broken = [record for record in records if record.broken]
    if not options.json:
        for record in [record for record in records if record.failed][:5]:
            note(f"failed: case {record.fact.id}: {record.error}")
        for record in broken[:5]:
            note(f"broken: case {record.fact.id}: {record.broken}", style="bold red")
    options.print_result(
        {"run": options.out, "left_out": problems, "summaries": list(map(to_dict, summaries))},
        *map(as_markdown, evaluation_tables(summaries, include_published=False)),
        f"Next: factscope report {options.out}",
    )
    if any(row.broken == row.cases for row in summaries if row.edited) and not options.force:
        raise UnsafeEdit(
            f"every edited model is broken (case {broken[-1].fact.id}: {broken[-1].broken}); the "
            f"scores are in {options.out}. Try {advice(run.editor.method)} (--force accepts it)"
        )


# ---- sweep


@dataclass(frozen=True, kw_only=True)
class SweepOptions(EvaluateOptions):
    grid: tuple[str, ...] = ()
    """Setting and its values: layer=0-29, token=subject-last,last, max-change=1e-4,none or
    prefix-lengths=none;5x10,10x10. Repeatable; every combination is evaluated."""
    scoring: ScoringOptions = field(default_factory=lambda: ScoringOptions(length=0))

    def axes(self) -> dict[str, dict[Any, Any]]:
        """Field → value as it is recorded → value of the setting."""
        from factscope.analysis.sweep import AXES

        axes: dict[str, dict[Any, Any]] = {}
        for word in self.grid:
            name, equals, values = word.partition("=")
            axis = name.strip().replace("-", "_")
            if not equals or axis not in AXES:
                flags = ", ".join(axis.replace("_", "-") for axis in AXES)
                raise BadSetting(f"--grid is {word!r}; write NAME=VALUES, with NAME from {flags}")
            if axis in axes:
                raise BadSetting(f"--grid {name} is given twice; give all its values at once")
            axes[axis] = self._values(name.strip(), values)
            if not axes[axis]:
                raise BadSetting(f"--grid is {word!r}; it has no values")
        if not axes:
            raise BadSetting("a sweep needs a grid, e.g. --grid layer=0-29")
        return axes

    def _values(self, name: str, text: str) -> dict[Any, Any]:
        """The values of an axis; those that contain commas are separated by semicolons."""
        setting = settings_of(self.editor).get(name)
        if setting is None:
            advice = "; leave it out, or choose another --method"
            if name == "layer" and isinstance(self.editor, Memit):
                advice = ": it edits several layers at once, which `evaluate --layers` gives"
            raise BadSetting(f"{self.method} has no --{name}{advice}")
        words = [w.strip() for w in text.split(";" if setting.repeated else ",") if w.strip()]
        if int in setting.types:
            layers = replace(setting, type=tuple[int, ...]).parse(words) if words else ()
            return {layer: layer for layer in layers}
        values = [setting.parse(word) for word in words]
        return {x if isinstance(x, int | float | str) else setting.text(x): x for x in values}


@Command
def sweep(options: SweepOptions) -> None:
    """Evaluate a method at every point of a grid of layers, tokens, limits or prefix lengths.

    Every point is an evaluation in a folder of its own; the unedited model is scored once.
    """
    from factscope.analysis.sweep import grid_points
    from factscope.runs.sweep import SweepPoint, SweepRun

    axes, base = options.axes(), options.evaluation()
    grid = {axis: list(values) for axis, values in axes.items()}
    settings = grid_points(grid)
    changes = [{axis: axes[axis][value] for axis, value in point.items()} for point in settings]
    editors: list[Any] = [replace(base.editor, **x) for x in changes]  # pyright: ignore
    file = base.read()
    skipped(file.problems)
    lm = options.load()
    facts = [case.request for case in file.cases]
    run = SweepRun(base=base, grid=grid)
    folder = run.create_or_open(lm, options.out)
    points = []
    for point, own in zip(settings, each_with_statistics(lm, editors, facts), strict=True):
        if not isinstance(own, FactscopeError):
            # The method can change: FT with a limit is FT+L, and FT+L without one is FT.
            own = replace(base, editor=own, method=_row_name(own, options.preset))
        points.append(SweepPoint(settings=point, run=own))
    with working(f"{len(points)} points: cases", len(points) * len(file.cases)) as done:
        run.run(
            lm, folder, points, file.cases,
            make_executor=lambda own: options.executor(lm, own), progress=done,
        )  # fmt: skip
    print_sweep(folder, options)
