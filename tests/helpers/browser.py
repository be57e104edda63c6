"""Headless Chromium, driven by selenium."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service


@contextmanager
def browser(downloads: Path, width: int = 1280, height: int = 900) -> Iterator[Chrome]:
    """Chromium inside the block; downloads go to the folder.

    If it is not installed, tests fail instead of being skipped: nothing else tests the pages.
    """
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.fail("chromium and chromedriver are needed; on Debian: apt install chromium-driver")
    options = ChromeOptions()
    options.binary_location = program
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_experimental_option(
        "prefs", {"download.default_directory": str(downloads), "download.prompt_for_download": 0}
    )
    options.page_load_strategy = "eager"  # tests wait for what they need
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(driver))
    try:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        yield chrome
    finally:
        chrome.quit()
