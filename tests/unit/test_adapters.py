"""Adapters: our LoRA against PEFT's and against W + BA written densely, and the files against PEFT
and diffusers.
"""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from labutils.layers import lora
from labutils.layers.lora import (
    LoRALinear,
    adapter_state,
    attach_lora,
    count_parameters,
    count_trainable,
    load_adapter,
    lora_layers,
    lora_parameters,
    matching_layers,
    merge,
    save_adapter,
    switch,
    unmerge,
)

KINDS = tuple(lora.KINDS)
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
EPSILONS = {
    dtype: 4 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16, torch.bfloat16)
}


class Net(nn.Module):
    """Two linear layers with something in between, the smallest model that has a target and a
    bystander.
    """

    def __init__(self, inner: int = 12, outer: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(outer, inner)
        self.norm = nn.LayerNorm(inner)
        self.down = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


def net(inner: int = 12, outer: int = 8, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(inner, outer).to(dtype)


def unet() -> UNet2DConditionModel:
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


def trained(module: nn.Module, name: str = "default", size: float = 0.1) -> nn.Module:
    """As after training: no B is zero any more."""
    generator = torch.Generator().manual_seed(3)
    for key, matrix in adapter_state(module, name).items():
        if ".lora_B." in key:
            matrix.copy_(size * torch.randn(matrix.shape, generator=generator))
    return module


def adapted(
    kind: str, rank: int = 3, alpha: float = 6, model: nn.Module | None = None, **options
) -> nn.Module:
    model = net() if model is None else model
    attach_lora(model, ("up", "down"), rank, alpha, kind, seed=5, **options)
    return trained(model)


def sample(model: UNet2DConditionModel) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    x, text = (
        torch.randn(2, 4, 8, 8, generator=generator),
        torch.randn(2, 5, 8, generator=generator),
    )
    with torch.no_grad():
        return model(x, torch.tensor([1, 500]), text).sample


# --- against PEFT and against the dense formula
# -----------------------------------------------------------------------

sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    d=sizes,
    k=sizes,
    rank=st.integers(1, 9),
    alpha=st.sampled_from([0.5, 1, 4, 16]),
    dtype=st.sampled_from(list(EPSILONS)),
    autocast=st.booleans(),
)
def test_every_kind_is_peft(
    d: int, k: int, rank: int, alpha: float, dtype: torch.dtype, autocast: bool
) -> None:
    """Outputs and gradients of the kinds agree on any shape, with and without autocast; gradients
    are float32.

    How far rounding can drive them apart is what the same products of absolute values say, times a
    few epsilons.
    """
    computed = torch.bfloat16 if autocast and dtype == torch.float32 else dtype
    generator = torch.Generator().manual_seed(d * 100 + k)
    x, upstream = (
        torch.randn(2, 3, k, generator=generator),
        torch.randn(2, 3, d, generator=generator),
    )
    outputs, gradients = {}, {}
    for kind in KINDS:
        torch.manual_seed(1)
        layer = nn.Sequential(nn.Linear(k, d)).to(dtype)
        a, b = attach_lora(layer, ("0",), rank, alpha, kind, seed=5)
        trained(layer)
        with torch.autocast("cpu", computed, enabled=autocast):
            outputs[kind] = layer(x if autocast else x.to(dtype))
        gradients[kind] = torch.autograd.grad(
            outputs[kind], (a, b), upstream.to(outputs[kind].dtype)
        )
    x, upstream, a, b = (t.detach().abs().flatten(0, -2) for t in (x, upstream, a, b))
    scale = alpha / rank
    spread = [(upstream @ b).T @ x * scale, upstream.T @ (x @ a.T) * scale]
    reach = (
        x @ layer[0].weight.detach().float().abs().T
        + layer[0].bias.detach().abs()
        + x @ a.T @ b.T * scale
    ).view(2, 3, d)
    for kind in set(KINDS) - {"peft"}:
        assert outputs[kind].dtype == outputs["peft"].dtype == computed
        assert ((outputs[kind] - outputs["peft"]).abs() <= EPSILONS[computed] * reach).all()
        for ours, peft_s, bound in zip(gradients[kind], gradients["peft"], spread, strict=True):
            assert ours.dtype == peft_s.dtype == torch.float32
            assert ((ours - peft_s).abs() <= EPSILONS[computed] * bound).all()


@settings(max_examples=30, deadline=None)
@given(d=sizes, k=sizes, rank=st.integers(1, 9), alpha=st.sampled_from([0.5, 3, 16]))
def test_the_layer_computes_w_plus_ba(d: int, k: int, rank: int, alpha: float) -> None:
    """y = x (W + alpha/r B A)^T + b, and the gradients of A and B are those of the dense matrix, in
    float64.
    """
    generator = torch.Generator().manual_seed(d * 100 + k)
    layer = LoRALinear(nn.Linear(k, d).double(), rank, alpha)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == torch.float64
    with torch.no_grad():
        a.copy_(torch.randn(rank, k, generator=generator))
        b.copy_(torch.randn(d, rank, generator=generator))
    x = torch.randn(5, k, generator=generator, dtype=torch.float64)
    dense = nn.functional.linear(x, layer.weight + alpha / rank * b @ a, layer.bias)
    torch.testing.assert_close(layer(x), dense)
    for ours, theirs in zip(
        torch.autograd.grad(layer(x).square().sum(), (a, b)),
        torch.autograd.grad(dense.square().sum(), (a, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_fp16_layer_takes_float32_under_autocast(kind: str) -> None:
    """A GPU's LayerNorm hands on float32 under autocast; the adapted fp16 layer takes it as its
    base would.
    """
    model = nn.Sequential(nn.Linear(8, 12).half())
    attach_lora(model, ("0",), 2, 2, kind, seed=0)
    with torch.autocast("cpu", torch.float16):
        y = trained(model)(torch.randn(2, 8))
    assert y.dtype == torch.float16
    y.float().sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_training_moves_the_adapter_only(kind: str) -> None:
    model = net()
    before = {n: p.clone() for n, p in model.named_parameters()}
    parameters = attach_lora(model, ("up", "down"), 2, 2, kind, seed=0)
    assert parameters == [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    x = torch.randn(16, 8)
    losses = []
    for _ in range(5):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(after[n], p) for n, p in before.items())


# --- attaching
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_add_adapter(kind: str) -> None:
    reference, model = unet(), unet()
    reference.add_adapter(
        peft.LoraConfig(
            r=4, lora_alpha=4, target_modules=list(TARGETS), init_lora_weights="gaussian"
        )
    )
    parameters = attach_lora(model, TARGETS, 4, 4, kind, seed=0)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    assert all(
        p.requires_grad == q.requires_grad
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    assert (
        sum(p.numel() for p in parameters) == count_trainable(reference) == count_trainable(model)
    )
    assert adapter_state(model).keys() == get_peft_model_state_dict(reference).keys()
    assert (
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0.lora_A.weight"
        in adapter_state(model)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_untrained_adapter_changes_nothing(kind: str) -> None:
    model = unet()
    before = sample(model)
    attach_lora(model, TARGETS, 4, 4, kind, seed=0)
    assert torch.equal(sample(model), before)


@pytest.mark.parametrize("init", lora.INITS)
def test_initial_weights_depend_on_seed_and_name_alone(init: str) -> None:
    """Whatever the kind, the targets' order, what else is adapted, the base's dtype, and what was
    drawn before.
    """

    def initial(
        model: nn.Module, targets: tuple[str, ...], kind: str, seed: int = 7
    ) -> dict[str, Tensor]:
        attach_lora(model, targets, 4, 4, kind, init=init, seed=seed)
        return adapter_state(model)

    both = initial(net(), ("up", "down"), "plain")
    torch.randn(3)
    for state in (
        initial(net(), ("down", "up"), "peft"),
        initial(net(), ("down",), "plain"),
        initial(net(dtype=torch.bfloat16), ("up",), "peft"),
    ):
        assert all(torch.equal(state[key], both[key]) for key in state)
    other = initial(net(), ("up", "down"), "plain", seed=8)
    assert not torch.equal(other["up.lora_A.weight"], both["up.lora_A.weight"])
    assert not torch.equal(
        both["up.lora_A.weight"].flatten(), both["down.lora_A.weight"].flatten()[:32]
    )


@pytest.mark.parametrize("init", lora.INITS)
def test_initial_weights_are_spread_as_pefts(init: str) -> None:
    """The same distribution as PEFT's own draw: zero mean, the same deviation, the same bound; B is
    zero.
    """
    model, reference = nn.Sequential(nn.Linear(4000, 8)), nn.Sequential(nn.Linear(4000, 8))
    attach_lora(model, ("0",), 8, 8, "plain", init=init, seed=0)
    config = peft.LoraConfig(
        r=8, target_modules=["0"], init_lora_weights="gaussian" if init == "gaussian" else True
    )
    peft.inject_adapter_in_model(config, reference)
    ours, theirs = (
        adapter_state(model)["0.lora_A.weight"],
        reference[0].lora_A["default"].weight.detach(),
    )
    assert abs(ours.mean()) < 0.03 * theirs.std()
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.02)
    assert ours.abs().max().item() == pytest.approx(
        theirs.abs().max().item(), rel=0.5 if init == "gaussian" else 0.01
    )
    assert not adapter_state(model)["0.lora_B.weight"].any()


def test_without_a_seed_the_global_one_counts_and_the_kinds_draw_alike() -> None:
    states, following = [], []
    for kind in KINDS:
        model = net()
        torch.manual_seed(11)
        attach_lora(model, ("up",), 4, 4, kind)
        states.append(adapter_state(model)["up.lora_A.weight"])
        following.append(torch.randn(4))
    assert torch.equal(states[0], states[1])
    assert torch.equal(following[0], following[1])


@pytest.mark.parametrize(
    ("targets", "matched"),
    [
        (("to_out.0",), ["attn.to_out.0"]),
        (("0",), ["attn.to_out.0"]),
        (("attn.q", "q"), ["attn.q", "q"]),
        (("q",), ["attn.q", "q"]),
        (("attn.q",), ["attn.q"]),
    ],
)
def test_targets_match_as_in_peft(targets: tuple[str, ...], matched: list[str]) -> None:
    model = nn.ModuleDict(
        {
            "attn": nn.ModuleDict(
                {
                    "q": nn.Linear(2, 2),
                    "xq": nn.Linear(2, 2),
                    "to_out": nn.ModuleList([nn.Linear(2, 2)]),
                }
            ),
            "q": nn.Linear(2, 2),
        }
    )
    assert matching_layers(model, targets) == matched
    tuner = peft.LoraModel(model, peft.LoraConfig(target_modules=list(targets)), "default")
    assert tuner.targeted_module_names == matched


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("to_q",)}, r"named like 'to_q'. Its linear layers end in: down, up"),
        ({"targets": "up"}, r"\('up',\)"),
        ({"rank": 0}, "rank=0"),
        ({"kind": "dora"}, "Choose one of: 'peft', 'plain'"),
        ({"init": "zeros"}, "Choose one of: 'gaussian', 'kaiming'"),
        ({"targets": ("norm",), "kind": "plain"}, "'norm' is a LayerNorm"),
    ],
)
def test_what_cant_be_attached_is_said(change: dict, message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        attach_lora(
            model, **({"targets": ("up",), "rank": 2, "alpha": 2, "kind": "plain"} | change)
        )
    assert not lora_layers(model)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapters_name_is_used_once(kind: str) -> None:
    model = adapted(kind)
    with pytest.raises(ValueError, match="already has an adapter named 'default'"):
        attach_lora(model, ("up",), 2, 2, kind)


# --- merging and switching
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_merge_and_unmerge(kind: str) -> None:
    model, x = adapted(kind), torch.randn(4, 8)
    base = {n: p.clone() for n, p in model.named_parameters() if "base_layer" in n}
    y = model(x)
    merge(model)
    merge(model)  # once is enough: the second does nothing
    torch.testing.assert_close(model(x), y)
    assert not torch.equal(model.up.weight, base["up.base_layer.weight"])
    unmerge(model)
    unmerge(model)
    torch.testing.assert_close(model(x), y)
    for name, weight in base.items():
        torch.testing.assert_close(dict(model.named_parameters())[name], weight)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    rank=st.integers(1, 8),
    inner=sizes,
)
def test_merged_weights_are_pefts(dtype: torch.dtype, rank: int, inner: int) -> None:
    """The same merged matrix, and unmerged, off by the rounding of that sum at most."""
    models = {kind: adapted(kind, rank, 4, net(inner, dtype=dtype)) for kind in KINDS}
    base = models["plain"].up.weight.clone()
    for model in models.values():
        merge(model)
    merged = models["plain"].up.weight
    assert merged.dtype == dtype
    torch.testing.assert_close(
        merged, models["peft"].up.weight, rtol=2 * torch.finfo(dtype).eps, atol=1e-7
    )
    rounding = torch.finfo(dtype).eps * torch.maximum(merged.abs(), base.abs()).float() + 1e-7
    unmerge(models["plain"])
    assert ((models["plain"].up.weight.float() - base.float()).abs() <= rounding).all()


@pytest.mark.parametrize("kind", KINDS)
def test_two_adapters_on_one_base(kind: str) -> None:
    """Each adapter computes what it does alone, before and after switching; only the one in use is
    trained.
    """
    x = torch.randn(4, 8)
    alone = {"default": adapted(kind, rank=3, alpha=6)(x)}
    model = adapted(kind, rank=3, alpha=6)
    parameters = attach_lora(model, ("up",), 2, 8, kind, seed=6, name="other")
    trained(model, "other", size=0.5)
    assert sum(p.numel() for p in parameters) == count_trainable(model) == lora_parameters(12, 8, 2)
    switch(model, "default")
    torch.testing.assert_close(model(x), alone["default"])
    assert count_trainable(model) == 2 * lora_parameters(12, 8, 3)
    switch(model, "other")
    assert not torch.allclose(model(x), alone["default"])
    torch.testing.assert_close(
        model.down(x @ torch.ones(8, 12)), model.down.base_layer(x @ torch.ones(8, 12))
    )
    assert count_trainable(model) == lora_parameters(12, 8, 2)
    with pytest.raises(ValueError, match="It has: default, other"):
        switch(model, "third")
    merge(model)
    with pytest.raises(ValueError, match=r"unmerge\(module\)"):
        switch(model, "default")


def test_quantised_weights_are_not_merged_into() -> None:
    model = adapted("plain")
    model.up.base_layer.weight = nn.Parameter(
        torch.zeros(12, 8, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"'up' are torch.uint8"):
        merge(model)
    assert not model.down.merged


# --- counting
# ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(d=sizes, k=sizes, rank=st.integers(1, 9), kind=st.sampled_from(KINDS))
def test_counts_on_the_meta_device(d: int, k: int, rank: int, kind: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(k, d, bias=False))
    attach_lora(model, ("0",), rank, rank, kind)
    assert count_trainable(model) == lora_parameters(d, k, rank) == d * rank + rank * k
    assert count_parameters(model) == d * k + lora_parameters(d, k, rank)
    assert {p.device.type for p in model.parameters()} == {"meta"}


# --- files
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", KINDS)
@pytest.mark.parametrize("read", KINDS)
def test_each_kind_loads_the_others_file(written: str, read: str, tmp_path: Path) -> None:
    model, x = adapted(written, rank=2, alpha=5), torch.randn(3, 8)
    save_adapter(model, tmp_path)
    fresh = net()
    parameters = load_adapter(fresh, tmp_path, kind=read)
    torch.testing.assert_close(fresh(x), model(x))
    assert parameters == [p for p in fresh.parameters() if p.requires_grad]
    other = adapted(read, rank=2, alpha=5)
    for matrix in adapter_state(other).values():
        matrix.zero_()
    load_adapter(other, tmp_path)
    torch.testing.assert_close(other(x), model(x))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_we_save(kind: str, tmp_path: Path) -> None:
    model, x = adapted(kind, rank=2, alpha=5), torch.randn(3, 8)
    save_adapter(model, tmp_path, base_model="somewhere/base")
    torch.testing.assert_close(peft.PeftModel.from_pretrained(net(), tmp_path)(x), model(x))
    assert {path.name for path in tmp_path.iterdir()} == {lora.WEIGHTS_FILE, lora.CONFIG_FILE}
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (2, 5, "somewhere/base")
    injected = peft.inject_adapter_in_model(config, net())
    result = set_peft_model_state_dict(injected, adapter_state(model))
    assert not result.unexpected_keys
    torch.testing.assert_close(injected(x), model(x))


@pytest.mark.parametrize("kind", KINDS)
def test_we_load_what_peft_saves(kind: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["up", "down"])
    theirs, x = peft.get_peft_model(net(), config), torch.randn(3, 8)
    trained(theirs)
    theirs.save_pretrained(tmp_path)
    ours = net()
    load_adapter(ours, tmp_path, kind=kind)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_loads_what_we_save(kind: str, tmp_path: Path) -> None:
    """A UNet's own loader, and its pipeline's, with an alpha that isn't the rank."""
    model = unet()
    attach_lora(model, TARGETS, 4, 10, kind, seed=0)
    trained(model)
    assert [path.name for path in save_adapter(model, tmp_path)] == [
        "adapter_model.safetensors",
        "pytorch_lora_weights.safetensors",
        "adapter_config.json",
    ]
    loaded, piped = unet(), unet()
    untrained = sample(loaded)
    loaded.load_lora_adapter(
        tmp_path, prefix="unet", weight_name="pytorch_lora_weights.safetensors"
    )
    torch.testing.assert_close(sample(loaded), sample(model))
    assert not torch.allclose(sample(loaded), untrained, atol=1e-3)
    state, alphas, metadata = StableDiffusionPipeline.lora_state_dict(
        tmp_path, weight_name="pytorch_lora_weights.safetensors", return_lora_metadata=True
    )
    StableDiffusionPipeline.load_lora_into_unet(state, alphas, piped, metadata=metadata)
    torch.testing.assert_close(sample(piped), sample(model))


def test_the_diffusers_file_has_the_pipelines_names(tmp_path: Path) -> None:
    """Key for key what `StableDiffusionPipeline.save_lora_weights` writes, for the tools that read
    those files.
    """
    from diffusers.utils import convert_state_dict_to_diffusers
    from safetensors.torch import load_file

    model = unet()
    attach_lora(model, TARGETS, 4, 4, "peft", seed=0)
    save_adapter(model, tmp_path / "ours")
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(model))
    StableDiffusionPipeline.save_lora_weights(tmp_path / "theirs", unet_lora_layers=layers)
    ours, theirs = (
        load_file(tmp_path / who / "pytorch_lora_weights.safetensors") for who in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_compiled_model_saves_under_the_plain_names() -> None:
    model = adapted("plain")
    assert adapter_state(torch.compile(model)).keys() == adapter_state(model).keys()


@settings(max_examples=40, deadline=None)
@given(share=st.floats(0, 0.999), file=st.sampled_from([lora.WEIGHTS_FILE, lora.CONFIG_FILE]))
def test_a_file_that_was_cut_off_is_said_to_be(
    share: float, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    save_adapter(adapted("plain"), folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content.rstrip()[: int(share * len(content.rstrip()))])
    model = net()
    with pytest.raises(ValueError, match="damaged"):
        load_adapter(model, folder, kind="plain")
    assert not lora_layers(model)


@pytest.mark.parametrize("file", [lora.WEIGHTS_FILE, lora.CONFIG_FILE])
def test_a_missing_file_is_named(file: str, tmp_path: Path) -> None:
    save_adapter(adapted("plain"), tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds no {file}"):
        load_adapter(net(), tmp_path)


def test_garbage_in_the_header_is_damage(tmp_path: Path) -> None:
    save_adapter(adapted("plain"), tmp_path)
    content = bytearray((tmp_path / lora.WEIGHTS_FILE).read_bytes())
    content[4:20] = b"\xff" * 16
    (tmp_path / lora.WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        load_adapter(net(), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("attached", "message"),
    [
        ({"rank": 4, "alpha": 6}, "has rank 3, the model's adapter 'default' has 4"),
        ({"rank": 3, "alpha": 3}, "has alpha 6, the model's adapter 'default' has 3"),
        (
            {"rank": 3, "alpha": 6, "targets": ("up",)},
            "on other layers than the model's adapter 'default': 2 matrices",
        ),
    ],
)
def test_an_adapter_of_another_make_is_refused(
    kind: str, attached: dict, message: str, tmp_path: Path
) -> None:
    save_adapter(adapted("plain", rank=3, alpha=6), tmp_path)
    model = net()
    attach_lora(model, **({"targets": ("up", "down"), "kind": kind, "seed": 9} | attached))
    before = copy.deepcopy(adapter_state(model))
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert all(torch.equal(before[key], matrix) for key, matrix in adapter_state(model).items())


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter(adapted("plain"), tmp_path)
    with pytest.raises(
        ValueError, match=r"another model: this Sequential has no layer '(up|down)'"
    ):
        load_adapter(nn.Sequential(nn.Linear(8, 12)), tmp_path)
    wider = net(inner=13)
    with pytest.raises(
        ValueError,
        match=r"down.lora_A.weight is \(3, 12\); rank 3 on this layer of 13 -> 8 needs \(3, 13\)",
    ):
        load_adapter(wider, tmp_path)
    assert not lora_layers(wider)


def test_two_halves_of_two_saves_are_refused(tmp_path: Path) -> None:
    """A save that dies between its files leaves new weights beside the old configuration, whose
    alpha isn't theirs.
    """
    save_adapter(adapted("plain", alpha=6), tmp_path / "old")
    save_adapter(adapted("plain", alpha=3), tmp_path / "new")
    (tmp_path / "new" / lora.CONFIG_FILE).write_text(
        (tmp_path / "old" / lora.CONFIG_FILE).read_text()
    )
    with pytest.raises(ValueError, match="two different adapters"):
        load_adapter(net(), tmp_path / "new")


def test_more_than_lora_is_refused(tmp_path: Path) -> None:
    theirs = peft.get_peft_model(
        net(), peft.LoraConfig(r=3, target_modules=["up"], use_rslora=True)
    )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_rslora=True"):
        load_adapter(net(), tmp_path)


def test_layers_of_different_alpha_dont_fit_one_file(tmp_path: Path) -> None:
    model = adapted("plain")
    model.up.scaling["default"] = 5.0
    with pytest.raises(ValueError, match="differ in rank or alpha"):
        save_adapter(model, tmp_path)
    assert not list(tmp_path.iterdir())


KILLED_WHILE_SAVING = """
import os, signal, sys
from tests.unit.test_adapters import adapted
from labutils.adapters import save_adapter
# the new file is written, and not in its place yet
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
save_adapter(adapted("plain", rank=5), sys.argv[1])
"""


def test_a_killed_save_leaves_the_last_one(tmp_path: Path) -> None:
    model, x = adapted("plain", rank=3), torch.randn(3, 8)
    save_adapter(model, tmp_path)
    before = (tmp_path / lora.WEIGHTS_FILE).read_bytes()
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path)], cwd=root, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / lora.WEIGHTS_FILE).read_bytes() == before
    fresh = net()
    load_adapter(fresh, tmp_path, kind="plain")
    torch.testing.assert_close(fresh(x), model(x))


def test_a_save_that_fails_leaves_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lora.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(adapted("plain"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_configuration_is_what_peft_needs_to_know(tmp_path: Path) -> None:
    save_adapter(adapted("plain", rank=3, alpha=1.5), tmp_path)
    config = json.loads((tmp_path / lora.CONFIG_FILE).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 3, 1.5)
    assert config["target_modules"] == ["down", "up"]
