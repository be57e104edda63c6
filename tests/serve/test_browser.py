"""The page in Chromium at the widths of a desktop and a phone; screenshots in build/screenshots."""

import os
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

from factscope.serve.limits import ServerLimits
from factscope.serve.sessions import ServerState

from browser import browser
from served_records import endless_traces, write_evaluation
from serving import CITY, TOWER, running_server, serving_lm

ROOT = Path(__file__).parents[2]
SCREENSHOTS = Path(os.environ.get("FACTSCOPE_SCREENSCREENSHOTS", ROOT / "build" / "screenshots"))
WIDTHS = {"desktop": 1280, "phone": 390}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "rome", "rome", 0.1)
    write_evaluation(folder / "ft", "ft", 2.0)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[tuple[str, ServerState]]:
    with running_server(serving_lm(), runs=runs, limits=ServerLimits(max_new_tokens=8)) as found:
        yield found


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browser(tmp_path_factory.mktemp("downloads")) as driver:
        yield driver


class Page:
    """The page and what a user does with it."""

    def __init__(self, browser: webdriver.Chrome, address: str, width: str) -> None:
        self.browser, self.address, self.width = browser, address, width
        browser.delete_all_cookies()
        browser.get("about:blank")
        self._resize(900)
        self.dark(False)
        self.open("")

    def _resize(self, height: int) -> None:
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

    def screenshot(self, name: str) -> None:
        """Save the page in light and dark mode; it must not scroll horizontally."""
        assert self.js("document.documentElement.scrollWidth") <= WIDTHS[self.width]
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        for mode in ("light", "dark"):
            self.dark(mode == "dark")
            self._resize(min(4000, self.js("document.documentElement.scrollHeight")))
            self.browser.save_screenshot(str(SCREENSHOTS / f"{name}-{self.width}-{mode}.png"))
        self.dark(False)
        self._resize(900)

    def write_prompt(self, text: str, subject: str) -> None:
        """With the keyboard: type the prompt, then select the subject with Shift and arrows."""
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

    def trace(self) -> None:
        self.click("#trace-form .go")
        self.until(lambda: self.all("#trace-files a"))

    def edit(self, target: str) -> None:
        before = len(self.all("#edits li"))
        field = self.find("#edit-form [name=target]")
        field.clear()
        field.send_keys(target)
        self.click("#edit-form .go")
        self.until(lambda: len(self.all("#edits li")) == before + 1)
        self.until(self.updated)

    @property
    def idle(self) -> bool:
        """Whether no job is running."""
        return self.js("[...document.querySelectorAll('.status')].every((s) => s.hidden)")

    def updated(self) -> bool:
        """Whether no job is running and every edit shows its probabilities."""
        return self.idle and all("→" in row for row in self.texts("#edits small"))


@pytest.fixture(params=WIDTHS)
def page(
    request: pytest.FixtureRequest, chrome: webdriver.Chrome, server: tuple[str, ServerState]
) -> Iterator[Page]:
    yield Page(chrome, server[0], request.param)
    severe = [e["message"] for e in chrome.get_log("browser") if e["level"] == "SEVERE"]
    assert severe == []


def probabilities(page: Page, number: int) -> tuple[float, float]:
    """P(new) of an edit's fact, unedited and with the selected edits."""
    before, after = page.texts("#edits small")[number].rpartition(") ")[2].split(" → ")
    return float(before.strip(" %<")), float(after.strip(" %<"))


def test_trace(page: Page) -> None:
    page.screenshot("start")
    page.write_prompt(CITY, "Eiffel Tower")
    page.trace()
    assert len(page.all("#heatmaps .heat")) == 3
    assert page.js(
        "[...document.querySelectorAll('#heatmaps output')]"
        ".every((output) => /layer/.test(output.textContent))"
    )
    cells = page.find("#heatmaps .cells")
    cells.send_keys(Keys.ARROW_UP, Keys.ARROW_RIGHT)
    read = page.text("#heatmaps output")
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
    page.until(lambda: page.idle)
    page.screenshot("trace")


def test_hovering_shows_the_value_of_a_cell(page: Page) -> None:
    page.trace()
    cells = page.find("#heatmaps .cells")
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).perform()
    assert "· layer 1 ·" in page.text("#heatmaps output")


def test_edits_can_be_switched_off(page: Page) -> None:
    page.trace()
    cells = page.all("#heatmaps .cells")[1]
    page.js("arguments[0].scrollIntoView({block: 'center'})", cells)
    ActionChains(page.browser).move_to_element(cells).click().perform()  # the middle: layer 1
    page.until(lambda: page.find("#view-edit").is_displayed())
    assert page.text("#layers [aria-checked=true]").strip() == "1"
    page.edit("Rome")
    before, after = probabilities(page, 0)
    assert after > before
    page.edit("London")
    field = page.find("#predict-form input")
    field.send_keys(CITY, Keys.ENTER)
    page.until(lambda: page.all("#prediction .both"))
    page.until(page.updated)
    page.screenshot("edit")
    for number in (1, 2):  # with the keyboard; the focus stays on the switch
        page.js(f"document.querySelector('#edits li:nth-child({number}) input').focus()")
        ActionChains(page.browser).send_keys(Keys.SPACE).perform()
        page.until(page.updated)
        assert page.js("document.activeElement.dataset.key") == f"switch {number}"
    for number in range(2):
        before, after = probabilities(page, number)
        assert after == before
    assert page.all("#prediction mark.diff") == []
    page.click("#edits li:nth-child(1) input")
    page.until(lambda: probabilities(page, 0)[1] > probabilities(page, 0)[0])


def test_a_link_restores_a_trace(page: Page) -> None:
    page.write_prompt(CITY, "Eiffel Tower")
    field = page.find("[name=samples]")
    field.clear()
    field.send_keys("2")
    page.trace()
    baseline = page.text("#baseline")
    link = page.js("location.hash")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(lambda: page.all("#trace-files a"))
    assert page.text("#subject .subject") == "Eiffel Tower"
    assert page.find("[name=samples]").get_attribute("value") == "2"
    assert page.text("#baseline") == baseline


def test_a_link_restores_edits_in_another_session(page: Page) -> None:
    page.open("#/edit")
    page.click("#layers button:nth-child(2)")
    page.edit("Rome")
    page.click("#edits input")
    page.until(page.updated)
    link, fact = page.js("location.hash"), page.text("#edits .fact .subject")
    page.browser.delete_all_cookies()
    page.open(link)
    page.until(page.updated)
    assert page.text("#edits .fact .subject") == fact
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
    page.screenshot("compare")
    page.open(page.js("location.hash"))
    page.until(lambda: page.all("#compared .both"))


def test_markup_is_shown_as_text(page: Page) -> None:
    page.js("window.ran = false")
    markup = "<img src=x onerror=ran=true> is in"
    page.write_prompt(markup, "<img src=x")
    page.trace()
    page.open("#/edit")
    page.write_prompt(markup, "<img src=x")
    page.click("#layers button:nth-child(2)")
    page.edit("<b>Rome</b>")
    assert "<b>Rome</b>" in page.text("#edits")
    assert page.js("window.ran !== true")
    assert page.js("document.querySelectorAll('main img[src=x], #edits b').length") == 0


def test_error_messages_on_the_page(page: Page) -> None:
    page.find("#prompt").send_keys(Keys.CONTROL, "a")
    page.find("#prompt").send_keys("Nothing is selected")
    page.click("#trace-form .go")
    assert "subject" in page.text("#trace-status")
    page.write_prompt("The " + "word " * 70, "word")
    page.click("#trace-form .go")
    page.until(lambda: "tokens" in page.text("#trace-status"))


def test_the_cancel_button_stops_the_job(
    page: Page, server: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = endless_traces(monkeypatch)
    field = page.find("[name=seed]")
    field.clear()
    field.send_keys("77")
    page.click("#trace-form .go")
    assert started.wait(10)
    page.until(lambda: page.all("#trace-status button"))
    page.click("#trace-status button")
    page.until(lambda: len(server[1].queue) == 0)
    assert page.text("#trace-status") == "cancelled"


def test_all_controls_have_a_label_and_can_be_focused(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, select, textarea')].filter((e) =>
        !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.js(unnamed) == []
    seen = set()
    page.find("body").send_keys(Keys.TAB)
    for _ in range(40):
        name = page.js("((e) => e.name || e.id || e.textContent)(document.activeElement)")
        seen.add(name.strip())
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
    assert {"prompt", "distribution", "samples", "window", "Trace", "Edit", "Compare"} <= seen
    assert TOWER in seen  # an example
