"""A recipe tried in a child process: whatever becomes of the child, the caller gets a run that says
so.
"""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from labutils.recipe import STOCK, Recipe
from labutils.training import subprocess_run
from labutils.training.subprocess_run import compile_ahead, try_isolated
from labutils.workloads import open_workload

READ = "import json, os, sys, time; order = json.load(sys.stdin); "


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.fixture
def child(monkeypatch):
    """Children that run the code given to this instead of training, which takes 10 s to import what
    it needs.
    """
    run = subprocess_run.subprocess.run

    def instead(code: str) -> None:
        def short(command: list[str], **options: object) -> object:
            assert command == [sys.executable, "-m", "labutils.training.subprocess_run"]
            return run([sys.executable, "-c", READ + code], **options)

        monkeypatch.setattr(subprocess_run.subprocess, "run", short)

    return instead


def test_what_trains_in_a_child_tells_its_losses(workload):
    """A real child: one that trains, at another scale than the workload's."""
    recipe = STOCK.but(driver="eager", adapter="plain", cache="latents+text", logging="ring-buffer")
    run = try_isolated(
        open_workload("sd15-lora", scale="small", device="cpu"), recipe, steps=2, scale="tiny"
    )
    assert (run.status, run.scale, run.recipe) == ("ok", "tiny", recipe.as_dict())
    assert (run.metrics["failed"], run.metrics["message"], len(run.metrics["loss"])) == (0, "", 2)


@pytest.mark.parametrize(
    ("code", "failed", "message"),
    [
        ("print('noise'); print(json.dumps({'failed': 0, 'message': '', 'loss': [1.5]}))", 0, ""),
        (
            "print('half a line', flush=True); os._exit(3)",
            1,
            "the process ended with code 3: nothing was printed",
        ),
        ("os.abort()", 1, "the process ended with code -6: "),
        ("raise MemoryError('no room')", 1, "the process ended with code 1: MemoryError: no room"),
        ("time.sleep(60)", 1, "did not end within 1 s"),
    ],
)
def test_whatever_becomes_of_the_child_is_on_record(code, failed, message, child, workload):
    child(code)
    run = try_isolated(workload, STOCK, timeout_s=1 if "sleep" in code else 60)
    assert (run.status, run.metrics["failed"]) == ("ok", failed)
    assert run.metrics["message"].startswith(message)
    assert run.metrics.get("loss") == (None if failed else [1.5])


def test_the_child_gets_the_whole_order(child, workload):
    child("print(json.dumps(order))")
    order = try_isolated(workload, STOCK.but(rank=3), steps=5).metrics
    assert Recipe(**order.pop("recipe")) == STOCK.but(rank=3)
    cache = str(workload.cache_dir)
    expected = {
        "name": "sd15-lora",
        "scale": "tiny",
        "weights": "random",
        "data": "generated",
        "cache_dir": cache,
    }
    assert order == expected | {"device": "cpu", "steps": 5}


def test_the_child_has_the_variables_given(child, workload):
    child("print(json.dumps({name: os.environ.get(name) for name in ('GIVEN', 'PATH')}))")
    found = try_isolated(workload, STOCK, environment={"GIVEN": "1"}).metrics
    assert found == {"GIVEN": "1", "PATH": os.environ["PATH"]}


def test_an_exception_is_the_childs_message(monkeypatch, capsys):
    """The child's own side, here: an order that can't be carried out."""
    order = {"name": "sd15-lora", "scale": "huge", "recipe": STOCK.as_dict(), "steps": 1}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
    subprocess_run._main()
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == 1
    assert result["message"].startswith("ValueError: scale='huge' is not known. Choose one of:")


def test_each_network_is_compiled_ahead_once(monkeypatch, workload):
    """Recipes that differ in nothing a compiled network depends on share one child; the uncompiled
    need none.
    """
    tried = []
    monkeypatch.setattr(
        subprocess_run,
        "try_isolated",
        lambda workload, recipe, steps: tried.append((recipe, steps)) or recipe,
    )
    compiled = STOCK.but(compile="default")
    alike = [
        compiled,
        compiled.but(num_workers=3),
        compiled.but(driver="eager", learning_rate=1e-3),
    ]
    wider = compiled.but(rank=8, compile_scope="everything")
    others = [compiled.but(compile_scope="blocks"), wider, compiled.but(micro_batch=2)]
    covered = [compiled.but(rank=8), wider.but(num_workers=3, compile_scope="model")]
    assert (
        len(
            compile_ahead(
                workload, [STOCK, *alike, covered[0], *others, covered[1], STOCK.but(rank=8)]
            )
        )
        == 4
    )
    assert {steps for _, steps in tried} == {1}
    assert {
        recipe.but(num_workers=0, driver="accelerate", learning_rate=1e-4) for recipe, _ in tried
    } == {
        compiled,
        *others,
    }
