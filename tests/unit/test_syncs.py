"""Synchronisations found by PyTorch's own warnings, with the GPU's part played by a stand-in."""

import warnings

import pytest
import torch

from labutils.profiling.call_stacks import Frame
from labutils.profiling.syncs import SyncSite, find_syncs, sites_of, watch_syncs, with_lines


@pytest.fixture
def fake_gpu(monkeypatch):
    """A torch.cuda that has a GPU and remembers its synchronisation debug mode."""
    state = {"mode": 0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: state["mode"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: state.update(mode=mode))
    return state


def read_value():
    warnings.warn(
        "called a synchronizing CUDA operation (Triggered internally at ...)",
        UserWarning,
        stacklevel=1,
    )


class Training:
    def step(self):
        for _ in range(2):
            read_value()


def test_the_very_line_is_named(fake_gpu):
    (site,) = find_syncs(Training(), steps=3)
    line = read_value.__code__.co_firstlineno + 1
    assert (site.where, site.count, site.library) == (f"test_syncs.py:{line}", 2.0, None)
    assert site.source.startswith("warnings.warn(")


def test_mode_and_other_warnings_are_left_as_they_were(fake_gpu):
    with pytest.warns(UserWarning, match="something else"), watch_syncs() as seen:
        assert fake_gpu["mode"] == "warn"
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert fake_gpu["mode"] == 0
    assert seen == []


def test_mode_is_restored_after_an_error(fake_gpu):
    with pytest.raises(RuntimeError), watch_syncs():
        raise RuntimeError
    assert fake_gpu["mode"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_without_a_gpu_there_is_nothing_to_find():
    assert find_syncs(Training()) == []


OWN = Frame("/home/me/labutils/training.py", 77, "step")
SCALER = Frame("/v/lib/python3.12/site-packages/torch/amp/grad_scaler.py", 351, "<genexpr>")


def test_library_lines_are_shown_beside_ones_own():
    sites = sites_of([(OWN, SCALER), (OWN, SCALER), (OWN,)])
    assert [(s.frame, s.library, s.count) for s in sites] == [(OWN, SCALER, 2), (OWN, None, 1)]


def test_a_traces_rows_get_the_exact_line():
    rows = [
        {
            "where": "labutils/training.py: step",
            "line": 60,
            "library": "torch/amp/grad_scaler.py: <genexpr>",
        },
        {"where": "labutils/training.py: log", "line": 90},
        {"where": "labutils/training.py: other", "line": 99},
    ]
    logs = [
        SyncSite(Frame("labutils/training.py", n, "log"), None, f"line {n}", 1) for n in (95, 93)
    ]
    found = with_lines(rows, [SyncSite(OWN, SCALER, "scaler.step(optimizer)", 1), *logs])
    assert found == [
        rows[0] | {"line": 77, "source": "scaler.step(optimizer)"},
        rows[1] | {"line": [93, 95], "source": "line 93 | line 95"},
        rows[2],
    ]
