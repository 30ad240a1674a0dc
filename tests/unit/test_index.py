"""The page of a results folder: all that was executed is reached, nothing is fetched, and odd files
do no harm.
"""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from claim_runs import article_runs
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_markdown_cell, new_notebook

from labutils.results.judges import VERDICTS
from labutils.results.records import Results
from labutils.tools import pages
from labutils.tools.run import Lab, Outcome, index


class Read(HTMLParser):
    """`links`, `rows` of words, and all `words`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.words = ""
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value for name, value in attributes if (tag, name) == ("a", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def executed(folder: Path, stem: str, status: str = "", title: str = "Lab · A title") -> Path:
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    notebook = new_notebook(cells=[new_markdown_cell(f"# {title}\n\nWords.")])
    if status:
        notebook.metadata["labutils"] = {"status": status, "seconds": 12.3}
    path = folder / "notebooks" / f"{stem}.ipynb"
    nbformat.write(notebook, path)
    return path


def page_of(folder: Path, *outcomes: Outcome, make_pages: index.PageMaker | None = None) -> Read:
    said: list[str] = []
    file = index.write(folder, outcomes, make_pages, said.append)
    assert file == folder / "index.html"
    page = Read(file.read_text(encoding="utf-8"))
    page.said = said
    return page


def cells_of(page: Read) -> dict[str, dict[str, str]]:
    head, *rows = page.rows
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_each_executed_notebook_has_a_line_with_its_verdicts(tmp_path):
    kept = Results(tmp_path)
    for run in article_runs().values():
        kept.append(run)
    kept.done("03", parameters={"scale": "full"}, seconds=1.0)
    executed(tmp_path, "03_sweep", "done", "Lab 03 · Sweep")
    kept.done("05", parameters={"scale": "full"}, seconds=81.0)
    executed(tmp_path, "04_compile", "died", "Lab 04 · Compile")
    executed(tmp_path, "05_fp8", title="Lab 05 · FP8")  # by papermill itself
    found = cells_of(page_of(tmp_path))
    assert list(found) == ["Lab 03 · Sweep", "Lab 04 · Compile", "Lab 05 · FP8"]
    assert [found["Lab 05 · FP8"][what] for what in ("status", "seconds")] == ["done", "81"]
    third = found["Lab 03 · Sweep"]
    assert (third["status"], third["seconds"], third["scale"]) == ("done", "12", "full")
    assert int(third["confirmed"]) > 5 and third["refuted"] == "–"
    assert found["Lab 04 · Compile"]["status"] == "died"
    assert set(VERDICTS) <= third.keys()


def test_pages_are_made_where_they_are_missing_or_old_and_linked(tmp_path):
    first, second = executed(tmp_path, "03_sweep"), executed(tmp_path, "04_compile")
    asked: list[list[str]] = []

    def make_pages(folder: Path, paths: list[Path]) -> None:
        asked.append([path.stem for path in paths])
        first.with_suffix(".html").write_text("page")

    page = page_of(tmp_path, make_pages=make_pages)
    assert {
        "notebooks/03_sweep.html",
        "notebooks/03_sweep.ipynb",
        "notebooks/04_compile.ipynb",
    } < set(page.links)
    assert all((tmp_path / link).exists() for link in page.links if link != "results.jsonl")
    page_of(tmp_path, make_pages=make_pages)
    executed(tmp_path, "03_sweep", "done")
    second.with_suffix(".html").write_text("page")
    page_of(tmp_path, make_pages=make_pages)
    assert asked[:2] == [["03_sweep", "04_compile"], ["04_compile"]]


@pytest.mark.parametrize(
    "error", [OSError("pandoc could not"), ImportError("no pypandoc"), KeyError("cells")]
)
def test_without_pages_the_notebooks_are_linked_and_it_is_said(tmp_path, error):
    def make_pages(*_: object) -> None:
        raise error

    executed(tmp_path, "03_sweep", "done")
    page = page_of(tmp_path, make_pages=make_pages)
    assert page.said == [
        f"No HTML pages of the executed notebooks: {type(error).__name__}: {error}"
    ]
    assert "notebooks/03_sweep.ipynb" in page.links


def test_why_there_are_no_pages_is_one_line(tmp_path):
    def make_pages(*_: object) -> None:
        raise RuntimeError("two\nlines")

    executed(tmp_path, "03_sweep", "done")
    page = page_of(tmp_path, make_pages=make_pages)
    assert page.said == ["No HTML pages of the executed notebooks: RuntimeError: two lines"]


def test_a_lab_that_kept_runs_after_it_was_done_is_not_done(tmp_path):
    kept = Results(tmp_path)
    kept.done("03", parameters={"scale": "tiny"}, seconds=9.0)
    kept.append(next(run for run in article_runs().values() if run.lab == "03"))
    executed(tmp_path, "03_sweep")
    [found] = cells_of(page_of(tmp_path)).values()
    assert (found["status"], found["seconds"]) == ("not done", "–")


def test_what_went_wrong_is_told_and_so_is_company(tmp_path):
    kept = Results(tmp_path)
    for number, run in enumerate(run for run in article_runs().values() if run.lab == "04"):
        run.beside = number % 3
        kept.append(run)
    executed(tmp_path, "04_compile", "failed")
    lab = Lab("04", Path("04_compile.ipynb"), {})
    page = page_of(tmp_path, Outcome(lab, "failed", 3.0, "Lab 04 failed: <module> & all"))
    assert "Lab 04 failed: <module> & all" in page.words
    assert "Measured beside up to 2 other labs" in page.words


@given(st.text(), st.text(st.characters(codec="utf-8")))
def test_words_and_paths_of_any_kind_are_shown_and_not_obeyed(words, path):
    text = pages.filled(
        "A title", words, [(words, path)], pages.table([html.escape(words)], [["1"]])
    )
    page = Read(text)
    assert [unquote(link) for link in page.links] == [path]
    assert (
        page.tags == Read(pages.filled("A title", "", [("", "")], pages.table([""], [["1"]]))).tags
    )
    assert not re.search(
        r"\$(title|course|edition|toc|body)\$", text.replace(html.escape(words), "")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"cells": [',
        '{"metadata": {"labutils": "x"}}',
        '{"metadata": 3, "cells": 4}',
        '{"cells": [5]}',
    ],
)
def test_a_notebook_that_is_none_is_still_listed(tmp_path, text):
    executed(tmp_path, "03_sweep", "done")
    (tmp_path / "notebooks" / "05_odd#1?.ipynb").write_text(text)
    found = cells_of(page_of(tmp_path))
    assert found["05_odd#1?"]["status"] == "not done"


def test_odd_records_do_no_harm(tmp_path):
    executed(tmp_path, "03_sweep", "done")
    odd = [
        {"lab": "03", "run": "x", "machine": {"gpu": 3}, "beside": "many"},
        {"lab": "03", "run": "y", "scale": 4},
        [1],
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, odd)))
    assert "Lab · A title" in cells_of(page_of(tmp_path))


def test_where_nothing_was_executed_there_is_no_page(tmp_path):
    (tmp_path / "notebooks").mkdir()
    assert index.write(tmp_path, [], None, print) is None


def test_a_page_that_can_not_be_written_is_said(tmp_path):
    executed(tmp_path, "03_sweep")
    (tmp_path / "index.html").mkdir()
    said: list[str] = []
    assert index.write(tmp_path, [], None, said.append) is None
    assert "index.html: " in said[0]
