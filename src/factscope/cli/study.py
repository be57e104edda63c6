"""factscope study: people compare what two methods wrote, and what came of it."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Json
from factscope.cli.show import doing, notes, print_json, results
from factscope.errors import BadSetting, BadStudy

if TYPE_CHECKING:
    from factscope.analysis.preferences import Preference
    from factscope.extras.study.pairs import Study
    from factscope.runs.folder import RunFolder

__all__ = ["study"]

study = typer.Typer(help="Human evaluation: a blind form, and what people chose.")
FORM, KEY = "form.html", "key.json"


@study.command()
def build(
    run_a: Annotated[Path, typer.Argument(help="A run that `factscope evaluate` wrote.")],
    run_b: Annotated[Path, typer.Argument(help="Another, of the same model and cases.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for form.html and key.json.")
    ] = Path("study"),
    cases: Annotated[int, typer.Option(min=1, help="How many cases, drawn at random.")] = 50,
    per_rater: Annotated[
        int | None,
        typer.Option(min=1, help="How many pairs each person gets, drawn at random; all if not."),
    ] = None,
    unedited: Annotated[
        bool, typer.Option("--unedited", help="Compare both with the unedited model as well.")
    ] = False,
    title: Annotated[str, typer.Option(help="The form's title.")] = "Which text is better?",
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="For the same form again; a secret one is drawn if not."),
    ] = None,
    json: Json = False,
) -> None:
    """Make a form in which people compare what two methods wrote, without knowing which is which.

    form.html is for the people; it works offline and sends nothing. key.json says who wrote what:
    keep it to yourself.
    """
    import secrets

    from factscope.extras.study.pairs import build_study
    from factscope.report.studies import form_page

    records = {name: run.case_records() for name, run in _comparable([run_a, run_b]).items()}
    made = build_study(
        records, cases=cases, unedited=unedited, per_rater=per_rater,
        seed=secrets.randbits(64) if seed is None else seed,
    )  # fmt: skip
    key, form = out / KEY, out / FORM
    _keep_old_key(key, made)
    _write(key, made.to_json())
    _write(form, form_page(made, title))
    count = len({item.case for item in made.items})
    failed = {name: sum(record.failed for record in some) for name, some in records.items()}
    if json:
        print_json({
            "form": str(form), "key": str(key), "study": made.id, "pairs": len(made.items),
            "cases": count, "methods": list(made.methods), "failed": failed,
        })  # fmt: skip
        return
    for name, failures in failed.items():
        if failures:
            notes.print(f"{name}: {failures} cases have no edit and cannot be compared.")
    if count < cases:
        notes.print(f"No more than {count} cases have texts that differ; {cases} were wanted.")
    results.print(f"{len(made.items)} pairs of texts on {count} cases.")
    results.print(f"For the people who compare them: {form}", soft_wrap=True)
    results.print(f"For you alone, who wrote what: {key}", soft_wrap=True)
    results.print(f"Next: factscope study report ANSWERS… --key {key}", soft_wrap=True)


@study.command()
def report(
    answers: Annotated[list[Path], typer.Argument(help="The JSON files that people sent back.")],
    key: Annotated[
        Path, typer.Option("--key", "-k", help="The key.json that was made with the form.")
    ] = Path("study") / KEY,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write; `report` beside the key by default."),
    ] = None,
    json: Json = False,
) -> None:
    """Count whom people chose: ratios with 95 % intervals, a figure and a page; needs no model."""
    from factscope.analysis.preferences import preferences
    from factscope.extras.study.answers import read_answers, votes
    from factscope.report.studies import preference_table, preference_sentence, write_study_report
    from factscope.report.tables import as_markdown

    of = _read_key(key)
    given = votes(of, read_answers(of, answers).values())
    folder = out or key.parent / "report"
    with doing("drawing"):
        written = write_study_report(of, given, folder)
    found = preferences(given)
    if json:
        plain = [preference_values(one) for one in found]
        print_json({"files": [str(p) for p in written], "study": of.id, "preferences": plain})
        return
    results.print(as_markdown(preference_table(found)), soft_wrap=True)
    for one in found:
        results.print(preference_sentence(one))
    results.print(f"{len(written)} files; open {folder / 'index.html'}", soft_wrap=True)


def _comparable(paths: list[Path]) -> "dict[str, RunFolder]":
    """The runs by name, if texts of them can be compared."""
    import json

    from factscope.extras.study.pairs import check_comparable
    from factscope.runs.folder import RunFolder

    if paths[0].resolve() == paths[1].resolve():
        raise BadSetting(f"{paths[0]} is given twice; a study compares two runs")
    runs = {str(path): RunFolder.open(path) for path in paths}
    for name, run in runs.items():
        if run.command != "evaluate":
            raise BadStudy(f"{name} is a run of {run.command}; `factscope evaluate` writes texts")
    check_comparable({name: run.spec() for name, run in runs.items()})
    weights = [
        json.loads((path / "info.json").read_text("utf-8")).get("model_fingerprint")
        for path in paths
        if (path / "info.json").is_file()
    ]
    if len(set(weights)) > 1:
        raise BadStudy(
            f"{paths[0]} and {paths[1]} cannot be compared: under one name they have different "
            f"weights ({' and '.join(map(str, weights))})"
        )
    return runs


def _keep_old_key(path: Path, made: "Study") -> None:
    """Without its key, a form's answers say nothing."""
    if path.is_file() and path.read_text("utf-8", errors="replace") != made.to_json():
        raise BadStudy(
            f"{path} is the key of another study, whose answers cannot be read without it; give "
            "another folder with --out"
        )


def _write(path: Path, text: str) -> None:
    from factscope.io import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        raise BadSetting(f"cannot write {path} ({error.strerror or error})") from error


def _read_key(path: Path) -> "Study":
    from factscope.extras.study.pairs import Study

    try:
        return Study.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadStudy(
            f"{path} cannot be read ({said}); give the key that was made with the form by --key"
        ) from error
    except BadStudy as error:
        raise BadStudy(f"{path}: {error}") from error


def preference_values(one: "Preference") -> dict[str, Any]:
    """A preference as plain values; an infinite ratio, or that of no votes, is null."""
    ratios = (one.ratio, one.ratio_interval.low, one.ratio_interval.high)
    plain = [ratio if math.isfinite(ratio) else None for ratio in ratios]
    return {
        "question": one.question, "pair": list(one.pair), "wins": list(one.wins),
        "ties": one.ties, "ratio": plain[0], "ratio_interval": plain[1:],
        "fraction": one.fraction if one.votes else None,
        "share_interval": [one.interval.low, one.interval.high],
        "independent_interval": [one.independent_interval.low, one.independent_interval.high],
        "effective_votes": one.effective, "left": one.left, "raters": one.raters,
        "cases": one.cases, "agreement": one.agreement,
    }  # fmt: skip
