"""A lab as an HTML page and as a PDF: the notebook as CommonMark, read by pandoc once, and written
in both forms.

Pandoc turns the formulas into MathML and into Typst's own. Between reading and writing, the tree is
fitted to each form: figures are embedded, links that would lead nowhere become text. Nothing is
fetched: pandoc runs in its sandbox, Typst with the fonts that come with it, matplotlib's and one
for Japanese, and the page forbids its browser to load anything.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from labutils.tools.handouts.facts import Facts
from labutils.tools.pages import COURSE, TEMPLATE

HERE = Path(__file__).parent
READ = "commonmark+pipe_tables+tex_math_dollars+fenced_divs+strikeout+footnotes+gfm_auto_identifiers+autolink_bare_uris"
EDITION_TITLES = {
    "student": "Student edition",
    "instructor": "Instructor’s edition, with solutions",
    "executed": "As it was executed",
}
DOTS_PER_INCH = 120  # of the course's figures, as course.mplstyle saves them
TEXT_WIDTH = 6.85  # inches between the margins of page.typ
PAGE_LETTERS = 115  # that a row of a table has room for, in page.typ's size
LETTERS_TOGETHER = 900  # of a table that is small enough to stay on one page
SUFFIX = {"image/png": ".png", "image/svg+xml": ".svg", "image/jpeg": ".jpg"}
UNANSWERED = re.compile(r"^No prediction of \*(.+)\* yet\.")
"""What `Lab.predict` shows where the learner gave no number."""

_NUMBER = re.compile(r"[-–+±~≈<>]?\s?[\d.,]+(e[+-]?\d+)?\s?(%|x|times|ms|s|GB|MB|kB|µs)?")
_NUMBER_OR_NONE = re.compile(rf"{_NUMBER.pattern}|[-–]?|nan|inf")
_BREAKS = re.compile(r"\s|(?<=[/_.=:])(?=[A-Za-z])|(?<=\w-)(?=[A-Za-z])")
"""Where page.typ lets a line end inside a table's cell."""

Node = dict[str, Any]


class ConversionError(OSError):
    """Pandoc or Typst could not do it; the message is theirs."""


@dataclass(frozen=True)
class Chapter:
    """One edition of one lab, read by pandoc: its tree, and the chapter in Typst's words, "" where
    no PDF is made.

    `stem`: the files' name; `pictures`: file name -> data URI of the figures in the tree.
    """

    stem: str
    title: str
    edition: str
    facts: Facts
    tree: Node
    pictures: dict[str, str]
    typst: str = ""


def workshop(folder: Path) -> Path:
    """A folder for an edition's pictures and chapters, with what Typst reads beside them."""
    folder.mkdir(parents=True)
    (folder / "fonts").mkdir()
    for part in ("page.typ", "code.tmTheme"):
        shutil.copy(HERE / part, folder)
    for font in _fonts():
        shutil.copy(font, folder / "fonts")
    return folder


def read(notebook: NotebookNode, stem: str, facts: Facts, edition: str) -> Chapter:
    """What an HTML page takes."""
    text, pictures = as_commonmark(notebook, stem, facts)
    tree = json.loads(pandoc(text, READ, "json"))
    return Chapter(stem, _title(tree) or stem, edition, facts, tree, pictures)


def chapter(
    notebook: NotebookNode, stem: str, facts: Facts, edition: str, scratch: Path
) -> Chapter:
    """Read the notebook, and write its chapter in Typst and its pictures into `scratch`, where
    Typst finds them.
    """
    found = read(notebook, stem, facts, edition)
    for name, uri in found.pictures.items():
        (scratch / name).write_bytes(base64.b64decode(uri.partition(",")[2]))
    fitted = json.dumps(_walked(found.tree, lambda node: _for_typst(node, found.pictures)))
    typst = pandoc(fitted, "json", "typst", "--syntax-highlighting=idiomatic")
    typst = typst.replace(
        "align(center)[#table(", "align(left)[#table("
    )  # as pandoc sets every table
    return replace(found, typst=typst)


def page(chapter: Chapter, target: Path, pages: Collection[str] = ()) -> Path:
    """The chapter as one HTML file that loads nothing. `pages`: the labs' notebooks that have a
    page beside it.
    """
    pictures = chapter.pictures
    tree = json.dumps(_walked(chapter.tree, lambda node: _for_html(node, pictures, pages)))
    words = {
        "title": f"{chapter.title} · {COURSE}",
        "edition": EDITION_TITLES[chapter.edition],
        "course": COURSE,
    }
    given = [f"--variable={name}:{html.escape(word)}" for name, word in words.items()]
    options = [
        "--standalone",
        f"--template={TEMPLATE}",
        "--mathml",
        "--toc",
        "--toc-depth=2",
        *given,
    ]
    text = pandoc(tree, "json", "html5", *options)
    text = re.sub(r' xmlns="http://www\.w3\.org/[^"]*"', "", text)  # HTML5 needs no such addresses
    text = re.sub(r'(?<= src=")[^"]+', lambda name: pictures[name[0]], text)
    file = target / f"{chapter.stem}.html"
    file.write_text(text, encoding="utf-8")
    return file


def pdf(chapter: Chapter, scratch: Path, target: Path) -> Path:
    """The chapter as a PDF; `scratch` holds its pictures."""
    words = _words(title=chapter.title, edition=EDITION_TITLES[chapter.edition])
    text = f"#show: handout.with({words})\n\n{chapter.typst}"
    return _compiled(text, scratch, target / f"{chapter.stem}.pdf", chapter.facts)


def course(chapters: Sequence[Chapter], edition: str, scratch: Path, target: Path) -> Path:
    """All chapters as one PDF, behind a title page that tells of every lab's run, and a table of
    contents.
    """
    facts = [chapter.facts for chapter in chapters]
    machines = list(dict.fromkeys(map(_measured_on, facts)))
    labs = [
        _tuple(
            chapter.title,
            fact.date,
            fact.scale,
            str(1 + machines.index(_measured_on(fact))),
            fact.commit,
        )
        for chapter, fact in zip(chapters, facts, strict=True)
    ]
    words = _words(title=COURSE, edition=EDITION_TITLES[edition])
    lists = f"labs: {_array(labs)}, machines: {_array(_tuple(*machine) for machine in machines)}"
    opening = f"#show: handout.with({words}, whole: true)\n#cover({words}, {lists})"
    newest = max(facts, key=lambda fact: fact.moment)
    return _compiled(
        "\n\n".join([opening, *(c.typst for c in chapters)]), scratch, target / "course.pdf", newest
    )


def _measured_on(facts: Facts) -> tuple[str, str]:
    """(machine, versions) in words."""
    return "; ".join(facts.machines), facts.versions_text


# The notebook in CommonMark


def as_commonmark(notebook: NotebookNode, stem: str, facts: Facts) -> tuple[str, dict[str, str]]:
    """(the notebook as text with fenced divisions for pandoc, file name -> data URI of its
    pictures).
    """
    pictures: dict[str, str] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(_attached(cell, stem, pictures))
        elif cell.cell_type == "code":
            tags = cell.metadata.get("tags", [])
            outputs = [_output(output, stem, pictures) for output in cell.outputs]
            kind = "exercise-input" if "exercise" in tags else "input"
            told = _division(kind, _fenced(cell.source, "python")) if cell.source.strip() else ""
            whole = "\n\n".join(filter(None, [told, *outputs]))
            parts.append(_division("solution", whole) if "solution" in tags else whole)
    if parts:
        parts[0] = _with_facts(parts[0], facts)
    return "\n\n".join(parts) + "\n", pictures


def _with_facts(opening: str, facts: Facts) -> str:
    """The first cell, with the box of facts below its title."""
    title, _, rest = opening.partition("\n")
    if not title.startswith("# "):
        title, rest = "", opening
    rows = [f"| **{name}** | {_plain(words)} |" for name, words in facts.rows() if words]
    return "\n\n".join(
        [title, _division("facts", "\n".join(["|   |   |", "|---|---|", *rows])), rest]
    )


def _attached(cell: NotebookNode, stem: str, pictures: dict[str, str]) -> str:
    """A Markdown cell's text, its attachments among the pictures."""
    text = cell.source
    for name, data in cell.get("attachments", {}).items():
        kind, encoded = next(iter(data.items()))
        text = text.replace(f"attachment:{name}", _picture(kind, encoded, stem, pictures))
    return text


def _output(output: NotebookNode, stem: str, pictures: dict[str, str]) -> str:
    if output.output_type == "stream":
        return _division("output", _fenced(output.text.rstrip("\n"), ""))
    ((kind, told),) = output.data.items()
    if kind in SUFFIX:
        name = _picture(kind, told, stem, pictures)
        return _division("figure", f"![Figure {stem[:2]}.{len(pictures)}]({name})")
    if kind == "text/plain":
        return _division("output", _fenced(told, ""))
    if unanswered := UNANSWERED.match(told):
        return _division("prediction", f"My prediction of *{unanswered[1]}*:")
    return _division("output", told)


def _picture(kind: str, told: str, stem: str, pictures: dict[str, str]) -> str:
    """Keep a picture; the name of its file."""
    name = f"{stem}-{len(pictures) + 1}{SUFFIX.get(kind, '.png')}"
    encoded = (
        base64.b64encode(told.encode()).decode()
        if kind == "image/svg+xml"
        else "".join(told.split())
    )
    pictures[name] = f"data:{kind};base64,{encoded}"
    return name


def _division(kind: str, text: str) -> str:
    fence = ":" * (max([2, *map(len, re.findall(r"^:{3,}", text, re.M))]) + 1)
    return f"{fence} {kind}\n{text}\n\n{fence}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * (max([2, *map(len, re.findall(r"`{3,}", text))]) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _plain(words: str) -> str:
    """Words in a table's cell that are no markup."""
    return re.sub(r"([\\`*_|$<\[\]~])", r"\\\1", words)


# The tree, fitted to a form


def _walked(node: Any, fit: Callable[[Node], list[Node] | None]) -> Any:
    """The tree with each node replaced by what `fit` makes of it, from the leaves up; None: as it
    is.
    """
    if isinstance(node, list):
        fitted = []
        for item in node:
            item = _walked(item, fit)
            other = fit(item) if isinstance(item, dict) and "t" in item else None
            fitted += [item] if other is None else other
        return fitted
    return (
        {key: _walked(value, fit) for key, value in node.items()}
        if isinstance(node, dict)
        else node
    )


def _for_both(node: Node) -> list[Node] | None:
    """HTML in Markdown is shown as it was typed: an error message names `<module>`, and no lab has
    any else.
    """
    if node["t"] == "RawInline":
        return [_text(node["c"][1])]
    if node["t"] == "RawBlock":
        return [{"t": "Para", "c": [_text(node["c"][1])]}]
    if node["t"] == "Table":
        return [_aligned(node)]
    return None


def _for_html(node: Node, pictures: dict[str, str], pages: Collection[str]) -> list[Node] | None:
    if node["t"] == "Link":
        return _link(node, pages)
    if node["t"] == "Image":
        _, alt, (target, _) = node["c"]
        return (
            [{"t": "Image", "c": [["", [], []], alt, [target, ""]]}] if target in pictures else alt
        )
    return _for_both(node)


def _for_typst(node: Node, pictures: dict[str, str]) -> list[Node] | None:
    kind = node["t"]
    if kind == "Link":
        return _link(node, ())
    if kind == "Image":
        _, alt, (target, _) = node["c"]
        return (
            [_raw("RawInline", _typst_image(target, _said(alt), pictures[target]))]
            if target in pictures
            else alt
        )
    if kind == "Header":
        level, _, words = node["c"]
        return [
            {"t": "Header", "c": [level, ["", [], []], words]}
        ]  # labs have sections of the same name
    if kind == "Div":
        (_, classes, _), blocks = node["c"]
        return [_raw("RawBlock", f"#{classes[0]}-part["), *blocks, _raw("RawBlock", "]")]
    if kind == "Table" and sum(len(cell) for row in _rows(node) for cell in row) < LETTERS_TOGETHER:
        return [_raw("RawBlock", "#together["), _aligned(node), _raw("RawBlock", "]")]
    return _for_both(node)


def _typst_image(name: str, alt: str, uri: str) -> str:
    """A figure at the size it was drawn, or as wide as the text."""
    inches = _width(uri) / DOTS_PER_INCH
    return f'#image("{name}", alt: {json.dumps(alt, ensure_ascii=False)}, width: {min(1, inches / TEXT_WIDTH):.1%})'


def _width(uri: str) -> int:
    """Pixels across a PNG, which its header says; other pictures take the text's width."""
    if not uri.startswith("data:image/png"):
        return 10_000
    return int.from_bytes(base64.b64decode(uri.partition(",")[2][:64])[16:20])


def _link(node: Node, pages: Collection[str]) -> list[Node] | None:
    """Addresses stay links that are followed on a click; another lab's notebook is its page; the
    rest is text.

    The rest includes a notebook under `reference/`, which is that lab as another machine ran it.
    """
    _, words, (target, _) = node["c"]
    file, _, _ = target.partition("#")
    if Path(file).name in pages and "reference" not in Path(file).parts:
        return [
            {"t": "Link", "c": [["", [], []], words, [Path(file).with_suffix(".html").name, ""]]}
        ]
    return None if re.match(r"https?://", target) else words


def _aligned(table: Node) -> Node:
    """The table with its columns of numbers set to the right, and shares of the page for them where
    it fills one.
    """
    attributes, caption, columns, head, bodies, foot = table["c"]
    rows = _rows(table)
    words = [[row[place] for row in rows if place < len(row)] for place in range(len(columns))]
    shares = _shares(words)
    for place, column in enumerate(columns):
        told = words[place][len(head[1]) :]
        numbers = (
            place > 0
            and any(map(_NUMBER.fullmatch, told))
            and all(map(_NUMBER_OR_NONE.fullmatch, told))
        )
        column[0] = {"t": "AlignRight" if numbers else "AlignLeft"}
        column[1] = {"t": "ColWidth", "c": shares[place]} if shares else column[1]
    return {"t": "Table", "c": [attributes, caption, columns, head, bodies, foot]}


def _rows(table: Node) -> list[list[str]]:
    """The words of a table's cells, its head first."""
    _, _, _, head, bodies, _ = table["c"]
    return [
        [_said(cell[4]).strip() for cell in row[1]]
        for row in [*head[1], *(r for body in bodies for r in body[3])]
    ]


def _shares(columns: Sequence[Sequence[str]]) -> list[float]:
    """Shares of the page's width for columns of words; [] where a row fits a line and the columns
    may find their own.

    Each gets its longest word, and of what is left the more, the more its cells say on average, up
    to its longest one.
    """
    natural = [max(map(len, column)) + 2 for column in columns]
    if sum(natural) <= PAGE_LETTERS:
        return []
    least = [
        1.15 * max(len(word) for cell in column for word in _BREAKS.split(cell)) + 2
        for column in columns
    ]
    volume = [sum(map(len, column)) for column in columns]
    left = max(0.0, PAGE_LETTERS - sum(least)) / sum(volume)
    widths = [
        min(max(long, low), low + left * much)
        for long, low, much in zip(natural, least, volume, strict=True)
    ]
    return [round(width / sum(widths), 4) for width in widths]


def _said(node: Any) -> str:
    """The words of a part of the tree."""
    if isinstance(node, list):
        return "".join(map(_said, node))
    if not isinstance(node, dict):
        return ""
    content = node.get("c")
    if node.get("t") in ("Space", "SoftBreak", "LineBreak"):
        return " "
    if node.get("t") == "Str":
        return content
    if node.get("t") in ("Code", "Math", "RawInline"):
        return content[1]
    return _said(content)


def _title(tree: Node) -> str:
    heads = (block["c"] for block in tree["blocks"] if block["t"] == "Header")
    return next((_said(words) for level, _, words in heads if level == 1), "")


def _text(words: str) -> Node:
    return {"t": "Str", "c": words}


def _raw(kind: str, words: str) -> Node:
    return {"t": kind, "c": ["typst", words]}


# The programs


def pandoc(text: str, source: str, target: str, *options: str) -> str:
    """`text` from one of pandoc's forms to another. Raises `ConversionError`, for a warning too:
    nothing is lost.
    """
    import pypandoc

    command = [
        pypandoc.get_pandoc_path(),
        f"--from={source}",
        f"--to={target}",
        "--wrap=none",
        "--sandbox",
        *options,
    ]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode or done.stderr.strip():
        raise ConversionError(f"pandoc could not make {target} of it: {done.stderr.strip()}")
    return done.stdout


def _fonts() -> list[Path]:
    """The fonts that the PDFs use beside Typst's own: the same on every machine.

    Not all of matplotlib's: one of them has a box for whatever the others lack.
    """
    sought = (
        ("matplotlib", "mpl-data/fonts/ttf/DejaVuSans*.ttf"),
        ("matplotlib_fontja", "fonts/ipaexg.ttf"),
    )
    places = (
        (Path(importlib.util.find_spec(package).origin).parent, pattern)
        for package, pattern in sought
    )
    return [file for place, pattern in places for file in place.glob(pattern)]


def _compiled(text: str, scratch: Path, file: Path, facts: Facts) -> Path:
    """Typst's `text` as a PDF. Raises `ConversionError` for a warning too: one may be a font that
    is missing.
    """
    import typst

    source = scratch / f"{file.stem}.typ"
    source.write_text(f'#import "page.typ": *\n{text}', encoding="utf-8")
    try:
        data, warnings = typst.compile_with_warnings(
            source,
            root=scratch,
            font_paths=[scratch / "fonts"],
            ignore_system_fonts=True,
            format="pdf",
            timestamp=int(facts.moment.timestamp()),
        )
    except typst.TypstError as error:
        raise ConversionError(f"Typst could not set {file.name}: {error}") from None
    if warnings:
        raise ConversionError(
            f"Typst, setting {file.name}: {'; '.join(str(w.message) for w in warnings)}"
        )
    file.write_bytes(data)
    return file


def _words(**words: str) -> str:
    return ", ".join(f"{name}: {_string(word)}" for name, word in words.items())


def _tuple(*words: str) -> str:
    return f"({', '.join(map(_string, words))})"


def _array(parts: Iterable[str]) -> str:
    return f"({''.join(part + ', ' for part in parts)})"


def _string(word: str) -> str:
    """A string in Typst's words."""
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
