"""What every test in Chromium gets: the system's Chromium, or a skip that says how to get it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Generator, Iterator

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[Browser]:
    """One Chromium a module. Without any, the module is skipped before its other fixtures do their
    work.
    """
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; on Debian and Ubuntu: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails keeps a picture of what its page showed, and says where it is."""
    report = yield
    page = item.funcargs.get("page")
    if report.failed and call.when == "call" and page and hasattr(item.config, "cache"):
        kept = item.config.cache.mkdir("browser") / f"{item.name}.png"
        with contextlib.suppress(Error):  # the page is gone
            page.screenshot(path=kept)
        report.sections.append(("What the page showed", str(kept)))
    return report
