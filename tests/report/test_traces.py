"""Pages and reports of causal traces."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver import Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from factscope.analysis.attention import average_knockout
from factscope.analysis.effects import average_kinds, normalised
from factscope.analysis.estimate import Estimate
from factscope.errors import BadRecord
from factscope.records import TraceRecord
from factscope.report.traces import trace_page, trace_run_page, write_trace_report

from browser import browser
from pages import check_escaped, check_self_contained, check_well_formed
from trace_records import KL, LAYERS, ODD_TOKENS, REPLACED, attention_trace, trace


def check_page(page: str) -> None:
    """The page is self-contained, and no token became markup."""
    check_self_contained(page)
    check_escaped(page)
    check_well_formed(page)
    assert "&lt;script&gt;" in page


def test_trace_page_is_self_contained_and_escaped():
    page = trace_page(trace(tokens=ODD_TOKENS, answer="</script><b>"))
    check_page(page)
    assert page.count('class="heat"') == 3
    assert "60.0 %" in page
    assert "gaussian" in page


def test_run_page_says_how_many_facts_it_omits():
    records = [trace(tokens=ODD_TOKENS), trace(1, known=False), *(trace(i) for i in range(2, 6))]
    page = trace_run_page("A <run>", records, limit=2)
    check_page(page)
    assert "A &lt;run&gt;" in page
    assert page.count("<details>") == 2
    assert "4 more facts" in page
    assert "not known" in page
    assert averages_text(records) in page


def averages_text(records: list[TraceRecord]) -> str:
    return average_kinds(records)["states"].total.percent


def test_run_page_without_known_facts_says_so():
    assert "No known fact" in trace_run_page("none", [trace(known=False)])


def test_report_of_a_run_without_measured_cells(tmp_path: Path):
    blank = {"states": ((None,) * LAYERS,) * 6}
    assert write_trace_report([trace(restored=blank, severed={})], tmp_path)
    assert "no cell was measured" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_trace_report_returns_all_files_it_writes(tmp_path: Path):
    paths = write_trace_report([trace(seed) for seed in range(3)], tmp_path / "report", single=1)
    assert paths[0].name == "index.html"
    assert all(path.stat().st_size for path in paths)
    assert {p for p in (tmp_path / "report").rglob("*") if p.is_file()} == set(paths)
    assert {p.suffix for p in paths} == {".html", ".png", ".pdf", ".md", ".tex", ".csv"}
    with pytest.raises(BadRecord, match="no records"):
        write_trace_report([], tmp_path)


def test_trace_page_has_heads_knockout_and_the_logit_lens():
    record = attention_trace()
    page = trace_page(record)
    check_self_contained(page)
    check_well_formed(page)
    assert page.count('class="heat"') == 3 + 2 + 1
    assert "Attention heads" in page
    assert "Attention knockout" in page
    assert page.count("<option") == 1 + len(record.tokens)


def test_trace_page_names_metric_direction_and_replacement():
    record = trace(**KL, settings=REPLACED)
    record = replace(record, fact=replace(record.fact, replacement="Big <Ben>"))
    page = trace_page(record)
    assert (
        "metric: KL(clean ‖ run); corrupted cells are put into the clean run; "
        "the subject is replaced by “Big &lt;Ben&gt;”" in page
    )
    assert "Impact of corrupting MLP in the clean run" in page
    assert "noise samples" not in page
    assert "KL divergence, corrupted run</dt><dd>2.00" in page


def test_caption_names_the_lowest_cell_where_effects_lower_the_metric():
    cells = ((2.0, 1.5), (0.25, None), *[(2.0, 2.0)] * 4)
    page = trace_page(trace(**KL, restored={"states": cells}, severed={}, gradients={}))
    assert "KL(clean ‖ run) is lowest at Space*, layer 0: 0.25" in page


def test_normalised_values_are_shown_on_a_scale_from_0_to_1(tmp_path: Path, no_drawing: None):
    cells = (*[(0.1, 0.1)] * 3, (0.1, 0.35), *[(0.1, 0.1)] * 2)
    record = trace(restored={"states": cells}, severed={}, gradients={})
    page = trace_page(normalised(record))
    assert "normalised p(Seattle)" in page
    assert "0 is the corrupted run, 1 the clean run" in page
    assert "normalised p(Seattle) is highest at le*, layer 1: 0.50" in page
    records = [record, replace(record, clean=0.35)]  # ATE 0.375
    write_trace_report(records, tmp_path / "report", normalise=True)
    report = (tmp_path / "report" / "index.html").read_text("utf-8")
    assert "<dt>metric</dt><dd>normalised p(o)" in report
    assert "<dt>average total effect</dt><dd>1.00 ±" in report
    assert "is highest at le*, layer 1: 0.50" in report  # each fact on its own scale
    assert "is highest at le*, layer 1: 1.00" in report
    effects = (tmp_path / "report" / "effects.csv").read_text("utf-8")
    assert "last subject token,1,0.6666" in effects  # 0.25 / 0.375


def test_run_report_has_averages_of_heads_knockout_and_lens(tmp_path: Path, no_drawing: None):
    records = [attention_trace(seed) for seed in range(3)]
    paths = write_trace_report(records, tmp_path, single=0)
    names = {path.name for path in paths}
    assert {f"{x}.{s}" for x in ("heads", "knockout", "lens") for s in ("png", "csv")} <= names
    page = (tmp_path / "index.html").read_text("utf-8")
    assert average_knockout(records).changes["subject"][0].text in knockout_cells(tmp_path, 0)
    for title in ("Attention heads", "Attention knockout", "Logit lens"):
        assert f"<h2>{title}</h2>" in page


def knockout_cells(folder: Path, layer: int) -> str:
    """The first row of knockout.csv for a layer, in percent."""
    rows = csv.reader((folder / "knockout.csv").read_text("utf-8").splitlines())
    row = next(row for row in rows if row[1] == str(layer))
    return Estimate(float(row[2]), float(row[3]), 3).percent


def test_the_token_selector_and_the_most_likely_tokens(tmp_path: Path):
    page = tmp_path / "trace.html"
    head = tuple((0.1, 0.1 + token / 100) for token in range(6))
    record = attention_trace(
        heads=(head, head), restored={"states": head}, severed={}, gradients={}, knockout={}
    )
    page.write_text(trace_page(record), "utf-8")
    with browser(tmp_path) as chrome:
        chrome.get(page.as_uri())
        _, lens, _, heads = chrome.find_elements(By.CLASS_NAME, "heat")
        lens.find_element(By.CLASS_NAME, "cells").send_keys(Keys.ARROW_DOWN)
        text = lens.find_element(By.TAG_NAME, "output").text
        assert text.endswith("top: Seattle 50.0 %, </script> 25.0 %")
        assert "effect" not in text
        Select(heads.find_element(By.TAG_NAME, "select")).select_by_visible_text("Need* (token 2)")
        heads.find_element(By.CLASS_NAME, "cells").send_keys(Keys.ARROW_RIGHT)
        text = heads.find_element(By.TAG_NAME, "output").text
        assert text == "head 0 · layer 1 · p = 12.0 %, effect +2.0 %"
        assert not chrome.get_log("browser")


def test_arrow_keys_display_the_numbers_of_a_heatmap_cell(tmp_path: Path):
    page = tmp_path / "trace.html"
    cells = ((0.25, 0.5), (0.05, None), *[(0.1, 0.1)] * 4)
    record = trace(restored={"states": cells}, severed={}, gradients={})
    page.write_text(trace_page(record), "utf-8")
    with browser(tmp_path) as chrome:
        chrome.get(page.as_uri())
        output = chrome.find_element(By.TAG_NAME, "output")
        assert output.text == "p(Seattle) is highest at The, layer 1: 50.0 %"
        heatmap = chrome.find_element(By.CLASS_NAME, "cells")
        heatmap.send_keys(Keys.ARROW_RIGHT)
        assert output.text == "The · layer 1 · p = 50.0 %, effect +40.0 %"
        heatmap.send_keys(Keys.ARROW_DOWN)
        assert output.text == "Space* · layer 1 · not measured"
        heatmap.send_keys(Keys.ARROW_LEFT)
        assert output.text == "Space* · layer 0 · p = 5.0 %, effect −5.0 %"
        heatmap.send_keys(Keys.TAB)
        assert output.text == "p(Seattle) is highest at The, layer 1: 50.0 %"
        assert not chrome.get_log("browser")
