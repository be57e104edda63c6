"""The compare view in Chromium at the widths of a desktop and a phone."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver

from factscope import Corruption, Fact, Tracing, trace
from factscope.errors import NotFound
from factscope.records import write_records

from served_page import WIDTHS, Page
from served_records import write_evaluation
from serving import TOWER, running_server, serving_lm

LOADED = (
    "[...document.querySelectorAll('#compared img')].every((i) => i.complete && i.naturalWidth)"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two evaluations, and two runs of traces with two facts."""
    folder, lm = tmp_path_factory.mktemp("runs"), serving_lm()
    write_evaluation(folder / "rome", "rome", 0.1)
    write_evaluation(folder / "ft", "ft", 2.0)
    facts = [Fact(subject=s, prompt="{} is located in the city of") for s in (TOWER, "The Louvre")]
    for name, level in (("noise", 3.0), ("strong-noise", 9.0)):
        (folder / name).mkdir()
        (folder / name / "spec.toml").write_text('command = "trace"\nmodel = "tiny"\n')
        settings = Tracing(corruption=Corruption(samples=1, level=level))
        records = [trace(lm, fact, settings) for fact in facts]
        write_records(folder / name / "records.jsonl", records)
    return folder


def select(page: Page, *names: str) -> None:
    for name in names:
        page.click(f"#run-list [data-key='{name}']")
    page.until(lambda: page.all("#compared table") and "loading" not in page.text("#compared"))
    page.until(lambda: page.js(LOADED))


def test_evaluations_in_one_table(page: Page) -> None:
    page.open("#/compare")
    assert "Select a run" in page.text("#compared")
    select(page, "rome", "ft")
    page.until(lambda: page.all("#compared .both"))
    assert set(page.texts("#compared .both h3")) == {"before", "ROME", "FT"}
    assert "<script>alert(1)</script>" in page.text("#compared .both:last-of-type")
    order = "[...document.querySelectorAll('#compared img, #compared table')].map((e) => e.tagName)"
    tags = page.js(order)
    assert tags == sorted(tags)  # figures (IMG) before tables
    definitions = page.js(
        "Object.fromEntries([...document.querySelectorAll('#compared abbr')]"
        ".map((e) => [e.textContent, e.title]))"
    )
    assert definitions["ES ↑"].startswith("Efficacy score")
    page.screenshot("compare")
    page.open(page.js("location.hash"))
    page.until(lambda: page.all("#compared .both"))


def test_two_runs_of_traces_side_by_side(page: Page) -> None:
    page.open("#/compare")
    select(page, "rome", "noise", "strong-noise")  # replaces the evaluation
    page.until(lambda: page.texts("#compared .pair > div > h2") == ["noise", "strong-noise"])
    lefts = page.js(
        "[...document.querySelectorAll('#compared .pair > div')].map((e) => e.offsetLeft)"
    )
    assert (lefts[0] < lefts[1]) == (page.width == "desktop")
    select(page, "noise")  # switched off: strong-noise alone
    page.until(lambda: not page.all("#compared .pair"))
    assert page.texts("#compared h2") == ["Single facts"]


def test_single_facts_of_a_run_of_traces(page: Page) -> None:
    page.open("#/compare")
    select(page, "noise")
    assert page.all("#compared img[alt^='trace of The Eiffel Tower']")
    page.click("#compared [aria-label='next fact']")
    page.until(lambda: page.all("#compared img[alt^='trace of The Louvre']"))
    page.until(lambda: page.js(LOADED))
    assert "total effect" in page.text("#compared .numbers")
    page.screenshot("compare-traces")
    assert page.accessibility_problems() == []
    page.open(page.js("location.hash"))  # the link holds the fact
    page.until(lambda: page.all("#compared img[alt^='trace of The Louvre']"))


@pytest.mark.parametrize("page", ["desktop"], indirect=True)
def test_files_can_be_downloaded(page: Page) -> None:
    page.open("#/compare")
    select(page, "noise")
    links = page.js(
        "[...document.querySelectorAll('#compared .file')].map((a) => [a.textContent, a.href])"
    )
    assert {name for name, _ in links} == {"PNG", "SVG", "PDF", "CSV", "LaTeX", "Markdown"}
    starts = {"PNG": b"\x89PNG", "PDF": b"%PDF", "SVG": b"<?xml"}
    for name, address in dict(links).items():
        answer = httpx.get(address, timeout=60)
        assert answer.status_code == 200
        assert answer.content.startswith(starts.get(name, b""))


@pytest.mark.parametrize("page", ["desktop"], indirect=True)
def test_a_figure_that_fails_can_be_drawn_again(page: Page, runs: Path) -> None:
    shutil.copytree(runs / "noise", runs / "copy")  # whose figures are not in the cache
    page.open("#/compare")

    def fail(*arguments: Any) -> bytes:
        raise NotFound("not now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("factscope.serve.routes_runs.draw_figure", fail)
        page.click("#run-list [data-key='copy']")
        page.until(lambda: len(page.all("#compared .drawing button")) == 3)
    for number in (2, 1, 0):
        page.all("#compared .drawing button")[number].click()
        page.until(lambda number=number: len(page.all("#compared .drawing button")) == number)
    assert page.js(LOADED)


@pytest.mark.parametrize("folder", [False, True])
def test_without_runs_the_view_says_how_to_create_one(
    chrome: webdriver.Chrome, tmp_path: Path, folder: bool
) -> None:
    with running_server(serving_lm(), runs=tmp_path if folder else None) as (address, _):
        for width in WIDTHS:
            page = Page(chrome, address, width)
            page.open("#/compare")
            assert "factscope evaluate" in page.text("#compared")
            assert ("factscope serve --runs" in page.text("#compared")) == (not folder)
            page.screenshot("compare-empty")
