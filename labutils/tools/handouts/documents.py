"""A lab as an HTML page and as a PDF: pandoc reads the notebook, and writes HTML or Typst.

Formulas become MathML and Typst's own. Nothing is fetched: pandoc runs in its sandbox, Typst with
fonts that were installed with it, and a page forbids its browser to load anything.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from labutils.results.records import REPOSITORY
from labutils.tools.pages import (
    COURSE,
    MARKDOWN,
    MEMORY_LIMIT,
    TIME_LIMIT_S,
    as_html,
    limited,
    literal,
    pandoc,
    title_of,
)

HERE = Path(__file__).parent
READ = "ipynb-raw_html-smart-pandoc_title_block"
FILTER = f"--lua-filter={HERE / 'notebook.lua'}"
GLOSSARY = REPOSITORY / "docs" / "glossary.md"
EDITION_TITLES = {
    "worksheet": "Worksheet",
    "student": "Student edition",
    "instructor": "Instructor’s edition, with solutions",
    "executed": "As it was executed",
}
SET = """\
import sys, typst
source, fonts, file, seconds = sys.argv[1:]
data, warnings = typst.compile_with_warnings(
    source, font_paths=[fonts], ignore_system_fonts=True, format="pdf", timestamp=int(seconds))
open(file, "wb").write(data)
sys.exit("; ".join(str(warning.message) for warning in warnings) or 0)
"""
CONFINED = {"RAYON_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "2", "HTTPS_PROXY": "http://0.0.0.0:9"}
"""In Typst's environment: few threads, whose stacks count as memory, and no way to a package."""


@dataclass(frozen=True)
class Chapter:
    """One edition of one lab. `facts`: what its first page says about the run, by name; `at`: when
    it ended."""

    stem: str
    edition: str
    notebook: NotebookNode
    facts: dict[str, str]
    at: datetime

    @property
    def title(self) -> str:
        return title_of(self.notebook) or self.stem


def page(chapter: Chapter, target: Path, pages: Collection[str] = ()) -> None:
    """Write the chapter as one HTML file that loads nothing. `pages`: the notebooks that have a
    page beside it. Raises `RuntimeError`."""
    options = [FILTER, f"-Mpages={' '.join(pages)}"]
    source = nbformat.writes(_with_facts(chapter))
    text = as_html(source, READ, chapter.title, EDITION_TITLES[chapter.edition], options)
    (target / f"{chapter.stem}.html").write_text(text, encoding="utf-8")


def pdf(chapter: Chapter, scratch: Path, target: Path) -> str:
    """Write the chapter as a PDF; its text in Typst's language. `scratch` is a `workshop`. Raises
    `RuntimeError`."""
    options = [FILTER, "--syntax-highlighting=idiomatic", f"--extract-media={scratch}"]
    source = nbformat.writes(_with_facts(chapter))
    text = pandoc(source, READ, "typst", options)
    text = text.replace("align(center)[#table(", "align(left)[#table(")
    opening = f"#show: handout.with({_named(chapter.title, chapter.edition)})\n"
    _set(opening + text, scratch, target / f"{chapter.stem}.pdf", chapter.at)
    return text


def course(chapters: Sequence[tuple[Chapter, str]], scratch: Path, target: Path) -> None:
    """Write all chapters, given with their texts in Typst's language, and the glossary as one PDF.
    Raises `RuntimeError`."""
    words = _named(COURSE, chapters[0][0].edition)
    measured = [one for one, _ in chapters if one.facts]
    rows = [[one.title, *(one.facts.get(name, "") for name in COVER)] for one in measured]
    labs = " ".join(f"({', '.join(map(_quoted, row))})," for row in rows)
    opening = f"#show: handout.with({words}, whole: true)"
    cover = f"#cover({words}, labs: ({labs}))"
    entries = re.sub(r"^### (.+)\n\n", r"**\1.** ", GLOSSARY.read_text("utf-8"), flags=re.M)
    title, _, entries = pandoc(entries, MARKDOWN, "typst", []).partition("\n\n")
    glossary = f"{title}\n\n#glossary-part[{entries}]"
    text = "\n\n".join([opening, cover, *(text for _, text in chapters), glossary])
    _set(text, scratch, target / "course.pdf", max(one.at for one, _ in chapters), len(chapters))


COVER = ("executed", "machine", "commit")
"""Facts that stand on the course's cover, a row a lab."""


def workshop(folder: Path) -> Path:
    """A folder for an edition's pictures, with what Typst reads beside them."""
    (folder / "fonts").mkdir(parents=True)
    for name in ("page.typ", "code.tmTheme"):
        shutil.copy(HERE / name, folder)
    for package, pattern in (
        ("matplotlib", "mpl-data/fonts/ttf/DejaVuSans*.ttf"),
        ("matplotlib_fontja", "fonts/ipaexg.ttf"),
    ):
        for font in Path(importlib.util.find_spec(package).origin).parent.glob(pattern):
            shutil.copy(font, folder / "fonts")
    return folder


def _with_facts(chapter: Chapter) -> NotebookNode:
    """The notebook with a box of facts below its title."""
    notebook = copy.deepcopy(chapter.notebook)
    if chapter.facts:  # a worksheet has none
        rows = ["|   |   |", "|---|---|"]
        for name, words in chapter.facts.items():
            rows += [f"| **{name}** | {literal(words)} |"] if words else []
        box = new_markdown_cell("\n".join(rows), metadata={"tags": ["facts"]})
        title = new_markdown_cell()
        if notebook.cells:
            title.source, _, notebook.cells[0].source = notebook.cells[0].source.partition("\n")
        notebook.cells = [title, box, *notebook.cells]
    for place, cell in enumerate(notebook.cells):  # attachments are named after their cell
        cell.id = f"{chapter.stem[:2]}-{place}"
        if cell.cell_type == "markdown":  # a line that begins with "448. " begins no list
            cell.source = re.sub(r"(?m)^(\d{3,})\. ", r"\1\\. ", cell.source)
    return notebook


def _set(text: str, scratch: Path, file: Path, at: datetime, labs: int = 1) -> None:
    """Typst's `text` of so many `labs` as a PDF, set in a process that may take so much time and
    memory. Raises `RuntimeError`, for a warning too: one may be of a missing font."""
    source = scratch / f"{file.stem}.typ"
    source.write_text(f'#import "page.typ": *\n{text}', encoding="utf-8")
    words = [sys.executable, "-c", SET, source, scratch / "fonts", file, str(int(at.timestamp()))]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_AS, (MEMORY_LIMIT,) * 2)
    options = {"preexec_fn": limit, "env": os.environ | CONFINED}
    limited(f"{file.name}: Typst", words, labs * TIME_LIMIT_S, **options)


def _named(title: str, edition: str) -> str:
    return f"title: {_quoted(title)}, edition: {_quoted(EDITION_TITLES[edition])}"


def _quoted(word: str) -> str:
    """A string in Typst's language, which quotes as JSON does."""
    return json.dumps(word, ensure_ascii=False)
