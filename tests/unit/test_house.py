"""The house keeps its own rules: floors, start-up time, one way to install, notebooks clean and
paired.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import jupytext
import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from labutils.profiling.machine import meant_for

HOUSE = Path(__file__).resolve().parents[2]
NOTEBOOKS = HOUSE / "notebooks"
FLOORS = {
    0: {
        "recipe",
        "results",
        "hardware",
        "articles",
        "parameters",
        "tables",
        "answers",
        "pages",
        "processes",
        "libraries",
    },
    1: {
        "data",
        "adapters",
        "attention",
        "checkpointing",
        "experts",
        "folding",
        "lowbit",
        "capture",
        "losses",
    },
    2: {"workloads", "measure"},
    3: {"training", "claims", "advisor", "prediction", "scaling", "calibration", "goals"},
    4: {
        "fleet",
        "trials",
        "exercises",
        "scoreboard",
        "titles",
        "methods",
        "launches",
        "cards",
        "runner",
        "report",
        "handouts",
        "plots",
        "course",
        "doctor",
        "pinning",
        "diagnosis",
        "footprint",
        "switches",
        "datapath",
        "tensorflow_page",
    },
    5: {"cli"},
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}


def text(name: str) -> str:
    return (HOUSE / name).read_text(encoding="utf-8")


# Floors and start-up


def rooms_imported(source: str, package: str) -> set[str]:
    """Rooms of labutils that a module imports, inside functions too; `package` resolves relative
    imports.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("labutils.")}
    return {room for room in found if not room.startswith("__")}


def climbs(room: str, source: str, package: str = "labutils") -> set[str]:
    """Rooms that `room` may not import but does: those of its own floor or higher, itself aside."""
    return {
        other
        for other in rooms_imported(source, package) - {room}
        if FLOOR_OF.get(other, 99) >= FLOOR_OF[room]
    }


def modules() -> list[Path]:
    return sorted(
        path
        for path in (HOUSE / "labutils").rglob("*.py")
        if path.parent != HOUSE / "labutils" or path.stem != "__init__"
    )


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(HOUSE)))
def test_no_import_goes_up_a_floor(path):
    place = path.relative_to(HOUSE / "labutils")
    room = place.parts[0].removesuffix(".py")
    assert room in FLOOR_OF, f"{room} has no floor yet: give it one in DESIGN, the README and here"
    package = ".".join(["labutils", *place.parent.parts])
    assert not climbs(room, path.read_text(encoding="utf-8"), package)


@pytest.mark.parametrize(
    ("room", "source", "package", "found"),
    [
        ("recipe", "def f():\n    from labutils.training import train", "labutils", {"training"}),
        ("recipe", "import labutils.cli", "labutils", {"cli"}),
        ("report", "from labutils import __version__, plots, results", "labutils", {"plots"}),
        ("measure", "from ..training import train", "labutils.profiling", {"training"}),
        ("measure", "from . import trace", "labutils.profiling", set()),
        ("training", "from labutils.profiling.trace import x", "labutils.training", set()),
        ("cli", "from labutils import runner", "labutils", set()),
    ],
)
def test_the_floor_test_sees_every_way_to_import(room, source, package, found):
    assert climbs(room, source, package) == found


@pytest.mark.parametrize("module", ["labutils", "labutils.cli"])
def test_starting_takes_less_than_a_second(module):
    timed = f"t = time.perf_counter(); import {module}; t = time.perf_counter() - t"
    program = f"import sys, time; {timed}; print(t, *sys.modules)"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    assert min(float(run.stdout.split()[0]) for run in runs) < 1
    assert not {"torch", "transformers", "diffusers", "matplotlib", "papermill"} & set(
        runs[0].stdout.split()
    )


@pytest.mark.parametrize("given", [None, "/mine"])
def test_transformer_engine_is_told_of_pytorchs_cudnn(given, tmp_path):
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if key != "CUDNN_HOME"}
    environment |= {"PYTHONPATH": f"{tmp_path}:{HOUSE}"} | ({"CUDNN_HOME": given} if given else {})
    program = "import os, labutils; print(os.environ['CUDNN_HOME'])"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.strip() == (given or str(tmp_path / "nvidia" / "cudnn"))


# One way to install


def pins() -> dict[str, Version]:
    lines = [
        line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines), (
        "a line that pins no exact version"
    )
    assert lines == sorted(lines)
    return {line.split("==")[0]: Version(line.split("==")[1]) for line in lines}


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for, extras included."""
    project = tomllib.loads(text("pyproject.toml"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project["dependencies"] + extras]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_to_a_version_that_meets_it(requirement):
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_what_is_tested_is_what_is_pinned():
    if Path(sys.prefix) != HOUSE / ".venv":
        pytest.skip("not running in the .venv that make installed")
    # Only what lies in .venv: importing setuptools puts the old copies that it carries on the path
    # as well.
    there = metadata.distributions(
        path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    )
    installed = {canonicalize_name(d.metadata["Name"]): Version(d.version) for d in there}
    pinned = {name: version for name, version in pins().items() if name in installed}
    other = {
        name: str(installed[name])
        for name, version in pinned.items()
        if Version(installed[name].public) != version
    }
    assert not other
    assert len(pinned) > 100


def test_nothing_needs_torchvision():
    assert "torchvision" not in {
        canonicalize_name(requirement.name) for requirement in requirements()
    }


def test_the_three_ways_install_the_same():
    assert [line for line in text("requirements.txt").splitlines() if not line.startswith("#")] == [
        "-c constraints.txt",
        "-e .[dev]",
    ]
    (pip,) = [step["pip"] for step in conda()["dependencies"] if isinstance(step, dict)]
    assert pip == ["-r requirements.txt"]
    assert re.search(
        r"^\$\(STAMP\): requirements.txt constraints.txt pyproject.toml.*\n"
        r"\t\$\(PIP\) --no-compile -r requirements.txt$",
        text("Makefile"),
        re.M,
    )
    assert [
        line for line in text("Dockerfile").splitlines() if re.search(r"\bpip3? install\b", line)
    ] == []
    assert re.search(r"^RUN .*make install$", text("Dockerfile"), re.M)


def conda() -> dict:
    return yaml.safe_load(text("environment.yml"))


def test_the_pythons_agree():
    wanted = Requirement(
        "python" + tomllib.loads(text("pyproject.toml"))["project"]["requires-python"]
    ).specifier
    (python,) = [step for step in conda()["dependencies"] if str(step).startswith("python=")]
    image = re.search(r"^FROM python:(\d+\.\d+\.\d+)-slim-\w+$", text("Dockerfile"), re.M)
    assert python.removeprefix("python=") + ".0" in wanted
    assert image[1] in wanted


def test_what_torch_compile_needs_is_installed():
    assert re.search(r"apt-get install .*\bg\+\+", text("Dockerfile"))
    assert any(str(step).startswith("gxx") for step in conda()["dependencies"])


def test_the_container_is_safe_to_run():
    file = text("Dockerfile")
    steps = re.findall(r"^([A-Z]+) (.*)$", file, re.M)
    users = [value for step, value in steps if step == "USER"]
    assert users
    assert users[-1] not in ("0", "root")
    assert [step for step, _ in steps].index("USER") < [step for step, _ in steps].index("CMD")
    assert not re.search(r"token\s*=|password\s*=|allow[-_]root", file, re.I)
    assert "HEALTHCHECK" in [step for step, _ in steps]
    assert "--gpus all --shm-size=8g" in file
    assert {".git", ".venv", "results"} <= set(text(".dockerignore").split())


def test_hadolint_finds_nothing_in_the_dockerfile():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no wheel for this system")
    found = subprocess.run(
        [hadolint, "--no-color", HOUSE / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "")


def make(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-C", HOUSE, *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def old_python(tmp_path):
    """Something that answers like Python 3.9 would."""
    program = tmp_path / "python3.9"
    program.write_text('#!/bin/sh\ncase "$1" in --version) echo Python 3.9.18;; *) exit 1;; esac\n')
    program.chmod(0o755)
    return program


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_a_python_that_is_too_old_or_missing_is_said_plainly(tmp_path, old_python):
    for python, said in [
        (old_python, "is Python 3.9.18. The course needs Python 3.11"),
        ("no-python", "There is no no-python here"),
    ]:
        made = make("install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
        assert made.returncode != 0
        assert said in made.stderr
        assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    "target", ["course", "test", "lab", "lint", "format", "notebooks", "unsloth", "te", "torchao"]
)
def test_every_target_installs_first_where_nothing_is(tmp_path, target):
    plan = make("--dry-run", target, f"VENV={tmp_path / 'venv'}").stdout
    assert plan.index("-m venv") < plan.index("-r requirements.txt")


def test_the_gate_runs_what_the_readme_says():
    gate = text(".ci/run").splitlines()
    assert "make test" in gate
    assert "make lint" in gate
    assert "`make test`" in text("README.md")
    assert os.access(HOUSE / ".ci" / "run", os.X_OK)


# Notebooks


def labs() -> list[str]:
    """Names of the notebooks of which one half or the other exists."""
    return sorted(
        {path.stem for path in [*NOTEBOOKS.glob("*.ipynb"), *(NOTEBOOKS / "py").glob("*.py")]}
    )


def essence(notebook: nbformat.NotebookNode) -> list[tuple[str, str, list[str]]]:
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


@pytest.mark.parametrize("name", labs())
def test_both_halves_of_a_notebook_say_the_same(name):
    notebook, script = NOTEBOOKS / f"{name}.ipynb", NOTEBOOKS / "py" / f"{name}.py"
    assert notebook.exists(), "`make notebooks` makes the other half"
    assert script.exists(), "`make notebooks` makes the other half"
    halves = [essence(jupytext.read(half)) for half in (notebook, script)]
    differing = [pair for pair in zip(*halves, strict=False) if pair[0] != pair[1]]
    assert halves[0] == halves[1], f"out of step (`make notebooks`): {differing[:1]}"


def test_texts_name_no_lab_that_is_not_there():
    """What the package and the README say to people."""
    sources = [HOUSE / "README.md", *(HOUSE / "labutils").rglob("*.py")]
    named = {
        number
        for path in sources
        for number in re.findall(r"\b[Ll]abs? (\d\d)\b", path.read_text("utf-8"))
    }
    assert named and named <= {name[:2] for name in labs()}


@pytest.mark.parametrize("name", labs())
def test_a_stored_notebook_holds_no_trace_of_a_run(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "jupytext"}
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags", "lines_to_next_cell"}
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", labs())
def test_a_notebook_has_the_parts_of_a_lab(name):
    cells = jupytext.read(NOTEBOOKS / f"{name}.ipynb").cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    tags = [cell.metadata.get("tags", []) for cell in code]
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", name)
    assert cells[0].cell_type == "markdown"
    assert tags[0] == ["parameters"]
    declared = [
        line.partition(":")[0]
        for line in code[0].source.splitlines()
        if ":" in line.partition("#")[0]
    ]
    assert declared[:4] == ["scale", "weights", "data", "results_dir"]
    assert f'open_lab("{name[:2]}", globals())' in code[1].source
    assert "lab.done(" in code[-1].source
    assert ["exercise"] in tags
    assert ["solution"] in tags


@pytest.mark.parametrize("name", labs())
def test_cells_are_short_enough_to_be_read(name):
    cells = [
        cell
        for cell in jupytext.read(NOTEBOOKS / f"{name}.ipynb").cells
        if cell.cell_type == "code"
    ]
    told = [
        cell.source
        for cell in cells
        if not {"exercise", "solution"} & set(cell.metadata.get("tags", []))
    ]
    too_long = {
        source.splitlines()[0]: source.count("\n") + 1
        for source in told
        if source.count("\n") >= 25
    }
    assert not too_long, "helpers belong in labutils"


def test_the_labs_headers_name_the_memory_that_auto_goes_by():
    for path in sorted((NOTEBOOKS / "py").glob("[0-9][0-9]_*.py")):
        rows = re.findall(r"^# \| `full` \| ([^|]*)\|", path.read_text("utf-8"), re.MULTILINE)
        needed = meant_for("full", path.stem[:2]).rpartition(" of ")[2]
        assert all(needed in row for row in rows), (path.name, rows, needed)
        assert rows or path.stem[:2] == "11"


def test_what_is_on_record_names_no_path_of_the_machine_that_measured_it():
    """A library's warning, with the file that gave it, once stood in two pages."""
    pages = sorted((HOUSE / "reference" / "h200").iterdir())
    assert len(pages) > 10
    named = {
        page.name: re.findall(r"/(?:tmp|opt|root|home)/[\w./-]+", page.read_text("utf-8"))
        for page in pages
    }
    assert not {name: paths for name, paths in named.items() if paths}
