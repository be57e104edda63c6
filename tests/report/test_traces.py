"""Figures, tables and pages from records: what is drawn, and that odd tokens do no harm."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from factscope.analysis.effects import AverageEffects, average_kinds, severed_comparison
from factscope.analysis.estimate import Estimate
from factscope.errors import BadRecord, BadSetting
from factscope.facts import Fact
from factscope.records import KINDS, TraceRecord
from factscope.report import figures
from factscope.report.html import run_page, trace_page
from factscope.report.style import display_token, token_labels
from factscope.report.tables import (
    Table,
    as_csv,
    as_html,
    as_latex,
    as_markdown,
    effects_table,
    severed_table,
    summary_table,
)
from factscope.report.terminal import strongest_cells, trace_heatmap
from factscope.report.traces import write_report

LAYERS = 6
PLAIN = ("The", " Space", " Need", "le", " is", " in")
ODD = ("<script>", "alert(1)</script>", " 東京", "\n", " $5 and $6$", "\x00")


def rows(seed: int, tokens: int = 6) -> tuple[tuple[float, ...], ...]:
    cells = 0.05 + 0.5 * np.random.default_rng(seed).random((tokens, LAYERS))
    return tuple(tuple(float(x) for x in row) for row in cells)


def trace(seed: int = 0, tokens: tuple[str, ...] = PLAIN, **fields: Any) -> TraceRecord:
    """A trace with every table, of scores drawn at random."""
    defaults: dict[str, Any] = {
        "fact": Fact.from_text("".join(tokens), "".join(tokens[1:4]).strip()),
        "model": "tiny",
        "subject": (1, 4),
        "answer": " Seattle",
        "answer_id": 7,
        "known": True,
        "clean": 0.6,
        "corrupted": 0.1,
        "corrupted_samples": (0.1, 0.1),
        "restored": {kind: rows(seed + i) for i, kind in enumerate(KINDS)},
        "severed": {"mlp": rows(seed + 10), "attn": rows(seed + 11)},
        "gradients": {kind: rows(seed + 20 + i) for i, kind in enumerate(KINDS)},
        "settings": {"window": 10, "seed": 1, "corruption": {"kind": "gaussian"}},
    }
    return TraceRecord(tokens=tokens, **(defaults | fields))


def averages(count: int = 4) -> dict[str, AverageEffects]:
    return average_kinds([trace(seed) for seed in range(count)])


def ticks(fig: Figure, panel: int = 0) -> list[str]:
    return [label.get_text() for label in fig.axes[panel].get_yticklabels()]


def legend(fig: Figure) -> list[str]:
    found = fig.axes[0].get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def bars(fig: Figure) -> Any:
    return fig.axes[0].containers[0]


def drawn(fig: Figure, panel: int = 0) -> Any:
    return fig.axes[panel].collections[0]


def test_labels_show_what_cannot_be_seen():
    assert [display_token(t) for t in (" Need", "  ", "\n", "a\tb", "\x00", "東京")] == [
        "Need", "␣", "↵", "a⇥b", "\ufffd", "東京",
    ]  # fmt: skip
    assert len(display_token("x" * 100)) < 30
    assert token_labels(trace()) == ["The", "Space*", "Need*", "le*", "is", "in"]


@pytest.mark.parametrize(
    ("kind", "colors", "title", "axis"),
    [
        ("states", "Purples", "restoring state", "single restored layer within tiny"),
        ("mlp", "Greens", "restoring MLP", "center of interval of 10 restored MLP layers"),
        ("attn", "Reds", "restoring Attn", "center of interval of 10 restored Attn layers"),
    ],
)
def test_a_trace_is_drawn_as_in_the_paper(kind, colors, title, axis):
    record = trace()
    fig = figures.trace_figure(record, kind)
    ax, bar = fig.axes
    assert title in ax.get_title()
    assert ax.get_xlabel() == axis
    assert ticks(fig) == token_labels(record)
    assert ax.yaxis_inverted()
    assert bar.get_ylabel() == "p(Seattle)"
    mesh = drawn(fig)
    assert mesh.get_cmap().name == colors
    assert mesh.norm.vmin == record.corrupted
    assert np.asarray(mesh.get_array()) == pytest.approx(np.array(record.restored[kind]))


def test_cells_that_were_not_measured_are_left_blank():
    cells = ((None,) * LAYERS, *rows(0)[1:])
    mesh = drawn(figures.trace_figure(trace(restored={"states": cells})))
    assert mesh.get_array().mask[0].all()
    assert not mesh.get_array().mask[1:].any()


def test_all_kinds_stand_side_by_side():
    fig = figures.traces_figure(trace())
    assert [drawn(fig, i).get_cmap().name for i in range(3)] == ["Purples", "Greens", "Reds"]
    with pytest.raises(BadRecord, match="restores nothing"):
        figures.traces_figure(trace(restored={}))
    with pytest.raises(BadSetting, match="no kind 'stats'"):
        figures.trace_figure(trace(), "stats")


def test_gradients_stand_below_the_traces():
    fig = figures.gradients_figure(trace())
    titles = [ax.get_title() for ax in fig.axes if ax.get_title()]
    assert sum("Integrated gradients" in title for title in titles) == 3
    assert sum("Impact" in title for title in titles) == 3
    assert drawn(fig, 3).norm.vmin == 0


def test_average_effects_below_zero_have_the_lightest_colour():
    cells = ((0.0,) * LAYERS,) * 5 + ((0.3,) * LAYERS,)
    low = [trace(i, restored={"states": cells}) for i in (1, 2)]
    effects = average_kinds(low)["states"]
    fig = figures.average_heatmap(effects)
    colored = np.ma.getdata(drawn(fig).get_array())
    assert effects.mean[2, 0] == pytest.approx(-0.1)
    assert colored[2, 0] == 0
    assert colored[5, 0] == pytest.approx(0.2)
    assert ticks(fig)[2] == "Last subject token"
    assert "over 2 facts" in fig.axes[0].get_title()


def test_average_lines_show_each_measured_role_with_its_band():
    effects = averages()
    fig = figures.average_lines(effects)
    line = next(x for x in fig.axes[0].lines if x.get_label() == "Last subject token")
    assert line.get_ydata() == pytest.approx(effects["states"].row("last subject token").mean)
    labels = legend(fig)
    assert "Further tokens" not in labels  # the prompt has none
    assert len(fig.axes[0].collections) == len(labels)


def test_severed_graphs_stand_beside_the_intact_one():
    comparison = severed_comparison([trace(seed) for seed in range(3)])
    fig = figures.severed_figure(comparison)
    heights = [bar.get_height() for bar in bars(fig)]
    assert heights == pytest.approx(comparison.intact.mean.tolist())
    assert legend(fig)[1:] == ["Effect with MLP severed", "Effect with Attn severed"]


def test_the_detail_is_of_the_decisive_subject_token_or_of_the_one_given():
    record = trace()
    states = record.restored["states"]
    decisive = max(range(*record.subject), key=lambda t: max(x or 0 for x in states[t]))
    for token, fig in (
        (decisive, figures.severed_detail(record)),
        (3, figures.severed_detail(record, token=3)),
    ):
        tops = [bar.get_y() + bar.get_height() for bar in bars(fig)]
        assert tops == pytest.approx(list(states[token]))
    with pytest.raises(BadSetting, match="no token 9"):
        figures.severed_detail(record, token=9)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_with_odd_tokens_are_saved_whole(tmp_path: Path, suffix: str):
    odd = trace(tokens=ODD, answer=" $x$", model="a_$b$")
    path = tmp_path / "new" / f"trace.{suffix}"
    for fig in (figures.traces_figure(odd), figures.severed_detail(odd)):
        figures.save_figure(fig, path)
    assert path.stat().st_size > 1000
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_dollar_signs_are_not_mathematics():
    fig = figures.trace_figure(trace(tokens=ODD))
    assert "$5 and $6$" in ticks(fig)
    assert not any(label.get_parse_math() for label in fig.axes[0].get_yticklabels())


def test_other_suffixes_are_refused(tmp_path: Path):
    with pytest.raises(BadSetting, match=r"trace\.bmp"):
        figures.save_figure(figures.trace_figure(trace()), tmp_path / "trace.bmp")
    assert list(tmp_path.iterdir()) == []


def printed(thing: Any, width: int = 80, color: Any = None) -> str:
    console = Console(
        width=width, file=io.StringIO(), color_system=color, force_terminal=color is not None
    )
    console.print(thing)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def step(layers: int) -> TraceRecord:
    """Only the last token's last layer restores the answer."""
    flat = (0.1,) * layers
    return trace(restored={"states": (flat,) * 5 + ((*flat[1:], 0.6),)}, severed={}, gradients={})


def test_the_terminal_without_colour_uses_characters():
    lines = printed(trace_heatmap(step(6))).splitlines()
    assert lines[1].startswith("Space* ")
    assert lines[5] == "    in " + " " * 10 + "@@"
    assert "60.0% clean" in lines[-1]


def test_the_terminal_takes_the_maximum_of_layers_that_do_not_fit():
    text = printed(trace_heatmap(step(100)), width=40)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[5].endswith("@")


def test_the_terminal_with_colour_paints_blocks():
    text = printed(trace_heatmap(step(6)), color="truecolor")
    assert "48;2;63;0;125m" in text  # the darkest purple
    assert "@" not in text


@pytest.mark.parametrize("width", [12, 40, 200])
def test_the_terminal_stands_odd_tokens(width: int):
    odd = trace(tokens=(*ODD[:2], " [bold]東京" * 9, *ODD[3:]))
    assert "東京" in printed(trace_heatmap(odd, "mlp"), width)


def test_the_strongest_cells_come_first():
    text = printed(strongest_cells(step(6), count=2))
    assert re.search(r"in .* 5 .* 60\.0% .* \+50\.0%", text)
    with pytest.raises(BadRecord, match="no table 'attn'"):
        trace_heatmap(step(6), "attn")


TABLE = Table("A|B", ("name", "mean"), (("x_1 & $y$", Estimate(0.1234, 0.01, 9)), ("<b>", 3)))


def test_a_table_in_markdown():
    lines = as_markdown(TABLE).splitlines()
    assert lines[0] == r"**A\|B**"
    assert lines[2:5] == ["| name | mean |", "| :-- | --: |", r"| x\_1 & $y$ | 12.3 ± 1.0 % |"]


def test_a_table_in_latex():
    text = as_latex(TABLE)
    assert r"x\_1 \& \$y\$ & 12.3 $\pm$ 1.0 \% \\" in text
    assert r"\begin{tabular}{lr}" in text


def test_a_table_in_csv_keeps_every_digit():
    table = Table("t", ("name", "mean", "n"), (("a,b", Estimate(0.1234, float("nan"), 1), 1),))
    heads, row = csv.reader(io.StringIO(as_csv(table)))
    assert heads == ["name", "mean", "mean ±", "n"]
    assert row == ["a,b", "0.1234", "", "1"]


def test_a_table_in_html_is_escaped():
    text = as_html(TABLE)
    assert "<td>&lt;b&gt;</td>" in text
    assert '<td class="number">12.3 ± 1.0 %</td>' in text


def test_a_row_must_fit_its_table():
    with pytest.raises(ValueError, match="does not fit"):
        Table("t", ("a", "b"), (("x",),))


def test_tables_of_effects():
    effects = averages()
    rows = effects_table(effects).rows
    layer, peak = effects["states"].peak("last subject token")
    assert ("states", "last subject token", layer, peak, 4) in rows
    assert ("average total effect", effects["states"].total, 4) in summary_table(effects).rows
    comparison = severed_comparison([trace(seed) for seed in range(3)])
    assert severed_table(comparison).columns == ("layer", "intact", "MLP severed", "Attn severed")


def check_alone(page: str) -> None:
    """No address leads out of the page, and no token became markup."""
    assert re.findall(r"https?://|//[a-z]+\.", page) == []
    assert "default-src 'none'" in page
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith("data:image/png;base64,")
    assert page.count("<script") == page.count("</script>")
    assert "alert(1)</script>" not in page
    assert "&lt;script&gt;" in page


def test_the_page_of_a_trace_stands_alone():
    page = trace_page(trace(tokens=ODD, answer="</script><b>"))
    check_alone(page)
    assert page.count('class="heat"') == 3
    assert "60.0 %" in page
    assert "gaussian" in page


def test_the_page_of_a_run_says_what_it_leaves_out():
    records = [trace(tokens=ODD), trace(1, known=False), *(trace(i) for i in range(2, 6))]
    page = run_page("A <run>", records, limit=2)
    check_alone(page)
    assert "A &lt;run&gt;" in page
    assert page.count("<details>") == 2
    assert "4 more facts" in page
    assert "not known" in page
    assert averages_text(records) in page


def averages_text(records: list[TraceRecord]) -> str:
    return average_kinds(records)["states"].total.percent


def test_a_page_without_known_facts_says_so():
    assert "No known fact" in run_page("none", [trace(known=False)])


def test_a_run_in_which_no_cell_was_measured_still_has_a_report(tmp_path: Path):
    blank = {"states": ((None,) * LAYERS,) * 6}
    assert write_report([trace(restored=blank, severed={})], tmp_path)
    assert "no cell was measured" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_report_is_a_folder_of_whole_files(tmp_path: Path):
    paths = write_report([trace(seed) for seed in range(3)], tmp_path / "report", single=1)
    assert paths[0].name == "index.html"
    assert all(path.stat().st_size for path in paths)
    assert {p for p in (tmp_path / "report").rglob("*") if p.is_file()} == set(paths)
    assert {p.suffix for p in paths} == {".html", ".png", ".pdf", ".md", ".tex", ".csv"}
    with pytest.raises(BadRecord, match="no records"):
        write_report([], tmp_path)
