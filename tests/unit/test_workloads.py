"""What is trained: its networks to the parameter, its arithmetic to the operation, its errors to
the word.
"""

from __future__ import annotations

import dataclasses

import datasets
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from recipes_at_work import PLAIN, one_thread
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labutils.layers.lora import attach_lora, count_parameters, count_trainable, lora_layers
from labutils.recipe import STOCK
from labutils.training import Trainer
from labutils.workloads import SCALES, open_workload, stable_diffusion, workload_names
from labutils.workloads.flop_count import FlopCount, weight_bytes
from labutils.workloads.stable_diffusion import SIZES, TARGETS, EncodedExamples, _networks

META = torch.device("meta")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def workload():
    return open_workload("sd15-lora", scale="tiny", device="cpu")


@pytest.fixture(scope="module")
def full():
    """The three networks of Stable Diffusion 1.5, without memory."""
    return _networks(SIZES["full"], META).requires_grad_(False)


# -------------------------------------------------------------------------------------------------
# Networks


def test_the_networks_are_stable_diffusions_to_the_parameter(full):
    """As counted in the published checkpoints (stable-diffusion-v1-5's unet, vae and text_encoder)."""
    assert count_parameters(full.unet) == 859_520_964
    assert count_parameters(full.vae) == 83_653_863
    assert count_parameters(full.text_encoder) == 123_060_480


def test_the_adapter_has_the_articles_size():
    unet = _networks(SIZES["full"], META).unet
    attach_lora(unet, TARGETS, 4, 4, "plain", seed=0)
    assert count_trainable(unet) == 797_184
    assert len(lora_layers(unet)) == 16 * 2 * 4  # transformer blocks, attentions, projections


def test_the_unets_arithmetic_is_the_published_one(full):
    """About 0.40 tera multiply-accumulates a pass at 64x64 latents, hence 0.80 TFLOP."""
    with FlopCount() as count:
        full.unet(
            torch.empty(1, 4, 64, 64, device=META),
            torch.zeros(1, device=META),
            torch.empty(1, 77, 768, device=META),
        )
    assert count.forward == pytest.approx(0.80e12, rel=0.01)
    assert count.backward == 0  # nothing of it is trained


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_every_kind_of_layer(scale):
    kinds = {type(m).__name__ for m in _networks(SIZES["full"], META).modules()}
    assert {type(m).__name__ for m in _networks(SIZES[scale], META).modules()} == kinds


def test_the_schedule_is_the_published_one():
    """Scaled-linear from 0.00085 to 0.012 (Rombach et al. 2022, the repository's
    v1-inference.yaml).
    """
    scheduler = _networks(SIZES["tiny"], torch.device("cpu")).scheduler
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    torch.testing.assert_close(
        scheduler.alphas_cumprod.double(), torch.cumprod(1 - betas, 0), rtol=1e-4, atol=1e-6
    )
    assert scheduler.config.prediction_type == "epsilon"


# -------------------------------------------------------------------------------------------------
# FLOPs


@pytest.mark.parametrize(
    ("cache", "micro_batch", "accumulation"),
    [("nothing", 1, 2), ("latents", 2, 1), ("latents+text", 3, 1)],
)
def test_flops_are_those_that_pytorch_counts(cache, micro_batch, accumulation, workload):
    """Of a real optimizer step on a CPU, to the last operation: with attention by products, as
    PyTorch's counter takes a CPU's fused attention for nothing. It sees no optimizer and no
    elementwise arithmetic, and neither do we."""
    recipe = PLAIN.but(cache=cache, micro_batch=micro_batch, accumulation=accumulation)
    with (
        Trainer(workload, recipe) as trainer,
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        trainer.step()
    assert workload.work(recipe).flops == counter.get_total_flops()


def test_pytorchs_counter_misses_a_cpus_fused_attention(workload):
    """Why ours counts at the functions that models call."""
    query = torch.randn(1, 2, 64, 8)
    counts = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel), FlopCount() as ours, FlopCounterMode(display=False) as theirs:
            F.scaled_dot_product_attention(query, query, query)
        counts.append((ours.forward, theirs.get_total_flops()))
    assert counts == [(4 * 2 * 64 * 64 * 8, 0), (4 * 2 * 64 * 64 * 8, 4 * 2 * 64 * 64 * 8)]


@pytest.mark.parametrize("trained", ["x", "weight", "both", "neither"])
def test_what_a_backward_pass_needs(trained):
    """One product for each factor that is trained, as PyTorch's counter sees it."""
    x = torch.randn(3, 5, requires_grad=trained in ("x", "both"))
    weight = torch.randn(7, 5, requires_grad=trained in ("weight", "both"))
    with FlopCounterMode(display=False) as theirs, FlopCount() as ours:
        y = F.linear(x, weight)
        if trained != "neither":
            y.sum().backward()
    assert ours.forward == 2 * 3 * 5 * 7
    assert ours.forward + ours.backward == theirs.get_total_flops()


def test_what_the_recipe_changes_about_the_work(workload):
    plain = workload.work(PLAIN)
    assert (
        workload.work(PLAIN.but(adapter="folded")) == plain
    )  # what a faster form saves must show as time
    assert workload.work(PLAIN.but(micro_batch=4, accumulation=1)).flops == plain.flops
    assert (
        workload.work(PLAIN.but(micro_batch=4, accumulation=1)).bytes == plain.bytes / 4
    )  # weights read once
    assert workload.work(PLAIN.but(precision="fp16")).bytes < 0.51 * plain.bytes
    latents, text = (workload.work(PLAIN.but(cache=cache)) for cache in ("latents", "latents+text"))
    assert plain.flops > latents.flops > text.flops and plain.bytes > latents.bytes > text.bytes
    assert workload.work(PLAIN.but(rank=8)).flops > plain.flops


def test_weights_are_read_once_a_pass():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False))
    assert weight_bytes(net, itemsize=2) == 2 * (3 * 4 + 4 + 4 * 5)


# -------------------------------------------------------------------------------------------------
# Examples


@pytest.mark.parametrize("cache", ["latents", "latents+text"])
def test_what_is_cropped_at_random_is_not_encoded_once(cache, monkeypatch, workload):
    oblong = datasets.Dataset.from_dict({"image": [Image.new("RGB", (96, 80))], "text": ["x"]})
    monkeypatch.setattr(stable_diffusion, "captioned_images", lambda *args: oblong)
    assert len(workload.dataset(None, STOCK)) == 1
    with pytest.raises(ValueError, match="1 of the 1 images aren't square"):
        workload.dataset(None, STOCK.but(cache=cache))


def test_encoded_examples_are_what_the_encoders_say(workload):
    recipe = PLAIN.but(cache="latents+text", layers="rewritten")
    with Trainer(workload, PLAIN) as plain, Trainer(workload, recipe) as cached:
        model, images = plain.model, plain.dataset
        kept = cached.dataset
        assert len(kept) == len(images) == SIZES["tiny"].images
        assert kept.encode_s > 0
        for index in (0, 7, 15):  # two of the first batch that is encoded, one of the last
            row = images[index]
            posterior = model.vae.encode(row["pixel_values"][None]).latent_dist
            text = model.text_encoder(row["input_ids"][None]).last_hidden_state
            torch.testing.assert_close(
                kept[index]["moments"][:, :4], posterior.mean, rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(kept[index]["condition"], text, rtol=1e-4, atol=1e-4)


def test_the_posterior_is_sampled_anew_each_time(workload):
    """What is kept is a distribution: one image gives other latents each epoch, as in the plain
    loop.
    """
    recipe = PLAIN.but(cache="latents+text")
    with Trainer(workload, recipe) as trainer:
        batch = trainer.dataset[3]
        draws = [workload.draw(trainer.model, batch) for _ in range(2)]
        first, second = (workload._latents(trainer.model, batch, d["posterior"]) for d in draws)
    assert not torch.allclose(first, second)
    deviation = (0.5 * batch["moments"][:, 4:].clamp(-30, 20)).exp() * 0.18215
    assert (
        (first - second).abs()
        <= deviation * (draws[0]["posterior"] - draws[1]["posterior"]).abs() + 1e-5
    ).all()


def test_a_batch_of_encoded_examples_is_one_gather():
    kept = EncodedExamples({"a": torch.arange(10.0).view(5, 2), "b": torch.arange(5)}, encode_s=0.1)
    batch = kept.__getitems__([4, 0, 4])
    assert batch["b"].tolist() == [4, 0, 4]
    assert batch["a"].tolist() == [[8, 9], [0, 1], [8, 9]]
    assert kept[2]["b"].tolist() == [2]


def test_draws_cover_all_timesteps_and_have_the_latents_shape(workload):
    with Trainer(workload, PLAIN.but(micro_batch=4)) as trainer:
        draws = workload.draw(trainer.model, {"pixel_values": torch.zeros(4000, 1)})
    assert draws["noise"].shape == draws["posterior"].shape == (4000, 4, 8, 8)
    assert draws["timesteps"].min() == 0 and draws["timesteps"].max() == 999
    assert abs(draws["timesteps"].float().mean() - 499.5) < 5 * 1000 / 12**0.5 / 4000**0.5
    assert not torch.equal(draws["noise"], draws["posterior"])


# -------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "sd3"}, r"workload='sd3' is not known\. Choose one of: 'sd15-lora'"),
        (
            {"scale": "huge"},
            r"scale='huge' is not known\. Choose one of: 'tiny', 'small', 'full'\.",
        ),
        ({"weights": "real"}, r"weights='real' is not known\. Choose one of: 'random', 'hub'\."),
        ({"data": "mine"}, r"data='mine' is not known\. Choose one of: 'generated', 'hub'\."),
    ],
)
def test_what_is_not_known_is_named_with_what_is(asked, message):
    with pytest.raises(ValueError, match=message):
        open_workload(**{"name": "sd15-lora", "scale": "tiny", "device": "cpu"} | asked)


def test_every_workload_opens():
    for name in workload_names():
        assert open_workload(name, scale="tiny", device="cpu").name == name


@pytest.mark.parametrize(("memory_gb", "scale"), [(None, "tiny"), (16.0, "small"), (80.0, "full")])
def test_auto_is_the_largest_scale_that_fits(memory_gb, scale, monkeypatch):
    machine = {"gpu": "some", "gpu_memory_gb": memory_gb} if memory_gb else {}
    monkeypatch.setattr("labutils.workloads.base.machine_facts", lambda: machine)
    assert open_workload("sd15-lora", device="cpu").scale == scale


def test_the_hubs_weights_have_one_size():
    workload = open_workload("sd15-lora", scale="tiny", weights="hub", device="cpu")
    with pytest.raises(ValueError, match='weights="hub" has the sizes of scale="full"'):
        workload.build(STOCK)


@pytest.fixture
def nothing_cached(monkeypatch, tmp_path):
    """A hub that can't be reached, whatever this machine has downloaded."""
    from huggingface_hub import constants

    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_weights_that_cant_be_had_say_what_to_type(nothing_cached):
    workload = open_workload("sd15-lora", scale="full", weights="hub", device="cpu")
    with pytest.raises(
        ConnectionError,
        match=r'weights="random", or fetch them .* `hf download stable-diffusion-v1-5/',
    ):
        workload.build(STOCK)


def test_data_that_cant_be_had_says_what_to_type(nothing_cached):
    workload = open_workload(
        "sd15-lora", scale="tiny", data="hub", device="cpu", cache_dir=nothing_cached
    )
    with pytest.raises(ConnectionError, match=r'data="generated"'):
        workload.dataset(None, dataclasses.replace(STOCK))


def test_training_every_weight_adds_a_product_to_each_backward_pass():
    """A frozen layer's backward pass is one product, its input's gradient; a trained one's has its
    own as well.
    """
    workload = open_workload("sd15-lora", scale="tiny", device="cpu")
    recipe = STOCK.but(cache="latents+text", adapter="plain", rank=1)
    lora, whole = workload.work(recipe), workload.work(recipe.but(adapter="none"))
    assert 1.3 < whole.flops / lora.flops < 1.6
