"""Runs on record: one JSON object a line, appended and flushed one by one, so that nothing measured
is ever lost.

What does not apply to a run is absent from its record, never 0. Raw samples stand beside their
summary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

SCHEMA = 1
REPOSITORY = Path(__file__).resolve().parents[2]
REFERENCE = REPOSITORY / "reference" / "h200" / "results.jsonl"
LANES = ("article", "same work", "same mathematics")
PACKAGES = ("torch", "transformers", "diffusers", "peft", "accelerate", "datasets", "bitsandbytes", "triton", "numpy")


BESIDE, SOURCES = "LABUTILS_BESIDE", "LABUTILS_SOURCES"
"""What `labutils run` tells a lab's kernel: how many other labs may run at once, and digests of
what it is made of.
"""

OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "unable to find an engine",
)
"""What PyTorch's messages say, in small letters, where memory ran out: of the GPU, of the host, of
a library's own. (A convolution passes over every algorithm whose workspace finds no room, and then
says that it found none.)"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out; on a CPU PyTorch raises a plain RuntimeError."""
    named = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
    return named or any(words in str(error).lower() for words in OUT_OF_MEMORY)




def status_of(error: BaseException) -> str:
    """What a run's `status` says about `error`, in one line as it may stand in a table: "oom",
    "skipped: why" (not on this machine) or "error: what"."""
    said = " ".join(str(error).split())
    if isinstance(error, Unavailable):
        return f"skipped: {said}"
    if is_out_of_memory(error):
        return "oom"
    if "InvalidCxxCompiler" in said:
        return "skipped: torch.compile builds C++ here, and no compiler for it works; sudo apt install g++ brings one"
    kind = "skipped" if isinstance(error, ImportError) else "error"
    return f"{kind}: {type(error).__name__}: {said}"


@dataclass
class Run:
    """What one recipe did on one workload at one scale on one machine.

    `metrics` holds summaries ({"median", "p10", "p90", "n"}) and single numbers, `samples` the raw
    series behind them. Units are in the names: `_ms`, `_s`, `_gb` (10^9 bytes), `_per_s`; ratios
    (`gpu_busy`, `mfu`) lie in 0..1. `status` is "ok", "oom", "skipped: why" or "error: what".
    `beside`: how many other labs may have run on this machine at the same time, as far as `labutils
    run` knows. `made_of`: a digest of the code and the parameters behind it; of equal ones an
    interrupted lab's runs are taken over.
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
    beside: int | None = None
    made_of: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def metric(self, name: str) -> float | None:
        """The metric's number (the median where it is a summary), or None where it does not apply.
        """
        value = self.metrics.get(name)
        return value.get("median") if isinstance(value, dict) else value

    def record(self) -> dict[str, Any]:
        """The JSON object of results.jsonl; empty fields are left out."""
        return {"schema": SCHEMA} | {k: v for k, v in vars(self).items() if v not in ("", {}, [], None)}


def summarise(samples: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and count of `samples`. Raises `ValueError` where there is
    none.
    """
    if not samples:
        raise ValueError("No samples to summarise: the run measured nothing.")
    ordered = sorted(samples)
    return {
        "median": _quantile(ordered, 0.5),
        "p10": _quantile(ordered, 0.1),
        "p90": _quantile(ordered, 0.9),
        "n": len(ordered),
    }


def step_by_step(one: Run, other: Run) -> list[tuple[float, float]]:
    """The milliseconds of both runs' steps, of those that both took on the same tokens; [] where
    they share none, or steps don't differ in what they take in. (Times of one `Benchmark` that has
    `same_batches` stand in the same order.)"""
    times, taken = ([run.samples.get(key, []) for run in (one, other)] for key in ("step_ms", "useful_tokens"))
    pairs = zip(*times, *taken, strict=False)
    return [(mine, its) for mine, its, tokens, others in pairs if tokens == others]


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks, as numpy's default."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Results:
    """A results.jsonl that is only ever appended to. Raises `PermissionError` or
    `NotADirectoryError` at once if it can't be."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "results.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab"):
            pass

    def append(self, run: Run | dict[str, Any]) -> None:
        """Write one record and flush it to the disk. Raises `ValueError` for NaN or infinity, which
        JSON lacks.
        """
        record = run.record() if isinstance(run, Run) else {"schema": SCHEMA} | run
        line = json.dumps(record, allow_nan=False, ensure_ascii=False).encode()
        with self.path.open("ab+") as file, _alone_with(file):
            file.write((b"\n" if _is_torn(file) else b"") + line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, lab: str, **stamp: Any) -> None:
        """Mark the lab as run to its end."""
        self.append({"lab": lab, "status": "done", "at": now()} | stamp)


@contextlib.contextmanager
def _alone_with(file: IO[bytes]) -> Iterator[None]:
    """No other process appends to `file` meanwhile: labs side by side keep their results in one."""
    try:
        import fcntl
    except ImportError:  # Windows; one lab at a time is safe there
        yield
        return
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file lets go of it


def _is_torn(file: IO[bytes]) -> bool:
    """Whether the last line lacks its end: its writer was killed."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


@dataclass(frozen=True)
class Reading:
    """What was read of a results.jsonl: its sound `records`; (line, what is wrong with it) of all
    others.
    """

    path: Path
    records: list[dict[str, Any]]
    passed_over: list[tuple[int, str]]

    def told(self) -> str:
        """How many lines were passed over and why, and what to type; empty where none was."""
        if not self.passed_over:
            return ""
        shown = "; ".join(f"line {line} {why}" for line, why in self.passed_over[:3])
        rest = f"; and {len(self.passed_over) - 3} more" if len(self.passed_over) > 3 else ""
        count, of = len(self.passed_over), len(self.passed_over) + len(self.records)
        return (
            f"{self.path}: {count} of {of} lines can't be used ({shown}{rest}). If what they held "
            "is missed, "
            "measure it again: labutils run LAB --force --results "
            f"{shlex.quote(str(self.path.parent))}"
        )


def read_file(path: Path) -> Reading:
    """Read a results.jsonl that a person asks for. Raises `ValueError`, with what to type, where it
    can't be read.
    """
    try:
        lines = list(_lines(path))
    except OSError as error:
        raise ValueError(
            f"{path} can't be read: {(error.strerror or str(error)).lower()}. Name results that "
            "you may read, as in: "
            "--results results/NAME"
        ) from None
    judged = [(line, found, found if isinstance(found, str) else why_unsound(found)) for line, found in lines]
    return Reading(
        path,
        records=[found for _, found, why in judged if isinstance(found, dict) and not why],
        passed_over=[(line, why) for line, _, why in judged if why],
    )


def check_usable(readings: Sequence[Reading]) -> None:
    """Raise `ValueError`, with what to type, where lines were passed over and no record is left."""
    told = [reading.told() for reading in readings if reading.passed_over]
    if told and not any(reading.records for reading in readings):
        raise ValueError(
            "\n".join(
                [
                    "There is no record that this version can use:",
                    *told,
                    "Or name other results: --results results/NAME",
                ]
            )
        )


def files_below(folder: Path) -> list[Path]:
    """The results.jsonl of each folder in `folder`, the oldest first."""
    found = [path for path in folder.glob("*/results.jsonl") if os.path.isfile(path)]
    return sorted(found, key=lambda path: (path.stat().st_mtime, str(path)))


def check_no_folder(path: Path) -> None:
    """Raise `ValueError`, with what to type, where a folder stands in the place of a results.jsonl.
    """
    if os.path.isdir(path):
        place, inner = shlex.quote(str(path)), path / "results.jsonl"
        other = f"Name it: --results {place}" if os.path.isfile(inner) else f"Move it away: mv {place} {place}.folder"
        raise ValueError(f"{path} is a folder, where the file of that name belongs. {other}")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All records of a results.jsonl or of the folder that holds it.

    A line that is torn (a run was killed while writing), is no object, is beyond Python's limits or
    has another schema is passed over without a word: what was whole stays usable. Returns [] where
    there is no such file.
    """
    path = Path(path)
    path = path / "results.jsonl" if os.path.isdir(path) else path
    if not os.path.exists(path):  # Path.exists raises OSError for a name that is too long
        return []
    return [found for _, found in _lines(path) if isinstance(found, dict)]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number, the record) of each line that isn't blank; where it holds none, what is wrong with
    it.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if line.strip():
            yield number, _record_of(line)


def _record_of(line: str) -> dict[str, Any] | str:
    try:
        record = json.loads(line, parse_int=_whole_number)
    except json.JSONDecodeError:
        cut = line.startswith("{") and not line.rstrip().endswith("}")
        return "is cut off, as by a run that was stopped" if cut else "is not JSON"
    except (ValueError, RecursionError):  # a number beyond every float; lists nested without end
        return "is beyond Python's limits"
    if not isinstance(record, dict):
        return "is no JSON object"
    if record.get("schema", SCHEMA) != SCHEMA:
        return f"has schema {record['schema']!r:.40}, and this version reads {SCHEMA}"
    return record


def _whole_number(word: str) -> int:
    """Raises `ValueError` for one beyond every float, which nothing can compute with."""
    if len(word) > 300:
        raise ValueError(f"A number of {len(word)} digits measures nothing.")
    return int(word)


def read_runs(path: str | Path, lab: str | None = None) -> dict[tuple[str, str], Run]:
    """(lab, run) -> the last Run recorded under that name; the newest record wins."""
    return runs_of(read_records(path), lab)


def runs_of(records: Iterable[dict[str, Any]], lab: str | None = None) -> dict[tuple[str, str], Run]:
    """(lab, run) -> Run out of `records`; predictions, "done" and unsound records are left out."""
    known = set(Run.__dataclass_fields__)
    runs = {}
    for record in records:
        if isinstance(record.get("run"), str) and is_sound(record) and lab in (None, record["lab"]):
            runs[record["lab"], record["run"]] = Run(**{k: v for k, v in record.items() if k in known})
    return runs


def is_sound(record: Mapping[str, Any]) -> bool:
    """Whether a record's parts have the kinds that they should."""
    return not why_unsound(record)


def why_unsound(record: Mapping[str, Any]) -> str:
    """What is wrong with a record's parts, empty where nothing is: files are edited by hand, too.
    """
    if not isinstance(record.get("lab"), str):
        return "names no lab"
    for key in ("run", "lane", "status", "scale"):
        if not isinstance(record.get(key, ""), str):
            return f"has a {key} that is no text"
    for key in ("recipe", "metrics", "samples", "machine"):
        if not isinstance(record.get(key, {}), dict):
            return f"has {key} that {'is' if key in ('recipe', 'machine') else 'are'} no object"
    return ""


def named(name: str | Path) -> Path:
    """The path that a person named, `~` resolved. Raises `ValueError`, with what to type, where it
    leads nowhere.
    """
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{name} lies in the home folder of a user that this machine doesn't know. "
            "Write the folder's path out, as in: --results results/NAME"
        ) from None
    try:
        os.path.abspath(path)
    except FileNotFoundError:
        raise ValueError(
            f"The current folder was deleted, so {name} leads nowhere. Go to a folder that exists: "
            f"cd {REPOSITORY}"
        ) from None
    return path


def told(name: str) -> Any:
    """What `labutils run` told this process under that name (`BESIDE`, `SOURCES`); None where it
    did not start it.
    """
    try:
        return json.loads(os.environ.get(name, "null"))
    except ValueError:  # somebody set it by hand
        return None


def code() -> str:
    """Digest of every file of labutils that can change what a lab does, by name and content."""
    files = (path for path in (REPOSITORY / "labutils").rglob("*") if path.suffix in (".py", ".mplstyle"))
    return _digest_of(tuple(sorted((str(path), path.stat().st_mtime_ns) for path in files if path.is_file())))


@functools.lru_cache(1)
def _digest_of(files: tuple[tuple[str, int], ...]) -> str:
    root = REPOSITORY / "labutils"
    return digest(part for path, _ in files for part in (os.path.relpath(path, root).encode(), Path(path).read_bytes()))


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
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def commit() -> str:
    """The commit of this checkout ("+" after it: with local changes), LABUTILS_COMMIT where there
    is no checkout.
    """
    if given := os.environ.get("LABUTILS_COMMIT"):
        return given
    git = ["git", "-C", str(REPOSITORY)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return head.stdout.strip() + ("+" if dirty else "")
