"""Whether packages can be imported, tried in processes that may crash or hang without harm."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field
from typing import Any

from labutils.tools.doctor import import_probe
from labutils.training.child_process import Child

QUIET = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


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
    imports: list[Import] = []
    words = ["-P", import_probe.__file__, *names]
    with (
        tempfile.TemporaryDirectory() as folder,  # some write where they are imported
        Child(words, limit_s=timeout_s, environment=QUIET, folder=folder) as child,
    ):
        while len(imports) < len(names) and (told := child.receive()) is not None:
            imports.append(Import(**told))
        if len(imports) < len(names):
            status = "slow" if child.timed_out else "crashed"
            imports.append(Import(names[len(imports)], status, message=child.failure()))
    others = names[len(imports) :]
    return (*imports, *(try_imports(others, timeout_s) if others else ()))
