"""What is brought into a script's process: batches looked into, calls seen with their lines,
PyTorch waited for.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labutils.layers.cuda_graph import float32_rounded
from labutils.tools.diagnose.script import INSIDE

sys.path.append(str(INSIDE))
from labutils_inside import batches, calls, watch

HERE = Path(__file__).name


def padded(*lengths, width=8, filler=0):
    ids = torch.full((len(lengths), width), filler)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(1, length + 1)
    return ids


def test_a_mask_tells_the_padding_whatever_the_numbers_are():
    batch = {
        "labels": padded(8, 8),
        "input_ids": padded(2, 6),
        "attention_mask": (padded(2, 6) != 0).long(),
    }
    found = batches.facts(batch)
    assert (found["tokens"], found["useful"]) == (16, 8)
    assert found["examples"] == 2
    assert found["bytes"] == 3 * 16 * 8


@pytest.mark.parametrize(
    ("ids", "useful"),
    [
        (padded(2, 6, 8), 16),
        (padded(2, 6, 8, filler=50256), 16),
        (padded(8, 8, 8), 24),
        (padded(8, 8, 7), 24),  # a zero at one row's end may be its end-of-text sign
        (torch.tensor([[5, 5, 5]]), 3),  # one row alone tells nothing
    ],
)
def test_without_a_mask_the_rows_ends_tell_it(ids, useful):
    assert batches.facts({"input_ids": ids})["useful"] == useful
    assert batches.facts([ids])["useful"] == useful


def test_pictures_have_no_tokens():
    found = batches.facts((torch.rand(4, 3, 8, 8), torch.arange(4)))
    assert found["examples"] == 4
    assert "tokens" not in found
    assert batches.facts(["a", 3]) == {}
    assert (
        batches.facts({"pixels": torch.rand(2, 3), "attention_mask": torch.rand(2, 4)}).get(
            "tokens"
        )
        is None
    )


def seen(action):
    watched = calls.Calls()
    watched.resume()
    action()
    watched.pause()
    return watched.found


def test_calls_that_write_or_read_are_found_with_their_lines(tmp_path):
    value = torch.ones(())
    file = (tmp_path / "log").open("w")

    def step():
        value.item()
        file.write("x")
        io.StringIO().write("not a file of the disk")
        [1].append(2)

    found = seen(step)
    kinds = {(kind, what) for kind, _, what in found}
    assert kinds == {("read", ".item()"), ("write", "write()")}
    lines = Path(__file__).read_text("utf-8").splitlines()
    for (_, place, _), (times, ms) in found.items():
        path, _, line = place.rpartition(":")
        assert Path(path).name == HERE
        assert "value.item()" in lines[int(line) - 1] or "file.write" in lines[int(line) - 1]
        assert times == 1
        assert 0 <= ms < 5


def test_a_call_ends_where_its_method_is_bound_anew():
    """As from Python 3.12 on: the events of a call's beginning and end bring two objects, equal but
    not the same.
    """
    value = torch.ones(())
    begun, ended = value.item, value.item
    assert begun is not ended
    watched = calls.Calls()
    watched._told(sys._getframe(), "c_call", begun)
    watched._told(sys._getframe(), "c_return", ended)
    ((kind, place, what), (times, _)) = next(iter(watched.found.items()))
    assert (kind, what, times) == ("read", ".item()", 1)
    assert Path(place.rpartition(":")[0]).name == HERE


def test_what_a_library_writes_is_one_call_with_its_waits_and_without_what_it_reads():
    code = "def log(value):\n    time.sleep(0.02)\n    return value.item()\n"
    library = {"time": time}
    exec(compile(code, "/x/site-packages/wandb/sdk.py", "exec"), library)
    value = torch.ones(())
    found = seen(lambda: library["log"](value))
    (writing,) = [row for (kind, _, _), row in found.items() if kind == "write"]
    assert writing[0] == 1
    assert 15 < writing[1] < 100
    assert [kind for kind, _, _ in found] == ["read", "write"]
    assert all(Path(place.rpartition(":")[0]).name == HERE for _, place, _ in found)


def test_a_message_below_the_loggers_level_writes_nothing(tmp_path):
    logger = logging.Logger("planted", logging.WARNING)
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    assert seen(lambda: logger.info("not told")) == {}
    ((kind, place, what), (times, _)) = next(iter(seen(lambda: logger.warning("told")).items()))
    assert (kind, what, times) == ("write", "Logger._log", 1)
    assert Path(place.rpartition(":")[0]).name == HERE


def test_telling_of_a_call_costs_next_to_nothing_and_something():
    assert 0 < calls.telling_ms() < 0.01


def test_the_hook_waits_for_torch_and_leaves_other_imports_alone(tmp_path):
    settings = {
        "folder": str(tmp_path),
        "keep_going": False,
        "warmup": 1,
        "timed": 1,
        "profiled": 1,
    }
    program = f"""
import sys
sys.path.insert(0, {str(INSIDE)!r})
from labutils_inside import arrival
arrival.prepare(sys.argv[1])
assert "torch" not in sys.modules
import torch
assert not any(type(finder).__name__ == "WhenImported" for finder in sys.meta_path)
assert torch.autograd.backward.__wrapped__
"""
    subprocess.run([sys.executable, "-c", program, json.dumps(settings)], check=True)
    (word,) = tmp_path.glob("process-*.json")
    assert json.loads(word.read_text())["torch"] is True


def test_a_script_s_settings_are_read_whichever_way_it_set_them():
    """PyTorch has two ways to allow TF32, and reading the older one raises where a script used the
    newer.
    """
    process = SimpleNamespace(on_gpu=False)
    assert not watch.Watch._config(process, torch)["matmul_tf32"]
    with float32_rounded("everything"):
        found = watch.Watch._config(process, torch)
    assert found["matmul_tf32"] and found["cudnn_tf32"]
