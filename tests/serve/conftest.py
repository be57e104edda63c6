"""A server with two runs, and its page in Chromium at the widths of a desktop and a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from factscope import Fact, Tracing, trace
from factscope.lm.model import LM
from factscope.records import TraceRecord
from factscope.serve.limits import ServerLimits
from factscope.serve.sessions import ServerState

from browser import browser
from served_page import WIDTHS, Page
from served_records import write_evaluation
from serving import TOWER, running_server, serving_lm


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "rome", "rome", 0.1)
    write_evaluation(folder / "ft", "ft", 2.0)
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[tuple[str, ServerState]]:
    """A server that opens with a finished trace, as one with the default model does."""

    def traced(lm: LM, settings: Tracing) -> TraceRecord:
        return trace(lm, Fact(subject=TOWER, prompt="{} is located in the city of"), settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("factscope.serve.sessions.first_trace", traced)
        limits = ServerLimits(max_new_tokens=8)
        with running_server(serving_lm(), runs=runs, limits=limits) as found:
            yield found


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with browser(tmp_path_factory.mktemp("downloads")) as driver:
        yield driver


@pytest.fixture(params=WIDTHS)
def page(
    request: pytest.FixtureRequest, chrome: webdriver.Chrome, server: tuple[str, ServerState]
) -> Iterator[Page]:
    # An earlier module's page may still be open and poll its server, which has stopped: leave it
    # and drop its messages. WebDriver deletes only the cookies of the open page, so delete first.
    chrome.delete_all_cookies()
    chrome.get("about:blank")
    chrome.get_log("browser")
    yield Page(chrome, server[0], request.param)
    severe = [e["message"] for e in chrome.get_log("browser") if e["level"] == "SEVERE"]
    assert [message for message in severe if "status of 4" not in message] == []
