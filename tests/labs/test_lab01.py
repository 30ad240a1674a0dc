"""Lab 01's own measurements: passes that take turns, and the peaks of a step's phases."""

import pytest
import torch
from torch import nn

from labutils.labs.lab01_lora_costs import ROUNDS, pass_runs, phases_runs
from labutils.profiling import cuda

pytestmark = pytest.mark.skipif(cuda.available(), reason="counts what a CPU's tensors take")


def test_passes_take_turns_and_are_told_beside_the_first():
    done = []
    passes = {name: (lambda name=name: done.append(name)) for name in ("frozen", "LoRA")}
    frozen, lora = pass_runs(8, passes, {"frozen": 1.0, "LoRA": 2.0})
    assert set(done) == {"frozen", "LoRA"} and len(frozen.samples["pass_ms"]) == ROUNDS
    assert frozen.metrics["times"]["median"] == 1 and lora.metrics["floor_ms"] == 2
    assert lora.tags == {"experiment": "adapter cost", "layer": "LoRA", "width": 8}


@pytest.mark.parametrize(("form", "temporaries"), [("foreach", 1), ("fused", 0)])
def test_the_peak_of_each_phase(form, temporaries):
    """Weights, gradients, two moments, and what AdamW's foreach form computes beside them. From the
    second step on the passes hold the moments, too."""
    model, weight = nn.Linear(512, 512, bias=False), 512 * 512 * 4 / 1e9
    optimizer = torch.optim.AdamW(model.parameters(), **{form: True})
    x = torch.randn(1, 512)
    for run, moments in zip(
        phases_runs(form, model, lambda: model(x).sum(), optimizer), (0, 2), strict=True
    ):
        peaks = {name: value / weight for name, value in run.metrics.items()}
        assert peaks["weights_gb"] == pytest.approx(1)
        assert peaks["forward_gb"] == pytest.approx(1 + moments, abs=0.05)
        assert peaks["backward_gb"] == pytest.approx(2 + moments, abs=0.05)
        assert peaks["update_gb"] == pytest.approx(4 + temporaries, abs=0.05)
        assert run.tags["step"] == 1 + moments // 2
