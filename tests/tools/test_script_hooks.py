"""What is brought into a script's process: PyTorch waited for, batches looked into, calls seen."""

from __future__ import annotations

import io
import logging
import sys
import time
from pathlib import Path

import torch

from labutils.tools.diagnose.script import HOOKS

sys.path.append(str(HOOKS))
from labutils_script_hooks import calls, compat, facts, process_note

HERE = Path(__file__).name


def test_an_update_without_an_optimizer_shows_in_a_gradient_that_is_set_to_zero():
    layer, own = torch.nn.Linear(2, 2, bias=False), compat.OwnOptimizer()
    for _ in range(2):  # micro-batches of one step
        assert not own.has_stepped()
        loss = layer(torch.rand(3, 2)).sum()
        loss.backward()
        own.after_backward(loss)
    assert own.seen_by[0] is layer.weight and not own.has_stepped()
    layer.zero_grad(set_to_none=False)
    assert own.has_stepped()


def test_a_mask_tells_the_padding():
    ids = torch.tensor([[5, 6, 0, 0], [1, 2, 3, 0]])
    batch = {"labels": ids + 1, "input_ids": ids, "attention_mask": (ids != 0).long()}
    counts = facts.of_batch(batch)
    assert (counts["tokens"], counts["useful"], counts["examples"]) == (8, 5, 2)
    assert counts["bytes"] == 3 * 8 * 8
    assert "tokens" not in facts.of_batch([ids])


def seen(action):
    watched = calls.Calls()
    watched.resume()
    action()
    watched.pause()
    return watched.totals


def test_calls_that_write_or_read_are_found_with_their_lines(tmp_path):
    value = torch.ones(())
    file = (tmp_path / "log").open("w")

    def step():
        value.item()
        file.write("x")
        process_note.save(str(tmp_path / "gone" / "x.json"), {})  # the diagnosis has ended
        io.StringIO().write("not a file of the disk")

    found = seen(step)
    assert {(kind, what) for kind, _, what in found} == {("read", "item()"), ("write", "write()")}
    lines = Path(__file__).read_text("utf-8").splitlines()
    for (_, place, what), (times, _) in found.items():
        path, _, line = place.rpartition(":")
        assert Path(path).name == HERE and times == 1
        assert what in lines[int(line) - 1].replace('"x"', "")


def test_what_a_library_writes_is_one_call_with_its_waits_and_without_what_it_reads():
    code = "def log(value):\n    time.sleep(0.02)\n    return value.item()\n"
    library = {"time": time}
    exec(compile(code, "/x/site-packages/wandb/sdk.py", "exec"), library)
    found = seen(lambda: library["log"](torch.ones(())))
    assert [kind for kind, _, _ in found] == ["read", "write"]
    ((times, ms),) = [row for (kind, _, _), row in found.items() if kind == "write"]
    assert times == 1 and ms > 15


def test_a_message_below_the_loggers_level_writes_nothing(tmp_path):
    logger = logging.Logger("planted", logging.WARNING)
    logger.addHandler(logging.FileHandler(tmp_path / "log"))
    assert seen(lambda: logger.info("not told")) == {}
    assert [what for _, _, what in seen(lambda: logger.warning("told"))] == ["Logger._log"]
