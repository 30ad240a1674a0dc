"""What a person asked for: labs, their parameters and a folder, all checked before a lab runs."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from labutils.course import parameters
from labutils.profiling import machine
from labutils.results import records

NOTEBOOKS = records.REPOSITORY / "notebooks"
HAVE_OPTIONS = ("scale", "weights", "data", "results_dir")
"""Parameters that the command line has an option for."""


class UsageError(Exception):
    """The labs can't be run as asked; the message says why, and what to type."""


@dataclass(frozen=True)
class Lab:
    """A notebook. `number`: "03", or the file's stem where the name has no number. `parameters`:
    the lines of its parameters cell as papermill reads them. `code`: a digest of its code cells."""

    number: str
    path: Path
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    code: str = ""

    @property
    def title(self) -> str:
        return self.path.stem.replace("_", " ")


@dataclass(frozen=True)
class Options:
    """How labs are to be run.

    given: words for the labs' own parameters; force: also labs that are done; timeout: s that a lab
    may take.
    """

    scale: str = "auto"
    weights: str = "random"
    data: str = "generated"
    results: Path | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    force: bool = False
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
    labs: dict[str, Lab] = {}
    for path in dict.fromkeys(path_of(name, known) for name in names) if names else known:
        lab = _open(path)
        if other := labs.get(lab.number):
            raise UsageError(
                f"{short(other.path)} and {short(path)} are both lab {lab.number}: their results "
                "would replace each other. Run each with a --results of its own."
            )
        labs[lab.number] = lab
    return list(labs.values())


def path_of(name: str, known: Sequence[Path]) -> Path:
    """The notebook that `name` means among `known`. Raises `UsageError` where it means none."""
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name).resolve()
    words = name.replace(" ", "_")
    for path in known:
        if words in (path.stem, path.stem[3:], path.name) or path.stem[:2] in (name, f"0{name}"):
            return path
    labs = "".join(f"\n    {path.stem.replace('_', ' ')}" for path in known)
    raise UsageError(f"There is no lab {name!r}. A lab is called by number, name or path:{labs}")


def _open(path: Path) -> Lab:
    """Raises `UsageError` where the file is no notebook, or a parameter has no type."""
    import nbformat
    import papermill

    try:
        declared = papermill.inspect_notebook(str(path))
        cells = nbformat.read(path, as_version=4).cells
        code = records.digest(cell.source.encode() for cell in cells if cell.cell_type == "code")
    except Exception as error:  # papermill passes on what json, nbformat or the disk raise
        raise UsageError(f"{short(path)} can't be read as a notebook: {error}") from None
    for name, line in declared.items():
        if line["inferred_type_name"] not in parameters.KINDS:
            kinds = ", ".join(parameters.KINDS)
            raise UsageError(f"{short(path)}: parameter {name} needs a type, one of: {kinds}.")
    number = path.stem[:2] if re.match(r"\d\d_", path.stem) else path.stem
    return Lab(number, path, declared, code)


def values_of(lab: Lab, options: Options) -> dict[str, Any]:
    """The values that `lab` is given; what nobody asked for stays as its notebook has it. Raises
    `UsageError` for a parameter that the lab lacks, and for a value that it does not take."""
    for name in options.given:
        if name in HAVE_OPTIONS:
            option = f"--{name.removesuffix('_dir')}"
            raise UsageError(f"-p {name} is set by an option of its own: {option}.")
        if name not in lab.parameters:
            takes = "".join(
                f"\n  -p {name} {line['default']}  ({line['inferred_type_name']}) {line['help']}"
                for name, line in lab.parameters.items()
                if name not in HAVE_OPTIONS
            )
            takes = f"It takes:{takes}" if takes else "It has none of its own."
            raise UsageError(f"Lab {lab.number} has no parameter {name!r}. {takes}")
    scale = options.scale
    if scale == "auto":
        scale = machine.scale_for(machine.machine_facts(), lab.number)
    words = {"scale": scale, "weights": options.weights, "data": options.data} | options.given
    try:
        return {
            name: parameters.read(name, word, lab.parameters[name]["inferred_type_name"])
            for name, word in words.items()
            if name in lab.parameters
        }
    except ValueError as error:
        raise UsageError(f"Lab {lab.number}: {error}") from None


def results_folder(asked: Path | None, labs: Sequence[Lab]) -> tuple[Path, IO[str]]:
    """(the folder for results.jsonl and notebooks/, a file whose lock keeps other runs out of it
    until it is closed).

    Raises `UsageError` where it can't be written, where another run writes into it, or where the
    executed notebooks would replace the labs themselves.
    """
    given = asked or os.environ.get("LABUTILS_RESULTS")
    default = records.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        folder = records.named(given or default)
        executed = folder / "notebooks"
        bytes(executed).decode()  # papermill takes no other names
        sources = {NOTEBOOKS, *(lab.path.parent for lab in labs)}
        if executed.is_dir() and any(map(executed.samefile, sources)):
            raise UsageError(
                f"Results in {folder} would replace the labs by their executed copies. Nothing was "
                "run. Choose another folder, as in: --results results/NAME"
            )
        executed.mkdir(parents=True, exist_ok=True)
        records.Results(folder)
        lock = (executed / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"Another `labutils run` writes into {short(folder)} now. Wait for it, or choose "
            "another folder with --results DIR."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"Results can't be kept in {str(given or default)!r}: {error}. Nothing was run. Choose "
            "a folder you may write to with --results DIR (make: RESULTS=DIR)."
        ) from None
    return folder, lock


def short(path: Path) -> str:
    """A path as a person would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
