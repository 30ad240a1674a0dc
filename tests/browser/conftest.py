"""What every test in Chromium gets: the system's Chromium, or a skip that says how to get it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

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
