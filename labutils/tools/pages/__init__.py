"""The look of the course's HTML pages: one template, which pandoc fills.

A page loads nothing: style, icon and pictures are in it, and it forbids its browser to fetch
anything else.
"""

from __future__ import annotations

import html
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

COURSE = "GPU Fine-Tuning Lab"
TEMPLATE = Path(__file__).parent / "page.html"
MEMORY_LIMIT, TIME_LIMIT_S = 2 * 2**30, 60
"""What pandoc and Typst may take over a lab."""
MARKDOWN = "commonmark-raw_html+pipe_tables"
"""Pandoc's name for the language of pages that lead to others."""


def pandoc(text: str, form: str, to: str, options: Sequence[str]) -> str:
    """`text` of pandoc's format `form` in its format `to`; pandoc reads no file, and may take so
    much memory and time. Raises `RuntimeError` with its words."""
    import pypandoc

    words = [pypandoc.get_pandoc_path(), "+RTS", f"-M{MEMORY_LIMIT}", "-RTS", "--sandbox"]
    words += [f"--from={form}", f"--to={to}", "--wrap=none", *options]
    return limited("pandoc", words, TIME_LIMIT_S, input=text.encode(errors="replace"))


def limited(name: str, words: Sequence[Any], limit_s: float, **options: Any) -> str:
    """What a program prints. Raises `RuntimeError` with its last line where it fails, and where it
    takes longer than `limit_s` seconds."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=limit_s, **options)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {limit_s} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if "memory" in line] or lines  # more follows that
        raise RuntimeError(f"{name}: {(lines or [f'exit code {done.returncode}'])[-1]}")
    return done.stdout.decode()


def as_html(text: str, form: str, title: str, kind: str, options: Sequence[str] = ()) -> str:
    """The page of a text in pandoc's format `form`, which loads nothing.

    title, kind: in plain words, what the page and what kind of page it is. options: more of
    pandoc's. Raises `RuntimeError` with pandoc's words.
    """
    words = {"title": f"{title} · {COURSE}", "course": COURSE, "edition": kind}
    # In ASCII, as an old locale may have no other letters for a program's arguments.
    escaped = {k: html.escape(v).encode("ascii", "xmlcharrefreplace") for k, v in words.items()}
    variables = [f"--variable={name}:{word.decode()}" for name, word in escaped.items()]
    look = ["--standalone", f"--template={TEMPLATE}", "--mathml", "--toc", "--toc-depth=2"]
    page = pandoc(text, form, "html5", [*look, *variables, *options])
    return re.sub(r' xmlns="http://www\.w3\.org/[^"]*"', "", page)  # HTML5 needs no such addresses


def opened(path: Path) -> NotebookNode | None:
    """An executed notebook; None where the file is none, or its stamp none of ours."""
    try:
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata.get("labutils", {}).get("parameters", {}).get("scale")  # of another kind?
    except Exception:  # cut off, mostly: nbformat passes on what json and its schema raise
        return None
    return notebook


def title_of(notebook: NotebookNode) -> str:
    """The first heading of a notebook, "" where it has none."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return next(iter(re.findall(r"^# (.+)$", "\n".join(cells), re.M)), "")


def literal(words: str) -> str:
    """Strangers' words in one line, which Markdown takes as they are."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(words.split()))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, of cells in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
