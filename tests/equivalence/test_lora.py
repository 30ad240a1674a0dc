"""LoRA against PEFT; its files against PEFT and diffusers."""

from __future__ import annotations

import peft
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import get_peft_model_state_dict
from torch import nn

from labutils.layers.lora import (
    KINDS,
    WEIGHTS_FILE,
    adapter_state,
    attach_lora,
    count_trainable,
    lora_layers,
    matching_layers,
    save_adapter,
)

CONFIG_FILE = "adapter_config.json"
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


def adapted(kind, rank=3, alpha=6, model=None):
    model = make_net() if model is None else model
    attach_lora(model, ("up", "down"), rank, alpha, kind, seed=5)
    return trained(model)


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
    scale, epsilon = alpha / rank, 4 * torch.finfo(computed).eps
    bounds = [(upstream @ b).T @ x * scale, upstream.T @ (x @ a.T) * scale]
    weight, bias = (p.detach().float().abs() for p in (layer[0].weight, layer[0].bias))
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
    ("change", "message"),
    [
        ({"targets": ("to_q",)}, "down, up"),
        ({"rank": 0}, "rank=0"),
        ({"targets": ("norm",)}, "Norm"),
    ],
)
def test_what_cant_be_attached_is_said(change, message):
    model = make_net()
    asked = {"targets": ("up",), "rank": 2, "alpha": 2, "kind": "plain"}
    with pytest.raises(ValueError, match=message):
        attach_lora(model, **(asked | change))
    assert not lora_layers(model)


# -------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_we_save(kind, tmp_path):
    model, x = adapted(kind, rank=2, alpha=5), torch.randn(3, 8)
    files = save_adapter(model, tmp_path, base_model="somewhere/base")
    assert sorted(tmp_path.iterdir()) == files == [tmp_path / CONFIG_FILE, tmp_path / WEIGHTS_FILE]
    torch.testing.assert_close(peft.PeftModel.from_pretrained(make_net(), tmp_path)(x), model(x))
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (2, 5, "somewhere/base")


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_loads_what_we_save(kind, tmp_path):
    """A UNet's own loader, and its pipeline's, with an alpha that isn't the rank."""
    model, file = make_unet(), "pytorch_lora_weights.safetensors"
    attach_lora(model, TARGETS, 4, 10, kind, seed=0)
    trained(model)
    assert file in [path.name for path in save_adapter(model, tmp_path)]
    loaded, piped = make_unet(), make_unet()
    assert not torch.allclose(sample(loaded), sample(model), atol=1e-3)
    loaded.load_lora_adapter(tmp_path, prefix="unet", weight_name=file)
    torch.testing.assert_close(sample(loaded), sample(model))
    state, alphas, metadata = StableDiffusionPipeline.lora_state_dict(
        tmp_path, weight_name=file, return_lora_metadata=True
    )
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, piped, metadata=metadata)
    torch.testing.assert_close(sample(piped), sample(model))


def test_a_save_that_fails_leaves_the_last_one(tmp_path, monkeypatch):
    """A disk without room: no half a file, no rubbish."""
    save_adapter(adapted("plain"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(peft.LoraConfig, "save_pretrained", full)
    with pytest.raises(OSError, match="space"):
        save_adapter(adapted("plain", rank=5), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
