"""What a lab's parameters cell may hold: types, choices, and how the words of a command line become
values.

The same rules serve the command line, which reads words, and the notebook itself, which finds
values that papermill or a person put there: papermill passes `-p flag false` as the text "false",
which Python takes for true.
"""

from __future__ import annotations

import math
from typing import Any

from labutils.recipe import SCALES

KINDS = {"str": str, "int": int, "float": float, "bool": bool}
CHOICES = {
    "scale": ("auto", *SCALES),
    "weights": ("random", "hub"),
    "data": ("generated", "hub"),
}
LEAST = dict.fromkeys(
    ("steps", "rounds", "seeds", "method_steps", "log_every", "ranks", "memory_gb"), 0
)
LEAST |= dict.fromkeys(("blackwell_yen", "h100_yen", "h200_yen", "b200_yen"), 0) | {
    "planned_steps": 1
}
"""Parameter's name -> the least that it takes, in whichever lab: 0 leaves the number to the lab, or
says unknown.
"""
ABOVE = {"years": 0, "hours_a_day": 0, "yen_per_kwh": 0}
MOST = {"hours_a_day": 24}
NOT = {"ranks": 1}
"""A lab of several ranks has nothing to show with one."""
COUNTS = ("batches", "compile_batches", "delays")
"""Texts that hold whole numbers above 0."""
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
    if kind == "bool":
        value: Any = {"true": True, "false": False}.get(word.lower(), word)
    else:
        try:
            value = KINDS[kind](word)
        except ValueError:
            value = _fraction(word) if kind == "int" else word
    return check(name, value, kind)


def check(name: str, value: Any, kind: str) -> Any:
    """`value` itself (an int becomes a float if declared so). Raises `ValueError` if `name` does
    not take it.
    """
    if kind == "float" and type(value) is int:
        value = float(value)
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, but it takes a finite number.")
    if type(value) is not KINDS[kind]:
        raise ValueError(
            f"{name} is {value!r}, {_a(type(value).__name__)}, but it takes {EXAMPLES[kind]}."
        )
    if name in CHOICES and value not in CHOICES[name]:
        raise ValueError(f"{name} is {value!r}, but it takes one of: {', '.join(CHOICES[name])}.")
    if kind in ("int", "float"):
        _check_range(name, value)
    if name in COUNTS and kind == "str":
        whole_numbers(name, value)
    return value


def _fraction(word: str) -> float | str:
    """The number that `word` is, if it is a finite one; else the word."""
    try:
        return float(word) if math.isfinite(float(word)) else word
    except ValueError:
        return word


def _check_range(name: str, value: float) -> None:
    """Raise `ValueError` where a parameter of that name takes no such number in any lab."""
    if name in LEAST and value < LEAST[name]:
        raise ValueError(f"{name} is {value!r}, but it takes {LEAST[name]} or more.")
    if name in NOT and value == NOT[name]:
        raise ValueError(
            f"{name} is {value!r}, but it takes {LEAST[name]}, or more than {value!r}."
        )
    if name in ABOVE and value <= ABOVE[name]:
        raise ValueError(f"{name} is {value!r}, but it takes a number above {ABOVE[name]}.")
    if name in MOST and value > MOST[name]:
        raise ValueError(f"{name} is {value!r}, but it takes {MOST[name]} or less.")


def whole_numbers(name: str, text: str) -> list[int]:
    """The whole numbers of a text like "1 4 24", each once, from the smallest; [] for an empty one.

    Raises `ValueError` where one is no whole number above 0.
    """
    words = text.replace(",", " ").split()
    if not all(
        word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words
    ):
        raise ValueError(
            f"{name} is {text!r}, but it takes whole numbers above 0, for example 1 4 24."
        )
    return sorted({int(word) for word in words})


def _a(kind: str) -> str:
    words = {"str": "a text", "float": "a number with a decimal point"}
    return words.get(kind, f"an {kind}" if kind[0] in "aeiou" else f"a {kind}")
