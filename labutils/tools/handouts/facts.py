"""When, where and with what a notebook was executed: told by the records of its run, not by the
notebook.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from nbformat import NotebookNode

FINISHED = re.compile(r"Lab (\d\d) is done, after (\d+) s\.")
"""What `Lab.done` shows at a notebook's end."""


EPOCH = "1970-01-01T00:00:00+00:00"
"""Stands for a time that nobody wrote down."""


class Mismatch(Exception):
    """The notebook and the results beside it don't belong together; the message says what was
    found.
    """


@dataclass(frozen=True)
class Facts:
    """What a first page says about a run; all of it from results.jsonl.

    `at`: its end, as ISO 8601; `seconds`: how long it took; `machines`: one, more where the records
    name several; `versions`: package -> version; `beside`: how many other labs may have run at
    once; `caution`: what a reader must mind.
    """

    number: str
    at: str
    seconds: float
    parameters: Mapping[str, Any]
    commit: str
    machines: tuple[str, ...]
    versions: Mapping[str, str]
    beside: int = 0
    caution: str = ""

    @property
    def date(self) -> str:
        """2026-11-21 23:21 UTC"""
        return f"{self.moment:%Y-%m-%d %H:%M} UTC"

    @property
    def moment(self) -> datetime:
        return datetime.fromisoformat(self.at).astimezone(UTC)

    def rows(self) -> list[tuple[str, str]]:
        """(what, its words) for the box on the first page."""
        parameters = ", ".join(f"{name} {value}" for name, value in self.parameters.items())
        return [
            ("mind", self.caution),
            ("executed", "" if self.at == EPOCH else f"{self.date}, in {self.seconds:.0f} s"),
            ("machine", "; ".join(self.machines)),
            (
                "beside",
                f"up to {self.beside} other labs at once: times are disturbed"
                if self.beside
                else "",
            ),
            ("parameters", parameters),
            ("versions", self.versions_text),
            ("commit", self.commit),
        ]

    @property
    def scale(self) -> str:
        return str(self.parameters.get("scale", ""))

    @property
    def versions_text(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


def facts_of(number: str, notebook: NotebookNode, records: Sequence[Mapping[str, Any]]) -> Facts:
    """The facts of the run that `notebook` shows.

    Raises `Mismatch` where the notebook did not reach its end, and where `records` know of no run
    that ended after as many seconds as the notebook says: its numbers would not be theirs.
    """
    seconds = finished_after(notebook, number)
    if seconds is None:
        raise Mismatch("its notebook was not run to its end. To run it: labutils run " + number)
    mine = [record for record in records if record.get("lab") == number]
    ends = [place for place, record in enumerate(mine) if _is_end(record)]
    fitting = [place for place in ends if round(mine[place]["seconds"]) == seconds]
    if not fitting:
        known = ", ".join(f"{mine[place]['seconds']:.0f} s" for place in ends) or "none"
        raise Mismatch(
            f"its notebook shows a run of {seconds} s, and results.jsonl has none such (it has: "
            f"{known}), so the two "
            f"are of different runs. To make them one: labutils run {number} --force with the same "
            "--results"
        )
    end = fitting[-1]
    start = max((place + 1 for place in ends if place < end), default=0)
    done = mine[end]
    # A lab that goes on where it stopped takes only what the same commit measured; other runs are
    # of earlier attempts.
    runs = [
        run
        for run in mine[start:end]
        if run.get("machine") and run.get("commit") == done.get("commit")
    ]
    return Facts(
        number=number,
        at=str(done["at"]),
        seconds=float(done["seconds"]),
        parameters={
            name: value
            for name, value in done.get("parameters", {}).items()
            if name != "results_dir"
        },
        commit=str(done.get("commit", "")),
        machines=tuple(dict.fromkeys(machine(run["machine"]) for run in runs)),
        versions=runs[-1].get("versions", {}) if runs else {},
        beside=int(done["beside"]) if _is_number(done.get("beside")) else 0,
    )


def facts_of_unfinished(number: str, notebook: NotebookNode, why: str) -> Facts:
    """What there is to say about a notebook that is on no record, by what papermill wrote into it."""
    stamp = notebook.metadata.get("papermill", {})
    at = stamp.get("end_time") or stamp.get("start_time") or EPOCH
    return Facts(number, str(at), float(stamp.get("duration") or 0), {}, "", (), {}, caution=why)


def _is_end(record: Mapping[str, Any]) -> bool:
    """Whether a record says that its lab was done, when, and after how long: files are edited by
    hand, too.
    """
    try:
        datetime.fromisoformat(record.get("at"))
    except (TypeError, ValueError):
        return False
    return record.get("status") == "done" and _is_number(record.get("seconds"))


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def finished_after(notebook: NotebookNode, number: str) -> int | None:
    """Seconds after which the notebook says that its lab was done; None where it doesn't say so."""
    for cell in reversed(notebook.cells):
        for output in reversed(cell.get("outputs", [])):
            said = FINISHED.search(
                str(output.get("data", {}).get("text/markdown", output.get("text", "")))
            )
            if said and said[1] == number:
                return int(said[2])
    return None


def machine(facts: Mapping[str, Any]) -> str:
    """A machine in one line: "NVIDIA H200 (150 GB, driver 580.159.04, CUDA 13.0), Intel Xeon, 16
    cores, 135 GB".
    """
    cpu = " ".join(
        str(facts.get("cpu", "unknown CPU")).replace("(R)", "").replace("(TM)", "").split()
    )
    host = [cpu]
    if "cores" in facts:
        host.append(f"{facts['cores']} cores")
    if _is_number(facts.get("ram_gb")):
        host.append(f"{facts['ram_gb']:.0f} GB")
    if "os" in facts:
        host.append(str(facts["os"]))
    if not facts.get("gpu"):
        return ", ".join(host) + ", no GPU"
    gpu = [f"{facts['gpu_memory_gb']:.0f} GB"] if _is_number(facts.get("gpu_memory_gb")) else []
    gpu += [
        f"{word} {facts[key]}"
        for word, key in (("driver", "driver"), ("CUDA", "cuda"))
        if facts.get(key)
    ]
    return (
        f"{facts['gpu']} ({', '.join(gpu)}); {', '.join(host)}"
        if gpu
        else f"{facts['gpu']}; {', '.join(host)}"
    )
