"""Lab 03: the arithmetic of shared memory, and its failure in a child process."""

from __future__ import annotations

import os

import pytest

from labutils.labs import lab03_shared_memory
from labutils.labs.lab03_shared_memory import needed_bytes, those_that_fit, try_workers
from labutils.recipe import STOCK

MIB = 2**20


def test_twelve_workers_do_not_fit_a_containers_default() -> None:
    recipes = {n: STOCK.but(num_workers=n) for n in range(13)}
    fits = [n for n, recipe in recipes.items() if needed_bytes(recipe) <= 64 * MIB]
    assert fits == list(range(11)) and needed_bytes(STOCK) == 0
    chosen = those_that_fit({n: recipes[n] for n in (0, 1, 2, 3, 4, 8, 12)}, free=64 * MIB)
    assert list(chosen) == [0, 1, 2, 3]


def test_too_little_shared_memory_is_told_and_cured() -> None:
    before = os.statvfs("/dev/shm").f_blocks
    runs = try_workers(workers=6, size="16m")
    if not runs["tiny"].ok:
        pytest.skip(runs["tiny"].status)
    assert os.statvfs("/dev/shm").f_blocks == before
    small, cured = runs["tiny"].metrics, runs["enough"].metrics
    assert small["outcome"] == "hung" and "shared memory" in small["message"]
    # None comes if the first worker is late: the others' five batches fill the 16 MiB.
    assert small["batches"] < small["wanted"] and small["peak_gb"] <= small["shm_gb"]
    assert (cured["outcome"], cured["message"], cured["failed"]) == ("ok", "", 0)
    assert 1e9 * cured["peak_gb"] <= 1.01 * needed_bytes(STOCK.but(num_workers=6))  # locks


def test_where_nobody_may_mount_nothing_is_tried(monkeypatch) -> None:
    monkeypatch.setattr(lab03_shared_memory, "NEW_MOUNTS", ())
    assert {run.status.partition(":")[0] for run in try_workers().values()} == {"skipped"}
