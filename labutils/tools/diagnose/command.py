"""The command `labutils diagnose`: of a script or of a trace.

Exit codes: 0 a diagnosis was made; 1 the script failed, or there was nothing to diagnose; 2 wrong
usage; 130 Ctrl-C, also where what was measured until then was diagnosed.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace

from labutils.tools.diagnose import diagnose, report, sources, trial
from labutils.tools.diagnose.script import STOPPED, NoDiagnosis, Stages, watch
from labutils.tools.diagnose.sources import short

FAILED, WRONG_USAGE = 1, 2


def main(options: Namespace) -> int:
    """Diagnose a script or a trace, print the diagnosis, and return the exit code."""
    command, trace, page = options.command, options.trace, options.html
    if bool(command) == (trace is not None):
        words = "give one of: a script after two dashes (-- python train.py), or --trace FILE"
        return _refuse(words, WRONG_USAGE)
    if options.try_fixes and trace is not None:
        return _refuse("--try runs a script again: give one, and no --trace", WRONG_USAGE)
    if page is not None and not page.parent.is_dir():
        return _refuse(f"--html {page}: there is no folder {page.parent}", WRONG_USAGE)
    stages = Stages(options.warmup, options.timed, options.steps)
    exit_code = None
    try:
        if trace is not None:
            evidence = sources.of_trace(trace)
        else:
            exit_code, evidence = watch(command, stages, options.keep_going, options.folder)
            files = (*evidence.files, *(word for word in command if word.endswith(".py")))
            evidence = replace(evidence, files=tuple(dict.fromkeys(map(short, files))))
    except NoDiagnosis as error:
        return _refuse(str(error), error.exit_code)
    except ValueError as error:
        return _refuse(str(error), WRONG_USAGE)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        return _refuse(f"{error.filename} can't be read: {why}", WRONG_USAGE)
    diagnosis = diagnose(evidence)
    if options.try_fixes and not exit_code:
        diagnosis = replace(diagnosis, tries=trial.tries(diagnosis, command, stages))
    if page is not None:
        page.write_text(report.page(diagnosis), encoding="utf-8")
    if options.json:
        print(json.dumps(report.record(diagnosis, exit_code), ensure_ascii=False))
    else:
        print("", report.text(diagnosis), sep="\n")
    if exit_code:
        words = f"the script ended with exit code {exit_code} after its steps were profiled."
        return _refuse(words, STOPPED if exit_code == STOPPED else FAILED)
    return 0


def _refuse(words: str, exit_code: int) -> int:
    print(f"labutils diagnose: {words}", file=sys.stderr)
    return exit_code
