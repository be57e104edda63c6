"""A human evaluation: built blind, filled in by a browser, counted; and every kind of bad input."""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from factscope.analysis.preferences import preferences
from factscope.errors import BadStudy
from factscope.extras.study import (
    AnswerSheet,
    Study,
    build_study,
    read_answers,
    shared_cases,
    votes,
)
from factscope.facts import Fact
from factscope.records import CaseRecord, CaseScores
from factscope.report.studies import form_data, form_page, preference_sentence, study_page
from factscope.runs.folder import RunFolder

from browser import browser
from commands import Run, runner

EVIL = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


def case(number: int, method: str, texts: int = 2, **fields: Any) -> CaseRecord:
    fact = Fact(subject=f"Tower {number}", prompt="{} is in", target="Oslo", id=str(number))
    after = tuple(f"Tower {number}, prompt {i}, by {method} {EVIL}" for i in range(texts))
    before = tuple(f"Tower {number}, prompt {i}, as it was" for i in range(texts))
    plain = {
        "fact": fact, "true": "Paris", "data": "everyday", "model": "tiny", "method": method,
        "before": CaseScores(texts=before), "after": CaseScores(texts=after),
    }  # fmt: skip
    return CaseRecord(**{**plain, **fields})


def cases(method: str, count: int = 6) -> list[CaseRecord]:
    return [case(i, method) for i in range(count)]


RUNS = {"a": cases("rome"), "b": cases("ft-l")}


def sheet(
    study: Study,
    rater: str,
    winner: str | None,
    left: int = 0,
    change: Mapping[str, Any] | None = None,
) -> str:
    """The answers of a rater who always chooses the same method."""

    def choice(methods: tuple[str, str]) -> int | str:
        return "same" if winner is None else methods.index(winner)

    answers = [
        {"item": item.id, "left": left, "consistent": choice(item.methods), "fluent": "same"}
        for item in study.items
    ]
    plain = {"kind": "factscope study answers", "study": study.id, "rater": rater}
    return json.dumps({**plain, "answers": answers, **(change or {})})


# ---- pairs of texts


def test_the_seed_determines_the_study() -> None:
    one, same, other = (build_study(RUNS, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.id == same.id != other.id
    assert Study.from_json(one.to_json()) == one


def test_both_texts_of_a_pair_continue_the_same_prompt() -> None:
    for item in build_study(RUNS, seed=0).items:
        prompts = {re.match(r".* prompt \d", text).group() for text in item.texts}  # type: ignore[union-attr]
        assert len(prompts) == 1
        assert item.statement == f"Tower {item.case} is in Oslo."
        assert [m in text for m, text in zip(item.methods, item.texts, strict=True)] == [True] * 2


def test_sides_and_order_are_random() -> None:
    many = {"a": cases("rome", 200), "b": cases("ft-l", 200)}
    items = build_study(many, seed=0, cases=200).items
    assert 70 < sum(item.methods[0] == "rome" for item in items) < 130
    assert [item.case for item in items] != sorted(item.case for item in items)
    assert {item.case for item in build_study(many, seed=0, cases=5).items} < {
        str(i) for i in range(200)
    }


def test_with_the_unedited_model_a_case_has_three_pairs() -> None:
    study = build_study(RUNS, seed=0, cases=2, unedited=True)
    assert study.methods == ("rome", "ft-l", "none")
    assert len(study.items) == 6
    assert len({frozenset(item.methods) for item in study.items}) == 3


def test_only_shared_cases_with_texts_are_compared() -> None:
    some = [case(0, "ft-l"), case(1, "ft-l", after=None, error="no progress"), case(9, "ft-l")]
    shared = shared_cases({"a": cases("rome"), "b": some})
    assert [fact.id for fact in shared] == ["0"]


def test_of_sequential_edits_the_final_texts_are_compared() -> None:
    late = [
        case(i, "rome", protocol="sequential", step=i, phase="end",
             after=CaseScores(texts=("the end",)))
        for i in range(2)
    ]  # fmt: skip
    early = [case(i, "rome", protocol="sequential", step=i) for i in range(2)]
    shared = shared_cases({"a": [*late, *early], "b": cases("ft-l")})
    assert all(texts["rome"] == ("the end",) for texts in shared.values())


def test_two_runs_of_one_method_have_the_run_in_their_names() -> None:
    other = [case(0, "rome", texts=1, after=CaseScores(texts=("something else",)))]
    study = build_study({"runs/a": cases("rome"), "runs/b": other}, seed=0)
    assert study.methods == ("rome (runs/a)", "rome (runs/b)")


def test_identical_texts_are_left_out() -> None:
    with pytest.raises(BadStudy, match="wrote the same in every case"):
        build_study({"a": cases("rome"), "b": cases("rome")}, seed=0)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"a": [], "b": cases("ft")}, "a has no evaluated case yet"),
        ({"a": cases("rome"), "b": [case(0, "ft", texts=0)]}, "no texts by ft; .*--text-length"),
        ({"a": cases("rome"), "b": [case(77, "ft")]}, "no case has texts of rome and of ft"),
    ],
)
def test_runs_that_cannot_be_compared(runs: Any, message: str) -> None:
    with pytest.raises(BadStudy, match=message):
        build_study(runs, seed=0)


# ---- the form


def test_the_form_does_not_contain_the_methods() -> None:
    clean = {
        run: [case(i, method, after=CaseScores(texts=(f"{'xy'[run == 'a']} {i}",)))
              for i in range(6)]
        for run, method in (("a", "rome"), ("b", "ft-l"))
    }  # fmt: skip
    study = build_study(clean, seed=123456789)
    page = form_page(study)
    for secret in (r"\brome", "ft-l", "123456789", "methods", "tiny"):
        assert not re.search(secret, page.casefold())
    # both methods occur as the first text
    assert {item["texts"][0][0] for item in form_data(study)["items"]} == {"x", "y"}


def test_a_text_cannot_close_the_script_element() -> None:
    page = form_page(build_study(RUNS, seed=0), title="<b>a & b</b>")
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "<title>&lt;b&gt;a &amp; b&lt;/b&gt;</title>" in page
    embedded = re.search(r'id="study">(.*?)</script>', page, re.S)
    assert embedded
    assert EVIL in json.loads(embedded.group(1))["items"][0]["texts"][0]


# ---- answers


def test_votes_go_to_the_method_on_either_side() -> None:
    study = build_study(RUNS, seed=3)
    given = [
        AnswerSheet.from_json(sheet(study, name, "ft-l", left)) for left, name in enumerate("xy")
    ]
    found = {one.question: one for one in preferences(votes(study, given))}
    assert found["consistent"].wins == (0, 12)
    assert found["fluent"].ties == 12
    assert found["consistent"].left == 6  # one rater saw it on the left, the other on the right
    assert preference_sentence(found["consistent"]).startswith(
        "FT+L was rated more consistent in every vote"
    )
    assert "No rater found ROME or FT+L more fluent" in preference_sentence(found["fluent"])


def test_the_report_escapes_texts() -> None:
    study = build_study(RUNS, seed=3)
    page = study_page(study, votes(study, [AnswerSheet.from_json(sheet(study, "<b>", "rome"))]))
    assert EVIL not in page
    assert "&lt;/script&gt;" in page
    assert "6 more" not in page
    assert "3 more pairs" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "something"}, "its kind is not"),
        ({"kind": "factscope study key"}, "the study's key"),
        ({"rater": "  "}, "the rater is '  '"),
        ({"rater": 3}, "the rater is 3"),
        ({"study": "0" * 16}, "answers the study '0000000000000000'"),
        ({"answers": [{"item": "1"}]}, "'left' is missing"),
        ({"answers": [{"item": "1", "left": 2}]}, "left is 2"),
        ({"answers": [{"item": "1", "left": 0, "fluent": "A"}]}, "fluent is 'A'"),
        ({"answers": [{"item": "1", "left": 0, "fluent": True}]}, "fluent is True"),
        ({"answers": [{"item": "99", "left": 0}]}, "no pair '99'"),
        ({"answers": [{"item": "1", "left": 0}] * 2}, "the pair 1 is answered twice"),
        ({"answers": None}, "not a form's answers"),
        ({"answers": ["x"]}, "not a form's answers"),
    ],
)
def test_bad_answers(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    study = build_study(RUNS, seed=0)
    path = tmp_path / "ada.json"
    path.write_text(sheet(study, "Ada", "rome", change=change))
    with pytest.raises(BadStudy, match=f"ada.json.*{re.escape(message)}"):
        read_answers(study, [path])


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "null", '"x"', b"\xff\xfe"])
def test_files_that_are_not_answers(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "ada.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadStudy, match=r"ada\.json"):
        read_answers(build_study(RUNS, seed=0), [path])


def test_a_rater_counts_once(tmp_path: Path) -> None:
    study = build_study(RUNS, seed=0)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(sheet(study, "Ada  Lovelace", "rome", change={"answers": []}))
    second.write_text(sheet(study, "ada lovelace", "rome"))
    with pytest.raises(BadStudy, match=r"a.json with 0 pairs and .*b.json with 6"):
        read_answers(study, [first, second])
    assert len(read_answers(study, [second, second])) == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": "factscope study key"}'])
def test_bad_keys(text: str) -> None:
    with pytest.raises(BadStudy, match="not the key of a study"):
        Study.from_json(text)


def test_a_changed_key_is_rejected() -> None:
    key = build_study(RUNS, seed=0).to_json().replace("prompt", "start")
    with pytest.raises(BadStudy, match="the key was changed"):
        Study.from_json(key)


# ---- the commands


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def write_run(name: str, records: list[CaseRecord], **spec: Any) -> None:
    plain = {"command": "evaluate", "model": "tiny", "data": "everyday", "scoring": {"length": 9}}
    weights = spec.pop("weights", "same")
    folder = RunFolder.create_or_open(Path(name), {**plain, **spec}, {"model_fingerprint": weights})
    for record in records:
        folder.append(record)


@pytest.fixture
def runs(run: Run) -> Run:
    write_run("a", RUNS["a"])
    write_run("b", [*RUNS["b"][:5], case(5, "ft-l", after=None, error="no progress")])
    return run


def test_build_and_report(runs: Run) -> None:
    made = runs("study", "build", "a", "b", "--out", "s", "--per-rater", 4)
    assert made.code == 0, made.err
    assert "5 pairs of texts on 5 cases" in made.out
    assert "b: 1 cases have no edit" in made.err
    study = Study.from_json(Path("s/key.json").read_text("utf-8"))
    assert study.per_rater == 4
    for name, winner in (("x", "rome"), ("y", "rome"), ("z", "ft-l")):
        Path(f"{name}.json").write_text(sheet(study, name, winner))
    done = runs("study", "report", "x.json", "y.json", "z.json", "--key-file", "s/key.json")
    assert done.code == 0, done.err
    assert "ROME was rated more consistent 2.0 times as often as FT+L" in done.out
    assert "10 votes against 5" in done.out
    written = {path.name for path in Path("s/report").iterdir()}
    assert {"index.html", "preferences.csv", "preferences.png", "preferences.pdf"} <= written
    found = runs("study", "report", "x.json", "-k", "s/key.json", "-o", "r", "--json")
    values = json.loads(found.out)["preferences"]
    assert values[0]["wins"] == [5, 0]
    assert values[0]["ratio"] is None
    assert values[0]["ratio_interval"][1] is None
    assert values[1]["fraction"] is None


def test_a_key_is_not_overwritten(runs: Run) -> None:
    words = ("study", "build", "a", "b", "--seed")
    assert runs(*words, 1).code == 0
    key = Path("study/key.json").read_text()
    assert runs(*words, 1, "--json").code == 0
    other = runs(*words, 2)
    assert other.code == 2
    assert "the key of another study" in other.err
    assert Path("study/key.json").read_text() == key
    fresh = [json.loads(runs("study", "build", "a", "b", "-o", o, "--json").out) for o in "xy"]
    assert fresh[0]["study"] != fresh[1]["study"]  # the default seed is random


@pytest.mark.parametrize(
    ("records", "spec", "message"),
    [
        (cases("ft-l"), {"model": "other"}, "model is 'tiny' in the one and 'other'"),
        (cases("ft-l"), {"data": "zsre"}, "data is 'everyday'"),
        (cases("ft-l"), {"data_sha256": "0"}, "data_sha256"),
        (cases("ft-l"), {"scoring": {"length": 10}}, "scoring is"),
        (cases("ft-l"), {"weights": "others"}, "different weights (same and others)"),
        (cases("ft-l"), {"command": "trace"}, "is a run of trace"),
        ([], {}, "c has no evaluated case yet"),
        ([case(0, "ft-l", texts=0)], {}, "no texts by ft-l"),
        ([case(77, "ft-l")], {}, "no case has texts"),
    ],
)
def test_runs_with_different_settings(
    runs: Run, records: list[CaseRecord], spec: dict[str, Any], message: str
) -> None:
    write_run("c", records, **spec)
    done = runs("study", "build", "a", "c")
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not Path("study").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("build", "a", "nowhere"), "nowhere is not a run folder"),
        (("build", "a", "a"), "given twice"),
        (("report", "x.json"), "study/key.json cannot be read"),
        (("report", "nothing.json", "--key-file", "s/key.json"), "nothing.json cannot be read"),
        (("report", "s/key.json", "--key-file", "s/key.json"), "the study's key"),
        (("report", "empty.json", "--key-file", "s/key.json"), "nobody answered"),
        (("build", "a", "b", "--out", "a/spec.toml"), "--out is 'a/spec.toml', which is a file"),
    ],
)
def test_bad_arguments_give_one_message(runs: Run, words: tuple[str, ...], message: str) -> None:
    assert runs("study", "build", "a", "b", "--out", "s").code == 0
    study = Study.from_json(Path("s/key.json").read_text("utf-8"))
    Path("empty.json").write_text(sheet(study, "Ada", None, change={"answers": []}))
    done = runs("study", *words)
    assert done.code == 2
    assert message in done.err
    assert not Path("s/report").exists()


# ---- in a browser


def wait_for(path: Path) -> None:
    """Wait until the download is complete."""
    for _ in range(2400):
        if path.is_file() and path.stat().st_size:
            return
        time.sleep(0.05)
    pytest.fail(f"{path} was not downloaded; there are {list(path.parent.iterdir())}")


def shown(chrome: Chrome, name: str) -> str:
    """The text of an element, once there is one: a reload may return before the page is drawn."""
    wait = WebDriverWait(chrome, 60, 0.05, [NoSuchElementException, StaleElementReferenceException])
    return str(wait.until(lambda _: chrome.find_element(By.ID, name).text))


def press(chrome: Chrome, *keys: str) -> None:
    for key in keys:
        chrome.switch_to.active_element.send_keys(key)


def click(chrome: Chrome, place: str) -> None:
    chrome.find_element(By.CSS_SELECTOR, place).click()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_form_in_a_browser(runs: Run, tmp_path: Path, width: int) -> None:
    assert runs("study", "build", "a", "b", "--out", "s").code == 0
    study = Study.from_json(Path("s/key.json").read_text("utf-8"))
    writer = {t: m for item in study.items for t, m in zip(item.texts, item.methods, strict=True)}
    url = (tmp_path / "s" / "form.html").as_uri()
    with browser(tmp_path, width) as chrome:
        chrome.get(url)
        click(chrome, "#rater")
        press(chrome, "Ada Lovelace", Keys.ENTER)
        seen = []
        for number in range(5):
            assert shown(chrome, "place") == f"{number + 1} of 5"
            left = chrome.find_element(By.ID, "left").get_property("textContent")
            assert chrome.title == "Which text is better?"  # no markup ran
            assert EVIL in str(left)
            seen.append(shown(chrome, "statement"))
            at_left = writer[str(left)] == "rome"
            if number == 0:  # by mouse; ROME is more consistent, both equally fluent
                side = "left" if at_left else "right"
                click(chrome, f"#consistent input[value={side}] + span")
                click(chrome, "#fluent input[value=same] + span")
                click(chrome, "#next")
            elif number < 4:  # by keyboard; FT+L is more fluent
                press(chrome, "1" if at_left else "3", "6" if at_left else "4", Keys.ENTER)
            else:  # back and forth, with a reload; one question is skipped
                press(chrome, Keys.BACKSPACE)
                assert shown(chrome, "statement") == seen[3]
                assert chrome.find_elements(By.CSS_SELECTOR, "#pair input:checked")
                chrome.refresh()
                assert shown(chrome, "statement") == seen[3]
                press(chrome, Keys.ENTER, "2")
                assert chrome.execute_script(
                    "return document.documentElement.scrollWidth <= innerWidth"
                )
                click(chrome, "#stop")
        assert "5 of 5 pairs" in shown(chrome, "done")
        click(chrome, "#download")
        answers = tmp_path / "answers-Ada-Lovelace.json"
        wait_for(answers)
        copied = chrome.find_element(By.ID, "copy").get_property("value")
        assert copied == answers.read_text("utf-8")
        click(chrome, "#again")
        chrome.switch_to.alert.accept()
        assert chrome.find_element(By.ID, "rater").get_property("value") == ""
        assert not chrome.get_log("browser")
    assert len(set(seen)) == 5
    done = runs("study", "report", answers, "--key-file", "s/key.json", "--json")
    assert done.code == 0, done.err
    consistent, fluent = json.loads(done.out)["preferences"]
    assert (consistent["wins"], consistent["ties"]) == ([4, 0], 1)
    assert (fluent["wins"], fluent["ties"]) == ([0, 3], 1)


def test_order_and_sides_differ_between_raters(tmp_path: Path) -> None:
    study = build_study({"a": cases("rome", 30), "b": cases("ft-l", 30)}, seed=0, per_rater=10)
    form = tmp_path / "form.html"
    form.write_text(form_page(study), "utf-8")
    orders, lefts = set(), []
    with browser(tmp_path) as chrome:
        chrome.get(form.as_uri())
        for _ in range(3):
            state = chrome.execute_script("localStorage.clear(); return fresh()")
            assert len(state["order"]) == 10
            orders.add(tuple(state["order"]))
            lefts += state["left"].values()
        chrome.execute_script(f"localStorage.setItem('factscope-study-{study.id}', '{{broken')")
        chrome.refresh()
        assert "Which text is better?" in shown(chrome, "intro")
    assert len(orders) == 3
    assert set(lefts) == {0, 1}


def test_answers_survive_a_reload_and_a_new_visit(tmp_path: Path) -> None:
    """The newer of what the history entry and localStorage have of this study is restored. Only the
    history entry is tested by a reload: Chromium can lose localStorage."""
    study = build_study({"a": cases("rome", 3), "b": cases("ft-l", 3)}, seed=0)
    form = tmp_path / "form.html"
    form.write_text(form_page(study), "utf-8")
    with browser(tmp_path) as chrome:
        chrome.get(form.as_uri())
        chrome.execute_script("show('pair'); step(1)")
        assert chrome.execute_script("history.replaceState(null, ''); return restored().at") == 1
        chrome.execute_script("save(); localStorage.clear()")
        chrome.refresh()
        assert shown(chrome, "place") == "2 of 3"
        older = "const text = JSON.stringify(state); step(1); "
        older_entry = "history.replaceState({[STORAGE_KEY]: text}, ''); "
        assert chrome.execute_script(older + older_entry + "return restored().at") == 2
        store = f"localStorage.setItem('factscope-study-{study.id}', text); "
        back = older.replace("1", "-1")
        assert chrome.execute_script(back + store + "return restored().at") == 1
        other = "localStorage.clear(); history.replaceState({other: text}, ''); "
        assert chrome.execute_script(back + other + "return restored()") is None
