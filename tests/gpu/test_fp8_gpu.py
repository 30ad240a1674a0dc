"""FP8 on the hardware: the real products against the emulated ones, compiled, measured in bytes,
and other libraries' layers behind the same knob."""

from __future__ import annotations

import functools

import frozen_layers
import pytest
import torch
from frozen_layers import language_model

from labutils.labs import lab05_fp8_matmul
from labutils.layers.lora import lora_layers
from labutils.layers.quantization import fp8_linear
from labutils.layers.quantization.convert import (
    MAKERS,
    convert_base,
    forget_scales,
    forward_context,
    frozen_linears,
    transformer_engine,
)
from labutils.layers.quantization.fp8_linear import PRODUCTS, quantise_rows
from labutils.layers.quantization.fp8_math import (
    E4M3,
    E5M2,
    DelayedScaling,
    relative_error,
    saturating_cast,
)
from labutils.recipe import Unavailable

pytestmark = pytest.mark.usefixtures("full_float32")

fp8_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs FP8 tensor cores (compute capability 8.9)",
)
TOLERANCE = 4e-2


random = functools.partial(frozen_layers.random, device="cuda")


# Numbers


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["E4M3", "E5M2"])
def test_the_gpus_cast_is_the_cpus(fmt):
    x = random(1 << 16) * torch.exp2(torch.randint(-18, 7, (1 << 16,)).cuda())
    x = x.clamp(-fmt.largest, fmt.largest)
    there, here = (one.to(fmt.dtype).view(torch.uint8).cpu() for one in (x, x.cpu()))
    assert torch.equal(there, here)
    cast = saturating_cast(torch.tensor([1e3, -1e6, 5e-5]).cuda())
    assert cast.float().tolist() == [448, -448, 0]


@fp8_only
@pytest.mark.parametrize("rows", [16, 592])
def test_the_real_product_is_the_emulated_one(rows):
    """Same FP8 inputs: only the order and width of the sums differ, and bfloat16's last bit."""
    assert fp8_linear.product_kind(torch.device("cuda", 0)) == "rowwise"
    (x, sx), (w, sw) = quantise_rows(random(rows, 512)), quantise_rows(random(256, 512, seed=1))
    real, emulated = (PRODUCTS[kind](x, w, sx, sw.t()) for kind in ("rowwise", "emulated"))
    assert real.dtype == emulated.dtype == torch.bfloat16
    assert relative_error(real, emulated) < 5e-3


@fp8_only
def test_fast_accumulation_costs_little_against_the_rounding():
    """The longest sum of the course's models: 14336 terms."""
    x, w = random(256, 14336), random(512, 14336, seed=1)
    (qx, sx), (qw, sw) = quantise_rows(x), quantise_rows(w)
    exact = PRODUCTS["emulated"](qx, qw, sx, sw.t()).float()
    rounding = relative_error(exact, x.double() @ w.double().T)
    fast = relative_error(PRODUCTS["rowwise"](qx, qw, sx, sw.t()), exact)
    print(f"fast accumulation {fast:.2e}, rounding to FP8 {rounding:.2e}")
    assert fast < rounding / 5


# Whole models on every kind that is here


@fp8_only
@pytest.mark.parametrize(
    ("kind", "adapter"),
    [*((kind, "plain") for kind in MAKERS), ("fp8-te", "peft"), ("nf4", "peft")],
)
def test_every_kind_that_is_here_trains(kind, adapter):
    model, plain = (language_model(adapter, 256, "cuda", torch.bfloat16) for _ in range(2))
    try:
        convert_base(model, frozen_linears(model, skip=("lm_head",)), kind)
    except Unavailable as error:
        pytest.skip(str(error))
    ids = torch.randint(512, (4, 32), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):  # delayed scaling's first step has no history
            with forward_context(kind):
                found = model(ids, labels=ids)
            model.zero_grad()
            found.loss.backward()
        expected = plain(ids, labels=ids)
    expected.loss.backward()
    assert relative_error(found.logits, expected.logits) < (0.3 if kind.startswith("nf4") else 0.1)
    for name, layer in lora_layers(model).items():
        other = lora_layers(plain)[name]
        for matrix in ("lora_A", "lora_B"):
            mine, theirs = (getattr(one, matrix)["default"].weight.grad for one in (layer, other))
            assert relative_error(mine, theirs) < (0.6 if kind.startswith("nf4") else 0.3), name


# Transformer Engine, where it is installed


@pytest.fixture(scope="module")
def te():
    try:
        return transformer_engine()
    except Unavailable as error:
        pytest.skip(str(error))


def test_our_delayed_scaling_has_transformer_engines_numbers(te):
    """Its input scales over a drifting, spiky sequence, step by step."""
    from transformer_engine.common.recipe import DelayedScaling as TheirRecipe
    from transformer_engine.common.recipe import Format

    history = {"amax_history_len": 4, "amax_compute_algo": "max"}
    recipe = TheirRecipe(fp8_format=Format.HYBRID, **history)
    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
    ours = DelayedScaling(4)
    for step, size in enumerate([1.0, 2.0, 100.0, 3.0, 4.0, 4.0, 5.0, 0.5, 0.0, 6.0]):
        x = random(32, 64, seed=step).bfloat16() * size
        with te.autocast(enabled=True, recipe=recipe):
            layer(x)
        ours.record(x.abs().max().float().cpu())
        assert layer.fp8_meta["scaling_fwd"].scale[0].item() == pytest.approx(
            ours.scale.item(), rel=1e-6
        ), step


def test_layers_that_are_gone_leave_transformer_engine_no_scales_to_renew(te):
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
    with forward_context("fp8-te"):
        layer(random(32, 64).bfloat16())
    assert FP8GlobalStateManager.quantization_state.global_amax_buffer
    forget_scales()
    assert not FP8GlobalStateManager.quantization_state.global_amax_buffer
    with forward_context("fp8-te"):
        assert layer(random(32, 64).bfloat16()).isfinite().all()


# Measuring


@fp8_only
def test_the_ways_to_multiply_agree():
    x, weight = random(256, 512).bfloat16(), random(128, 512, seed=1).bfloat16()
    exact = x.double() @ weight.double().T
    for kind in lab05_fp8_matmul.PRODUCT_KINDS:
        limit = 5e-3 if kind == lab05_fp8_matmul.BF16 else TOLERANCE
        assert relative_error(lab05_fp8_matmul.product_of(kind, x, weight)(), exact) < limit, kind
