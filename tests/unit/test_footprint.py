"""The predicted peak against steps that ran, here and on the reference machine; running out of
memory, and back.
"""

from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.data.loader import make_loader
from labutils.labs import lab09_peak_memory
from labutils.labs.ladders import A2_BASE, A3_BASE
from labutils.recipe import Recipe
from labutils.results import records
from labutils.results.records import Run
from labutils.training.batches import Batches
from labutils.workloads import open_workload
from labutils.workloads.stable_diffusion import on_drawn_latents

PLAIN = Recipe(driver="eager", logging="ring-buffer", cache="latents+text", accumulation=1)


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    return on_drawn_latents(
        open_workload("sd15-lora", "tiny", device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))
    )


def workload(name: str, scale: str, tmp_path_factory) -> object:
    found = open_workload(name, scale, device="cpu", cache_dir=tmp_path_factory.mktemp("cache"))
    return on_drawn_latents(found) if name == "sd15-lora" else found


# -------------------------------------------------------------------------------------- predicted


@pytest.mark.parametrize("mode", lab09_peak_memory.MODES)
@pytest.mark.parametrize("room", lab09_peak_memory.GRID)
def test_the_prediction_is_what_a_ledger_finds_in_the_step(room, mode, tmp_path_factory):
    """Within 1 % on a CPU, where both count the same things: shapes and lifetimes are what can be
    wrong.
    """
    run, memory = lab09_peak_memory.foretold(
        workload(room, "tiny", tmp_path_factory),
        lab09_peak_memory.GRID[room].but(**lab09_peak_memory.MODES[mode]),
        "it",
    )
    assert abs(run.metric("off")) < 0.01
    assert run.metric("peak_gb") == memory.peak / 1e9
    assert run.metric("weights_gb") > 0 and run.metric("activations_gb") > 0
    # What stays on record draws the same picture, its peak included.
    kept = Run(**json.loads(json.dumps(vars(run))))
    series, phases = lab09_peak_memory.pictured(kept)
    totals = [sum(levels) for levels in zip(*series.values(), strict=True)]
    assert len(totals) == memory.events and phases == list(memory.phases)
    assert max(totals) == pytest.approx(memory.peak, rel=0.01, abs=2e4)
    assert totals.index(max(totals)) == memory.peak_event


@pytest.mark.parametrize(
    ("room", "base", "change"),
    [
        ("sd15-lora", PLAIN, {"micro_batch": 3}),
        ("sd15-lora", PLAIN, {"accumulation": 3}),
        ("sd15-lora", PLAIN, {"adapter": "plain", "memory_format": "channels_last"}),
        ("qwen3-lora-short", A3_BASE, {"layers": "rewritten", "loss": "fused"}),
        (
            "qwen3-lora-short",
            A3_BASE,
            {"layers": "rewritten", "adapter": "plain", "micro_batch": 3},
        ),
        ("llava-lora", A2_BASE, {"layers": "rewritten", "shapes": "fixed", "micro_batch": 2}),
    ],
)
def test_other_recipes_are_predicted_as_well(room, base, change, tmp_path_factory):
    run, _ = lab09_peak_memory.foretold(
        workload(room, "tiny", tmp_path_factory), base.but(**change), "it"
    )
    assert abs(run.metric("off")) < 0.03


def test_predictions_begun_ahead_are_those_made_here(little, monkeypatch):
    """Whatever the other process says comes back, and what it fails in is done here."""
    asked = [(little, lab09_peak_memory.in_mode(little, mode)) for mode in lab09_peak_memory.MODES]
    here = [lab09_peak_memory.predicted(*each) for each in asked]
    there = []

    class Beside(ThreadPoolExecutor):
        def submit(self, call, *arguments):
            there.append(call)
            arguments = pickle.loads(pickle.dumps(arguments))
            return super().submit(lambda: pickle.loads(pickle.dumps(call(*arguments))))

    monkeypatch.setattr(lab09_peak_memory, "_ahead", {})
    monkeypatch.setattr(lab09_peak_memory, "_pools", [])
    monkeypatch.setattr(lab09_peak_memory, "ProcessPoolExecutor", lambda processes, _: Beside(1))
    monkeypatch.setattr(lab09_peak_memory, "usable_cores", lambda: 2)
    lab09_peak_memory.predict_ahead(asked)
    assert there == []  # too few cores to give any away
    monkeypatch.setattr(lab09_peak_memory, "usable_cores", lambda: 16)
    monkeypatch.setattr(
        lab09_peak_memory,
        "_predicted_there",
        lambda *_: lab09_peak_memory.StepMemory({"weights": 1}, (), (), 0),
    )
    lab09_peak_memory.predict_ahead(asked[:1])
    assert (
        lab09_peak_memory.predicted(*asked[0]).held == {"weights": 1}
        and lab09_peak_memory.predicted(*asked[1]) == here[1]
    )
    lab09_peak_memory.end_ahead()
    assert (
        lab09_peak_memory.predicted(*asked[0]) == here[0]
        and len(there) == 1
        and not lab09_peak_memory._pools
    )
    monkeypatch.undo()
    assert (
        lab09_peak_memory._predicted_there(*lab09_peak_memory._asked(*asked[2], "cpu")) == here[2]
    )


def test_a_process_that_ends_early_costs_nothing_but_time(little, monkeypatch):
    recipe = lab09_peak_memory.in_mode(little, "all kept", batch=2)
    broken = Future()
    broken.set_exception(BrokenProcessPool("killed"))
    monkeypatch.setattr(
        lab09_peak_memory,
        "_ahead",
        {lab09_peak_memory._asked(little, recipe.fitted_to("cpu"), "cpu"): broken},
    )
    assert lab09_peak_memory.predicted(little, recipe).peak > 0


NOT_THE_GPUS = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "pin_memory",
    "non_blocking",
    "logging",
    "driver",
)
"""Knobs that take none of its memory, or as good as none."""


def reference_peaks(rooms: tuple[str, ...]) -> dict[str, tuple[str, Recipe, float]]:
    """The H200's peaks of recipes that nothing compiles, on these workloads: name -> workload,
    recipe, GB. Those of one process: DDP keeps buckets beside the gradients, and FSDP a share of
    everything, which no prediction knows of."""
    found: dict[str, tuple[str, Recipe, float]] = {}
    for (lab, name), run in records.read_runs(records.REFERENCE).items():
        plain = run.recipe.get("compile") == "off" and run.recipe.get("driver") != "graph"
        plain = plain and run.metrics.get("ranks", 1) == 1
        peak = run.metric("peak_allocated_gb")
        if run.ok and plain and run.workload in rooms and run.scale == "full" and peak:
            found[f"{lab} {name}"] = run.workload, Recipe(**run.recipe), peak
    return found


WORST_BATCH = lab09_peak_memory.worst_batch


def pictures(workload: object, recipe: Recipe) -> dict[str, torch.Tensor]:
    """A micro-batch as the recipe gets it, of pictures that need not be drawn: their shape is
    known.
    """
    if recipe.cache != "nothing":
        return WORST_BATCH(workload, recipe)  # made of shapes as well
    count = recipe.micro_batch
    return {
        "pixel_values": torch.zeros(count, 3, 512, 512),
        "input_ids": torch.zeros(count, 77, dtype=torch.long),
    }


def test_the_reference_machine_s_peaks_were_predictable(tmp_path_factory):
    peaks = reference_peaks(("sd15-lora",))
    assert len(peaks) > 10
    work = open_workload(
        "sd15-lora", "full", device="cpu", cache_dir=tmp_path_factory.mktemp("cache")
    )
    work.dataset = None  # pictures would be drawn for it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab09_peak_memory, "worst_batch", pictures)
        foreseen = {}
        for name, (_, recipe, peak) in peaks.items():
            key = recipe.but(**{knob: getattr(Recipe, knob) for knob in NOT_THE_GPUS})
            if key not in foreseen:
                foreseen[key] = lab09_peak_memory.predicted(work, recipe, on="cuda").peak / 1e9
            if (
                name == "09 float32"
            ):  # presumably cuDNN's workspace: without TF32 it picks other convolutions
                assert (
                    foreseen[key] == pytest.approx(peaks["09 tf32"][2], rel=0.05)
                    and peak > 3 * foreseen[key]
                )
            else:
                assert foreseen[key] == pytest.approx(peak, rel=0.05), name


ON_PHOTOGRAPHS = (
    "06 bf16 b4",
    "06 nf4 b1",
    "06 form: as they come",
    "06 form: packed, to 8192",
)
"""Runs of LLaVA-NeXT 7B: what checkpoints keep, weights in half a byte, no checkpoints, and the
longest rows. The others on record lie between or beside: batches of 1 to 24 are foreseen to 2 %,
weights in one byte to 3 %. (QLoRA's preparation widens parameters, and Transformer Engine keeps its
own copies: no recipe says either.)"""


def test_the_reference_machine_s_peaks_on_photographs_were_predictable(tmp_path_factory):
    """Predicted for the largest micro-batch of the two in which the peak was read: a first step,
    and one to warm up.
    """
    peaks, cache = (
        reference_peaks(("llava-lora", "llava-lora-varied")),
        tmp_path_factory.mktemp("cache"),
    )
    works = {
        room: open_workload(room, "full", device="cpu", cache_dir=cache)
        for room, *_ in peaks.values()
    }
    for name in ON_PHOTOGRAPHS:
        room, recipe, peak = peaks[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                lab09_peak_memory,
                "worst_batch",
                lambda workload, recipe: largest_of(workload, recipe, 2),
            )
            assert lab09_peak_memory.predicted(
                works[room], recipe, on="cuda"
            ).peak / 1e9 == pytest.approx(peak, rel=0.06), name


def largest_of(workload: object, recipe: Recipe, count: int) -> dict[str, torch.Tensor]:
    """That of a run's `count` first micro-batches that has most tokens."""
    dataset = workload.dataset(None, recipe)
    order = workload.order(dataset, recipe)
    loader = make_loader(
        dataset, recipe.but(num_workers=0), collate_fn=workload.collate(recipe), order=order
    )
    batches = Batches(loader, recipe.micro_batch, order or loader.sampler)
    return max((next(batches) for _ in range(count)), key=lambda batch: batch["input_ids"].numel())


def test_the_first_reading_of_qwen3_8b_was_predictable(tmp_path_factory):
    """Four texts of 861 tokens through PEFT's LoRA in BF16 took 50.5 GB on an H200 (a script of its
    own).
    """
    work = open_workload(
        "qwen3-lora-long", "full", device="cpu", cache_dir=tmp_path_factory.mktemp("cache")
    )
    ids = torch.zeros(4, 861, dtype=torch.long)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab09_peak_memory, "worst_batch", lambda workload, recipe: given)
        memory = lab09_peak_memory.predicted(work, A3_BASE, on="cuda")
    assert memory.peak / 1e9 == pytest.approx(50.5, rel=0.1)
    assert memory.at_peak()["logits"] == pytest.approx(3 * 4 * 861 * 151936 * 4, rel=0.001)
    assert memory.held["weights"] == pytest.approx(2 * 8.19e9, rel=0.01)


def test_a_gpu_takes_half_the_bytes_and_its_libraries_workspaces(little):
    here, there = (lab09_peak_memory.predicted(little, PLAIN, on) for on in ("cpu", "cuda"))
    assert there.held["weights"] < 0.55 * here.held["weights"]
    assert there.held["temporaries"] == lab09_peak_memory.WORKSPACES and "temporaries" not in {
        k for k, v in here.held.items() if v
    }


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_the_optimizer_s_state_is_as_large_as_the_real_one(optimizer):
    from labutils.training.step import build_optimizer

    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (100, 4096, 70_000)]
    real = build_optimizer(parameters, Recipe(optimizer=optimizer))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    real.step()
    kept = [
        v
        for entry in real.state.values()
        for k, v in entry.items()
        if isinstance(v, torch.Tensor) and v.dim()
    ]
    once = {
        v.data_ptr(): v.nbytes for v in kept if v.shape != (256,)
    }  # the codes' table is one for all
    foreseen = sum(m.nbytes for p in parameters for m in lab09_peak_memory.moments_of(p, optimizer))
    assert foreseen == sum(once.values())


def test_a_prediction_that_failed_halfway_leaves_the_next_one_alone(little, monkeypatch):
    """The model is kept for the next: gradients left on it would be added to, and not be made when
    they are.
    """
    recipe = PLAIN.but(accumulation=2)
    before = lab09_peak_memory.predicted(little, recipe)
    tries, loss = iter(range(2)), lab09_peak_memory._loss

    def interrupted(*given):
        if next(tries):
            raise KeyboardInterrupt
        return loss(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(lab09_peak_memory, "_loss", interrupted)
        lab09_peak_memory.predicted(little, recipe)
    assert lab09_peak_memory.predicted(little, recipe) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compile": "default"}, "plain loops"),
        ({"base_linear": "fp8-te"}, "doesn't know how"),
        ({"checkpointing": "offload"}, "to the host"),
    ],
)
def test_what_is_not_known_is_refused(little, change, said):
    with pytest.raises(ValueError, match=said):
        lab09_peak_memory.predicted(little, PLAIN.but(**change))


# ------------------------------------------------------------------------- running out of memory


def test_memory_runs_out_and_comes_back(little):
    with lab09_peak_memory.Fed(little, PLAIN) as fed:
        limit = lab09_peak_memory.predicted(little, PLAIN.but(micro_batch=3)).peak / 1e9
        fed.limit(limit)
        found = lab09_peak_memory.run_out(fed, 12)
        assert "out of memory" in found["message"] and "artificial" in found["message"]
        assert found["in_except_gb"] > 1.2 * found["before_gb"]
        assert (
            found["cleaned_gb"] <= found["after_except_gb"] < found["in_except_gb"] <= 1.05 * limit
        )
        assert found["cleaned_gb"] == pytest.approx(found["before_gb"], rel=0.05)
        assert found["runs_again"] == 1
        assert fed.fits(3) and not fed.fits(4)


def test_a_peak_is_told_by_what_it_consists_of_and_of_how_many_examples():
    metrics = {
        "peak_gb": 10.0,
        "weights_gb": 4.0,
        "gradients_gb": 0.0,
        "activations_gb": 6.0,
        "activations_share": 0.6,
    }
    run = Run(
        "09", "", recipe={"micro_batch": 3}, metrics=metrics | {"predicted_gb": 9.0, "off": -0.1}
    )
    failed = Run("09", "", status="oom")
    (row,) = lab09_peak_memory.peak_rows(
        {"memory: sd15-lora, all kept": run, "memory: llava-lora, all kept": failed}
    )
    found = dict(zip(lab09_peak_memory.PEAK_HEAD, row, strict=True))
    assert (
        found["step"] == "sd15-lora, all kept"
        and found["examples"] == 3
        and found["peak"] == "10.0 GB"
    )
    assert (
        found["weights"] == "4.0 GB"
        and found["activations"] == "6.0 GB"
        and found["activations' share"] == "60%"
    )
    assert found["gradients"] is None and found["logits"] is None
    (row,) = lab09_peak_memory.told_rows({"memory: sd15-lora, all kept": run})
    assert dict(zip(lab09_peak_memory.TOLD_HEAD, row, strict=True))["examples"] == 3


def test_what_fits_is_not_told_as_running_out(little):
    with (
        lab09_peak_memory.Fed(little, PLAIN) as fed,
        pytest.raises(RuntimeError, match="nothing ran out"),
    ):
        lab09_peak_memory.run_out(fed, 1)


def test_other_errors_are_not_taken_for_it(little, monkeypatch):
    with lab09_peak_memory.Fed(little, PLAIN) as fed:
        monkeypatch.setattr(fed, "step", lambda examples: (_ for _ in ()).throw(KeyError("else")))
        with pytest.raises(KeyError, match="else"):
            fed.fits(2)
        with pytest.raises(KeyError, match="else"):
            lab09_peak_memory.run_out(fed, 2)


def test_the_foreseen_batch_is_the_largest_one(little):
    room = lab09_peak_memory.predicted(little, PLAIN.but(micro_batch=5)).peak / 1e9
    assert lab09_peak_memory.foreseen_largest(little, PLAIN, 1.001 * room) == 5
    assert lab09_peak_memory.foreseen_largest(little, PLAIN, 0.1 * room) == 0


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_the_search_finds_the_largest_from_anywhere(largest, start):
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert batch >= 1
        tried.append(batch)
        return batch <= largest

    assert lab09_peak_memory.largest_batch(fits, start) == largest
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 + 2 * math.ceil(math.log2(2 + abs(max(1, start) - largest)))
    if start == largest > 0:
        assert tried == [start, start + 1]


@pytest.mark.parametrize(("largest", "start"), [(7, 16), (100, 128), (1, 5)])
def test_accelerate_s_search_stops_at_or_below_it(largest, start):
    tried: list[int] = []
    found = lab09_peak_memory.largest_by_accelerate(
        lambda batch: tried.append(batch) or batch <= largest, start
    )
    assert 0.85 * largest <= found <= largest
    assert tried[0] == start and tried == sorted(tried, reverse=True)
