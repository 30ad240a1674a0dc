"""Which labs are done, which have changed since, how long each took last time, and which may run at
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labutils.profiling.machine import SEVERAL_GPUS
from labutils.results import records as results
from labutils.tools.run.asking import Lab

SUMMING_UP = ("11",)
"""Labs that read what the others keep: they run last, and are done only until another lab keeps
something more.
"""

UNKNOWN = "unknown"
"""What has changed since a run that didn't record what it was made of."""

Record = Mapping[str, Any]


# What is done


def done_records(records: Sequence[Record], lab: Lab) -> list[Record]:
    """The records that say `lab` ran to its end; of one that sums up the others, since the last of
    those was kept.
    """
    if lab.number in SUMMING_UP:
        others = [
            place for place, record in enumerate(records, 1) if record.get("lab") != lab.number
        ]
        records = records[max(others, default=0) :]
    return ends_of(records, lab.number)


def ends_of(records: Sequence[Record], number: str) -> list[Record]:
    """The records that say lab `number` ran to its end, as long as it kept no run after them.

    The newest run of a name counts: where a later attempt measured some again and did not end, old
    and new are mixed.
    """
    mine = [record for record in records if record.get("lab") == number]
    measured = [place for place, record in enumerate(mine, 1) if record.get("run")]
    return [record for record in mine[max(measured, default=0) :] if record.get("status") == "done"]


def is_done(recorded: Sequence[Record], values: Mapping[str, Any]) -> bool:
    """Whether one of the runs that ended well had the parameters `values`, as far as it recorded
    its own.
    """
    return any(_has(record, values) for record in recorded)


def _has(record: Record, values: Mapping[str, Any]) -> bool:
    own = record.get("parameters", {})
    # A record that was edited into something else doesn't count.
    return isinstance(own, dict) and all(values.get(name) == value for name, value in own.items())


def what_changed(
    recorded: Sequence[Record], values: Mapping[str, Any], sources: Mapping[str, str]
) -> list[str]:
    """What is other than when the lab last ran to its end: "notebook", "labutils", "parameters"; []
    where nothing is.

    A record that doesn't say what it was made of, as those of labs that a person ran by hand, may
    be of anything.
    """
    last = recorded[-1]
    were = last.get("sources")
    if not isinstance(were, dict):
        return [UNKNOWN]
    return [name for name in sources if were.get(name) != sources[name]] + ["parameters"] * (
        not _has(last, values)
    )


def sources_of(lab: Lab) -> dict[str, str]:
    """Part -> digest of what a lab's results are made of: the notebook's code, prose left out, and
    all of labutils.
    """
    import nbformat

    cells = nbformat.read(lab.path, as_version=4).cells
    return {
        "notebook": results.digest(
            cell.source.encode() for cell in cells if cell.cell_type == "code"
        ),
        "labutils": results.code(),
    }


def seconds_before(lab: Lab, values: Mapping[str, Any], folders: Iterable[Path]) -> float | None:
    """Seconds that the lab took when it last ran to its end at this scale, by the first of
    `folders` that knows.
    """
    for folder in folders:
        for record in reversed(_records_in(folder)):
            if record.get("lab") != lab.number or record.get("status") != "done":
                continue
            own, seconds = record.get("parameters"), record.get("seconds")
            if (
                isinstance(own, dict)
                and own.get("scale") == values.get("scale")
                and isinstance(seconds, int | float)
            ):
                return float(seconds)
    return None


def _records_in(folder: Path) -> list[dict[str, Any]]:
    """Any folder's records; [] where they can't be read: others may keep what they like beside
    ours.
    """
    try:
        return results.read_records(folder)
    except OSError:
        return []


# What may run at once


def waves(labs: Sequence[Lab], jobs: int, gpus: int) -> list[list[Lab]]:
    """The labs in groups that run one after the other; those of a group may run at once, `jobs` of
    them.

    What sums up the others comes last, alone; so does, before it, what would take the GPUs that
    others were given.
    """
    last = [lab for lab in labs if lab.number in SUMMING_UP]
    greedy = [lab for lab in labs if lab.number in SEVERAL_GPUS] if jobs > 1 and gpus > 1 else []
    first = [lab for lab in labs if lab not in last and lab not in greedy]
    return [group for group in (first, *([lab] for lab in [*greedy, *last])) if group]


def variables(job: int, beside: int, gpus: Sequence[str], cores: int, lab: Lab) -> dict[str, str]:
    """What the kernel of `lab` finds in its environment where `beside` others may run at once;
    `job` counts from 0.

    Its own of the `gpus` where there are several, and its share of the cores: left alone, every lab
    would start a thread a core for each operation, and they would mostly wait for each other. What
    a person has set stays.
    """
    if not beside:
        return {}
    shared = len(gpus) < 2 or lab.number in SEVERAL_GPUS
    own = {} if shared else {"CUDA_VISIBLE_DEVICES": gpus[job % len(gpus)]}
    threads = (
        {}
        if "OMP_NUM_THREADS" in os.environ
        else {"OMP_NUM_THREADS": str(max(1, cores // (beside + 1)))}
    )
    return {results.BESIDE: str(beside)} | own | threads


def visible_gpus() -> list[str]:
    """The GPUs that labs may be given, as CUDA_VISIBLE_DEVICES calls them."""
    from labutils.training.launcher import gpu_count

    shown = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    return (shown or [str(number) for number in range(gpu_count())])[: gpu_count()]
