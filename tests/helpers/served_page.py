"""The server's page in Chromium, and what a user does with it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

ROOT = Path(__file__).parents[2]
SCREENSHOTS = Path(os.environ.get("FACTSCOPE_SCREENSHOTS", ROOT / "build" / "screenshots"))
WIDTHS = {"desktop": 1280, "phone": 390}
AXE = ROOT / "build" / "axe" / "package" / "axe.min.js"


class Page:
    """The page and what a user does with it: a desktop in light mode, a phone in dark mode."""

    patience = 120.0
    """Seconds to wait for a result."""

    def __init__(self, browser: webdriver.Chrome, address: str, width: str) -> None:
        self.browser, self.address, self.width = browser, address, width
        browser.delete_all_cookies()
        browser.get("about:blank")
        self._resize(900)
        self.dark(width == "phone")
        browser.get(address)
        self.wait()

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
        self.wait()

    def reload(self) -> None:
        self.browser.refresh()
        self.wait()

    def wait(self) -> None:
        """Wait for the page's start and for the tokens of the prompt."""
        self.until(lambda: self.js("document.body.dataset.ready === 'yes'"))
        self.until(lambda: not self.all("#next.stale"))

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

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < end, self.find("body").text
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click an element; again if the page has replaced it by a new one in the meantime."""

        def clicked() -> bool:
            try:
                element = self.find(selector)
                self.js("arguments[0].scrollIntoView({block: 'center'})", element)
                element.click()
            except StaleElementReferenceException:
                return False
            return True

        self.until(clicked)

    def screenshot(self, name: str, folder: Path = SCREENSHOTS) -> None:
        """Save the page in light and dark mode; it must not scroll horizontally."""
        assert self.js("document.documentElement.scrollWidth") <= WIDTHS[self.width]
        folder.mkdir(parents=True, exist_ok=True)
        for mode in ("light", "dark"):
            self.dark(mode == "dark")
            self._resize(min(4000, self.js("document.documentElement.scrollHeight")))
            self.browser.save_screenshot(str(folder / f"{name}-{self.width}-{mode}.png"))
        self.dark(self.width == "phone")
        self._resize(900)

    def accessibility_problems(self) -> list[str]:
        """Serious findings of axe-core in light and dark mode: rule, theme and element.

        If axe-core is not there, tests fail instead of being skipped: nothing else checks this.
        """
        assert AXE.exists(), f"{AXE} is missing; get axe-core with `make browser`"
        if not self.js("'axe' in window"):
            self.browser.execute_script(AXE.read_text("utf-8"))
        problems = []
        for mode in ("light", "dark"):
            self.dark(mode == "dark")
            found = self.browser.execute_async_script(
                "const done = arguments[0]; axe.run(document, {resultTypes: ['violations']})"
                ".then((result) => done(result.violations), (error) => done(String(error)))"
            )
            assert isinstance(found, list), found
            problems += [
                f"{rule['id']} ({mode}): {node['html'][:160]} {node['failureSummary']}"
                for rule in found
                if rule["impact"] in ("serious", "critical")
                for node in rule["nodes"]
            ]
        self.dark(self.width == "phone")
        return problems

    def unexplained_controls(self) -> list[str]:
        """Visible controls without an explanation: a description, a title or a long label."""
        explained = """((e) =>
            document.getElementById(e.getAttribute('aria-describedby'))?.textContent
            || e.title || e.closest('label')?.title
            || e.labels?.[0]?.textContent.trim().split(/\\s+/).length > 3)"""
        return self.js(
            "[...document.querySelectorAll('button:not(.token), input, select, textarea')]"
            f".filter((e) => e.offsetParent && !{explained}(e)).map((e) => e.outerHTML)"
        )

    def smallest_text(self) -> float:
        """The size of the smallest visible text, in pixels."""
        return self.js(
            "Math.min(...[...document.querySelectorAll('body *')].filter((e) => e.offsetParent"
            " && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))"
            ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
        )

    def write_prompt(self, text: str, subject: str) -> None:
        """Type the prompt, then click the subject's first and last token."""
        area = self.find("#prompt")
        area.send_keys(Keys.CONTROL, "a")
        area.send_keys(text)
        self.until(lambda: not self.all("#next.stale"))
        self.click_tokens(subject)
        self.until(lambda: self.text("#subject .subject") == subject)

    def select_text(self, start: int, stop: int) -> None:
        """Select a part of the prompt's text."""
        select = "document.querySelector('#prompt').setSelectionRange(arguments[0], arguments[1])"
        self.js(select, start, stop)

    def click_tokens(self, subject: str) -> None:
        text = self.prompt
        start, at = text.index(subject), 0
        stop, inside = start + len(subject), []
        for number, token in enumerate(self.texts("#tokens button")):
            at = text.index(token, at)
            if at < stop and at + len(token) > start:
                inside.append(number)
            at += len(token)
        for number in (inside[0], inside[-1]):
            self.click(f"#tokens button:nth-child({number + 1})")

    def set(self, name: str, value: str) -> None:
        """Fill in a setting of the trace."""
        self.js("document.querySelector('#trace-form details').open = true")
        field = self.find(f"[name={name}]")
        field.clear()
        field.send_keys(value)

    def trace(self) -> None:
        self.click("#trace-form .go")
        self.until(self.traced)

    def traced(self) -> bool:
        """Whether the page shows the finished trace of the form."""
        return bool(self.all("#trace-result:not(.stale) #trace-files a"))

    def edit(self, target: str) -> None:
        before = len(self.all(".edits li"))
        field = self.find("#edit-form [name=target]")
        field.clear()
        field.send_keys(target)
        self.click("#edit-form .go")
        self.until(lambda: len(self.all(".edits li")) == before + 1)
        self.until(self.updated)

    @property
    def prompt(self) -> str:
        return self.js("document.querySelector('#prompt').value")

    @property
    def idle(self) -> bool:
        """Whether no job is running."""
        return self.js("[...document.querySelectorAll('.status')].every((s) => s.hidden)")

    def updated(self) -> bool:
        """Whether no job is running and every edit shows its probabilities."""
        return self.idle and all("→" in row for row in self.texts(".edits small"))
