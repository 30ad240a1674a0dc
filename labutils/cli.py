"""The command `labutils`: check this machine, run labs, see the verdicts.

Exit codes: 0 all went well, 1 a lab or a check failed, 2 wrong usage, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labutils import __version__
from labutils.course import parameters

WRONG_USAGE, STOPPED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line; returns the exit code. Wrong usage exits at once with 2, as
    argparse does.
    """
    if hasattr(sys.stdout, "reconfigure"):  # where the encoding lacks an arrow, a ? stands for it
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(
            WRONG_USAGE, "\nlabutils: error: the following arguments are required: COMMAND\n"
        )
    options = parser.parse_args(arguments)
    try:
        return options.carry_out(options)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return STOPPED
    except (
        BrokenPipeError
    ):  # `labutils doctor | head`: nobody reads on; Python's own flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="labutils",
        description="GPU Fine-Tuning Lab: check this machine, run the labs, see how the articles' claims fared.",
        epilog="To begin, type: labutils doctor. What a command takes: labutils COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"labutils {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_run(commands)
    _add_report(commands)
    _add_handouts(commands)
    _add_diagnose(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor", help="check this machine: what was found, what it means, what to type"
    )
    doctor.add_argument("--json", action="store_true", help="findings for machines")
    doctor.add_argument(
        "--seats",
        type=_folder,
        metavar="DIR",
        help="a room's: the --json of each seat in one folder",
    )
    doctor.set_defaults(carry_out=_doctor)


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser(
        "run", help="run labs from beginning to end", description="Run labs by papermill."
    )
    run.add_argument(
        "labs",
        nargs="*",
        metavar="LAB",
        help='"03", a notebook\'s name or its path; all labs where none is given',
    )
    run.add_argument(
        "--scale",
        default="auto",
        help=f"{', '.join(parameters.CHOICES['scale'])} (auto: the largest that fits)",
    )
    run.add_argument(
        "--weights",
        default="random",
        choices=parameters.CHOICES["weights"],
        help="of the models (random)",
    )
    run.add_argument(
        "--data",
        default="generated",
        choices=parameters.CHOICES["data"],
        help="to train on (generated)",
    )
    run.add_argument(
        "--results",
        type=_folder,
        metavar="DIR",
        help="folder of results.jsonl; again with it goes on there",
    )
    run.add_argument(
        "-p",
        dest="given",
        nargs=2,
        action=_Given,
        default={},
        metavar=("NAME", "VALUE"),
        help="a lab's own parameter",
    )
    again = run.add_mutually_exclusive_group()
    again.add_argument(
        "--force", action="store_true", help="run labs again that are done in the results folder"
    )
    again.add_argument(
        "--only",
        choices=("changed",),
        help="of labs done there, run again those whose code cells (not prose), parameters or labutils have changed "
        "since, or are not on record",
    )
    run.add_argument(
        "--jobs",
        type=_jobs,
        default=1,
        metavar="N",
        help="labs at once (1). Labs side by side disturb each other's times, also with a GPU each, which they get "
        "where there are several: every result says so, and verdicts on time and memory come out "
        "as inconclusive",
    )
    run.add_argument(
        "--timeout",
        type=_seconds,
        default=1800.0,
        metavar="S",
        help="seconds a lab may take (1800)",
    )
    run.add_argument(
        "--cell-timeout",
        type=_seconds,
        metavar="S",
        help="seconds a cell may take (no limit of its own)",
    )
    run.set_defaults(carry_out=_run)


class _Given(argparse.Action):
    """Gathers `-p NAME VALUE`s by name, each once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        words: Any,
        option: str | None = None,
    ) -> None:
        (name, value), before = words, getattr(options, self.dest)
        if name in before:
            raise argparse.ArgumentError(
                self,
                f"{name} is given twice, as {before[name]!r} and as {value!r}; give each parameter "
                "once",
            )
        setattr(options, self.dest, before | {name: value})


def _add_report(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser("report", help="every claim: published, reference, here, verdict")
    report.add_argument("--json", action="store_true", help="verdicts for machines")
    report.add_argument(
        "--results", type=_folder, metavar="DIR", help="another set of results than the newest"
    )
    report.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the ladder of lab 04 into a PNG or SVG file",
    )
    report.set_defaults(carry_out=_report)


def _add_handouts(commands: argparse._SubParsersAction) -> None:
    handouts = commands.add_parser(
        "handouts", help="executed labs as notebooks, HTML and PDF to give out"
    )
    handouts.add_argument(
        "labs",
        nargs="*",
        metavar="LAB",
        help='"03" or a name; none: all, and the course as one PDF',
    )
    handouts.add_argument(
        "--results", type=_folder, metavar="DIR", help="another set of results than the newest"
    )
    handouts.add_argument(
        "--out", type=_folder, metavar="DIR", help="where they go (results/handouts/NAME)"
    )
    handouts.set_defaults(carry_out=_handouts)


def _add_diagnose(commands: argparse._SubParsersAction) -> None:
    diagnose = commands.add_parser(
        "diagnose",
        help="where a training step's time goes, and which fixes pay: of any PyTorch script, or a trace",
        usage="labutils diagnose [options] -- python train.py ...\n"
        "       labutils diagnose [options] --trace FILE",
        description="Run a training script as it is for a few optimizer steps, and rank what would make it faster, "
        "each fix with the gain that is predicted for it and why. It ends after those steps unless "
        "it is to go on.",
        epilog="Exit codes: 0 a diagnosis was made; 1 the script failed, or nothing could be diagnosed; 2 wrong usage.",
    )
    diagnose.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    diagnose.add_argument(
        "--trace", type=Path, metavar="FILE", help="a torch.profiler trace (*.json, *.json.gz)"
    )
    diagnose.add_argument(
        "--warmup",
        type=_count,
        default=4,
        metavar="N",
        help="optimizer steps passed over first (4)",
    )
    diagnose.add_argument(
        "--timed",
        type=_count,
        default=10,
        metavar="N",
        help="steps timed without the profiler (10)",
    )
    diagnose.add_argument("--steps", type=_count, default=3, metavar="N", help="steps profiled (3)")
    diagnose.add_argument(
        "--keep-going", action="store_true", help="let the script run to its own end"
    )
    diagnose.add_argument(
        "--folder", type=_folder, metavar="DIR", help="keep the trace and what was recorded there"
    )
    diagnose.add_argument(
        "--json", action="store_true", help="the diagnosis for machines, as the last line"
    )
    diagnose.set_defaults(carry_out=_diagnose)


def _count(word: str) -> int:
    if not word.isdecimal() or not 0 < int(word) <= 10_000:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of steps from 1 to 10000")
    return int(word)


def _jobs(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 4 and int(word) > 0):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of labs from 1 to 999")
    return int(word)


def _folder(word: str) -> Path:
    if not word.strip():
        raise argparse.ArgumentTypeError(
            f"{word!r} names no folder; type one, as in: --results results/NAME"
        )
    return Path(word)


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds above 0")
    if seconds > threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(
            f"{word!r} is longer than this system can wait; the limit is "
            f"{threading.TIMEOUT_MAX:.0f} seconds"
        )
    return seconds


def _doctor(options: argparse.Namespace) -> int:
    from labutils.tools import doctor

    if options.seats:
        return doctor.show_seats(options.seats)
    return doctor.main(json=options.json)


def _run(options: argparse.Namespace) -> int:
    from labutils.tools import run as runner

    def make_pages(folder: Path, executed: Sequence[Path]) -> None:
        from labutils.tools import handouts

        handouts.pages_of(folder, executed)

    try:
        return runner.run(
            options.labs,
            runner.Options(
                scale=options.scale,
                weights=options.weights,
                data=options.data,
                results=options.results,
                given=options.given,
                force=options.force,
                only_changed=options.only == "changed",
                jobs=options.jobs,
                timeout=options.timeout,
                cell_timeout=options.cell_timeout,
            ),
            say=lambda text: print(text, flush=True),
            make_pages=make_pages,
        )
    except runner.UsageError as error:
        print(f"labutils run: {error}", file=sys.stderr)
        return WRONG_USAGE


def _report(options: argparse.Namespace) -> int:
    from labutils.results import report

    if options.picture:
        return _draw_ladder(options.results, options.picture)
    return report.main(options.results, as_json=options.json)


def _handouts(options: argparse.Namespace) -> int:
    from labutils.tools import handouts

    return handouts.main(options.results, options.out, options.labs)


def _diagnose(options: argparse.Namespace) -> int:
    from labutils.tools.diagnose import command
    from labutils.tools.diagnose.script import Stages

    return command.main(
        options.command,
        options.trace,
        Stages(options.warmup, options.timed, options.steps),
        options.keep_going,
        options.folder,
        options.json,
    )


def _draw_ladder(results: Path | None, file: Path) -> int:
    """The ladder of lab 04 as a picture: of `results`, or of the reference runs where none are
    named.
    """
    import matplotlib.pyplot as plt

    from labutils.course import plots
    from labutils.labs.ladders import A1_LADDER
    from labutils.recipe import STOCK
    from labutils.results import claims
    from labutils.results.records import REFERENCE, check_usable, named, read_file, runs_of

    try:
        place = named(results or REFERENCE)
        kept = place / "results.jsonl" if os.path.isdir(place) else place
        readings = [read_file(kept)] if os.path.isfile(kept) else []
        check_usable(readings)
        climbed = runs_of([record for reading in readings for record in reading.records], "04")
    except (ValueError, OSError) as error:
        print(f"No picture: {error}", file=sys.stderr)
        return WRONG_USAGE
    rungs = [climbed["04", rung.name] for rung in A1_LADDER if ("04", rung.name) in climbed]
    if not rungs:
        print(
            "No picture: there is no run of the ladder. Lab 04 measures it: labutils run 04",
            file=sys.stderr,
        )
        return WRONG_USAGE
    steps = [
        claims.claim(f"A1.{claim}").published
        for claim in ("workers.three", "compile.speedup", "pin.speedup")
    ]
    micro_ms = dict(
        zip(
            [rung.name for rung in A1_LADDER],
            [steps[0][0], *(after for _, after in steps)],
            strict=False,
        )
    )
    published = {name: STOCK.accumulation * ms for name, ms in micro_ms.items()}
    plots.use_style()
    figure, axes = plt.subplots()
    try:
        plots.waterfall(
            axes,
            rungs,
            rungs[-1].metric("floor_ms"),
            published,
            published_label="article, 4 micro-steps",
        )
        figure.savefig(file)
    except (
        ValueError,
        OSError,
    ) as error:  # an unknown kind of file, or a place where none can be written
        print(
            f"No picture: {error}. Give a .png or .svg file in a folder that you may write to.",
            file=sys.stderr,
        )
        return WRONG_USAGE
    print(f"The ladder is drawn in {file}.")
    for told in (reading.told() for reading in readings if reading.passed_over):
        print(f"Passed over: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
