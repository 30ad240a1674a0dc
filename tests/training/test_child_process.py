"""Something in another process: whatever becomes of it, the caller reads about it."""

from __future__ import annotations

import psutil
import pytest

from labutils.recipe import STOCK
from labutils.training import try_isolated
from labutils.training.child_process import MESSAGE, Child
from labutils.workloads import open_workload

SEND = f"import json, sys; send = lambda m: print('{MESSAGE}' + json.dumps(m), flush=True); "
TURN = SEND + "print('noise'); send(['ready']); send(json.loads(sys.stdin.readline()) * 2)"


def child(program: str, **options) -> Child:
    return Child(["-c", program], **options)


def test_children_get_ready_side_by_side_and_work_in_turns():
    with child(TURN) as first, child(TURN) as second:
        assert [one.receive() for one in (second, first)] == [["ready"], ["ready"]]
        for one in (second, first):
            one.send("go")
            assert one.receive() == "gogo"
            assert one.receive() is one.receive() is None
            assert one.printed == "noise\n"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise SystemExit('no room')", "code 1: no room"),
        ("import os; print('half', flush=True); os._exit(3)", "code 3: nothing was printed"),
        (SEND + f"print('{MESSAGE}[1, ', end='', flush=True); sys.exit(2)", "code 2"),
        ("import time; time.sleep(600)", "within 1 s"),
    ],
)
def test_a_child_that_ends_without_an_answer_says_how(program, told):
    with child(program, limit_s=1 if "sleep" in program else 60) as failed:
        assert failed.receive() is None
        failed.send("nobody hears it")
        assert told in failed.failure()


def test_a_block_that_is_left_ends_its_child_and_orphans_in_sessions_of_their_own():
    program = SEND + (
        "import subprocess, time; orphan = subprocess.Popen(['sleep', '30'], "
        "start_new_session=True); send(orphan.pid); time.sleep(600)"
    )
    with pytest.raises(KeyboardInterrupt), child(program) as left:
        pid = left.receive()
        raise KeyboardInterrupt
    assert left.process.returncode == -9
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


# ------------------------------------------------------------------------------ recipes


def test_a_recipe_that_trains_in_a_child_tells_its_losses_and_one_that_cannot_why():
    recipe = STOCK.but(driver="eager", adapter="plain", cache="latents+text")
    small = open_workload("sd15-lora", scale="small", device="cpu")
    run = try_isolated(small, recipe, steps=2, scale="tiny")
    assert (run.status, run.scale, run.recipe) == ("ok", "tiny", recipe.fitted_to("cpu").as_dict())
    assert (run.metrics["failed"], run.metrics["message"]) == (0, "")
    assert len(run.metrics["loss"]) == len(run.samples["step_ms"]) == 2
    run = try_isolated(small, recipe.but(shapes="packed", cache="nothing"), scale="tiny")
    assert (run.status, run.metrics["failed"]) == ("ok", 1)
    assert run.metrics["message"].startswith("ValueError")
