"""The kinds of frozen layer behind one knob: swapped under adapters, trained with, refused in
words.
"""

from __future__ import annotations

import gc
import math
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from labutils.layers.lora import attach_lora, count_trainable, lora_layers, merge
from labutils.layers.quantization.convert import (
    MAKERS,
    convert_base,
    forward_context,
    frozen_linears,
    transformer_engine,
)
from labutils.layers.quantization.fp8_linear import FrozenFP8Linear
from labutils.recipe import STOCK, Unavailable
from labutils.training import Trainer, train
from labutils.workloads import open_workload

TARGETS = ("q_proj", "v_proj", "down_proj")
ON_CPU = {"fp8-frozen": 0.06, "nf4": 0.3, "nf4-frozen": 0.3, "nf4-fp8": 0.3}
"""Kind that runs on a CPU -> how far its logits may be from the published weights', relative to
their norm.
"""
LAYERS = {
    "fp8-frozen": "FrozenFP8Linear",
    "nf4": "Linear4bit",
    "nf4-frozen": "FrozenNF4Linear",
    "nf4-fp8": "FrozenNF4FP8Linear",
}
ELSEWHERE = tuple(kind for kind in MAKERS if kind not in ON_CPU)
kinds_of_adapter = pytest.mark.parametrize("adapter", ["plain", "peft"])


def language_model(adapter: str = "plain", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=120, **heads
        )
    )
    attach_lora(model, TARGETS, 4, 8, adapter, seed=0)
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(120, (2, 11), generator=torch.Generator().manual_seed(0))


# Which layers


@kinds_of_adapter
def test_frozen_linears_are_the_bases_and_the_unadapted_layers(adapter):
    names = frozen_linears(language_model(adapter), skip=("lm_head",))
    assert len(names) == 14
    assert "model.layers.0.self_attn.q_proj.base_layer" in names
    assert "model.layers.1.self_attn.k_proj" in names
    assert not any("lora_" in name or "lm_head" in name for name in names)


def test_what_is_trained_or_has_odd_widths_is_not_listed():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(24, 32), "c": nn.Linear(32, 32)})
    model.requires_grad_(False)
    model["c"].requires_grad_(True)
    assert frozen_linears(model) == ["a"]


# The swap


@kinds_of_adapter
@pytest.mark.parametrize("kind", ON_CPU)
def test_the_model_computes_nearly_the_same_and_trains_its_adapter(kind, adapter):
    model, plain = language_model(adapter), language_model(adapter)
    trainable = count_trainable(model)
    names = frozen_linears(model, skip=("lm_head",))
    assert convert_base(model, names, kind, torch.float32) == names
    assert count_trainable(model) == trainable
    found, expected = (m(tokens(), labels=tokens()) for m in (model, plain))
    assert (found.logits - expected.logits).norm() < ON_CPU[kind] * expected.logits.norm()
    for outcome in (found, expected):
        outcome.loss.backward()
    for name, layer in lora_layers(model).items():
        other = lora_layers(plain)[name]
        for matrix in ("lora_A", "lora_B"):
            mine, theirs = (getattr(one, matrix)["default"].weight.grad for one in (layer, other))
            assert (mine - theirs).norm() < 3 * ON_CPU[kind] * theirs.norm(), name


def test_adapted_layers_may_be_called_by_their_own_name():
    model = language_model()
    assert convert_base(model, ["model.layers.0.self_attn.q_proj"], "fp8-frozen") == [
        "model.layers.0.self_attn.q_proj.base_layer"
    ]
    assert isinstance(model.model.layers[0].self_attn.q_proj.base_layer, FrozenFP8Linear)


@pytest.mark.parametrize(
    ("kind", "bytes_a_parameter"), [("fp8-frozen", 1.07), ("nf4", 0.6), ("nf4-frozen", 0.6)]
)
def test_the_old_weights_are_let_go(kind, bytes_a_parameter):
    model = language_model()
    names = frozen_linears(model, skip=("lm_head",))
    old = [weakref.ref(model.get_submodule(name).weight) for name in names]
    parameters = sum(ref().numel() for ref in old)
    convert_base(model, names, kind, torch.float32)
    gc.collect()
    assert not any(ref() is not None for ref in old)
    layers = [model.get_submodule(name) for name in names]
    held = sum(t.nbytes for layer in layers for t in [*layer.parameters(), *layer.buffers()])
    assert held < bytes_a_parameter * parameters


@kinds_of_adapter
@pytest.mark.parametrize("kind", ON_CPU)
def test_quantised_bases_are_not_merged_into(kind, adapter):
    model = language_model(adapter)
    convert_base(model, lora_layers(model), kind, torch.float32)
    with pytest.raises(ValueError, match="can't be added to them in place"):
        merge(model)


def test_published_changes_nothing():
    model = language_model()
    before = dict(model.named_modules())
    assert convert_base(model, frozen_linears(model), "published") == []
    assert dict(model.named_modules()) == before


def test_a_bias_goes_along():
    for kind in ON_CPU:
        model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
        x = torch.zeros(3, 64)
        expected = model(x)
        convert_base(model, ["0"], kind, torch.float32)
        torch.testing.assert_close(model(x), expected)


# Refusals, before anything is changed


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_this_machine_lacks_is_said_before_anything_changes(kind):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = language_model()
    before = dict(model.named_modules())
    with pytest.raises(
        Unavailable, match="needs an NVIDIA GPU with FP8 tensor cores, and there is no GPU here"
    ):
        convert_base(model, frozen_linears(model), kind)
    assert dict(model.named_modules()) == before


def test_layers_that_do_not_go_are_refused():
    model = language_model()
    before = dict(model.named_modules())
    for names, message in [
        (["model.layers.0.self_attn.q_proj", "model.norm"], "'model.norm' is a LlamaRMSNorm"),
        (["model.layers.0.self_attn.q_proj.lora_A.default"], "is trained"),
        (["lm_head"], "64 -> 120 features; low-bit products take multiples of 16"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert_base(model, names, "fp8-frozen")
    with pytest.raises(ValueError, match="'published', 'fp8-frozen'"):
        convert_base(model, [], "fp4")
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize(
    "error", [RuntimeError("no torch extension\nmore"), OSError("libcudart.so.13")]
)
def test_a_broken_transformer_engine_is_unavailable_in_words(error, monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "transformer_engine", Broken("transformer_engine"))
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    with pytest.raises(
        Unavailable, match=f"Transformer Engine can't be imported .*{type(error).__name__}.*make te"
    ):
        transformer_engine()


def test_an_older_gpu_is_unavailable_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        Unavailable, match=r"needs compute capability 8\.9 or more, and this GPU has 8\.0"
    ):
        transformer_engine()


def test_most_kinds_need_no_context():
    for kind in ("published", *ON_CPU):
        with forward_context(kind):
            assert torch.is_grad_enabled()


# The recipe's knob


def test_folding_and_low_bit_bases_exclude_each_other():
    with pytest.raises(ValueError, match="Use adapter='plain' or 'peft'"):
        STOCK.but(adapter="folded", base_linear="nf4")


def test_the_knob_stays_on_a_cpu():
    for kind in MAKERS:
        assert STOCK.but(base_linear=kind).fitted_to("cpu").base_linear == kind


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.mark.parametrize("kind", ON_CPU)
def test_a_workload_trains_on_the_kind_it_is_asked_for(kind, workload):
    recipe = STOCK.but(driver="eager", accumulation=1, cache="latents+text", base_linear=kind)
    with Trainer(workload, recipe) as trainer:
        trainer.run(2)
        assert all(torch.isfinite(torch.tensor(trainer.losses)))
        bases = {
            type(layer.base_layer).__name__ for layer in lora_layers(trainer.model.unet).values()
        }
    assert bases == {LAYERS[kind]}


def test_a_kind_that_is_not_here_becomes_a_skipped_run(workload):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = train(workload, STOCK.but(base_linear="fp8-te"), steps=1)
    assert run.status.startswith("skipped: Transformer Engine's FP8 needs an NVIDIA GPU")


# Refused with nothing changed


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)


@pytest.mark.parametrize("kind", ON_CPU)
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda layer: layer.weight.fill_(math.nan),
            "'1' can't be converted. This weight holds NaN",
        ),
        (lambda layer: layer.bias.requires_grad_(), "'1' is trained"),
        (lambda layer: layer.bias.resize_(3), "'1' can't be converted. A bias of shape"),
    ],
)
def test_a_layer_that_does_not_go_leaves_those_before_it_alone(kind, spoil, told):
    model = two_layers()
    spoil(model[1])
    with pytest.raises(ValueError, match=told):
        convert_base(model, ["0", "1"], kind)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["0", "7"], "This Sequential has no layer '7'. frozen_linears"),
        ("0", r"names='0' is one string. Give a list of names: \['0'\]"),
        ([""], "can't be replaced in itself"),
    ],
)
def test_names_that_name_no_layer(names, told):
    model = two_layers()
    with pytest.raises(ValueError, match=told):
        convert_base(model, names, "fp8-frozen")
    assert type(model[0]) is nn.Linear


def test_a_name_may_come_twice():
    model = two_layers()
    assert convert_base(model, iter(["0", "0"]), "fp8-frozen") == ["0"]


def test_what_is_skipped_is_a_list():
    with pytest.raises(ValueError, match="skip='lm_head' is one string"):
        frozen_linears(two_layers(), "lm_head")
