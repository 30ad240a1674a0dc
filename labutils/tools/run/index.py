"""The page that leads to every executed notebook of a results folder, and says how each ran."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

import nbformat

from labutils.results.records import plain
from labutils.tools.pages import MARKDOWN, as_html, table, title_of
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

            handouts.pages_of(folder, [path for path in executed if _is_stale(path)])
    except Exception as error:  # the labs have run: how they went must still be said
        say(plain(f"No HTML pages of executed notebooks: {type(error).__name__}: {error}"))
    try:
        text = _as_markdown(folder, executed, outcomes)
        page = as_html(text, MARKDOWN, f"Results: {folder.name}", "Executed notebooks")
        file.write_text(page, encoding="utf-8")
    except (ImportError, OSError, RuntimeError) as error:
        say(f"No {short(file)}: {error}")
        return None
    return file


def _is_stale(notebook: Path) -> bool:
    page = notebook.with_suffix(".html")
    return not page.is_file() or page.stat().st_mtime < notebook.stat().st_mtime


def _as_markdown(folder: Path, executed: Sequence[Path], outcomes: Sequence[Outcome]) -> str:
    rows = []
    for path in executed:
        title, *cells = _read(path)
        page = path.with_suffix(".html")
        first = quote(page.name if page.is_file() else path.name)
        last = f"[notebook](notebooks/{quote(path.name)})"
        rows.append([f"[{title}](notebooks/{first})", *cells, last])
    where = ["--results", short(folder)]
    report = shlex.join(["labutils", "report", *where])
    first = [row[0] for path, row in zip(executed, rows, strict=True) if path.stem[:2] == "12"]
    pictures = [_last_picture(path) for path in executed if path.stem[:2] == "04"]
    parts = [
        f"# Results: {folder.name}",
        *(f"Begin with {link}: every claim's verdict, and your predictions." for link in first),
        f"`{report}` prints the verdicts with their reasons. [results.jsonl](results.jsonl) holds "
        "every run, one a line.",
    ]
    troubles = [outcome.message for outcome in outcomes if outcome.message]
    if troubles:
        again = shlex.join(["labutils", "run", *where])
        parts += ["## What went wrong"]
        parts += ["\n    " + textwrap.indent(words, "    ") for words in troubles]
        parts += [f"When that is mended: `{again}` runs what is not done yet."]
    parts += ["## Labs", table(("lab", "status", "seconds", "scale", ""), rows)]
    parts += [f"## The ladder of lab 04\n\n![]({uri})" for uri in pictures if uri]
    return "\n\n".join(parts)


def _last_picture(path: Path) -> str:
    """The address, picture and all, of the last figure of an executed notebook; "" without one."""
    from labutils.tools.handouts.editions import picture

    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # cut off, or no notebook: nbformat passes on what json and its schema raise
        return ""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [found for output in outputs if (found := picture(output.get("data", {})))]
    return (
        "".join(f"data:{kind};base64,{data}" for kind, data in pictures[-1].items())
        if pictures
        else ""
    )


def _read(path: Path) -> tuple[str, str, str, str]:
    """(first heading, status, seconds, scale) of an executed notebook, as far as it says."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception:  # cut off, or no notebook: nbformat passes on what json and its schema raise
        return path.stem, "not readable", "", ""
    stamp = notebook.metadata.get("labutils", {})
    scale = stamp.get("parameters", {}).get("scale", "")
    title = title_of(notebook) or path.stem
    return title, stamp.get("status", ""), str(stamp.get("seconds", "")), scale
