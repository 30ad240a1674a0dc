"""Every form of activation checkpointing against the pass that keeps everything."""

from __future__ import annotations

import functools
import gc
from collections import Counter

import pytest
import torch
from recipes_at_work import Products
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.layers.activation_checkpoint import THIN, Parking, keeping_products, offloading
from labutils.layers.packed_attention import _varlen, _with_sinks
from labutils.recipe import Recipe
from labutils.training import Trainer
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents


def make_blocks(count=3):
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(count)
    )
    for block in blocks:
        block[0].requires_grad_(False)  # as under an adapter
    return blocks


def run(blocks, x, parking=None):
    for block in blocks:
        call = block if parking is None else functools.partial(offloading(block, parking), block)
        x = x + call(x)
    return x.square().sum()


@pytest.mark.parametrize("wanted", [True, False], ids=["input has a gradient", "input has none"])
def test_offloading_gives_the_same_gradients(wanted):
    blocks, x = make_blocks(), torch.randn(4, 8, requires_grad=wanted)
    trained = [p for p in blocks.parameters() if p.requires_grad] + ([x] if wanted else [])
    expected = torch.autograd.grad(run(blocks, x), trained)
    parking = Parking()
    for _ in range(2):  # the second pass takes the rooms of the first
        torch.testing.assert_close(torch.autograd.grad(run(blocks, x, parking), trained), expected)


def test_rooms_are_used_again_and_not_before():
    blocks, x, parking = make_blocks(), torch.randn(4, 8), Parking()
    losses = [run(blocks, x, parking) for _ in range(2)]  # two passes at once need six
    losses[0].backward()
    del losses
    gc.collect()
    assert len(parking.free) == 6
    run(blocks, x, parking).backward()
    gc.collect()
    assert len(parking.free) == 6


def test_the_second_pass_computes_in_the_first_ones_dtype():
    dtypes = []
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda layer, inputs, out: dtypes.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = offloading(layer, Parking())(layer, torch.randn(2, 8)).sum()
    loss.backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


class Operations(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def packed(query, key, value, boundaries):
    return _varlen(query, key, value, boundaries, 5, 0.25)


def with_sinks(query, key, value, boundaries):
    return _with_sinks(query, key, value, torch.zeros(4, device="meta"), boundaries, 5, 0.25, 0)[0]


@pytest.mark.parametrize(
    ("attend", "operator"),
    [
        (packed, "torch_attn._varlen_attn.default"),
        (with_sinks, "labutils.attention_with_sinks.default"),
    ],
)
def test_selective_checkpointing_does_not_attend_again(attend, operator):
    """Attention of packed rows is an operator of its own. The meta device runs it without a GPU."""
    weights = torch.randn(3, 64, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    boundaries = torch.zeros(3, device="meta", dtype=torch.int32)

    def block(x):
        projected = [(x @ weight).view(10, 4, 16) for weight in weights]
        return x + attend(*projected, boundaries).reshape(10, 64).sin()

    x = torch.randn(10, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Operations() as forward:
        loss = keeping_products(block, x).sum()
    with Operations() as backward:
        loss.backward()
    assert forward.count[operator] == 1
    assert backward.count[operator] == 0
    assert backward.count["aten.mm.default"] == 2 * forward.count["aten.mm.default"]


@pytest.mark.parametrize("name", ["sd15-lora", "qwen3-lora-short"])
def test_selective_checkpointing_trains_alike_and_hardly_multiplies_again(name):
    """Same losses as with everything kept. It spares nearly all wide products that "blocks"
    computes again."""
    workload, plain = open_workload(name, "tiny", device="cpu"), Recipe(driver="eager")
    if name.startswith("sd15"):
        workload, plain = on_drawn_latents(workload), plain.but(cache="latents+text")
    losses, products = {}, {}
    for kind in ("off", "selective", "blocks"):
        recipe = plain.but(logging="ring-buffer", accumulation=1, checkpointing=kind)
        with Trainer(workload, recipe) as trainer:
            trainer.run(1)
            with Products(wider_than=THIN) as wide:
                trainer.run(2)
            trainer.driver.log.flush()
            losses[kind], products[kind] = trainer.losses, wide.count
    assert losses["selective"] == losses["off"] == losses["blocks"]
    again = {kind: products[kind] - products["off"] for kind in ("selective", "blocks")}
    assert 0 <= again["selective"] <= 0.3 * again["blocks"]
