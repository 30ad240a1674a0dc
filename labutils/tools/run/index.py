"""The page that leads to every executed notebook of a results folder, and says how each ran."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import jinja2
from nbformat import NotebookNode

from labutils.results.records import plain
from labutils.tools.pages import MARKDOWN, as_html, literal, opened, table, title_of
from labutils.tools.run.arguments import short
from labutils.tools.run.execute_lab import Outcome


def write(
    folder: Path, outcomes: Sequence[Outcome], with_pages: bool, say: Callable[[str], None]
) -> Path | None:
    """Write index.html into `folder`, after the notebooks' own pages where those are older.

    A page that can't be written is no failure of the labs: it is said. None where there is no page.
    """
    executed = sorted((folder / "notebooks").glob("[!.]*.ipynb"))
    file = folder / "index.html"
    try:
        if with_pages:
            from labutils.tools import handouts

            stale = [path for path in executed if _is_stale(path)]
            for name, why in handouts.pages_of(folder, stale).items():
                say(plain(f"No HTML page of {name}: {why}"))
        text = _as_markdown(folder, executed, outcomes)
        page = as_html(text, MARKDOWN, f"Results: {folder.name}", "Executed notebooks")
        file.write_text(page, encoding="utf-8")
    except Exception as error:  # the labs have run: how they went must still be said
        say(plain(f"No {short(file)}: {type(error).__name__}: {error}"))
        return None
    return file


def _is_stale(notebook: Path) -> bool:
    page = notebook.with_suffix(".html")
    return not page.is_file() or page.stat().st_mtime < notebook.stat().st_mtime


def _as_markdown(folder: Path, executed: Sequence[Path], outcomes: Sequence[Outcome]) -> str:
    labs = {path: opened(path) for path in executed}
    rows = {path.stem: _row(path, notebook) for path, notebook in labs.items()}
    where = ["--results", short(folder)]
    template = Path(__file__).with_name("index.j2").read_text("utf-8")
    return jinja2.Template(template, trim_blocks=True).render(
        name=literal(folder.name),
        scoreboard=next((row[0] for stem, row in rows.items() if stem[:2] == "12"), ""),
        report=shlex.join(["labutils", "report", *where]),
        troubles=[outcome.message for outcome in outcomes if outcome.message],
        again=shlex.join(where),
        labs=table(("lab", "status", "seconds", "scale", ""), list(rows.values())),
        ladder="".join(_last_picture(lab) for path, lab in labs.items() if path.stem[:2] == "04"),
    )


def _row(path: Path, notebook: NotebookNode | None) -> list[str]:
    """A link to its page, status, seconds, scale, and a link to the notebook, as far as it says."""
    page = path.with_suffix(".html")
    first, last = quote(page.name if page.is_file() else path.name), quote(path.name)
    title, stamp = path.stem, {"status": "not readable"}
    if notebook:
        title = title_of(notebook) or title
        stamp = notebook.metadata.get("labutils", {})
    said = stamp | {"scale": stamp.get("parameters", {}).get("scale", "")}
    said = [literal(str(said.get(name, ""))) for name in ("status", "seconds", "scale")]
    return [f"[{literal(title)}](notebooks/{first})", *said, f"[notebook](notebooks/{last})"]


def _last_picture(notebook: NotebookNode | None) -> str:
    """The address, picture and all, of an executed notebook's last figure; "" without one."""
    from labutils.tools.handouts.editions import picture

    cells = notebook.cells if notebook else []
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [item for found in map(picture, data) for item in found.items()]
    return "data:{};base64,{}".format(*pictures[-1]) if pictures else ""
