"""Stable Diffusion 1.5: the published architecture, its arithmetic, what is encoded once; and what
opening any workload says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from recipes_at_work import PLAIN
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.layers.lora import attach_lora, count_parameters, count_trainable, lora_layers
from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.training.benchmark import Benchmark
from labutils.workloads import SCALES, open_workload
from labutils.workloads.stable_diffusion import SIZES, TARGETS, _networks

META = torch.device("meta")


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def full():
    """The three networks of Stable Diffusion 1.5, without memory."""
    return _networks(SIZES["full"], META).requires_grad_(False)


def test_the_networks_are_stable_diffusions_to_the_parameter(full):
    """As counted in the published checkpoints (stable-diffusion-v1-5's unet, vae, text_encoder)."""
    assert count_parameters(full.unet) == 859_520_964
    assert count_parameters(full.vae) == 83_653_863
    assert count_parameters(full.text_encoder) == 123_060_480


def test_the_adapter_has_the_articles_size():
    unet = _networks(SIZES["full"], META).unet
    attach_lora(unet, TARGETS, 4, 4, "plain", seed=0)
    assert count_trainable(unet) == 797_184
    assert len(lora_layers(unet)) == 16 * 2 * 4  # transformer blocks, attentions, projections


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_every_kind_of_layer(scale, full):
    kinds = {type(m).__name__ for m in full.modules()}
    assert {type(m).__name__ for m in _networks(SIZES[scale], META).modules()} == kinds


def test_the_unets_arithmetic_is_the_published_one():
    """About 0.40 tera multiply-accumulates a pass at 64x64 latents, hence 0.80 TFLOP; the backward
    pass of frozen weights takes about as much again."""
    recipe = STOCK.but(cache="latents+text", micro_batch=1, accumulation=1)
    work = open_workload("sd15-lora", scale="full", device="meta").work(recipe)
    assert work.flops == pytest.approx(0.80e12 * 2.13, rel=0.02)
    assert work.bytes == 2 * 2 * (859_520_964 + 797_184)


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulation": 2},
        {"cache": "latents+text", "micro_batch": 3, "accumulation": 1},
        {"cache": "latents+text", "accumulation": 1, "adapter": "none"},
    ],
)
def test_flops_are_those_of_a_real_step(changes, workload):
    """As PyTorch counts them of an optimizer step on a CPU, with attention by products."""
    recipe = PLAIN.but(**changes)
    with (
        Trainer(workload, recipe) as trainer,
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        trainer.step()
    assert workload.work(recipe).flops == counter.get_total_flops()


def test_what_the_recipe_changes_about_the_work(workload):
    plain = workload.work(PLAIN)
    assert workload.work(PLAIN.but(adapter="folded")) == plain  # what is saved must show as time
    merged = workload.work(PLAIN.but(micro_batch=4, accumulation=1))
    assert (merged.flops, merged.bytes) == (plain.flops, plain.bytes / 4)  # weights are read once


def test_encoded_examples_are_what_the_encoders_say(workload):
    recipe = PLAIN.but(cache="latents+text", layers="rewritten")
    with Trainer(workload, PLAIN) as plain, Trainer(workload, recipe) as cached:
        model, images, encoded = plain.model, plain.dataset, cached.dataset
        assert len(encoded) == len(images) == SIZES["tiny"].images
        for index in (0, 7, 15):  # two of the first batch that is encoded, one of the last
            row = images[index]
            mean = model.vae.encode(row["pixel_values"][None]).latent_dist.mean
            text = model.text_encoder(row["input_ids"][None]).last_hidden_state
            moments, condition = encoded[index]["moments"], encoded[index]["condition"]
            torch.testing.assert_close(moments[:, :4], mean, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(condition, text, rtol=1e-4, atol=1e-4)


def test_the_hubs_weights_have_published_sizes():
    with pytest.raises(ValueError, match="published"):
        open_workload("llava-lora", scale="tiny", weights="hub", device="cpu")


@pytest.fixture
def nothing_cached(monkeypatch, tmp_path):
    """A hub that can't be reached, whatever this machine has downloaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_the_hubs_cache_serves_without_a_network(nothing_cached):
    """Models, tokenizers and datasets as `hf download` leaves them there."""

    def snapshot(of: str) -> Path:
        (nothing_cached / of / "refs").mkdir(parents=True)
        (nothing_cached / of / "refs" / "main").write_text("c0ffee")
        (nothing_cached / of / "snapshots" / "c0ffee").mkdir(parents=True)
        return nothing_cached / of / "snapshots" / "c0ffee"

    tiny = open_workload("qwen3-lora-short", scale="tiny", device="cpu")
    tiny.publish(snapshot("models--Qwen--Qwen3-0.6B"))
    row = {"instruction": "station", "input": "", "output": "eki"}
    data = snapshot("datasets--fujiki--japanese_alpaca_data")
    Dataset.from_list([row] * 256).to_parquet(data / "train.parquet")
    real = {"scale": "small", "weights": "hub", "data": "hub", "cache_dir": nothing_cached}
    with Trainer(open_workload("qwen3-lora-short", device="cpu", **real), A3_BASE) as trainer:
        trainer.step()


@pytest.mark.parametrize("name", ["sd15-lora", "llava-lora", "qwen3-lora-short"])
def test_weights_that_cant_be_had_say_what_to_type(nothing_cached, name):
    workload = open_workload(name, scale="full", weights="hub", device="cpu")
    recipe = STOCK if name == "sd15-lora" else A2_BASE
    with pytest.raises(ConnectionError, match="hf download"), Benchmark(workload) as bench:
        bench.compare({"first": recipe, "second": recipe}, rounds=1)  # not once for each
