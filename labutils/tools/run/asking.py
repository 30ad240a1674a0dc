"""What is asked for: which labs, with which parameters, into which folder; checked before anything
runs.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from labutils.course import parameters
from labutils.profiling.machine import machine_facts, scale_for
from labutils.results import records

NOTEBOOKS = records.REPOSITORY / "notebooks"
OWN_OPTION = {
    "scale": "--scale",
    "weights": "--weights",
    "data": "--data",
    "results_dir": "--results",
}


class UsageError(Exception):
    """The call can't be carried out as given; the message says what was found and what to type."""


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: its type's name, its default and its comment."""

    name: str
    kind: str
    default: Any
    help: str


@dataclass(frozen=True)
class Lab:
    """A notebook that can be run: `number` ("03"; the file's stem where it has none), `path`,
    `parameters` by name, and how many cells of code it has."""

    number: str
    path: Path
    parameters: dict[str, Parameter]
    cells: int = 0

    @property
    def title(self) -> str:
        return self.path.stem.replace("_", " ")


@dataclass(frozen=True)
class Options:
    """How labs are to be run.

    `given`: words of the command line for the labs' own parameters; `jobs`: labs side by side;
    `timeout`: s per lab; `cell_timeout`: s per cell, None for no limit. Of labs that are done in
    the results folder, `force` runs all again, `only_changed` those whose code, parameters or
    labutils are others since.
    """

    scale: str = "auto"
    weights: str = "random"
    data: str = "generated"
    records: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
    only_changed: bool = False
    jobs: int = 1
    timeout: float = 1800.0
    cell_timeout: float | None = None


def check_current_folder() -> None:
    """Raises `UsageError` where it was deleted: papermill can neither read nor run a lab from
    there.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "The current folder was deleted, so no lab can be run from it. Nothing was run. "
            f"Go to a folder that exists: cd {shlex.quote(str(records.REPOSITORY))}"
        ) from None


def find(names: Sequence[str] = (), folder: Path = NOTEBOOKS) -> list[Lab]:
    """The labs called `names`: "03", "3", the notebook's name, or a path to a notebook; all of
    `folder` where none is.

    Raises `UsageError` naming the labs there are, and where two that are named have one number.
    """
    known = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not names:
        if not known:
            raise UsageError(
                f"There are no labs in {folder}. Run this from a checkout of the course."
            )
        return [_open(path) for path in known]
    paths = [_path(name, known) for name in names]
    labs = [_open(path) for path in dict.fromkeys(paths)]
    _check_apart(labs)
    return labs


def _check_apart(labs: Sequence[Lab]) -> None:
    """Raises `UsageError` where two labs have one number: their results, and their executed
    notebooks where the files have one name as well, would replace each other."""
    first: dict[str, Lab] = {}
    for lab in labs:
        other = first.setdefault(lab.number, lab)
        if other is not lab:
            raise UsageError(
                f"{short(other.path)} and {short(lab.path)} are both lab {lab.number}: in one "
                "folder their results "
                "would replace each other. Nothing was run. Run them one by one, each with a "
                "--results of its own."
            )


def _path(name: str, known: Sequence[Path]) -> Path:
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    for path in known:
        if name in (path.stem, path.name) or (name.isdecimal() and name.zfill(2) == path.stem[:2]):
            return path
    labs = [f"{path.stem[:2]}  {path.stem[3:].replace('_', ' ')}" for path in known]
    raise UsageError(
        indented(f"There is no lab {name!r}. A lab is called by number, name or path:", labs)
    )


def _open(path: Path) -> Lab:
    """The lab of a notebook. Raises `UsageError` where the file is no notebook or its parameters
    cell can't be read.
    """
    import nbformat
    import papermill

    try:
        found = papermill.inspect_notebook(str(path))
        cells = nbformat.read(path, as_version=4).cells
    except (
        Exception
    ) as error:  # papermill passes on whatever json, nbformat or the file system raise
        raise UsageError(f"{short(path)} can't be read as a notebook: {error}") from None
    number = path.stem[:2] if re.match(r"\d\d_", path.stem) else path.stem
    known = {name: _parameter(path, **parameter) for name, parameter in found.items()}
    return Lab(number, path, known, sum(cell.cell_type == "code" for cell in cells))


def _parameter(
    path: Path, name: str, inferred_type_name: str, default: str, help: str
) -> Parameter:
    try:
        value = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        raise UsageError(
            f"{short(path)}: the default of {name} must be a plain value, but it is {default}."
        ) from None
    kind = inferred_type_name if inferred_type_name in parameters.KINDS else type(value).__name__
    if kind not in parameters.KINDS:
        raise UsageError(
            f"{short(path)}: {name} is a {kind}; a parameter is one of: "
            f"{', '.join(parameters.KINDS)}."
        )
    return Parameter(name, kind, value, help)


def scales_of(asked: str, labs: Sequence[Lab]) -> tuple[dict[str, str], str]:
    """(lab's number -> the scale to run it at, what to say about it). Raises `UsageError` for a
    scale there isn't.
    """
    try:
        parameters.check("scale", asked, "str")
    except ValueError as error:
        raise UsageError(f"{error} Type --scale with one of them.") from None
    machine = machine_facts()
    fitting = {lab.number: scale_for(machine, lab.number) for lab in labs}
    if asked == "auto":
        return fitting, f"{_by_scale(fitting)} (the largest that fits this machine)"
    smaller = parameters.SCALES[: parameters.SCALES.index(asked)]
    beyond = {lab: scale for lab, scale in fitting.items() if scale in smaller}
    note = (
        f" (this machine fits {_by_scale(beyond)}: expect long waits or failures)" if beyond else ""
    )
    return dict.fromkeys(fitting, asked), f"{asked}{note}"


def _by_scale(scales: Mapping[str, str]) -> str:
    """ "full", or where they differ "full, small for 06 and 07": the most frequent first."""
    labs: dict[str, list[str]] = {}
    for lab, scale in scales.items():
        labs.setdefault(scale, []).append(lab)
    usual, *others = sorted(labs, key=lambda scale: -len(labs[scale]))
    return ", ".join([usual, *(f"{scale} for {' and '.join(labs[scale])}" for scale in others)])


def values_of(lab: Lab, options: Options, scale: str) -> dict[str, Any]:
    """Every parameter's value for `lab`, results_dir left out. Raises `UsageError` for what the lab
    does not take.
    """
    for name in options.given:
        if name in OWN_OPTION:
            raise UsageError(f"-p {name} is set by an option of its own: {OWN_OPTION[name]}.")
        if name not in lab.parameters:
            raise UsageError(f"Lab {lab.number} has no parameter {name!r}. {_takes(lab)}")
    values = {
        name: parameter.default
        for name, parameter in lab.parameters.items()
        if name != "results_dir"
    }
    common = {"scale": scale, "weights": options.weights, "data": options.data}
    try:
        values |= {
            name: parameters.check(name, word, "str")
            for name, word in common.items()
            if name in values
        }
        values |= {
            name: parameters.read(name, word, lab.parameters[name].kind)
            for name, word in options.given.items()
        }
    except ValueError as error:
        raise UsageError(f"Lab {lab.number}: {error}") from None
    return values


def _takes(lab: Lab) -> str:
    """The lab's own parameters, one a line, or that it has none."""
    own = [parameter for parameter in lab.parameters.values() if parameter.name not in OWN_OPTION]
    if not own:
        return "It has none of its own: use --scale, --weights, --data and --results."
    return "It takes:" + "".join(
        f"\n  -p {p.name} {p.default}  ({p.kind}) {p.help}".rstrip() for p in own
    )


def results_folder(asked: Path | None, labs: Sequence[Lab]) -> Path:
    """The folder for results.jsonl and notebooks/, made and tried.

    Raises `UsageError` where it can't be written, or where the executed notebooks would replace the
    labs themselves.
    """
    given = asked or os.environ.get("LABUTILS_RESULTS")
    default = records.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder = Path(os.path.abspath(records.named(given or default)))
    except ValueError as error:
        raise UsageError(f"{error}") from None
    executed = folder / "notebooks"
    folders = [(executed, NOTEBOOKS), *((executed, lab.path.parent) for lab in labs)]
    if any(
        _is_same(*pair)
        for pair in [*folders, *((executed / lab.path.name, lab.path) for lab in labs)]
    ):
        raise UsageError(
            f"Results in {folder} would replace the labs in {executed} by their executed copies. "
            "Nothing was run. "
            "Choose another folder, as in: --results results/NAME"
        )
    try:
        records.Results(folder)
        (folder / "notebooks").mkdir(exist_ok=True)
        probe = folder / "notebooks" / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"Results can't be kept in {folder}: {_why_unwritable(folder, error)}. Nothing was "
            "run. "
            "Choose a folder you may write to with --results DIR."
        ) from None
    return folder


def _is_same(one: Path, other: Path) -> bool:
    """Whether both are there and are one folder or file, by whatever links."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _why_unwritable(folder: Path, error: OSError) -> str:
    if os.path.isdir(folder / "results.jsonl"):
        return f"{folder / 'results.jsonl'} is a folder, not a file"
    for path in (
        folder / "notebooks",
        folder,
        *folder.parents,
    ):  # Path.exists raises OSError for a name too long
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link that leads nowhere"
        if os.path.exists(path) and not os.path.isdir(path):
            return f"{path} is a file, not a folder"
    if isinstance(error, FileNotFoundError):
        return "no folder can be made there"
    return (error.strerror or str(error)).lower()


def short(path: Path) -> str:
    """A path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def indented(message: str, lines: Sequence[str]) -> str:
    """A message with lines that belong to it below."""
    return "\n    ".join([message, *lines])
