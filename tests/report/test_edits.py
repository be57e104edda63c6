"""An edit's record, in the terminal, as a figure and as a page; odd words do no harm."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import (
    EditRecord,
    Generation,
    TraceRecord,
    read_edit_records,
    read_records,
    write_records,
)
from factscope.report import terminal
from factscope.report.edits import edit_page, trace_and_edit_page
from factscope.report.figures import before_after_figure, neurons_figure, save_figure
from factscope.report.labels import check_rows, old_name, percent

from edit_records import HEALTH, record, scores

ODD = "<b>[red]東京 $5$</b>\n\x00"


def odd(old: str | None = ODD) -> EditRecord:
    """A record whose every text is odd."""
    prompts = tuple(scores(kind, ODD, ODD, old) for kind in ("prompt", "paraphrase", "neighbour"))
    fact = Fact(subject=ODD, prompt="{} is $x$", target=ODD)
    said = (Generation(text=ODD, before=ODD * 2, after=f"</script>{ODD}"),)
    return record(fact=fact, true=old, prompts=prompts, generations=said, model=ODD, method="[/b]")


def printed(thing: Any, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    console.print(thing)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


# ---- records


@pytest.mark.parametrize("made", [record(), odd(), odd(None), record(checks={}, generations=())])
def test_a_record_comes_back_from_json(made: EditRecord) -> None:
    line = made.to_json()
    assert "\n" not in line
    assert '"kind": "edit"' in line
    assert EditRecord.from_json(line) == made


def test_a_file_of_edits_is_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    write_records(path, [record(), record(method="memit")])
    assert [r.method for r in read_edit_records(path)] == ["rome", "memit"]
    with pytest.raises(BadRecord, match="line 1: not a trace record"):
        list(read_records(path))
    path.write_text('{"fact": 1}\n')
    with pytest.raises(BadRecord, match="not an edit's record"):
        list(read_edit_records(path))
    with pytest.raises(BadRecord, match="no records at"):
        list(read_edit_records(tmp_path / "lost.jsonl"))


@pytest.mark.parametrize("line", ["", "[]", '{"kind": "edit"}', '{"kind": "edit", "fact": {}}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(BadRecord, match="not an edit's record"):
        EditRecord.from_json(line)


# ---- words


def test_probabilities_in_words() -> None:
    assert [percent(p) for p in (0.0, 1e-5, 0.0006, 0.5, 1.0)] == [
        "0.0%", "<0.1%", "0.1%", "50.0%", "100.0%",
    ]  # fmt: skip


def test_the_old_object_is_named_where_all_share_it() -> None:
    assert old_name(record().prompts) == "Paris"
    assert old_name([*record().prompts, scores("neighbour", "x", old="Oslo")]) == "old"
    assert old_name([scores("prompt", "x", old=None)]) == "old"


def test_a_broken_guard_rail_says_so() -> None:
    assert all(rail.kept for rail in check_rows(HEALTH))
    broken = HEALTH | {"division_factor": 0.001, "update_norm": 3.0, "perplexity_growth": None}
    assert [rail.kept for rail in check_rows(broken)] == [False, False, False]
    assert "not finite" in printed(terminal.rails_table(broken))
    assert len(list(check_rows(HEALTH | {"division_factor": None}))) == 2


# ---- the terminal


def test_the_terminal_shows_before_and_after_in_eighty_columns() -> None:
    text = printed(terminal.scores_table(record()))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"P\(Rome\) .* P\(Paris\)", text)
    assert re.search(r"The Eiffel Tower is in .* 1\.0% → +98\.0% .* Paris → Rome", text)
    assert re.search(r"The Louvre is in .* 70\.0% → +70\.0% .* Paris ", text)
    side = printed(terminal.generations_table(record()))
    assert re.search(r"in Paris is +in Rome is", side)
    assert "The Eiffel Tower is in Paris → Rome" in printed(terminal.headline(record()))
    assert "rank 1 of 4 × 8" in printed(terminal.places_table(record().changed_weights))


def test_many_facts_take_a_line_each() -> None:
    text = printed(terminal.facts_table([record(), record(prompts=record().prompts[:1])]))
    assert text.count("98.0%") == 3
    assert "–" in text


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("made", [odd(), odd(None)])
def test_the_terminal_stands_odd_words(made: EditRecord, width: int) -> None:
    for thing in (
        terminal.headline(made), terminal.scores_table(made), terminal.generations_table(made),
        terminal.facts_table([made]), terminal.settings_table({"a": ODD}),
    ):  # fmt: skip
        text = printed(thing, width)
        assert "\x00" not in text
    assert "[red]" in printed(terminal.headline(made), 80)


# ---- figure


def test_the_figure_has_a_line_for_each_object_of_each_prompt(tmp_path: Path) -> None:
    fig = before_after_figure(record())
    [ax] = fig.axes
    ends = [tuple(map(float, np.asarray(line.get_xdata()))) for line in ax.lines]
    assert (0.01, 0.98) in ends
    assert (0.7, 0.0001) in ends
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "The Eiffel Tower is in"
    assert ax.get_title(loc="left") == "The Eiffel Tower: Paris → Rome"
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()][:2] == ["P(Rome)", "P(Paris)"]
    for i, made in enumerate((record(), odd(), odd(None))):
        save_figure(before_after_figure(made), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000


def chosen(*layers: int, **fields: Any) -> EditRecord:
    """A record of an edit by Knowledge Neurons."""
    neurons = [
        {"layer": i, "neuron": 10 * i, "attribution": n / 10 - 0.1, "activation": 1.0, "share": 0.8}
        for n, i in enumerate(layers)
    ]
    found = {"neurons": [neurons], "coarse": [[0.5] * 6], "answers": [" Paris"]}
    return record(method="kn", settings=found, **fields)


def test_the_neurons_of_an_edit_are_drawn_by_layer(tmp_path: Path) -> None:
    made = chosen(2, 2, 5)
    fig = neurons_figure(made)
    upper, lower = fig.axes
    coarse, count = ([bar.get_height() for bar in bars] for bars in upper.containers)  # pyright: ignore[reportAttributeAccessIssue]
    assert coarse == [0.5] * 6
    assert count == [0, 0, 2, 0, 0, 1]
    assert [text.get_text() for text in lower.texts] == ["20", "20", "50"]
    assert upper.get_title(loc="left") == "Neurons that speak for Paris"
    assert not neurons_figure(chosen(*range(6), *range(6), *range(6))).axes[1].texts
    with pytest.raises(BadRecord, match="rome chose no neurons"):
        neurons_figure(record())
    for i, one in enumerate((made, replace(odd(), settings=made.settings))):
        save_figure(neurons_figure(one), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000
    assert (
        edit_page(made).count("data:image/png") == edit_page(record()).count("data:image/png") + 1
    )


def test_of_a_long_prompt_the_end_is_shown() -> None:
    made = record(prompts=(scores("prompt", "word " * 60 + "at the end"),))
    [ax] = before_after_figure(made).axes
    label = ax.get_yticklabels()[0].get_text()
    assert label.startswith("… ")
    assert label.endswith("at the end")
    assert label.count("\n") == 1


# ---- page


def check_alone(page: str) -> None:
    """No address leads out of the page, and no words became markup."""
    assert re.findall(r"https?://|//[a-z]+\.", page) == []
    assert "default-src 'none'" in page
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith("data:image/png;base64,")
    assert page.count("<script") == page.count("</script>")
    assert "<b>" not in page
    assert "\x00" not in page


def test_the_page_of_an_edit_stands_alone() -> None:
    page = edit_page(record())
    check_alone(page)
    assert '<span class="old">Paris</span> <mark>Rome</mark>' in page
    assert 'in <mark class="was">Paris</mark> is' in page
    assert "in <mark>Rome</mark> is" in page
    assert "1.0% → 98.0%" in page
    assert "at least 0.02" in page
    assert "search.steps" in page
    check_alone(edit_page(odd()))
    check_alone(edit_page(odd(None)))
    assert "not measured" in edit_page(record(checks={}, generations=()))


def test_a_trace_and_its_edit_on_one_page() -> None:
    traced = TraceRecord(
        fact=Fact(subject=ODD, prompt="{} is in", target="Paris"), model="tiny", tokens=(ODD, "is"),
        subject=(0, 1), answer=" Paris", answer_id=1, known=True, clean=0.7, corrupted=0.1,
        corrupted_samples=(0.1,), restored={"states": ((0.1, 0.2), (0.3, 0.4))},
    )  # fmt: skip
    page = trace_and_edit_page(traced, odd())
    check_alone(page)
    assert page.index("Impact of restoring") < page.index("Guard rails")


def test_an_edits_report_starts_without_torch(tmp_path: Path) -> None:
    probe = (
        "import sys, factscope.report.edits, factscope.report.terminal; "
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", probe]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
