"""What a person asked for: labs, parameters, scale and folder, all checked before anything runs."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from labutils.course import parameters
from labutils.profiling import machine
from labutils.results import records

NOTEBOOKS = records.REPOSITORY / "notebooks"
OWN_OPTION = {
    "scale": "--scale",
    "weights": "--weights",
    "data": "--data",
    "results_dir": "--results",
}


class UsageError(Exception):
    """The labs can't be run as asked; the message says why, and what to type."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: `kind` is its type's name, `help` its comment."""

    name: str
    kind: str
    default: Any
    help: str


@dataclass(frozen=True)
class Lab:
    """A notebook. `number`: "03", or the file's stem where the name has no number. `code`: a digest
    of its code cells."""

    number: str
    path: Path
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    code: str = ""

    @property
    def title(self) -> str:
        return self.path.stem.replace("_", " ")


@dataclass(frozen=True)
class Options:
    """How labs are to be run.

    given: words for the labs' own parameters; force: also labs that are done; jobs: labs side by
    side; timeout: s that a lab may take.
    """

    scale: str = "auto"
    weights: str = "random"
    data: str = "generated"
    results: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    jobs: int = 1
    timeout: float = 1800.0


def find(names: Sequence[str] = (), folder: Path = NOTEBOOKS) -> list[Lab]:
    """The labs called `names` ("03", "3", the notebook's name, or a path to one); without names all
    of `folder`.

    Raises `UsageError` for an unknown lab, and for two that have one number: their results would
    replace each other.
    """
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not known and not names:
        raise UsageError(f"There are no labs in {folder}. Run this from a checkout of the course.")
    paths = dict.fromkeys(_path(name, known) for name in names) if names else known
    labs: dict[str, Lab] = {}
    for lab in map(_open, paths):
        if other := labs.get(lab.number):
            raise UsageError(
                f"{short(other.path)} and {short(lab.path)} are both lab {lab.number}: their "
                "results would replace each other. Run each with a --results of its own."
            )
        labs[lab.number] = lab
    return list(labs.values())


def _path(name: str, known: Sequence[Path]) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    for path in known:
        if name in (path.stem, path.name) or (name.isdecimal() and name.zfill(2) == path.stem[:2]):
            return path
    labs = "".join(f"\n    {path.stem.replace('_', ' ')}" for path in known)
    raise UsageError(f"There is no lab {name!r}. A lab is called by number, name or path:{labs}")


def _open(path: Path) -> Lab:
    """Raises `UsageError` where the file is no notebook, or its parameters can't be read."""
    import nbformat
    import papermill

    try:
        declared = papermill.inspect_notebook(str(path))
        cells = nbformat.read(path, as_version=4).cells
    except Exception as error:  # papermill passes on what json, nbformat or the disk raise
        raise UsageError(f"{short(path)} can't be read as a notebook: {error}") from None
    number = path.stem[:2] if re.match(r"\d\d_", path.stem) else path.stem
    code = records.digest(cell.source.encode() for cell in cells if cell.cell_type == "code")
    return Lab(
        number, path, {name: _parameter(path, **told) for name, told in declared.items()}, code
    )


def _parameter(
    path: Path, name: str, inferred_type_name: str, default: str, help: str
) -> Parameter:
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        raise UsageError(f"{short(path)}: {name} must be a plain value, not {default}.") from None
    kind = inferred_type_name if inferred_type_name in parameters.KINDS else type(value).__name__
    if kind not in parameters.KINDS:
        kinds = ", ".join(parameters.KINDS)
        raise UsageError(f"{short(path)}: {name} is a {kind}; a parameter is one of: {kinds}.")
    return Parameter(name, kind, value, help)


def scales_of(asked: str, labs: Sequence[Lab]) -> dict[str, str]:
    """Lab's number -> the scale to run it at. Raises `UsageError` for an unknown scale."""
    try:
        parameters.check("scale", asked, "str")
    except ValueError as error:
        raise UsageError(f"{error} Type --scale with one of them.") from None
    facts = machine.machine_facts()
    return {
        lab.number: machine.scale_for(facts, lab.number) if asked == "auto" else asked
        for lab in labs
    }


def values_of(lab: Lab, options: Options, scale: str) -> dict[str, Any]:
    """Every parameter's value for `lab`, results_dir left out. Raises `UsageError` for one that the
    lab does not take."""
    own = [p for name, p in lab.parameters.items() if name not in OWN_OPTION]
    for name in options.given:
        if name in OWN_OPTION:
            raise UsageError(f"-p {name} is set by an option of its own: {OWN_OPTION[name]}.")
        if name not in lab.parameters:
            takes = "".join(f"\n  -p {p.name} {p.default}  ({p.kind}) {p.help}" for p in own)
            takes = f"It takes:{takes}" if own else "It has none of its own."
            raise UsageError(f"Lab {lab.number} has no parameter {name!r}. {takes}")
    values = {p.name: p.default for p in lab.parameters.values() if p.name != "results_dir"}
    common = {"scale": scale, "weights": options.weights, "data": options.data}
    try:
        for name, word in common.items():
            if name in values:
                values[name] = parameters.check(name, word, "str")
        for name, word in options.given.items():
            values[name] = parameters.read(name, word, lab.parameters[name].kind)
    except ValueError as error:
        raise UsageError(f"Lab {lab.number}: {error}") from None
    return values


def results_folder(asked: Path | None, labs: Sequence[Lab]) -> Path:
    """The folder for results.jsonl and notebooks/, made and tried.

    Raises `UsageError` where it can't be written, or where the executed notebooks would replace the
    labs themselves.
    """
    given = asked or os.environ.get("LABUTILS_RESULTS")
    default = records.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder = Path(os.path.abspath(records.named(given or default)))
        executed = folder / "notebooks"
        for original in (
            NOTEBOOKS,
            *(path for lab in labs for path in (lab.path.parent, lab.path)),
        ):
            mine = executed / original.name if original.suffix else executed
            if mine.exists() and mine.samefile(original):
                raise UsageError(
                    f"Results in {folder} would replace the labs by their executed copies. Nothing "
                    "was run. Choose another folder, as in: --results results/NAME"
                )
        executed.mkdir(parents=True, exist_ok=True)
        records.Results(folder)
        (executed / ".writable").touch()
        (executed / ".writable").unlink()
    except (OSError, ValueError) as error:  # also a current folder that was deleted
        raise UsageError(
            f"Results can't be kept in {given or default}: {error}. Nothing was run. Choose a "
            "folder you may write to with --results DIR."
        ) from None
    return folder


def short(path: Path) -> str:
    """A path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
