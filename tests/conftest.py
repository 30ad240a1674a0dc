"""What every test gets: a cache for the session, a results folder of its own, and no GPU tests
where there is no GPU.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network, so none may wait for one
os.environ.pop("PYTHONUNBUFFERED", None)  # what is lost in a buffer must be seen to be lost
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's & has its children ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are shared with the other workers
else:
    # Set before anything imports labutils, and inherited by workers, kernels and subprocesses:
    # generated images are made once.
    CACHE = tempfile.mkdtemp(prefix="labutils-cache-")
    os.environ["LABUTILS_CACHE"] = CACHE
    atexit.register(shutil.rmtree, CACHE, ignore_errors=True)

LONG = ("labs", "diagnose_scripts", "jupyterlab", "learners_scripts", "diagnose_trials")
LONG += ("launcher", "resume", "distributed")
"""Files that take longest, which come first: at the end no core waits for the other's long one."""


@pytest.fixture(autouse=True)
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's results go when it says nothing else."""
    folder = tmp_path / "results"
    monkeypatch.setenv("LABUTILS_RESULTS", str(folder))
    return folder


@pytest.fixture
def full_float32() -> Iterator[None]:
    """No TF32: for tests that compare against float32 on a GPU."""
    from labutils.layers.cuda_graph import float32_rounded

    with float32_rounded("nothing"):
        yield


@pytest.fixture(scope="module")
def single_thread() -> Iterator[None]:
    """Sums of one order: as many threads as there happen to be would round differently."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """What other tests had the compiler keep counts neither before nor after."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Tests stay with their file in one process, except for labs: each runs where one is free."""
    from xdist.scheduler import LoadScopeScheduling

    class LabsApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "test_labs.py" in nodeid else nodeid.partition("::")[0]

    return LabsApart(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whatever is in the folder gpu/ needs one."""
    if item.path.parent.name == "gpu":
        item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first; what is marked `gpu` is skipped on a machine without one."""
    places = {f"test_{name}.py": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from labutils.profiling import cuda

    if not cuda.available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; there is none here"))
