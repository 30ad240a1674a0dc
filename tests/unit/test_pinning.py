"""The two by two of pinned memory and non-blocking copies: four runs, each with the host's time in
its copies.
"""

from __future__ import annotations

import pytest

from labutils.labs import lab03_pinned_memory
from labutils.labs.lab03_pinned_memory import WAYS, two_by_two
from labutils.recipe import STOCK
from labutils.training import benchmark
from labutils.workloads import open_workload

AHEAD = STOCK.but(driver="eager", optimizer="adamw-fused", logging="ring-buffer", accumulation=1)


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.mark.parametrize("base", [STOCK, AHEAD], ids=lambda recipe: recipe.driver)
def test_the_copies_of_a_step_are_found(workload, base):
    samples = lab03_pinned_memory._host_copy_ms(workload, base, 2)
    assert len(samples) == 2
    assert min(samples) > 0


def test_each_way_has_its_step_and_its_copies(workload, monkeypatch):
    monkeypatch.setattr(benchmark, "ROUND_MS", 1)
    monkeypatch.setattr(benchmark, "SETTLE_MS", 1)
    found = two_by_two(workload, AHEAD, 2, 1, prefix="x: ")
    assert list(found) == [f"x: {way}" for way in WAYS]
    for run in found.values():
        assert run.metrics["host_copy_ms"]["n"] == len(run.samples["host_copy_ms"]) == 2
        assert 0 < run.metric("host_copy_ms") < run.metric("step_ms")


def test_the_ways_change_both_knobs_in_every_combination():
    recipes = {
        (r.pin_memory, r.non_blocking) for r in (STOCK.but(**knobs) for knobs in WAYS.values())
    }
    assert len(recipes) == len(WAYS) == 4
