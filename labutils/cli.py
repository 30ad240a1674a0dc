"""The command `labutils`: check this machine, run labs, see the verdicts.

Exit codes: 0 all went well, 1 a lab or a check failed, 2 wrong usage, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from labutils import __version__
from labutils.course import parameters

WRONG_USAGE, STOPPED = 2, 130


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command line; returns the exit code. Wrong usage exits at once with 2, as
    argparse does.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # streams that are closed, as cron's are
        name = ("stdin", "stdout", "stderr")[number]
        os.set_inheritable(number, True)  # else a child's first files take these numbers
        setattr(sys, name, getattr(sys, name) or os.fdopen(number, "w" if number else "r"))
    os.close(number)
    if hasattr(sys.stdout, "reconfigure"):  # where the encoding lacks an arrow, a ? stands for it
        sys.stdout.reconfigure(errors="replace")
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    options = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: nothing stays in /tmp
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        os.getcwd()
    except OSError:  # oneMKL would end the process: it can't load PyTorch, it says
        words = "this folder was deleted or moved, so nothing can run in it. Go to another: cd"
        print(f"labutils {options.tool}: {words}", file=sys.stderr)
        return WRONG_USAGE
    try:
        return _carry_out(options)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `labutils doctor | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, mostly
        cure = "`df -h` says which disks are full; TMPDIR=DIR names another folder than /tmp."
        print(f"labutils {options.tool}: {error}. {cure}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="labutils",
        description="GPU Fine-Tuning Lab: check this machine, run the labs, see the verdicts.",
        epilog="To begin, type: labutils doctor. What a command takes: labutils COMMAND --help",
    )
    parser.add_argument("--version", action="version", version=f"labutils {__version__}")
    commands = parser.add_subparsers(dest="tool", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="check this machine, and say what to type")
    doctor.add_argument("--json", action="store_true", help="print findings as JSON")
    _add_run(commands)
    report = commands.add_parser("report", help="every claim: published, ours, here, verdict")
    report.add_argument("--json", action="store_true", help="print verdicts as JSON")
    _add_results(report)
    handouts = commands.add_parser("handouts", help="executed labs to give out: HTML and PDF")
    text = '"03" or a name; without any: all labs, and the course as a PDF'
    handouts.add_argument("labs", nargs="*", metavar="LAB", help=text)
    _add_results(handouts)
    text = "folder to write to (results/handouts/NAME)"
    handouts.add_argument("--out", type=_folder, metavar="DIR", help=text)
    _add_diagnose(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser("run", help="run labs from beginning to end, by papermill")
    run.add_argument("labs", nargs="*", metavar="LAB", help='"03", a name or a path; without: all')
    scales = ", ".join(parameters.CHOICES["scale"])
    run.add_argument("--scale", default="auto", help=f"{scales} (auto: the largest that fits)")
    for name, default in (("weights", "random"), ("data", "generated")):
        allowed = {"default": default, "choices": parameters.CHOICES[name]}
        run.add_argument(f"--{name}", help=f"hub: the real ones ({default})", **allowed)
    text = "folder to keep results in; given again, the run goes on where it stopped"
    run.add_argument("--results", type=_folder, metavar="DIR", help=text)
    words = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE")}
    run.add_argument("-p", dest="given", help="a lab's own parameter", **words)
    run.add_argument("--force", action="store_true", help="run labs that are done, too")
    limit = {"type": _count, "default": 1800, "metavar": "S"}
    run.add_argument("--timeout", help="seconds a lab may take (1800)", **limit)


def _add_diagnose(commands: argparse._SubParsersAction) -> None:
    diagnose = commands.add_parser(
        "diagnose",
        help="where a training step's time goes, and which fixes pay",
        usage="labutils diagnose [options] -- python train.py ...",
        description="Run a training script as it is for a few optimizer steps, and rank what would "
        "make it faster, each fix with its predicted gain.",
        epilog="Exit codes: 0 a diagnosis was made; 1 there is none; 2 wrong usage; 130 Ctrl-C.",
    )
    diagnose.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    for name, default, what in (
        ("warmup", 4, "optimizer steps skipped first"),
        ("timed", 10, "steps timed without the profiler"),
        ("steps", 3, "steps profiled"),
    ):
        number = {"type": _count, "default": default, "metavar": "N"}
        diagnose.add_argument(f"--{name}", help=f"{what} ({default})", **number)
    diagnose.add_argument("--keep-going", action="store_true", help="let the script run on")
    text = "run the script again with each fix put in place, and measure it"
    diagnose.add_argument("--try", dest="try_fixes", action="store_true", help=text)
    diagnose.add_argument("--html", type=Path, metavar="FILE", help="draw the step on a page")
    diagnose.add_argument("--json", action="store_true", help="print the diagnosis as JSON, last")


def _add_results(parser: argparse.ArgumentParser) -> None:
    text = "folder of results to read (of each lab the newest)"
    parser.add_argument("--results", type=_folder, metavar="DIR", help=text)


def _count(word: str) -> int:
    if not (word.isascii() and word.isdecimal() and 0 < int(word[:8]) <= 1_000_000):
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number from 1 to 1000000")
    return int(word)


def _folder(word: str) -> Path:
    if not word.strip():
        raise argparse.ArgumentTypeError(f"{word!r} names no folder; type results/NAME, say")
    return Path(word)


def _carry_out(options: argparse.Namespace) -> int:
    """Carry out the command; its module is imported only now, so that starting is quick."""
    if options.tool == "doctor":
        from labutils.tools import doctor

        return doctor.main(json=options.json)
    if options.tool == "report":
        from labutils.results import report

        return report.main(options.results, as_json=options.json)
    if options.tool == "handouts":
        from labutils.tools import handouts

        return handouts.main(options.results, options.out, options.labs)
    if options.tool == "run":
        return _run(options)
    from labutils.tools.diagnose import command

    return command.main(options)


def _run(options: argparse.Namespace) -> int:
    from labutils.results.records import plain
    from labutils.tools import run as runner

    names = ("scale", "weights", "data", "results", "force", "timeout")
    asked = {name: getattr(options, name) for name in names} | {"given": dict(options.given)}
    try:
        wanted = runner.Options(**asked)
        return runner.run(options.labs, wanted, lambda said: print(plain(said), flush=True))
    except runner.UsageError as error:
        print(f"labutils run: {plain(str(error))}", file=sys.stderr)
        return WRONG_USAGE


if __name__ == "__main__":
    sys.exit(main())
