"""Runs on record: one JSON object a line of results.jsonl, appended and flushed one by one.

A run is identified by its lab and its `tags`; its name is for people. What does not apply to a run
is absent from its record, never 0. Raw samples stand beside their summary.

    runs = read_runs("results/mine")
    run = runs.one(lab="03", experiment="workers", workers=3)
    frame = to_frame(runs.select(lab="03", experiment="workers"))
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from labutils.recipe import Unavailable, is_number
from labutils.results.schema1_migration import Tag, number_today, tags_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 2
Wanted = Tag | tuple[Tag, ...]
"""A tag that is asked for, or several of which any will do."""
REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "reference" / "h200" / "results.jsonl"
"""Our H200's records. Beside its folder, which also has executed notebooks, are other cards'."""
LANES = ("article", "same work", "same mathematics")
PACKAGES = (
    *("torch", "transformers", "diffusers", "peft", "accelerate", "datasets", "bitsandbytes"),
    *("triton", "numpy", "transformer_engine", "unsloth", "torchao", "trl"),
)
"""The packages whose versions stand in every record, as far as they are installed."""

RETIRED = ("attention", "gradient_as_bucket_view", "static_graph")
"""Knobs that recipes on record have, and today's don't. (Some recipes there also have values that
are gone, as optimizer="adamw-paged": they are read and judged, but make no `Recipe`.)"""

LATER = "has a later schema: update labutils with `git pull && make install`"
"""What is wrong with a line that a newer labutils wrote."""

SOURCES = "LABUTILS_SOURCES"
"""The variable in which `labutils run` tells a lab's kernel digests of what it is made of."""

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "unable to find an engine",
)
"""What PyTorch's messages say, in small letters, where memory ran out: of the GPU, of the host, of
a library's own. A convolution for whose workspaces there is no room says that it finds no engine.
"""


_WITHOUT_A_GPU = (
    *("Torch not compiled with CUDA", "torch.cuda.Stream requires CUDA"),
    *("Found no NVIDIA driver", "No CUDA GPUs are available"),
    *("dummy base class CUDAGraph", "dummy base class Event"),
)
"""What PyTorch says where code for a GPU runs without one."""


def status_of(error: BaseException) -> str:
    """A run's `status` after `error`, in one line: "oom", "skipped: why" (not on this machine) or
    "error: what"."""
    said = " ".join(str(error).split())
    if isinstance(error, Unavailable):
        return f"skipped: {said}"
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    if named or any(words in str(error).lower() for words in OUT_OF_MEMORY):
        return "oom"  # on a CPU PyTorch raises a plain RuntimeError
    if any(words in said for words in _WITHOUT_A_GPU):
        return "skipped: there is no NVIDIA GPU"
    if "InvalidCxxCompiler" in said:
        return (
            "skipped: torch.compile builds C++ here, and no compiler for it works; "
            "sudo apt install g++ brings one"
        )
    kind = "skipped" if isinstance(error, ImportError) else "error"
    return f"{kind}: {type(error).__name__}: {said}"


@dataclass
class Run:
    """What one recipe did on one workload at one scale on one machine.

    `tags` say what the run is: its `experiment`, and one tag for everything varied in it. A tag
    that is False is left out. `metrics` holds summaries ({"median", "p10", "p90", "n"}) and single
    numbers, `samples` the raw series behind them. Units are in the names: `_ms`, `_s`, `_gb` (10^9
    bytes), `_per_s`; ratios (`gpu_busy`, `mfu`) lie in 0..1. `status` is "ok", "oom", "skipped:
    why" or "error: what". `made_of`: a digest of the code and the parameters behind it.
    `notebook`: the file that it came from. `comparison`: an id that runs of one interleaved
    comparison share: the n-th rounds of two comparisons were measured at different times.
    """

    lab: str
    run: str
    lane: str = "article"
    workload: str = ""
    scale: str = "tiny"
    weights: str = "random"
    data: str = "generated"
    status: str = "ok"
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    at: str = ""
    made_of: str = ""
    notebook: str = ""
    comparison: str = ""
    tags: dict[str, Tag] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tags = {key: tag for key, tag in self.tags.items() if tag is not False}

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def identity(self) -> tuple[str, frozenset[tuple[str, Any]]]:
        """Lab and tags; of a run without tags its name instead."""
        tags = self.tags or {"": self.run}
        return self.lab, frozenset((key, _typed(value)) for key, value in tags.items())

    @property
    def host(self) -> tuple[str, ...]:
        """GPU, CPU and cores of the machine, which times depend on. Two machines with the same ones
        are told apart by the card's id."""
        return tuple(str(self.machine.get(name)) for name in ("gpu", "gpu_id", "cpu", "cores"))

    @property
    def label(self) -> str:
        """The tags in words, for a row of a table: "bf16, batch 1, again"."""
        words = []
        for key, tag in sorted(self.tags.items(), key=lambda pair: pair[1] is True):
            if key == "experiment":
                continue
            name = key.replace("_", " ")
            text = f"{tag:g}" if isinstance(tag, float) else str(tag)
            is_plain = isinstance(tag, str) and not words
            words.append(name if tag is True else text if is_plain else f"{name} {text}")
        return ", ".join(words) or str(self.tags.get("experiment", self.run))

    def has(self, **tags: Wanted) -> bool:
        """Whether the run has these tags, of a tuple any one; one that is False, it must not have
        as True.
        """
        wanted = {key: tag if isinstance(tag, tuple) else (tag,) for key, tag in tags.items()}
        return all(_typed(self.tags.get(key, False)) in map(_typed, wanted[key]) for key in wanted)

    def metric(self, name: str) -> float | None:
        """The metric's number, the median of a summary; None where it does not apply."""
        value = self.metrics.get(name)
        return value.get("median") if isinstance(value, dict) else value

    def record(self) -> dict[str, Any]:
        """The JSON object of results.jsonl; but for lab and name, empty fields are left out."""
        head = {"schema": SCHEMA, "lab": self.lab, "run": self.run, "tags": self.tags}
        return head | {k: v for k, v in vars(self).items() if v not in ("", {}, [], None)}


def _typed(tag: Tag) -> tuple[bool, Tag]:
    """A tag that True and 1, or False and 0, don't share."""
    return isinstance(tag, bool), tag


class Runs(Sequence[Run]):
    """Runs of any labs: the newest of each (lab, tags) on each host."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs = list({(run.identity, run.host): run for run in runs}.values())

    def __getitem__(self, place: Any) -> Any:
        return self._runs[place]

    def __len__(self) -> int:
        return len(self._runs)

    def select(self, lab: str | None = None, **tags: Wanted) -> Runs:
        """The runs that have these tags, whichever others they have. A tag asked for as False is
        one that they don't have."""
        return Runs(run for run in self if lab in (None, run.lab) and run.has(**tags))

    def by_host(self) -> list[Runs]:
        """Those of each host, in the order in which the hosts first come."""
        hosts = dict.fromkeys(run.host for run in self)
        return [Runs(run for run in self if run.host == host) for host in hosts]

    def of_newest_host(self) -> Runs:
        """Those of the host that measured last: no table mixes two machines."""
        last = max(self, key=lambda run: run.at, default=None)
        return Runs(run for run in self if last and run.host == last.host)

    def newest(self) -> Runs:
        """The newest of each (lab, tags), of whichever host it is."""
        latest: dict[Any, Run] = {}
        for run in self:
            if run.identity not in latest or run.at >= latest[run.identity].at:
                latest[run.identity] = run
        return Runs(latest.values())

    def one(self, lab: str | None = None, **tags: Tag) -> Run | None:
        """The newest run of exactly these tags, else the only one that has them, else None."""
        those = self.select(lab, **tags).newest()
        count = sum(tag is not False for tag in tags.values())
        exact = [run for run in those if len(run.tags) == count]
        return next((few[0] for few in (exact, those) if len(few) == 1), None)


def to_frame(runs: Iterable[Run]) -> pd.DataFrame:
    """One row a run: its lab, its tags in words ("run"), lane, workload, scale and status, then a
    column for each tag, and one for each metric (its median).

    A tag or metric that a run doesn't have is missing (NaN) in its row."""
    import pandas as pd

    fields = ("lane", "workload", "scale", "status")
    return pd.DataFrame(
        {"lab": run.lab, "run": run.label}
        | {name: getattr(run, name) for name in fields}
        | run.tags
        | {name: run.metric(name) for name in run.metrics}
        for run in runs
    )


def summarise(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and count of `samples`. Raises `ValueError` where there is
    none.
    """
    if not len(samples):
        raise ValueError("No samples to summarise: the run measured nothing.")
    median, p10, p90 = map(float, np.quantile(samples, (0.5, 0.1, 0.9)))
    return {"median": median, "p10": p10, "p90": p90, "n": len(samples)}


# ---------------------------------------------------------------------------------------- writing


class Results:
    """A results.jsonl that is only ever appended to. Raises `OSError` at once if it can't be."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "results.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _check_no_pipe(self.path)
        with self.path.open("ab"):
            pass

    def append(self, run: Run | dict[str, Any]) -> None:
        """Write one record and flush it to the disk. Raises `ValueError` for NaN or infinity, which
        JSON lacks.
        """
        record = run.record() if isinstance(run, Run) else {"schema": SCHEMA} | run
        line = json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
        with self.path.open("ab+") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # labs side by side keep results in one file
            file.write((b"\n" if _is_cut_off(file) else b"") + line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _is_cut_off(file: IO[bytes]) -> bool:
    """Whether the last line lacks its end: its writer was killed."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
    return file.read() not in (b"", b"\n")


# ---------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Reading:
    """What was read of a results.jsonl: its sound `records`, (line, what is wrong with it) of all
    others, and how many records were `migrated` from schema 1. The file itself is left as it is.
    """

    path: Path
    records: list[dict[str, Any]]
    passed_over: list[tuple[int, str]]
    migrated: int = 0

    def complaint(self) -> str:
        """How many lines were passed over, the first of each kind, and what to type; empty where
        none was."""
        if not self.passed_over:
            return ""
        count, of = len(self.passed_over), len(self.passed_over) + len(self.records)
        first = {why: line for line, why in reversed(self.passed_over)}
        told = [f"line {line} {why}" for line, why in sorted((n, why) for why, n in first.items())]
        again = " To measure again: labutils run LAB --force --results "
        again += shlex.quote(str(self.path.parent))
        if self.path in reference_files():
            again = " It is the course's own, which git restores: git checkout reference"
        return (
            f"{self.path}: {count} of {of} lines can't be used. The first of each kind: "
            f"{'; '.join(told)}. The file was left as it is.{again * (first.keys() != {LATER})}"
        )


def _check_no_pipe(path: Path) -> None:
    """Raise `OSError` for a pipe or a device: who opens a pipe waits for another to write."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise OSError(f"{path.name} is a pipe or a device, and not a regular file")


def read_file(path: Path) -> Reading:
    """Read a results.jsonl that a person asks for. Raises `ValueError`, with what to type, where it
    can't be read.
    """
    try:
        _check_no_pipe(path)
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ValueError(
            f"{path} can't be read: {error.strerror or error}. So no results can be shown. Name a "
            "folder that a lab wrote to, as in: --results results/NAME. To make one: labutils run"
        ) from None
    records, passed_over, migrated = [], [], 0
    for number, line in enumerate(lines, 1):
        # Some editors put a byte-order mark first, which `cat` then puts before other lines, too.
        line = line.lstrip("\ufeff").strip()
        read = _record_of(line) if line else None
        if isinstance(read, dict):
            migrated += read.get("schema") == 1
            records.append(read | {"schema": SCHEMA})
        elif read:
            passed_over.append((number, read))
    return Reading(path, records, passed_over, migrated)


def check_usable(readings: Sequence[Reading]) -> None:
    """Raise `ValueError`, with what to type, where lines were passed over and no record is left."""
    lines = [reading.complaint() for reading in readings if reading.passed_over]
    if lines and not any(reading.records for reading in readings):
        head = "There is no record that this version can use:"
        raise ValueError("\n".join([head, *lines, "Or name other results: --results results/NAME"]))


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a results.jsonl or of the folder that holds it, migrated to today's schema.

    A line that can't be used is passed over without a word. Returns [] where there is no such file.
    """
    path = Path(path)
    path = path / "results.jsonl" if os.path.isdir(path) else path
    # Path.exists raises OSError for a name that is too long.
    return read_file(path).records if os.path.exists(path) else []


def read_runs(path: str | Path, lab: str | None = None) -> Runs:
    """The runs of a results.jsonl or of the folder that holds it; of equal tags the newest wins."""
    return runs_of(read_records(path), lab)


def reference_files() -> list[Path]:
    """Our own records, a file for each kind of card."""
    return sorted(REFERENCE.parents[1].glob("*/results.jsonl"))


def reference_runs(lab: str | None = None) -> Runs:
    """The runs of our own records, of all cards: each is a host of its own."""
    read = map(read_file, reference_files())
    return runs_of((record for reading in read for record in reading.records), lab)


def runs_of(records: Iterable[dict[str, Any]], lab: str | None = None) -> Runs:
    """The runs among `records`; predictions and "done" are left out."""
    known = set(Run.__dataclass_fields__)
    return Runs(
        Run(**{key: value for key, value in record.items() if key in known})
        for record in records
        if isinstance(record.get("run"), str) and lab in (None, record["lab"])
    )


def _record_of(line: str) -> dict[str, Any] | str:
    """The record that a line holds, with tags, or what is wrong with the line."""
    try:
        numbers = dict.fromkeys(("parse_constant", "parse_float", "parse_int"), _finite)
        record = json.loads(line, **numbers)
    except json.JSONDecodeError as error:
        cut_off = line[0] == "{" and (line[-1] != "}" or error.pos == len(line))
        return "is cut off, as by a run that was stopped" if cut_off else "is not JSON"
    except (ValueError, RecursionError):  # also lists nested without end
        return "is beyond limits: NaN, infinity, too large a number or too deep a list"
    if not isinstance(record, dict):
        return "is no JSON object"
    if wrong := _unsound(record):
        return wrong
    if "run" in record and not record.get("tags"):
        record["tags"] = tags_of(record["lab"], record["run"])
    if record.get("schema") == 1:
        record["lab"] = number_today(record["lab"], record.get("tags", {}).get("experiment"))
    if "recipe" in record:
        record["recipe"] = {k: v for k, v in record["recipe"].items() if k not in RETIRED}
    return record


def _finite(word: str) -> float | int:
    """The number that `word` is. Raises `ValueError` where no float holds it."""
    if not math.isfinite(number := float(word)):
        raise ValueError(word)
    return int(word) if word.lstrip("-").isdigit() else number


_PARTS = dict.fromkeys(("status", "topic", "unit", "on"), str) | {"parameters": dict}
_PARTS |= {name: type(empty) for name, empty in vars(Run("", "")).items()}
_PARTS |= dict.fromkeys(("value", "measured", "seconds"), float)
"""What each part is of a run, of a prediction or its score, and of a lab's end."""
_KINDS = {str: "text", dict: "object", float: "number"}
_NEEDED = {"done": (), "prediction": ("topic", "value"), "score": ("topic", "value", "measured")}
"""Status -> what a record of it can't do without, besides its lab; all others are runs."""


def _unsound(record: Mapping[str, Any]) -> str:
    """What is wrong with a record's parts, empty where nothing is: hands edit files, too."""
    schema = record.get("schema", SCHEMA)
    if not is_number(schema) or schema not in (1, SCHEMA):
        return LATER if is_number(schema) and schema > SCHEMA else "has a schema that never was"
    needed = ("lab", *_NEEDED.get(str(record.get("status")), ("run",)))
    for name, kind in _PARTS.items():
        part = record.get(name, None if name in needed else kind())
        if not (is_number(part) if kind is float else isinstance(part, kind)):
            return f"has no {_KINDS[kind]} as its {name}"
    if not all(isinstance(tag, str | int | float) for tag in record.get("tags", {}).values()):
        return "has a tag that is neither text nor number"
    if record.get("beside"):  # an earlier version ran labs side by side if asked to
        return "was measured while other labs ran, so its times can't be judged"
    return ""


# ---------------------------------------------------------------------------------------- folders


def files_below(folder: Path) -> list[Path]:
    """The results.jsonl of each folder in `folder`, the oldest first."""
    files = [path for path in folder.glob("*/results.jsonl") if os.path.isfile(path)]
    return sorted(files, key=lambda path: (path.stat().st_mtime, str(path)))


def named(name: str | Path) -> Path:
    """The path that a person named, `~` resolved. Raises `ValueError`, with what to type, where it
    leads nowhere.
    """
    try:
        return Path(os.path.abspath(Path(name).expanduser()))
    except RuntimeError as error:  # nobody's home
        raise ValueError(f"{name}: {error} Write it out: --results results/NAME") from None


# ------------------------------------------------------------------------------------- provenance


def plain(text: str) -> str:
    """`text` without colours and other characters that a terminal would obey."""
    return re.sub(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def told_sources() -> Any:
    """The digests of notebook and code that `labutils run` gave this process; None where something
    else started it.
    """
    try:
        return json.loads(os.environ.get(SOURCES, "null"))
    except ValueError:  # somebody set it by hand
        return None


def code() -> str:
    """Digest of every file of labutils that can change what a lab does, by name and content."""
    root, kinds = REPOSITORY / "labutils", (".py", ".yaml", ".toml", ".mplstyle")
    files = sorted(path for path in root.rglob("*") if path.suffix in kinds and path.is_file())
    names = (bytes(file.relative_to(root)) for file in files)
    return digest(part for name in names for part in (name, (root / name.decode()).read_bytes()))


def digest(parts: Iterable[bytes]) -> str:
    """Of the parts and of where each ends."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"%d:" % len(part) + part)
    return whole.hexdigest()[:16]


def now() -> str:
    """This moment in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that results depend on, without importing them."""
    installed = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


@functools.cache
def commit() -> str:
    """The commit of this checkout ("+" after it: with local changes), LABUTILS_COMMIT where there
    is no checkout.
    """
    if given := os.environ.get("LABUTILS_COMMIT"):
        return given
    describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    said = subprocess.run(describe, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"
