"""The pages that lead to the handouts: one for both editions, and one inside each."""

from __future__ import annotations

import html
import re
from pathlib import Path

from labutils.tools.handouts.documents import EDITION_TITLES
from labutils.tools.handouts.editions import EDITIONS
from labutils.tools.pages import COURSE, filled, link, table

KINDS = {".html": "HTML", ".pdf": "PDF", ".ipynb": "notebook"}
ABOUT = (
    "Every lab to read here (HTML), to print (PDF), and as a notebook to run where the course is "
    "installed. Each first page says when the lab was executed, on what and with which versions."
)


def write(target: Path) -> None:
    """Write the pages of what lies in `target`, made now or earlier. Raises `OSError`."""
    made = [edition for edition in EDITIONS if (target / edition).is_dir()]
    for edition in made:
        _write_page(target / edition, {"": edition})
    _write_page(target, {f"{edition}/": edition for edition in made})


def _write_page(folder: Path, editions: dict[str, str]) -> None:
    """`editions`: where each lies below the folder -> its name."""
    found = [path for place in editions for path in sorted((folder / place).glob("[0-9]*.html"))]
    titles = {path.stem: _title(path) for path in reversed(found)}
    rows, contents = [], []
    for stem in [*sorted(titles), "course"]:
        cells = [html.escape(titles.get(stem, "all labs"))]
        for place in editions:
            files = [(word, f"{place}{stem}{ending}") for ending, word in KINDS.items()]
            there = [link(word, file) for word, file in files if (folder / file).is_file()]
            cells.append(" · ".join(there))
        rows += [cells] if any(cells[1:]) else []
        if stem in titles:
            contents.append((titles[stem], f"{next(iter(editions))}{stem}.html"))
    several = len(editions) > 1
    kind = "Handouts" if several else EDITION_TITLES[next(iter(editions.values()), "student")]
    head = ["lab", *(f"{edition}’s edition" * several for edition in editions.values())]
    page = filled(COURSE, kind, contents, f"<p>{ABOUT}</p>\n{table(head, rows)}")
    (folder / "index.html").write_text(page, encoding="utf-8")


def _title(page: Path) -> str:
    found = re.search(r"<title>(.*?)</title>", page.read_text(encoding="utf-8")[:2000])
    return html.unescape(found[1]).removesuffix(f" · {COURSE}") if found else page.stem
