"""factscope study: people compare the texts of two methods without knowing which is which."""

import secrets
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from factscope.cli.flags import Command, Options
from factscope.cli.output import doing, note
from factscope.errors import BadSetting, BadStudy
from factscope.io import atomic_files, check_output_folder, read_json, write_atomic
from factscope.records import CaseRecord
from factscope.runs.folder import RunFolder
from factscope.settings import Flag

FORM, KEY = "form.html", "key.json"


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    run_a: Annotated[Path, Flag(positional=True)]
    """A run folder of `factscope evaluate`."""
    run_b: Annotated[Path, Flag(positional=True)]
    """Another one, of the same model and cases."""
    out: Annotated[Path, Flag(short="o")] = Path("study")
    """Folder for form.html and key.json."""
    num_cases: Annotated[int, Ge(1)] = 50
    """Number of cases, drawn at random."""
    per_rater: Annotated[int | None, Ge(1)] = None
    """Pairs that each person gets, drawn at random; all if not given."""
    unedited: bool = False
    """Also compare both with the unedited model."""
    title: str = "Which text is better?"
    """Title of the form."""
    seed: Annotated[int | None, Ge(0)] = None
    """Seed, to get the same form again; a secret one is drawn if not given."""


@Command
def build(options: BuildOptions) -> None:
    """Make a form in which people compare the texts of two methods, blind.

    form.html is for the people; it works offline and sends nothing. key.json says which method
    wrote what: do not share it.
    """
    from factscope.extras.study import build_study
    from factscope.report.studies import form_page

    check_output_folder(options.out)
    requested, records = options.num_cases, _comparable_records(options.run_a, options.run_b)
    study = build_study(
        records, cases=requested, unedited=options.unedited, per_rater=options.per_rater,
        seed=secrets.randbits(64) if options.seed is None else options.seed,
    )  # fmt: skip
    key, form = options.out / KEY, options.out / FORM
    if key.is_file() and key.read_text("utf-8", errors="replace") != study.to_json():
        raise BadStudy(
            f"{key} is the key of another study, whose answers cannot be read without it; give "
            "another folder with --out"
        )
    # Both or none: a form without its key is of no use.
    with atomic_files(options.out) as partial:
        write_atomic(partial / KEY, study.to_json())
        write_atomic(partial / FORM, form_page(study, options.title))
    count = len({item.case for item in study.items})
    failed = {name: sum(record.failed for record in run) for name, run in records.items()}
    if not options.json:
        for name, failures in failed.items():
            if failures:
                note(f"{name}: {failures} cases have no edit and cannot be compared.")
        if count < requested:
            note(f"Only {count} cases have texts that differ; {requested} were requested.")
    options.print_result(
        {
            "form": form, "key": key, "study": study.id, "pairs": len(study.items),
            "cases": count, "methods": study.methods, "failed": failed,
        },
        f"{len(study.items)} pairs of texts on {count} cases.",
        f"For the people who compare them: {form}",
        f"For you alone, which method wrote what: {key}",
        f"Next: factscope study report ANSWERS… --key-file {key}",
    )  # fmt: skip


def _comparable_records(*paths: Path) -> dict[str, list[CaseRecord]]:
    """The records of the runs by name, if their texts can be compared."""
    from factscope.extras.study import check_comparable

    if paths[0].resolve() == paths[1].resolve():
        raise BadSetting(f"{paths[0]} is given twice; a study compares two runs")
    runs = {str(path): RunFolder.open(path) for path in paths}
    for name, run in runs.items():
        if run.command != "evaluate":
            raise BadStudy(f"{name} is a run of {run.command}; `factscope evaluate` writes texts")
    check_comparable({name: run.spec() for name, run in runs.items()})
    infos = [read_json(path / "info.json") for path in paths if (path / "info.json").is_file()]
    weights = [info.get("model_fingerprint") for info in infos if isinstance(info, dict)]
    if len(set(weights)) > 1:
        raise BadStudy(
            f"{paths[0]} and {paths[1]} cannot be compared: under one name they have different "
            f"weights ({' and '.join(map(str, weights))})"
        )
    return {name: run.case_records() for name, run in runs.items()}


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    answers: Annotated[tuple[Path, ...], Flag(positional=True)]
    """The JSON files that people sent back."""
    key_file: Annotated[Path, Flag(short="k")] = Path("study") / KEY
    """The key.json that was written with the form."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Folder to write to; `report` in the key's folder if not given."""


@Command
def report(options: ReportOptions) -> None:
    """Count the answers: ratios with 95 % intervals, a figure and a page. Needs no model."""
    from factscope.analysis.preferences import preferences
    from factscope.extras.study import Study, read_answers, votes
    from factscope.report.studies import preference_sentence, preference_table, write_study_report
    from factscope.report.tables import as_markdown

    key, out = options.key_file, options.out or options.key_file.parent / "report"
    check_output_folder(out)
    try:
        study = Study.from_json(key.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadStudy(
            f"{key} cannot be read ({reason}); give the form's key with --key-file"
        ) from error
    except BadStudy as error:
        raise BadStudy(f"{key}: {error}") from error
    given = votes(study, read_answers(study, list(options.answers)).values())
    with doing("drawing"):
        files = write_study_report(study, given, out)
    found = preferences(given)
    values = [
        {
            "question": one.question, "pair": one.pair, "wins": one.wins, "ties": one.ties,
            "ratio": one.ratio, "ratio_interval": astuple(one.ratio_interval),
            "fraction": one.fraction, "fraction_interval": astuple(one.interval),
            "independent_interval": astuple(one.independent_interval),
            "effective_votes": one.effective, "left": one.left, "raters": one.raters,
            "cases": one.cases, "agreement": one.agreement,
        }
        for one in found
    ]  # fmt: skip
    options.print_result(
        {"files": files, "study": study.id, "preferences": values},
        as_markdown(preference_table(found)),
        *map(preference_sentence, found),
        f"{len(files)} files; open {files[0]}",
    )
