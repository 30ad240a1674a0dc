"""The kinds of frozen layer behind one knob: swapped, let go, refused."""

from __future__ import annotations

import gc
import math
import sys
import types
import weakref

import pytest
import torch
from frozen_layers import language_model
from torch import nn

from labutils.layers.quantization.convert import (
    MAKERS,
    convert_base,
    frozen_linears,
    transformer_engine,
)
from labutils.recipe import STOCK, Unavailable
from labutils.training import train
from labutils.workloads import open_workload

ON_CPU = ("fp8-frozen", "nf4", "nf4-frozen")


@pytest.mark.parametrize("kind", ["fp8-frozen", "nf4", "nf4-frozen"])
def test_the_old_weights_are_let_go(kind):
    model = language_model("plain", 64)
    names = frozen_linears(model, skip=("lm_head",))
    old = [weakref.ref(model.get_submodule(name).weight) for name in names]
    convert_base(model, names, kind, torch.float32)
    gc.collect()
    assert not any(ref() is not None for ref in old)


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in ON_CPU])
def test_what_this_machine_lacks_is_said_before_anything_changes(kind):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = language_model("plain", 64)
    before = dict(model.named_modules())
    with pytest.raises(Unavailable, match="NVIDIA GPU"):
        convert_base(model, frozen_linears(model), kind)
    assert dict(model.named_modules()) == before
    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    assert train(workload, STOCK.but(base_linear=kind), steps=1).status.startswith("skipped")


def spoilt(case):
    layer = nn.Linear(32, 24 if case == "16" else 32).requires_grad_(False)
    if case == "NaN":
        layer.weight.fill_(math.nan)
    elif case == "trained":
        layer.bias.requires_grad_()
    return layer


@pytest.mark.parametrize("case", ["NaN", "trained", "16"])
def test_a_layer_that_does_not_go_is_refused(case):
    with pytest.raises(ValueError, match=case):
        convert_base(nn.Sequential(spoilt(case)), ["0"], "fp8-frozen")


def test_a_broken_transformer_engine_is_unavailable(monkeypatch):
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("libcudart.so.13")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "transformer_engine", Broken("transformer_engine"))
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    with pytest.raises(Unavailable, match="OSError.*make te"):
        transformer_engine()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(Unavailable, match="8.9"):
        transformer_engine()
