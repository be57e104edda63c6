"""The compare view in Chromium on a desktop (1280 px, light) and a phone (390 px, dark)."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium import webdriver

from factscope import Corruption, Fact, Tracing, trace
from factscope.errors import NotFound
from factscope.records import write_records
from factscope.serve.sessions import ServerState

from served_page import WIDTHS, Page
from served_records import write_evaluation
from serving import TOWER, running_server, serving_lm

LOADED = (
    "[...document.querySelectorAll('#compared img')].every((i) => i.complete && i.naturalWidth)"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three evaluations, two runs of traces with two facts, and damaged runs."""
    folder, lm = tmp_path_factory.mktemp("runs"), serving_lm()
    for name, method, new in (("rome", "rome", 0.1), ("ft", "ft", 2.0), ("torn", "memit", 0.5)):
        write_evaluation(folder / name, method, new)
    with (folder / "torn" / "records.jsonl").open("a") as file:
        file.write('{"kind": "case", "fa')  # of a process that was killed
    os.mkdir(os.fsencode(folder) + b"/latin-\xe9")  # a name that is not UTF-8
    with open(os.fsencode(folder) + b"/latin-\xe9/spec.toml", "w", encoding="utf-8") as file:
        file.write('command = "evaluate"\n')
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


def lefts(page: Page) -> list[int]:
    """Where the columns of runs begin."""
    return page.js(
        "[...document.querySelectorAll('#compared .pair > div')].map((e) => e.offsetLeft)"
    )


def test_two_evaluations_side_by_side(page: Page) -> None:
    page.open("#/compare")
    assert "Select a run" in page.text("#compared")
    select(page, "rome", "ft")
    assert page.texts("#compared .pair > div > h2") == ["rome", "ft"]
    assert (lefts(page)[0] < lefts(page)[1]) == (page.width == "desktop")
    for column in (1, 2):
        assert len(page.all(f"#compared .pair > div:nth-child({column}) img")) == 2
    heads, *rows = (
        [cell.text for cell in row.find_elements("css selector", "th, td")]
        for row in page.all("#compared table:first-of-type tr")[:4]
    )
    assert heads == ["metric", "rome", "ft", "difference", "cases"]
    assert ["ES", "100.0", "0.0", "-100.0", "1"] in rows
    assert "Settings that differ" in page.text("#compared")
    page.until(lambda: page.all("#compared .both"))
    assert set(page.texts("#compared .both h3")) == {"before", "ROME", "FT"}
    tops = "[...document.querySelectorAll('#compared .both > div')].map((e) => e.offsetTop)"
    if page.width == "desktop":
        assert len(set(page.js(tops))) == 1  # the texts are side by side
    assert "<script>alert(1)</script>" in page.text("#compared .both:last-of-type")
    order = "[...document.querySelectorAll('#compared img, #compared table')].map((e) => e.tagName)"
    tags = page.js(order)
    assert tags == sorted(tags)  # figures (IMG) before tables
    definitions = page.js(
        "Object.fromEntries([...document.querySelectorAll('#compared abbr')]"
        ".map((e) => [e.textContent, e.title]))"
    )
    assert definitions["ES ↑"] == definitions["ES"]
    assert definitions["ES"].startswith("Efficacy score")
    page.screenshot("compare")
    assert page.accessibility_problems() == []
    assert page.unexplained_controls() == []
    page.open(page.js("location.hash"))
    page.until(lambda: page.all("#compared .both"))


def test_several_evaluations_in_one_table(page: Page) -> None:
    page.open("#/compare")
    select(page, "rome", "ft", "torn")  # a torn last line does not hide the others
    page.until(lambda: set(page.texts("#compared .both h3")) == {"before", "ROME", "FT", "MEMIT"})
    assert not page.all("#compared .pair")
    editors = page.texts("#compared table:first-of-type tbody td:first-child")
    assert {"ROME", "FT", "MEMIT"} <= set(editors)


def test_a_run_that_cannot_be_read_does_not_stop_the_page(page: Page) -> None:
    page.open("#/compare")
    page.click("#run-list [data-key='latin-\\\\xe9']")
    page.until(lambda: page.all("#compared .failed"))
    assert "has no records yet" in page.text("#compared")
    page.click("nav [data-view=trace]")
    page.trace()


def test_figures_that_wait_do_not_delay_the_page(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, started = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bytes:
        started.set()
        assert release.wait(60)
        return b"<svg/>"

    monkeypatch.setattr("factscope.serve.routes_runs.draw_figure", slow)
    limit = server[1].limits.max_reports

    def figure(number: int) -> int:
        address = f"{server[0]}/api/figures/fact-{1000 * len(page.width) + number}.svg"
        return httpx.get(address, params={"run": "noise"}, timeout=90).status_code

    with ThreadPoolExecutor(limit) as pool:
        waiting = [pool.submit(figure, number) for number in range(limit)]
        try:
            assert started.wait(10)
            page.open("")
            page.trace()
            page.click("nav [data-view=compare]")
            page.until(lambda: page.all("#run-list [data-key='noise']"))
            assert not any(one.done() for one in waiting)
        finally:
            release.set()


def test_two_runs_of_traces_side_by_side(page: Page) -> None:
    page.open("#/compare")
    select(page, "rome", "noise", "strong-noise")  # replaces the evaluation
    page.until(lambda: page.texts("#compared .pair > div > h2") == ["noise", "strong-noise"])
    assert (lefts(page)[0] < lefts(page)[1]) == (page.width == "desktop")
    sources = page.js("[...document.querySelectorAll('#compared img')].map((e) => e.src)")
    assert sum("beside=" in source for source in sources) == 4  # averages on the same scales
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


@pytest.mark.parametrize("names", [["noise"], ["rome", "ft"]])
def test_files_can_be_downloaded(page: Page, names: list[str]) -> None:
    page.open("#/compare")
    select(page, *names)
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
