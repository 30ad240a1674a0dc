"""Shared memory: the arithmetic, and the failure itself in a child process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labutils.data.images import captioned_images
from labutils.labs import lab03_shared_memory
from labutils.labs.lab03_shared_memory import batch_bytes, most_workers, needed_bytes, try_workers
from labutils.recipe import STOCK

MIB = 2**20


def _can_mount() -> bool:
    return lab03_shared_memory._in_own_shm(16 * MIB, 10**15) not in (None, [])


needs_mounts = pytest.mark.skipif(
    not _can_mount(), reason="this process may not mount a /dev/shm for a child"
)


def test_a_batch_takes_its_tensors_in_whole_pages() -> None:
    assert batch_bytes() == 3 * 512 * 512 * 4 + 4096
    assert batch_bytes(4, 512) == 4 * 3 * 512 * 512 * 4 + 4096
    assert batch_bytes(1, 30) == 12288 + 4096


def test_twelve_workers_do_not_fit_a_containers_default() -> None:
    fits = {
        workers: needed_bytes(STOCK.but(num_workers=workers)) <= 64 * MIB
        for workers in (0, 1, 3, 8, 10, 11, 12)
    }
    assert fits == {0: True, 1: True, 3: True, 8: True, 10: True, 11: False, 12: False}
    assert most_workers(64 * MIB, STOCK) == 10
    assert most_workers(64 * MIB, STOCK.but(micro_batch=4)) == 2
    assert most_workers(MIB, STOCK) == 0
    assert needed_bytes(STOCK) == 0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    captioned_images(folder, lab03_shared_memory.FILES)
    return folder


@needs_mounts
def test_too_little_shared_memory_is_told_and_survived(cache: Path) -> None:
    before = os.statvfs("/dev/shm").f_blocks
    trial = try_workers(cache, workers=3, shm_bytes=16 * MIB)
    assert trial.outcome in ("hung", "crashed")
    assert "shared memory" in trial.message or "Bus error" in trial.message
    assert 0 < trial.batches < trial.wanted
    assert trial.peak_bytes <= 16 * MIB
    assert trial.metrics()["failed"] == 1
    assert os.statvfs("/dev/shm").f_blocks == before


@needs_mounts
def test_enough_shared_memory_is_what_the_arithmetic_says(cache: Path) -> None:
    needed = needed_bytes(STOCK.but(num_workers=3))
    trial = try_workers(cache, workers=3, shm_bytes=needed)
    assert (trial.outcome, trial.message, trial.batches) == ("ok", "", trial.wanted)
    assert trial.metrics()["failed"] == 0
    assert needed - 2 * batch_bytes() <= trial.peak_bytes <= needed


def test_where_nothing_may_be_mounted_it_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab03_shared_memory, "NEW_MOUNTS", (["false"],))
    trial = try_workers(cache, workers=12, shm_bytes=MIB)
    assert trial.outcome == "not possible" and trial.metrics() == {}
    assert "--shm-size=64m" in trial.message


def test_without_dev_shm_it_says_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab03_shared_memory, "SHM", tmp_path / "none")
    trial = try_workers(cache, workers=12, shm_bytes=MIB)
    assert trial.outcome == "not possible" and "only Linux" in trial.message


@needs_mounts
def test_a_child_that_never_speaks_is_ended(cache: Path) -> None:
    trial = try_workers(cache, workers=1, shm_bytes=64 * MIB, limit_s=0.5)
    assert trial.outcome == "hung" and "no message" in trial.message and trial.batches == 0


@needs_mounts
def test_a_child_that_dies_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a file where a folder should be"
    file.write_text("")
    trial = try_workers(file, workers=1, shm_bytes=64 * MIB)
    assert trial.outcome == "crashed" and "Error" in trial.message


def test_only_workers_that_fit_side_by_side_are_chosen() -> None:
    recipes = {f"workers={n}": STOCK.but(num_workers=n) for n in (0, 1, 2, 3, 4, 8, 12)}
    assert list(lab03_shared_memory.those_that_fit(recipes, free=10**9)) == list(recipes)
    assert list(lab03_shared_memory.those_that_fit(recipes, free=64 * MIB)) == [
        "workers=0",
        "workers=1",
        "workers=2",
        "workers=3",
    ]
    assert list(lab03_shared_memory.those_that_fit(recipes, free=0)) == ["workers=0"]
    assert list(lab03_shared_memory.those_that_fit(recipes, resolution=64, free=64 * MIB)) == list(
        recipes
    )
