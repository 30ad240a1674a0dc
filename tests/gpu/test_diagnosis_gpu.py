"""`labutils diagnose` on a GPU: planted bottlenecks, a tuned loop. Predictions are held against
measurements by lab 10 and by `diagnosis_table.py`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from labutils.tools.diagnose import WORTH, Diagnosis, diagnose, trial
from labutils.tools.diagnose.script import Stages, watch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
CLOSE = 0.2
"""A predicted step that is off by no more has come true."""
WIDE = "--hidden 4096 --depth 6 --batch 1024 --keep-batches"
UNPINNED = "--keep-batches --batch 512 --width 32768 --hidden 512 --precision bf16"
TUNED = "--hidden 8192 --depth 6 --batch 1024 --keep-batches --pin --precision bf16"
PADDED = "--pad max_length --width 1024 --layers 6 --batch 128 --length 256 --bf16"
WRITTEN_OUT = "1024 512 2 512"
READS = "--item-each-parameter --hidden 2048 --depth 12 --keep-batches --batch 1024"


@functools.cache
def diagnosed(options: str, script: str = "plain_loop.py") -> Diagnosis:
    watched = watch([sys.executable, str(SCRIPTS / script), *options.split()])
    assert watched.exit_code == 0 and watched.evidence.on_gpu
    found = diagnose(watched.evidence)
    assert sum(found.evidence.budget.values()) == pytest.approx(found.evidence.step_ms)
    return found


@pytest.mark.parametrize(
    ("script", "options", "first", "names"),
    [
        ("plain_loop.py", "--decode-ms 2", 1, {"workers"}),
        ("lora_images.py", "--tiny --batch 8 --accumulation 1", 1, {"workers"}),
        ("plain_loop.py", READS, 4, {"syncs"}),  # many small reads make the host slow as well
        ("plain_loop.py", "--tiny-kernels --keep-batches", 2, {"capture", "compile"}),
        ("plain_loop.py", UNPINNED, 2, {"pinning"}),
        ("plain_loop.py", WIDE, 1, {"precision"}),
        ("plain_loop.py", "--batch 1 --hidden 2048 --keep-batches", 2, {"batch size"}),
        ("plain_loop.py", "--log flush --keep-batches", 2, {"logging"}),
        ("trainer_script.py", PADDED, 2, {"padding"}),
        ("written_out.py", WRITTEN_OUT, 2, {"precision", "attention"}),
    ],
)
def test_a_planted_bottleneck_is_named(script, options, first, names):
    ranked = [(fix.name, round(fix.gain, 3)) for fix in diagnosed(options, script).fixes]
    assert names <= {name for name, gain in ranked[:first] if gain >= WORTH}, ranked


def test_the_lines_at_fault_are_named():
    (place, *_) = diagnosed(READS).fix("syncs").sources
    lines = (SCRIPTS / "plain_loop.py").read_text("utf-8").splitlines()
    assert "item()" in lines[int(place.rpartition(":")[2]) - 1]


def test_what_is_mended_is_no_longer_named():
    assert "pinning" not in {f.name for f in diagnosed(f"{UNPINNED} --pin").worth_it[:2]}
    tf32, fp32 = diagnosed(f"{WIDE} --precision tf32"), diagnosed(WIDE)
    assert tf32.fix("precision").gain < fp32.fix("precision").gain


def test_a_fix_that_is_tried_comes_near_what_was_predicted():
    """Products in another format, put in place from outside."""
    command = [sys.executable, str(SCRIPTS / "plain_loop.py"), *WIDE.split()]
    found = diagnosed(WIDE)
    tried = trial.tries(found, command, Stages(), rounds=2)["precision"]
    off = (1 - found.fix("precision").gain) / (1 - tried.measured) - 1
    assert abs(off) <= 2 * CLOSE and "same" in tried.losses, (found.fix("precision"), tried)


def test_a_tuned_loop_raises_no_alarm():
    assert [(fix.name, fix.gain) for fix in diagnosed(TUNED).fixes if fix.gain > 0.15] == []
