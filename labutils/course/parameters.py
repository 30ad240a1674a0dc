"""What a lab's parameters cell may hold: types, choices, and how the words of a command line become
values.

The same rules serve the command line, which reads words, and the notebook itself, which finds
values that papermill or a person put there: papermill passes `-p flag false` as the text "false",
which Python takes for true.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from labutils.recipe import SCALES

KINDS = {"str": str, "int": int, "float": float, "bool": bool}
CHOICES = {"scale": ("auto", *SCALES), "weights": ("random", "hub"), "data": ("generated", "hub")}
LEAST = dict.fromkeys(("steps", "rounds", "ranks"), 0)
"""Parameter's name -> the least that it takes, in whichever lab: 0 leaves the number to the lab."""
EXAMPLES = {
    "str": "words",
    "int": "a whole number, e.g. 4",
    "float": "a number, e.g. 0.5",
    "bool": "true or false",
}


def read(name: str, word: str, kind: str) -> Any:
    """The value that `word` stands for where the parameter `name` is declared a `kind` ("str",
    "int", "float", "bool").

    Raises `ValueError` that says what the parameter takes.
    """
    value: Any = word
    if kind == "bool":
        value = {"true": True, "false": False}.get(word.lower(), word)
    else:
        with suppress(ValueError):  # `check` says what is wrong with the word
            value = KINDS[kind](word)
    return check(name, value, kind)


def check(name: str, value: Any, kind: str) -> Any:
    """`value` itself (an int becomes a float if declared so). Raises `ValueError` if `name` does
    not take it.
    """
    if kind == "float" and type(value) is int:
        value = float(value)
    takes = ""
    if type(value) is not KINDS[kind]:
        takes = EXAMPLES[kind]
    elif kind == "float" and not math.isfinite(value):
        takes = "a finite number"
    elif name in CHOICES and value not in CHOICES[name]:
        takes = f"one of: {', '.join(CHOICES[name])}"
    elif name in LEAST and value < LEAST[name]:
        takes = f"{LEAST[name]} or more"
    elif name == "ranks" and value == 1:  # a lab of several ranks has nothing to show with one
        takes = "0, or more than 1"
    if takes:
        raise ValueError(f"{name} is {value!r}, but it takes {takes}.")
    if name == "batches":  # a text of whole numbers
        whole_numbers(name, value)
    return value


def whole_numbers(name: str, text: str) -> list[int]:
    """The whole numbers of a text like "1 4 24", each once, from the smallest; [] for an empty one.

    Raises `ValueError` where one is no whole number above 0.
    """
    words = text.replace(",", " ").split()
    if not all(w.isascii() and w.isdecimal() and len(w) < 10 and int(w) > 0 for w in words):
        raise ValueError(
            f"{name} is {text!r}, but it takes whole numbers above 0, for example 1 4 24."
        )
    return sorted({int(word) for word in words})
