"""factscope study: people compare the texts of two methods without knowing which is which."""

import json
import math
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from factscope.cli.flags import Command, Options
from factscope.cli.output import doing, note, print_json, say
from factscope.errors import BadSetting, BadStudy
from factscope.settings import Flag

if TYPE_CHECKING:
    from factscope.analysis.preferences import Preference
    from factscope.extras.study import Study
    from factscope.records import CaseRecord

FORM, KEY = "form.html", "key.json"


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """Options."""

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


def build(options: BuildOptions) -> None:
    """Make a form in which people compare the texts of two methods, blind.

    form.html is for the people; it works offline and sends nothing. key.json says which method
    wrote what: do not share it.
    """
    from factscope.extras.study import build_study
    from factscope.report.studies import form_page

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
    _write(key, study.to_json())
    _write(form, form_page(study, options.title))
    count = len({item.case for item in study.items})
    failed = {
        name: sum(record.failed for record in run_records) for name, run_records in records.items()
    }
    if options.json:
        print_json({
            "form": str(form), "key": str(key), "study": study.id, "pairs": len(study.items),
            "cases": count, "methods": list(study.methods), "failed": failed,
        })  # fmt: skip
        return
    for name, failures in failed.items():
        if failures:
            note(f"{name}: {failures} cases have no edit and cannot be compared.")
    if count < requested:
        note(f"Only {count} cases have texts that differ; {requested} were requested.")
    say(f"{len(study.items)} pairs of texts on {count} cases.")
    say(f"For the people who compare them: {form}")
    say(f"For you alone, which method wrote what: {key}")
    say(f"Next: factscope study report ANSWERS… --key {key}")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """Options."""

    answers: Annotated[tuple[Path, ...], Flag(positional=True)]
    """The JSON files that people sent back."""
    key: Annotated[Path, Flag(short="k")] = Path("study") / KEY
    """The key.json that was written with the form."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Folder to write to; `report` in the key's folder if not given."""


def report(options: ReportOptions) -> None:
    """Count the answers: ratios with 95 % intervals, a figure and a page. Needs no model."""
    from factscope.analysis.preferences import preferences
    from factscope.extras.study import read_answers, votes
    from factscope.report.studies import preference_sentence, preference_table, write_study_report
    from factscope.report.tables import as_markdown

    study = _read_key(options.key)
    given = votes(study, read_answers(study, list(options.answers)).values())
    folder = options.out or options.key.parent / "report"
    with doing("drawing"):
        written = write_study_report(study, given, folder)
    results = preferences(given)
    if options.json:
        files, values = [str(path) for path in written], [preference_values(x) for x in results]
        print_json({"files": files, "study": study.id, "preferences": values})
        return
    say(as_markdown(preference_table(results)))
    for result in results:
        say(preference_sentence(result))
    say(f"{len(written)} files; open {folder / 'index.html'}")


COMMANDS = {
    "build": Command(run=build, base=lambda given: BuildOptions),
    "report": Command(run=report, base=lambda given: ReportOptions),
}


def _comparable_records(*paths: Path) -> "dict[str, list[CaseRecord]]":
    """The records of the runs by name, if their texts can be compared."""
    from factscope.extras.study import check_comparable
    from factscope.runs.folder import RunFolder

    if paths[0].resolve() == paths[1].resolve():
        raise BadSetting(f"{paths[0]} is given twice; a study compares two runs")
    runs = {str(path): RunFolder.open(path) for path in paths}
    for name, run in runs.items():
        if run.command != "evaluate":
            raise BadStudy(f"{name} is a run of {run.command}; `factscope evaluate` writes texts")
    check_comparable({name: run.spec() for name, run in runs.items()})
    infos = [path / "info.json" for path in paths if (path / "info.json").is_file()]
    weights = [json.loads(info.read_text("utf-8")).get("model_fingerprint") for info in infos]
    if len(set(weights)) > 1:
        raise BadStudy(
            f"{paths[0]} and {paths[1]} cannot be compared: under one name they have different "
            f"weights ({' and '.join(map(str, weights))})"
        )
    return {name: run.case_records() for name, run in runs.items()}


def _write(path: Path, text: str) -> None:
    from factscope.io import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        raise BadSetting(f"cannot write {path} ({error.strerror or error})") from error


def _read_key(path: Path) -> "Study":
    from factscope.extras.study import Study

    try:
        return Study.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadStudy(
            f"{path} cannot be read ({reason}); give the key that was written with the form: --key"
        ) from error
    except BadStudy as error:
        raise BadStudy(f"{path}: {error}") from error


def preference_values(one: "Preference") -> dict[str, Any]:
    """A preference as JSON values; an infinite ratio, or one without votes, is null."""
    ratios = (one.ratio, one.ratio_interval.low, one.ratio_interval.high)
    finite = [ratio if math.isfinite(ratio) else None for ratio in ratios]
    return {
        "question": one.question, "pair": list(one.pair), "wins": list(one.wins),
        "ties": one.ties, "ratio": finite[0], "ratio_interval": finite[1:],
        "fraction": one.fraction if one.votes else None,
        "fraction_interval": [one.interval.low, one.interval.high],
        "independent_interval": [one.independent_interval.low, one.independent_interval.high],
        "effective_votes": one.effective, "left": one.left, "raters": one.raters,
        "cases": one.cases, "agreement": one.agreement,
    }  # fmt: skip
