"""Faults at random for a given time: `python tests/faults.py 600`. It counts what must not happen.

Trainings and `labutils run` are killed at any moment and started again, disks fill up, files are
damaged, and other processes keep the cores busy.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import troubled_notebooks

from labutils.recipe import STOCK
from labutils.results.records import REFERENCE, REPOSITORY, read_runs

LIMIT_S, STEPS = 180, 12
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
JOURNAL = """\
for at in range(20):
    kept.append(Run("{name}", str((os.getpid(), at)), tags=dict(pid=os.getpid(), at=at)))
    print(os.getpid(), at, file=open("{name}.journal", "a"), flush=True)
    time.sleep(0.05)"""


def train(folder: Path) -> None:
    """Train to the end, from a checkpoint where there is one; print the last weights' digest."""
    import torch

    from labutils.training import Trainer
    from labutils.workloads import open_workload

    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    with Trainer(workload, STOCK, folder, resume=(folder / "checkpoint.pt").exists()) as trainer:
        trainer.run(STEPS, checkpoint_every=1)
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        print(repr(float(sum(torch.linalg.norm(weight) for weight in weights))))


class Trials:
    """Trials in a scratch `folder`. `counts`: what was tried, and what went wrong."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice, self.counts = folder, dice, Counter()
        self.ended = ""
        troubled_notebooks.TROUBLE["steady"] = JOURNAL
        self.labs = [troubled_notebooks.write(folder, name, "steady") for name in ("one", "two")]

    def start(self, *words: object, kill: bool = False, room: int = -1) -> str:
        """Run a program, killed at some moment or with files of `room` bytes at most: its words."""
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        options = {"stdout": -1, "stderr": -2, "text": True, "errors": "replace"}
        words = [sys.executable, *map(str, words)]
        process = subprocess.Popen(words, cwd=REPOSITORY, preexec_fn=limit, **options)
        if kill:
            time.sleep(self.dice.uniform(0, 8))
            process.send_signal(self.dice.choice(SIGNALS))
        try:
            said = process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0]
            self.counts["hangs"] += 1
        if "Traceback (most recent" in said and not kill:
            self.counts["tracebacks"] += 1
            print(said[-2000:])
        return said

    def run(self, **fault: object) -> None:
        """The labs, with a fault and then without: what was measured is there, and whole."""
        results = self.folder / "results"
        command = ("-m", "labutils.cli", "run", *self.labs, "--scale", "tiny", "--results", results)
        self.start(*command, *["--force"] * self.dice.randrange(2), **fault)
        self.check(results)
        self.start(*command)
        self.check(results)

    def check(self, results: Path) -> None:
        there = {(run.tags.get("pid"), run.tags.get("at")) for run in read_runs(results)}
        for name in ("one", "two"):
            journal = self.folder / f"{name}.journal"
            lines = journal.read_text().splitlines() if journal.exists() else []
            told = {tuple(map(int, line.split())) for line in lines if line.count(" ")}
            self.counts["results lost"] += len(told - there)
            executed = results / "notebooks" / f"{name}.ipynb"
            try:
                if executed.exists():
                    nbformat.read(executed, as_version=4)
            except Exception:
                self.counts["notebooks torn"] += 1

    def killed_run(self) -> None:
        self.run(kill=True)

    def full_disk(self) -> None:
        self.run(room=self.dice.choice((0, 100, 4_000, 6_000, 20_000)))

    def killed_training(self) -> None:
        """Killed, and killed while it goes on, a training ends where one left alone does."""
        place = self.folder / f"training-{self.counts['killed_training']}"
        for kill in (True, True, False):
            ended = self.start(__file__, "train", place, kill=kill).strip().splitlines()[-1:]
        self.ended = self.ended or self.start(__file__, "train", self.folder / "alone").split()[-1]
        self.counts["results lost"] += ended != [self.ended]
        self.counts["parts left"] += len(list(place.glob("*.part")))

    def damaged_files(self) -> None:
        place = self.folder / "damaged"
        (place / "notebooks").mkdir(parents=True, exist_ok=True)
        for source, copy in (
            (REFERENCE, place / "results.jsonl"),
            (REFERENCE.with_name("01_lora_math.ipynb"), place / "notebooks" / "01_lora_math.ipynb"),
        ):
            copy.write_bytes(damaged(source.read_bytes(), self.dice))
        for words in (("report",), ("handouts", "--out", place / "out")):
            self.start("-m", "labutils.cli", *words, "--results", place)
        self.start("-m", "labutils.cli", "run", copy, "--scale", "none")


def damaged(data: bytes, dice: random.Random) -> bytes:
    """`data` cut off, with a part repeated, with other bytes in it, or with another word."""
    at, to = sorted(dice.randrange(len(data)) for _ in range(2))
    word = dice.choice((b"null", b"[]", b"{}", b"-1e999", b"\x00\xff", b'"', b"[" * 5000))
    ways = (data[:at], data[:to] + data[at:], data[:at] + word + data[at + 9 :])
    return dice.choice(ways)


def main(seconds: float, seed: int = 0, among: tuple[str, ...] = ()) -> Counter:
    """What was counted in so many seconds; the last trial is ended."""
    dice = random.Random(seed)
    kinds = among or ("killed_run", "full_disk", "killed_training", "damaged_files")
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    trials, end = Trials(folder, dice), time.monotonic() + seconds
    busy: list[subprocess.Popen] = []
    try:
        while time.monotonic() < end:
            if dice.randrange(2):
                busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(2)]
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
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]))
    else:
        print(dict(main(float(sys.argv[1]))))
