"""The handouts' pages in real Chromium with the network off: nothing is asked for, and what is to
be seen is seen.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import planted_lab
import pytest
from pictures import picture_of
from playwright.sync_api import Page

from labutils.results.records import REPOSITORY
from labutils.tools import handouts

REFERENCE = REPOSITORY / "reference" / "h200"
STEMS = ["05_scale_into_fp8", planted_lab.STEM]
HOSTILE = "43_hostile"
OUTSIDE = "https://example.org/x.png"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    """The student's pages of a lab of the reference and of the planted one."""
    folder = planted_lab.results_with_it(
        tmp_path_factory.mktemp("run") / "found", REFERENCE, STEMS[0]
    )
    out = tmp_path_factory.mktemp("handouts")
    assert handouts.main(folder, out, [stem[:2] for stem in STEMS]) == handouts.MADE
    notebook = planted_lab.planted()
    planted_lab.make_hostile(notebook)
    (out / "student" / f"{HOSTILE}.ipynb").write_text(json.dumps(notebook))
    handouts.pages_of(folder, [out / "student" / f"{HOSTILE}.ipynb"])
    return out / "student"


@pytest.fixture
def page(browser) -> Iterator[Page]:
    """A page without a network; `page.asked` are the addresses it asked for, `page.complaints` its
    console.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    page = context.new_page()
    page.asked, page.complaints, page.refused = [], [], {}
    page.on("request", lambda request: page.asked.append(request.url.partition(",")[0]))
    page.on("requestfailed", lambda request: page.refused.update({request.url: request.failure}))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    yield page
    context.close()


def open_page(page: Page, file: Path) -> None:
    page.goto(file.as_uri())
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("stem", [*STEMS, HOSTILE, "index"])
def test_a_page_asks_for_nothing_and_fits_its_window(page, pages, stem):
    file = pages / f"{stem}.html"
    open_page(page, file)
    assert [address for address in page.asked if not address.startswith("data:")] == [file.as_uri()]
    assert page.complaints == [] and page.url == file.as_uri()
    if stem == HOSTILE:  # it is as wide as its stranger likes
        return
    parts = "[...document.querySelectorAll('pre, .output')]"
    wide = "part => part.scrollWidth > part.clientWidth + 1"
    # On a desk its parts are not wider either.
    assert page.evaluate(f"{parts}.filter({wide}).map(part => part.innerText.slice(0, 80))") == []
    for width in (1280, 900, 400) if stem != HOSTILE else ():
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_forbids_what_would_be_loaded(page, pages, tmp_path):
    """Should something slip through after all, the page's own policy stops it; without the policy
    it would be seen."""
    file = tmp_path / "page.html"
    file.write_text(f'<img src="{OUTSIDE}"><script>console.log("said")</script>')
    open_page(page, file)
    assert OUTSIDE in page.asked and page.refused[OUTSIDE] != "csp"
    assert "said" in page.complaints
    text = (pages / f"{planted_lab.STEM}.html").read_text(encoding="utf-8")
    file.write_text(text.replace("</main>", f'<img src="{OUTSIDE}"></main>'), encoding="utf-8")
    open_page(page, file)
    assert page.refused == {OUTSIDE: "csp"}


@pytest.mark.parametrize("stem", STEMS)
def test_figures_words_code_tables_and_formulas_are_seen(page, pages, stem):
    """Each figure's place on the screenshot looks like the figure that the notebook holds."""
    open_page(page, pages / f"{stem}.html")
    notebook = nbformat.read(pages / f"{stem}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [out.data["image/png"] for out in outputs if "image/png" in out.get("data", {})]
    places = page.locator(".figure img")
    assert places.count() == len(drawn) > 0
    coarse = (144, 96)  # pixels: what a figure shows, and not how its edges were smoothed
    held = [picture_of(base64.b64decode(png), coarse) for png in drawn]
    for at in range(len(drawn)):
        seen = picture_of(places.nth(at).screenshot(), coarse)
        off = [np.abs(seen - figure).mean() for figure in held]
        assert off[at] < 5
        assert off[at] == min(off), "another figure stands in its place"
    parts = ("h1", ".facts td", "main p", ".input pre", ".exercise-input pre", "table", "nav a")
    for part in parts:
        first = page.locator(part).first
        ink = (picture_of(first.screenshot()) < 128).any(axis=2).mean()
        assert first.is_visible() and ink > 0.002, f"no ink in {part}"
    for formula in page.locator("math").all():
        box = formula.bounding_box()
        assert box["width"] > 3 and box["height"] > 5, formula.inner_text()
