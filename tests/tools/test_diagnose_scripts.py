"""`labutils diagnose` on real scripts that know nothing of it: planted bottlenecks are found, and
every end explained.

The scripts of tests/scripts run as a user would run them, each in its own process; what a CPU can't
show is planted in test_diagnosis.py's made-up steps of a GPU, and on a real one in tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labutils import cli
from labutils.profiling.probe import probe_machine
from labutils.tools.diagnose import Diagnosis, diagnose
from labutils.tools.diagnose.script import INSIDE, NoDiagnosis, Stages, _search_path, watch

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
FEW = Stages(warmup=2, timed=6, profiled=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the cores are shared with other tests
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def diagnosed(script: str, *options: str, stages: Stages = FEW) -> Diagnosis:
    watched = watch([sys.executable, str(SCRIPTS / script), *options], stages)
    assert watched.exit_code == 0
    assert watched.evidence is not None
    return diagnose(watched.evidence)


def plain(*options: str) -> Diagnosis:
    return diagnosed("plain_loop.py", "--device", "cpu", *options)


# ------------------------------------------------------------ three scripts that know nothing of it


def test_a_plain_loop_that_reads_slowly_without_workers():
    found = plain("--decode-ms", "1")
    assert found.worth_it[0].name == "workers"
    assert found.worth_it[0].gain > 0.5
    assert (
        found.worth_it[0].changes["num_workers"] > 1
    )  # reading only waits, so that cores are no limit
    assert found.evidence.accumulation == 1


def test_an_accelerate_script_that_decodes_pictures_without_workers():
    found = diagnosed("accelerate_script.py", "--cpu", "--accumulation", "2")
    assert found.worth_it[0].name == "workers"
    assert found.evidence.accumulation == 2
    assert found.budget["waiting for data"] > 0.5 * found.evidence.step_ms


def test_a_trainer_script_that_pads_to_the_longest_there_can_be():
    found = diagnosed("trainer_script.py", "--use_cpu", "--pad", "max_length", "--batch", "8")
    assert found.worth_it[0].name == "padding"
    assert 0.5 < found.evidence.padding < 0.9
    assert found.worth_it[0].gain > 0.3


def test_the_hooks_travel_through_a_launcher():
    launcher = Path(sys.executable).with_name("accelerate")
    script = str(SCRIPTS / "accelerate_script.py")
    watched = watch(
        [str(launcher), "launch", "--cpu", "--num_processes", "1", script, "--cpu"], FEW
    )
    assert watched.exit_code == 0
    assert diagnose(watched.evidence).worth_it[0].name == "workers"


# ----------------------------------------------------------------------------------- other plants


def test_tiny_kernels():
    assert plain("--tiny-kernels", "--in-memory").worth_it[0].name == "compile"


def test_writing_each_step():
    found = plain("--log", "flush", "--in-memory")
    assert found.worth_it[0].name == "logging"
    assert any("plain_loop.py" in place for place in found.worth_it[0].sources)
    lines = (SCRIPTS / "plain_loop.py").read_text("utf-8").splitlines()
    at = [lines[int(place.rpartition(":")[2]) - 1] for place in found.worth_it[0].sources]
    assert any("fsync" in line for line in at)


def test_reading_a_value_of_each_parameter():
    found = plain("--item-each-parameter")
    fix = found.fix("syncs")
    lines = (SCRIPTS / "plain_loop.py").read_text("utf-8").splitlines()
    assert "item()" in lines[int(fix.sources[0].rpartition(":")[2]) - 1]
    assert fix.gain == 0  # there is no one to wait for on a CPU, and that is said
    assert "on a GPU each would wait" in fix.reason


def test_batches_of_one():
    found = plain("--batch", "1", "--hidden", "512", "--in-memory")
    assert found.worth_it[0].name == "batch size"
    assert found.worth_it[0].per == "example"


def test_products_in_float32():
    probed = probe_machine("tflops_fp32", "tflops_bf16")
    if probed.rate("bf16") < 1.5 * probed.rate("fp32"):
        pytest.skip("this processor multiplies no faster in bf16")
    found = plain("--hidden", "1024", "--depth", "3", "--batch", "256", "--in-memory")
    assert "precision" in [fix.name for fix in found.worth_it[:2]]


def test_micro_batches_are_counted():
    assert plain("--accumulation", "3").evidence.accumulation == 3


def test_an_optimizer_in_a_loop():
    found = plain("--tiny-kernels", "--optimizer", "loop", "--in-memory")
    assert found.fix("optimizer").gain > 0.1


def test_a_tuned_script_raises_no_alarm():
    """Large products in the processor's best format, pictures in memory, the fused optimizer,
    nothing written. Some steps more, as other tests share the cores: of two profiled ones either
    may be disturbed."""
    tuned = (
        "--hidden",
        "1024",
        "--depth",
        "3",
        "--batch",
        "128",
        "--in-memory",
        "--precision",
        "bf16",
    )
    found = diagnosed(
        "plain_loop.py", "--device", "cpu", *tuned, stages=Stages(warmup=2, timed=12, profiled=6)
    )
    assert [(fix.name, fix.gain) for fix in found.fixes if fix.gain > 0.2] == []


def test_two_processes_end_at_the_same_step():
    launcher = Path(sys.executable).with_name("torchrun")
    script = str(SCRIPTS / "accelerate_script.py")
    watched = watch([str(launcher), "--standalone", "--nproc_per_node", "2", script, "--cpu"], FEW)
    assert watched.exit_code == 0
    assert any("One of 2 processes" in note for note in watched.evidence.notes)


# ------------------------------------------------------------------------------------------- ends


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "its own.py"
    path.write_text(text)
    return [sys.executable, str(path)]


LOOP = """
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range({steps}):
    optimizer.zero_grad()
    layer(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    {then}
"""


EMPTY = """import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.rand(3, 4))
loader = DataLoader(data, batch_size=8, drop_last=True)
for x in loader:
    pass
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('hello')", "never imported PyTorch"),
        ("import torch", "no optimizer of PyTorch's took a step"),
        ("import torch; raise SystemExit(3)", "exit code 3 before its steps were profiled"),
        (LOOP.format(steps=5, then="pass"), "after 5 optimizer steps, and"),
        (
            LOOP.format(steps=50, then="if step == 4: raise KeyError('gone')"),
            "it ended with exit code 1 before its steps were profiled. Its last error: KeyError: "
            "'gone' (",
        ),
        (
            LOOP.format(steps=50, then="if step == 4: import os; os.kill(os.getpid(), 9)"),
            "killed (signal 9)",
        ),
        (
            "import no_such_module",
            "Its last error: ModuleNotFoundError: No module named 'no_such_module' (",
        ),
        ("import json\njson.loads('{')", "its own.py:2). Cure that first, by running it alone: "),
        ("an error (", "Its last error: SyntaxError: '(' was never closed. Cure"),
        (
            "raise SystemExit('no data')",
            "exit code 1 before its steps were profiled. What it said of itself is above",
        ),
        (EMPTY, "A DataLoader gave no batch, at "),
        (
            EMPTY,
            "its own.py:5: its TensorDataset has 3 examples, batch_size=8, drop_last=True. Give it "
            "data",
        ),
        (EMPTY + "print(x)", "Its last error: NameError: name 'x' is not defined ("),
        (EMPTY + "print(x)", "A DataLoader gave no batch"),
    ],
)
def test_what_can_not_be_diagnosed_is_explained(text, said, tmp_path):
    with pytest.raises(NoDiagnosis) as refusal:
        watch(script(tmp_path, text), FEW)
    assert said in str(refusal.value)
    assert not refusal.value.usage


def test_what_is_no_python_is_explained():
    with pytest.raises(NoDiagnosis, match="no Python process was seen"):
        watch(["true"])
    with pytest.raises(
        NoDiagnosis, match="failed: it ended with exit code 1 before a Python process was seen"
    ):
        watch(["false"])


def test_the_options_that_a_short_script_is_told_work_for_it(tmp_path, capsys):
    command = script(tmp_path, LOOP.format(steps=8, then="pass"))
    with pytest.raises(NoDiagnosis) as refusal:
        watch(command)
    assert (
        "after 8 optimizer steps, and 20 are needed: 4 to warm up, 10 to time, 6 to watch"
        in str(refusal.value)
    )
    options = str(refusal.value).rpartition("or give ")[2].rstrip(".").split()
    assert options == ["--warmup", "1", "--timed", "3", "--steps", "1"]
    assert cli.main(["diagnose", *options, "--", *command]) == 0


@pytest.mark.parametrize("steps", [1, 7])
def test_a_script_too_short_for_any_options_is_told_how_many_steps_it_takes(steps, tmp_path):
    told = "Let it take more: at the least 8, with --warmup 1 --timed 3 --steps 1"
    with pytest.raises(NoDiagnosis, match=told):
        watch(script(tmp_path, LOOP.format(steps=steps, then="pass")))


@pytest.mark.parametrize("steps", range(8, 20))
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_offered_fits_the_steps_that_a_script_takes(steps, on_gpu):
    offered = Stages().within(steps, on_gpu)
    if offered is None:
        assert on_gpu and steps < 11
    else:
        assert offered.needed(on_gpu) <= steps < Stages().needed(on_gpu)
        assert 3 <= offered.timed <= 10


@pytest.mark.parametrize("steps", range(14, 20))
def test_a_script_that_ends_in_the_midst_ends_as_it_would_alone(steps, tmp_path, capfd):
    """Its calls are still told of, or the profiler runs: Python's end must stumble over neither."""
    with pytest.raises(NoDiagnosis, match=f"ended with exit code 0 after {steps} optimizer steps"):
        watch(script(tmp_path, LOOP.format(steps=steps, then="pass")))
    assert capfd.readouterr().err == ""


CLOSURE = """
import torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.{kind}(layer.parameters(), lr=0.1{more})
calls = 0
def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    for _ in range({micro_batches}):
        loss = ((layer(torch.rand(64, 4)) - torch.rand(64, 4)) ** 2).mean()
        loss.backward()
    return loss
for step in range(40):
    optimizer.step({argument})
    open(__file__ + ".calls", "w").write(str(calls / (step + 1)))
"""


@pytest.mark.parametrize(
    ("kind", "more", "micro_batches", "argument"),
    [
        ("LBFGS", ", max_iter=4, tolerance_change=0, tolerance_grad=0", 1, "closure"),
        ("LBFGS", ", max_iter=3, tolerance_change=0, tolerance_grad=0", 2, "closure=closure"),
        ("SGD", "", 3, "closure"),
    ],
)
def test_a_closure_s_calls_are_no_micro_batches(kind, more, micro_batches, argument, tmp_path):
    text = CLOSURE.format(kind=kind, more=more, micro_batches=micro_batches, argument=argument)
    command = script(tmp_path, text)
    evidence = watch(command, FEW).evidence
    assert evidence.accumulation == micro_batches
    times = float(Path(command[1] + ".calls").read_text())
    told = [note for note in evidence.notes if "closure" in note]
    assert bool(told) is (kind == "LBFGS") is (times > 1)
    assert all(f"LBFGS calls its closure {times:.3g} times a step" in note for note in told)
    assert evidence.budget["optimizer"] < 0.9 * evidence.step_ms


def test_micro_batches_before_a_closure_are_counted_with_its_own(tmp_path):
    """Five passes, and one that the closure makes again at each of its calls."""
    before = "for _ in range(5):\n        layer(torch.rand(64, 4)).square().mean().backward()\n    optimizer.step(closure)"
    more = ", max_iter=4, tolerance_change=0, tolerance_grad=0"
    text = CLOSURE.format(kind="LBFGS", more=more, micro_batches=1, argument="closure")
    evidence = watch(
        script(tmp_path, text.replace("optimizer.step(closure)", before)), FEW
    ).evidence
    assert evidence.accumulation == 6


WRAPPED = """
import torch
class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
    def step(self, closure=None):
        return self.inner.step(closure)
layer = torch.nn.Linear(4, 4)
optimizer = Outer(torch.optim.SGD(layer.parameters(), lr=0.1))
def closure():
    for _ in range(4):
        loss = layer(torch.rand(64, 4)).square().mean()
        loss.backward()
    return loss
for step in range(60):
    optimizer.step(closure)
"""


def test_a_closure_that_an_optimizer_hands_on_is_counted_once(tmp_path):
    evidence = watch(script(tmp_path, WRAPPED), FEW).evidence
    assert evidence.accumulation == 4
    assert not [note for note in evidence.notes if "closure" in note]


def test_an_empty_dataset_s_own_failure_does_not_end_the_script(tmp_path, capfd):
    text = """
import torch
class Empty(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())
    def __len__(self):
        raise RuntimeError("ask nobody")
for batch in torch.utils.data.DataLoader(Empty()):
    pass
print("went on")
"""
    with pytest.raises(NoDiagnosis, match="exit code 0"):
        watch(script(tmp_path, text))
    assert "went on" in capfd.readouterr().out


def test_the_error_of_a_script_that_shows_its_errors_itself_is_told(tmp_path, capfd):
    text = "import sys\nsys.excepthook = lambda *_: print('shown', file=sys.stderr)\nraise KeyError('gone')"
    with pytest.raises(NoDiagnosis, match=r"Its last error: KeyError: 'gone' \(.*:3\)"):
        watch(script(tmp_path, text), FEW)
    assert capfd.readouterr().err == "shown\n"


@pytest.mark.parametrize("active", ["VIRTUAL_ENV", "CONDA_PREFIX", ""])
def test_python_is_the_courses_own_unless_another_environment_is_active(active, monkeypatch):
    """`.venv/bin/labutils diagnose -- python train.py` finds PyTorch without activating anything."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    if active:
        monkeypatch.setenv(active, "/elsewhere")
    first = _search_path().split(os.pathsep)[0]
    assert (first == str(Path(sys.executable).parent)) is (not active)


def test_a_script_without_python_before_it_is_explained(tmp_path):
    path = Path(script(tmp_path, "import torch")[1])
    with pytest.raises(NoDiagnosis, match="run by Python") as refusal:
        watch([str(path)])
    assert refusal.value.usage


def test_the_script_ends_after_its_profiled_steps_and_is_left_alone_otherwise(tmp_path):
    text = "import sys\ntry:\n" + LOOP.format(steps=1000, then="last = step").replace(
        "\n", "\n    "
    )
    text += "\nfinally:\n    open('ended', 'w').write(str(last)); print(sys.path, sys.argv)"
    (tmp_path / "sitecustomize.py").write_text("open('site was here', 'w')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        "from labutils import cli; raise SystemExit(cli.main())",
        "diagnose",
        "--timed",
        "3",
    ]
    house = str(Path(cli.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), house])
    ran = subprocess.run(
        [*command, "--", *script(tmp_path, text), "--own", "-x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int((tmp_path / "ended").read_text()) < 30
    assert (tmp_path / "site was here").exists()
    assert str(INSIDE) not in ran.stdout
    assert "'--own', '-x'" in ran.stdout


def test_a_script_may_go_on_to_its_own_end(tmp_path):
    text = LOOP.format(steps=60, then="open('steps', 'w').write(str(step))")
    watched = watch(
        script(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n" + text), FEW, keep_going=True
    )
    assert (tmp_path / "steps").read_text() == "59"
    assert watched.exit_code == 0
    assert watched.evidence.step_ms > 0


def test_a_step_caught_by_a_script_ends_it_at_the_next(tmp_path):
    text = LOOP.format(steps=60, then="pass").replace(
        "    optimizer.step()",
        "    try:\n        optimizer.step()\n    except SystemExit:\n        print('caught')",
    )
    assert watch(script(tmp_path, text), FEW).evidence is not None


# ------------------------------------------------------------------------------------- the command


def test_the_command_prints_and_keeps_what_was_recorded(tmp_path, capsys):
    kept = tmp_path / "kept"
    words = ["--warmup", "2", "--timed", "5", "--steps", "2", "--folder", str(kept), "--json"]
    command = script(tmp_path, LOOP.format(steps=60, then="pass"))
    assert cli.main(["diagnose", *words, "--", *command]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["budget_ms"].values()) == pytest.approx(found["step_ms"])
    assert found["exit_code"] == 0
    (trace,) = kept.glob("trace-*.json")
    assert cli.main(["diagnose", "--trace", str(trace)]) == 0
    assert "Where it goes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of: a script after two dashes"),
        (["--trace", "x.json", "--", "python", "y.py"], "give one of"),
        (
            ["--trace", "there-is-none.json"],
            "there-is-none.json can't be read: no such file or directory",
        ),
        (["--run", "stock", "--results", "there-is-none"], "does not exist"),
        (["--results", "x", "--", "python", "y.py"], "name the run with --run NAME"),
        (["--", "there-is-no-such-command"], "There is no command 'there-is-no-such-command'"),
    ],
)
def test_wrong_usage_is_2_and_one_message(words, message, capsys):
    assert cli.main(["diagnose", *words]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_named_run_is_diagnosed(capsys):
    from labutils.results.records import REFERENCE

    assert cli.main(["diagnose", "--run", "04/workers", "--results", str(REFERENCE)]) == 0
    assert "capture" in capsys.readouterr().out
    assert cli.main(["diagnose", "--run", "04/nothing", "--results", str(REFERENCE)]) == 2
    assert "04/plain loop" in capsys.readouterr().err


def test_a_run_is_not_looked_for_where_nothing_can_be_read(tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text("hello\n")
    assert cli.main(["diagnose", "--run", "04/stock", "--results", str(tmp_path)]) == 2
    assert "1 of 1 lines can't be used (line 1 is not JSON)" in capsys.readouterr().err


def test_a_failing_script_is_1(tmp_path, capsys):
    assert cli.main(["diagnose", "--", *script(tmp_path, "import torch; raise SystemExit(3)")]) == 1
    assert "exit code 3" in capsys.readouterr().err


# ---------------------------------------------------------------- scripts that nobody planned for

STEPS = """
import queue, sys, threading, torch
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
def step():
    layer(torch.rand(8, 4)).square().mean().backward()
    optimizer.step()
"""

PROFILED_BY_ITSELF = """
from torch.profiler import profile, schedule
with profile(schedule=schedule(wait={wait}, warmup=1, active=3)) as profiler:
    for _ in range(30):
        step()
        profiler.step()
print("its own profiler was used to the end")
"""


@pytest.mark.parametrize("wait", [0, 7, 9])  # before ours begins, when it has, and while it records
def test_a_script_s_own_profiler_goes_first(wait, tmp_path, capfd):
    with pytest.raises(NoDiagnosis, match="it runs a profiler of its own") as told:
        watch(script(tmp_path, STEPS + PROFILED_BY_ITSELF.format(wait=wait)), FEW, keep_going=True)
    assert "Turn that off" in str(told.value)
    assert "its own profiler was used to the end" in capfd.readouterr().out


TRAINS_IN_A_THREAD = """
results = queue.Queue()
def train():
    for _ in range(60):
        results.put(step())
    results.put("through")
threading.Thread(target=train, daemon=True).start()
while results.get() != "through":
    pass
"""
FEEDS_FROM_A_THREAD = """
batches = queue.Queue(4)
def feed():
    for _ in range(1000):
        batches.put(1)
threading.Thread(target=feed).start()
for _ in range(60):
    batches.get()
    step()
"""


@pytest.mark.parametrize("loop", [TRAINS_IN_A_THREAD, FEEDS_FROM_A_THREAD])
def test_threads_that_wait_for_what_no_longer_comes_do_not_keep_the_process(loop, tmp_path, capfd):
    began = time.monotonic()
    watched = watch(script(tmp_path, STEPS + loop), FEW)
    assert watched.evidence is not None and watched.exit_code == 0
    assert time.monotonic() - began < 60
    assert "Traceback" not in capfd.readouterr().err


def test_a_loop_that_catches_its_end_comes_to_it(tmp_path):
    loop = "while True:\n    try:\n        step()\n    except BaseException:\n        continue\n"
    assert watch(script(tmp_path, STEPS + loop), FEW).exit_code == 0


OPTIMIZERS_IN_TURN = """
for epoch in range(6):
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(4):
        step()
"""
ONE_THAT_STOPS = """
step()
first, optimizer = optimizer, torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(60):
    step()
"""


@pytest.mark.parametrize("loop", [OPTIMIZERS_IN_TURN, ONE_THAT_STOPS])
def test_steps_of_several_optimizers_in_turn_are_one_training(loop, tmp_path):
    assert watch(script(tmp_path, STEPS + loop), FEW).evidence is not None


def test_an_optimizer_that_is_gone_is_held_by_nobody(tmp_path, capfd):
    loop = """
import gc, weakref
for _ in range(3):
    step()
gone, optimizer = weakref.ref(optimizer), None
gc.collect()
print("held" if gone() else "let go")
"""
    with pytest.raises(NoDiagnosis):
        watch(script(tmp_path, STEPS + loop), FEW)
    assert "let go" in capfd.readouterr().out
