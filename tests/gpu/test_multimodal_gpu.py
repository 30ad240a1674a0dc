"""LLaVA-NeXT on a GPU: half precision, compiled blocks, the ladder in one process, and the full
size at once.
"""

from __future__ import annotations

import pytest
import torch
from decoders_at_work import outcome
from recipes_at_work import assert_same_gradients

from labutils.labs.ladders import A2_BASE, A2_LADDER, Rung, climb
from labutils.profiling.recompilation import Compilation
from labutils.training import Trainer, compare
from labutils.workloads import open_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OURS = A2_BASE.but(
    layers="rewritten", adapter="plain", logging="ring-buffer", optimizer="adamw-fused"
)
PACKED = OURS.but(shapes="packed", token_budget=8192, dynamic="static")


@pytest.fixture(scope="module")
def workload():
    return open_workload("llava-lora-varied", scale="tiny", device="cuda")


@pytest.mark.parametrize("recipe", [OURS, PACKED], ids=["as-they-come", "packed"])
def test_bfloat16_is_as_near_to_float32_as_transformers_own_is(workload, recipe):
    chosen = [7, 1, 4, 2]
    expected, gradients = outcome(workload, A2_BASE.but(adapter="plain", precision="fp32"), chosen)
    loss, found = outcome(workload, recipe, chosen)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
    assert_same_gradients(found, gradients, rtol=0.1)


def test_packed_blocks_compile_to_three_graphs(workload, nothing_compiled):
    """The vision tower's block, the decoder's first, whose input needs no gradient, and the
    decoder's others.
    """
    recipe = PACKED.but(compile="default", compile_scope="blocks")
    with Compilation() as compiled, Trainer(workload, recipe) as trainer:
        trainer.run(5)
    assert compiled.graphs == 3
    assert compiled.breaks.total() == 0


def test_every_rung_of_the_ladder_runs_beside_the_others(workload, nothing_compiled):
    """In one process without a reset between them: their blocks are variants of one function."""
    low_bit = Rung("FP8 weights", "same mathematics", {"base_linear": "fp8-frozen"}, "held once")
    runs = compare(workload, climb(A2_LADDER.plus(low_bit)), steps=2, rounds=1)
    assert {name: run.status for name, run in runs.items() if not run.ok} == {}


def test_a_packed_batch_is_copied_without_waiting(workload):
    """Page-locked by the loader, the next batch travels while the GPU still computes."""
    recipe = PACKED.but(loss="answers", pin_memory=True, non_blocking=True)
    with Trainer(workload, recipe) as trainer:
        trainer.run(2)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.run(4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
