"""Facts written one after another into the same model, surviving a kill.

Each edit is kept as a file in the run's folder before its record is written: a run that is taken up
again puts the edits back, in order, and goes on. After the last one every case is scored again.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from factscope.editing.edit_file import load_edit, save_edit
from factscope.evaluation.protocols import Evaluation
from factscope.facts import Case
from factscope.runs.folder import RunFolder
from factscope.runs.unedited import Scores, Unedited

__all__ = ["go_in_turn"]


def go_in_turn(
    evaluation: Evaluation,
    folder: RunFolder,
    pieces: Sequence[tuple[Case, ...]],
    unedited: Unedited,
    done: Callable[[int], None],
) -> None:
    """Write the facts that are not yet written, then score all cases at the end."""
    cases = list(chain(*pieces))
    before = list(chain(*(_before(evaluation, unedited, some) for some in pieces)))
    lm, edits = evaluation.lm, folder.path / "edits"
    edits.mkdir(exist_ok=True)
    there = folder.case_records()
    written = [record for record in there if record.moment == "edit"]
    ended = {record.fact for record in there if record.moment == "end"}
    done(len(written))
    with ExitStack() as stack:
        for record in written:
            if not record.failed:
                edit = load_edit(_path(edits, record.step or 0))
                stack.enter_context(edit.applied(lm, force=True))
        for step in range(len(written), len(cases)):
            record, edit = evaluation.in_turn(cases[step], before[step], step)
            if edit is not None and not record.failed:
                save_edit(edit, _path(edits, step))
                stack.enter_context(edit.applied(lm, force=True))
            folder.append(record)
            written.append(record)
            done(1)
        by_fact = {record.fact: record for record in written}
        for some in pieces:
            left = [case for case in some if case.fact not in ended]
            if not left:
                continue
            scored = evaluation.at_end([by_fact[case.fact] for case in some], some)
            for record in scored:
                if record.fact not in ended:
                    folder.append(record)


def _before(evaluation: Evaluation, unedited: Unedited, cases: tuple[Case, ...]) -> list[Scores]:
    """The unedited model's scores, from the cache or asked now."""
    known = unedited.read(cases)
    if known is None:
        known = evaluation.unedited(cases)
        unedited.write(cases, known)
    return known


def _path(edits: Path, step: int) -> Path:
    return edits / f"{step:06}.edit"
