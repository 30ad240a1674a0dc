"""A step's memory as a record: nothing counted twice, nothing left out, and each byte under the
right heading.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from labutils.profiling.memory_timeline import (
    BLOCK,
    KINDS,
    Allocation,
    Ledger,
    Sorting,
    StepMemory,
    from_trace,
    logit_bytes,
    rounded,
)


def little_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 1)
    )


def recorded_step(model: nn.Module, x: torch.Tensor) -> StepMemory:
    own = list(model.parameters())
    with Ledger([*own, x]) as ledger:
        loss = model(x).square().mean()
        ledger.mark("backward")
        loss.backward()
        ledger.mark("update", gradients=[p.grad for p in own])
        for parameter in own:
            parameter.grad = None
    held = sum(rounded(p.nbytes) for p in own)
    return ledger.step(Sorting({"weights": held}))


def test_the_peak_is_what_pytorchs_own_tracker_finds():
    """`MemTracker` counts storages by weak references and by module: another author's account of
    the same step.
    """
    model, x = little_model(), torch.randn(512, 128)
    mine = recorded_step(model, x)
    tracker = MemTracker()
    tracker.track_external(model, x)
    with tracker:
        model(x).square().mean().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    theirs = next(value for key, value in peak.items() if "Total" in str(key)) - x.nbytes
    assert mine.peak == pytest.approx(theirs, rel=0.02)


def test_bytes_are_under_the_right_heading():
    model, x = little_model(), torch.randn(512, 128)
    memory = recorded_step(model, x)
    series = memory.series()
    (backward,) = [start for start, name in memory.phases if name == "backward"]
    hidden = 4 * 512 * (256 + 128)
    assert series["weights"][0] == sum(rounded(p.nbytes) for p in model.parameters())
    # What waits: each GELU's input and result (the last layer's input), and the loss's.
    assert hidden * 2 <= series["activations"][backward] <= hidden * 2 + 8 * 1024
    assert max(series["gradients"]) == sum(rounded(p.nbytes) for p in model.parameters())
    assert series["gradients"][0] == series["gradients"][-1] == 0
    assert memory.totals()[-1] == series["weights"][0] + BLOCK  # the loss is still there
    assert memory.peak_phase == "backward"


def test_views_and_what_was_known_are_not_counted():
    known = torch.zeros(1000)
    with Ledger([known]) as ledger:
        view = known.view(10, 100)[2:]
        fresh = view * 2
        again = fresh.t().reshape(-1)[:5].view(5)
        del view, again
    assert [one.bytes for one in ledger.raw] == [
        rounded(fresh.nbytes),
        *(one.bytes for one in ledger.raw[1:]),
    ]
    assert len(ledger.raw) <= 2  # a reshape of a transposed tensor copies


def test_what_is_dropped_dies_at_once():
    with Ledger() as ledger:
        x = torch.ones(100) + 1
        died = ledger.events
        del x
        gc.collect()
        torch.ones(3)
    assert ledger.raw[1].died is not None and ledger.raw[1].died >= died - 1
    assert ledger.step(Sorting({})).totals()[-1] == 0 or ledger.raw[-1].died is None


def test_the_meta_device_has_the_same_record():
    model, x = little_model(), torch.randn(512, 128)
    with torch.device("meta"):
        twin, shadow = little_model(), torch.empty(512, 128)
    real, imagined = recorded_step(model, x), recorded_step(twin, shadow)
    assert real.at_peak() == imagined.at_peak()
    assert real.phases == imagined.phases


# ---------------------------------------------------------------------- for whatever comes and goes

actions = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 20).map(BLOCK.__mul__)), max_size=60
)


@settings(deadline=None)
@given(actions, st.integers(0, 50_000))
def test_any_history_adds_up(drawn, before):
    """Against the simplest account: a dictionary from address to size, summed up after every line."""
    trace, there, sizes, foreign = [], {}, [], 0
    for comes, address, size in drawn:
        if comes and address not in there:
            there[address] = size
            trace.append({"action": "alloc", "addr": address, "size": size})
        elif not comes and address in there:
            trace.append({"action": "free_requested", "addr": address, "size": there.pop(address)})
        elif not comes and foreign + size <= before:
            foreign += size
            trace.append({"action": "free_requested", "addr": 100 + address, "size": size})
        else:
            trace.append({"action": "segment_alloc", "addr": address, "size": 1 << 20})
            continue
        sizes.append(before - foreign + sum(there.values()))
    memory = from_trace(trace, [("forward", 0, [], [])], Sorting({"temporaries": before}))
    assert memory.totals() == ([] if not any(sizes) else sizes)
    assert memory.peak == max(sizes, default=0)
    assert all(level >= 0 for levels in memory.series().values() for level in levels)


def test_a_history_is_sorted_by_its_marks():
    def line(action: str, address: int, size: int) -> dict:
        return {"action": action, "addr": address, "size": size, "time_us": 0}

    trace = [
        line("alloc", 1, 4096),  # waits for the backward pass
        line("alloc", 2, 512),  # passing
        line("free_requested", 2, 512),
        line("free_completed", 2, 512),
        line("alloc", 3, rounded(7 * 100 * 4)),  # as large as logits
        line("alloc", 4, 1024),  # a gradient
        line("free_requested", 1, 4096),
        line("alloc", 5, 2048),  # a moment
    ]
    seen = [
        ("forward", 0, [], []),
        ("backward", 5, [], []),
        ("update", 7, [4], []),
        ("end", 8, [], [5]),
    ]
    memory = from_trace(trace, seen, Sorting({"weights": 10_000}, logit_bytes((7,), 100)))
    kinds = {one.bytes: one.kind for one in memory.allocations}
    assert kinds == {
        4096: "activations",
        512: "temporaries",
        3072: "logits",
        1024: "gradients",
        2048: "optimizer",
    }
    assert memory.phases == ((0, "forward"), (4, "backward"), (6, "update"), (7, "end"))
    expected = {"weights": 10_000, "activations": 4096, "logits": 3072, "gradients": 1024}
    assert memory.at_peak() == expected | {"optimizer": 0, "temporaries": 0}
    assert memory.peak == 10_000 + 4096 + 3072 + 1024


def test_logits_have_four_sizes():
    assert logit_bytes((4, 3), 1000) == {rounded(n) for n in (8000, 16000, 6000, 12000)}
    assert (
        rounded(1) == rounded(BLOCK) == BLOCK
        and rounded(BLOCK + 1) == 2 * BLOCK
        and rounded(0) == 0
    )


def test_kinds_without_bytes_are_left_out():
    memory = StepMemory({"weights": 5}, (Allocation(0, 2, 3),), ((0, "forward"),), 3)
    assert memory.series() == {"weights": [5, 5, 5], "temporaries": [3, 3, 0]}
    assert set(memory.series()) <= set(KINDS)
    assert (memory.peak, memory.peak_event, memory.at_peak()) == (
        8,
        0,
        {"weights": 5, "temporaries": 3},
    )
