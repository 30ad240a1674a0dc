"""Faults at random for a given time, and what must not come of them, counted.

    python tests/faults.py 600                     # all kinds
    python tests/faults.py 600 killed_training     # one of them

Trainings and `labutils run` are killed at any moment and started again, disks fill up, files are
damaged, and other processes keep the cores busy. Every program is forked off one that has imported
everything: a trial takes seconds, and a kill meets the program itself instead of its imports.
TMPDIR on a small file system of its own is filled up to the last bytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat

sys.path.extend(str(Path(__file__).parent / folder) for folder in ("tools", "training"))
import interrupted_runs
import troubled_notebooks

from labutils import cli
from labutils.results import report
from labutils.results.records import REFERENCE, REPOSITORY, read_runs
from labutils.tools import diagnose, handouts
from labutils.tools import run as runner
from labutils.training import checkpoint

IMPORTED = (report, runner, handouts, diagnose)  # what a program would else import for itself

WRONG = ("results lost", "notebooks torn", "tracebacks", "hangs", "parts left")
LIMIT_S, SMALL_DISK = 180, 200e6
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
JOURNAL = """\
for at in range(20):
    kept.append(Run("{name}", str((os.getpid(), at)), tags=dict(pid=os.getpid(), at=at)))
    print(os.getpid(), at, file=open("{name}.journal", "a"), flush=True)
    time.sleep(0.02)"""


def train(case: interrupted_runs.Case, folder: Path, fatal: int) -> None:
    """Train to the end, from a checkpoint where there is one, and print a digest of weights and
    moments; die at the `fatal`th fsync.
    """
    left, fsync = iter(range(fatal - 1, -1, -1)), os.fsync
    die = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = lambda handle: (fsync if next(left, 1) else die)(handle)
    end = interrupted_runs.final(case, folder, (folder / checkpoint.FILE).exists(), 1)
    tensors = [*end["weights"], *end["moments"]]
    print(hashlib.sha256(b"".join(part.numpy().tobytes() for part in tensors)).hexdigest())


class Trials:
    """Trials in a scratch `folder`. `counts`: what was tried, and what went wrong."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice, self.counts = folder, dice, Counter()
        self.took: dict[object, float] = {}  # what is done -> s, where nobody killed it
        self.ends: dict[str, str] = {}
        troubled_notebooks.TROUBLE["steady"] = JOURNAL
        self.labs = [troubled_notebooks.write(folder, name, "steady") for name in ("one", "two")]

    def start(self, act: Callable, *given: object, kill: bool = False, room: int = -1) -> str:
        """Let a process do `act`, killed at some moment or with files of `room` bytes at most: what
        it printed."""
        heard, told = os.pipe()
        os.set_blocking(heard, False)
        if (child := os.fork()) == 0:
            os.dup2(told, 2)
            sys.stdout = sys.stderr = os.fdopen(told, "w")
            faulthandler.dump_traceback_later(LIMIT_S - 9, file=sys.stderr)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
            try:
                act(*given)
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        began, said, ended = time.monotonic(), b"", 0
        kind = given[0] if act is train else given[0][0]
        moment = self.dice.uniform(0, self.took.get(kind, 5.0)) if kill else LIMIT_S
        while not ended:
            time.sleep(0.01)
            ended, _ = os.waitpid(child, os.WNOHANG)
            with contextlib.suppress(BlockingIOError):  # a pipe holds less than is read at once
                said += os.read(heard, 1 << 20)
            if not ended and time.monotonic() > began + moment:
                os.kill(child, self.dice.choice(SIGNALS) if kill else signal.SIGKILL)
                self.counts["kills" if kill else "hangs"] += 1
                kill, moment = False, moment + LIMIT_S
        os.close(heard)
        os.close(told)
        if moment == LIMIT_S:
            self.took[kind] = max(self.took.get(kind, 0.0), time.monotonic() - began)
        wrong = b"Traceback (most recent" in said and (act is cli.main or moment == LIMIT_S)
        self.counts["tracebacks"] += wrong
        if wrong or b"Timeout (" in said:  # of faulthandler, shortly before it counts as hung
            print(given, said.decode(errors="replace")[-4000:])
        return said.decode(errors="replace")

    def run(self, **fault: int) -> None:
        """The labs, with a fault and then without: what was measured is there, and whole."""
        results = self.folder / "results"
        words = ["run", *self.labs, "--scale", "tiny", "--results", str(results)]
        for force in (["--force"], [])[: self.dice.randrange(1, 3)]:
            self.start(cli.main, words + force, **fault)
            self.check(results)
        (self.folder / "filler").unlink(missing_ok=True)
        self.start(cli.main, words)
        self.check(results, "done")

    def check(self, results: Path, status: str = "") -> None:
        for name in ("one", "two"):
            journal = self.folder / f"{name}.journal"
            lines = journal.read_text().splitlines() if journal.exists() else []
            told = {tuple(map(int, line.split())) for line in lines if line.count(" ")}
            there = {(run.tags.get("pid"), run.tags.get("at")) for run in read_runs(results)}
            self.counts["results lost"] += len(told - there)
            executed = results / "notebooks" / f"{name}.ipynb"
            try:
                stamp = nbformat.read(executed, as_version=4).metadata["labutils"]
                self.counts["notebooks torn"] += status not in ("", stamp["status"])
            except FileNotFoundError:
                self.counts["notebooks torn"] += status != ""
            except Exception:
                self.counts["notebooks torn"] += 1

    def killed_run(self) -> None:
        self.run(kill=True)

    def full_disk(self) -> None:
        room = self.dice.choice((0, 100, 4_000, 20_000, 100_000, 400_000))
        free = shutil.disk_usage(self.folder).free
        if free > SMALL_DISK or self.dice.randrange(2):
            return self.run(room=room)
        with (self.folder / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - room)
        self.counts["disks filled"] += 1
        return self.run()

    def killed_training(self) -> None:
        """Killed, and killed while it goes on, a training ends where one left alone does."""
        name = self.dice.choice(list(interrupted_runs.CASES))
        case, place = interrupted_runs.CASES[name], self.folder / "training"
        if not self.ends:  # what every process would else import for itself
            interrupted_runs.opened(case, self.folder / "imports").close()
        if name not in self.ends:
            self.ends[name] = self.start(train, case, self.folder / name, 0).split()[-1]
        for _ in range(2):
            at_fsync = self.dice.choice((0, 0, self.dice.randrange(1, interrupted_runs.STEPS)))
            self.start(train, case, place, at_fsync, kill=not at_fsync)
            self.counts["kills in fsync"] += at_fsync > 0
            self.counts["parts found"] += len(list(place.glob("*.part")))
        self.counts["results lost"] += self.start(train, case, place, 0).split()[-1:] != [
            self.ends[name]
        ]
        self.counts["parts left"] += len(list(place.glob("*.part")))
        shutil.rmtree(place)

    def damaged_files(self) -> None:
        place = self.folder / "damaged"
        (place / "notebooks").mkdir(parents=True, exist_ok=True)
        results, notebook = place / "results.jsonl", place / "notebooks" / "01_lora_math.ipynb"
        for source, copy in (
            (REFERENCE, results),
            (REFERENCE.with_name("01_lora_math.ipynb"), notebook),
        ):
            copy.write_bytes(damaged(source.read_bytes(), self.dice))
        for words in (
            ["report", "--results", place],
            ["handouts", "--out", place / "out", "--results", place],
            ["run", notebook, "--scale", "none"],
        ):
            self.start(cli.main, list(map(str, words)))


def damaged(data: bytes, dice: random.Random) -> bytes:
    """`data` cut off, with a part repeated, with other bytes in it, or with another word."""
    at, to = sorted(dice.randrange(len(data)) for _ in range(2))
    word = dice.choice((b"null", b"[]", b"{}", b"-1e999", b"\x00\xff", b'"', b"[" * 5000))
    return dice.choice((data[:at], data[:to] + data[at:], data[:at] + word + data[at + 9 :]))


KINDS = ("killed_run", "full_disk", "killed_training", "damaged_files")


def main(seconds: float, kinds: Sequence[str] = KINDS, seed: int | None = None) -> Counter:
    """What was counted in so many seconds; the last trial is ended."""
    dice = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    trials, end = Trials(folder, dice), time.monotonic() + seconds
    busy: list[subprocess.Popen] = []
    try:
        while time.monotonic() < end:
            if dice.randrange(2):
                busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
                trials.counts["with busy cores"] += 1
            kind = dice.choice(kinds)
            getattr(trials, kind)()
            trials.counts[kind] += 1
            print(f"{kind}: {end - time.monotonic():.0f} s left, {dict(trials.counts)}", flush=True)
            while busy:
                busy.pop().kill()
    finally:
        for process in busy:
            process.kill()
        shutil.rmtree(folder)
    return trials.counts


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    counts = main(float(sys.argv[1]), sys.argv[2:] or KINDS)
    print({name: counts[name] for name in WRONG}, dict(counts))
    sys.exit(any(counts[name] for name in WRONG))
