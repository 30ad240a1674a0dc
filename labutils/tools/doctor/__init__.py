"""`labutils doctor`: what this machine can and can't do in the course, before a lab finds out.

A finding says what was seen, why it matters and what to type.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import textwrap
from collections.abc import Sequence

from labutils.results.records import plain
from labutils.tools.doctor.checks import FAIL, OK, WARN, Finding, examine


def render(findings: Sequence[Finding], width: int = 100) -> str:
    """The findings as a table of text, and a last line that sums them up."""
    column = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{finding.status:<4}  {finding.check:<{column}}  "
        indent = " " * len(head)
        for part in (finding.found, finding.why if finding.status != OK else ""):
            lines += textwrap.wrap(part, width, initial_indent=head, subsequent_indent=indent)
            head = indent
        lines += [f"{indent}-> {finding.do}"] if finding.do and finding.status != OK else []
    fails, warns = (sum(f.status == status for f in findings) for status in (FAIL, WARN))
    last = "Everything the labs need is here."
    if fails:
        last = f"{fails} thing(s) must be put right before the labs run here (fail)."
    elif warns:
        last = f"The labs run here; {warns} thing(s) would be better put right (warn)."
    return plain("\n".join([*lines, "", last]))


def main(json: bool = False) -> int:
    """Print the findings, on request with what a bug report needs. Returns 1 where one fails."""
    findings = examine()
    if json:
        from torch.utils import collect_env

        environment = collect_env.get_pretty_env_info()
        told = {"findings": [dataclasses.asdict(f) for f in findings], "environment": environment}
        print(json_format.dumps(told, indent=2, ensure_ascii=False))
    else:
        print(render(findings))
    return int(any(finding.status == FAIL for finding in findings))
