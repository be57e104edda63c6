"""factscope edit and generate on a tiny model; each mistake is one message."""

import errno
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from factscope.cli.app import main
from factscope.cli.edit import warn
from factscope.editing.edit import Edit, LowRank
from factscope.editing.settings import EDITORS, Rome, ValueSearch
from factscope.evaluation.score import Query, score_queries
from factscope.facts import Fact
from factscope.lm.load import load
from factscope.records import EditRecord, read_trace_records
from factscope.settings import settings_of

from commands import Result, Run, runner, saved_model
from edit_records import record, scores

CITY, TOWER = "The Eiffel Tower is located in the city of", "The Eiffel Tower"
RIVER, NILE = "The Nile is located in", "The Nile"
# At the last token, in small steps: what a random model can be taught without breaking it.
QUICK = ("--prefix-lengths", "3x2", "--steps", 5, "--lr", 0.02, "--token", "last")
EIFFEL = (CITY, "--subject", TOWER, "--to", "Rome")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny GPT-2 whose weights are large enough to matter."""
    return saved_model(tmp_path_factory.mktemp("models") / "tiny", spread=0.3)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models") / "other", spread=0.31)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that keeps its statistics from test to test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def factscope(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Run a command in an empty folder, without a network; lines are not wrapped."""
    return runner(tmp_path, cache, monkeypatch, capsys)


@pytest.fixture
def edit(factscope: Run, model: Path) -> Run:
    """`factscope edit` on the tiny model, without statistics by default."""

    def run(*words: object) -> Result:
        given = {"--stats", "show", "--found"} & set(map(str, words))
        words = tuple(word for word in words if word != "--found")
        none = () if given else ("--stats", "none")
        return factscope("edit", *words, *none, "-m", model, "--device", "cpu")

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A folder with two edits, rome.edit and oslo.edit, made once."""
    folder = tmp_path_factory.mktemp("edits")
    for words, name in (
        (EIFFEL, "rome.edit"),
        ((RIVER, "--subject", NILE, "--to", "Oslo"), "oslo.edit"),
    ):
        line = (
            "edit",
            *words,
            *QUICK,
            "--stats",
            "none",
            "-m",
            model,
            "-o",
            folder / name,
            "--json",
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", ["factscope", *map(str, line)])
            with pytest.raises(SystemExit) as stopped:
                main()
        assert not stopped.value.code
    return folder


@pytest.fixture
def edits(made: Path, tmp_path: Path) -> list[Path]:
    return [Path(shutil.copy(made / name, tmp_path)) for name in ("rome.edit", "oslo.edit")]


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """The exit code and one message, without a traceback."""
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.count("factscope:") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


def nothing_in(folder: Path, *but: str) -> bool:
    return {path.name for path in folder.iterdir()} <= set(but)


# ---- one fact


def test_json_scores_equal_those_of_the_edited_weights(
    edit: Run, model: Path, tmp_path: Path
) -> None:
    words = ("--paraphrase", "The Eiffel Tower is in", "--neighbour", "Oslo is in")
    result = edit(*EIFFEL, *QUICK, *words, "--true", "Paris", "-o", "rome.edit", "--json",
                  "--max-new-tokens", 4)  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    record = EditRecord.from_json(result.out)
    assert record.fact == Fact(subject=TOWER, prompt="{} is located in the city of", target="Rome")
    assert [p.kind for p in record.prompts] == ["prompt", "paraphrase", "neighbour"]
    assert {p.old for p in record.prompts} == {"Paris"}
    assert record.fact_prompt.after.new > record.fact_prompt.before.new
    [place] = record.changed_weights
    assert (place.name, place.shape, place.rank) == (
        "transformer.h.1.mlp.c_proj.weight",
        (32, 128),
        1,
    )
    assert record.checks["complaints"] == []
    assert record.checks["verdict"].startswith(("took", "did not take"))
    assert record.checks["update_norm"] < record.checks["limits"]["update_norm"]
    assert record.settings["token"] == "last"
    lm, kept = load(str(model), device="cpu"), Edit.load(tmp_path / "rome.edit")
    assert kept.facts == (replace(record.fact, old="Paris"),)
    before = [score(lm, p.text, "Rome") for p in record.prompts]
    with kept.applied(lm):
        after = [score(lm, p.text, "Rome") for p in record.prompts]
        true = [score(lm, p.text, "Paris") for p in record.prompts]
    assert before == pytest.approx([p.before.new for p in record.prompts], rel=1e-4)
    assert after == pytest.approx([p.after.new for p in record.prompts], rel=1e-4)
    assert true == pytest.approx([p.after.old for p in record.prompts], rel=1e-4)


def score(lm: Any, text: str, target: str) -> float:
    [answer] = score_queries(lm, [Query(text, target)])
    return float(torch.tensor(-answer.nll).exp())


def test_an_edit_as_text(edit: Run, tmp_path: Path) -> None:
    words = ("--neighbour", "Oslo is in", "-o", "new/rome.edit", "--max-new-tokens", 4)
    result = edit(*EIFFEL, *QUICK, *words, "--page", "rome.html", "--figure", "rome.png")
    assert result.code == 0, result.err
    for word in (CITY, "P(Rome)", "neighbours should stay", "before", "after", "division factor",
                 "at most 0.5", "perplexity", "transformer.h.1.mlp.c_proj.weight", "rank 1 of",
                 "Saved: new/rome.edit", "kB"):  # fmt: skip
        assert word in result.out
    assert "is still more likely than 'Rome'; try another --layer" in result.err
    assert (tmp_path / "rome.html").read_text().startswith("<!doctype")
    assert (tmp_path / "rome.png").read_bytes().startswith(b"\x89PNG")
    assert Edit.load(tmp_path / "new" / "rome.edit").method == "rome"


@pytest.mark.parametrize("method", EDITORS)
def test_advice_names_flags_of_the_method(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    unmoved = scores("prompt", RIVER)
    warn([record(method=method, prompts=(replace(unmoved, after=unmoved.before),))])
    words = capsys.readouterr().err
    named = set(re.findall(r"--([a-z-]+)", words))
    flags = set(settings_of(EDITORS[method]["default"]))
    assert "method" in named
    assert len(named) > 1
    assert named - {"method"} <= flags
    assert ("steps" in named) == (method not in ("kn", "mend", "ke")), words


def test_an_edit_need_not_be_saved(edit: Run, tmp_path: Path) -> None:
    result = edit(*EIFFEL, *QUICK, "--max-new-tokens", 0)
    assert result.code == 0
    assert "Not saved" in result.out
    assert nothing_in(tmp_path)


def test_only_an_edit_file_is_replaced_unless_forced(edit: Run, edits: list[Path]) -> None:
    notes, oslo = edits[0].with_name("notes.txt"), edits[1]
    notes.write_text("old")
    result = edit(*EIFFEL, *QUICK, "-o", notes)
    assert_refused(result, "notes.txt exists and is not an edit file", "--force")
    assert notes.read_text() == "old"
    assert edit(*EIFFEL, *QUICK, "-o", oslo).code == 0
    assert edit(*EIFFEL, *QUICK, "-o", notes, "--force").code == 0
    assert [Edit.load(path).facts[0].target for path in (oslo, notes)] == ["Rome", "Rome"]


# ---- --require

LEARNED = ("--method", "ft", "--found", "--layer", 0, "--steps", 60, "--lr", 0.05, "--force")


def test_require_accepts_an_edit_that_took(edit: Run, tmp_path: Path) -> None:
    result = edit(*EIFFEL, *LEARNED, "--require", "-o", "rome.edit", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["fact"]["target"] == "Rome"
    assert (tmp_path / "rome.edit").exists()


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_require_refuses_an_edit_that_did_not_take(
    edit: Run, tmp_path: Path, json_flag: tuple[str, ...]
) -> None:
    words = (*EIFFEL, *QUICK, "--steps", 2, "--lr", 1e-3, "--require", *json_flag)
    files = ("-o", "rome.edit", "--page", "rome.html", "--figure", "rome.png")
    result = edit(*words, *files)
    assert result.code == 3
    assert f"--require: 'Rome' is not the most likely object after '{CITY}'" in result.err
    assert "nothing was saved. Try another --layer, more --steps" in result.err
    assert nothing_in(tmp_path)
    assert "Rome" in result.out
    if json_flag:
        assert EditRecord.from_json(result.out).fact.target == "Rome"


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_require_with_a_file_of_facts(edit: Run, facts: Path, json_flag: tuple[str, ...]) -> None:
    words = ("--facts", facts, *QUICK, "--steps", 2, "--lr", 1e-3, "--force", "-o", "both.edit")
    result = edit(*words, "--require", *json_flag)
    assert result.code == 3
    assert "'Rome' is not the most likely object" in result.err
    assert "(and 1 more)" in result.err
    assert nothing_in(facts.parent, "facts.jsonl")
    if json_flag:
        assert json.loads(result.out)["file"] is None
    assert edit(*words).code == 0


@pytest.mark.parametrize("method", sorted(set(EDITORS) - {"mend", "ke"}))  # see test_train.py
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_every_method_and_preset(edit: Run, method: str, preset: str) -> None:
    searching = "search" in vars(EDITORS[method][preset])
    words = QUICK if searching else ("--found", "--lr", 1e-3, "--steps", 5)
    if method == "kn":
        words = ("--found", "--prefix-lengths", "3x2", "--integration-steps", 3)
    result = edit(*EIFFEL, *words, "--method", method, "--preset", preset, "--force", "--json")
    assert result.code == 0, result.err
    record = EditRecord.from_json(result.out)
    assert record.method == method
    assert record.checks["limits"]


def test_flags_reach_the_editor(edit: Run, tmp_path: Path) -> None:
    (tmp_path / "prefixes.txt").write_text("The Nile flows. {}\nSo it is\n")
    result = edit(
        *EIFFEL, "--prefixes", "prefixes.txt", "--token", "last", "--layer", 0, "--prefix-seed", 5,
        "--steps", 3, "--lr", 0.01, "--clamp", 2.5, "--json", "--max-new-tokens", 0,
    )  # fmt: skip
    assert result.code == 0, result.err
    settings = json.loads(result.out)["settings"]
    assert settings["prefixes"] == ["The Nile flows. ", "So it is. "]
    assert (settings["layer"], settings["seed"], settings["second_moment"]) == (0, 5, "identity")
    search = settings["search"]
    assert (search["steps"], search["lr"], search["clamp"]) == (3, 0.01, 2.5)


def test_knowledge_neurons_and_their_figure(edit: Run, tmp_path: Path) -> None:
    words = ("--method", "kn", "--found", "--prefix-lengths", "3x1", "--prefix-seed", 3, "--force")
    given = ("--max-neurons", 3, "--threshold", 0.3, "--context-fraction", 0.5, "--true", "Paris")
    weights = ("--new-weight", 0.5, "--old-weight", 0.25)
    drawn = ("--figure", "kn.png", "--page", "kn.html")
    result = edit(*EIFFEL, *words, *given, *weights, *drawn, "--json", "--max-new-tokens", 0)
    assert result.code == 0, result.err
    settings = json.loads(result.out)["settings"]
    names = ("max_neurons", "threshold", "context_fraction", "new_weight", "old_weight", "seed")
    assert [settings[name] for name in names] == [3, 0.3, 0.5, 0.5, 0.25, 3]
    assert [answer.strip() for answer in settings["answers"]] == ["Paris"]
    assert 1 <= len(settings["neurons"][0]) <= 3
    assert {path.name for path in tmp_path.iterdir()} >= {"kn.png", "kn-neurons.png", "kn.html"}
    assert (tmp_path / "kn.html").read_text("utf-8").count("data:image/png") == 2
    assert_refused(edit(*EIFFEL, "--max-neurons", 3), "rome has no --max-neurons (see kn)")
    assert_refused(
        edit(*EIFFEL, *words, "--context-fraction", 2), "--context-fraction is 2.0", "less than 1"
    )
    assert_refused(edit(*EIFFEL, *words, "--layer", 1), "kn has no --layer")


def test_memit_takes_several_layers(edit: Run) -> None:
    words = (*EIFFEL, *QUICK, "--method", "memit", "--force", "--json", "--max-new-tokens", 0)
    for layers in ("0-1", "0,1"):
        record = json.loads(edit(*words, "--layers", layers).out)
        assert record["settings"]["layers"] == [0, 1]
        assert len(record["changed_weights"]) == 2


def test_layer_auto_traces_the_fact(edit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def traced(lm: Any, fact: Fact, layers: Any) -> int:
        asked.append(fact)
        return 2

    monkeypatch.setattr("factscope.editing.defaults.traced_layer", traced)
    words = (*EIFFEL, *QUICK, "--layer", "auto", "--found", "--force", "--json")
    result = edit(*words, "--max-new-tokens", 0)
    assert result.code == 0, result.err
    assert json.loads(result.out)["settings"]["layer"] == 2
    assert len(asked) == 1


def test_a_subject_that_occurs_twice(edit: Run) -> None:
    text = ("New York, New York is in", "--subject", "New York", "--to", "Rome")
    last = edit(*text, *QUICK, "--json")
    assert "2 times" in last.err
    first = edit(*text, *QUICK, "--json", "--occurrence", 1)
    assert json.loads(first.out)["fact"]["prompt"] == "{}, New York is in"


# ---- statistics


def test_missing_statistics_are_collected_once_and_cached(edit: Run, cache: Path) -> None:
    shutil.rmtree(cache / "stats", ignore_errors=True)
    words = (*EIFFEL, *QUICK, "--found", "--force", "--json", "--max-new-tokens", 0)
    first = edit(*words)
    assert first.code == 0, first.err
    assert "There are no statistics of layer 1" in first.err
    assert "factscope stats --model" in first.err
    kept = [path.name for path in (cache / "stats").rglob("*") if path.is_file()]
    assert kept == ["layer-01.safetensors"]
    used = json.loads(first.out)["settings"]["second_moment"]
    assert (used["layer"], used["tokens"]) == (1, 50 * 128)
    assert used["corpus"].startswith("public_domain.txt.gz ")
    second = edit(*words)
    assert "no statistics" not in second.err
    assert json.loads(second.out)["prompts"] == json.loads(first.out)["prompts"]


def test_an_edit_without_statistics_warns(edit: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert edit(*EIFFEL, *QUICK, "--stats", "none", "--json").code == 0
    assert "C is left out" in caplog.text


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Statistics of layer 0."""
    out = tmp_path_factory.mktemp("stats") / "layer.safetensors"
    line = ("stats", "--layers", 0, "--tokens", 1500, "-m", model, "-o", out)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["factscope", *map(str, line)])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert not stopped.value.code
    return out


def test_given_statistics_are_used(edit: Run, statistics: Path) -> None:
    words = (*EIFFEL, *QUICK, "--layer", 0, "--force", "--json")
    for given in (statistics, statistics.parent):
        result = edit(*words, "--stats", given)
        assert result.code == 0, result.err
        assert json.loads(result.out)["settings"]["second_moment"]["layer"] == 0


def test_statistics_of_another_layer_or_model(
    edit: Run, factscope: Run, statistics: Path, other_model: Path, tmp_path: Path
) -> None:
    words = (*EIFFEL, *QUICK, "-o", "rome.edit")
    assert_refused(edit(*words, "--layer", 1, "--stats", statistics), "layer 0", "layer 1")
    result = factscope("edit", *words, "--layer", 0, "--stats", statistics, "-m", other_model)
    assert_refused(result, "the statistics are of", "fingerprint")
    assert nothing_in(tmp_path)


# ---- refusals


def test_an_edit_that_fails_its_checks_is_not_saved(edit: Run, tmp_path: Path) -> None:
    words = (*EIFFEL, *QUICK, "--lr", 5, "--clamp", 1000, "-o", "rome.edit")
    files = ("--page", "p.html", "--figure", "f.png")
    result = edit(*words, *files)
    assert_refused(result, "fails its checks", "perplexity", "force", code=1)
    assert nothing_in(tmp_path)
    forced = edit(*words, "--force", "--json")
    assert forced.code == 0
    assert "check failed: perplexity" in forced.err
    assert json.loads(forced.out)["checks"]["complaints"]
    assert (tmp_path / "rome.edit").exists()


def test_an_object_that_is_already_predicted_is_not_written(
    edit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = " Rome, the capital"
    monkeypatch.setattr(
        "factscope.evaluation.before_after.generate_greedy",
        lambda lm, texts, tokens: [said for _ in texts],
    )
    words = (*EIFFEL, *QUICK, "-o", "rome.edit")
    assert_refused(edit(*words), "already predicts 'Rome' after", "--force")
    assert nothing_in(tmp_path)
    assert edit(*words, "--force").code == 0
    said = " Romeo and Juliet"
    assert edit(*words).code == 0


def test_a_search_that_does_not_converge_shows_its_losses(edit: Run, tmp_path: Path) -> None:
    result = edit(*EIFFEL, "--prefix-lengths", "none", "--steps", 4, "--layer", 2, "-o", "a.edit")
    assert_refused(result, "loss by step", "try another layer", code=1)
    assert nothing_in(tmp_path)


MISTAKES: dict[str, tuple[list[Any], list[str]]] = {
    "empty target": ([CITY, "--subject", TOWER, "--to", " "], ["--to is ' '"]),
    "no target": ([CITY, "--subject", TOWER], ["--to"]),
    "no subject": ([CITY, "--to", "Rome"], ["--subject"]),
    "nothing but a flag": (["--to", "Rome"], ["--facts"]),
    "subject not there": ([CITY, "--subject", "Eifel Tower", "--to", "Rome"], ["'Eiffel Tower'"]),
    "empty prompt": (["", "--subject", TOWER, "--to", "Rome"], ["prompt is empty"]),
    "empty paraphrase": ([*EIFFEL, "--paraphrase", ""], ["--paraphrase"]),
    "prompt too long": (
        [TOWER + " is" * 70, "--subject", TOWER, "--to", "Rome"],
        ["tokens", "64"],
    ),
    "layer out of range": ([*EIFFEL, "--layer", 3], ["layer is 3", "0 to 2"]),
    "layer is a word": ([*EIFFEL, "--layer", "top"], ["'top'"]),
    "several layers": ([*EIFFEL, "--layer", "0-1"], ["--layer is '0-1'", "whole number"]),
    "auto for memit": ([*EIFFEL, "--method", "memit", "--layers", "auto"], ["auto", "3-8"]),
    "memit's layer out of range": (
        [*EIFFEL, "--method", "memit", "--layers", "1-3"],
        ["layer is 3"],
    ),
    "method": ([*EIFFEL, "--method", "rom"], ["'rom'", "memit"]),
    "preset": ([*EIFFEL, "--preset", "papper"], ["'papper'", "paper"]),
    "token": ([*EIFFEL, "--token", "first"], ["'first'", "subject-last"]),
    "a flag of another method": ([*EIFFEL, "--max-change", 0.1], ["rome has no --max-change"]),
    "several flags of another method": (
        [*EIFFEL, "--method", "ft", "--stats", "none", "--clamp", 3, "--prefix-seed", 1],
        ["ft has no --stats", "--clamp (see rome", "--prefix-seed", "its settings are --layer,"],
    ),
    "a bound makes it another method": (
        [*EIFFEL, "--method", "ft", "--max-change", 0.1, "--found"],
        ["--method ft-l"],
    ),
    "auto for fine-tuning": (
        [*EIFFEL, "--method", "ft", "--layer", "auto", "--found"],
        ["--layer is 'auto'", "whole number"],
    ),
    "fine-tuning's layer out of range": (
        [*EIFFEL, "--method", "ft-l", "--layer", 3, "--found"],
        ["layer is 3", "0 to 2"],
    ),
    "steps": ([*EIFFEL, "--steps", 0], ["steps is 0"]),
    "lr": ([*EIFFEL, "--lr", -1], ["lr is -1"]),
    "clamp": ([*EIFFEL, "--clamp", 0], ["clamp is 0"]),
    "prefix lengths": ([*EIFFEL, "--prefix-lengths", "5by10"], ["'5by10'", "5x10"]),
    "prefixes twice": (
        [*EIFFEL, "--prefixes", "facts.jsonl", "--prefix-lengths", "5x1"],
        ["not both"],
    ),
    "no prefixes file": ([*EIFFEL, "--prefixes", "lost.txt"], ["lost.txt"]),
    "stats twice": ([*EIFFEL, "--stats", "facts.jsonl", "--stats", "none"], ["none"]),
    "no statistics file": ([*EIFFEL, "--stats", "lost.safetensors"], ["lost.safetensors"]),
    "what is no statistics": ([*EIFFEL, "--stats", "facts.jsonl"], ["facts.jsonl"]),
    "out is a folder": ([*EIFFEL, "-o", "."], ["--out is '.', which is a folder"]),
    "page": ([*EIFFEL, "--page", "rome.pdf"], [".html"]),
    "figure": ([*EIFFEL, "--figure", "rome.html"], [".png"]),
    "page below a file": (
        [*EIFFEL, *QUICK, "--page", "facts.jsonl/p.html"],
        ["--page is 'facts.jsonl/p.html', which cannot be written"],
    ),
    "out below a file": (
        [*EIFFEL, *QUICK, "-o", "facts.jsonl/rome.edit"],
        ["--out is 'facts.jsonl/rome.edit', which cannot be written"],
    ),
    "out in proc": ([*EIFFEL, "-o", "/proc/rome.edit"], ["--out is '/proc/rome.edit'"]),
    "figure in proc": ([*EIFFEL, "--figure", "/proc/a.png"], ["--figure is '/proc/a.png'"]),
    "no facts file": (["--facts", "lost.jsonl"], ["lost.jsonl"]),
    "facts and prompt": ([*EIFFEL, "--facts", "facts.jsonl"], ["leave those out"]),
    "facts and page": (["--facts", "facts.jsonl", "--page", "p.html"], ["one fact"]),
    "dtype": ([*EIFFEL, "--dtype", "float8"], ["'float8'"]),
}


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    rows = [
        {"subject": TOWER, "prompt": CITY, "to": "Rome", "paraphrases": ["The Eiffel Tower is in"]},
        {"subject": NILE, "prompt": "{} is located in", "to": "Oslo", "true": "Africa",
         "neighbours": ["Oslo is in"]},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_message(edit: Run, facts: Path, case: str) -> None:
    words, wanted = MISTAKES[case]
    assert_refused(edit(*words), *wanted)
    assert nothing_in(facts.parent, "facts.jsonl")


# ---- many facts


def test_many_facts_into_one_edit(edit: Run, facts: Path, tmp_path: Path) -> None:
    facts.write_text(facts.read_text() + '{"subject": "Oslo"}\n')
    result = edit("--facts", facts, *QUICK, "--force", "-o", "both.edit", "--json")
    assert result.code == 0, result.err
    assert "skipped: facts.jsonl, line 3" in result.err
    said = json.loads(result.out)
    assert (said["kind"], said["method"], said["file"]) == ("edits", "rome", "both.edit")
    assert [fact["fact"]["target"] for fact in said["facts"]] == ["Rome", "Oslo"]
    assert [len(fact["prompts"]) for fact in said["facts"]] == [2, 2]
    assert said["facts"][1]["true"] == "Africa"
    assert said["changed_weights"][0]["rank"] == 2
    assert len(Edit.load(tmp_path / "both.edit").facts) == 2


def test_many_facts_as_text(edit: Run, facts: Path) -> None:
    result = edit("--facts", facts, *QUICK, "--force")
    assert result.code == 0, result.err
    for word in ("2 facts", "Rome", "Oslo", "paraphrases", "division factor", "rank 2"):
        assert word in result.out
    assert "1 facts" in edit("--facts", facts, *QUICK, "--force", "--limit", 1).out


def test_facts_that_are_already_predicted_are_skipped(
    edit: Run, facts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "factscope.evaluation.before_after.already_predicted", lambda lm, facts: [True, False]
    )
    result = edit("--facts", facts, *QUICK, "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert len(said["facts"]) == len(said["left_out"]) == 1
    assert "already predicts 'Rome'" in result.err
    monkeypatch.setattr(
        "factscope.evaluation.before_after.already_predicted", lambda lm, facts: [True, True]
    )
    assert_refused(edit("--facts", facts, *QUICK), "all 2 facts", "nothing to change")


# ---- files: show, apply, export, merge


def test_show_needs_no_model(factscope: Run, edits: list[Path]) -> None:
    result = factscope("edit", "show", *edits)
    assert (result.code, result.err) == (0, "")
    for word in (f"{CITY} → Rome", f"{RIVER} → Oslo", "rome, for", "rank 1 of", "at most 0.5",
                 "search.steps", "kB"):  # fmt: skip
        assert word in result.out
    listed = json.loads(factscope("edit", "show", *edits, "--json").out)
    assert [row["facts"][0]["target"] for row in listed] == ["Rome", "Oslo"]
    assert listed[0]["changed_weights"][0]["rank"] == 1
    assert len(listed[0]["fingerprint"]) == 64
    assert listed[0]["checks"]["update_norm"] > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_edit_file_with_nan_is_refused_by_every_command(
    factscope: Run, edits: list[Path], bad: float
) -> None:
    with safe_open(edits[0], framework="pt") as file:
        header = file.metadata()
    tensors = load_file(edits[0])
    next(iter(tensors.values())).view(-1)[0] = bad
    save_file(tensors, edits[0], metadata=header)
    for words in (
        ("show", edits[0]),
        ("apply", *edits),
        ("export", edits[0], "--peft", "adapter"),
        ("export", edits[0], "--checkpoint", "model"),
        ("merge", *edits, "-o", "both.edit"),
    ):
        result = factscope("edit", *words)
        assert_refused(
            result, "rome.edit", "the change of transformer.h.1.mlp.c_proj.weight is NaN"
        )
    assert_refused(factscope("generate", CITY, "--edit", edits[0]), "rome.edit", "is NaN")
    assert nothing_in(edits[0].parent, "rome.edit", "oslo.edit")


def test_outputs_are_checked_before_the_model_is_loaded(
    factscope: Run, edits: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("notes")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "notes.edit").write_text("notes")
    for path, message in (
        ("full", "which already exists"), ("notes.txt", "which is a file"), ("/proc/x", "/proc/x"),
    ):  # fmt: skip
        for words in (
            ("export", edits[0], "--peft", path),
            ("export", edits[0], "--checkpoint", path),
            ("merge", edits[0], "-o", path),
        ):
            result = factscope("edit", *words, "-m", "no-such-model")
            assert_refused(result, f"{words[-2].replace('-o', '--out')} is '{path}'", message)
    assert_refused(factscope("edit", "merge", *edits, "-o", "notes.edit"), "is not an edit file")
    assert (tmp_path / "notes.edit").read_text() == "notes"
    assert_refused(factscope("edit", "merge", *edits, "-o", "/proc/a.edit"), "--out is '/proc/a")
    assert factscope("edit", "merge", *edits, "-o", "notes.edit", "--force").code == 0


def test_apply_scores_edits_alone_and_together(
    factscope: Run, model: Path, edits: list[Path], tmp_path: Path
) -> None:
    words = ("--prompt", "Oslo is", "--max-new-tokens", 4, "--device", "cpu")
    result = factscope("edit", "apply", *edits, *words, "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    lm = load(str(model), device="cpu")
    first, second = map(Edit.load, edits)
    for row, one in zip(said["facts"], (first, second), strict=True):
        text, target = row["text"], row["target"]
        assert row["before"] == pytest.approx(score(lm, text, target), rel=1e-4)
        with one.applied(lm):
            assert row["alone"] == pytest.approx(score(lm, text, target), rel=1e-4)
        with first.applied(lm), second.applied(lm):
            assert row["together"] == pytest.approx(score(lm, text, target), rel=1e-4)
    assert [text["text"] for text in said["texts"]] == ["Oslo is"]
    shown = factscope("edit", "apply", *edits, *words).out
    for word in ("before", "alone", "together", "Oslo is …", "perplexity"):
        assert word in shown


def test_merge_into_one_edit(factscope: Run, edits: list[Path], tmp_path: Path) -> None:
    result = factscope("edit", "merge", *edits, "-o", "both.edit", "--json")
    assert json.loads(result.out) == {"kind": "edit", "path": "both.edit", "edits": 2}
    both = Edit.load(tmp_path / "both.edit")
    parts = list(map(Edit.load, edits))
    assert both.facts == parts[0].facts + parts[1].facts
    [place] = both.changed_weights
    total = parts[0].changes[place].matrix() + parts[1].changes[place].matrix()
    assert torch.allclose(both.changes[place].matrix(), total, atol=1e-6)


def test_merged_and_exported_models_load(
    factscope: Run, model: Path, edits: list[Path], tmp_path: Path
) -> None:
    words = ("--device", "cpu")
    assert factscope("edit", "merge", *edits, "-o", "merged", *words).code == 0
    assert factscope("edit", "export", *edits, "--checkpoint", "exported", *words).code == 0
    lm, merged = load(str(model), device="cpu"), load(str(tmp_path / "merged"), device="cpu")
    exported = load(str(tmp_path / "exported"), device="cpu")
    first, second = map(Edit.load, edits)
    with first.applied(lm), second.applied(lm):
        for name, weight in lm.model.state_dict().items():
            assert torch.equal(weight, merged.model.state_dict()[name])
            assert torch.equal(weight, exported.model.state_dict()[name])
    again = factscope("edit", "merge", *edits, "-o", "merged", *words)
    assert_refused(again, "already exists")


def test_export_for_peft(factscope: Run, edits: list[Path], tmp_path: Path) -> None:
    result = factscope("edit", "export", *edits, "--peft", "adapter", "--device", "cpu")
    assert result.code == 0, result.err
    assert "PeftModel.from_pretrained" in result.out
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2
    ranked = ("--peft", "small", "--max-rank", 1, "--device", "cpu", "--json")
    said = json.loads(factscope("edit", "export", *edits, *ranked).out)
    assert [said[name] for name in ("kind", "path", "edits")] == ["peft", "small", 2]
    assert 0 < said["energy_kept"] < 1
    assert json.loads((tmp_path / "small" / "adapter_config.json").read_text())["r"] == 1


def test_export_prints_what_a_lower_rank_loses(factscope: Run, model: Path, tmp_path: Path) -> None:
    words = ("--method", "ft", "--layer", 1, "--steps", 20, "--lr", 0.01, "--device", "cpu")
    made = factscope("edit", *EIFFEL, "-m", model, *words, "-o", "ft.edit", "--force")
    assert made.code == 0, made.err
    result = factscope("edit", "export", "ft.edit", "--peft", "one", "--max-rank", 1, "--force")
    assert result.code == 0, result.err
    more = ("--peft", "json", "--max-rank", 1, "--force", "--json")
    values = json.loads(factscope("edit", "export", "ft.edit", *more).out)

    lm, edit = load(str(model), device="cpu"), Edit.load(tmp_path / "ft.edit")
    [(name, change)] = edit.changes.items()
    singular = torch.linalg.svdvals(change.matrix())
    kept = (singular[0] ** 2 / (singular**2).sum()).item()
    assert values["energy_kept"] == pytest.approx(kept, rel=1e-4)
    assert values["weights"] == pytest.approx({name: kept}, rel=1e-4)
    assert f"  {name}: {100 * kept:.1f} %" in result.out
    U, S, V = torch.linalg.svd(change.matrix())
    cut = replace(edit, changes={name: LowRank(U[:, :1] * S[:1], V[:1])})
    queries = [Query(CITY, "Rome", which) for which in (0, 1)]
    full, exported = [math.exp(-x.nll) for x in score_queries(lm, queries, [edit, cut])]
    assert full > 1.5 * exported
    [row] = values["facts"]
    assert (row["full"], row["exported"]) == pytest.approx((full, exported), rel=1e-3)
    assert f"Rome: {100 * full:.1f} % → {100 * exported:.1f} %" in result.out


FILE_MISTAKES: dict[str, tuple[list[Any], list[str]]] = {
    "show nothing there": (["edit", "show", "lost.edit"], ["lost.edit"]),
    "show a text": (["edit", "show", "text.edit"], ["text.edit"]),
    "show half a file": (["edit", "show", "half.edit"], ["half.edit", "cannot be read"]),
    "apply nothing there": (["edit", "apply", "lost.edit"], ["lost.edit"]),
    "apply twice": (["edit", "apply", "rome.edit", "./rome.edit"], ["given twice"]),
    "export without a folder": (["edit", "export", "rome.edit"], ["--peft", "--checkpoint"]),
    "export both": (
        ["edit", "export", "rome.edit", "--peft", "a", "--checkpoint", "b"],
        ["either"],
    ),
    "rank of a checkpoint": (
        ["edit", "export", "rome.edit", "--checkpoint", "b", "--max-rank", 1],
        ["--max-rank"],
    ),
    "merge into a full folder": (["edit", "merge", "rome.edit", "-o", "."], ["already exists"]),
    "generate with nothing there": (["generate", "Oslo", "-e", "lost.edit"], ["lost.edit"]),
    "generate both ways": (["generate", "Oslo", "--greedy", "--top-k", 3], ["not both"]),
    "compare with nothing": (["generate", "Oslo", "--compare"], ["--edit"]),
    "generate too much": (
        ["generate", "Oslo", "-e", "rome.edit", "--max-new-tokens", 64],
        ["64", "smaller --max-new-tokens"],
    ),
    "generate from nothing": (["generate", "", "-e", "rome.edit"], ["no tokens"]),
}


@pytest.mark.parametrize("case", FILE_MISTAKES)
def test_a_mistake_with_files_is_one_message(
    factscope: Run, edits: list[Path], tmp_path: Path, case: str
) -> None:
    (tmp_path / "text.edit").write_text("an edit, I say")
    (tmp_path / "half.edit").write_bytes(edits[0].read_bytes()[:-40])
    words, wanted = FILE_MISTAKES[case]
    assert_refused(factscope(*words), *wanted)
    assert nothing_in(tmp_path, "text.edit", "half.edit", *(edit.name for edit in edits))


@pytest.mark.parametrize(
    "words",
    [
        ("edit", "apply", "rome.edit"),
        ("edit", "export", "rome.edit", "--peft", "adapter"),
        ("edit", "merge", "rome.edit", "oslo.edit", "-o", "merged"),
        ("generate", "Oslo", "-e", "rome.edit"),
    ],
)
def test_an_edit_for_another_model(
    factscope: Run, edits: list[Path], other_model: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = factscope(*words, "-m", other_model, "--device", "cpu")
    assert_refused(result, "the edit is for", "load the model that it was made for")
    assert nothing_in(tmp_path, *(edit.name for edit in edits))


# ---- generate


def test_generate_with_edits_equals_the_merged_model(
    factscope: Run, edits: list[Path], tmp_path: Path
) -> None:
    factscope("edit", "merge", *edits, "-o", "merged", "--device", "cpu")
    texts = (CITY, "Oslo is in")
    words = ("--max-new-tokens", 6, "--device", "cpu", "--json")
    together = factscope("generate", *texts, "-e", edits[0], "-e", edits[1], *words)
    assert together.code == 0, together.err
    said = json.loads(together.out)
    assert said["edits"] == list(map(str, edits))
    assert [row["text"] for row in said["texts"]] == list(texts)
    inside = factscope("generate", *texts, "-m", "merged", *words)
    assert json.loads(inside.out)["texts"] == said["texts"]


def test_generate_compares_with_the_unedited_model(
    factscope: Run, model: Path, edits: list[Path]
) -> None:
    words = (CITY, "--max-new-tokens", 5, "--device", "cpu", "--greedy")
    plain = json.loads(factscope("generate", *words, "-m", model, "--json").out)["texts"][0]
    both = factscope("generate", *words, "-e", edits[0], "--compare", "--json")
    assert json.loads(both.out)["texts"][0]["unedited"] == plain["continuation"]
    shown = factscope("generate", *words, "-e", edits[0], "--compare").out
    assert "before" in shown
    assert "after" in shown
    assert CITY in factscope("generate", *words, "-m", model).out


def test_the_seed_determines_the_samples(factscope: Run, model: Path) -> None:
    words = ("generate", CITY, "-m", model, "--max-new-tokens", 8, "--device", "cpu", "--json")
    drawn = [factscope(*words, "--top-k", 20, "--seed", seed).out for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


# ---- demo


def test_the_demo_traces_edits_and_draws(
    factscope: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mild = Rome(token="last", prefix_lengths=((3, 2),), search=ValueSearch(steps=5, lr=0.02))
    monkeypatch.setitem(EDITORS["rome"], "default", mild)
    out = tmp_path / "pictures"
    result = factscope("demo", "-m", model, "--out", out, "--device", "cpu", "--json")
    assert result.code == 0, result.err
    files = [Path(name) for name in json.loads(result.out)["files"]]
    assert {file.name for file in files} == {
        "index.html", "trace.png", "trace-severed.png", "trace.jsonl", "edit.png", "edit.json",
        "rome.edit",
    }  # fmt: skip
    assert all(file.stat().st_size > 1000 for file in files)
    [record] = read_trace_records(out / "trace.jsonl")
    assert set(record.severed) == {"mlp", "attn"}
    edited = EditRecord.from_json((out / "edit.json").read_text())
    assert edited.fact.target == "Rome"
    assert Edit.load(out / "rome.edit").facts == (edited.fact,)
    page = (out / "index.html").read_text()
    assert page.index("Severed graphs") < page.index("Edit checks")

    def full_disk(*_: object) -> list[Path]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("factscope.cli.serve.draw_edit", full_disk)
    result = factscope("demo", "-m", model, "--out", tmp_path / "full", "--device", "cpu")
    assert (result.code, result.out) == (1, "")
    assert "No space left on device" in result.err
    assert not (tmp_path / "full").exists()


def test_out_of_memory_is_one_message(edit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **how: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("factscope.evaluation.before_after.score_queries", full)
    result = edit(*EIFFEL, *QUICK, "-o", "rome.edit")
    assert result.code == 1
    assert "out of memory; try --dtype bfloat16" in result.err
    assert "Traceback" not in result.err
    assert not Path("rome.edit").exists()
