"""The editions of an executed notebook: a worksheet without results, for the session; the student's
without solutions, for afterwards; the instructor's with them.

What isn't known to be clean is left out. Of metadata only the tags stay, of outputs only text,
Markdown and pictures: papermill's traces, widgets, warnings and the machine's paths go.
"""

from __future__ import annotations

import base64
import contextlib
import io
import re

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

WORKSHEET, STUDENT, INSTRUCTOR = EDITIONS = ("worksheet", "student", "instructor")
EXECUTED = "executed"
"""What nobody gives out: a lab as it was executed, to be read where it was."""
ASKING = ("# ", "## ", "**Question.**", "**Your prediction", "**Prediction")
"""How the paragraphs of a lab begin that a worksheet has."""
MOST_LETTERS, MOST_OUTPUTS = 100_000, 1000
"""Of an output, and of a cell; the rest of what a cell printed is left out."""

_PREDICTED = re.compile(r'lab\.predict\(\s*"([^"]+)"')
"""What a cell asks to predict."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PACKAGES = re.compile(r"(?:~|/)[^\s`'\"<>|,;()\[\]]{0,300}?/(?:site|dist)-packages/")
_TRACES = re.compile(r"(?<![\w.-])[\w.-]{1,99}_\d+\.\d{10,}(?=\.pt\.trace\.json)")
"""A profiler's file is named by host and process."""
_PATHS = re.compile(
    r"(?<![\w:/.~…-])(?:~|/(?!(?:dev|proc|sys)/)[\w.+@-]+)(?:/[\w.+@-]+)*/([\w.+@-]+)/?"
)
"""An absolute path, or one from a home folder, down to its last name."""


def edition_of(executed: NotebookNode, edition: str) -> NotebookNode:
    """`executed` as `edition` is to have it. The student's has no solutions, and no outputs from
    the first solution on: later cells may tell what a solution found."""
    if edition == WORKSHEET:
        return _notebook(_asked(executed.cells))
    cells, solved = [], False
    for place, cell in enumerate(executed.cells):
        tags = list(cell.metadata.get("tags", []))
        solved = solved or "solution" in tags
        if "injected-parameters" in tags or ("solution" in tags and edition == STUDENT):
            continue
        shared = {"id": f"cell-{place}", "metadata": {"tags": tags} if tags else {}}
        if cell.cell_type == "code":
            outputs = [] if solved and edition == STUDENT else _clean(cell.outputs)
            cells.append(new_code_cell(cell.source, outputs=outputs, **shared))
        else:
            pictures = {
                name: data
                for name, data in cell.get("attachments", {}).items()
                if f"attachment:{name}" in cell.source and picture(data)
            }
            more = {"attachments": pictures} if pictures else {}
            cells.append(new_markdown_cell(cell.source, **shared, **more))
    return _notebook(cells)


def _notebook(cells: list[NotebookNode]) -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _asked(cells: list[NotebookNode]) -> list[NotebookNode]:
    """A worksheet's cells: the lab's aims, each section's question, each prediction and each
    exercise as given, with room to write. No result, and no code that only measures."""
    first, *others = cells or [new_markdown_cell()]
    asked, exercises = [new_markdown_cell(first.source.partition("\n|")[0].strip())], False
    for cell in others:
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            continue
        if cell.cell_type == "code":
            topics = _PREDICTED.findall(cell.source)
            asked += [_room("prediction", f"My prediction of *{topic}*:") for topic in topics]
            if "exercise" in tags:
                asked += [new_code_cell(cell.source, metadata={"tags": ["exercise"]})]
                asked += [_room("lines", "My notes:")]
            continue
        heading = cell.source.startswith("## ")
        exercises = cell.source.startswith("## Exercises") if heading else exercises
        paragraphs = cell.source.split("\n\n")
        kept = paragraphs if exercises else [p for p in paragraphs if p.startswith(ASKING)]
        if any(not p.startswith("#") for p in kept):  # a heading alone asks nothing
            asked += [new_markdown_cell("\n\n".join(kept))]
            asked += [_room("lines", "My answer:")] if "**Question.**" in cell.source else []
    return asked


def _room(kind: str, words: str) -> NotebookNode:
    return new_markdown_cell(words, metadata={"tags": [kind]})


def sanitised(text: str) -> str:
    """`text` without colour codes, and without where things lie on the machine that wrote it."""
    text = text[:MOST_LETTERS] + "\n…" * (len(text) > MOST_LETTERS)
    text = _TRACES.sub("trace", _PACKAGES.sub("", _COLOURS.sub("", text)))
    return _PATHS.sub(r"…/\1", text)


def _clean(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """What of a cell's outputs is for readers, printed lines that follow one another as one."""
    shown: list[NotebookNode] = []
    for output in outputs[:MOST_OUTPUTS]:
        if output.output_type == "stream" and output.name == "stdout":
            text = sanitised(output.text)
            if shown and shown[-1].output_type == "stream":
                shown[-1].text += text
            else:
                shown.append(new_output("stream", name="stdout", text=text))
        elif output.output_type == "error":
            words = sanitised(f"{output.ename}: {output.evalue}\n")
            shown.append(new_output("stream", name="stdout", text=words))
        elif "data" in output and not any("widget" in kind for kind in output.data):
            data = picture(output.data)
            for kind in ("text/markdown", "text/plain"):
                if not data and kind in output.data:
                    data = {kind: sanitised(output.data[kind])}
            # The value of the last line is noise after what the cell meant to show.
            if data and not (
                shown and output.output_type == "execute_result" and not picture(data)
            ):
                shown.append(new_output("display_data", data=data))
    return shown


def picture(data: dict) -> dict[str, str]:
    """The picture in an output's data, where it really is one; {} otherwise."""
    for kind in ("image/png", "image/jpeg"):
        with contextlib.suppress(Exception):  # of many types; Pillow also tells a bomb
            encoded = "".join(data[kind].split())
            file = io.BytesIO(base64.b64decode(encoded, validate=True))
            with Image.open(file, formats=[kind.removeprefix("image/")]) as image:
                image.verify()
            return {kind: encoded}
    return {}
