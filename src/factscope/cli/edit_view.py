"""An edit as people see it: before and after in the terminal, a page, a figure, or JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factscope.cli.edit_files import in_bytes
from factscope.cli.show import doing, notes, print_json, results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.facts import Case
    from factscope.lm.model import LM
    from factscope.records import EditRecord

__all__ = ["draw_edit", "print_edit", "tell_many", "tell_one", "warn"]

STRONGER = {
    "kn": "a higher --new-weight, more --neurons, a lower --share",
    "mend": "a higher --scale, --weights that were trained longer",
    "ke": "a higher --scale, --weights that were trained longer",
}
"""Method → what may make a fact take; a method that has no row has a layer and steps."""


def tell_one(
    lm: "LM",
    made: "Edit",
    case: "Case",
    tokens: int,
    out: Path | None,
    page: Path | None,
    figure: Path | None,
    json: bool,
) -> None:
    """One fact before and after, in full; the edit, its page and figure are written first."""
    from factscope.evaluation.before_after import before_after

    with doing("asking before and after"):
        record = before_after(lm, made, case, generation_tokens=max(0, tokens))
    if out is not None:
        made.save(out)
    drawn = draw_edit(record, page, figure) if page or figure else []
    warn([record])
    if json:
        print_json(record.to_json())
        return
    print_edit(record)
    _print_file(made, out)
    if drawn:
        results.print("Drawn: " + ", ".join(map(str, drawn)), soft_wrap=True)


def draw_edit(record: "EditRecord", page: Path | None, figure: Path | None) -> list[Path]:
    """The page and the figure, where they are wanted; KN's neurons in a figure beside it."""
    from factscope.io import write_atomic
    from factscope.report.edits import edit_page
    from factscope.report.figures import before_after_figure, neurons_figure, save_figure
    from factscope.report.figures.edits import has_neurons

    beside = None
    try:
        if page is not None:
            write_atomic(page, edit_page(record))
        if figure is not None:
            save_figure(before_after_figure(record), figure)
        if figure is not None and has_neurons(record):
            beside = figure.with_stem(f"{figure.stem}-neurons")
            save_figure(neurons_figure(record), beside)
    except OSError as error:
        raise BadSetting(f"the page or figure cannot be written ({error}); give another") from error
    return [path for path in (page, figure, beside) if path is not None]


def print_edit(record: "EditRecord") -> None:
    """Before and after, a continuation side by side, the guard rails, and where it is written."""
    from factscope.report import terminal as show

    results.print(show.headline(record), soft_wrap=True)
    results.print(f"{record.method} on {record.model}\n", style="dim", soft_wrap=True)
    results.print(show.scores_table(record))
    if record.generations:
        results.print()
        results.print(show.generations_table(record))
    results.print()
    results.print(show.rails_table(record.checks))
    results.print(show.places_table(record.changed_weights), soft_wrap=True)


def warn(records: "Sequence[EditRecord]") -> None:
    """Say which facts did not take."""
    for record in records:
        after, what = record.own.after, STRONGER.get(record.method, "another --layer, more --steps")
        if after.old is not None and after.new <= after.old and record.own.new != record.own.old:
            notes.print(
                f"{record.fact.text!r}: {record.own.old!r} is still likelier than "
                f"{record.own.new!r}; try {what} or another --method",
                style="yellow",
                soft_wrap=True,
            )


def _print_file(made: "Edit", out: Path | None) -> None:
    if out is None:
        results.print("Not kept; -o FILE.edit keeps it.")
        return
    size = out.stat().st_size
    results.print(f"Kept: {out}, {in_bytes(size)}", soft_wrap=True)
    results.print(f'Next: factscope generate "{made.facts[0].text}" --edit {out}', soft_wrap=True)


def tell_many(
    lm: "LM",
    made: "Edit",
    cases: "Sequence[Case]",
    out: Path | None,
    said: list[str],
    json: bool,
) -> None:
    """Many facts before and after, a line each."""
    from factscope.evaluation.before_after import before_after_each
    from factscope.report import terminal as show

    with doing("asking before and after"):
        records = before_after_each(lm, made, cases, generation_tokens=0)
    if out is not None:
        made.save(out)
    warn(records)
    if json:
        print_json(_summary(records, out, said))
        return
    results.print(f"{made.method} on {made.model}: {len(records)} facts\n", style="bold")
    results.print(show.facts_table(records))
    results.print()
    results.print(show.rails_table(records[0].checks))
    results.print(show.places_table(records[0].changed_weights), soft_wrap=True)
    _print_file(made, out)


def _summary(records: "Sequence[EditRecord]", out: Path | None, said: list[str]) -> dict[str, Any]:
    """What the facts share once, and each fact's prompts."""
    first = asdict(records[0])
    shared = {
        name: first[name] for name in ("model", "method", "changed_weights", "checks", "settings")
    }
    own = ("fact", "true", "prompts")
    facts = [{name: asdict(record)[name] for name in own} for record in records]
    file = None if out is None else str(out)
    return {"kind": "edits", **shared, "file": file, "left_out": said, "facts": facts}
