"""Training memory: counts from shapes against what a trained model holds, and against layers
counted by hand.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from diffusers import UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from labutils.layers.lora import LoRALinear, attach_lora
from labutils.profiling.training_memory import TrainingMemory, measured, planned, saved_for_backward

sizes = st.integers(1, 30)


def unet_loss(device: str, lora: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    with torch.device(device):
        model = UNet2DConditionModel(
            sample_size=16,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=8,
        )
        inputs = torch.ones(2, 4, 16, 16), torch.ones(2, dtype=torch.long), torch.ones(2, 5, 16)
    if lora:
        attach_lora(model, ("to_q", "to_k", "to_v", "to_out.0"), 4, 4, "plain")
    return model, lambda: model(*inputs).sample.square().mean()


def language_loss(device: str, lora: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    with torch.device(device):
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=300, hidden_size=64, intermediate_size=96, **sizes)
        )
        ids = torch.ones(2, 30, dtype=torch.long)
    if lora:
        attach_lora(model, ("q_proj", "v_proj", "down_proj"), 4, 4, "plain")
    return (
        model,
        lambda: (
            model(ids, labels=ids, use_cache=False, attention_mask={"full_attention": None}).loss
        ),
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("build", [unet_loss, language_loss])
def test_the_meta_device_keeps_what_a_real_one_keeps(build: Callable, lora: bool) -> None:
    """To the byte, where the real device has a fused attention kernel, as CPUs have."""
    on_cpu, on_meta = (saved_for_backward(*build(device, lora)) for device in ("cpu", "meta"))
    assert on_meta == on_cpu > 0


@settings(max_examples=20, deadline=None)
@given(n=sizes, d=sizes, k=sizes, r=st.integers(1, 5))
def test_linear_layers_by_hand(n: int, d: int, k: int, r: int) -> None:
    """A trained layer keeps its input, a frozen one nothing but its weight, LoRA the input and its
    thin product.
    """
    base, x = nn.Linear(k, d), torch.randn(n, k)
    assert saved_for_backward(base, lambda: base(x).sum()) == 4 * n * k
    frozen = nn.Linear(k, d).requires_grad_(False)
    assert saved_for_backward(frozen, lambda: frozen(x.clone().requires_grad_()).sum()) == 0
    layer = LoRALinear(frozen, r, r)
    assert saved_for_backward(layer, lambda: layer(x).sum()) == 4 * n * (k + r)


def test_what_is_shared_counts_once() -> None:
    a, b, x = nn.Linear(6, 5), nn.Linear(6, 5), torch.randn(7, 6)
    both = nn.ModuleList([a, b])
    assert saved_for_backward(both, lambda: (a(x) + b(x.view(7, 6))).sum()) == 4 * 7 * 6


@settings(max_examples=15, deadline=None)
@given(
    frozen=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    moments=st.sampled_from([0, 1, 2]),
)
def test_plans_are_what_a_step_holds(frozen: bool, dtype: torch.dtype, moments: int) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(dtype)
    model[0].requires_grad_(not frozen)
    plan = planned(model, moments=moments)
    trained = [p for p in model.parameters() if p.requires_grad]
    if moments == 2:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained)
    else:
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9 * moments)
    x = torch.randn(5, 8, dtype=dtype)
    found = measured(model, lambda: model(x).sum(), optimizer)
    step_counters = 4 * len(trained) if moments == 2 else 0
    assert (found.weights, found.gradients) == (plan.weights, plan.gradients)
    assert found.optimizer == plan.optimizer + step_counters
    assert found.activations == saved_for_backward(model, lambda: model(x).sum())
    size = 2 if dtype == torch.bfloat16 else 4
    assert plan.gradients == size * (32 + 68 + (0 if frozen else 144))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lora", [False, True])
def test_a_gpus_allocator_grows_by_what_was_counted(lora: bool) -> None:
    """Within the allocator's rounding to 512 bytes a tensor, and the seeds that attention kernels
    keep.
    """
    model, loss = unet_loss("cuda", lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert measured(model, loss, optimizer).activations == pytest.approx(
        saved_for_backward(model, loss), rel=0.1
    )


def test_totals_and_units() -> None:
    memory = TrainingMemory(weights=4_000_000_000, gradients=2, optimizer=3, activations=5)
    assert memory.total == 4_000_000_010
    assert memory.in_gb() == {
        "weights": 4.0,
        "gradients": 2e-9,
        "optimizer": 3e-9,
        "activations": 5e-9,
    }


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Sigmoid(), nn.Softmax(-1), nn.GroupNorm(2, 8)])
def test_looking_at_what_is_kept_keeps_nothing(layer: nn.Module) -> None:
    """Some layers keep their own output: a hook that hands it back as it is would tie the graph to
    itself.
    """

    def look() -> weakref.ref:
        model, x = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)), torch.randn(4, 8)
        assert saved_for_backward(model, lambda: model(x).square().mean()) > 0
        return weakref.ref(model[0].weight)

    weight = look()
    gc.collect()
    assert weight() is None
