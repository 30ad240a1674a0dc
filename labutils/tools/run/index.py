"""The page that leads to every executed notebook of a results folder, and says how each ran."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from labutils.tools.pages import filled, link, table
from labutils.tools.run.kernel import Outcome
from labutils.tools.run.validation import short


def write(
    folder: Path, outcomes: Sequence[Outcome], with_pages: bool, say: Callable[[str], None]
) -> Path | None:
    """Write index.html into `folder`, after the notebooks' own pages where those are older.

    A page that can't be written is no failure of the labs: it is said. None where there is no page.
    """
    executed = sorted((folder / "notebooks").glob("[!.]*.ipynb"))
    try:
        if with_pages:
            from labutils.tools import handouts

            handouts.pages_of(folder, [path for path in executed if _is_stale(path)])
    except Exception as error:  # the labs have run: how they went must still be said
        say(f"No HTML pages of the executed notebooks: {type(error).__name__}: {error}")
    file = folder / "index.html"
    try:
        file.write_text(_as_html(folder, executed, outcomes), encoding="utf-8")
    except OSError as error:
        say(f"No {short(file)}: {error}")
        return None
    return file


def _is_stale(notebook: Path) -> bool:
    page = notebook.with_suffix(".html")
    return not page.is_file() or page.stat().st_mtime < notebook.stat().st_mtime


def _as_html(folder: Path, executed: Sequence[Path], outcomes: Sequence[Outcome]) -> str:
    rows, contents = [], []
    for path in executed:
        title, status, seconds, scale = _read(path)
        page = path.with_suffix(".html")
        address = f"notebooks/{page.name if page.is_file() else path.name}"
        contents.append((title, address))
        cells = map(html.escape, (status, seconds, scale))
        rows.append([link(title, address), *cells, link("notebook", f"notebooks/{path.name}")])
    report = html.escape(shlex.join(["labutils", "report", "--results", short(folder)]))
    parts = [
        f"<p>Verdicts with their reasons come from <code>{report}</code>. "
        f"{link('results.jsonl', 'results.jsonl')} holds every run, one a line.</p>",
        f'<div class="output">{table(("lab", "status", "seconds", "scale", ""), rows)}</div>',
    ]
    if troubles := [outcome.message for outcome in outcomes if outcome.message]:
        parts.append("<h2>What went wrong</h2>")
        parts += [
            f'<div class="output"><pre>{html.escape(words)}</pre></div>' for words in troubles
        ]
    return filled(f"Results: {folder.name}", "Executed notebooks", contents, "\n".join(parts))


def _read(path: Path) -> tuple[str, str, str, str]:
    """(first heading, status, seconds, scale) of an executed notebook, as far as it says."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        text = "\n".join(
            "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
        )
        stamp = notebook["metadata"].get("labutils", {})
        seconds, parameters = stamp.get("seconds", ""), stamp.get("parameters", {})
        title = next(iter(re.findall(r"^# (.+)$", text, re.M)), path.stem)
        return title, str(stamp.get("status", "")), str(seconds), str(parameters.get("scale", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut off, or no notebook
        return path.stem, "not readable", "", ""
