"""Several labs, one after the other: which of them are done, and what is said about them."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from labutils.results import records
from labutils.tools.run import index
from labutils.tools.run.arguments import Lab, Options, find, results_folder, short, values_of
from labutils.tools.run.execute_lab import GRACE_S, Kernel, Outcome, part_of, run_lab

ALL_RAN, A_LAB_FAILED, STOPPED = 0, 1, 130
SUMMING_UP = ("12",)
"""Labs that read what the others keep: they run last, and each time."""


def run(names: Sequence[str], options: Options, say: Callable[[str], None] = print) -> int:
    """Run the labs called `names`, all of them where there is none, and say how it went.

    Returns `ALL_RAN`, `A_LAB_FAILED`, or `STOPPED` after Ctrl-C. Raises `UsageError`, before
    anything has run, where the labs, parameters, scale or results folder are not usable. Only the
    main thread can hear Ctrl-C, and run labs.
    """
    labs = sorted(find(names), key=lambda lab: lab.number in SUMMING_UP)
    values = {lab.number: values_of(lab, options) for lab in labs}
    folder, lock = results_folder(options.results, labs)
    outcomes: list[Outcome] = []
    with lock, _Stop(say) as stop:
        scales = {given["scale"] for given in values.values() if "scale" in given}
        say(f"Scale {', '.join(sorted(scales))}. Results go to {short(folder)}.")
        for place, lab in enumerate(labs, 1):
            head = f"[{place}/{len(labs)}] {lab.title}"
            output = folder / "notebooks" / lab.path.name
            given = values[lab.number]
            if stop.asked:
                outcome = Outcome(lab, "not run")
            elif not options.force and is_done(lab, given, output):
                outcome = Outcome(lab, "done before")
                say(f"{head}: done before in {short(folder)} (--force runs it again)")
            else:
                say(f"{head}: running")
                sources = json.dumps({"notebook": lab.code, "labutils": records.code()})
                stop.kernel = Kernel({"LABUTILS_RESULTS": str(folder), records.SOURCES: sources})
                if stop.asked:  # meanwhile
                    stop.kernel.end("stopped")
                outcome = run_lab(lab, given, output, options.timeout, stop.kernel)
                say(outcome.message or f"{head}: done in {outcome.seconds:.0f} s")
            outcomes.append(outcome)
        page = index.write(folder, outcomes, not stop.asked, say)
    say(_summary(outcomes, folder, page))
    if stop.asked:
        again = f"--results {shlex.quote(short(folder))}"
        say(f"Stopped. Finished runs are kept. To go on: the same command again, with {again}")
        return STOPPED
    ran = all(outcome.status in ("done", "done before") for outcome in outcomes)
    return ALL_RAN if ran else A_LAB_FAILED


class _Stop:
    """Ctrl-C, SIGTERM and SIGHUP stop the `kernel` that runs, a second one at once, and are
    remembered as `asked`. Under nohup a terminal that closes (SIGHUP) stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self.say = False, say
        self.kernel: Kernel | None = None

    def __enter__(self) -> Self:
        numbers = [signal.SIGINT, signal.SIGTERM]
        numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)
        self._handlers = {number: signal.signal(number, self._end) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _end(self, *_: object) -> None:
        if self.kernel:
            end = self.kernel.end if self.asked else self.kernel.stop
            end("stopped")
        with contextlib.suppress(OSError, RuntimeError):  # no terminal; in the midst of a print
            if not self.asked:
                self.say(f"Stopping, in {GRACE_S:.0f} s at most. Ctrl-C again stops it at once.")
        self.asked = True


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
    lines = [""]
    for status in dict.fromkeys(outcome.status for outcome in outcomes):
        titles = [outcome.lab.title for outcome in outcomes if outcome.status == status]
        lines.append(f"{len(titles)} {status}" + f": {', '.join(titles)}" * (status != "done"))
    lines += [f"Executed notebooks: {shlex.quote(short(folder / 'notebooks'))}"]
    lines += [f"To read in a browser: {shlex.quote(short(page))}"] if page else []
    lines += [f"Verdicts: {shlex.join(['labutils', 'report', '--results', short(folder)])}"]
    return "\n".join(lines)
