"""The handouts of a planted lab and a real one: what is in them, and what must not be."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import numpy as np
import planted_lab
import pypdfium2
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from planted_lab import SECRET, STEM

from labutils.course import solutions
from labutils.results.records import REFERENCE
from labutils.tools import handouts
from labutils.tools.handouts import editions
from labutils.tools.run.arguments import NOTEBOOKS

LABS = [STEM, "01_lora_math"]
RECORDED = {path.name: path for path in sorted(REFERENCE.parents[1].glob("*/*.ipynb"))}
QUESTIONS = ("**Question.**", "**Your prediction", "**Prediction")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "found"
    found = planted_lab.results_with_it(folder, REFERENCE.parent, LABS[1])
    out = tmp_path_factory.mktemp("handouts")
    assert handouts.main(found, out) == handouts.MADE
    return out


def words_of(file: Path) -> str:
    """What a reader finds in a file, in one line."""
    if file.suffix == ".pdf":
        pages = pypdfium2.PdfDocument(file)
        text = " ".join(page.get_textpage().get_text_range() for page in pages)
    else:
        text = file.read_text(encoding="utf-8")
    return " ".join(text.split())


def numbers_in(text: str) -> set[float]:
    """Those of three digits or more, zeros in front apart."""
    words = (word.replace(",", "") for word in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text))
    return {float(word) for word in words if len(word.replace(".", "").lstrip("0")) >= 3}


def changed(folder: Path, change) -> Path:
    """A results folder of the planted lab, whose notebook `change` was applied to."""
    found = planted_lab.results_with_it(folder / "found", REFERENCE.parent)
    file = found / "notebooks" / f"{STEM}.ipynb"
    notebook = nbformat.read(file, as_version=4)
    change(notebook)
    file.write_text(json.dumps(notebook))
    return found


@pytest.mark.parametrize("edition", editions.EDITIONS)
def test_each_edition_has_all_files_and_a_page_that_leads_to_them(made, edition):
    ours = {f"{lab}.{kind}" for lab in LABS for kind in ("html", "pdf", "ipynb")} | {"course.pdf"}
    assert {path.name for path in (made / edition).iterdir()} == ours | {"index.html"}
    text = (made / edition / "index.html").read_text()
    assert set(re.findall(r'href="([^"]+\.\w+)"', text)) == ours


def test_solutions_are_in_the_instructors_files_only_and_nothing_tells_of_the_machine(made):
    for name in (f"{STEM}.html", f"{STEM}.ipynb", f"{STEM}.pdf", "course.pdf"):
        sheet, student, instructor = (words_of(made / it / name) for it in editions.EDITIONS)
        assert SECRET in instructor and SECRET not in student + sheet
        for words in (sheet, student, instructor):
            assert not [trace for trace in planted_lab.TRACES if trace in words], name
    assert "again" not in words_of(made / "student" / f"{STEM}.ipynb").partition("again')")[2]


def test_the_instructors_edition_has_the_solutions_that_learners_do_not_see(made):
    answer = solutions.solutions_of("01")[0].splitlines()[1]
    found = [answer in words_of(made / it / f"{LABS[1]}.ipynb") for it in editions.EDITIONS]
    assert found == [False, False, True]
    value = "Right: 15335424. That is 0.19 % of the model."
    found = [value in words_of(made / it / f"{LABS[1]}.pdf") for it in editions.EDITIONS]
    assert found == [False, False, True]
    one = new_notebook(cells=[new_code_cell("x = None", metadata={"tags": ["exercise"]})])
    with pytest.raises(ValueError, match="not as many exercises"):
        solutions.with_solutions(one, "01")


def numbers_told(executed: nbformat.NotebookNode, name: str) -> set[float]:
    """Numbers that our GPU printed in the lab `name`, and that its worksheet has elsewhere than in
    the lab's aims, questions, predictions and exercises."""
    recorded = nbformat.read(RECORDED[name], as_version=4)
    outputs = [output for cell in recorded.cells for output in cell.get("outputs", [])]
    data = [out.get("data", {}) for out in outputs]
    printed = [out.get("text", "") for out in outputs]
    printed += [text for kinds in data for kind, text in kinds.items() if "text/" in kind]
    before, _, exercises = "\n\n".join(c.source for c in executed.cells).partition("## Exercises")
    asked = [part for part in before.split("\n\n") if part.startswith(QUESTIONS)]
    sheet = editions.edition_of(executed, editions.WORKSHEET)
    told = numbers_in(" ".join(cell.source for cell in sheet.cells)) & numbers_in(" ".join(printed))
    return told - numbers_in(" ".join([executed.cells[0].source, *asked, exercises]))


@pytest.mark.parametrize(
    "path",
    [*RECORDED.values(), *sorted(NOTEBOOKS.glob("[01]*.ipynb"))[6:]],
    ids=lambda path: path.stem,
)
def test_a_worksheet_asks_everything_and_answers_nothing(path):
    executed = nbformat.read(path, as_version=4)
    sheet = editions.edition_of(executed, editions.WORKSHEET)
    text = "\n".join(cell.source for cell in sheet.cells)
    solved = solutions.with_solutions(executed, path.stem[:2])
    answers = [c.source for c in solved.cells if "solution" in c.metadata.get("tags", [])]
    given = "\n".join(cell.source for cell in executed.cells)
    lines = {line.strip() for words in answers for line in words.splitlines()}
    assert not [line for line in lines if len(line) > 20 and line in text and line not in given]
    if path.name in RECORDED:
        assert not numbers_told(executed, path.name)
    assert not [cell for cell in sheet.cells if cell.get("outputs")]
    tags = [tag for cell in sheet.cells for tag in cell.metadata.get("tags", [])]
    assert tags.count("exercise") == len(answers) and text.count("**Question.**") >= 5
    assert tags.count("prediction") == given.count("lab.predict(")


def test_a_worksheet_with_every_paragraph_would_be_found_to_answer(monkeypatch):
    monkeypatch.setattr(editions, "ASKING", ("",))
    (path,) = REFERENCE.parent.glob("06_*.ipynb")
    assert len(numbers_told(nbformat.read(path, as_version=4), path.name)) > 1


@pytest.mark.parametrize("kind", ["html", "pdf"])
def test_a_page_has_its_facts_glyphs_and_last_words(made, kind):
    words = words_of(made / "student" / f"{STEM}.{kind}")
    for word in ("2026-11-20 10:20", "c0ffee123456", "numpy 2.5.2", "2 cores", "scale tiny"):
        assert word in words  # of results.jsonl
    assert "Another" not in words and "scale: str" not in words
    assert "448. That is" in words
    assert "についての紹介" in words and "and so on" in words  # the table's last word


def test_a_figure_is_in_the_pdf(made):  # tests/browser/ sees those of HTML
    page = (made / "student" / f"{STEM}.html").read_text()
    assert '<div class="part prediction">' in page
    kinds = [pypdfium2.raw.FPDF_PAGEOBJ_IMAGE]
    pages = pypdfium2.PdfDocument(made / "student" / f"{STEM}.pdf")
    assert sum(len(list(page.get_objects(filter=kinds))) for page in pages) == 1


class Loading(HTMLParser):
    """What a page would load, and where its links lead."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values, self.tags = {"src": [], "href": []}, set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            self.values.setdefault(name, []).append(value)


def test_strangers_markdown_stays_text_and_odd_records_do_no_harm(tmp_path, capsys):
    found, out = changed(tmp_path, planted_lab.make_hostile), tmp_path / "out"
    stamp = {"schema": 2, "lab": "42", "commit": "c0ffee123456"}
    odd = [
        stamp | {"run": "odd", "machine": {"cpu": planted_lab.HOSTILE, "cores": "many"}},
        stamp | {"at": "yesterday", "status": "done"},
        stamp | {"lab": "43", "at": "2026-11-20T10:20:30+00:00", "status": "done"},
    ]
    name = "x" * 300 + ".png"  # that no file can have
    pictures = {name: {"image/png": planted_lab.picture()}}
    cell = new_markdown_cell(f"# x\n![x](attachment:{name})", attachments=pictures)
    nbformat.write(new_notebook(cells=[cell]), found / "notebooks" / "43_long_name.ipynb")
    with (found / "results.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, odd)) + "\n")
    (out / "worksheet" / "course.pdf").mkdir(parents=True)  # what can't be made costs nothing else
    assert handouts.main(found, out) == handouts.A_LAB_LEFT_OUT
    said = capsys.readouterr().out
    assert said.count("Left out") == 2 and "43_long" in said and "course.pdf" in said
    assert not (out / "instructor" / "43_long_name.html").exists()  # not tried again
    kept = nbformat.read(out / "student" / f"{STEM}.ipynb", as_version=4)
    assert len(kept.cells[2].outputs) <= editions.MOST_OUTPUTS
    page = out / "student" / f"{STEM}.html"
    harmless = ("#", "https", "data:", "4", "course")
    for html in (page, page.with_name("index.html")):
        loading = Loading(html.read_text())
        assert "43_long_name.ipynb" not in loading.values["href"]
        assert not {"script", "iframe"} & loading.tags
        assert all(value.startswith("data:image/png;base64") for value in loading.values["src"])
        assert not [link for link in loading.values["href"] if not link.startswith(harmless)]
        assert not [name for name in loading.values if name.startswith("on")]
        assert len(loading.values["http-equiv"]) == 1
        assert not [style for style in loading.values.get("style", []) if "url" in style]
    for file in (page, page.with_suffix(".pdf")):
        words = words_of(file)
        assert 'read("page.typ")' in words or "read(“page.typ”)" in words or "&quot;page" in words
        assert "running-head" not in words and "root:x:" not in words  # of page.typ, /etc/passwd


def test_a_notebook_that_is_torn_or_unfinished_or_of_another_run_is_left_out(tmp_path, capsys):
    def stopped(notebook):
        notebook.metadata.labutils = {"status": "stopped"}

    def later(notebook):
        times = dict.fromkeys(("start_time", "end_time"), "2026-11-22T10:00:00+00:00")
        notebook.metadata.papermill = times

    for place, change in enumerate((stopped, later)):
        (tmp_path / str(place)).mkdir()
        found = changed(tmp_path / str(place), change)
        assert handouts.main(found, tmp_path / "out") == handouts.WRONG_USAGE
        assert "Left out: 42" in capsys.readouterr().out
    (found / "notebooks" / "43_torn.ipynb").write_text('{"cells": [')
    assert handouts.main(found, tmp_path / "out", ["43"]) == handouts.WRONG_USAGE
    assert handouts.main(found, tmp_path / "out", ["44"]) == handouts.WRONG_USAGE
    assert "42 planted lab" in capsys.readouterr().err
    files = [found / "notebooks" / f"{stem}.ipynb" for stem in ("43_torn", STEM)]
    assert list(handouts.pages_of(found, files)) == ["43_torn.ipynb"]
    assert "Planted" in (found / "notebooks" / f"{STEM}.html").read_text()


@pytest.mark.parametrize("edition", editions.EDITIONS)
def test_no_page_is_blank_and_nothing_runs_over_the_edge(made, edition):
    for file in (made / edition).glob("[0-9]*.pdf"):
        for page in pypdfium2.PdfDocument(file):
            ink = page.render(scale=1, grayscale=True).to_numpy().squeeze() < 200
            assert ink.mean() > 0.001  # the head and foot of a page alone: 0.0006
            columns = np.flatnonzero(ink.any(axis=0))
            margin = 45 * ink.shape[1] / 595  # page.typ's are 51 points of 595
            assert margin < columns[0] and columns[-1] < ink.shape[1] - margin, file
