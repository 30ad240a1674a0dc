"""The pages that lead to the handouts: one for both editions, and one inside each, which can be
given out alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from labutils.tools.handouts.documents import EDITION_TITLES
from labutils.tools.handouts.editions import EDITIONS
from labutils.tools.pages import COURSE, filled, link, table

NAME = "index.html"
KINDS = {".html": "HTML", ".pdf": "PDF", ".ipynb": "notebook"}
"""File's ending -> what people call it."""


def write(target: Path) -> None:
    """Write the pages of what lies in `target`: from this time or an earlier one. Raises `OSError`."""
    made = [edition for edition in EDITIONS if (target / edition).is_dir()]
    pages = {target / edition / NAME: _page(target / edition, {"": edition}) for edition in made}
    pages[target / NAME] = _page(target, {f"{edition}/": edition for edition in made})
    for file, text in pages.items():
        file.write_text(text, encoding="utf-8")


def _page(folder: Path, editions: dict[str, str]) -> str:
    """The page in `folder`; `editions`: where each lies below it, with a "/" at its end -> its
    name.
    """
    labs = sorted(
        {path.stem for place in editions for path in (folder / place).glob("[0-9][0-9]_*.html")}
    )
    titles = {lab: _title(folder, lab, editions) for lab in labs}
    several = len(editions) > 1
    head = ["lab", *(f"{edition}’s edition" if several else "" for edition in editions.values())]
    rows = [
        [html.escape(titles[lab]), *(_links(folder, place, lab) for place in editions)]
        for lab in labs
    ]
    rows += [
        ["<strong>all labs</strong>", *(_links(folder, place, "course") for place in editions)]
    ]
    rows = [row for row in rows if any(row[1:])]
    first = next(iter(editions))
    contents = [(titles[lab], f"{first}{lab}.html") for lab in labs]
    kind = "Handouts" if several else EDITION_TITLES[next(iter(editions.values()))]
    return filled(COURSE, kind, contents, f"<p>{_ABOUT}</p>\n{table(head, rows)}")


_ABOUT = (
    "Every lab to read here (HTML), to print (PDF), and as a notebook to run where the course is "
    "installed. Each first "
    "page says when the lab was executed, on what and with which versions."
)


def _links(folder: Path, place: str, stem: str) -> str:
    """Links to the files of that stem that are there."""
    there = [(word, f"{place}{stem}{ending}") for ending, word in KINDS.items()]
    return " · ".join(link(word, file) for word, file in there if (folder / file).is_file())


def _title(folder: Path, lab: str, places: Sequence[str]) -> str:
    """What the lab's page calls itself."""
    for place in places:
        page = folder / place / f"{lab}.html"
        if page.is_file():
            with page.open(encoding="utf-8") as file:
                found = re.search(r"<title>(.*?)</title>", file.read(2000))
            return html.unescape(found[1]).removesuffix(f" · {COURSE}") if found else lab
    return lab
