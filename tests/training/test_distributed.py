"""Two real processes train as one: same gradients, losses and weights; and what becomes of them
when one dies.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ranks_at_work
import torch
from ranks_at_work import CASES, SD, opened, perturbed
from recipes_at_work import one_thread

from labutils.course.lab import open_lab
from labutils.data.images import EpochOrder, EveryNth
from labutils.labs import lab10_distributed
from labutils.recipe import STOCK, Unavailable
from labutils.results.records import Run, read_runs, summarise
from labutils.training import Trainer, distributed, launcher
from labutils.training.batches import Batches
from labutils.training.checkpoint import FILE
from labutils.training.launch_worker import Job, RankStatus, Task, _turn, is_others_doing, said_of
from labutils.training.launcher import launch
from labutils.workloads import open_workload

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> Path:
    """Every case on two ranks, in one launch: starting takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    meet = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meet,
        HERE / "ranks_at_work.py",
        folder,
    ]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def workloads() -> dict:
    return {name: opened(name) for name in ("sd15-lora", "qwen3-lora-short")}


# -------------------------------------------------------------------------------------------------
# The same training


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_process_does(case, on_two_ranks, workloads):
    name, recipe = CASES[case]
    alone = ranks_at_work.train(workloads[name], recipe)
    found = torch.load(on_two_ranks / f"{case}.pt")
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(found["before"], alone["before"], strict=True)
    )
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert len(set(alone["losses"])) == ranks_at_work.STEPS
    # The first step's; later ones are those of weights that AdamW has moved by the signs of
    # gradients near zero.
    for mine, other in zip(found["gradients"][0], alone["gradients"][0], strict=True):
        assert other.abs().max() > 0
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()
    for mine, other, start in zip(found["after"], alone["after"], alone["before"], strict=True):
        assert (mine - other).norm() <= 5e-3 * (other - start).norm()


@pytest.mark.parametrize("case", ["ddp", "fsdp, no_sync", "whole, fsdp"])
def test_gradients_are_those_of_one_large_batch(case, on_two_ranks, workloads):
    """An oracle that knows of no micro-batches, drivers or ranks: all examples of the step at once,
    and autograd.
    """
    name, recipe = CASES[case]
    workload, seen = workloads[name], []
    ranks_at_work.train(workload, recipe, steps=1, seen=seen)
    assert len(seen) == recipe.accumulation
    batch, draws = (
        {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*seen, strict=True)
    )
    model = workload.build(recipe)
    perturbed(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(workload.loss(model, batch, draws), trained)
    found = torch.load(on_two_ranks / f"{case}.pt")["gradients"][0]
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_share_the_order_of_one_process(count):
    """Epochs of seven micro-batches, which no number of ranks divides: still every one is
    somebody's, in turn.
    """

    def of(number: int, ranks_: int, taken: int = 0) -> Batches:
        order = EpochOrder(10, 14, seed=3)
        batches = torch.utils.data.BatchSampler(order, 2, drop_last=True)
        loader = torch.utils.data.DataLoader(
            range(10), batch_sampler=EveryNth(batches, order, ranks_)
        )
        return Batches(loader, 2, order, taken, rank=number, ranks=ranks_)

    single = of(0, 1)
    expected = [next(single).tolist() for _ in range(24)]
    shares = [of(number, count) for number in range(count)]
    found = [next(shares[k % count]).tolist() for k in range(24)]
    assert found == expected
    assert {share.taken for share in shares} == {24}
    resumed = of(count - 1, count, taken=12)
    assert next(resumed).tolist() == expected[12 + count - 1]


# -------------------------------------------------------------------------------------------------
# A rank dies

DYING = SD.but(
    cache="nothing",
    num_workers=1,
    persistent_workers=True,
    adapter="plain",
    optimizer="adamw-fused",
)
STEPS = 6


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses of one process that nothing happens to."""
    with Trainer(open_workload("sd15-lora", "tiny", device="cpu"), DYING) as trainer:
        trainer.run(STEPS)
        trainer.driver.log.flush()
        return list(trainer.losses)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def train_until(
    fail: str, step: int, folder: Path, resume: bool = False, **changes: object
) -> launcher.Ended:
    workload = open_workload("sd15-lora", "tiny", device="cpu").opened_as()
    recipe = DYING.but(**changes).as_dict()
    options = {
        "folder": str(folder),
        "checkpoint_every": 2,
        "resume": resume,
        "fail": fail,
        "fails": (1, step),
    }
    return launch([Task("run", "train", workload, recipe, STEPS, **options)], 2, "cpu", 200, 30)


@pytest.fixture(scope="module")
def killed(checkpoints) -> launcher.Ended:
    return train_until("kill", 3, checkpoints, parallel="fsdp")


@pytest.fixture(scope="module")
def raised(checkpoints, killed) -> launcher.Ended:
    """On from the other's checkpoint, which FSDP wrote, with DDP, and down again."""
    return train_until("raise", 5, checkpoints, resume=True)


def test_a_rank_that_is_killed_is_named_with_its_step(killed, checkpoints):
    assert killed.first == (1, -9)
    first, *others = killed.message.splitlines()
    assert first.startswith("Rank 1 was killed by SIGKILL")
    assert any(line.startswith("Rank 1 was in optimizer step 4 of *train*") for line in others)
    assert any(
        line.startswith(("Rank 0 lost the others in", "Rank 0 was in optimizer")) for line in others
    )
    assert f"The checkpoint of optimizer step 2 is whole: {checkpoints}" in killed.message
    assert not killed.runs


def test_nobody_waits_long_for_a_rank_that_is_gone(killed):
    assert (
        killed.seconds < 100
    )  # of which starting takes nearly all; a rank would have waited 30 s for the other


def test_nothing_of_a_killed_rank_stays(killed):
    """Its DataLoader worker outlives it by some seconds, and nobody has told it to end."""
    pids = {word["pid"] for word in killed.words}
    assert not any(psutil.pid_exists(pid) for pid in pids)
    named = {
        int(left.removeprefix("process ")) for left in killed.left if left.startswith("process ")
    }
    assert not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in named
    )


def test_a_rank_that_raises_says_what(raised):
    assert raised.message.startswith(
        "Rank 1 failed in optimizer step 6 of *train*: RuntimeError: provoked"
    )
    assert (
        "Rank 0 lost the others in optimizer step 6" in raised.message
        or "Rank 0 was in optimizer" in raised.message
    )
    with pytest.raises(RuntimeError, match="provoked"):
        raised.or_raise()


def test_one_process_goes_on_where_two_ranks_were_stopped(raised, checkpoints, undisturbed):
    """The file was written by DDP after FSDP; the losses are those of a run that nothing happened
    to.
    """
    assert [path.name for path in checkpoints.glob(f"{FILE}*")] == [FILE]
    with Trainer(
        open_workload("sd15-lora", "tiny", device="cpu"), DYING, checkpoints, resume=True
    ) as trainer:
        assert trainer.step_count == 4
        trainer.run(STEPS)
        trainer.driver.log.flush()
        assert trainer.losses == pytest.approx(undisturbed[4:], rel=1e-4)


# -------------------------------------------------------------------------------------------------
# What can't be


@pytest.mark.parametrize(
    ("changes", "count", "examples", "said"),
    [
        (
            {"accumulation": 3},
            2,
            100,
            "2 ranks share .*accumulation=3 can't be shared evenly. Use accumulation=2 or 4",
        ),
        ({"accumulation": 1}, 4, 100, "Use accumulation=4, or as many ranks as divide 1"),
        (
            {"accumulation": 4, "micro_batch": 2},
            4,
            7,
            "take 8 examples at a time, and the dataset has 7",
        ),
        (
            {"driver": "graph", "logging": "ring-buffer"},
            2,
            100,
            "Use driver='eager' with several ranks",
        ),
        ({"parallel": "fsdp"}, 2, 100, "built for driver='eager'"),
        ({"parallel": "fsdp", "driver": "eager"}, 2, 100, "needs precision='bf16' or 'fp32'"),
        (
            {"parallel": "fsdp", "driver": "eager", "precision": "bf16", "base_linear": "nf4"},
            2,
            100,
            "packs them",
        ),
        (
            {"parallel": "fsdp", "driver": "eager", "precision": "bf16", "adapter": "folded"},
            2,
            100,
            "folded",
        ),
        (
            {
                "parallel": "fsdp",
                "driver": "eager",
                "precision": "bf16",
                "memory_format": "channels_last",
            },
            2,
            100,
            "contiguous",
        ),
        (
            {"parallel": "fsdp", "driver": "eager", "precision": "bf16", "compile": "default"},
            2,
            100,
            "compile_scope='blocks'",
        ),
    ],
)
def test_what_ranks_can_t_share_is_said(changes, count, examples, said):
    with pytest.raises(ValueError, match=said):
        distributed.check(STOCK.but(**changes), count, examples)
    distributed.check(STOCK.but(**changes), 1, 1)  # one process has nothing to share


def test_a_launch_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(launcher, "_torchrun", lambda *_: pytest.fail("it was started"))
    odd = Task("train", "x", {}, STOCK.but(accumulation=3).as_dict())
    with pytest.raises(ValueError, match="accumulation=3"):
        launch([odd], 2, "cpu")
    with pytest.raises(ValueError, match="ranks=0"):
        launch([], 0, "cpu")
    with pytest.raises(Unavailable, match="99 ranks need 99 GPUs"):
        launch([], 99, "cuda")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ValueError, match="port=.* can't be used .*another torchrun"):
            launch([], 2, "cpu", port=other.getsockname()[1])
    with pytest.raises(ValueError, match="port=99999999 can't be used"):
        launch([], 2, "cpu", port=99999999)


def test_a_rank_without_a_gpu_says_what_to_type(monkeypatch):
    variables = {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        Unavailable, match="rank 1 has no GPU: torchrun started 2 .*Use --nproc-per-node=1"
    ):
        distributed.join(device="cuda")


def test_what_is_trained_whole_has_no_adapter_to_save(tmp_path):
    with (
        Trainer(opened("sd15-lora"), SD.but(adapter="none")) as trainer,
        pytest.raises(ValueError, match="Use save()"),
    ):
        trainer.save_adapter(tmp_path)


def test_all_weights_are_for_published_layers():
    with pytest.raises(ValueError, match="adapter='none' trains every weight"):
        STOCK.but(adapter="none", base_linear="nf4")
    with pytest.raises(ValueError, match="Use layers='published'"):
        opened("qwen3-lora-short").build(ranks_at_work.QWEN.but(adapter="none"))


# -------------------------------------------------------------------------------------------------
# Launching, with ranks that are no ranks


@pytest.fixture
def instead(monkeypatch, tmp_path):
    """Launches run this script in torchrun's place."""

    def run(code: str, **options: object) -> launcher.Ended:
        script = tmp_path / "script.py"
        script.write_text(code)
        monkeypatch.setattr(
            launcher, "command", lambda ranks, job, *_: [sys.executable, str(script), str(job)]
        )
        return launch([], 2, "cpu", **options)

    return run


def test_ranks_that_take_too_long_are_ended(instead):
    began = time.perf_counter()
    ended = instead("import time; time.sleep(60)", timeout_s=1)
    assert time.perf_counter() - began < 30
    assert "before any rank began" in ended.message
    assert "1 s" in ended.message


def test_what_torchrun_says_last_is_passed_on(instead):
    ended = instead("import sys; sys.exit('no such option')")
    assert ended.message == "torchrun ended with code 1 before any rank began: no such option"


def test_orphans_are_found_and_ended(instead):
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], "
        "start_new_session=True)\n"
        "print(child.pid)"
    )
    ended = instead(code)
    (left,) = ended.left
    assert left == f"process {ended.log.split()[0]}"
    pid = int(left.split()[1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_each_rank_gets_its_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(launcher, "usable_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    found = launcher.rank_variables(2, "cuda")
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == (
        "4",
        "4",
        "4,5",
    )
    assert launcher.rank_variables(16, "cpu")["OMP_NUM_THREADS"] == "1"


def test_a_job_is_read_as_it_was_written(tmp_path):
    with pytest.raises(ValueError, match="holds no job"):
        Job.read(tmp_path / "none.json")
    (tmp_path / "odd.json").write_text('{"tasks": [{"kind": 3}]}')
    with pytest.raises(ValueError, match="holds no job"):
        Job.read(tmp_path / "odd.json")


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:6560"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_whose_fault_an_error_is(error, others):
    assert is_others_doing(error) is others


def test_a_last_word_is_a_sentence(tmp_path):
    word = RankStatus(tmp_path, 3)
    assert said_of(word.said) == "Rank 3 was before its first task and left no other word."
    word.say(state="failed", doing="ddp 2", step=4, message="ValueError: no")
    assert said_of(word.said) == "Rank 3 failed in optimizer step 5 of *ddp 2*: ValueError: no"
    word.say(state="ended", message="torchrun ended it")
    assert said_of(word.said) == "Rank 3 was in optimizer step 5 of *ddp 2*; torchrun ended it."
    assert launcher._words(tmp_path)[0]["pid"] == os.getpid()


def test_a_rank_that_sits_in_a_library_still_leaves_word(tmp_path):
    """SIGTERM reaches a thread of its own: the main one may wait inside C for good, as NCCL does."""
    code = (
        "import ctypes, pathlib, sys\n"
        "from labutils.training.launch_worker import when_terminated\n"
        "when_terminated(lambda: pathlib.Path(sys.argv[1]).write_text('last word'))\n"
        "print('ready', flush=True)\n"
        "while True: ctypes.CDLL(None).sleep(30)"
    )
    said = tmp_path / "said"
    child = subprocess.Popen([sys.executable, "-c", code, said], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.terminate()
    assert child.wait(10) == 128 + 15
    assert said.read_text() == "last word"


# -------------------------------------------------------------------------------------------------
# The lab's own


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("ddp 2", ""),
        ("one process", ""),
        ("full ddp 2 bucket 1MB", "full"),
        ("qwen full fsdp 8", "qwen full"),
    ],
)
def test_a_run_s_case_is_read_off_its_name(name, case):
    assert lab10_distributed.case_of(name) == case


@pytest.mark.parametrize(("ranks_", "fewer"), [(2, 1), (3, 1), (4, 2), (6, 3), (8, 4), (5, 1)])
def test_those_that_are_left_can_share_the_batch(ranks_, fewer):
    assert lab10_distributed.fewer_than(ranks_) == fewer


def at(scale: str) -> dict[str, lab10_distributed.Case]:
    return lab10_distributed.cases(
        SimpleNamespace(scale=scale, weights="random", data="generated", cache_dir="cache")
    )


def test_what_fsdp_can_t_do_takes_nothing_along():
    tasks = lab10_distributed.tasks_of_all(at("full").values(), 2, 10, tiny=False)
    kinds = [task.recipe["parallel"] for task in tasks]
    assert kinds == ["ddp"] * kinds.count("ddp") + ["fsdp"] * 4
    ddp = {task.name for task in tasks[: kinds.count("ddp")]}
    assert {"ddp 2", "full ddp 2", "full ddp 2 bucket view", "qwen ddp 2", "qwen full ddp 2"} <= ddp
    little = lab10_distributed.tasks_of_all(at("tiny").values(), 2, 4, tiny=True)
    # What the article's claims are judged by, and the comparisons that the lab speaks about.
    assert {"ddp 2", "full ddp 2", "full fsdp 2", "full ddp 2 no_sync", "fsdp 2"} <= {
        task.name for task in little
    }


def test_a_row_has_room_for_the_longest_text():
    case = at("small")["qwen"]
    open_workload(case.workload["name"], "small", device="cpu").collate(case.recipe)


def test_what_was_through_before_a_rank_failed_is_kept(monkeypatch, tmp_path):
    """What it failed in is on record, what comes after it is done, and an interrupted lab goes on
    where it was.
    """
    case = at("tiny")[""]
    tasks = [
        *(case.task(name, SD, steps=1) for name in "abc"),
        Task("all-reduce", "link", sizes=(4,)),
    ]
    launches, failing = [], {"b"}

    def launched(asked, *_, each, **__):
        launches.append("".join(task.name[0] for task in asked))
        runs = {}
        for task in asked:
            if task.name in failing:
                return launcher.Ended(runs, f"Rank 1 failed in {task.name}")
            runs[task.name] = Run(
                "", task.name, workload="sd15-lora", recipe=SD.fitted_to("cpu").as_dict()
            )
            each(runs[task.name])
        return launcher.Ended(runs)

    monkeypatch.setattr(lab10_distributed, "launch", launched)
    opened = lambda: open_lab(
        "10", {"__annotations__": {"results_dir": str}, "results_dir": str(tmp_path)}
    )
    found = {}
    with pytest.raises(RuntimeError, match="Rank 1 failed in b"):
        lab10_distributed.measured(opened(), tasks, 2, "cpu", found)
    assert (
        launches == ["abcl", "cl"]
        and set(found) == {"a", "c", "link"}
        and found["a"].lane == "same work"
    )
    assert {name: run.status for (_, name), run in read_runs(tmp_path).items()} == {
        "a": "ok",
        "b": "error: Rank 1 failed in b",
        "c": "ok",
        "link": "ok",
    }
    failing.clear()
    for _ in range(2):  # the second time from what the first one left
        found = {}
        lab10_distributed.measured(opened(), tasks, 2, "cpu", found, judge=lambda name, run: run)
        assert set(found) == {"a", "b", "c", "link"} and launches == ["abcl", "cl", "b"]


def test_a_machine_that_brings_nothing_is_given_up(monkeypatch, tmp_path):
    tasks = [at("tiny")[""].task(name, SD) for name in "abcd"]
    asked = []
    monkeypatch.setattr(
        lab10_distributed,
        "launch",
        lambda left, *_, **__: asked.append(left) or launcher.Ended({}, "no way"),
    )
    lab = open_lab("10", {"__annotations__": {"results_dir": str}, "results_dir": str(tmp_path)})
    with pytest.raises(RuntimeError, match="no way"):
        lab10_distributed.measured(lab, tasks, 2, "cpu", {})
    assert [len(left) for left in asked] == [4, 3]


def test_a_launch_s_runs_are_told_one_by_one(instead):
    """Those of a launch that is cut off as well; a line that is half written is no run."""
    told = []
    code = (
        "import json, os, sys, time\n"
        "path = os.path.join(os.path.dirname(sys.argv[1]), 'runs.jsonl')\n"
        "with open(path, 'w') as file:\n"
        "    file.write(json.dumps({'run': 'a', 'status': 'ok'}) + '\\n' + '{\"run\": \"b')\n"
        "time.sleep(60)"
    )
    ended = instead(code, timeout_s=4, each=told.append)
    assert [run.run for run in told] == ["a"] == list(ended.runs)


def test_launches_take_turns(tmp_path):
    """Of two that name the same file one is at work at a time."""
    path, order = str(tmp_path / "turn"), []

    def works(name: str) -> None:
        with _turn(path, distributed.Ranks()):
            order.append(name)
            time.sleep(0.1)
            order.append(name)

    threads = [threading.Thread(target=works, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order in (list("aabb"), list("bbaa"))


def test_a_crash_is_told_by_its_runs(monkeypatch):
    asked = []

    def launched(tasks, ranks, *_, **__):
        (task,) = tasks
        asked.append((task.fail, distributed, task.resume))
        if task.fail:
            return launcher.Ended(
                {}, "The checkpoint of optimizer step 4 is whole: x.", (1, -9), left=["process 7"]
            )
        return launcher.Ended({"crash": Run("", "crash", metrics={"resumed_at": 6, "loss": [1.0]})})

    monkeypatch.setattr(lab10_distributed, "launch", launched)
    runs = lab10_distributed.crashes(at("tiny")[""], 2, "cpu")
    assert asked == [("kill", 2, False), ("raise", 2, True), ("", 1, True)]
    assert tuple(runs) == lab10_distributed.CRASHES
    killed = runs["rank killed"].metrics
    assert (killed["checkpoint_step"], killed["first_exit_code"], killed["left_behind"]) == (
        4,
        -9,
        1,
    )
    assert lab10_distributed.well(runs["resumed on fewer ranks"]).metrics["resumed_at"] == 6
    monkeypatch.setattr(
        lab10_distributed, "launch", lambda *_, **__: launcher.Ended({}, "no such file")
    )
    with pytest.raises(Unavailable, match="no such file"):
        lab10_distributed.well(
            lab10_distributed.crashes(at("tiny")[""], 2, "cpu")["resumed on fewer ranks"]
        )


def test_on_gpus_nobody_waits_as_long_as_pytorch_would(monkeypatch, instead):
    assert launcher.PATIENCE_S["cuda"] <= 120 < launcher.TIMEOUT_S < 600
    seen = []
    monkeypatch.setattr(launcher, "Job", lambda *job: seen.append(job) or Job(*job))
    instead("import sys; sys.exit(1)", patience_s=7)
    instead("import sys; sys.exit(1)")
    assert [job[3] for job in seen] == [7, launcher.PATIENCE_S["cpu"]]


def test_the_docker_table_has_this_machine_s_values():
    rows = {row[0]: row[2] for row in lab10_distributed.docker_rows()}
    assert len(rows) == 6
    assert all(rows.values())


def test_tasks_survive_the_way_to_the_ranks(tmp_path):
    job = Job(
        (Task("run", "x", fails=(1, 5), sizes=(4, 8), recipe=STOCK.as_dict()),),
        str(tmp_path),
        "cpu",
        30.0,
    )
    (tmp_path / "job.json").write_text(json.dumps(asdict(job)))
    assert Job.read(tmp_path / "job.json") == job


# Tables of a results file


def test_tables_of_runs_on_record_do_without_what_is_not_there():
    def run(name, ms, **recipe):
        times = [0.99 * ms, ms, 1.01 * ms]
        metrics = {
            "step_ms": summarise(times),
            "examples_per_s": 1e3 / ms,
            "gradient_mb": 1.0,
            "ranks": 4,
        }
        return Run("10", name, recipe=recipe, metrics=metrics, samples={"step_ms": times})

    there = {
        name: run(name, ms)
        for name, ms in (("ddp 4", 100.0), ("ddp 4 bucket 1MB", 110.0), ("one process", 90.0))
    }
    assert lab10_distributed.comparisons_of(there) == [
        ("SD 1.5, LoRA: buckets of 25 MiB -> of 1", 100.0, 110.0, "+10 %", None, None)
    ]
    there["ddp 4 bucket 1MB"] = run("ddp 4 bucket 1MB", 101.0)
    assert lab10_distributed.comparisons_of(there)[0][3] == "+1 %, within the spread"
    # Four micro-batches on each of four ranks; the last is sent, and takes as long as a step of
    # "ddp 4".
    there["ddp 4 no_sync"] = run("ddp 4 no_sync", 100.0 + 3 * 120.0, accumulation=16)
    assert lab10_distributed.apart_of(there) == [
        ("SD 1.5, LoRA", 90.0, pytest.approx(120.0), "+33 %")
    ]
    assert (
        lab10_distributed.apart_of(
            {name: one for name, one in there.items() if name != "one process"}
        )
        == []
    )
    losses = Run("", "", metrics={"largest_difference": 2.1e-5})
    assert lab10_distributed.losses_rows({"losses": losses}) == [
        ("one process and all ranks", "2.1e-05 of the loss")
    ]
    samples = {"all_reduce_ms": [0.06, 0.02, 1.0], "bus_gb_per_s": [0.1, 8.0, 298.0]}
    assert lab10_distributed.link_rows({"all-reduce": Run("", "", samples=samples)}) == [
        (20.0, 298.0)
    ]
    case = lab10_distributed.Case("", "SD, LoRA", {}, lab10_distributed.SD_RECIPE)
    assert lab10_distributed.alone_rows([case], there) == [
        ("SD, LoRA", 90.0, 1e3 / 90, 1.0, None, None)
    ]
    at = lab10_distributed.at_networks({"SD, LoRA": {0.125: 80.0, 450.0: 99.0}})
    networks = {"networks": Run("10", "networks", metrics=at)}
    assert lab10_distributed.network_rows(networks) == [
        ("SD, LoRA", 80.0, None, None, None, None, 99.0)
    ]
    networks["networks"].metrics["something else"] = 0.3
    assert len(lab10_distributed.network_rows(networks)) == 1
    tables_of = (
        lab10_distributed.apart_of,
        lab10_distributed.link_rows,
        lab10_distributed.comparisons_of,
        lab10_distributed.network_rows,
    )
    assert [rows_of({}) for rows_of in tables_of] == [[]] * 4
    assert lab10_distributed.alone_rows([case], {}) == []


def test_what_connects_the_gpus_is_told_or_why_not(monkeypatch):
    """As two GPUs of one host show themselves; a machine without the command, and one with a single
    GPU, say so.
    """
    shown = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n"
    monkeypatch.setattr(lab10_distributed, "gpu_count", lambda: 2)
    monkeypatch.setattr(
        lab10_distributed.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=shown)
    )
    run = lab10_distributed.topology()
    run.machine = {"compute_capability": "9.0"}
    assert run.metrics["connections"] == 1
    assert lab10_distributed.topology_rows({"topology": run}) == [
        ("GPU 0 and GPU 1", "NV18", "18 NVLinks of 25 GB/s each: 450 GB/s in one direction")
    ]
    run.machine = {"compute_capability": "8.6"}  # another card's links carry something else
    assert lab10_distributed.topology_rows({"topology": run})[0][2] == "18 NVLinks"
    monkeypatch.setattr(
        lab10_distributed.subprocess,
        "run",
        lambda *_, **__: SimpleNamespace(stdout="nothing that we know"),
    )
    assert lab10_distributed.topology().metrics == {"connections": 0, "named": {}}

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(lab10_distributed.subprocess, "run", missing)
    with pytest.raises(Unavailable, match="FileNotFoundError"):
        lab10_distributed.topology()
    monkeypatch.setattr(lab10_distributed, "gpu_count", lambda: 1)
    with pytest.raises(Unavailable, match="takes two GPUs"):
        lab10_distributed.topology()
