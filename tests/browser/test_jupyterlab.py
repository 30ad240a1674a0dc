"""JupyterLab as `make lab` opens it, in real Chromium: the first screen, a whole lab run by its
menus, a prediction, a slider.

The server runs on a copy of the notebooks, in a home of its own, and is started in a folder that
isn't the course's.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import nbformat
import numpy as np
import pytest
from pictures import picture_of
from playwright.sync_api import ConsoleMessage, Locator, Page, Response, expect

from labutils.course.recorded import outputs_of
from labutils.course.solutions import solutions_of
from labutils.results.records import REPOSITORY

TOKEN = "for-this-test-only"
PATIENCE_MS = 150_000
"""For anything that JupyterLab does by itself; the cores are shared with other tests."""
expect.set_options(timeout=PATIENCE_MS)
LAB_S = 400  # a whole lab
CUT_OR_SCROLLED = """
    [...document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) :not(table)')].filter(
        box => box.clientWidth > 1 && box.scrollWidth > box.clientWidth + 1 &&
            getComputedStyle(box).overflowX != 'visible'
    ).map(box => { box.scrollIntoView(); return box.textContent.slice(0, 80); })
"""
STDERR = "[data-mime-type='application/vnd.jupyter.stderr']"
"""Where warnings and tracebacks stand."""
UNSAVED = "#jp-main-dock-panel .jp-mod-dirty"

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.timeout(LAB_S + 300),
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]


@dataclass
class Desk:
    """A running JupyterLab: its address, the copied course it opens, and where layouts go."""

    address: str
    course: Path
    cache: Path

    def notebook(self, stem: str) -> nbformat.NotebookNode:
        return nbformat.read(self.course / "notebooks" / f"{stem}.ipynb", as_version=4)


def command_of_make_lab(arguments: str) -> str:
    """The line that `make lab ARGS=...` carries out, once everything is installed."""
    words = ["--dry-run", "--no-print-directory", "-C", str(REPOSITORY), "lab"]
    given = [f"VENV={sys.prefix}", f"ARGS={arguments}"]
    plan = subprocess.run(["make", *words, *given], capture_output=True, text=True, check=True)
    return plan.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def desk(browser, tmp_path_factory) -> Iterator[Desk]:
    """The server on a copy of the notebooks, which sees no GPU: labs run at the scale tiny."""
    folder = tmp_path_factory.mktemp("desk")
    desk = Desk("", folder / "course", folder / "cache")
    hidden = shutil.ignore_patterns(".*", "results")
    shutil.copytree(REPOSITORY / "notebooks", desk.course / "notebooks", ignore=hidden)
    shutil.copy(REPOSITORY / "pyproject.toml", desk.course)  # tells jupytext what is paired
    elsewhere, home, runtime = folder / "elsewhere", folder / "home", folder / "runtime"
    elsewhere.mkdir()
    home.mkdir()
    line = command_of_make_lab(
        f"--no-browser --ip=127.0.0.1 --port=0 --IdentityProvider.token={TOKEN} "
        f"--ServerApp.root_dir={desk.course}" + (" --allow-root" if os.geteuid() == 0 else "")
    )
    own = {
        "HOME": str(home),
        "LABUTILS_CACHE": str(desk.cache),
        "LABUTILS_RESULTS": str(folder / "results"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "CUDA_VISIBLE_DEVICES": "",
    }
    foreign = ("JUPYTER", "XDG_", "MAKE")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with (folder / "server.log").open("w") as log:
        where = {"cwd": elsewhere, "env": inherited | own, "stdout": log, "stderr": log}
        server = subprocess.Popen(line, shell=True, start_new_session=True, **where)
        try:
            desk.address = address_of(server, runtime, folder / "server.log")
            yield desk
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # it shuts its kernels down
            try:
                server.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
    assert not list(home.glob(".jupyter/*")), "the learner's own configuration was changed"


def address_of(server: subprocess.Popen, runtime: Path, log: Path) -> str:
    """Where the server answers, on the port that it found free and wrote down. Fails with its log
    when it ends, or takes minutes."""
    until = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < until and server.poll() is None:
        try:
            (written,) = runtime.glob("jpserver-*.json")
            address = json.loads(written.read_text(encoding="utf-8"))["url"].rstrip("/")
            with urlopen(f"{address}/api", timeout=5):
                return address
        except (OSError, ValueError):  # not there yet, half written, or not listening
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')}")


NO_IDLING = """
window.requestIdleCallback = (call) =>
    setTimeout(() => call({didTimeout: false, timeRemaining: () => 50}), 0)
"""
"""JupyterLab makes cells that are out of sight when the browser idles, which takes half a minute a
lab where cores are busy. With this it makes them at once."""


@pytest.fixture
def page(browser, desk) -> Iterator[Page]:
    """JupyterLab as it opens; `page.asked` are the addresses it asked for, `page.troubles` errors
    and refusals."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.asked, page.troubles = [], []

    def heard_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            page.troubles.append(message.text)

    def heard_response(answer: Response) -> None:
        if answer.status >= 400:
            page.troubles.append(f"{answer.status} {answer.url}")

    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("console", heard_console)
    page.on("response", heard_response)
    page.goto(f"{desk.address}/?token={TOKEN}")
    page.locator("#jupyterlab-splash").wait_for(state="detached")
    yield page
    context.close()


def troubles(page: Page) -> list[str]:
    """A kernel's websocket may be refused while the kernel starts: JupyterLab tries again."""
    return [words for words in page.troubles if "/channels?" not in words]


def opened(page: Page, stem: str) -> Locator:
    """Open a lab by a double click in the list of files."""
    page.locator(".jp-DirListing-item", has_text=stem).dblclick()
    return current(page, stem)


def current(page: Page, stem: str) -> Locator:
    """The notebook of the tab in front, when its kernel is ready."""
    tab = "#jp-main-dock-panel .jp-mod-current .lm-TabBar-tabLabel"
    page.locator(tab, has_text=stem).wait_for()
    page.locator("#jp-main-statusbar").get_by_text(re.compile(r"Python 3.*\| Idle")).wait_for()
    return page.locator(".jp-NotebookPanel:visible .jp-Notebook")


def choose(page: Page, menu: str, entry: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    page.get_by_role("menuitem", name=entry, exact=True).click()


def shows_ink(page: Page, figure: Locator) -> bool:
    """Whether something dark is on the figure, within the seconds that a busy browser may take to
    paint it.
    """
    for _ in range(20):
        if (picture_of(figure.screenshot()) < 160).any(axis=2).mean() > 0.005:
            return True
        page.wait_for_timeout(250)
    return False


def test_the_first_screen(page, desk):
    labs = sorted(path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb"))
    notebook = current(page, labs[0].removesuffix(".ipynb"))
    listed = page.locator(".jp-DirListing-itemName").all_text_contents()
    assert [name for name in listed if name.endswith(".ipynb")] == labs
    cut = "names => names.filter(name => name.scrollWidth > name.clientWidth).length"
    assert page.locator(".jp-DirListing-itemText").evaluate_all(cut) == 0, "a name is cut off"
    cells = desk.notebook(Path(labs[0]).stem).cells
    sections = re.findall("^## (.+)$", "\n".join(cell.source for cell in cells), re.MULTILINE)
    contents = page.locator(".jp-TableOfContents:visible .jp-tocItem-content")
    expect(contents.last).to_have_text(sections[-1])
    assert contents.count() == 1 + len(sections)
    expect(notebook.locator(".jp-Cell")).to_have_count(len(cells))  # else there is no place to go
    contents.last.click()
    expect(notebook.get_by_role("heading", name=sections[-1])).to_be_in_viewport()
    expect(page.locator("#jp-main-statusbar")).to_contain_text(
        re.compile(r"CPU: +[\d.]+ % \| Mem: +[\d.]+ / [\d.]+ [MG]B")
    )
    assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0
    assert [url for url in page.asked if not url.startswith((desk.address, "data:", "blob:"))] == []
    assert troubles(page) == []


def test_what_was_merely_opened_and_saved_is_not_changed(page, desk):
    """JupyterLab saves by itself every two minutes; `git status` must stay clean."""
    stem = "02_profile_a_training_step"
    halves = [desk.course / "notebooks" / name for name in (f"{stem}.ipynb", f"py/{stem}.py")]
    before = [half.read_text(encoding="utf-8") for half in halves]
    opened(page, stem)
    with page.expect_response(lambda it: it.request.method == "PUT" and stem in it.url) as saved:
        page.keyboard.press("Control+s")
    assert saved.value.ok
    assert [half.read_text(encoding="utf-8") for half in halves] == before


def test_lab_05_restarts_and_runs_from_the_menu(page, desk):
    stem = "05_scale_into_fp8"
    notebook = opened(page, stem)
    notebook.locator(".jp-CodeCell").first.click()
    page.keyboard.press("Shift+Enter")
    prompts = notebook.locator(".jp-CodeCell .jp-InputPrompt")
    expect(prompts.first).to_have_text("[1]:")  # without a restart, all would be numbered from 2 on
    asked = notebook.locator(".jp-CodeCell", has_text="lab.predict(")
    asked.first.get_by_text("None", exact=True).last.dblclick()
    page.keyboard.type("896")
    choose(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    code = [cell.source for cell in desk.notebook(stem).cells if cell.cell_type == "code"]
    wanted = [f"[{number}]:" for number in range(1, len(code) + 1)]
    expect(prompts).to_have_text(wanted, timeout=1000 * LAB_S)
    row = "1000 cast to E4M3 896 448 2.00x too high"
    expect(notebook.get_by_role("row", name=row)).to_have_count(1)
    assert notebook.locator(STDERR).all_text_contents() == []
    assert page.locator(".jp-Dialog").count() == 0
    assert troubles(page) == []
    figures = notebook.locator(".jp-OutputArea-output img")
    assert figures.count() >= sum("plt.show()" in source for source in code) > 0
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        box, window = figure.bounding_box(), notebook.bounding_box()
        assert box["width"] > 300 and box["height"] > 100
        assert box["x"] + box["width"] <= window["x"] + window["width"]
        assert shows_ink(page, figure), "a figure without ink"
    times = " ".join(notebook.locator(".execute-time").all_text_contents())
    assert re.search(r"executed in [\d.]+s", times)
    assert_the_slider_moves_its_figure(notebook)
    assert_a_solution_is_shown_on_request(page, notebook)
    workspaces = desk.cache / "jupyterlab" / "workspaces"
    (layout,) = [json.loads(file.read_text(encoding="utf-8")) for file in workspaces.iterdir()]
    assert f"notebook:notebooks/{stem}.ipynb" in layout["data"], "the layout is not kept"


def assert_a_solution_is_shown_on_request(page: Page, notebook: Locator) -> None:
    """In a cell of the learner's own, at the lab's end; up to then it is nowhere."""
    answer = solutions_of("05")[1].splitlines()[0]
    expect(notebook).not_to_contain_text(answer)
    page.locator(".jp-Notebook-footer:visible").click()
    last = notebook.locator(".jp-CodeCell .cm-content").last
    expect(last).to_have_text("")  # the new cell is there; else the one before is typed into
    last.click()
    page.keyboard.type('lab.solution("05.2")')
    page.keyboard.press("Shift+Enter")
    expect(notebook).to_contain_text(answer)


def assert_the_slider_moves_its_figure(notebook: Locator) -> None:
    """Another place of the slider, another picture."""
    widget = notebook.locator(".widget-interact")
    handle, readout = widget.get_by_role("slider"), widget.locator(".widget-readout")
    figure = widget.locator("img")

    def drawn(key: str, value: str) -> np.ndarray:
        before = figure.get_attribute("src")
        handle.press(key)
        expect(readout).to_have_text(value)
        expect(figure).not_to_have_attribute("src", before)
        return picture_of(base64.b64decode(figure.get_attribute("src").partition(",")[2]))

    start = int(readout.text_content())
    right = drawn("ArrowRight", f"{start + 1}")
    left = drawn("ArrowLeft", f"{start}")
    assert (np.abs(right - left) > 64).any(axis=2).mean() > 0.01, "the histogram did not move"


def test_every_lab_opens_unchanged_and_none_of_its_text_is_cut_or_scrolls(page, desk):
    """With what our H200 printed below its cells. Only a table may scroll, in its own box."""
    whole = {"raw": json.dumps({"windowingMode": "none"})}  # cells out of sight are laid out, too
    settings = f"{desk.address}/lab/api/settings/@jupyterlab/notebook-extension:tracker"
    assert page.request.put(f"{settings}?token={TOKEN}", data=whole).ok
    labs = sorted((desk.course / "notebooks").glob("*.ipynb"))
    for lab in labs:
        recorded = desk.notebook(lab.stem)
        for cell in (each for each in recorded.cells if each.cell_type == "code"):
            outputs = outputs_of(lab.stem[:2], cell.source)
            cell.outputs = [nbformat.from_dict(output) for output in outputs]
        nbformat.write(recorded, lab)
    page.add_init_script(NO_IDLING)
    page.reload()
    for lab in labs:
        notebook = opened(page, lab.stem)
        expect(notebook.locator(".jp-Cell")).to_have_count(len(desk.notebook(lab.stem).cells))
        for width in (1280, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(250)
            assert page.evaluate(CUT_OR_SCROLLED) == [], f"at {width} pixels"
        assert page.locator(UNSAVED).count() == 0, "merely opened, it counts as changed"
        page.locator("#jp-main-dock-panel .lm-mod-current .lm-TabBar-tabCloseIcon").click()
