"""What our records say of every claim: a change of the code is not a change of a verdict.

golden_verdicts.json holds each claim's first verdict and what was measured. golden_changes.yaml
lists the verdicts that a changed rule changed on purpose, each with its reason.
"""

import json
from dataclasses import replace
from pathlib import Path

import yaml

from labutils.results import judges
from labutils.results.records import Runs, reference_runs

GOLDEN = json.loads(Path(__file__).with_name("golden_verdicts.json").read_text())
CHANGES = yaml.safe_load(Path(__file__).with_name("golden_changes.yaml").read_text())


def test_every_claim_gets_the_verdict_it_had():
    """Whatever its runs are called: a name is for people."""
    runs = Runs(replace(run, run=f"run {at}") for at, run in enumerate(reference_runs()))
    today = {j.claim.id: j for j in judges.judge_all(None, runs)}
    wanted = GOLDEN | {id: GOLDEN[id] | change for id, change in CHANGES.items()}
    assert wanted.keys() <= today.keys()
    changed = {
        id: (want, today[id].verdict, today[id].here)
        for id, want in wanted.items()
        if (today[id].verdict, today[id].here or None) != (want["verdict"], want["here"])
    }
    assert not changed, f"{len(changed)} verdicts changed: {changed}"
    assert all(change["reason"] for change in CHANGES.values())
