"""The batch: labs one after the other, or some at once, and what is said about them."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from labutils.profiling.machine import usable_cores
from labutils.results import records
from labutils.tools.run import index, planning
from labutils.tools.run.asking import (
    Lab,
    Options,
    check_current_folder,
    find,
    results_folder,
    scales_of,
    short,
    values_of,
)
from labutils.tools.run.kernels import Kernels
from labutils.tools.run.running import Outcome, run_lab
from labutils.tools.run.telling import Telling, about_company, same_again, summary

ALL_RAN, A_LAB_FAILED, WRONG_USAGE = 0, 1, 2
STOPPED = 128  # plus the signal's number, as shells have it: 130 after Ctrl-C
PATIENCE_S = 5.0
"""How long after a second Ctrl-C what is left of the labs may take to end, all together."""


def run(
    names: Sequence[str],
    options: Options,
    say: Callable[[str], None] = print,
    make_pages: index.PageMaker | None = None,
) -> int:
    """Run the labs called `names` (all of them where there is none) and say how it went.

    `make_pages` writes an HTML page beside each of the executed notebooks that it is given. Returns
    0 where all ran, 1 where a lab failed, 128 + the signal's number where it was stopped. Raises
    `UsageError` before anything has run where the labs, parameters, scale or results folder are not
    usable.
    """
    check_current_folder()
    labs = find(names)
    scales, said = scales_of(options.scale, labs)
    values = {lab.number: values_of(lab, options, scales[lab.number]) for lab in labs}
    folder = results_folder(options.results, labs)
    say(f"Scale {said}. Results go to {short(folder)}.")
    gpus = planning.visible_gpus() if options.jobs > 1 else []
    if options.jobs > 1:
        say(about_company(options.jobs, len(gpus)))

    waves = planning.waves(labs, options.jobs, len(gpus))
    batch = _Batch(values, folder, options, gpus, [lab for wave in waves for lab in wave])
    with Kernels() as kernels, Telling(say) as telling:
        for wave in waves:
            batch.run(wave, kernels, telling)
    outcomes = [batch.outcome(lab) for lab in batch.order]
    page = index.write(folder, outcomes, None if kernels.stopped_by else make_pages, say)
    say(summary(outcomes, folder, page))
    if kernels.stopped_by:
        say(
            "Stopped. What was measured is kept. To go on: "
            f"{same_again(names, options, folder, outcomes)}"
        )
        return STOPPED + kernels.stopped_by
    return (
        ALL_RAN
        if all(outcome.status in ("done", "done before") for outcome in outcomes)
        else A_LAB_FAILED
    )


@dataclass(frozen=True)
class _Job:
    """A lab that is to run, and what is known about it beforehand."""

    lab: Lab
    why: str
    seconds_before: float | None


class _Batch:
    """What all labs of a batch have in common, and what has become of them."""

    def __init__(
        self,
        values: Mapping[str, Mapping[str, Any]],
        folder: Path,
        options: Options,
        gpus: Sequence[str],
        order: Sequence[Lab],
    ) -> None:
        self.values, self.folder, self.options, self.gpus, self.order = (
            values,
            folder,
            options,
            gpus,
            order,
        )
        self._begun: set[Path] = set()
        self._outcomes: dict[Path, Outcome] = {}

    def outcome(self, lab: Lab) -> Outcome:
        """What became of `lab`; one that was interrupted before it could say so was stopped."""
        status = "stopped" if lab.path in self._begun else "not run"
        return self._outcomes.get(lab.path, Outcome(lab, status))

    def run(self, wave: Sequence[Lab], kernels: Kernels, telling: Telling) -> None:
        """Run the labs of `wave` that are not done, as many at once as there are jobs; returns when
        all have ended.
        """
        if kernels.stopped_by:
            return
        todo: SimpleQueue[_Job] = SimpleQueue()
        for lab in wave:
            if (job := self._job(lab, telling)) is not None:
                todo.put(job)
        count = min(self.options.jobs, todo.qsize())
        events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        workers = [
            threading.Thread(
                target=self._work,
                args=(number, count - 1, todo, kernels, telling, events),
                daemon=True,
            )
            for number in range(count)
        ]
        with _joined(workers):
            while count:
                event = events.get()
                if event is None:
                    count -= 1
                else:
                    event()

    def _job(self, lab: Lab, telling: Telling) -> _Job | None:
        """The lab as one that is to run; None, and it is said, where it need not."""
        done = planning.done_records(records.read_records(self.folder), lab)
        values, why = self.values[lab.number], ""
        if done and not self.options.force:
            changed = planning.what_changed(done, values, planning.sources_of(lab))
            again = (
                bool(changed) if self.options.only_changed else not planning.is_done(done, values)
            )
            if not again:
                said = "unchanged since it ran" if self.options.only_changed else "done before"
                said += f" in {short(self.folder)} (--force runs it again)"
                said += (
                    f"; since then changed: {', '.join(changed)} (--only changed)"
                    if set(changed) - {planning.UNKNOWN}
                    else ""
                )
                telling.say(f"{self._place(lab)} {lab.title}: {said}")
                self._outcomes[lab.path] = Outcome(lab, "done before")
                return None
            why = f" (changed: {', '.join(changed)})" if self.options.only_changed else ""
        known = [
            self.folder,
            *sorted((records.REPOSITORY / "results").glob("*/"), key=lambda path: path.name)[::-1],
        ]
        return _Job(
            lab, why, planning.seconds_before(lab, values, known) if telling.is_live else None
        )

    def _place(self, lab: Lab) -> str:
        return f"[{self.order.index(lab) + 1}/{len(self.order)}]"

    def _work(
        self,
        number: int,
        beside: int,
        todo: SimpleQueue[_Job],
        kernels: Kernels,
        telling: Telling,
        events: SimpleQueue[Callable[[], None] | None],
    ) -> None:
        """Run labs until there is none left, in a thread of its own; what is to be said goes to
        `events`.
        """
        try:
            while not kernels.stopped_by:
                job = todo.get_nowait()
                self._run_one(job, number, beside, kernels, telling, events)
        except Empty:
            pass
        finally:
            events.put(None)

    def _run_one(
        self,
        job: _Job,
        number: int,
        beside: int,
        kernels: Kernels,
        telling: Telling,
        events: SimpleQueue[Callable[[], None] | None],
    ) -> None:
        lab, place = job.lab, self._place(job.lab)
        self._begun.add(lab.path)
        events.put(lambda: telling.began(place, lab, job.why, job.seconds_before))

        def told(count: int, section: str) -> None:
            events.put(lambda: telling.cell(lab, count, section))

        try:
            variables = planning.variables(number, beside, self.gpus, usable_cores(), lab)
            variables[records.SOURCES] = json.dumps(planning.sources_of(lab))
            outcome = run_lab(
                lab, self.values[lab.number], self.folder, self.options, kernels, variables, told
            )
        except Exception as error:  # of the results folder, mostly: a disk that is full
            outcome = Outcome(
                lab, "failed", message=f"Lab {lab.number} could not be run: {error!r}"
            )
        self._outcomes[lab.path] = outcome
        events.put(lambda: telling.ended(place, outcome))


@contextmanager
def _joined(workers: Sequence[threading.Thread]) -> Iterator[None]:
    """Threads at work; where they are interrupted, they get a moment to end in."""
    for worker in workers:
        worker.start()
    try:
        yield
    except KeyboardInterrupt:
        # A third Ctrl-C changes nothing any more, but it must not cut off what the others end with.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end = time.monotonic() + PATIENCE_S
        for worker in workers:
            worker.join(max(0.0, end - time.monotonic()))
        raise
