"""factscope calibrate: measure good settings for a model, and keep them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from factscope.cli.evaluate import data_name
from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import note, print_json, say, skipped, working
from factscope.cli.stats import collect_statistics
from factscope.errors import BadCalibration
from factscope.evaluation.settings import CalibrationSettings
from factscope.io import check_output_folder
from factscope.settings import Flag

if TYPE_CHECKING:
    from factscope.editing.calibration import Calibration
    from factscope.facts import Fact
    from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Options):
    """Options."""

    data: str = "everyday"
    """Cases to measure on: counterfact, everyday, or a file of cases."""
    text: Path | None = None
    """Text file for the statistics of all layers that are tried, also .gz. If not given, layers
    without statistics get them as in `factscope edit`."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Run folder; in the user's cache if not given. An interrupted run resumes."""
    model: ModelOptions = field(default_factory=ModelOptions)
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)


@Command
def run(options: CalibrateOptions) -> None:
    """Measure good settings of ROME, MEMIT and FT+L for a model; `edit` and `evaluate` use them.

    The word "run" can be left out.
    """
    from factscope.data.registry import find_data
    from factscope.editing.calibration import calibration_folder, calibration_path
    from factscope.runs.calibrate import CalibrateRun
    from factscope.stats.text import check_text

    if options.out is not None:
        check_output_folder(options.out)
    if options.text is not None:
        check_text(options.text)
    model, data = options.model, find_data(options.data)
    calibrate = CalibrateRun(
        model=model.model, dtype=model.dtype, data=data, name=data_name(options.data),
        settings=options.settings,
    )  # fmt: skip
    file = calibrate.read()
    skipped(file.problems)
    lm = model.load()
    out = options.out or calibration_folder(lm.fingerprint) / "run"
    folder = calibrate.create_or_open(lm, out)
    with working("calibrating") as done:
        calibration = calibrate.run(
            lm, folder, file.cases, _Statistics(lm, options.text), tell=note, progress=done
        )
    path = calibration_path(lm.fingerprint)
    calibration.save(path)
    if options.json:
        print_json({"run": out, "file": path, **_to_dict(calibration)})
        return
    _print(calibration)
    say(f"Kept in {path}: edit, evaluate and serve use it for this model from now on.")
    say(f"Next: factscope report {out}")


class _Statistics:
    """Collects statistics of layers until C⁻¹k of the facts stops moving; without a given text
    only of layers whose statistics are missing or few."""

    def __init__(self, lm: "LM", text: Path | None) -> None:
        self.lm, self.text = lm, text
        self.finished: set[int] = set()

    def __call__(self, layers: Sequence[int], facts: "Sequence[Fact]", seconds: float) -> None:
        new = [layer for layer in layers if layer not in self.finished]
        if new:
            collect_statistics(self.lm, new, self.text, facts=facts, seconds=seconds)
        self.finished |= set(new)


@dataclass(frozen=True, kw_only=True)
class UseOptions(Options):
    """Options."""

    file: Annotated[Path, Flag(positional=True)]
    """A calibration that `factscope calibrate` wrote, also on another machine."""


@Command
def use(options: UseOptions) -> None:
    """Use a shared calibration: check it and copy it into the cache. Needs no model."""
    from factscope.editing.calibration import calibration_path, load_calibration

    calibration = load_calibration(options.file)
    path = calibration_path(calibration.fingerprint)
    calibration.save(path)
    if options.json:
        print_json({"file": path, **_to_dict(calibration)})
        return
    _print(calibration)
    say(f"Kept in {path}, for models with the fingerprint {calibration.fingerprint[:16]}.")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Options."""

    files: Annotated[tuple[Path, ...], Flag(positional=True)] = ()
    """Calibration files; those in the cache if not given."""


@Command
def show(options: ShowOptions) -> None:
    """Show calibrations: their settings and scores. Needs no model."""
    from factscope.editing.calibration import calibration_path, load_calibration

    files = options.files or tuple(sorted(calibration_path("*").parent.parent.glob("*/*.json")))
    if not files:
        raise BadCalibration("there is no calibration yet; `factscope calibrate` makes one")
    calibrations = [load_calibration(file) for file in files]
    if options.json:
        values = [
            {"file": file, **_to_dict(x)} for file, x in zip(files, calibrations, strict=True)
        ]
        print_json(values)
        return
    for file, calibration in zip(files, calibrations, strict=True):
        say(str(file), style="bold")
        _print(calibration)


def _to_dict(calibration: "Calibration") -> Mapping[str, Any]:
    return {
        "model": calibration.model,
        "fingerprint": calibration.fingerprint,
        "settings": calibration.settings,
        "evidence": calibration.evidence,
    }


def _print(calibration: "Calibration") -> None:
    """The settings of each method, and the scores before and after."""
    from factscope.analysis.calibration import settings_text
    from factscope.report.calibrations import calibration_table, methods_table, statistics_table
    from factscope.report.tables import as_markdown

    say(f"{calibration.model} ({calibration.fingerprint[:12]})")
    for method, values in calibration.settings.items():
        say(f"  {method}: {settings_text(values)}")
    if calibration.evidence:
        tables = (f(calibration) for f in (calibration_table, methods_table, statistics_table))
        for table in tables:
            if table is not None and table.rows:
                say(as_markdown(table))
