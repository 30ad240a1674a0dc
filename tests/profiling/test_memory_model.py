"""Predicted memory: counts from shapes against what a trained model holds, and layers by hand."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils.layers.lora import LoRALinear
from labutils.profiling.memory_model import bytes_of, planned, saved_for_backward, tensors_of
from labutils.workloads.causal_lm import QWEN3
from labutils.workloads.decoder_memory import one_block

sizes = st.integers(1, 30)


def test_the_meta_device_keeps_what_a_real_one_keeps():
    """To the byte, where the real device has a fused attention kernel, as CPUs have."""
    blocks = (
        one_block(QWEN3["tiny"], False, torch.device(on), 2, 30, "plain") for on in ("cpu", "meta")
    )
    on_cpu, on_meta = (saved_for_backward(*block) for block in blocks)
    assert on_meta == on_cpu > 0


@settings(max_examples=20, deadline=None)
@given(n=sizes, d=sizes, k=sizes, r=st.integers(1, 5))
def test_linear_layers_by_hand(n, d, k, r):
    """A trained layer keeps its input, a frozen one nothing but its weight, LoRA the input and its
    thin product.
    """
    base, x = nn.Linear(k, d), torch.randn(n, k)
    assert saved_for_backward(base, lambda: base(x).sum()) == 4 * n * k
    frozen = nn.Linear(k, d).requires_grad_(False)
    assert saved_for_backward(frozen, lambda: frozen(x.clone().requires_grad_()).sum()) == 0
    layer = LoRALinear(frozen, r, r)
    assert saved_for_backward(layer, lambda: layer(x).sum()) == 4 * n * (k + r)


@pytest.mark.parametrize(("frozen", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_plans_are_what_a_step_holds(frozen, dtype):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(dtype)
    model[0].requires_grad_(not frozen)
    plan = planned(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    model(torch.randn(5, 8, dtype=dtype)).sum().backward()
    optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    assert plan.weights == bytes_of(tensors_of(model))
    assert plan.gradients == sum(p.grad.nbytes for p in trained)
    assert plan.optimizer == sum(value.nbytes for value in state) - 4 * len(trained)  # counters
    assert plan.gradients == dtype.itemsize * (32 + 68 + (0 if frozen else 144))


def test_looking_at_what_is_kept_keeps_nothing():
    """Some layers keep their own output: a hook that hands it back as it is would tie the graph to
    itself.
    """

    def look():
        model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))
        x = torch.randn(4, 8)
        assert saved_for_backward(model, lambda: model(x).square().mean()) > 0
        return weakref.ref(model[0].weight)

    weight = look()
    gc.collect()
    assert weight() is None
