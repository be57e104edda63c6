"""factscope trace: prompts as users type them, answers, edits and chat templates."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commands import Run

CITY = "The Eiffel Tower is located in the city of"
TOWER = "The Eiffel Tower"
EDIT = (
    "--prefix-lengths", "none", "--steps", 5, "--lr", 0.1, "--token", "last", "--stats", "none",
    "--force",
)  # fmt: skip


@pytest.fixture
def trace(factscope: Run, model: Path) -> Run:
    """`factscope trace --json` of the tower's city, with few samples."""
    quick = ("--kinds", "states", "--samples", 2, "--device", "cpu", "--json", "-m", model)
    return lambda text, *words: factscope("trace", text, "--subject", TOWER, *quick, *words)


def test_a_space_at_the_end_of_the_prompt_is_removed_with_a_note(trace: Run) -> None:
    spaced, plain = trace(CITY + " "), trace(CITY)
    assert json.loads(spaced.out) == json.loads(plain.out)
    assert f"space at the end of the prompt is removed: {CITY!r}" in spaced.err
    assert "removed" not in plain.err


def test_invalid_utf8_in_a_prompt_is_refused(trace: Run) -> None:
    result = trace(f"{TOWER} of \udce9 is in")  # how Python decodes the byte E9 in arguments
    assert result.code == 2
    assert "is not valid UTF-8" in result.err
    assert "Traceback" not in result.err


def test_generate_removes_spaces_at_the_end_of_prompts(factscope: Run, model: Path) -> None:
    words = ("-n", 3, "--greedy", "--json", "-m", model, "--device", "cpu")
    spaced = factscope("generate", CITY + " ", *words)
    assert json.loads(spaced.out) == json.loads(factscope("generate", CITY, *words).out)
    assert "spaces at the end of prompts are removed" in spaced.err


@pytest.mark.parametrize("noise", ["1e39", "nan", "inf", "1e39s"])
def test_absurd_noise_is_refused(trace: Run, noise: str) -> None:
    result = trace(CITY, "--noise", noise)
    assert (result.code, result.out) == (2, "")
    assert "--noise is" in result.err


def test_an_answer_of_several_tokens(trace: Run, factscope: Run, tmp_path: Path) -> None:
    record = json.loads(trace(CITY, "--answer", "Paris, France").out)
    assert record["answer"] == " Paris, France"
    assert len(record["restored"]["states"]) == len(record["tokens"])
    assert record["clean"] < json.loads(trace(CITY).out)["clean"]
    (tmp_path / "facts.jsonl").write_text(json.dumps({"subject": TOWER, "prompt": "{} is"}))
    result = factscope("trace", "--facts", "facts.jsonl", "--out", "run", "--answer", "Paris")
    assert (result.code, result.out) == (2, "")
    assert "--answer is for one prompt" in result.err


def test_a_single_trace_reports_its_progress(trace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[float] = []

    @contextmanager
    def working(what: str, total: int | None = None) -> Iterator[Callable[[float], None]]:
        yield reports.append

    monkeypatch.setattr("factscope.cli.trace.working", working)
    assert trace(CITY).code == 0
    assert sum(reports) == pytest.approx(1)


def test_the_edited_model_is_traced(
    trace: Run, factscope: Run, model: Path, tmp_path: Path
) -> None:
    edit = ("edit", CITY, "--subject", TOWER, "--to", "Rome", *EDIT, "-m", model)
    made = factscope(*edit, "-o", "rome.edit")
    assert made.code == 0, made.err
    plain = json.loads(trace(CITY, "--answer", "Rome").out)
    edited = json.loads(trace(CITY, "--answer", "Rome", "--edit", "rome.edit").out)
    assert edited["clean"] > plain["clean"]
    assert edited["model"] == f"{plain['model']} + rome.edit"
    (tmp_path / "facts.jsonl").write_text(
        json.dumps({"subject": TOWER, "prompt": CITY.replace(TOWER, "{}")})
    )
    run = ("trace", "--facts", "facts.jsonl", "--out", "run", "--kinds", "states", "--samples", 2)
    assert factscope(*run, "--edit", "rome.edit").code == 0  # the edit names the model
    [line] = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["model"] == edited["model"]
    other = factscope(*run, "-m", model)
    assert other.code == 2
    assert "edits" in other.err


def test_a_fact_before_and_after_an_edit(trace: Run, factscope: Run, model: Path, tmp_path: Path):
    edit = ("edit", CITY, "--subject", TOWER, "--to", "Rome", *EDIT, "-m", model)
    assert factscope(*edit, "-o", "rome.edit").code == 0
    result = trace(CITY, "--edit", "rome.edit", "--compare", "--out", "both.html")
    assert result.code == 0, result.err
    traces = json.loads(result.out)
    assert traces["after"]["answer"].strip() == "Rome"
    assert traces["old_after"]["answer"] == traces["before"]["answer"]
    plain = json.loads(trace(CITY).out)
    assert traces["before"]["restored"] == plain["restored"]
    assert "After the edit" in (tmp_path / "both.html").read_text("utf-8")
    text = factscope("trace", CITY, "--subject", TOWER, "--kinds", "states", "--samples", 2,
                     "--edit", "rome.edit", "--compare", "-o", "both.png")  # fmt: skip
    assert "After the edit, the new object" in text.out
    assert (tmp_path / "both.png").is_file()
    for words in (("--compare",), ("--compare", "-e", "rome.edit", "--answer", "Rome")):
        refused = trace(CITY, *words)
        assert (refused.code, refused.out) == (2, "")
        assert "--compare" in refused.err


def test_attribution_on_the_command_line(trace: Run, factscope: Run, model: Path, tmp_path: Path):
    record = json.loads(trace(CITY, "--attribution", "atp-star", "--heads").out)
    assert record["attribution"].keys() == record["restored"].keys()
    assert len(record["head_attribution"]) == len(record["heads"])
    text = factscope("trace", CITY, "--subject", TOWER, "--kinds", "states", "--samples", 2,
                     "--attribution", "atp", "-m", model, "-o", "a.png")  # fmt: skip
    assert "AtP of states: correlation" in text.out
    assert (tmp_path / "a-attribution.png").is_file()
    refused = trace(CITY, "--attribution", "atp", "--metric", "rank")
    assert refused.code == 2
    assert "gradient" in refused.err


@pytest.mark.parametrize("prefixes", ["500x2", "64x1", "60x1"])
def test_prefixes_longer_than_the_context_are_refused(
    factscope: Run, model: Path, prefixes: str
) -> None:
    words = ("--subject", TOWER, "--to", "Rome", *EDIT[2:], "--prefix-lengths", prefixes)
    result = factscope("edit", CITY, *words, "-m", model)
    assert (result.code, result.out) == (2, "")
    assert "64" in result.err
    assert "Traceback" not in result.err


CHAT = "system\nBe brief.\nuser\n{{ messages[0].content }}{{ '\\nassistant\\n' }}"


@pytest.fixture
def chat_model(model: Path, tmp_path: Path) -> Path:
    """The tiny model with a chat template."""
    folder = Path(shutil.copytree(model, tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def test_chat_puts_the_prompt_into_the_template(
    trace: Run, factscope: Run, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"system\nBe brief.\nuser\n{CITY}\nassistant\n"
    record = json.loads(trace(CITY, "--chat", "-m", chat_model).out)
    assert "".join(record["tokens"]) == text
    assert "".join(record["tokens"][slice(*record["subject"])]).strip() == TOWER
    (tmp_path / "facts.jsonl").write_text(
        json.dumps({"subject": TOWER, "prompt": CITY.replace(TOWER, "{}")})
    )
    run = ("--out", "run", "--kinds", "states", "--samples", 2, "-m", chat_model, "--chat")
    assert factscope("trace", "--facts", "facts.jsonl", *run).code == 0
    [line] = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] == record["tokens"]
    words = ("--chat", "-m", chat_model, "--device", "cpu", "--json")
    edit = json.loads(
        factscope(
            "edit", CITY, "--subject", TOWER, "--to", "Rome", "--neighbour", "Big Ben is in ",
            "--max-new-tokens", 0, *EDIT, *words,
        ).out
    )  # fmt: skip
    neighbour = text.replace(CITY, "Big Ben is in")
    assert [prompt["text"] for prompt in edit["prompts"]] == [text, neighbour]
    monkeypatch.setattr("factscope.lm.generate.generate", lambda lm, texts, *how: list(texts))
    chat = json.loads(factscope("generate", CITY, "-n", 3, *words).out)
    assert chat["texts"] == [{"text": CITY, "continuation": text}]


@pytest.mark.parametrize("command", ["trace", "edit", "generate"])
def test_chat_without_a_template_is_refused(factscope: Run, model: Path, command: str) -> None:
    words = {"trace": ("--subject", TOWER), "edit": ("--subject", TOWER, "--to", "Rome")}
    result = factscope(command, CITY, *words.get(command, ()), "--chat", "-m", model)
    assert (result.code, result.out) == (2, "")
    assert "has no chat template; leave --chat out" in result.err


# ---- token replacement, metrics, heads, knockout and lens

KREMLIN = ("trace", "The Kremlin is in", "--subject", "The Kremlin")


def test_another_subject_and_every_table(factscope: Run, model: Path, tmp_path: Path) -> None:
    words = ("--replace-with", "Big Ben", "--metric", "logit-difference", "--foil", "Rome",
             "--heads", "--knockout", "--lens", "--direction", "corrupt", "-m", model)  # fmt: skip
    result = factscope(*KREMLIN, *words, "--json")
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["fact"]["replacement"] == "Big Ben"
    assert len(record["corrupted_samples"]) == 1
    assert (record["metric"], record["foil"].strip()) == ("logit-difference", "R")
    assert record["settings"]["direction"] == "corrupt"
    assert len(record["heads"]) > 1
    assert {len(table) for table in record["heads"]} == {len(record["tokens"])}
    assert set(record["knockout"]) == {"subject", "relation", "last"}
    assert set(record["lens"]) == {"clean", "corrupted"}
    shown = factscope(*KREMLIN, *words, "--out", "kremlin.png")
    assert shown.code == 0, shown.err
    for text in ("Big Ben in place of The Kremlin", "Strongest heads", "blocked", "logit lens"):
        assert text in shown.out
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == [f"kremlin{x}.png" for x in ("-heads", "-knockout", "-lens", "")]


def test_normalised_values_are_shown_and_raw_ones_recorded(
    factscope: Run, model: Path, tmp_path: Path
) -> None:
    words = ("--replace-with", "Big Ben", "--kinds", "states", "--normalised", "-m", model)
    raw = json.loads(factscope(*KREMLIN, *words, "--json").out)
    assert raw["metric"] == "probability"
    assert raw["clean_metric"] is None
    result = factscope(*KREMLIN, *words, "--out", "kremlin.html")
    assert result.code == 0, result.err
    label = f"normalised p({raw['answer'].strip()})"
    assert f"{label}: clean 1.00   corrupted 0.00" in result.out
    assert f"metric: {label}; 0 is the corrupted run" in (tmp_path / "kremlin.html").read_text()
    run = factscope("trace", "--facts", "facts.jsonl", "--out", "run", "--normalised")
    assert run.code == 2
    assert "give it to `factscope report`" in run.err


def test_a_single_table_is_drawn_under_the_requested_name(
    factscope: Run, model: Path, tmp_path: Path
) -> None:
    words = ("--kinds", "none", "--lens", "--samples", 1, "-m", model, "--out", "lens.png")
    assert factscope(*KREMLIN, *words).code == 0
    assert [path.name for path in tmp_path.glob("*.png")] == ["lens.png"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replace-with", TOWER), "'The| K|re|m|lin| is| in' (5 subject tokens)"),
        (("--replace-with", TOWER), "'The| E|i|f|f|el| T|ow|er| is| in' (9 subject tokens)"),
        (("--replace-with", "The Kremlin"), "has the subject's tokens"),
        (("--replace-with", "Big Ben", "--distribution", "gaussian"), "--distribution tokens"),
        (("--replace-with", "Big Ben", "--extra-tokens", 1), "--extra-tokens is for noise"),
        (("--distribution", "tokens"), "give a replacement (--replace-with)"),
        (("--foil", "Rome"), "--foil goes with --metric logit-difference"),
        (("--metric", "logit-difference", "--foil", " "), "--foil is ' '; give a text"),
        (("--answer", ""), "--answer is ''; give a text"),
        (("--kinds", "none", "--lens", "--attribution", "atp"), "--attribution is 'atp', but neit"),
        (("--sever", "mlp", "--preset", "paper", "--freeze-at", "all"), "--sever-draws is two"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    factscope: Run, model: Path, words: tuple[object, ...], message: str
) -> None:
    result = factscope(*KREMLIN, *words, "--json", "-m", model)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_run_with_token_replacement_resumes(factscope: Run, model: Path, tmp_path: Path) -> None:
    rows = [
        {"subject": subject, "prompt": "{} is in"} for subject in ("The Kremlin", "Big Ben", TOWER)
    ]
    rows.append({"subject": "Oslo", "prompt": "{} is in", "replacement": "Norway"})
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ("trace", "--facts", "facts.jsonl", "--out", "run", "--distribution", "tokens",
           "--metric", "kl", "--kinds", "states", "--heads", "--json", "-m", model)  # fmt: skip
    first = factscope(*run)
    assert first.code == 0, first.err
    result = json.loads(first.out)
    assert result["facts"] == 3
    assert TOWER in result["left_out"][0]  # no other subject has as many tokens
    path = tmp_path / "run" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    pairs = {r["fact"]["subject"]: r["fact"]["replacement"] for r in map(json.loads, lines)}
    assert pairs == {"The Kremlin": "Big Ben", "Big Ben": "The Kremlin", "Oslo": "Norway"}
    path.write_text("".join(lines[:1]))
    assert factscope(*run).code == 0
    assert path.read_text().splitlines(keepends=True) == lines
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]))
    none = factscope("trace", "--facts", "one.jsonl", "--out", "new", *run[5:])
    assert (none.code, none.out) == (2, "")
    assert "no fact of one.jsonl can be traced (one.jsonl, fact 1: no other fact" in none.err
    assert not (tmp_path / "new").exists()
    one = factscope(*run, "--replace-with", "Big Ben")
    assert (one.code, one.out) == (2, "")
    assert "--replace-with is for one prompt" in one.err
