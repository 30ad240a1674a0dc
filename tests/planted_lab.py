"""A lab, as executed, that has everything a handout must get rid of, or get right."""

from __future__ import annotations

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

STEM = "42_planted_lab"
SECRET = "forty-two-is-it"
"""Stands in every place where a solution could hide; no student may find it."""
TRACES = ("papermill", "somebody", "vm-7_4711", "UserWarning", "\x1b[", "widget", "site-packages")
"""Of the machine, and of how the notebook was run."""
GLYPHS = "× → − ² µ ½ ≤ ± ≈ … – “” ⁻⁹ ✓ についての紹介"
LONG_LINE = "x = [" + ", ".join(f"argument_{place}=value_{place}" for place in range(12)) + "]"


def picture(colour: str = "#C1440E") -> str:
    """A PNG of one colour, 600 x 200, as notebooks keep it."""
    file = BytesIO()
    Image.new("RGB", (600, 200), colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def printed(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    return new_output("stream", name=name, text=text)


def shown(**data: str) -> nbformat.NotebookNode:
    return new_output("display_data", data={k.replace("_", "/"): v for k, v in data.items()})


def solution(source: str, **more: object) -> nbformat.NotebookNode:
    metadata = {"tags": ["solution"], "nbgrader": {"solution": SECRET}}
    return new_code_cell(source, metadata=metadata, **more)


WIDE_TABLE = """\
| claim | published | H200 | here | verdict |
| --- | --- | --- | --- | --- |
| **A9.every.word** It says something that takes a line and a half of the page and some more \
| 290 → 141 ms | 574 → 397 ms (1.45x) (refuted) | 959 → 696 ms | **refuted**: RuntimeError at \
`labutils/training/batches_of_some_length.py: _endless (61)` \\| and so on |
"""
MARKDOWN = r"""# Lab 42 · Planted

It costs \$5 or $W' = W + BA$, see [lab 43](43_other.ipynb), [lab 42](42_planted_lab.ipynb) and
[a paper](https://example.org/paper).
- a list without a blank line before

The sum is
448. That is a sentence's end, and no list.

$$\sqrt{\sum_{i>r} \sigma_i^2} \quad \frac{\alpha}{r} \lVert x \rVert$$
"""
PRINTED = """\
\x1b[31mred\x1b[0m in /home/somebody/.venv/lib/python3.12/site-packages/torch/x.py
kept in ~/.cache/labutils/traces/vm-7_4711.1795266390927324960.pt.trace.json
"""
TRACE = "The trace of `<module>` is in `/home/somebody/traces`, 3/4 of /dev/shm."
PREDICTION = "No prediction of *time of a step* yet. Put a number in the cell above."


def planted() -> nbformat.NotebookNode:
    """The executed notebook."""
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": SECRET}}
    outputs = [
        printed("UserWarning: mind this\n", "stderr"),
        printed(PRINTED),
        shown(text_markdown=TRACE),
        shown(text_markdown=WIDE_TABLE),
        shown(image_png=picture(), text_plain="<Figure size 864x408 with 1 Axes>"),
        new_output("display_data", data=widget | {"text/plain": SECRET}),
        shown(text_markdown=PREDICTION),
    ]
    exercise = {"tags": ["exercise"]}
    hidden = {"so.png": {"image/png": picture()}}
    cells = [
        new_markdown_cell(MARKDOWN),
        new_code_cell('scale: str = "auto"', metadata={"tags": ["parameters"]}),
        new_code_cell("results_dir = '/home/somebody'", metadata={"tags": ["injected-parameters"]}),
        new_markdown_cell(f"## 1 · Glyphs\n\n{GLYPHS}\n\n![elsewhere](https://example.org/x.png)"),
        new_code_cell(LONG_LINE, metadata={"papermill": {"status": "completed"}}, outputs=outputs),
        new_markdown_cell("## Exercises\n\n**1.** What is it?"),
        new_code_cell("answer = None", metadata=exercise),
        new_code_cell("check(answer)", metadata=exercise, outputs=[printed("not yet\n")]),
        solution(f"answer = '{SECRET}'\ncheck(answer)", outputs=[printed(f"{SECRET}\n")]),
        new_markdown_cell(
            f"It is {SECRET}: ![so](attachment:so.png)",
            metadata={"tags": ["solution"]},
            attachments=hidden,
        ),
        new_markdown_cell("## After", attachments={f"{SECRET}.png": hidden["so.png"]}),
        new_code_cell("print('again')", outputs=[printed(f"{SECRET}\nagain\n")]),
        new_code_cell("lab.done()", outputs=[shown(text_markdown="Lab 42 is done.")]),
    ]
    kernel = {"name": "python3", "display_name": "somebody's"}
    paths = {"input_path": "/home/somebody/in.ipynb"}
    metadata = {"widgets": {"state": {"value": SECRET}}, "papermill": paths, "kernelspec": kernel}
    return new_notebook(cells=cells, metadata=metadata)


HOSTILE = r"""
::: read("page.typ")
::: import"@preview/cetz:0.4.2"
::: {.import onclick="alert(1)"}
::: range(9999999999)
::: {#id .part .panic style="background:url(https://example.org/b)"}
one
:::

---
title: '#read("page.typ")'
---

`#read("page.typ")`{=typst} `<script>alert(1)</script>`{=html} <script>alert(2)</script>
<img src=x onerror=alert(3)> <meta http-equiv="refresh" content="0;url=https://example.org/r">
$\unknownmacro{x}$ $$\frac{1$$ $\href{javascript:alert(4)}{y}$ $\input{/etc/passwd}$
$#read("page.typ")$

![a](https://example.org/x.png) ![b](/etc/passwd) ![c](file:///etc/passwd) ![d](page.typ)
![e](data:text/html,x) [f](javascript:alert(5)) [g](file:///etc/passwd)
![h](attachment:so.png) ![i](attachment:pixel.png) ![](attachment:")#read("page.typ)

```py"]#read("page.typ")
one
```

<pre> src="foo" ]0;title
"""
"""Markdown that would run, read or load something, were it more than text."""


TITLE = (
    '# #read("page.typ") <script> <meta http-equiv="refresh" content="0;url=https://example.org">'
    ' [t](javascript:alert(9)) ![t](https://example.org/t.png) | \\" '
)


def make_hostile(executed: nbformat.NotebookNode) -> None:
    """Put strangers' tricks into a notebook: in Markdown, names, outputs, attachments and tags."""
    refresh = base64.b64encode(b'"><meta http-equiv="refresh" content="0;url=https://example.org">')
    outputs = [
        shown(text_markdown=HOSTILE),
        shown(image_png=refresh.decode()),
        shown(image_png='x" onerror="alert(6)'),
        shown(image_png=picture()[:400]),
        shown(text_html="<script>alert(7)</script>", text_latex="$x$"),
        new_output("display_data", data={"image/svg+xml": "<svg onload='alert(8)'/>"}),
        new_output("error", ename="<b>", evalue='#read("page.typ")', traceback=[]),
        printed("\x1b]0;title\x07" + HOSTILE),
        printed("y_" * 60_000),
        printed("/" * 60_000),
        printed("\ud800"),
        *[shown(text_plain="o")] * 1500,
    ]
    pictures = {
        "so.png": {"text/html": refresh.decode()},
        '")#read("page.typ': {"image/png": picture()},
    }
    tags = ["exercise", '")#read("page.typ', 'solution"]']
    executed.cells[:0] = [
        new_markdown_cell(TITLE + "> " * 99),
        new_markdown_cell(HOSTILE, attachments=pictures, metadata={"tags": tags}),
        new_code_cell("show()\n```\n#read('page.typ')", outputs=outputs, metadata={"tags": tags}),
    ]


def results_with_it(folder: Path, reference: Path, *stems: str) -> Path:
    """A results folder of the planted lab, and of the reference's labs called `stems`."""
    notebooks = folder / "notebooks"
    notebooks.mkdir(parents=True)
    for stem in stems:
        shutil.copy(reference / f"{stem}.ipynb", notebooks)
    nbformat.write(planted(), notebooks / f"{STEM}.ipynb")
    machine = {"cpu": "Intel(R) Xeon(R) Processor", "cores": 2, "ram_gb": 24.9, "os": "Debian 12"}
    stamp = {"schema": 1, "lab": "42", "commit": "c0ffee123456", "at": "2026-11-20T10:20:30+00:00"}
    run = {"run": "one", "status": "ok", "machine": machine, "versions": {"numpy": "2.5.2"}}
    stale = run | {"commit": "0ld", "machine": machine | {"cpu": "Another"}}
    done = {"status": "done", "seconds": 12.3, "parameters": {"scale": "tiny", "weights": "random"}}
    lines = [json.dumps(stamp | record) for record in (stale, run, done)]
    records = (reference / "results.jsonl").read_text(encoding="utf-8")
    (folder / "results.jsonl").write_text(records + "\n".join(lines) + "\n", encoding="utf-8")
    return folder
