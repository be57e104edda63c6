"""Evaluation runs: each protocol against one case at a time; resuming, failing cases, Ray."""

import json
import math
import os
import random
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from factscope.analysis.metrics import summarize
from factscope.editing.editor import Editor
from factscope.editing.settings import editor
from factscope.errors import (
    BadRunFolder,
    BadSetting,
    DidNotConverge,
    FactscopeError,
    RunInterrupted,
)
from factscope.evaluation.cases import score_cases
from factscope.evaluation.protocols import Evaluation
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.lm.load import load
from factscope.lm.model import LM
from factscope.records import CaseRecord
from factscope.runs import evaluate as evaluating
from factscope.runs.evaluate import EvaluateRun, WorkItem
from factscope.runs.folder import RunFolder
from factscope.runs.ray import ray_executor

from commands import saved_model
from counterfact import record
from processes import start_process

FAST: dict[str, dict[str, Any]] = {
    "rome": {"layer": 1, "second_moment": "identity", "prefixes": ()},
    "memit": {"layers": (0, 1), "second_moment": "identity", "prefixes": ()},
    "ft": {"layer": 1, "steps": 3},
}
"""Settings that edit a tiny model quickly."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), spread=0.3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def lm(model: Path) -> LM:
    return load(str(model), device="cpu")


def run_of(model: Path, folder: Path, method: str = "ft", cases: int = 10, **more: Any) -> Any:
    data = folder / f"cases-{cases}.json"
    data.write_text(json.dumps([record(i) for i in range(cases)]))
    made: Any = editor(method, **FAST[method])
    if method != "ft":
        made = replace(made, search=replace(made.search, steps=3))
    fields = {"scoring": ScoringOptions(length=10), "editor": made, "method": method, **more}
    return EvaluateRun(model=str(model), dtype="float32", data=data, name="counterfact", **fields)


def evaluated(run: Any, lm: LM, folder: Path, **more: Any) -> list[CaseRecord]:
    opened = run.create_or_open(lm, folder)
    run.run(lm, opened, run.read().cases, **more)
    return opened.case_records()


def close(found: CaseRecord, wanted_after: Any) -> bool:
    assert found.after is not None
    assert found.after.texts == wanted_after.texts
    pairs = [
        (ours, theirs)
        for kind, scores in found.after.prompts.items()
        for ours, theirs in zip(scores, wanted_after.prompts[kind], strict=True)
    ]
    return all(
        (a.new, a.true) == pytest.approx((b.new, b.true), rel=1e-4, abs=1e-5) for a, b in pairs
    )


# ---- protocols


@pytest.mark.parametrize("method", ["rome", "ft", "memit"])
def test_single_edits_equal_each_edit_applied_alone(
    method: str, model: Path, lm: LM, tmp_path: Path
) -> None:
    run = run_of(model, tmp_path, method, cases=6)
    records = evaluated(run, lm, tmp_path / "run")
    assert [r.fact.id for r in records] == [str(i) for i in range(6)]
    for found, case in zip(records, run.read().cases, strict=True):
        assert found.before == score_cases(lm, [case], scoring=run.scoring)[0] or close(
            replace(found, after=found.before), score_cases(lm, [case], scoring=run.scoring)[0]
        )
        edit = run.editor.resolve(lm)(lm, [case.fact])
        with edit.applied(lm, force=True):
            assert close(found, score_cases(lm, [case], scoring=run.scoring)[0])
        assert found.after != found.before


def test_a_batch_is_one_edit_for_all_its_facts(model: Path, lm: LM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path, "memit", cases=6, protocol="batch", batch_size=4)
    records = evaluated(run, lm, tmp_path / "run")
    assert [r.step for r in records] == [0, 0, 0, 0, 1, 1]
    cases = run.read().cases
    for some, found in ((cases[:4], records[:4]), (cases[4:], records[4:])):
        edit = run.editor.resolve(lm)(lm, [case.fact for case in some])
        with edit.applied(lm, force=True):
            for case, one in zip(some, found, strict=True):
                assert close(one, score_cases(lm, [case], scoring=run.scoring)[0])


@pytest.mark.parametrize("method", ["rome", "ft"])
def test_sequential_edits_accumulate_and_are_scored_again_at_the_end(
    method: str, model: Path, lm: LM, tmp_path: Path
) -> None:
    run = run_of(model, tmp_path, method, cases=5, protocol="sequential")
    weights = {name: w.clone() for name, w in lm.model.named_parameters()}
    records = evaluated(run, lm, tmp_path / "run")
    assert all((w == weights[name]).all() for name, w in lm.model.named_parameters())
    at_edit, at_end = records[:5], records[5:]
    assert [r.phase for r in records] == ["edit"] * 5 + ["end"] * 5
    assert [r.step for r in at_edit] == list(range(5))
    made = run.editor.resolve(lm)
    edits = []
    for case, found in zip(run.read().cases, at_edit, strict=True):
        edits.append(made(lm, [case.fact]))
        edits[-1].apply(lm, force=True)
        assert close(found, score_cases(lm, [case], scoring=run.scoring)[0])
    for case, found in zip(run.read().cases, at_end, strict=True):
        assert close(found, score_cases(lm, [case], scoring=run.scoring)[0])
    for edit in edits:
        edit.revert(lm)


def test_the_unedited_model_is_scored_once_for_all_methods(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = evaluated(run_of(model, tmp_path, "ft"), lm, tmp_path / "a")

    def never(self: Evaluation, cases: Any, **more: Any) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(Evaluation, "score_unedited", never)
    second = evaluated(run_of(model, tmp_path, "rome"), lm, tmp_path / "b")
    assert [r.before for r in first] == [r.before for r in second]
    with pytest.raises(AssertionError, match="scored again"):
        evaluated(run_of(model, tmp_path, scoring=ScoringOptions(length=12)), lm, tmp_path / "c")


@pytest.mark.parametrize("protocol", ["single", "batch", "sequential"])
def test_progress_moves_inside_a_case_and_records_appear_case_by_case(
    protocol: str, model: Path, lm: LM, tmp_path: Path
) -> None:
    run = run_of(model, tmp_path, "rome", cases=3, protocol=protocol)
    fractions: list[float] = []
    written: list[int] = []  # records at each report

    def watch(fraction: float) -> None:
        fractions.append(fraction)
        written.append(_lines(tmp_path / "run" / "records.jsonl"))

    records = evaluated(run, lm, tmp_path / "run", progress=watch)
    assert min(fractions) > 0
    assert sum(fractions) == pytest.approx(1)
    assert all(written.count(n) >= 5 for n in range(len(records)))
    assert max(fractions) < 0.06  # neither editing nor scoring is reported at once


def test_a_resumed_run_reports_finished_cases_at_once(model: Path, lm: LM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path, cases=4)
    evaluated(run, lm, tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    fractions: list[float] = []
    evaluated(run, lm, tmp_path / "run", progress=fractions.append)
    assert fractions[0] == 0.75
    assert sum(fractions) == pytest.approx(1)


# ---- what can go wrong


def test_a_failing_case_is_recorded_and_the_others_continue(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path, cases=6)
    attempt = type(run.editor).attempt

    def failing(self: Editor, lm: LM, facts: Any, **more: Any) -> list[Any]:
        made = attempt(self, lm, facts, **more)  # pyright: ignore[reportArgumentType]
        return [
            DidNotConverge("no way") if fact.id == "2" else edit
            for fact, edit in zip(facts, made, strict=True)
        ]

    monkeypatch.setattr(type(run.editor), "attempt", failing)
    records = evaluated(run, lm, tmp_path / "run")
    assert [r.failed for r in records] == [False, False, True, False, False, False]
    assert records[2].error == "DidNotConverge: no way"
    assert records[2].after is None
    assert records[2].before is not None


@pytest.mark.parametrize("protocol", ["single", "batch", "sequential"])
@pytest.mark.parametrize("method", ["rome", "ft", "memit"])
def test_a_broken_model_is_recorded_in_every_protocol(
    method: str, protocol: str, model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_with_edits(lm: LM, edits: Any) -> list[float]:
        return [20.0 if edit is None else 900.0 for edit in edits]

    monkeypatch.setattr("factscope.editing.checks._text_perplexities", broken_with_edits)
    run = run_of(model, tmp_path, method, cases=2, protocol=protocol)
    records = [r for r in evaluated(run, lm, tmp_path / "run") if r.phase == "edit"]
    reason = "perplexity of unrelated text from 20 to 900, above 5 times"
    assert [r.broken for r in records] == [reason, reason]
    [row] = [row for row in summarize(records) if row.edited]
    assert (row.cases, row.broken, row.failed) == (2, 2, 0)
    assert row.metrics["ES"].n == 2  # the scores count


def test_small_edits_that_break_a_model_together_are_recorded_as_broken(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path, cases=3, protocol="sequential")
    perplexities = iter([20.0, 200.0])  # of the unedited model, and with all edits
    monkeypatch.setattr(Evaluation, "text_perplexity", lambda self: next(perplexities))
    records = evaluated(run, lm, tmp_path / "run")
    broken = {r.broken for r in records if r.phase == "end"}
    assert broken == {"perplexity of unrelated text from 20 to 200, above 5 times"}
    assert all(r.checks["complaints"] == [] for r in records)


def test_a_model_that_predicts_neither_object_is_broken(
    model: Path, lm: LM, tmp_path: Path
) -> None:
    evaluation = run_of(model, tmp_path).evaluation(lm)
    cases = run_of(model, tmp_path).read().cases[:1]
    [before] = evaluation.score_unedited(cases)
    [record] = evaluation.batch(cases, [before], FactscopeError("none"), 0)
    assert record.broken is None
    low = {
        kind: tuple(replace(p, new=p.new + 9, true=p.true + 9) for p in prompts)
        for kind, prompts in before.prompts.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        after = replace(before, prompts=low)
        patch.setattr(Evaluation, "score_unedited", lambda *a, **more: [after])
        [record] = evaluation.sequential_end([replace(record, before=before, error=None)], cases)
    assert "probabilities are near 0" in (record.broken or "")
    assert record.after == after


def test_probabilities_that_are_nan_are_recorded_as_an_error(
    model: Path, lm: LM, tmp_path: Path
) -> None:
    evaluation = run_of(model, tmp_path).evaluation(lm)
    cases = run_of(model, tmp_path).read().cases[:1]
    [before] = evaluation.score_unedited(cases)
    [record] = evaluation.batch(cases, [before], FactscopeError("none"), 0)
    [score, *rest] = before.prompts["prompt"]
    prompts = {**before.prompts, "prompt": (replace(score, new=math.nan), *rest)}
    with pytest.MonkeyPatch.context() as patch:
        after = replace(before, prompts=prompts)
        patch.setattr(Evaluation, "score_unedited", lambda *a, **more: [after])
        [record] = evaluation.sequential_end([replace(record, before=before, error=None)], cases)
    assert record.after is None
    assert record.error == record.broken == "the edited model's probabilities are NaN or infinite"
    record.to_json()


def test_a_prompt_that_is_too_long_fails_only_its_case(model: Path, lm: LM, tmp_path: Path) -> None:
    run = run_of(model, tmp_path, cases=4)
    cases = list(run.read().cases)
    assert lm.context is not None
    cases[1] = replace(cases[1], neighbours=("and so on " * lm.context,))
    folder = run.create_or_open(lm, tmp_path / "run")
    run.run(lm, folder, cases)
    failed = [r.failed for r in folder.case_records()]
    assert failed == [False, True, False, False]
    assert "PromptTooLong" in (folder.case_records()[1].error or "")


def test_a_full_disk_interrupts_the_run_and_it_resumes(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path)
    whole = evaluated(run, lm, tmp_path / "whole")
    sync, calls = os.fsync, iter(range(100))

    def full(number: int) -> None:
        if next(calls) == 5:
            raise OSError(28, "No space left on device")
        sync(number)

    monkeypatch.setattr("factscope.runs.folder.os.fsync", full)
    with pytest.raises(RunInterrupted, match=r"No space left.*the same command resumes"):
        evaluated(run, lm, tmp_path / "run")
    assert evaluated(run, lm, tmp_path / "run") == whole


def test_another_spec_is_refused_and_the_difference_shown(
    model: Path, lm: LM, tmp_path: Path
) -> None:
    evaluated(run_of(model, tmp_path), lm, tmp_path / "run")
    with pytest.raises(BadRunFolder, match="length = 10"):
        evaluated(run_of(model, tmp_path, scoring=ScoringOptions(length=9)), lm, tmp_path / "run")


def test_an_empty_selection_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="limit is 0; give 1 or more"):
        run_of(model, tmp_path, limit=0)


def test_a_folder_of_format_1_is_refused_with_its_version(
    model: Path, lm: LM, tmp_path: Path
) -> None:
    run = run_of(model, tmp_path)
    run.create_or_open(lm, tmp_path / "run")
    path = tmp_path / "run" / "info.json"
    info = json.loads(path.read_text())
    assert info.pop("format") == 2
    path.write_text(json.dumps(info))
    with pytest.raises(BadRunFolder, match=r"run folder format 1.*resumes only format 2"):
        run.create_or_open(lm, tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").case_records() == []


# ---- kills


class Killed(Exception):
    """A kill between two records."""


@pytest.mark.parametrize("protocol", ["single", "batch", "sequential"])
def test_an_interrupted_run_resumes_to_the_same_records(
    protocol: str, model: Path, lm: LM, tmp_path: Path
) -> None:
    size = 3 if protocol == "batch" else None
    run = run_of(model, tmp_path, "rome", cases=9, protocol=protocol, batch_size=size)
    whole = evaluated(run, lm, tmp_path / "whole")
    draw = random.Random(1)

    def stop(left: list[float], fraction: float) -> None:
        left[0] -= fraction
        if left[0] < 0:
            raise Killed

    kills = 0
    while True:
        try:
            found = evaluated(
                run,
                lm,
                tmp_path / "run",
                progress=partial(stop, [draw.randrange(1, 12) / 9 + 0.01]),
            )
            break
        except Killed:
            kills += 1
            with (tmp_path / "run" / "records.jsonl").open("a") as file:
                file.write('{"kind": "case", "fa')  # an incomplete line
    assert kills
    assert found == whole


def test_the_edit_of_an_interrupted_batch_is_not_computed_again(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path, "memit", cases=4, protocol="batch")
    whole = evaluated(run, lm, tmp_path / "whole")
    append = RunFolder.append

    def killed(self: RunFolder, record: CaseRecord) -> None:
        append(self, record)
        raise Killed

    def never(self: Evaluation, *args: Any, **more: Any) -> None:
        raise AssertionError("edited again")

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", killed)
        with pytest.raises(Killed):
            evaluated(run, lm, tmp_path / "run")
    monkeypatch.setattr(Evaluation, "batch_edit", never)
    assert evaluated(run, lm, tmp_path / "run") == whole


def go(model: Path, folder: Path) -> None:
    """Run 60 cases, or resume the run."""
    run = run_of(model, folder.parent, cases=60)
    evaluated(run, load(str(model), device="cpu"), folder)


def test_a_run_killed_five_times_equals_an_uninterrupted_one(model: Path, tmp_path: Path) -> None:
    records, draw = tmp_path / "run" / "records.jsonl", random.Random(2)
    for kill in range(5):
        process = start_process(go, model, tmp_path / "run")
        aim = 6 * kill + draw.randrange(1, 6)
        while process.is_alive() and _lines(records) < aim:
            time.sleep(0.005)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert _lines(records) < 60
    last = start_process(go, model, tmp_path / "run")
    last.join()
    assert last.exitcode == 0
    go(model, tmp_path / "whole")
    killed, whole = (RunFolder.open(tmp_path / name).case_records() for name in ("run", "whole"))
    assert killed == whole
    assert len(whole) == 60


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


# ---- Ray


def make(run: EvaluateRun, model: Path, deadly: Path) -> Evaluation:
    """The evaluation of an actor; the first that sees the file `deadly` is killed."""
    return Deadly(run.evaluation(load(str(model), device="cpu")), deadly)  # pyright: ignore


class Deadly:
    """An evaluation that kills its process, once."""

    def __init__(self, evaluation: Evaluation, file: Path) -> None:
        self.evaluation, self.file = evaluation, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evaluation, name)

    def single(self, cases: Any, before: Any, **more: Any) -> list[CaseRecord]:
        if self.file.exists():
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.evaluation.single(cases, before, **more)


def test_records_from_ray_are_the_same_even_if_an_actor_dies(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line with `ray` and no dead actor is tested in test_train.py."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # actors import this file
    run = run_of(model, tmp_path, cases=22)
    whole = evaluated(run, lm, tmp_path / "whole")
    deadly = tmp_path / "deadly"
    deadly.touch()
    with ray_executor(partial(make, run, model, deadly), "single", workers=2) as executor:
        found = evaluated(run, lm, tmp_path / "run", executor=executor)
    assert not deadly.exists()
    assert sorted(found, key=lambda r: int(r.fact.id or 0)) == whole


def test_ray_refuses_sequential_edits() -> None:
    with (
        pytest.raises(BadSetting, match="depend on each other"),
        ray_executor(lambda: None, "sequential"),  # pyright: ignore
    ):
        pass


def test_work_items_do_not_depend_on_finished_ones(
    model: Path, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model, tmp_path, cases=10)
    seen: list[tuple[str | None, ...]] = []
    run_item = evaluating.run_item

    def watched(evaluation: Evaluation, protocol: Any, item: WorkItem, *more: Any) -> Any:
        seen.append(tuple(case.fact.id for group in item.groups for case in group.cases))
        return run_item(evaluation, protocol, item, *more)

    monkeypatch.setattr(evaluating, "run_item", watched)
    monkeypatch.setattr(evaluating, "GPU_CASES", 4)
    monkeypatch.setattr("factscope.lm.accel.on_gpu", lambda lm: True)
    whole = evaluated(run, lm, tmp_path / "run")
    path = tmp_path / "run" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6]))
    again = evaluated(run, lm, tmp_path / "run")
    assert seen[3:] == seen[1:3]
    assert again == whole


def test_cases_are_read_from_their_file(model: Path, tmp_path: Path) -> None:
    (case, *_) = run_of(model, tmp_path).read().cases
    assert isinstance(case, Case)
    assert case.true == "Rome"
    assert case.generations == ("Tower 0",)
