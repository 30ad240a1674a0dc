"""The pages that lead to the handouts: one for both editions, and one inside each."""

from __future__ import annotations

import html
import re
from pathlib import Path

from labutils.tools.handouts.documents import EDITION_TITLES
from labutils.tools.handouts.editions import EDITIONS
from labutils.tools.pages import COURSE, MARKDOWN, as_html, table

KINDS = {".html": "HTML", ".pdf": "PDF", ".ipynb": "notebook"}
ABOUT = (
    "Every lab to read here (HTML), to print (PDF), and as a notebook to run where the course is "
    "installed. Each first page says when the lab was executed, on what and with which versions."
)


def write(target: Path) -> None:
    """Write the pages of what lies in `target`, made now or earlier. Raises `OSError`."""
    made = [edition for edition in EDITIONS if (target / edition).is_dir()]
    for edition in made:
        _write_page(target / edition, EDITION_TITLES[edition], {"": ""})
    _write_page(target, "Handouts", {f"{edition}/": f"{edition}’s edition" for edition in made})


def _write_page(folder: Path, kind: str, editions: dict[str, str]) -> None:
    """`editions`: where each lies below the folder -> its heading."""
    pages = [path for place in editions for path in (folder / place).glob("[0-9]*.html")]
    titles = {path.stem: _title(path) for path in sorted(pages, key=lambda path: path.stem)}
    rows = []
    for stem, title in (titles | {"course": "all labs"}).items():
        cells = []
        for place in editions:
            files = {word: f"{place}{stem}{ending}" for ending, word in KINDS.items()}
            links = [f"[{word}]({f})" for word, f in files.items() if (folder / f).is_file()]
            cells.append(" · ".join(links))
        rows += [[title, *cells]] if any(cells) else []
    text = f"# {COURSE}\n\n{ABOUT}\n\n{table(['lab', *editions.values()], rows)}\n"
    page = as_html(text, MARKDOWN, COURSE, kind)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _title(page: Path) -> str:
    title = re.search(r"<title>(.*?)</title>", page.read_text(encoding="utf-8")[:2000])
    return html.unescape(title[1]).removesuffix(f" · {COURSE}") if title else page.stem
