"""Recorded memory, against another author's tracker, a dictionary, and sums by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from labutils.profiling.memory import (
    BLOCK,
    StepMemory,
    TensorRecord,
    logit_bytes,
    rounded,
    step_memory,
)

NO_MARKS = [("forward", 0, [])]


def little_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 1)
    return nn.Sequential(*layers)


def recorded_step(model: nn.Module, x: torch.Tensor) -> StepMemory:
    own = list(model.parameters())
    with TensorRecord([*own, x]) as record:
        loss = model(x).square().mean()
        record.mark("backward")
        loss.backward()
        record.mark("update", gradients=[p.grad for p in own])
        for parameter in own:
            parameter.grad = None
    memory = record.step({"weights": sum(rounded(p.nbytes) for p in own)})
    assert memory.held["weights"] + record.peak == memory.peak
    assert record.now == BLOCK  # the loss is still there
    return memory


def test_the_peak_is_what_pytorchs_own_tracker_finds():
    """`MemTracker` counts storages by weak references and by module."""
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
    weights = sum(rounded(p.nbytes) for p in model.parameters())
    # What waits: each GELU's input and result (the last layer's input), and the loss's.
    assert hidden * 2 <= series["activations"][backward] <= hidden * 2 + 8 * 1024
    assert max(series["gradients"]) == series["weights"][0] == weights
    assert series["gradients"][0] == series["gradients"][-1] == 0
    assert memory.totals()[-1] == weights + BLOCK


actions = st.lists(
    st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 20).map(BLOCK.__mul__)), max_size=60
)


@settings(deadline=None)
@given(actions, st.integers(0, 50_000))
def test_any_history_adds_up(drawn, before):
    """Against a dictionary from address to size, summed up after every line."""
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
    memory = step_memory(trace, NO_MARKS, {"temporaries": before})
    assert memory.totals() == ([] if not any(sizes) else sizes)
    assert memory.peak == max(sizes, default=0)
    assert all(level >= 0 for levels in memory.series().values() for level in levels)


def test_a_history_is_sorted_by_its_marks():
    lines = [
        ("alloc", 1, 4096),  # waits for the backward pass
        ("alloc", 2, 512),  # passing
        ("free_requested", 2, 512),
        ("free_completed", 2, 512),
        ("alloc", 3, rounded(7 * 100 * 4)),  # as large as logits
        ("alloc", 4, 1024),  # a gradient
        ("free_requested", 1, 4096),
        ("alloc", 5, 2048),  # what the update needs
    ]
    trace = [dict(zip(("action", "addr", "size"), line, strict=True)) for line in lines]
    marks = [("backward", 5, []), ("update", 7, [4])]
    memory = step_memory(trace, NO_MARKS + marks, {"weights": 10_000}, logit_bytes((7,), 100))
    kinds = ("activations", "temporaries", "logits", "gradients", "temporaries")
    sizes = zip(kinds, (4096, 512, 3072, 1024, 2048), strict=True)
    assert [(one.kind, one.bytes) for one in memory.allocations] == list(sizes)
    assert memory.phases == ((0, "forward"), (4, "backward"), (6, "update"))
    peak = {"weights": 10_000, "activations": 4096, "logits": 3072, "gradients": 1024}
    assert memory.at_peak() == peak | {"temporaries": 0}
    assert memory.peak == sum(peak.values())
