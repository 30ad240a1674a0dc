"""The tags of runs that were recorded by name only: the one place that reads a run's name.

Schema 1 had no tags. `tags_of` gives them to such a run when its record is read. How names were
made is in schema1_names.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

Tag = str | int | float | bool

SCHEMA1 = tomllib.loads(Path(__file__).with_name("schema1_names.toml").read_text("utf-8"))
"""How names were made."""
RENUMBERED = {"10": "11", "11": "12"}
"""A lab's number in schema 1 -> its number today."""
MOVED = ("decode", "files", "image input", "threads", "launches", "visible devices", "diagnosis")
"""Experiments that schema 1 has as lab 09's, and that are lab 10's today; TensorFlow's, too."""


def number_today(lab: str, experiment: object) -> str:
    """A lab's number today, by its number and an experiment of schema 1."""
    moved = lab == "09" and experiment in (*MOVED, "tensorflow")
    return "10" if moved else RENUMBERED.get(lab, lab)


def tags_of(lab: str, name: str) -> dict[str, Tag]:
    """The tags of the run that `lab` named so; a name that no pattern fits is the experiment."""
    for of_lab, experiment, *pattern in SCHEMA1["names"]:
        if of_lab == lab and (match := re.fullmatch("".join(pattern), name)):
            groups = {key: text for key, text in match.groupdict().items() if text is not None}
            tags = {"experiment": experiment} | SCHEMA1["defaults"].get(experiment, {})
            return tags | {key: _value(key, text) for key, text in groups.items()}
    return {"experiment": name}


def _value(tag: str, text: str) -> Tag:
    if tag in SCHEMA1["flags"]:
        return True
    if tag == "delay_us":
        return float(text)
    return int(text) if text.isdecimal() else SCHEMA1["words"].get(tag, {}).get(text, text)
