"""The command `labutils diagnose`.

Exit codes: 0 a diagnosis was made; 1 the script failed, or there was nothing to diagnose; 2 wrong
usage; 130 Ctrl-C, also where what was measured until then was diagnosed.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from dataclasses import replace

from labutils.tools.diagnose import diagnose, report, trial
from labutils.tools.diagnose.script import STOPPED, NoDiagnosis, Stages, say, watch
from labutils.tools.diagnose.sources import short

FAILED, WRONG_USAGE = 1, 2


def main(options: Namespace) -> int:
    """Diagnose a script, print the diagnosis, and return the exit code."""
    command, page = options.command, options.html
    if not command:
        return say("give a script after two dashes: -- python train.py", WRONG_USAGE)
    try:
        if page is not None:
            with page.open("a") if page.exists() else tempfile.TemporaryFile(dir=page.parent):
                pass
    except OSError as error:
        return say(f"--html {page}: {error.strerror}. Name another file.", WRONG_USAGE)
    stages = Stages(options.warmup, options.timed, options.steps)
    try:
        exit_code, evidence = watch(command, stages, options.keep_going)
    except NoDiagnosis as error:
        return say(str(error), error.exit_code)
    files = (*evidence.files, *(word for word in command if word.endswith(".py")))
    diagnosis = diagnose(replace(evidence, files=tuple(dict.fromkeys(map(short, files)))))
    if options.try_fixes and not exit_code:
        diagnosis = replace(diagnosis, tries=trial.tries(diagnosis, command, stages))
    try:
        record = json.dumps(report.record(diagnosis, exit_code), ensure_ascii=False)
        print("", record if options.json else report.text(diagnosis), sep="\n", flush=True)
    finally:  # whoever no longer reads wants the page; a full disk comes after the words
        if page is not None:
            page.write_text(report.page(diagnosis), encoding="utf-8")
    if exit_code:
        words = f"the script ended with exit code {exit_code} after its steps were profiled."
        return say(words, STOPPED if exit_code == STOPPED else FAILED)
    return 0
