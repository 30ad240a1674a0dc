"""What the H200's records say of every claim, kept word for word: a change of the code is not a
change of a verdict.
"""

import json
from pathlib import Path

from labutils.results import judges
from labutils.results.records import REFERENCE, read_runs

GOLDEN = json.loads(Path(__file__).with_name("golden_verdicts.json").read_text())


def test_every_claim_gets_the_verdict_it_had():
    runs = read_runs(REFERENCE)
    today = {
        j.claim.id: {
            "published": j.published,
            "here": j.here or None,
            "verdict": j.verdict,
            "why": j.why,
        }
        for j in judges.judge(None, runs, runs)
    }
    assert today.keys() == GOLDEN.keys()
    changed = {id: (GOLDEN[id], today[id]) for id in GOLDEN if today[id] != GOLDEN[id]}
    assert not changed, f"{len(changed)} verdicts changed: {changed}"
