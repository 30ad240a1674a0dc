"""`labutils diagnose` on a GPU: each of eight planted bottlenecks, a tuned loop, and predictions
against ablations.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

from labutils.labs.ladders import A3_BASE
from labutils.recipe import STOCK
from labutils.tools.diagnose import Diagnosis, diagnose
from labutils.tools.diagnose.ablations import ablations
from labutils.tools.diagnose.script import watch
from labutils.workloads import open_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
WIDE = ("--hidden", "4096", "--depth", "6", "--batch", "1024", "--in-memory")


def diagnosed(script: str, *options: str) -> Diagnosis:
    watched = watch([sys.executable, str(SCRIPTS / script), *options])
    assert watched.exit_code == 0
    assert watched.evidence is not None
    assert watched.evidence.on_gpu
    found = diagnose(watched.evidence)
    assert sum(found.budget.values()) == pytest.approx(found.evidence.step_ms)
    return found


@functools.cache
def plain(*options: str) -> Diagnosis:
    return diagnosed("plain_loop.py", "--steps", "60", *options)


def names(found: Diagnosis, first: int) -> list[str]:
    return [fix.name for fix in found.worth_it[:first]]


def test_no_workers_and_slow_reading():
    assert names(plain("--decode-ms", "2"), 1) == ["workers"]
    assert names(diagnosed("accelerate_script.py"), 1) == ["workers"]


def test_a_value_read_of_each_parameter():
    found = plain(
        "--item-each-parameter",
        "--hidden",
        "2048",
        "--depth",
        "12",
        "--keep-batches",
        "--batch",
        "256",
    )
    assert "syncs" in names(found, 3)  # that the host is slow is inherent in many small reads
    (line, *_) = found.fix("syncs").sources
    source = (
        (SCRIPTS / "plain_loop.py")
        .read_text("utf-8")
        .splitlines()[int(line.rpartition(":")[2]) - 1]
    )
    assert "item()" in source


def test_tiny_kernels():
    found = plain("--tiny-kernels", "--keep-batches")
    assert set(names(found, 2)) == {"capture", "compile"}
    assert found.budget.get("elementwise", 0.0) < 0.5 * found.evidence.step_ms


def test_no_pinning():
    loop = (
        "--keep-batches",
        "--batch",
        "512",
        "--width",
        "32768",
        "--hidden",
        "512",
        "--precision",
        "bf16",
    )
    found = plain(*loop)
    assert "pinning" in names(found, 2)
    assert any("plain_loop.py" in place for place in found.fix("pinning").sources)
    pinned = plain(*loop, "--pin")
    assert "pinning" not in names(pinned, 2)


def test_float32_products():
    assert names(plain(*WIDE), 1) == ["precision"]
    tf32 = plain(*WIDE, "--precision", "tf32")
    assert tf32.fix("precision").gain < plain(*WIDE).fix("precision").gain


def test_batches_of_one():
    assert "batch size" in names(plain("--batch", "1", "--hidden", "2048", "--keep-batches"), 2)


def test_writing_each_step():
    assert names(plain("--log", "flush", "--keep-batches"), 1) == ["logging"]


def test_padding():
    trainer = (
        "--pad",
        "max_length",
        "--width",
        "1024",
        "--layers",
        "6",
        "--batch",
        "128",
        "--length",
        "256",
        "--bf16",
    )
    assert "padding" in names(diagnosed("trainer_script.py", *trainer), 2)


def test_a_tuned_loop_raises_no_alarm():
    large = (
        "--hidden",
        "8192",
        "--depth",
        "6",
        "--batch",
        "1024",
        "--keep-batches",
        "--pin",
        "--precision",
        "bf16",
    )
    found = plain(*large)
    assert [(fix.name, fix.gain) for fix in found.fixes if fix.gain > 0.15] == []


@pytest.mark.parametrize(
    ("name", "start", "only"),
    [
        ("sd15-lora", STOCK, ("workers", "batch size", "capture", "caching")),
        (
            "qwen3-lora-long",
            A3_BASE.but(checkpointing="blocks"),
            ("checkpointing", "logging", "optimizer"),
        ),
    ],
)
def test_predictions_come_near_what_is_measured(name, start, only):
    ablated = ablations(open_workload(name, scale="small", device="cuda"), start, only=only)
    telling = [row for row in ablated.rows if row.tells]
    assert all(row.why == "" for row in ablated.rows)
    assert sum(row.close for row in telling) >= 0.6 * len(telling), [
        (r.fix.name, r.predicted, r.measured) for r in telling
    ]
