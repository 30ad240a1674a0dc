"""LoRA against PEFT."""

from __future__ import annotations

import peft
import pytest
import torch
from diffusers import UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import get_peft_model_state_dict
from recipes_at_work import adapter_state
from torch import nn

from labutils.layers.lora import KINDS, attach_lora, count_trainable, lora_layers, matching_layers

TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Net(nn.Module):
    """The smallest model that has two targets and a bystander."""

    def __init__(self, inner=12, outer=8):
        super().__init__()
        self.up = nn.Linear(outer, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, outer, bias=False)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


def make_net(inner=12, dtype=torch.float32):
    torch.manual_seed(1)
    return Net(inner).to(dtype)


def make_unet():
    """A UNet of Stable Diffusion's kind, small enough to build in no time."""
    torch.manual_seed(2)
    return UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def trained(module, size=0.1):
    """As after training: no B is zero any more."""
    generator = torch.Generator().manual_seed(3)
    for key, matrix in adapter_state(module).items():
        if ".lora_B." in key:
            matrix.copy_(size * torch.randn(matrix.shape, generator=generator))
    return module


def sample(unet):
    generator = torch.Generator().manual_seed(4)
    x, text = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, 8)))
    with torch.no_grad():
        return unet(x, torch.tensor([1, 500]), text).sample


# -------------------------------------------------------------------------------------------------
# Against PEFT

sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    d=sizes,
    k=sizes,
    rank=st.integers(1, 9),
    alpha=st.sampled_from([0.5, 1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
    autocast=st.booleans(),
)
def test_the_plain_layer_is_pefts(d, k, rank, alpha, dtype, autocast):
    """Outputs and gradients agree on any shape, with and without autocast; gradients are float32.

    How far rounding can drive them apart is what the same products of absolute values say, times a
    few epsilons.
    """
    computed = torch.bfloat16 if autocast and dtype == torch.float32 else dtype
    generator = torch.Generator().manual_seed(d * 100 + k)
    x, upstream = (torch.randn(2, 3, width, generator=generator) for width in (k, d))
    outputs, gradients = {}, {}
    for kind in KINDS:
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(k, d)).to(dtype)
        a, b = attach_lora(layer, ("0",), rank, alpha, kind, seed=5)
        trained(layer)
        with torch.autocast("cpu", computed, enabled=autocast):
            y = outputs[kind] = layer(x if autocast else x.to(dtype))
        gradients[kind] = torch.autograd.grad(y, (a, b), upstream.to(y.dtype))
    x, upstream, a, b = (t.detach().abs().flatten(0, -2) for t in (x, upstream, a, b))
    base = layer[0].base_layer
    scale, epsilon = alpha / rank, 4 * torch.finfo(computed).eps
    bounds = [(upstream @ b).T @ x * scale, upstream.T @ (x @ a.T) * scale]
    weight, bias = (p.detach().float().abs() for p in (base.weight, base.bias))
    reach = (x @ weight.T + bias + x @ a.T @ b.T * scale).view(2, 3, d)
    assert outputs["plain"].dtype == outputs["peft"].dtype == computed
    assert ((outputs["plain"] - outputs["peft"]).abs() <= epsilon * reach).all()
    for ours, theirs, bound in zip(gradients["plain"], gradients["peft"], bounds, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        assert ((ours - theirs).abs() <= epsilon * bound).all()


# -------------------------------------------------------------------------------------------------
# Attaching


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_add_adapter(kind):
    reference, model = make_unet(), make_unet()
    untouched = sample(model)
    reference.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=list(TARGETS)))
    parameters = attach_lora(model, TARGETS, 4, 4, kind, seed=0)
    theirs = [(n, p.requires_grad) for n, p in reference.named_parameters()]
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == theirs
    assert sum(p.numel() for p in parameters) == count_trainable(reference)
    assert adapter_state(model).keys() == get_peft_model_state_dict(reference).keys()
    assert torch.equal(sample(model), untouched)  # B is zero
    assert adapter_state(torch.compile(model)).keys() == adapter_state(model).keys()
    with pytest.raises(ValueError, match="already"):
        attach_lora(model, TARGETS, 4, 4, kind)


def test_initial_weights_depend_on_seed_and_name_alone():
    """Whatever the kind, what else is adapted, and the base's dtype."""

    def initial(model, targets, kind, seed=7):
        attach_lora(model, targets, 4, 4, kind, seed=seed)
        return adapter_state(model)["up.lora_A.weight"]

    both = initial(make_net(), ("up", "down"), "plain")
    torch.randn(3)
    assert torch.equal(initial(make_net(dtype=torch.bfloat16), ("up",), "peft"), both)
    assert not torch.equal(initial(make_net(), ("up",), "plain", seed=8), both)


@pytest.mark.parametrize(
    ("targets", "matched"),
    [
        (("to_out.0",), ["attn.to_out.0"]),
        (("0",), ["attn.to_out.0"]),
        (("q",), ["attn.q", "q"]),
        (("attn.q",), ["attn.q"]),
    ],
)
def test_targets_match_as_in_peft(targets, matched):
    layers = {name: nn.Linear(2, 2) for name in ("q", "xq")}
    layers["to_out"] = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.ModuleDict({"attn": nn.ModuleDict(layers), "q": nn.Linear(2, 2)})
    assert matching_layers(model, targets) == matched
    tuner = peft.LoraModel(model, peft.LoraConfig(target_modules=list(targets)), "default")
    assert tuner.targeted_module_names == matched


@pytest.mark.parametrize(
    ("change", "message"), [({"targets": ("to_q",)}, "down, up"), ({"rank": 0}, "rank=0")]
)
def test_what_cant_be_attached_is_said(change, message):
    model = make_net()
    asked = {"targets": ("up",), "rank": 2, "alpha": 2, "kind": "plain"}
    with pytest.raises(ValueError, match=message):
        attach_lora(model, **(asked | change))
    assert not lora_layers(model)
