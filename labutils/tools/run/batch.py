"""Several labs: which of them are done, which may run at once, and what is said about them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from labutils.profiling import cuda, machine
from labutils.results import records
from labutils.tools.run import index
from labutils.tools.run.kernel import Kernel, Outcome, part_of, run_lab
from labutils.tools.run.validation import (
    Lab,
    Options,
    UsageError,
    find,
    results_folder,
    scales_of,
    short,
    values_of,
)

ALL_RAN, A_LAB_FAILED, STOPPED = 0, 1, 130
SUMMING_UP = ("11",)
"""Labs that read what the others keep: they run last, and each time."""


def run(names: Sequence[str], options: Options, say: Callable[[str], None] = print) -> int:
    """Run the labs called `names`, all of them where there is none, and say how it went.

    Returns `ALL_RAN`, `A_LAB_FAILED`, or `STOPPED` after Ctrl-C. Raises `UsageError`, before
    anything has run, where the labs, parameters, scale or results folder are not usable.
    """
    labs = find(names)
    scales = scales_of(options.scale, labs)
    values = {lab.number: values_of(lab, options, scales[lab.number]) for lab in labs}
    folder = results_folder(options.results, labs)
    with _alone_in(folder):
        say(f"Scale {', '.join(sorted(set(scales.values())))}. Results go to {short(folder)}.")
        if options.jobs > 1:
            say(
                f"Up to {options.jobs} labs run at once and disturb each other's times, so "
                "verdicts on time and memory come out as inconclusive. For verdicts: --jobs 1."
            )
        batch = _Batch(labs, values, folder, options, say)
        batch.run()
        outcomes = [batch.outcomes.get(lab.path, Outcome(lab, "not run")) for lab in batch.order]
        page = index.write(folder, outcomes, not batch.stopped, say)
    say(_summary(outcomes, folder, page))
    if batch.stopped:
        again = f"--results {shlex.quote(short(folder))}"
        say(f"Stopped. What was measured is kept. To go on: the same command again, with {again}")
        return STOPPED
    ran = all(outcome.status in ("done", "done before") for outcome in outcomes)
    return ALL_RAN if ran else A_LAB_FAILED


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raises `UsageError` where another run writes into the folder now."""
    with (folder / "notebooks" / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"Another `labutils run` writes into {short(folder)} now. Wait for it, or choose "
                "another folder with --results DIR."
            ) from None
        yield


class _Batch:
    """The labs, what has become of them, and the kernels that run now."""

    def __init__(
        self,
        labs: Sequence[Lab],
        values: Mapping[str, Mapping[str, Any]],
        folder: Path,
        options: Options,
        say: Callable[[str], None],
    ) -> None:
        self.values, self.folder, self.options, self.say = values, folder, options, say
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ""
        self.gpus = [word for word in shown.split(",") if word] or list(
            map(str, range(cuda.count()))
        )
        self.groups = groups(labs, options.jobs, len(self.gpus))
        self.order = [lab for group in self.groups for lab in group]
        self.outcomes: dict[Path, Outcome] = {}
        self.stopped = False
        self._kernels: list[Kernel] = []
        self._slots: SimpleQueue[int] = SimpleQueue()
        for slot in range(options.jobs):
            self._slots.put(slot)

    def run(self) -> None:
        """Run every group; Ctrl-C and SIGTERM end the labs that run, and start no others."""
        handlers = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handlers[number] = signal.signal(number, lambda *_: self._stop())
        try:
            for group in self.groups:
                with ThreadPoolExecutor(self.options.jobs) as pool:
                    futures: list[Future] = [pool.submit(self._run_one, lab) for lab in group]
                for future in futures:
                    future.result()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _stop(self) -> None:
        self.stopped = True
        for kernel in list(self._kernels):
            kernel.end("stopped")

    def _run_one(self, lab: Lab) -> None:
        place = f"[{self.order.index(lab) + 1}/{len(self.order)}] {lab.title}"
        output = self.folder / "notebooks" / lab.path.name
        if self.stopped:
            return
        if not self.options.force and is_done(lab, self.values[lab.number], output):
            self.outcomes[lab.path] = Outcome(lab, "done before")
            self.say(f"{place}: done before in {short(self.folder)} (--force runs it again)")
            return
        slot = self._slots.get()
        self.say(f"{place}: running")
        kernel = Kernel(lab.path.parent, self._variables(lab, slot))
        self._kernels.append(kernel)
        try:
            outcome = run_lab(lab, self.values[lab.number], self.folder, self.options, kernel)
        finally:
            self._kernels.remove(kernel)
            self._slots.put(slot)
        self.outcomes[lab.path] = outcome
        self.say(outcome.message or f"{place}: done in {outcome.seconds:.0f} s")

    def _variables(self, lab: Lab, slot: int) -> dict[str, str]:
        """What the lab's kernel is told. Beside others it gets a GPU of its own where there are
        several, and its share of the cores, unless the person has set that."""
        sources = {"notebook": lab.code, "labutils": records.code()}
        told = {"LABUTILS_RESULTS": str(self.folder), records.SOURCES: json.dumps(sources)}
        beside = self.options.jobs - 1
        if not beside:
            return told
        told[records.BESIDE] = str(beside)
        if len(self.gpus) > 1 and lab.number not in machine.SEVERAL_GPUS:
            told["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        if "OMP_NUM_THREADS" not in os.environ:
            told["OMP_NUM_THREADS"] = str(max(1, machine.usable_cores() // self.options.jobs))
        return told


def groups(labs: Sequence[Lab], jobs: int, gpus: int) -> list[list[Lab]]:
    """The labs in groups that run one after the other; those of a group may run at once. A lab that
    takes all GPUs runs alone, and the labs that sum up come last."""
    last = [lab for lab in labs if lab.number in SUMMING_UP]
    alone = [lab for lab in labs if lab.number in machine.SEVERAL_GPUS and jobs > 1 and gpus > 1]
    first = [lab for lab in labs if lab not in last and lab not in alone]
    return [group for group in (first, *([lab] for lab in [*alone, *last])) if group]


def is_done(lab: Lab, values: Mapping[str, Any], output: Path) -> bool:
    """Whether the executed notebook says that it ran to its end, of the same code with the same
    parameters, and no later run of it was cut off."""
    try:
        stamp = json.loads(output.read_text(encoding="utf-8"))["metadata"]["labutils"]
        same = (stamp["status"], stamp["code"]) == ("done", lab.code)
        same = same and stamp["parameters"] == values
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return same and lab.number not in SUMMING_UP and not part_of(output).exists()


def _summary(outcomes: Sequence[Outcome], folder: Path, page: Path | None) -> str:
    width = max(len(outcome.lab.title) for outcome in outcomes)
    lines = ["", f"{'lab':{width}}  {'status':11}  seconds"]
    for outcome in outcomes:
        seconds = f"{outcome.seconds:7.0f}" if outcome.seconds else ""
        lines.append(f"{outcome.lab.title:{width}}  {outcome.status:11}  {seconds}".rstrip())
    lines += ["", f"Executed notebooks: {shlex.quote(short(folder / 'notebooks'))}"]
    lines += [f"To read in a browser: {shlex.quote(short(page))}"] if page else []
    lines += [f"Verdicts: {shlex.join(['labutils', 'report', '--results', short(folder)])}"]
    return "\n".join(lines)
