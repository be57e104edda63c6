"""Tables, figures, samples and pages of evaluations, and the command that writes them."""

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import Summary, summaries
from factscope.analysis.published import PUBLISHED, published
from factscope.errors import BadRecord, BadRunFolder, BadSetting
from factscope.facts import Fact
from factscope.records import CaseRecord, CaseScores, PromptScore, TraceRecord
from factscope.report.evaluations import (
    evaluation_tables,
    every_number,
    metrics_table,
    with_published,
    write_evaluation_report,
)
from factscope.report.figures.effects import distributions, distributions_figure
from factscope.report.figures.evaluation import scores_figure
from factscope.report.labels import row_name
from factscope.report.samples import samples_html, samples_of, samples_text, shared_opening
from factscope.report.style import save_figure
from factscope.report.tables import Score, Table, as_csv, as_html, as_latex, as_markdown
from factscope.runs.folder import RunFolder

from commands import Run, runner

KINDS = ("prompt", "paraphrase", "neighbour")


def scores(new: float, texts: tuple[str, ...] = ()) -> CaseScores:
    """P(new) after every prompt but the neighbours', which stay true."""
    wanted = PromptScore(
        new=-math.log(new), true=-math.log(0.2), new_right=new > 0.5, true_right=False
    )
    kept = PromptScore(new=3.0, true=1.0, new_right=False, true_right=True)
    prompts = {"prompt": (wanted,), "paraphrase": (wanted,) * 2, "neighbour": (kept,) * 3}
    return CaseScores(prompts=prompts, texts=texts, reference=0.3 if texts else None)


def case(number: int = 0, method: str = "rome", new: float = 0.6, **fields: Any) -> CaseRecord:
    fact = Fact(
        subject="Pierre Curie", prompt="{}'s area of work is", target="medicine", id=str(number)
    )
    before = ("Pierre Curie works as a professor of physics.", "Curie <script>")
    after = ("Pierre Curie works as a doctor of Medicine.", "Curie <script> heals")
    plain = {
        "fact": fact, "true": "physics", "data": "counterfact", "model": "gpt2-xl",
        "before": scores(0.1, before), "after": scores(new, after),
    }  # fmt: skip
    return CaseRecord(**{**plain, "method": method, **fields})


RECORDS = [
    *(case(i) for i in range(3)),
    *(case(i, "ft", 0.1) for i in range(2)),
    case(2, "ft", after=None, error="no progress"),
    *(case(i, protocol="sequential", step=i) for i in range(2)),
    *(case(i, new=0.1, protocol="sequential", step=i, phase="end") for i in range(2)),
]


def marks(table: Table) -> dict[tuple[str, str], str]:
    """The marked cells by row and column."""
    return {
        (str(row[0]), column.split()[0]): cell.mark
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if isinstance(cell, Score) and cell.mark
    }


# ---- tables


def test_scores_are_written_as_in_the_paper():
    assert str(Score(Estimate(0.8921, 0.0034, 9))) == "89.2 (0.3)"
    assert str(Score(Estimate(6.219, 0.005, 9))) == "621.9 (0.5)"
    assert str(Score(Estimate(0.892, math.nan, 1))) == "89.2"
    assert str(Score(Estimate(-0.0001, 0.0, 9))) == "0.0 (0.0)"
    assert str(Score(Estimate(math.nan, math.nan, 0))) == "–"


def test_our_rows_stand_beside_the_published_ones():
    names = [row_name(row) for row in with_published(summaries(RECORDS))]
    assert names == [
        "unedited", "unedited, published", "ROME", "ROME, published", "FT", "FT, published",
        "ROME, sequential, at edit", "ROME, sequential, at end", "FT+L, published", "KN, published",
        "KE, published", "KE-CF, published", "MEND, published", "MEND-CF, published",
    ]  # fmt: skip
    other = summaries([case(model="tiny"), case(method="rome, paper", model="tiny")])
    assert [row_name(row) for row in with_published(other)] == ["unedited", "ROME", "ROME, paper"]


def test_failed_cases_are_in_the_table_and_its_note():
    table, accuracies = evaluation_tables(summaries(RECORDS), beside=False)
    rows = {str(row[0]): row for row in table.rows}
    assert rows["FT"][1:3] == (3, 1)
    assert rows["unedited"][1:3] == (3, None)
    assert "in no mean" in table.note
    assert "in no mean" not in evaluation_tables(summaries([case()]))[0].note
    assert accuracies.columns[3:] == ("prompt ↑", "paraphrases ↑", "neighbours ↑")


def test_the_best_is_green_and_a_failure_red():
    found = marks(evaluation_tables(summaries(RECORDS), beside=False)[0])
    assert found["ROME", "ES"] == found["ROME", "S"] == "best"
    assert found["FT", "ES"] == found["FT", "EM"] == "failure"
    assert ("unedited", "ES") not in found
    assert ("ROME, sequential, at edit", "ES") not in found  # there is no rival
    assert found["ROME, sequential, at end", "PS"] == "failure"


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
def test_the_rule_gives_the_colours_of_the_paper(model: str):
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


def test_a_damaged_model_is_marked_in_zsre():
    rows = published("gpt2-xl", "zsre")
    assert marks(metrics_table(rows))["FT+L, published", "paraphrase"] == "failure"
    assert metrics_table(rows).columns[3:] == ("efficacy ↑", "paraphrase ↑", "specificity ↑")


def test_tables_in_markdown_and_latex():
    table = evaluation_tables(summaries(RECORDS))[0]
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


def test_every_number_is_in_the_csv():
    rows = list(csv.DictReader(io.StringIO(as_csv(every_number(summaries(RECORDS))))))
    assert [row["source"] for row in rows].count("published") == 9
    ours = [row for row in rows if row["method"] == "ft" and row["source"] == "ours"]
    assert (ours[0]["cases"], ours[0]["failed"], ours[0]["ES"]) == ("3", "1", "0.0")
    theirs = next(row for row in rows if row["method"] == "kn")
    assert (theirs["failed"], theirs["ES"], theirs["ES ±"]) == ("", "0.287", "0.01")
    assert (theirs["S"], theirs["S ±"], theirs["prompt_correct"]) == ("0.356", "", "")


class Balanced(HTMLParser):
    """Sees to it that every tag is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_html(text: str) -> None:
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


def test_the_table_in_html_is_coloured_and_well_formed():
    text = as_html(evaluation_tables(summaries(RECORDS))[0])
    check_html(text)
    assert '<td class="number best">100.0 (0.0)</td>' in text
    assert '<td class="number failure">0.0 (0.0)</td>' in text
    assert text.count('<tr class="ruled">') == 1


def test_a_model_without_scores_has_dashes():
    nothing = {"before": None, "after": None, "error": "no progress"}
    (table,) = evaluation_tables(summaries([case(**nothing)]))
    rome = next(row for row in table.rows if row[0] == "ROME")
    assert [str(cell) for cell in rome] == ["ROME", "1", "1", *"–" * 9]
    (alone,) = evaluation_tables(summaries([case(**nothing, model="tiny")]))
    assert alone.rows == (("ROME", 1, 1),)


# ---- figure


def test_the_figure_shows_three_scores_of_every_row():
    rows = with_published(summaries(RECORDS))
    fig = scores_figure(rows)
    ax = fig.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == [row_name(row) for row in rows]
    assert len(ax.collections) == 3 * len(rows)
    assert ax.get_title(loc="left") == "CounterFact, gpt2-xl"
    assert scores_figure(published("gpt2-xl", "zsre")).axes[0].collections
    assert scores_figure([Summary(model="m", data="own", method="rome", cases=1)])


# ---- samples


def test_samples_stand_side_by_side_with_their_objects_marked():
    (one,) = samples_of(RECORDS, ["1"])
    assert list(one.texts) == [
        "before", "ROME", "FT", "ROME, sequential, at edit", "ROME, sequential, at end",
    ]  # fmt: skip
    text = samples_html(one)
    check_html(text)
    assert "<i>Pierre Curie works as a</i> doctor of <mark>Medicine</mark>." in text
    assert '<mark class="was">physics</mark>' in text
    assert "<script>" not in text
    plain = samples_text(one).plain
    assert "case 1, gpt2-xl: Pierre Curie's area of work is ~physics~ → *medicine*" in plain
    assert "doctor of *Medicine*." in plain
    assert plain.count("before") == 2  # one for each opening


def test_samples_by_default_are_those_of_the_first_cases():
    assert [s.fact.id for s in samples_of(RECORDS, count=2)] == ["0", "1"]
    assert [s.fact.id for s in samples_of(RECORDS, ["2", "0"])] == ["2", "0"]
    assert samples_of([case(before=None, after=scores(0.5))]) == []
    with pytest.raises(BadSetting, match="'17'; there are those of: 0, 1, 2"):
        samples_of(RECORDS, ["17"])


def test_words_of_a_reference_are_marked():
    (one,) = samples_of(RECORDS, ["0"], reference={"0": ["Every Doctor as a"]})
    assert ("doctor", "like") in one.pieces("A doctor as a")
    assert [kind for _, kind in one.pieces("as a")] == ["", "", ""]  # short words are in any text


def test_objects_are_marked_as_whole_words_and_only_where_they_are_known():
    (one,) = samples_of([case(true=None)])
    assert one.pieces("medicine, medicines") == [("medicine", "new"), (", medicines", "")]
    assert one.pieces("physics") == [("physics", "")]


def test_what_texts_share_ends_with_a_word():
    assert shared_opening(["He works as", "He works at"]) == len("He works")
    assert shared_opening(["He is", "He is"]) == 0
    assert shared_opening(["alone"]) == 0


def test_many_texts_are_folded():
    many = case(after=scores(0.5, tuple(f"text {i} here" for i in range(10))))
    assert "7 more texts" in samples_html(samples_of([many])[0])


# ---- how scores are spread


def test_the_boxes_are_of_the_cases(tmp_path: Path):
    spread = distributions(RECORDS)
    assert list(spread) == [
        "unedited", "ROME", "FT", "ROME, sequential, at edit", "ROME, sequential, at end",
    ]  # fmt: skip
    assert spread["ROME"]["EM"] == pytest.approx([40.0] * 3)
    assert len(spread["FT"]["ES"]) == 2
    assert len(spread["unedited"]["NS"]) == 3
    figure = distributions_figure(RECORDS)
    save_figure(figure, tmp_path / "spread.svg")
    assert [ax.get_title().split()[-2] for ax in figure.axes[:2]] == ["ES", "PS"]
    with pytest.raises(BadRecord, match="no scores"):
        distributions_figure([case(before=None, after=None, error="no")])


# ---- the report


def test_the_report_is_a_folder_of_whole_files(tmp_path: Path):
    records = [*RECORDS, case(model="a <b>/tiny")]
    paths = write_evaluation_report(records, tmp_path / "report", "A <title>")
    assert [p.name for p in paths[:4]] == ["index.html", "table.md", "table.tex", "table.csv"]
    assert {p for p in (tmp_path / "report").rglob("*") if p.is_file()} == set(paths)
    assert {p.stem for p in paths[4:]} == {
        "scores-counterfact-gpt2-xl", "scores-counterfact-a-b-tiny",
        "spread-counterfact-gpt2-xl", "spread-counterfact-a-b-tiny",
    }  # fmt: skip
    page = paths[0].read_text(encoding="utf-8")
    check_html(page)
    assert "A &lt;title&gt;" in page
    assert page.count("<script>") == 1
    assert re.findall(r"https?://", page) == []
    assert "What it says" in page
    assert "subject's tokens" not in page
    with pytest.raises(BadRecord, match="no scores"):
        write_evaluation_report([], tmp_path)


def test_the_report_of_zsre_and_of_other_sets(tmp_path: Path):
    right = CaseScores(tokens=dict.fromkeys(KINDS, (True, False)))
    zsre = [case(i, data="zsre", before=right, after=right) for i in range(2)]
    table = evaluation_tables(summaries(zsre))[0]
    assert [column.split()[0] for column in table.columns[3:]] == [
        "efficacy", "paraphrase", "specificity", "drawdown",
    ]  # fmt: skip
    assert table.columns[-1] == "drawdown ↓"
    written = write_evaluation_report([*zsre, case(data="my own")], tmp_path)
    assert {path.stem for path in written[4:]} == {
        f"{figure}-{data}-gpt2-xl" for figure in ("scores", "spread") for data in ("zsre", "my-own")
    }
    assert "my own, gpt2-xl" in written[0].read_text("utf-8")


def test_the_published_rows_can_be_left_out(tmp_path: Path):
    paths = write_evaluation_report(RECORDS, tmp_path, beside=False)
    assert all("published" not in path.read_text("utf-8") for path in paths[:4])


# ---- run folders and the command


def a_run(path: Path, records: list[CaseRecord], command: str = "evaluate") -> Path:
    folder = RunFolder.begin(path, {"command": command, "model": "m"}, {"model_fingerprint": "f"})
    for record in records:
        folder.append(record)
    return path


def test_a_run_of_cases_comes_back_and_goes_on(tmp_path: Path):
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


def test_report_over_evaluations_as_json(factscope: Run, runs: tuple[Path, Path]):
    result = factscope("report", runs[0], "--json")
    assert result.code == 0, result.err
    said = json.loads(result.out)
    assert all(Path(file).is_file() for file in said["files"])
    plain, rome, *_ = said["summaries"]
    assert (plain["method"], rome["method"], rome["cases"]) == ("none", "rome", 3)
    assert rome["metrics"]["S"] == {"mean": 1.0, "half_width": None, "n": 3}
    assert rome["metrics"]["ES"] == {"mean": 1.0, "half_width": 0.0, "n": 3}


def test_report_tells_runs_of_one_method_apart(factscope: Run, tmp_path: Path):
    words = [a_run(tmp_path / name, [case(), case(1)]) for name in ("early", "late")]
    result = factscope("report", *words, "-o", tmp_path / "both")
    assert "| ROME (early) | 2 |" in result.out
    assert "| ROME (late) | 2 |" in result.out


def test_report_refuses_what_does_not_go_together(
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


def test_every_kind_of_record_can_be_appended(tmp_path: Path):
    trace = TraceRecord(
        fact=case().fact, model="m", tokens=("a",), subject=(0, 1), answer="b", answer_id=1,
        known=True, clean=0.5, corrupted=0.1, corrupted_samples=(0.1,),
    )  # fmt: skip
    folder = RunFolder.begin(tmp_path / "t", {"command": "trace"}, {"model_fingerprint": "f"})
    folder.append(trace)
    assert folder.records() == [trace]
    assert len(PUBLISHED) == 34
