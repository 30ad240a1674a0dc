"""`labutils diagnose` on real scripts that know nothing of it, and on every end they can come to.

The scripts of tests/scripts run as a user would run them, each in its own process. What a CPU can't
show is planted in test_diagnose_fixes.py's made-up steps, and on a real GPU in tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from labutils import cli
from labutils.tools.diagnose import Diagnosis, diagnose
from labutils.tools.diagnose.script import HOOKS, NoDiagnosis, Stages, watch
from labutils.training.child_process import marked

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
BIN = Path(sys.executable).parent
FEW = Stages(warmup=2, timed=6, profiled=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are shared with other tests
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def diagnosed(*command: str, stages: Stages = FEW) -> Diagnosis:
    watched = watch(list(command), stages)
    assert watched.exit_code == 0
    return diagnose(watched.evidence)


# -------------------------------------------------------------------------- planted bottlenecks


def test_a_plain_loop_that_reads_slowly_and_writes_each_step():
    command = [sys.executable, str(SCRIPTS / "plain_loop.py"), "--device", "cpu", "--log", "flush"]
    found = diagnosed(*command, "--decode-ms", "3")
    assert found.worth_it[0].name == "workers"
    assert found.fix("logging").gain > 0  # how much depends on the disk
    lines = (SCRIPTS / "plain_loop.py").read_text("utf-8").splitlines()
    places = [int(place.split(":")[-1]) for place in found.fix("logging").sources]
    assert any("fsync" in lines[place - 1] for place in places)


def test_an_accelerate_script_through_its_launcher():
    script = str(SCRIPTS / "lora_images.py")
    launched = (str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1", script)
    found = diagnosed(*launched, "--tiny", "--accumulation", "2", stages=Stages(1, 3, 1))
    assert found.worth_it[0].name == "workers" and found.evidence.accumulation == 2
    assert found.evidence.budget["waiting for data"] > 0.5 * found.evidence.step_ms


def test_a_trainer_script_that_pads_to_the_longest_there_can_be():
    trainer = str(SCRIPTS / "trainer_script.py")
    found = diagnosed(sys.executable, trainer, "--use_cpu", "--pad", "max_length", "--batch", "8")
    assert found.worth_it[0].name == "padding" and found.worth_it[0].gain > 0.15
    assert 0.5 < found.evidence.padding < 0.9


def test_steps_that_differ_are_said(tmp_path):
    text = f"import time\n{STEPS}\nfor n in range(60):\n    step()\n    time.sleep(0.1 * (n > 9))"
    found = diagnosed(*script(tmp_path, text), stages=Stages(2, 6, 3))
    assert "no prediction holds" in found.evidence.notes[0]


# ---------------------------------------------------------------------------------- any way in

MANY = str(SCRIPTS / "many_ways.py")
FROM_SCRIPTS = [sys.executable, "-m", "tests.scripts.many_ways"]
LAUNCHED = [sys.executable, str(SCRIPTS / "launcher.py"), MANY]
EIGHT_BIT = ["--optimizer", "bitsandbytes", "--passed-over", "5"]
WAYS = {
    "lazily": ([sys.executable, MANY, "--torch", "lazily", "--optimizer", "lbfgs"], "LBFGS"),
    "in a thread": (
        [*FROM_SCRIPTS, "--torch", "in a thread", "--loop", "thread", "--optimizer", "own"],
        "OwnOptimizer",
    ),
    "launcher": ([*LAUNCHED, "--compiled", "--optimizer", "several"], "SGD"),
    "forked": ([*FROM_SCRIPTS, "--loop", "fork", *EIGHT_BIT], "AdamW8bit"),
    "lightning": ([sys.executable, str(SCRIPTS / "lightning_script.py")], "AdamW"),
    "trl": ([sys.executable, str(SCRIPTS / "sft_script.py")], "AdamW"),
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_are_seen_on_any_way_in(way, monkeypatch):
    """PyTorch's spec is looked for before it is imported, as datasets and accelerate do."""
    if way in ("lightning", "trl") and find_spec(way) is None:
        pytest.skip(f"{way} is not installed: pip install {way}")
    monkeypatch.chdir(SCRIPTS.parents[1])
    command, optimizer = WAYS[way]
    evidence = watch(command, FEW).evidence
    assert evidence.optimizer.name == optimizer
    assert evidence.accumulation == 1 and evidence.step_ms > 0


def test_a_notebooks_cells_run_as_a_script_in_its_folder(tmp_path, capfd):
    text = "import helper\nfor n in range(60):\n    step()\n    print(n, file=log)"
    cells = ["!echo of the shell > shell", STEPS, "log = open('log', 'w')", text]
    code = [{"cell_type": "code", "source": cell.splitlines(True)} for cell in cells]
    notebook = {"cells": [{"cell_type": "markdown", "source": ["# Training"]}, *code]}
    (tmp_path / "train.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "helper.py").write_text("")
    (line,) = watch([str(tmp_path / "train.ipynb")], FEW).evidence.writes
    assert line.place == f"{tmp_path / 'train.ipynb'}, cell 5:4"
    assert (tmp_path / "shell").exists()
    for damaged in ("{", "[]", '{"cells": [3]}'):
        (tmp_path / "train.ipynb").write_text(damaged)
        with pytest.raises(NoDiagnosis, match="running it alone: jupyter execute"):
            watch([str(tmp_path / "train.ipynb")], FEW)
        said = capfd.readouterr().err
        assert "as a notebook" in said and "Traceback" not in said


# ------------------------------------------------------------------------ watching changes nothing

SEEN_FROM_INSIDE = """
import os, random, torch
torch.manual_seed(0)
random.seed(0)
layer = torch.nn.Linear(4, 4)
network = torch.compile(torch.nn.Sequential(layer, torch.nn.Dropout()), backend="eager")
optimizer = torch.optim.AdamW(layer.parameters())
word = input()
for batch in torch.utils.data.DataLoader(torch.rand(400, 4), 8, shuffle=True):
    loss = network(batch).square().mean()
    loss.backward()
    optimizer.step()
    print(word, loss.item().hex(), random.random(), torch.rand(()).item(), sorted(os.listdir()))
    torch.save(layer.state_dict(), "weights.pt")
os.system("(sleep 2.2; touch left_behind) &")
from torch._dynamo.utils import counters
print({name: dict(counters[name]) for name in ("frames", "stats")}, file=sys.stderr)
sys.exit(3)
"""


def test_watching_changes_nothing_that_the_script_does(tmp_path):
    """Every loss and random number, its files, its output, its exit code, and what it compiled."""
    command = script(tmp_path, "import sys" + SEEN_FROM_INSIDE)
    options = [sys.executable, "-m", "labutils.cli", "diagnose", "--keep-going", "--json", "--"]
    ends, files = [], []
    for name, words in (("alone", command), ("watched", [*options, *command])):
        folder = tmp_path / name
        folder.mkdir()
        given = {"input": "a word of standard input\n", "text": True, "capture_output": True}
        ends.append(subprocess.run(words, cwd=folder, **given))
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    alone, watched = ends
    *printed, empty, diagnosis = watched.stdout.splitlines()
    assert not empty and printed == alone.stdout.splitlines() and len(printed) == 50
    found = json.loads(diagnosis)
    assert sum(found["budget_ms"].values()) == pytest.approx(found["step_ms"]) and found["fixes"]
    *told, end = watched.stderr.splitlines()
    assert told == alone.stderr.splitlines() and "exit code 3" in end and alone.returncode == 3
    assert files[0] == files[1] and {*files[0]} == {"weights.pt", "left_behind"}


# ------------------------------------------------------------------------------------------- ends


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "its own.py"
    path.write_text(text)
    return [sys.executable, str(path)]


STEPS = """
import queue, sys, threading, torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
def step():
    layer(torch.rand(8, 4)).square().mean().backward()
    optimizer.step()
"""
FIFTY = STEPS + "for n in range(50):\n    step()\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('hello')", "has not imported PyTorch"),
        ("import torch", "no optimizer took a step"),
        (FIFTY + "    if n == 4: raise KeyError('gone')", "Its last error: KeyError: 'gone' ("),
        (FIFTY + "    if n == 4: import os; os.kill(os.getpid(), 9)", "killed (signal 9)"),
        ("x = = 3", "SyntaxError: invalid syntax (/"),
        ("raise SystemExit('no data')", "What it said of itself is above"),
    ],
)
def test_what_can_not_be_diagnosed_is_explained(text, said, tmp_path):
    with pytest.raises(NoDiagnosis) as refusal:
        watch(script(tmp_path, text), FEW)
    assert said in str(refusal.value) and refusal.value.exit_code == 1


def test_a_script_without_steps_is_told_while_it_runs(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("labutils.tools.diagnose.script.SAY_AFTER_S", 0.0)
    with pytest.raises(NoDiagnosis, match="has not imported PyTorch"):
        watch(script(tmp_path, "import time; time.sleep(1)"), FEW)
    assert "no step yet after 0 s: it has not imported PyTorch" in capfd.readouterr().err


def test_ctrl_c_keeps_what_was_seen(tmp_path):
    text = FIFTY + "    if n == 45: import os, time; os.kill(os.getppid(), 2); time.sleep(30)"
    stopped = watch(script(tmp_path, text), FEW, keep_going=True)
    assert stopped.exit_code == 130 and stopped.evidence.step_ms > 0


TOLD = """
import signal, subprocess, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
# Without its parent's environment, as one that gives itself a title.
given = dict(stdout=subprocess.DEVNULL, env={{}}, start_new_session=True)
subprocess.Popen(["tail", "-f", __file__], **given)
for number in (2, 15): signal.signal(number, {handler})
try:
    print("ready", flush=True); time.sleep(60)
finally:
    time.sleep(0.8); print("cleaned up")
"""


@pytest.mark.parametrize(
    ("send", "number", "presses"),
    [(os.killpg, 2, 1), (os.killpg, 2, 2), (os.kill, 2, 1), (os.kill, 15, 1)],
)
def test_a_signal_reaches_the_script_once_and_nothing_is_left(send, number, presses, tmp_path):
    """In a terminal both get it. A script that ignores it is ended when it is pressed again. One
    under `timeout` is in a group of its own."""
    handler = "lambda number, _: exit(print('told', number))"
    text = TOLD.format(handler=handler if presses == 1 else "signal.SIG_IGN")
    words = [*["timeout", "60"] * (send is os.kill), *script(tmp_path, text)]
    command = [sys.executable, "-m", "labutils.cli", "diagnose", "--", *words]
    given = {"env": os.environ | {"TMPDIR": str(tmp_path)}, "text": True}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, **given) as process:
        process.stdout.readline()
        for _ in range(presses):
            send(process.pid, number)
            time.sleep(0.5)
        printed, said = process.communicate(timeout=10)
    assert process.returncode == 130 and "The script was stopped" in said
    assert printed == (f"told {number}\ncleaned up\n" if presses == 1 else "")
    assert not marked("TMPDIR", str(tmp_path)) and not [*tmp_path.glob("labutils-*")]
    words = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    assert not [word for word in words if str(tmp_path) in word]


def test_a_short_script_is_told_the_options_that_work_for_it(tmp_path):
    command = script(tmp_path, STEPS + "for _ in range(8): step()")
    assert watch(command, Stages(1, 3, 1)).exit_code == 0


def test_two_processes_end_at_the_same_step(tmp_path):
    launched = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"]
    found = diagnosed(*launched, *script(tmp_path, FIFTY)[1:])
    assert any("One of 2 processes" in note for note in found.evidence.notes)


@pytest.mark.parametrize("steps", [15, 19])
def test_a_script_that_ends_in_the_midst_ends_as_it_would_alone(steps, tmp_path, capfd):
    """Its calls are still watched, or the profiler runs: Python's end must stumble over neither."""
    with pytest.raises(NoDiagnosis, match=f"after {steps} opt.*--timed 3 --steps 1, which needs 8"):
        watch(script(tmp_path, STEPS + f"for _ in range({steps}): step()"))
    assert capfd.readouterr().err == ""


def test_what_a_closure_computes_is_no_part_of_the_update():
    text = "def closure():\n    loss = sum(layer(torch.rand(64, 4)).sum() for _ in range(20))\n"
    text += "    loss.backward()\n    return loss\nfor _ in range(60): optimizer.step(closure)"
    evidence = watch([sys.executable, "-c", STEPS + text], FEW).evidence
    phases = Counter(piece.phase for piece in evidence.queue.pieces)
    assert evidence.accumulation == 1 and phases[""] > phases["optimizer"] > 0


def test_the_script_keeps_its_path_its_arguments_and_its_own_end(tmp_path, capfd, monkeypatch):
    text = STEPS + "try:\n    for last in range(1000): step()\nfinally:\n"
    text += "    open('ended', 'w').write(str(last)); print(sys.path, sys.argv)"
    (tmp_path / "sitecustomize.py").write_text("open('site was here', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [*script(tmp_path, text), "--own", "-x"]
    assert cli.main(["diagnose", "--timed", "3", "--html", "/dev/full", "--", *command]) == 1
    assert int((tmp_path / "ended").read_text()) < 30
    assert (tmp_path / "site was here").exists()
    printed, said = capfd.readouterr()
    assert str(HOOKS) not in printed and "'--own', '-x'" in printed
    assert "A step takes" in printed and "No space left" in said


PROFILES_ITSELF = """
from torch.profiler import profile, schedule
with profile(schedule=schedule(wait={wait}, warmup=1, active=3)) as profiler:
    for _ in range(30):
        step()
        profiler.step()
print("its own profiler was used to the end")
"""


@pytest.mark.parametrize("wait", [0, 9])  # before ours begins, and while it records
def test_a_scripts_own_profiler_goes_first(wait, tmp_path, capfd):
    with pytest.raises(NoDiagnosis, match="profiler of its own"):
        watch(script(tmp_path, STEPS + PROFILES_ITSELF.format(wait=wait)), FEW, keep_going=True)
    assert "was used to the end" in capfd.readouterr().out


UNPLANNED = {
    "cProfile": "import cProfile\ndata = torch.utils.data.DataLoader(torch.rand(99, 4))\n"
    "def train():\n    for _ in data: step()\ncProfile.run('train()', 'profile')",
    "goes on feeding from a thread": "batches = queue.Queue(4)\n"
    "threading.Thread(target=lambda: [batches.put(1) for _ in range(1000)]).start()\n"
    "for _ in range(60): batches.get(); step()",
    "goes on, catches its end": "while True:\n    try: step()\n    except BaseException: continue",
    "goes on waiting for a child": "import multiprocessing\n"
    "def train(results):\n    for _ in range(60): results.put(step())\n    results.put('end')\n"
    "if __name__ == '__main__':\n"
    "    spawn = multiprocessing.get_context('spawn')\n    results = spawn.Queue()\n"
    "    spawn.Process(target=train, args=[results]).start()\n"
    "    print('in a buffer')\n    while results.get() != 'end': pass\n",
    "trains in a forked child": "import os\nchild = os.fork()\n"
    "if child:\n    os.waitpid(child, 0)\nelse:\n    for _ in range(60): step()",
}


@pytest.mark.parametrize("loop", UNPLANNED)
def test_scripts_that_nobody_planned_for(loop, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labutils.tools.diagnose.script.END_WITHIN_S", 1.0)
    watched = watch(script(tmp_path, STEPS + UNPLANNED[loop]), FEW)
    assert watched.exit_code == 0 and watched.evidence.step_ms > 0
    printed, said = capfd.readouterr()
    assert ("in a buffer" in printed) == ("in a buffer" in UNPLANNED[loop])
    by_itself, told, _ = said.partition("labutils diagnose: the script's steps were measured 1 s")
    assert "Traceback" not in by_itself and (told or "goes on" not in loop)
