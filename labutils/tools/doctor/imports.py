"""Whether packages can be imported, tried in processes that may crash or hang without harm."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

from labutils.tools.doctor import import_probe
from labutils.training.child_process import end_group


@dataclass(frozen=True)
class Import:
    """How importing a package went. `status`: "ok", "missing", "broken" (it raised), "crashed" or
    "slow" (it was ended)."""

    name: str
    status: str
    version: str = ""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@functools.cache
def try_imports(names: tuple[str, ...], timeout_s: float = 60) -> tuple[Import, ...]:
    """Import the packages one after the other in one process of their own. What follows one that
    crashed or hung is tried in another."""
    names = tuple(name for name in names if name)
    if len(names) == 1 and importlib.util.find_spec(names[0].partition(".")[0]) is None:
        return (Import(names[0], "missing"),)
    quiet = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:  # some write where they are imported
        process = subprocess.Popen(
            [sys.executable, "-P", import_probe.__file__, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env=os.environ | quiet,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
            slow = False
        except subprocess.TimeoutExpired:
            end_group(process)
            output, errors = process.communicate()
            slow = True
    lines = [line.partition(import_probe.MARK)[2] for line in output.splitlines()]
    imports = tuple(Import(**json.loads(line)) for line in lines if line)
    if len(imports) == len(names):
        return imports
    failed, *others = names[len(imports) :]
    if slow:
        death = Import(failed, "slow", message=f"not done after {timeout_s:g} s")
    else:
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = (errors.strip().splitlines() or [""])[-1][:200]
        death = Import(failed, "crashed", message=f"the process ended with {how}: {last}")
    return (*imports, death, *(try_imports(tuple(others), timeout_s) if others else ()))


def try_import(name: str, timeout_s: float = 60) -> Import:
    """Import one package in a process of its own."""
    return try_imports((name,), timeout_s)[0]
