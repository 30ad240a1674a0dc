"""The house: imports that go down the list of rooms only, and no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

HOUSE = Path(__file__).resolve().parents[1] / "labutils"
FLOORS = (
    ("cli",),
    ("tools", "labs"),
    ("course",),
    ("training",),
    ("workloads",),
    ("layers", "data"),
    ("profiling",),
    ("results",),
    ("recipe",),
)
"""From the top; a room imports from floors below only. Rooms of one floor are strangers."""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
STRANGERS = {("layers", "results"), ("data", "results")}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module, without what runs inside strangers' scripts."""
    files = (path for path in HOUSE.rglob("*.py") if "script_hooks" not in path.parts)
    return {
        ".".join(path.relative_to(HOUSE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in files
    }


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of labutils that a file imports when it is loaded or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labutils"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
    return found


def test_imports_go_down_only():
    known = modules()
    wrong = []
    for name, path in known.items():
        for imported in imports(path, known):
            if name == "labutils" or imported == "labutils":
                continue
            room, other = name.split(".")[1], imported.split(".")[1]
            if room != other and (FLOOR[room] >= FLOOR[other] or (room, other) in STRANGERS):
                wrong.append(f"{name} imports {imported}")
    assert not wrong, wrong


def test_no_module_imports_itself_in_a_circle():
    known = modules()
    graph = {
        name: {i for i in imports(path, known) if i != name and not name.startswith(i + ".")}
        for name, path in known.items()
    }
    TopologicalSorter(graph).prepare()
