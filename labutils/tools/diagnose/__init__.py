"""Where a training step's time goes, and which fixes pay: for a script, or a recipe.

    diagnosis = diagnose(watch(["python", "train.py"]).evidence)
    diagnosis.evidence.budget             share of time -> milliseconds; they add up to the step
    diagnosis.fixes[0].name, .gain        ranked, each with its predicted gain by itself

    script           runs a training script; `script_hooks` go into its process, and leave a record
    sources          a record with its trace (`trace_pieces`) -> `evidence`
    budget           shares the step's time out
    fixes            the rules: each replays the step's queue of work (`step_queue`) with one thing
                     changed; `advice.yaml` has their words
    edits            the script's lines that a fix changes, and what to write in their place
    trial            runs the script again with fixes put in place from outside
    report           the diagnosis in words (`text.j2`), on a page (`page.j2`), for machines

These may import training and what is below it, and no lab. `labutils.tools.ablations` measures
predicted gains on the course's own loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from labutils.tools.diagnose.evidence import Evidence
from labutils.tools.diagnose.fixes import RULES, Fix, together

WORTH = 0.03
"""A fix that saves less than this part of a step is named, and not proposed."""


@dataclass(frozen=True)
class Diagnosis:
    """`fixes`: all that a rule spoke of, by their gain. `together`: the best few at once. `tries`:
    fix -> what became of it on the script itself (`trial.Try`)."""

    evidence: Evidence
    fixes: tuple[Fix, ...]
    together: Fix | None = None
    tries: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worth_it(self) -> tuple[Fix, ...]:
        return tuple(fix for fix in self.fixes if fix.gain >= WORTH)

    def fix(self, name: str) -> Fix | None:
        return next((fix for fix in self.fixes if fix.name == name), None)


def diagnose(evidence: Evidence, only: Collection[str] = RULES) -> Diagnosis:
    """The fixes of the rules named in `only`, the one that saves most first."""
    fixes = sorted(filter(None, (RULES[n](evidence) for n in only)), key=lambda fix: -fix.gain)
    return Diagnosis(evidence, tuple(fixes), together(evidence, fixes, WORTH))


__all__ = ["WORTH", "Diagnosis", "Evidence", "Fix", "diagnose"]
