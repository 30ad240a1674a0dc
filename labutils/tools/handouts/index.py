"""The page that leads to the handouts of one edition."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from labutils.tools.handouts.documents import EDITION_TITLES
from labutils.tools.pages import COURSE, MARKDOWN, as_html, literal, opened, table, title_of

KINDS = {".html": "HTML", ".pdf": "PDF", ".ipynb": "notebook"}
ABOUT = (
    "Every lab to read here (HTML), to print (PDF), and as a notebook to run where the course is "
    "installed. Each first page says when the lab was executed, on what and with which versions."
)


def write(folder: Path, edition: str) -> None:
    """Write the page of what lies in `folder`, made now or earlier. Raises `OSError` or
    `RuntimeError`."""
    rows = []
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        notebook = opened(path)
        title = notebook and title_of(notebook) or path.stem
        rows.append([literal(title), _links(folder, path.stem)])
    rows.append(["all labs", _links(folder, "course")])
    text = f"# {COURSE}\n\n{ABOUT}\n\n{table(['lab', ''], [row for row in rows if row[1]])}\n"
    page = as_html(text, MARKDOWN, COURSE, EDITION_TITLES[edition])
    (folder / "index.html").write_text(page, encoding="utf-8")


def _links(folder: Path, stem: str) -> str:
    files = {word: folder / f"{stem}{ending}" for ending, word in KINDS.items()}
    return " · ".join(f"[{w}]({quote(f.name)})" for w, f in files.items() if f.is_file())
