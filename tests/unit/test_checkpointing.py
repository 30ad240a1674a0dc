"""Checkpointing that parks blocks' inputs on the host."""

from __future__ import annotations

import functools
import gc
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes_at_work import Products
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labutils.layers import activation_checkpoint
from labutils.layers.activation_checkpoint import Parking, offloading, recomputing_within


def blocks(count=3):
    torch.manual_seed(0)
    made = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(count)
    )
    for block in made:
        block[0].requires_grad_(False)  # as under an adapter
    return made


def run(layers, x, parking=None):
    for layer in layers:
        x = x + (
            layer(x) if parking is None else offloading(layer, parking)(functools.partial(layer), x)
        )
    return x.square().sum()


@pytest.mark.parametrize("wanted", [True, False], ids=["input has a gradient", "input has none"])
def test_gradients_are_those_without_it(wanted):
    layers, x = blocks(), torch.randn(4, 8, requires_grad=wanted)
    trained = [p for p in layers.parameters() if p.requires_grad] + ([x] if wanted else [])
    expected = torch.autograd.grad(run(layers, x), trained)
    parking = Parking()
    for _ in range(2):  # the second pass takes the rooms of the first
        for found, theirs in zip(
            torch.autograd.grad(run(layers, x, parking), trained), expected, strict=True
        ):
            torch.testing.assert_close(found, theirs)


def test_gradients_add_up_over_micro_batches():
    layers, x = blocks(), torch.randn(4, 8)
    for _ in range(2):
        run(layers, x, Parking()).backward()
    found = layers[0][2].weight.grad.clone()
    layers.zero_grad()
    run(layers, x).backward()
    torch.testing.assert_close(found, 2 * layers[0][2].weight.grad)


def test_rooms_are_used_again_and_not_before():
    layers, x, parking = blocks(), torch.randn(4, 8), Parking()
    losses = [run(layers, x, parking) for _ in range(2)]  # two passes at once need six
    losses[0].backward()
    del losses
    gc.collect()
    assert len(parking.free) == 6
    run(layers, x, parking).backward()
    gc.collect()
    assert len(parking.free) == 6


@settings(max_examples=8, deadline=None)  # a collection of garbage takes its time
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([torch.float32, torch.float64])),
        min_size=1,
        max_size=6,
    )
)
def test_one_set_of_rooms_serves_all_lengths(passes):
    """Up to the length that is expected, nothing is allocated after the first pass."""
    layers, parking = blocks(), Parking(room_bytes=9 * 8 * 8)
    rooms = set()
    for rows, dtype in passes:
        layers.to(dtype)
        run(layers, torch.randn(rows, 8, dtype=dtype), parking).backward()
        gc.collect()
        rooms |= {room.data_ptr() for room in parking.free}
    assert len(rooms) == len(parking.free) == 3
    assert {room.nbytes for room in parking.free} == {9 * 8 * 8}


def test_a_tensor_longer_than_expected_has_a_room_of_its_own():
    parking, short, long = Parking(room_bytes=64), torch.randn(2, 8), torch.randn(5, 8)
    for tensor in (short, long, short):
        assert torch.equal(parking.park(tensor).back(), tensor)
    gc.collect()
    assert sorted(room.nbytes for room in parking.free) == [64, 160]


def test_nothing_is_parked_where_no_gradient_is_wanted():
    parking = Parking()
    with torch.no_grad():
        run(blocks(), torch.randn(4, 8), parking)
    assert not parking.free


def test_the_second_pass_computes_in_the_first_ones_dtype():
    seen = []

    class Seeing(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    layer = Seeing(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = offloading(layer, Parking())(layer, torch.randn(2, 8)).sum()
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("name", ["sd15-lora", "qwen3-lora-short", "llava-lora"])
def test_selective_checkpointing_trains_alike_and_hardly_multiplies_again(name, tmp_path):
    """Same losses as with everything kept; of the wide products that "blocks" computes again it
    spares nearly all.
    """
    from labutils.layers.activation_checkpoint import THIN
    from labutils.recipe import Recipe
    from labutils.training import Trainer
    from labutils.workloads import open_workload

    work = open_workload(name, "tiny", device="cpu", cache_dir=tmp_path)
    found = {}
    for kind in ("off", "selective", "blocks"):
        recipe = Recipe(driver="eager", logging="ring-buffer", accumulation=1, checkpointing=kind)
        with Trainer(work, recipe) as trainer:
            trainer.run(1)
            with Products(wider_than=THIN) as wide:
                trainer.run(2)
            trainer.driver.log.flush()
            found[kind] = (trainer.losses, wide.count)
    assert found["selective"][0] == found["off"][0] == found["blocks"][0]
    again = {kind: found[kind][1] - found["off"][1] for kind in ("selective", "blocks")}
    assert 0 <= again["selective"] <= 0.3 * again["blocks"]


def compiled_with_a_checkpoint(block):
    """What PyTorch's logger said while this was compiled, as if nothing had been before in this
    process.
    """
    from torch._logging._internal import warning_once

    warning_once.cache_clear()
    torch._dynamo.reset()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    activation_checkpoint.WRAP.addHandler(handler)
    try:
        torch.compile(block, backend="aot_eager")(
            torch.randn(2, 8, requires_grad=True)
        ).sum().backward()
    finally:
        activation_checkpoint.WRAP.removeHandler(handler)
    return [message for message in said if "context_fn" in message]


def theirs(x):
    """Somebody else's checkpoint: they are to be warned of operations in place."""
    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(lambda y: torch.relu(y).sin(), x, use_reentrant=False, context_fn=kept)


def test_pytorchs_warning_is_dropped_for_our_checkpoints_alone():
    assert (
        len(compiled_with_a_checkpoint(theirs)) == 1
    )  # that this module was imported changes nothing
    assert compiled_with_a_checkpoint(recomputing_within(blocks(1)[0])) == []
    assert len(compiled_with_a_checkpoint(theirs)) == 1
