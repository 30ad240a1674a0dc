"""What a batch says: plain lines for everybody; on a terminal also a line a running lab, rewritten
in place.

All of it comes from the main thread, so no line is cut by another.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labutils.tools.run.asking import NOTEBOOKS, Lab, Options, short
from labutils.tools.run.running import Outcome


class Telling:
    """Says how the labs go. As a context it keeps the lines of the running labs, and takes them
    away at its end.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._live = _live_lines() if sys.stdout.isatty() else None
        self._lines: dict[Path, Any] = {}

    def __enter__(self) -> Telling:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether there are lines of running labs, and anybody to read them."""
        return self._live is not None

    def say(self, text: str) -> None:
        """One or more whole lines, above those of the running labs."""
        if self._live:
            self._live.stop()
        self._say(text)
        if self._live:
            self._live.start()

    def began(self, place: str, lab: Lab, why: str, seconds_before: float | None) -> None:
        self.say(f"{place} {lab.title}: running{why}")
        if self._live:
            before = f"last time {_clock(seconds_before)}" if seconds_before else ""
            name = one_line(lab.title)
            name = name if len(name) < 28 else f"{name[:26]}…"
            self._lines[lab.path] = self._live.add_task(
                name, total=lab.cells, section="", before=before
            )

    def cell(self, lab: Lab, count: int, section: str) -> None:
        """The lab's cell of code number `count` began, in that section."""
        if self._live:
            self._live.update(self._lines[lab.path], completed=count, section=one_line(section))

    def ended(self, place: str, outcome: Outcome) -> None:
        if self._live:
            self._live.remove_task(self._lines.pop(outcome.lab.path))
        if outcome.status == "done":
            self.say(f"{place} {outcome.lab.title}: done in {outcome.seconds:.0f} s")
        if outcome.message:
            self.say(outcome.message)


def _live_lines(console: Any = None) -> Any:
    """A line for each running lab: its name, its cell, the section, how long it has taken, and took
    last time.
    """
    from rich.progress import Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    def words(text: str, **column: Any) -> TextColumn:
        return TextColumn(text, markup=False, table_column=Column(no_wrap=True, **column))

    return Progress(
        words("{task.description}"),
        words("cell {task.completed:.0f} of {task.total:.0f}"),
        words("{task.fields[section]}", overflow="ellipsis", ratio=1),
        TimeElapsedColumn(Column(min_width=len("0:00:00"))),
        words("{task.fields[before]}"),
        console=console,
        expand=True,
        transient=True,
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def one_line(text: str) -> str:
    """`text` without what would move a terminal's cursor."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _clock(seconds: float) -> str:
    """0:01:35, as the line's own clock has it."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def about_company(jobs: int, gpus: int) -> str:
    """What several labs at once do to what they measure."""
    where = "each on a GPU of its own, on one host" if gpus >= jobs else "on one machine"
    return (
        f"Up to {jobs} labs run at once, {where}: they disturb each other's times, and compete for "
        "memory. Each result "
        "on record says so (beside), and verdicts on time and memory come out as inconclusive. For "
        "verdicts: --jobs 1."
    )


def summary(outcomes: Sequence[Outcome], folder: Path, index: Path | None) -> str:
    width = max(len(outcome.lab.title) for outcome in outcomes)
    lines = ["", f"{'lab':{width}}  {'status':11}  seconds"]
    for outcome in outcomes:
        seconds = f"{outcome.seconds:7.0f}" if outcome.seconds else ""
        lines.append(f"{outcome.lab.title:{width}}  {outcome.status:11}  {seconds}".rstrip())
    lines += ["", f"Executed notebooks: {shlex.quote(short(folder / 'notebooks'))}"]
    lines += [f"To read in a browser: {shlex.quote(short(index))}"] if index else []
    lines += [f"Verdicts: {shlex.join(['labutils', 'report', '--results', short(folder)])}"]
    return "\n".join(lines)


def _called(lab: Lab) -> str:
    """What a person may type for `lab`."""
    return lab.number if lab.path.parent == NOTEBOOKS else short(lab.path)


def same_again(
    names: Sequence[str], options: Options, folder: Path, outcomes: Sequence[Outcome]
) -> str:
    """The command line that goes on where this run stopped: of what was forced, with the labs that
    are left.
    """
    left = (
        [_called(outcome.lab) for outcome in outcomes if outcome.status != "done"]
        if options.force
        else []
    )
    words = [
        "labutils",
        "run",
        *(left or names),
        "--scale",
        options.scale,
        "--results",
        short(folder),
    ]
    words += ["--force"] * bool(left)
    words += ["--weights", options.weights] * (options.weights != "random")
    words += ["--data", options.data] * (options.data != "generated")
    words += ["--only", "changed"] * options.only_changed
    words += ["--jobs", str(options.jobs)] * (options.jobs != 1)
    words += ["--timeout", f"{options.timeout:g}"] * (options.timeout != Options.timeout)
    if options.cell_timeout:
        words += ["--cell-timeout", f"{options.cell_timeout:g}"]
    for name, word in options.given.items():
        words += ["-p", name, word]
    return shlex.join(words)
