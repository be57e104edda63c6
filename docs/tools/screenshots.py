"""Take the screenshots of the page in README.md and docs/serve.md, with the default model.

    python docs/tools/screenshots.py                       # docs/figures/page-*.png
    python docs/tools/screenshots.py --all build/page      # every view, width and theme

It needs Chromium (`make browser`).
"""

import argparse
import sys
import tempfile
from pathlib import Path

from factscope.lm.load import load
from factscope.lm.sources import DEFAULT_MODEL

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from browser import browser
from served_page import WIDTHS, Page
from serving import running_server

FIGURES = Path(__file__).parents[1] / "figures"
SHOWN = ("trace-desktop-light", "attention-desktop-light", "edit-desktop-light", "trace-phone-dark")
"""The screenshots in the documentation."""
CARDS = {
    "#restore-heads": "#heads .cells",
    "#knock-out": "#knockout .curve",
    "#estimate": "#attribution .cells",
}
"""Buttons of the trace view, and what they draw."""


def take(page: Page, folder: Path) -> None:
    """Screenshots of the views as a new user sees them."""
    page.patience = 600
    page.until(lambda: page.all("#lens .cells") and page.idle)
    page.screenshot("trace", folder)
    for button, result in CARDS.items():
        page.click(button)
        page.until(lambda result=result: page.all(result) and page.idle)
    page.screenshot("attention", folder)
    page.click("nav [data-view=edit]")
    page.screenshot("edit-form", folder)
    page.edit("Rome")
    page.screenshot("edit", folder)
    page.click("#retrace-button")
    page.until(lambda: len(page.all("#retrace .heats")) == 2 and page.idle)
    page.screenshot("retrace", folder)
    page.open("#/compare")
    page.screenshot("compare", folder)


def main() -> None:
    """Serve the default model and photograph its page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="Write all screenshots here.")
    folder = parser.parse_args().all
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_server(load(DEFAULT_MODEL)) as (address, _),
        browser(Path(scratch)) as chrome,
    ):
        target = folder or Path(scratch)
        for width in WIDTHS:
            take(Page(chrome, address, width), target)
        for name in () if folder else SHOWN:
            (FIGURES / f"page-{name}.png").write_bytes((target / f"{name}.png").read_bytes())


if __name__ == "__main__":
    main()
