"""The look of the course's HTML pages: one template, which pandoc fills.

A page loads nothing: style, icon and pictures are in it, and it forbids its browser to fetch
anything else.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode

COURSE = "GPU Fine-Tuning Lab"
TEMPLATE = Path(__file__).parent / "page.html"
MARKDOWN = "commonmark-raw_html+pipe_tables"
"""Pandoc's name for the language of pages that lead to others."""


def as_html(text: str, form: str, title: str, kind: str, options: Sequence[str] = ()) -> str:
    """The page of a text in pandoc's format `form`, which loads nothing.

    title, kind: in plain words, what the page and what kind of page it is. options: more of
    pandoc's. Raises `RuntimeError` with pandoc's words.
    """
    import pypandoc

    words = {"title": f"{title} · {COURSE}", "course": COURSE, "edition": kind}
    variables = [f"--variable={name}:{html.escape(word)}" for name, word in words.items()]
    look = ["--standalone", f"--template={TEMPLATE}", "--mathml", "--toc", "--toc-depth=2"]
    all_options = ["--sandbox", "--wrap=none", *look, *variables, *options]
    page = pypandoc.convert_text(text, "html5", format=form, extra_args=all_options)
    return re.sub(r' xmlns="http://www\.w3\.org/[^"]*"', "", page)  # HTML5 needs no such addresses


def title_of(notebook: NotebookNode) -> str:
    """The first heading of a notebook, "" where it has none."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return next(iter(re.findall(r"^# (.+)$", "\n".join(cells), re.M)), "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, of cells in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |" for line in lines)
