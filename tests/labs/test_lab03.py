"""Lab 03: the arithmetic of shared memory, its failure in a child process, four ways to copy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labutils.data.images import captioned_images
from labutils.labs import lab03_shared_memory
from labutils.labs.lab03_shared_memory import batch_bytes, most_workers, needed_bytes, try_workers
from labutils.recipe import STOCK

MIB = 2**20
needs_mounts = pytest.mark.skipif(
    lab03_shared_memory._own_shm(16 * MIB, 10**15) in (None, []),
    reason="this process may not mount a /dev/shm for a child",
)


def test_twelve_workers_do_not_fit_a_containers_default() -> None:
    assert batch_bytes() == 3 * 512 * 512 * 4 + 4096
    fits = [n for n in range(13) if needed_bytes(STOCK.but(num_workers=n)) <= 64 * MIB]
    assert fits == list(range(11)) and needed_bytes(STOCK) == 0
    assert most_workers(64 * MIB, STOCK) == 10
    assert most_workers(64 * MIB, STOCK.but(micro_batch=4)) == 2
    recipes = {n: STOCK.but(num_workers=n) for n in (0, 1, 2, 3, 4, 8, 12)}
    assert list(lab03_shared_memory.those_that_fit(recipes, free=64 * MIB)) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    captioned_images(folder, lab03_shared_memory.FILES)
    return folder


@needs_mounts
def test_too_little_shared_memory_is_told_and_survived(cache: Path) -> None:
    before = os.statvfs("/dev/shm").f_blocks
    told = try_workers(cache, workers=3, shm_bytes=16 * MIB).metrics
    assert os.statvfs("/dev/shm").f_blocks == before
    assert told["outcome"] in ("hung", "crashed") and told["failed"] == 1
    assert "shared memory" in told["message"] or "Bus error" in told["message"]
    assert 0 < told["batches"] < told["wanted"] and told["peak_gb"] <= told["shm_gb"]


@needs_mounts
def test_enough_shared_memory_is_what_the_arithmetic_says(cache: Path) -> None:
    needed = needed_bytes(STOCK.but(num_workers=3))
    told = try_workers(cache, workers=3, shm_bytes=needed).metrics
    assert (told["outcome"], told["message"], told["batches"]) == ("ok", "", told["wanted"])
    assert needed - 2 * batch_bytes() <= 1e9 * told["peak_gb"] <= needed


@needs_mounts
def test_a_child_that_dies_or_never_speaks_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a file where a folder should be"
    file.write_text("")
    died = try_workers(file, workers=1, shm_bytes=64 * MIB).metrics
    assert died["outcome"] == "crashed" and "Error" in died["message"]
    assert try_workers(tmp_path, 1, 64 * MIB, limit_s=0.3).metrics["outcome"] == "hung"
