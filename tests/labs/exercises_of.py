"""The exercises of a notebook: what they say as given, and what with their solutions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nbformat import NotebookNode

MESSAGE = re.compile(r"^Exercise (\d+): (.+)$", re.MULTILINE)
MEASURED = re.compile(r"\b(?:faster_than|smaller_than)\(")
FEWEST = 3


@dataclass
class Exercise:
    """One exercise: the code of its cells, and the messages that they printed when the notebook was
    run.
    """

    code: dict[str, str] = field(default_factory=lambda: {"exercise": "", "solution": ""})
    said: dict[str, list[str]] = field(default_factory=lambda: {"exercise": [], "solution": []})


def exercises_of(notebook: NotebookNode) -> dict[int, Exercise]:
    """Number -> exercise, in the order in which the text (**1.**, **2. Make it faster.**) announces
    them.
    """
    found: dict[int, Exercise] = {}
    begun = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            begun = (
                begun or "## Exercises" in cell.source
            ) and "## What you did" not in cell.source
            if begun and (number := re.search(r"^\*\*(\d+)\.", cell.source, re.MULTILINE)):
                found[int(number[1])] = Exercise()
            continue
        for tag in {"exercise", "solution"} & set(cell.metadata.get("tags", [])):
            last = max(found)
            found[last].code[tag] += cell.source + "\n"
            for number, said in MESSAGE.findall(_printed(cell)):
                found[last].said[tag].append(
                    said if int(number) == last else f"as exercise {number}: {said}"
                )
    return found


def _printed(cell: NotebookNode) -> str:
    return "".join(
        output.text for output in cell.get("outputs", []) if output.output_type == "stream"
    )


def lacking(notebook: NotebookNode) -> list[str]:
    """What the exercises of a stored notebook lack; [] where nothing."""
    exercises = exercises_of(notebook)
    faults = [f"{len(exercises)} exercises are too few"] if len(exercises) < FEWEST else []
    faults += (
        ["not numbered from 1 on"] if list(exercises) != list(range(1, len(exercises) + 1)) else []
    )
    for number, exercise in exercises.items():
        faults += [f"{number} has no {tag} cell" for tag, code in exercise.code.items() if not code]
        faults += [f"{number} has a solution that isn't checked by solved()"] * (
            "solved(" not in exercise.code["solution"]
        )
    if not any(MEASURED.search(exercise.code["exercise"]) for exercise in exercises.values()):
        faults.append("none is measured")
    return faults


def misjudged(notebook: NotebookNode) -> list[str]:
    """Exercises of an executed notebook that passed as given, or said nothing, or failed with their
    solution.
    """
    faults = []
    for number, exercise in exercises_of(notebook).items():
        given, solved = exercise.said["exercise"], exercise.said["solution"]
        if not given or any(_is_right(said) for said in given):
            faults.append(f"{number}, as given: {given}")
        if not solved or not all(_is_right(said) for said in solved):
            faults.append(f"{number}, solved: {solved}")
    return faults


def _is_right(said: str) -> bool:
    return said.startswith("right")
