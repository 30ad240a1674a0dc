"""The look of the course's HTML pages: one template, filled by pandoc with a lab, and here with a
list of links.

A page loads nothing: style, icon and pictures are in it, and it forbids its browser to fetch
anything else.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

COURSE = "GPU Fine-Tuning Lab"
TEMPLATE = Path(__file__).parent / "page.html"
"""Its places: $title$, $course$, $edition$ (what kind of page it is), $toc$, $body$."""


def filled(title: str, kind: str, contents: Sequence[tuple[str, str]], body: str) -> str:
    """The page `title` of that `kind`: `contents` are (words, path), `body` is HTML; the rest is
    plain text.
    """
    items = "".join(f"<li>{link(words, path)}</li>" for words, path in contents)
    parts = {
        "title": html.escape(f"{title} · {COURSE}"),
        "course": COURSE,
        "edition": html.escape(kind),
        "toc": f"<ul>{items}</ul>",
        "body": f"<h1>{html.escape(title)}</h1>\n{body}",
    }
    return re.sub(r"\$(\w+)\$", lambda place: parts[place[1]], TEMPLATE.read_text(encoding="utf-8"))


def link(words: str, path: str) -> str:
    """A link to a file below the page."""
    return f'<a href="{quote(path)}">{html.escape(words)}</a>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return f"<table>\n<thead>{row(head, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
