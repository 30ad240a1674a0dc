"""labutils.workloads.lazy_imports: what is imported out of the garbage collector's sight, and what
must stay in it.
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, sys
from labutils.recipe import Recipe
from labutils.training import Trainer
from labutils.workloads import open_workload
workload = open_workload("gpt-oss-lora-short", "tiny", device="cpu")
frozen, there = gc.get_freeze_count(), set(sys.modules)
with Trainer(workload, Recipe(driver="eager", logging="ring-buffer", num_workers=0)) as trainer:
    trainer.run(1, 0, lambda trainer: None)
    seen = {id(one) for one in gc.get_objects()}
    late = sorted({module.partition(".")[0] for module in sys.modules.keys() - there})
    modules = list(trainer.model.modules())
    print(json.dumps(dict(
        frozen=frozen, thawed=frozen - gc.get_freeze_count(), seen=len(seen), late=late,
        unseen=sum(id(module) not in seen for module in modules),
    )))
"""


def test_opening_a_workload_hides_its_libraries_and_not_its_model():
    """A workload that came to import another library later would have the collector look through it
    each time.
    """
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["frozen"] > 400_000 and found["thawed"] < 1000
    assert found["seen"] < 60_000 and found["unseen"] == 0
    assert not {"diffusers", "datasets", "pandas", "bitsandbytes"} & set(found["late"])
