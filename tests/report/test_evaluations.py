"""Tables, generated texts and reports of evaluations, and the command that writes them."""

import csv
import io
import json
import re
from pathlib import Path

import pytest

from factscope.analysis.metrics import pair_runs, summarize
from factscope.analysis.published import PUBLISHED, published
from factscope.errors import BadRecord, BadRunFolder, BadSetting
from factscope.records import CaseRecord, CaseScores, TraceRecord
from factscope.report.evaluations import (
    all_metrics_table,
    collect_samples,
    evaluation_tables,
    metrics_table,
    pair_table,
    samples_text,
    shared_opening_length,
    with_published,
    write_evaluation_report,
)
from factscope.report.html import render
from factscope.report.labels import row_name
from factscope.report.tables import Score, Table, as_csv, as_latex, as_markdown
from factscope.runs.folder import RunFolder

from case_records import RECORDS, case, scores
from commands import Run, runner
from pages import check_well_formed

KINDS = ("prompt", "paraphrase", "neighbour")


def marks(table: Table) -> dict[tuple[str, str], str]:
    """The marked cells by row and column."""
    return {
        (str(row[0]), column.split()[0]): cell.mark
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if isinstance(cell, Score) and cell.mark
    }


# ---- tables


def test_published_rows_follow_our_rows_of_the_same_method():
    names = [row_name(row) for row in with_published(summarize(RECORDS))]
    assert names == [
        "unedited", "unedited, published", "ROME", "ROME, published", "FT", "FT, published",
        "ROME, sequential, after its edit", "ROME, sequential, after all edits",
        "FT+L, published", "KN, published", "KE, published", "KE-CF, published",
        "MEND, published", "MEND-CF, published",
    ]  # fmt: skip
    other = summarize([case(model="tiny"), case(method="rome, paper", model="tiny")])
    assert [row_name(row) for row in with_published(other)] == ["unedited", "ROME", "ROME, paper"]


def test_failed_cases_are_counted_and_noted():
    table, accuracies = evaluation_tables(summarize(RECORDS), include_published=False)
    rows = {str(row[0]): row for row in table.rows}
    assert rows["FT"][1:3] == (3, 1)
    assert rows["unedited"][1:3] == (3, None)
    assert "excluded from all means" in table.note
    assert "excluded from all means" not in evaluation_tables(summarize([case()]))[0].note
    assert accuracies.columns[3:] == ("prompt ↑", "paraphrases ↑", "neighbours ↑")


def test_broken_models_are_counted_in_a_column_of_their_own():
    broken = case(1, broken="perplexity of unrelated text from 20 to 900, above 5 times")
    [table, _] = evaluation_tables(summarize([case(), broken]), include_published=False)
    rows = {str(row[0]): row for row in table.rows}
    assert table.columns[:4] == ("editor", "cases", "failed", "broken")
    assert rows["ROME"][1:4] == (2, 0, 1)
    assert rows["unedited"][1:4] == (2, None, None)
    assert "count in the means" in table.note
    without = evaluation_tables(summarize([case()]), include_published=False)[0]
    assert "broken" not in without.columns
    assert "Broken" not in without.note


def test_best_values_and_failures_are_marked():
    found = marks(evaluation_tables(summarize(RECORDS), include_published=False)[0])
    assert found["ROME", "ES"] == found["ROME", "S"] == "best"
    assert found["FT", "ES"] == found["FT", "EM"] == "failure"
    assert ("unedited", "ES") not in found
    assert ("ROME, sequential, after its edit", "ES") not in found  # there is no rival
    assert found["ROME, sequential, after all edits", "PS"] == "failure"


GREEN = {
    "gpt2-xl": {"S rome", "ES mend-cf", "EM mend-cf", "PS mend-cf", "PM mend-cf", "NS rome",
                "NM rome", "GE mend", "RS rome"},
    "gpt-j-6b": {"S rome", "ES ft", "EM ft", "PS rome", "PM rome", "NS rome", "NM ft-l",
                 "GE ft-l", "RS rome"},
    "gpt2-medium": {"S rome", "EM ft-l", "ES rome", "PS rome", "PM rome", "NS rome", "NM rome",
                    "GE ft-l", "RS rome"},
    "gpt2-large": {"S rome", "ES ft-l", "EM rome", "PS rome", "PM rome", "NS rome", "NM rome",
                   "GE ft-l", "RS rome"},
}  # fmt: skip


RED = {
    "gpt2-xl": {"NS ft", "NM ft", "PS ft-l", "S kn", "ES kn", "EM kn", "PS kn", "PM kn", "GE kn",
                "RS kn", "NS ke", "NM ke", "GE ke", "S ke-cf", "NS ke-cf", "NM ke-cf", "GE ke-cf",
                "RS ke-cf", "NS mend", "NM mend", "S mend-cf", "NS mend-cf", "NM mend-cf",
                "GE mend-cf"},
    "gpt-j-6b": {"S ft", "NS ft", "NM ft", "GE ft", "RS ft", "PS ft-l", "NM mend"},
    "gpt2-medium": {"NM ft-l"},
    "gpt2-large": set(),
}  # fmt: skip
"""The paper's colours. The rule has no red for PS of MEND on GPT-J, 53.6, and PM of FT+L on
GPT-2 Medium and Large, 6.1 and 5.1; and it has one for NM of FT+L on Medium, -1.7, listed here."""


@pytest.mark.parametrize("model", GREEN)
def test_marks_match_the_colours_of_the_paper(model: str):
    rows = published(model, "counterfact")
    by_name = {row_name(row): row.method for row in rows}
    found = {(f"{c} {by_name[r]}", mark) for (r, c), mark in marks(metrics_table(rows)).items()}
    assert {cell for cell, mark in found if mark == "failure"} == RED[model]
    best = {cell for cell, mark in found if mark == "best"}
    assert best >= GREEN[model]  # printed numbers can be equal
    for cell in best - GREEN[model]:
        metric, method = cell.split()
        means = {row.method: row.metrics[metric].mean for row in rows}
        assert any(f"{metric} {m}" in GREEN[model] and means[m] == means[method] for m in means)


def test_failures_are_marked_in_zsre():
    rows = published("gpt2-xl", "zsre")
    assert marks(metrics_table(rows))["FT+L, published", "paraphrase"] == "failure"
    assert metrics_table(rows).columns[3:] == ("efficacy ↑", "paraphrase ↑", "specificity ↑")


def test_metrics_table_in_markdown_and_latex():
    table = evaluation_tables(summarize(RECORDS))[0]
    text = as_markdown(table)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert any(line.startswith("| ROME | 3 | 0 | **100.0** | **100.0 (0.0)** |") for line in lines)
    assert "_0.0 (0.0)_" in text
    latex = as_latex(table)
    assert r"\textcolor[rgb]{0,0.6,0}{\textbf{100.0 (0.0)}}" in latex
    assert r"\textcolor[rgb]{0.75,0,0}{\textbf{0.0 (0.0)}}" in latex
    assert r"S $\uparrow$" in latex
    assert latex.count("{") == latex.count("}")
    body = latex[latex.index(r"\toprule") :]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert {line.count(" & ") for line in rows} == {len(table.columns) - 1}
    assert body.count(r"\midrule") == 2
    assert latex.isascii()


def test_csv_has_all_metrics():
    rows = list(csv.DictReader(io.StringIO(as_csv(all_metrics_table(summarize(RECORDS))))))
    assert [row["source"] for row in rows].count("published") == 9
    ours = [row for row in rows if row["method"] == "ft" and row["source"] == "ours"]
    assert (ours[0]["cases"], ours[0]["failed"], ours[0]["ES"]) == ("3", "1", "0.0")
    theirs = next(row for row in rows if row["method"] == "kn")
    assert (theirs["failed"], theirs["ES"], theirs["ES ±"]) == ("", "0.287", "0.01")
    assert (theirs["S"], theirs["S ±"], theirs["prompt_correct"]) == ("0.356", "", "")


def test_two_runs_in_a_table_with_their_difference():
    rome, ft = [case(i) for i in range(3)], [case(i, "ft", 0.1) for i in range(1, 5)]
    (pair,) = pair_runs(rome, ft)
    table = pair_table(pair, ("a", "b"))
    assert table.columns == ("metric", "a", "b", "difference", "cases")
    rows = {row[0]: [str(cell) for cell in row[1:]] for row in table.rows}
    assert rows["ES"] == ["100.0 (0.0)", "0.0 (0.0)", "-100.0 (0.0)", "2"]
    assert rows["neighbours, exact match"] == ["100.0 (0.0)", "100.0 (0.0)", "0.0 (0.0)", "2"]
    assert "2 cases that both runs scored" in table.note
    (apart,) = pair_runs(rome, [case(9, "ft", 0.1)])
    table = pair_table(apart, ("a", "b"))
    assert {str(row[3]) for row in table.rows} == {"–"}
    assert "no case in common" in table.note
    assert "ES,1.0,0.0,0.0,,,,0" in as_csv(table)


def test_missing_scores_are_dashes():
    nothing = {"before": None, "after": None, "error": "no progress"}
    (table,) = evaluation_tables(summarize([case(**nothing)]))
    rome = next(row for row in table.rows if row[0] == "ROME")
    assert [str(cell) for cell in rome] == ["ROME", "1", "1", *"–" * 9]
    (alone,) = evaluation_tables(summarize([case(**nothing, model="tiny")]))
    assert alone.rows == (("ROME", 1, 1),)


# ---- the report


def test_evaluation_report_returns_all_files_it_writes(tmp_path: Path):
    records = [*RECORDS, case(model="a <b>/tiny")]
    paths = write_evaluation_report(records, tmp_path / "report", "A <title>")
    assert [p.name for p in paths[:4]] == ["index.html", "table.md", "table.tex", "table.csv"]
    assert {p for p in (tmp_path / "report").rglob("*") if p.is_file()} == set(paths)
    assert {p.stem for p in paths[4:]} == {
        "scores-counterfact-gpt2-xl", "scores-counterfact-a-b-tiny",
        "spread-counterfact-gpt2-xl", "spread-counterfact-a-b-tiny",
    }  # fmt: skip
    page = paths[0].read_text(encoding="utf-8")
    check_well_formed(page)
    assert "A &lt;title&gt;" in page
    assert page.count("<script>") == 1
    assert re.findall(r"https?://", page) == []
    assert "Generated texts" in page
    assert "subject tokens" not in page
    with pytest.raises(BadRecord, match="no scores"):
        write_evaluation_report([], tmp_path)


@pytest.mark.usefixtures("no_drawing")
def test_evaluation_report_of_zsre_and_custom_data(tmp_path: Path):
    right = CaseScores(token_correct=dict.fromkeys(KINDS, (True, False)))
    zsre = [case(i, data="zsre", before=right, after=right) for i in range(2)]
    table = evaluation_tables(summarize(zsre))[0]
    assert [column.split()[0] for column in table.columns[3:]] == [
        "efficacy", "paraphrase", "specificity", "drawdown",
    ]  # fmt: skip
    assert table.columns[-1] == "drawdown ↓"
    written = write_evaluation_report([*zsre, case(data="my own")], tmp_path)
    assert {path.stem for path in written[4:]} == {
        f"{figure}-{data}-gpt2-xl" for figure in ("scores", "spread") for data in ("zsre", "my-own")
    }
    assert "my own, gpt2-xl" in written[0].read_text("utf-8")


@pytest.mark.usefixtures("no_drawing")
def test_published_rows_can_be_omitted(tmp_path: Path):
    paths = write_evaluation_report(RECORDS, tmp_path, include_published=False)
    assert all("published" not in path.read_text("utf-8") for path in paths[:4])


# ---- generated texts


def test_samples_are_displayed_side_by_side_with_objects_highlighted():
    (one,) = collect_samples(RECORDS, ["1"])
    assert list(one.texts) == [
        "before", "ROME", "FT", "ROME, sequential, after its edit",
        "ROME, sequential, after all edits",
    ]  # fmt: skip
    text = render("samples.html", case=one)
    check_well_formed(text)
    assert "<i>Pierre Curie works as a</i> doctor of <mark>Medicine</mark>." in text
    assert '<mark class="was">physics</mark>' in text
    assert "<script>" not in text
    plain = samples_text(one).plain
    assert "case 1, gpt2-xl: Pierre Curie's area of work is ~physics~ → *medicine*" in plain
    assert "doctor of *Medicine*." in plain
    assert plain.count("before") == 2  # one for each opening


def test_default_samples_are_of_the_first_cases():
    assert [s.fact.id for s in collect_samples(RECORDS, count=2)] == ["0", "1"]
    assert [s.fact.id for s in collect_samples(RECORDS, ["2", "0"])] == ["2", "0"]
    assert collect_samples([case(before=None, after=scores(0.5))]) == []
    with pytest.raises(BadSetting, match="'17'; cases with texts: 0, 1, 2"):
        collect_samples(RECORDS, ["17"])


def test_reference_words_are_highlighted():
    (one,) = collect_samples(RECORDS, ["0"], reference={"0": ["Every Doctor as a"]})
    assert ("doctor", "reference") in one.highlight("A doctor as a")
    assert [kind for _, kind in one.highlight("as a")] == [""] * 3  # short words are in any text


def test_known_objects_are_highlighted_as_whole_words():
    (one,) = collect_samples([case(true=None)])
    assert one.highlight("medicine, medicines") == [("medicine", "new"), (", medicines", "")]
    assert one.highlight("physics") == [("physics", "")]


def test_shared_opening_ends_with_a_word():
    assert shared_opening_length(["He works as", "He works at"]) == len("He works")
    assert shared_opening_length(["He is", "He is"]) == 0
    assert shared_opening_length(["alone"]) == 0


def test_further_texts_are_in_details():
    many = case(after=scores(0.5, tuple(f"text {i} here" for i in range(10))))
    assert "7 more texts" in render("samples.html", case=collect_samples([many])[0])


# ---- run folders and the command


def a_run(path: Path, records: list[CaseRecord], command: str = "evaluate") -> Path:
    folder = RunFolder.create_or_open(
        path, {"command": command, "model": "m"}, {"model_fingerprint": "f"}
    )
    for record in records:
        folder.append(record)
    return path


def test_run_folder_of_cases_resumes(tmp_path: Path):
    path = a_run(tmp_path / "run", RECORDS[:2])
    folder = RunFolder.open(path)
    assert folder.command == "evaluate"
    assert folder.case_records() == RECORDS[:2]
    with folder.records_path.open("a") as file:
        file.write('{"half')
    assert a_run(path, RECORDS[2:4]) == path
    assert folder.case_records() == RECORDS[:4]
    with folder.records_path.open("a") as file:
        file.write("{}\n")
    with pytest.raises(BadRunFolder, match=r"line 5.*to evaluate its fact again"):
        a_run(path, [])
    (path / "spec.toml").write_text("command = ")
    with pytest.raises(BadRunFolder, match="cannot be read"):
        _ = folder.command


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    rome = [record for record in RECORDS if record.method == "rome"]
    ft = [record for record in RECORDS if record.method == "ft"]
    return a_run(tmp_path / "one", rome), a_run(tmp_path / "two", ft)


@pytest.mark.usefixtures("no_drawing")
def test_report_over_two_evaluations(factscope: Run, runs: tuple[Path, Path], tmp_path: Path):
    result = factscope("report", *runs, "--out", tmp_path / "both", "--cases", "0, 2")
    assert result.code == 0, result.err
    assert "| ROME | 3 | 0 |" in result.out
    assert "| FT | 3 | 1 |" in result.out
    assert "case 2, gpt2-xl" in result.out
    assert "case 1," not in result.out
    page = (tmp_path / "both" / "index.html").read_text("utf-8")
    assert "Evaluation: one, two" in page
    assert "case 1," not in page


@pytest.mark.usefixtures("no_drawing")
def test_report_over_evaluations_as_json(factscope: Run, runs: tuple[Path, Path]):
    result = factscope("report", runs[0], "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert all(Path(file).is_file() for file in said["files"])
    plain, rome, *_ = said["summaries"]
    assert (plain["method"], rome["method"], rome["cases"]) == ("none", "rome", 3)
    assert rome["metrics"]["S"] == {"mean": 1.0, "half_width": None, "n": 3}
    assert rome["metrics"]["ES"] == {"mean": 1.0, "half_width": 0.0, "n": 3}


@pytest.mark.usefixtures("no_drawing")
def test_report_distinguishes_runs_of_one_method(factscope: Run, tmp_path: Path):
    words = [a_run(tmp_path / name, [case(), case(1)]) for name in ("early", "late")]
    result = factscope("report", *words, "-o", tmp_path / "both")
    assert "| ROME (early) | 2 |" in result.out
    assert "| ROME (late) | 2 |" in result.out


def test_report_rejects_incompatible_runs_and_flags(
    factscope: Run, runs: tuple[Path, Path], tmp_path: Path
):
    traces = a_run(tmp_path / "traces", [], "trace")
    empty = a_run(tmp_path / "empty", [])
    for words, said in (
        ((*runs,), "--out"),
        ((runs[0], traces, "-o", "x"), "traces (trace)"),
        ((traces, "--cases", "3"), "--cases is about evaluations"),
        ((runs[0], "--preset", "paper"), "--preset is about traces"),
        ((runs[0], "--cases", "99"), "'99'"),
        ((empty,), "no records yet"),
    ):
        result = factscope("report", *words)
        assert (result.code, result.out) == (2, "")
        assert said in result.err


def test_trace_records_can_be_appended(tmp_path: Path):
    trace = TraceRecord(
        fact=case().fact, model="m", tokens=("a",), subject=(0, 1), answer="b", answer_id=1,
        known=True, clean=0.5, corrupted=0.1, corrupted_samples=(0.1,),
    )  # fmt: skip
    folder = RunFolder.create_or_open(
        tmp_path / "t", {"command": "trace"}, {"model_fingerprint": "f"}
    )
    folder.append(trace)
    assert folder.trace_records() == [trace]
    assert len(PUBLISHED) == 34
