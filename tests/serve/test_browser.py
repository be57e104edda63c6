"""The page in a real browser, at a desk's width and a phone's; screenshots in build/screenshots."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from factscope.serve.schemas import ServerLimits
from factscope.serve.sessions import ServerState

from browser import browser
from served_records import case_record, slow
from serving import CITY, TOWER, listening, worded

ROOT = Path(__file__).parents[2]
SHOTS = Path(os.environ.get("FACTSCOPE_SCREENSHOTS", ROOT / "build" / "screenshots"))
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for method, new in (("rome", 0.1), ("ft", 2.0)):
        (folder / method).mkdir()
        spec = f'command = "evaluate"\nmodel = "tiny"\nmethod = "{method}"\ndata = "counterfact"\n'
        (folder / method / "spec.toml").write_text(spec)
        line = json.dumps(case_record(method, new)) + "\n"
        (folder / method / "records.jsonl").write_text(line)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[tuple[str, ServerState]]:
    with listening(worded(), runs=runs, limits=ServerLimits(written=8)) as found:
        yield found


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browser(tmp_path_factory.mktemp("downloads")) as driver:
        yield driver


class Page:
    """The page as someone uses it."""

    def __init__(self, browser: webdriver.Chrome, address: str, width: str) -> None:
        self.browser, self.address, self.width = browser, address, width
        browser.delete_all_cookies()
        browser.get("about:blank")
        self._size(900)
        self.dark(False)
        self.open("")

    def _size(self, height: int) -> None:
        size = {"width": WIDTHS[self.width], "height": height, "deviceScaleFactor": 1}
        size["mobile"] = self.width == "phone"
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, hash: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.address}/{hash}")
        self.until(lambda: self.js("document.body.dataset.ready === 'yes'"))

    def js(self, expression: str, *values: Any) -> Any:
        return self.browser.execute_script(f"return {expression}", *values)

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.js("document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector: str) -> list[str]:
        every = "[...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.js(every, selector)

    def until(self, condition: Callable[[], Any], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        element = self.find(selector)
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def shot(self, name: str) -> None:
        """A picture in light and dark; nothing may stick out to the side."""
        assert self.js("document.documentElement.scrollWidth") <= WIDTHS[self.width]
        SHOTS.mkdir(parents=True, exist_ok=True)
        for mode in ("light", "dark"):
            self.dark(mode == "dark")
            self._size(min(4000, self.js("document.documentElement.scrollHeight")))
            self.browser.save_screenshot(str(SHOTS / f"{name}-{self.width}-{mode}.png"))
        self.dark(False)
        self._size(900)

    def write_prompt(self, text: str, subject: str) -> None:
        """By keyboard only: type the prompt, then select the subject with Shift and arrows."""
        area = self.find("#prompt")
        area.send_keys(Keys.CONTROL, "a")
        area.send_keys(text)
        area.send_keys(Keys.CONTROL, Keys.HOME)
        keys = ActionChains(self.browser)
        for _ in range(text.index(subject)):
            keys.send_keys(Keys.ARROW_RIGHT)
        keys.key_down(Keys.SHIFT)
        for _ in subject:
            keys.send_keys(Keys.ARROW_RIGHT)
        keys.key_up(Keys.SHIFT).perform()
        self.until(lambda: self.text("#subject .subject") == subject)

    def locate(self) -> None:
        self.click("#locate .go")
        self.until(lambda: self.all("#trace-files a"))

    def rewrite(self, target: str) -> None:
        before = len(self.all("#edits li"))
        field = self.find("#rewrite [name=target]")
        field.clear()
        field.send_keys(target)
        self.click("#rewrite .go")
        self.until(lambda: len(self.all("#edits li")) == before + 1)
        self.until(self.resolve)

    @property
    def quiet(self) -> bool:
        """Whether no job is under way."""
        return self.js("[...document.querySelectorAll('.status')].every((s) => s.hidden)")

    def resolve(self) -> bool:
        """Whether that is so and every edit says how it stands."""
        return self.quiet and all("→" in row for row in self.texts("#edits small"))


@pytest.fixture(params=WIDTHS)
def page(
    request: pytest.FixtureRequest, chrome: webdriver.Chrome, server: tuple[str, ServerState]
) -> Iterator[Page]:
    yield Page(chrome, server[0], request.param)
    severe = [e["message"] for e in chrome.get_log("browser") if e["level"] == "SEVERE"]
    assert severe == []


def standing(page: Page, number: int) -> tuple[float, float]:
    """P(new) of an edit before and with the edits that are on."""
    before, after = page.texts("#edits small")[number].rpartition(") ")[2].split(" → ")
    return float(before.strip(" %<")), float(after.strip(" %<"))


def test_locate(page: Page) -> None:
    page.shot("start")
    page.write_prompt(CITY, "Eiffel Tower")
    page.locate()
    assert len(page.all("#heats .heat")) == 3
    assert page.js(
        "[...document.querySelectorAll('#heats output')].every((o) => /layer/.test(o.textContent))"
    )
    cells = page.find("#heats .cells")
    cells.send_keys(Keys.ARROW_UP, Keys.ARROW_RIGHT)
    read = page.text("#heats output")
    assert "layer 1" in read
    assert "effect" in read
    page.click("#sever")
    page.until(lambda: page.all("#severed .curve.attn"))
    page.click("#integrate")
    page.until(
        lambda: page.js(
            "/layer/.test(document.querySelector('#gradients output')?.textContent ?? '')"
        )
    )
    page.until(lambda: page.quiet)
    page.shot("locate")


def test_hovering_tells_the_numbers(page: Page) -> None:
    page.locate()
    cells = page.find("#heats .cells")
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).perform()
    assert "· layer 1 ·" in page.text("#heats output")


def test_edit_and_switch_it_off(page: Page) -> None:
    page.locate()
    cells = page.all("#heats .cells")[1]
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).click().perform()  # the middle: layer 1
    page.until(lambda: page.find("#view-edit").is_displayed())
    assert page.text("#layers [aria-checked=true]").strip() == "1"
    page.rewrite("Rome")
    before, after = standing(page, 0)
    assert after > before
    page.rewrite("London")
    question = page.find("#ask input")
    question.send_keys(CITY, Keys.ENTER)
    page.until(lambda: page.all("#answer .both"))
    page.until(page.resolve)
    page.shot("edit")
    for number in (1, 2):  # by keyboard: whoever turns a switch stays on it
        page.js(f"document.querySelector('#edits li:nth-child({number}) input').focus()")
        ActionChains(page.browser).send_keys(Keys.SPACE).perform()
        page.until(page.resolve)
        assert page.js("document.activeElement.dataset.key") == f"switch {number}"
    for number in range(2):
        before, after = standing(page, number)
        assert after == before
    assert page.all("#answer mark.diff") == []
    page.click("#edits li:nth-child(1) input")
    page.until(lambda: standing(page, 0)[1] > standing(page, 0)[0])


def test_a_link_restores_what_was_seen(page: Page) -> None:
    page.write_prompt(CITY, "Eiffel Tower")
    field = page.find("[name=samples]")
    field.clear()
    field.send_keys("2")
    page.locate()
    runs = page.text("#runs")
    link = page.js("location.hash")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(lambda: page.all("#trace-files a"))
    assert page.text("#subject .subject") == "Eiffel Tower"
    assert page.find("[name=samples]").get_attribute("value") == "2"
    assert page.text("#runs") == runs


def test_a_link_makes_the_edits_again_for_someone_else(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.rewrite("Rome")
    page.click("#edits input")
    page.until(page.resolve)
    link, fact = page.js("location.hash"), page.text("#edits .words .subject")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(page.resolve)
    assert page.text("#edits .words .subject") == fact
    assert not page.find("#edits input").is_selected()


def test_compare(page: Page) -> None:
    page.open("#/compare")
    for number in (1, 2):
        page.click(f"#run-list li:nth-child({number}) label")
    page.until(lambda: "ROME" in page.text("#compared") and "FT" in page.text("#compared"))
    page.until(lambda: page.all("#compared .both"))
    assert set(page.texts("#compared .both h3")) == {"before", "ROME", "FT"}
    assert "<script>alert(1)</script>" in page.text("#compared .both:last-of-type")
    loaded = (
        "[...document.querySelectorAll('#compared img')].every((i) => i.complete && i.naturalWidth)"
    )
    page.until(lambda: page.js(loaded))
    page.shot("compare")
    page.open(page.js("location.hash"))
    page.until(lambda: page.all("#compared .both"))


def test_markup_is_text_everywhere(page: Page) -> None:
    page.js("window.ran = false")
    evil = "<img src=x onerror=ran=true> is in"
    page.write_prompt(evil, "<img src=x")
    page.locate()
    page.open("#/edit")
    page.write_prompt(evil, "<img src=x")
    page.click("#layers button:nth-child(2)")
    page.rewrite("<b>Rome</b>")
    assert "<b>Rome</b>" in page.text("#edits")
    assert page.js("window.ran !== true")
    assert page.js("document.querySelectorAll('main img[src=x], #edits b').length") == 0


def test_errors_are_words_on_the_page(page: Page) -> None:
    page.find("#prompt").send_keys(Keys.CONTROL, "a")
    page.find("#prompt").send_keys("Nothing is marked")
    page.click("#locate .go")
    assert "subject" in page.text("#locate-status")
    page.write_prompt("The " + "word " * 70, "word")
    page.click("#locate .go")
    page.until(lambda: "tokens" in page.text("#locate-status"))


def test_cancel_stops_the_work(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: threading.Event = slow(server[1], monkeypatch)
    field = page.find("[name=seed]")
    field.clear()
    field.send_keys("77")
    page.click("#locate .go")
    assert begun.wait(10)
    page.until(lambda: page.all("#locate-status button"))
    page.click("#locate-status button")
    page.until(lambda: len(server[1].queue) == 0)
    assert page.text("#locate-status") == "cancelled"


def test_every_control_has_a_name_and_can_be_reached(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.js(unnamed) == []
    seen = set()
    page.find("body").send_keys(Keys.TAB)
    for _ in range(40):
        name = page.js("((e) => e.name || e.id || e.textContent)(document.activeElement)")
        seen.add(name.strip())
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
    assert {"prompt", "distribution", "samples", "window", "Locate", "Edit", "Compare"} <= seen
    assert TOWER in seen  # an example
