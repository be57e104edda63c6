"""factscope models, trace, report and data, on a tiny model; each mistake is one message."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from factscope.cli.app import main
from factscope.facts import Fact
from factscope.records import KINDS, TraceRecord, read_trace_records

from commands import Result, Run
from families import LAYERS
from tokenizers_ import tokenizer

CITY = "The Eiffel Tower is located in the city of"
TOWER = "The Eiffel Tower"
FACTS = [
    {"subject": "The Eiffel Tower", "prompt": "{} is located in the city of"},
    {"subject": "Space Needle", "prompt": "The {} is located in the city of"},
    {"subject": "Victor Hugo", "prompt": "The mother tongue of {} is"},
]


@pytest.fixture
def trace(factscope: Run, model: Path) -> Run:
    """`factscope trace` on the tiny model, with few samples."""
    return lambda *words: factscope("trace", *words, "-m", model, "--samples", 2, "--device", "cpu")


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    return path


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2 and one message, without a traceback."""
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("factscope:") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# ---- models


def test_models_as_json(factscope: Run) -> None:
    result = factscope("models", "--json")
    assert (result.code, result.err) == (0, "")
    listed = json.loads(result.out)
    assert [row["name"] for row in listed["short_names"]] == ["smollm2-135m"]
    assert not listed["short_names"][0]["cached"]
    assert {"gpt2", "llama", "bloom"} <= set(listed["families"])
    assert listed["converted"] == []


def test_models_as_text(factscope: Run) -> None:
    result = factscope("models")
    assert result.code == 0
    for word in ("smollm2-135m", "Apache-2.0", "gpt_neox"):
        assert word in result.out


# ---- one prompt


def test_trace_as_json(trace: Run, tmp_path: Path) -> None:
    result = trace(CITY, "--subject", TOWER, "--json")
    assert result.code == 0
    record = TraceRecord.from_json(result.out)
    assert result.out.count("\n") == 1
    assert record.fact == Fact(subject=TOWER, prompt="{} is located in the city of")
    assert "".join(record.tokens) == CITY
    assert "".join(record.tokens[slice(*record.subject)]) == TOWER
    assert record.answer == tokenizer("gpt2").decode([record.answer_id])
    assert 0 < record.corrupted < 1
    assert 0 < record.clean < 1
    assert len(record.corrupted_samples) == 2
    assert set(record.restored) == set(KINDS)
    for grid in record.restored.values():
        assert [len(row) for row in grid] == [LAYERS] * len(record.tokens)
        assert all(x is not None and 0 <= x <= 1 for row in grid for x in row)
    # The last token's last state is the answer's own.
    assert record.restored["states"][-1][-1] == pytest.approx(record.clean, rel=1e-4)
    assert not (tmp_path / "traces").exists()


def test_trace_as_text(trace: Run, tmp_path: Path) -> None:
    result = trace(CITY, "--subject", TOWER, "--target", "Paris")
    assert result.code == 0
    for word in (CITY, "P clean", "corrupted", "Figure:", "Not known", "'Paris'"):
        assert word in result.out
    [figure] = (tmp_path / "traces").iterdir()
    assert figure.name == "the-eiffel-tower-is-located-in-the-city-of.png"


@pytest.mark.parametrize(
    ("name", "begin"),
    [("f.png", b"\x89PNG"), ("f.svg", b"<?xml"), ("f.pdf", b"%PDF"), ("new/f.html", b"<!doctype")],
)
def test_the_figure_is_written_to_out(trace: Run, tmp_path: Path, name: str, begin: bytes) -> None:
    words = ("--kinds", "states", "--out", tmp_path / name)
    result = trace(CITY, "--subject", TOWER, *words)
    assert result.code == 0
    assert (tmp_path / name).read_bytes()[: len(begin)].lower() == begin.lower()
    assert not (tmp_path / "traces").exists()


def test_flags_reach_the_trace(trace: Run) -> None:
    result = trace(
        CITY, "--subject", TOWER, "--json", "--preset", "paper", "--noise", 0.25, "--kinds", "mlp",
        "--window", 3, "--seed", 5, "--distribution", "uniform", "--replace", "--extra-tokens", 1,
        "--sever", "attn", "--sever-tokens", "last-subject", "--max-memory", "99MiB", "--gradients",
    )  # fmt: skip
    assert result.code == 0
    record = json.loads(result.out)
    assert list(record["restored"]) == list(record["gradients"]) == ["mlp"]
    assert list(record["severed"]) == ["attn"]
    settings = record["settings"]
    assert (settings["window"], settings["window_alignment"]) == (3, "paper-code")
    noise = settings["corruption"]
    assert (noise["level"], noise["in_sigmas"], noise["seed"]) == (0.25, False, 5)
    assert (noise["distribution"], noise["replace"], noise["samples"]) == ("uniform", True, 2)
    assert (noise["extra_tokens"], noise["rng"]) == (1, "paper")


def test_a_subject_that_occurs_twice(trace: Run) -> None:
    text = "New York, New York is in the state of"
    last = trace(text, "--subject", "New York", "--json")
    assert "2 times" in last.err
    assert "--occurrence" in last.err
    first = trace(text, "--subject", "New York", "--occurrence", 1, "--json")
    assert first.code == last.code == 0
    assert "--occurrence" not in first.err
    starts = [json.loads(result.out)["subject"][0] for result in (first, last)]
    assert starts[0] == 0 < starts[1]


@pytest.mark.parametrize("text", ["See [/b] The Nile [bold] is in", "The Nile [/] is [red in"])
def test_square_brackets_in_prompts_are_printed_as_they_are(trace: Run, text: str) -> None:
    result = trace(text, "--subject", "The Nile", "--out", "f.png")
    assert result.code == 0
    assert text in result.out


MISTAKES = {
    "subject not there": ([CITY, "--subject", "Eifel Tower"], ["'Eifel Tower'", "'Eiffel Tower'"]),
    "empty subject": ([CITY, "--subject", ""], ["subject"]),
    "empty prompt": (["", "--subject", TOWER], ["prompt is empty"]),
    "prompt too long": ([f"{TOWER} is" + " is" * 70, "--subject", TOWER], ["tokens", "64"]),
    "braces": (["The {} of Oslo is", "--subject", "Oslo"], ["must have"]),
    "no subject": ([CITY], ["--subject"]),
    "no such occurrence": ([CITY, "--subject", TOWER, "--occurrence", "2"], ["--occurrence is 2"]),
    "preset": ([CITY, "--subject", TOWER, "--preset", "papper"], ["'papper'", "paper"]),
    "kind": ([CITY, "--subject", TOWER, "--kinds", "mpl"], ["'mpl'", "states, mlp, attn"]),
    "noise": ([CITY, "--subject", TOWER, "--noise", "loud"], ["'loud'", "3s"]),
    "negative noise": ([CITY, "--subject", TOWER, "--noise=-3s"], ["-3"]),
    "window": ([CITY, "--subject", TOWER, "--window", "0"], ["--window is 0"]),
    "dtype": ([CITY, "--subject", TOWER, "--dtype", "float8"], ["'float8'", "bfloat16"]),
    "memory": ([CITY, "--subject", TOWER, "--max-memory", "much"], ["'much'", "4GiB"]),
    "out": ([CITY, "--subject", TOWER, "--out", "f.gif"], ["f.gif", ".png"]),
    "facts without out": (["--facts", "facts.jsonl"], ["--out"]),
    "facts and prompt": ([CITY, "--facts", "facts.jsonl", "--out", "run"], ["without a prompt"]),
    "no facts file": (["--facts", "lost.jsonl", "--out", "run"], ["lost.jsonl"]),
    "nothing": ([], ["--subject", "--facts"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_message(trace: Run, facts: Path, case: str) -> None:
    words, wanted = MISTAKES[case]
    assert_refused(trace(*words), *wanted)
    assert [path.name for path in facts.parent.iterdir()] == ["facts.jsonl"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("smollm2-135", "did you mean 'smollm2-135m'"), ("nobody/nothing", "nobody/nothing")],
)
def test_an_unknown_model(factscope: Run, name: str, words: str) -> None:
    assert_refused(factscope("trace", CITY, "--subject", TOWER, "-m", name), words)


def test_an_unknown_device_is_refused(factscope: Run, model: Path) -> None:
    words = ("trace", CITY, "--subject", TOWER, "-m", model, "--device", "toaster")
    assert_refused(factscope(*words), "'toaster'")


def test_an_unknown_flag_is_refused(trace: Run) -> None:
    result = trace(CITY, "--subjct", TOWER)
    assert result.code == 2
    assert "--subjct is not known; did you mean --subject?" in result.err
    assert "Traceback" not in result.err


def test_ctrl_c_in_a_single_trace_does_not_promise_to_resume(
    trace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("factscope.lm.load.load", stop)
    result = trace(CITY, "--subject", TOWER)
    assert (result.code, result.err) == (130, "factscope: interrupted\n")


# ---- a file of facts


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects of the facts that were traced, as they come."""
    from factscope.tracing import trace as tracing

    real, subjects = tracing.trace_many, list[str]()

    def spy(*args: Any, **kwargs: Any) -> Iterator[TraceRecord]:
        for record in real(*args, **kwargs):
            subjects.append(record.fact.subject)
            yield record

    monkeypatch.setattr(tracing, "trace_many", spy)
    return subjects


def by_subject(run: Path) -> dict[str, TraceRecord]:
    records = list(read_trace_records(run / "records.jsonl"))
    assert len(records) == len({record.fact for record in records})
    return {record.fact.subject: record for record in records}


def assert_same(found: dict[str, TraceRecord], wanted: dict[str, TraceRecord]) -> None:
    """The same noise, so the same numbers, whatever a fact is traced with."""
    assert found.keys() == wanted.keys()
    for subject, record in found.items():
        other = wanted[subject]
        assert record.corrupted_samples == pytest.approx(other.corrupted_samples, rel=1e-4)
        for kind in KINDS:
            for row, other_row in zip(record.restored[kind], other.restored[kind], strict=True):
                assert row == pytest.approx(other_row, rel=1e-4)


def test_a_finished_run_is_not_computed_again(
    trace: Run, facts: Path, tmp_path: Path, traced: list[str]
) -> None:
    run = tmp_path / "run"
    first = trace("--facts", facts, "--out", run, "--json")
    assert first.code == 0
    assert json.loads(first.out) == {"run": str(run), "facts": 3, "known": 3, "left_out": []}
    subjects = [fact["subject"] for fact in FACTS]
    assert sorted(traced) == sorted(subjects)
    # Facts of about the same length are traced together: the order is not the file's.
    records = {record.fact.subject for record in read_trace_records(run / "records.jsonl")}
    assert records == set(subjects)
    before = (run / "records.jsonl").read_bytes()
    assert trace("--facts", facts, "--out", run).code == 0
    assert len(traced) == len(subjects)
    assert (run / "records.jsonl").read_bytes() == before


def test_a_run_resumes(trace: Run, facts: Path, tmp_path: Path, traced: list[str]) -> None:
    run = tmp_path / "run"
    trace("--facts", facts, "--out", run)
    records = run / "records.jsonl"
    whole, before = records.read_text().splitlines(keepends=True), by_subject(run)
    records.write_text(whole[0] + whole[2])
    traced.clear()
    assert trace("--facts", facts, "--out", run).code == 0
    assert traced == [TraceRecord.from_json(whole[1]).fact.subject]
    assert_same(by_subject(run), before)


@pytest.mark.parametrize("kept", [0, 2])
def test_an_incomplete_last_record_is_computed_again(
    trace: Run, facts: Path, tmp_path: Path, traced: list[str], kept: int
) -> None:
    run = tmp_path / "run"
    trace("--facts", facts, "--out", run)
    records = run / "records.jsonl"
    whole, before = records.read_text().splitlines(keepends=True), by_subject(run)
    records.write_text("".join(whole[:kept]) + whole[kept][:100])
    traced.clear()
    assert trace("--facts", facts, "--out", run).code == 0
    assert set(traced) == {TraceRecord.from_json(line).fact.subject for line in whole[kept:]}
    assert_same(by_subject(run), before)


def test_a_broken_record_is_removed_and_computed_again(
    trace: Run, facts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    trace("--facts", facts, "--out", run)
    records = run / "records.jsonl"
    whole = records.read_text().splitlines(keepends=True)
    records.write_text(whole[0] + "{broken\n" + whole[2])
    assert trace("--facts", facts, "--out", run).code == 0
    assert "removed 1 incomplete" in caplog.text
    assert sorted(records.read_text().splitlines(keepends=True)) == sorted(whole)


def test_a_broken_line_of_a_facts_file_is_skipped(trace: Run, facts: Path, tmp_path: Path) -> None:
    lines = facts.read_text().splitlines()
    lines[1] = '{"subject": "Space [/b] Needle'
    facts.write_text("\n".join(lines))
    result = trace("--facts", facts, "--out", tmp_path / "run", "--json")
    assert result.code == 0
    assert "facts.jsonl, line 2" in result.err
    summary = json.loads(result.out)
    assert summary["facts"] == 2
    assert len(summary["left_out"]) == 1


def test_limit_uses_the_first_facts(trace: Run, facts: Path, tmp_path: Path) -> None:
    result = trace("--facts", facts, "--out", tmp_path / "run", "--limit", 2)
    assert result.code == 0
    assert "2 facts, 2 known" in result.out
    assert "factscope report" in result.out


def test_a_folder_of_another_run(trace: Run, facts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trace("--facts", facts, "--out", run)
    before = (run / "records.jsonl").read_bytes()
    other = trace("--facts", facts, "--out", run, "--window", 3)
    assert_refused(other, "another run", "-window = 10", "+window = 3")
    facts.write_text(facts.read_text() + json.dumps(FACTS[0]) + "\n")
    assert_refused(trace("--facts", facts, "--out", run), "another run", "facts_sha256")
    assert (run / "records.jsonl").read_bytes() == before


def test_a_folder_with_other_files(trace: Run, facts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("x")
    assert_refused(trace("--facts", facts, "--out", folder), "thesis", "other files")
    assert [path.name for path in folder.iterdir()] == ["chapter.tex"]
    assert_refused(trace("--facts", facts, "--out", facts), "is a file")


# ---- report


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A finished run of two facts, made once."""
    folder = tmp_path_factory.mktemp("finished")
    facts = folder / "facts.jsonl"
    facts.write_text("".join(json.dumps(fact) + "\n" for fact in FACTS[:2]))
    words = ["trace", "--facts", facts, "--out", folder / "run", "--samples", 1, "-m", model]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["factscope", *map(str, words), "--sever", "mlp"])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert not stopped.value.code
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_report_writes_a_page_and_figures(factscope: Run, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    result = factscope("report", run)
    assert result.code == 0
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert str(run / "report" / "index.html") in result.out
    names = {path.relative_to(run / "report").as_posix() for path in (run / "report").rglob("*")}
    assert names >= {
        "index.html", "average_heatmaps.png", "average_lines.pdf", "summary.md", "peaks.tex",
        "effects.csv", "severed.png", "facts/0000.png", "facts/0001.png",
    }  # fmt: skip
    assert "Victor Hugo" not in (run / "report" / "index.html").read_text("utf-8")
    assert "Space Needle" in (run / "report" / "index.html").read_text("utf-8")


def test_report_as_json(
    factscope: Run, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factscope.report.html.figure_bytes", lambda *_: b"")
    result = factscope(
        "report", run, "--out", tmp_path / "elsewhere", "--preset", "paper", "--json"
    )
    assert result.code == 0
    said = json.loads(result.out)
    assert set(said["summary"]) == set(KINDS)
    assert said["summary"]["states"]["facts"] == 2
    assert all(Path(file).is_file() for file in said["files"])
    assert not (run / "report").exists()


def test_report_on_a_folder_without_a_run(factscope: Run, tmp_path: Path) -> None:
    assert_refused(factscope("report", tmp_path), "not a run")
    assert_refused(factscope("report", tmp_path / "lost"), "lost", "not a run")


def test_report_on_an_empty_run(factscope: Run, run: Path) -> None:
    (run / "records.jsonl").unlink()
    assert_refused(factscope("report", run), "no fact that the model knows")


def test_report_with_an_unknown_preset(factscope: Run, run: Path) -> None:
    assert_refused(factscope("report", run, "--preset", "papper"), "'papper'")


# ---- data


def test_find_known(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, patterns = tmp_path / "facts.json", tmp_path / "patterns.json"
    pairs.write_text(json.dumps({"P36": [["France", "Paris"], ["Italy", "Rome"]]}))
    patterns.write_text(json.dumps({"P36": ["The capital of [X] is [Y]."]}))
    monkeypatch.setattr(
        "factscope.tracing.trace.generate_greedy",
        lambda lm, texts, tokens: [" the city of Paris, France" for _ in texts],
    )
    out = tmp_path / "new" / "known.jsonl"
    words = ("--facts", pairs, "--patterns", patterns, "--out", out, "-m", model, "--device", "cpu")
    result = factscope("data", "find-known", *words, "--json")
    assert result.code == 0
    assert json.loads(result.out) == {"facts": 2, "known": 1, "file": str(out)}
    assert json.loads(out.read_text()) == {
        "known_id": 0,
        "subject": "France",
        "attribute": "Paris",
        "prompt": "The capital of France is the city of",
        "prediction": " the city of Paris, France",
        "relation_id": "P36",
    }


def test_find_known_writes_pairs_that_trace_uses(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capitals = {"Norway": "Oslo", "Oslo": "Rome", "Spain": "Madrid"}  # 4, 4 and 3 tokens
    pairs, patterns = tmp_path / "facts.json", tmp_path / "patterns.json"
    pairs.write_text(json.dumps({"P36": list(capitals.items())}))
    patterns.write_text(json.dumps({"P36": ["The capital of [X] is [Y]."]}))
    monkeypatch.setattr(
        "factscope.tracing.trace.generate_greedy",
        lambda lm, texts, tokens: [f" {capitals[text.split()[3]]}" for text in texts],
    )
    words = ("--facts", pairs, "--patterns", patterns, "--out", "known.jsonl", "-m", model)
    result = factscope("data", "find-known", *words, "--pairs", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == {"facts": 3, "known": 3, "file": "known.jsonl", "pairs": 2}
    lines = [json.loads(line) for line in (tmp_path / "known.jsonl").read_text().splitlines()]
    found = {line["subject"]: line["replacement"] for line in lines}
    assert found == {"Norway": "Oslo", "Oslo": "Norway"}
    traced = factscope(
        "trace", "--facts", "known.jsonl", "--distribution", "tokens", "--kinds", "states", "--out",
        "run", "-m", model, "--json",
    )  # fmt: skip
    assert json.loads(traced.out)["facts"] == 2


def test_known_facts_can_be_traced(trace: Run, tmp_path: Path) -> None:
    known = {"known_id": 0, "subject": "France", "prompt": "The capital of France is the city of",
             "prediction": " Paris", "relation_id": None}  # fmt: skip
    (tmp_path / "known.jsonl").write_text(json.dumps(known) + "\n")
    result = trace("--facts", tmp_path / "known.jsonl", "--out", tmp_path / "run", "--json")
    assert json.loads(result.out)["known"] == 1


def test_find_known_samples_with_a_seed(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = tmp_path / "facts.jsonl"
    rows = [{"subject": f"Oslo {i}", "prompt": "{} is in", "target": "Norway"} for i in range(9)]
    facts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        "factscope.tracing.trace.generate_greedy",
        lambda lm, texts, tokens: [" Norway" for _ in texts],
    )
    drawn = []
    for seed in (0, 0, 1):
        words = (
            "--facts",
            facts,
            "--out",
            "known.jsonl",
            "--limit",
            4,
            "--seed",
            seed,
            "-m",
            model,
        )
        assert factscope("data", "find-known", *words).code == 0
        lines = (tmp_path / "known.jsonl").read_text().splitlines()
        drawn.append([json.loads(line)["subject"] for line in lines])
    assert len(drawn[0]) == 4
    assert drawn[0] == drawn[1] != drawn[2]


def test_find_known_names_a_broken_line(factscope: Run, model: Path, facts: Path) -> None:
    row = {"subject": "Oslo", "prompt": "{} is in", "target": "Norway"}
    facts.write_text("broken\n" + json.dumps(row) + "\n")
    result = factscope("data", "find-known", "--facts", facts, "--out", "k.jsonl", "-m", model)
    assert result.code == 0
    assert "facts.jsonl, line 1" in result.err
    assert "of 1 facts" in result.out


def test_find_known_stops_at_the_end_of_the_context(
    factscope: Run, model: Path, facts: Path
) -> None:
    row = {"subject": "Oslo", "prompt": "{} is in", "target": "Norway"}
    facts.write_text(json.dumps(row) + "\n")
    words = ("--facts", facts, "--out", "k.jsonl", "--max-new-tokens", 1000, "-m", model)
    result = factscope("data", "find-known", *words)
    assert result.code == 0, result.err


def test_find_known_without_facts(factscope: Run, model: Path) -> None:
    words = ("--facts", "lost.json", "--out", "known.jsonl", "-m", model)
    assert_refused(factscope("data", "find-known", *words), "lost.json")


# ---- as a process


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--subject", "Eifel Tower"], "the subject 'Eifel Tower' is not in the prompt"),
        (
            ["--subject", TOWER, "--distribution", "pink"],
            "--distribution is 'pink'; choose from gaussian, uniform, embedding",
        ),
    ],
)
def test_a_process_exits_with_a_message_and_a_code(
    tmp_path: Path, words: list[str], message: str
) -> None:
    command = [sys.executable, "-m", "factscope", "trace", CITY, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"factscope: {message}")
    assert "Traceback" not in done.stderr
