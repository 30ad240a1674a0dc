"""The runner: usage checked before anything runs, every kind of failure told apart, and nothing
measured lost.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import nbformat
import psutil
import pytest
import troubled_notebooks
from hypothesis import given
from hypothesis import strategies as st
from papermill.clientwrap import PapermillNotebookClient
from rich.console import Console

from labutils.course import parameters
from labutils.results import records as results
from labutils.results.records import Results, read_records, read_runs
from labutils.tools import run as runner
from labutils.tools.run import Options, UsageError, asking, batch, planning, running, telling


@pytest.fixture
def notebooks(tmp_path):
    """Name -> path of a freshly written troubled notebook."""
    return lambda name: str(troubled_notebooks.write(tmp_path, name))


@pytest.fixture
def run(results_folder):
    """Run notebooks at tiny: (exit code, everything said)."""

    def call(*labs: str, **options) -> tuple[int, str]:
        said: list[str] = []
        code = runner.run(
            labs, Options(**{"scale": "tiny", "results": results_folder, **options}), said.append
        )
        return code, "\n".join(said)

    return call


# Wrong usage: said before anything runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": {"stepz": "3"}}, r"no parameter 'stepz'(.|\n)*-p steps 3  \(int\) how many"),
        ({"given": {"steps": "many"}}, "steps is 'many', a text, but it takes a whole number"),
        (
            {"given": {"steps": "2.5"}},
            r"steps is 2\.5, a number with a decimal point, but it takes a whole number, e\.g\. 4",
        ),
        ({"given": {"steps": "inf"}}, "steps is 'inf', a text, but it takes a whole number"),
        ({"given": {"loud": "0"}}, "loud is '0', a text, but it takes true or false"),
        ({"given": {"rate": "nan"}}, "rate is nan"),
        ({"given": {"scale": "tiny"}}, "option of its own: --scale"),
        ({"given": {"results_dir": "x"}}, "option of its own: --results"),
        ({"scale": "huge"}, "scale is 'huge', but it takes one of: auto, tiny, small, full"),
        ({"weights": "mine"}, "weights is 'mine', but it takes one of: random, hub"),
    ],
)
def test_wrong_usage_is_refused_and_leaves_nothing_behind(
    notebooks, run, results_folder, options, message
):
    with pytest.raises(UsageError, match=message):
        run(notebooks("fine"), **options)
    assert not results_folder.exists()


def test_every_lab_must_know_a_parameter_that_is_given(notebooks, run, tmp_path, results_folder):
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), tmp_path / "bare.ipynb"
    )
    with pytest.raises(
        UsageError, match="Lab bare has no parameter 'steps'. It has none of its own"
    ):
        run(notebooks("fine"), str(tmp_path / "bare.ipynb"), given={"steps": "3"})
    assert not results_folder.exists()


def test_an_unknown_lab_is_refused_with_those_there_are(tmp_path):
    troubled_notebooks.write(tmp_path, "03_sleepy_workers", "fine")
    with pytest.raises(UsageError, match=r"no lab '4'(.|\n)*03  sleepy workers"):
        runner.find(["4"], tmp_path)


@pytest.mark.parametrize("name", ["03", "3", "03_sleepy_workers", "03_sleepy_workers.ipynb"])
def test_a_lab_is_called_by_number_or_name(tmp_path, name):
    path = troubled_notebooks.write(tmp_path, "03_sleepy_workers", "fine")
    troubled_notebooks.write(tmp_path, "04_other", "fine")
    assert [(lab.number, lab.path) for lab in runner.find([name, name], tmp_path)] == [("03", path)]
    assert [lab.number for lab in runner.find([], tmp_path)] == ["03", "04"]


def test_a_folder_without_labs_says_where_to_go(tmp_path):
    with pytest.raises(UsageError, match="from a checkout"):
        runner.find([], tmp_path)


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "03_torn.ipynb").write_text('{"cells": [')
    with pytest.raises(UsageError, match="03_torn.ipynb can't be read as a notebook"):
        runner.find(["03"], tmp_path)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("a-file", "a-file is a file, not a folder"),
        ("a-file/below/it", "a-file is a file, not a folder"),
        ("/proc/results", "no folder can be made there"),
        ("taken/results.jsonl", "taken/results.jsonl/results.jsonl is a folder, not a file"),
    ],
)
def test_results_that_can_not_be_kept_are_refused_even_for_root(
    notebooks, run, tmp_path, place, message
):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "taken" / "results.jsonl" / "results.jsonl").mkdir(parents=True)
    with pytest.raises(UsageError, match=f"{message}. Nothing was run. .*--results DIR"):
        run(notebooks("fine"), results=tmp_path / place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "~nosuchuser/x",
            "~nosuchuser/x lies in the home folder of a user .*--results results/NAME",
        ),
        ("x" * 300, "file name too long. Nothing was run"),
        ("loop", "loop is a link that leads nowhere. Nothing was run"),
        ("loop/x", "loop is a link that leads nowhere. Nothing was run"),
    ],
)
def test_an_odd_folder_is_refused(notebooks, run, tmp_path, monkeypatch, place, message):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(UsageError, match=message):
        run(notebooks("fine"), results=Path(place))


@pytest.mark.parametrize("place", ["/elsewhere", "results"])
def test_a_deleted_current_folder_is_refused(notebooks, run, tmp_path, monkeypatch, place):
    path = notebooks("fine")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="current folder was deleted.*: cd "):
        run(path, results=Path(place))


@pytest.mark.parametrize("place", [".", "", "link"])
def test_executed_notebooks_never_replace_the_labs(run, tmp_path, monkeypatch, place):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = troubled_notebooks.write(tmp_path / "notebooks", "fine")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="would replace the labs .*--results results/NAME"):
        run(str(path), results=Path(place))
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"notebooks", "link"}


def test_a_link_to_the_lab_is_not_written_through(notebooks, run, results_folder):
    path = Path(notebooks("fine"))
    (results_folder / "notebooks").mkdir(parents=True)
    (results_folder / "notebooks" / path.name).symlink_to(path)
    with pytest.raises(UsageError, match="would replace the labs"):
        run(str(path))


def test_two_labs_of_one_number_are_refused(notebooks, run, tmp_path, results_folder):
    (tmp_path / "copies").mkdir()
    copy = troubled_notebooks.write(tmp_path / "copies", "fine")
    with pytest.raises(
        UsageError, match="are both lab fine: .* Nothing was run.*a --results of its own"
    ):
        run(notebooks("fine"), str(copy), jobs=2)
    assert not results_folder.exists()


def test_a_full_disk_leaves_the_executed_notebook_whole(notebooks, tmp_path, monkeypatch):
    output = Path(notebooks("fine"))
    before = output.read_bytes()

    def write(_: object, path: Path) -> None:
        Path(path).write_text("{")
        raise OSError("No space left on device")

    monkeypatch.setattr(nbformat, "write", write)
    running._stamp(output, "done", 1.0)
    assert output.read_bytes() == before
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("content", ["", '{"cells": [', None])
def test_an_output_that_can_not_be_read_is_no_second_failure(tmp_path, content):
    output = tmp_path / "output.ipynb"
    output.mkdir() if content is None else output.write_text(content)
    assert running._last_cell(output) == "no cell yet"
    running._stamp(output, "done", 1.0)


def test_a_lab_whose_output_can_not_be_written_fails_alone(notebooks, run, results_folder):
    (results_folder / "notebooks" / "raises.ipynb" / "taken").mkdir(parents=True)
    code, said = run(notebooks("raises"), notebooks("fine"))
    assert code == 1
    assert "Lab raises could not be run: IsADirectoryError" in said
    assert "fine    done" in said


def test_odd_parameters_on_record_are_not_done():
    assert not planning.is_done(
        [{"parameters": [1]}, {"parameters": None}, {"parameters": {"steps": 4}}], {"steps": 3}
    )


def test_the_last_lines_can_be_typed_as_they_are(notebooks, tmp_path):
    lab = runner.find([notebooks("fine")])[0]
    said = telling.summary([runner.Outcome(lab, "done")], Path("/my results"), None)
    assert said.endswith("Verdicts: labutils report --results '/my results'")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(notebooks, run, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UsageError, match="permission denied"):
        run(notebooks("fine"), results=tmp_path / "closed")


@given(st.text(), st.sampled_from(sorted(parameters.KINDS)))
def test_a_word_becomes_a_value_of_the_declared_type_or_is_refused(word, kind):
    try:
        value = parameters.read("knob", word, kind)
    except ValueError as error:
        assert "knob is" in str(error)
        assert kind != "str"
    else:
        assert type(value) is parameters.KINDS[kind]


@given(
    st.one_of(
        st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False), st.text()
    )
)
def test_values_survive_the_command_line(value):
    assert parameters.read("knob", str(value), type(value).__name__) == value


# Running


def test_a_lab_gets_its_parameters_and_this_interpreter(notebooks, run, results_folder):
    code, said = run(
        notebooks("fine"), given={"steps": "5", "loud": "true", "rate": "2", "word": "false"}
    )
    assert code == 0, said
    metrics = read_runs(results_folder)["fine", "first"].metrics
    assert metrics == {
        "steps": 5,
        "loud": True,
        "rate": 2.0,
        "word": "false",
        "python": sys.executable,
    }
    executed = nbformat.read(results_folder / "notebooks" / "fine.ipynb", as_version=4)
    assert [cell.execution_count for cell in executed.cells if cell.cell_type == "code"] == [
        1,
        2,
        3,
        4,
    ]
    assert executed.metadata.labutils["status"] == "done"
    assert str(results_folder.parent) not in executed.metadata.papermill.__repr__()


def test_a_kernel_of_that_name_installed_elsewhere_is_not_taken(
    notebooks, run, tmp_path, monkeypatch, results_folder
):
    wrong = tmp_path / "jupyter" / "kernels" / "python3"
    wrong.mkdir(parents=True)
    spec = {
        "argv": ["/bin/false", "{connection_file}"],
        "display_name": "wrong",
        "language": "python",
    }
    (wrong / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    code, said = run(notebooks("fine"))
    assert code == 0, said


def test_failures_are_told_apart_and_the_other_labs_still_run(notebooks, run, results_folder):
    names = ["raises", "exits", "killed", "bus", "quits", "fine"]
    code, said = run(*map(notebooks, names))
    assert code == 1
    for sentence in [
        "Lab raises failed in cell [4] of",
        "ValueError: no such shape: 3 x 4",
        "Lab exits died in the cell that begins with `os._exit(3)` (section 1 · What happens): its "
        "kernel",
        "ended by itself with exit code 3",
        "Lab killed died in",
        "(SIGKILL). Most often that is the system running out of memory",
        "(SIGBUS). Most often /dev/shm is too small",
        "Lab quits ended before its last cell",
        "fine    done",
    ]:
        assert sentence in said
    runs = read_runs(results_folder)
    assert {lab for lab, _ in runs} == set(names)  # what each measured before its trouble
    assert [r["lab"] for r in read_records(results_folder) if r["status"] == "done"] == ["fine"]
    assert {path.stem for path in (results_folder / "notebooks").iterdir()} == set(names)


def test_a_lab_that_is_done_is_not_run_again_unless_asked_or_asked_differently(
    notebooks, run, results_folder
):
    path = notebooks("fine")
    assert run(path)[0] == 0
    code, said = run(path)
    assert code == 0
    assert "done before" in said
    assert "running" in run(path, force=True)[1]
    assert len([r for r in read_records(results_folder) if r.get("run") == "first"]) == 2


@pytest.mark.parametrize("trouble", ["killed", "stops"])
def test_a_forced_lab_that_did_not_end_is_not_done(notebooks, run, trouble):
    """Its verdicts would be of runs of both times."""
    path, other = Path(notebooks("fine")), Path(notebooks("fine")).with_name("other.ipynb")
    troubled_notebooks.write(path.parent, "other", "fine")
    assert run(str(path), str(other))[0] == 0
    troubled_notebooks.write(path.parent, "fine", trouble)
    code, said = run(str(path), str(other), force=True)
    assert code == (130 if trouble == "stops" else 1)
    if trouble == "stops":  # neither of the two is done as it was asked for
        assert f"To go on: labutils run {path} {other} --scale tiny" in said
        assert "--force" in said.splitlines()[-1]
    notebooks("fine")
    code, said = run(str(path), str(other))
    assert code == 0
    assert "fine: running" in said and "other: done before" in said


runs_on_record = st.lists(st.sampled_from(["run", "done", "prediction"]))


@given(runs_on_record)
def test_a_lab_is_done_where_it_kept_no_run_since(kinds):
    kept = {
        "run": {"run": "x", "status": "ok"},
        "done": {"status": "done"},
        "prediction": {"prediction": "y"},
    }
    records = [{"lab": lab, **kept[kind]} for kind in kinds for lab in ("03", "04")]
    since = kinds[len(kinds) - kinds[::-1].index("run") :] if "run" in kinds else kinds
    assert len(planning.done_records(records, runner.Lab("03", Path("03"), {}))) == since.count(
        "done"
    )


def test_what_is_left_of_a_forced_batch_is_forced_again(tmp_path):
    labs = [
        runner.Lab(number, runner.NOTEBOOKS / f"{number}_x.ipynb", {})
        for number in ("03", "04", "05")
    ]
    ended = [
        runner.Outcome(lab, status)
        for lab, status in zip(labs, ("done", "stopped", "not run"), strict=True)
    ]
    asked = Options(scale="tiny", force=True)
    assert telling.same_again([], asked, tmp_path, ended).startswith(
        "labutils run 04 05 --scale tiny"
    )
    assert telling.same_again([], asked, tmp_path, ended).endswith(" --force")
    assert "--force" not in telling.same_again(["03"], asked, tmp_path, ended[:1])
    assert "--force" not in telling.same_again(
        ["03", "04"], Options(scale="tiny"), tmp_path, ended[:2]
    )


def test_a_lab_that_sums_up_is_done_until_another_keeps_more(notebooks, run, monkeypatch):
    monkeypatch.setattr(planning, "SUMMING_UP", ("loud",))
    path = troubled_notebooks.write(Path(notebooks("fine")).parent, "loud", "fine")
    assert run(notebooks("fine"), str(path))[0] == 0
    assert "loud: done before" in run(str(path))[1]
    assert "fine: done before" not in run(notebooks("fine"), force=True)[1]
    code, said = run(notebooks("fine"), str(path))
    assert code == 0
    assert "fine: done before" in said and "loud: running" in said
    assert "done before" in run(str(path))[1]
    assert run(str(path), force=True)[0] == 0


def test_done_with_other_parameters_is_not_done():
    recorded = {"parameters": {"scale": "tiny", "steps": 3}}
    assert planning.is_done([recorded], {"scale": "tiny", "steps": 3, "word": "hello"})
    assert not planning.is_done([recorded], {"scale": "small", "steps": 3, "word": "hello"})
    assert not planning.is_done([], {"scale": "tiny"})


@pytest.mark.parametrize(
    ("limit", "whose", "option"),
    [
        ("timeout", "its limit", "--timeout 1"),
        ("cell_timeout", "the limit of a cell", "--cell-timeout 1"),
    ],
)
def test_a_lab_or_a_cell_that_takes_too_long_is_ended(
    notebooks, run, results_folder, monkeypatch, limit, whose, option
):
    """However long a busy machine takes to get there: the clocks stand still until the cell has
    said that it sleeps.
    """
    asleep, timer = threading.Event(), threading.Timer
    receive = PapermillNotebookClient.process_message

    def process_message(self, *message):
        output = receive(self, *message)
        if output and "asleep" in output.get("text", ""):
            asleep.set()
        return output

    class Patient(timer):
        def run(self) -> None:
            asleep.wait(120)
            super().run()

    monkeypatch.setattr(PapermillNotebookClient, "process_message", process_message)
    monkeypatch.setattr(running, "threading", SimpleNamespace(Timer=Patient))
    code, said = run(notebooks("sleeps"), **{limit: 0.5})
    assert code == 1
    where = "in the cell that begins with `print('asleep', flush=True)` (section 1 · What happens)"
    assert f"Lab sleeps was ended after 0.5 s, {whose}, {where}" in said
    assert option in said
    assert ("sleeps", "first") in read_runs(results_folder)
    executed = nbformat.read(results_folder / "notebooks" / "sleeps.ipynb", as_version=4)
    assert executed.cells[-2].outputs[0].text == "asleep\n"
    assert executed.metadata.labutils["status"] == "timed out"


class FakeTimers:
    """Stands for the module `threading`: its timers strike when `pass_by` has let their time go by."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: dict[Mock, tuple[float, partial]] = {}

    def Timer(self, seconds: float, call, args) -> Mock:
        timer = Mock()
        timer.start = lambda: self._due.update({timer: (self.now + seconds, partial(call, *args))})
        timer.cancel = lambda: self._due.pop(timer, None)
        return timer

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for timer, (due, strike) in list(self._due.items()):
            if due <= self.now:
                del self._due[timer]
                strike()


def test_quick_cells_of_a_slow_lab_are_within_the_limit_of_a_cell(monkeypatch):
    """The clock starts anew with each cell, and stands still between them."""
    timers, kernel = FakeTimers(), SimpleNamespace(kill=Mock())
    monkeypatch.setattr(running, "threading", timers)
    with running._Watch(kernel, Options(cell_timeout=3, timeout=100), lambda *_: None) as watch:
        for _ in range(4):
            watch.began(nbformat.v4.new_code_cell("1"))
            timers.pass_by(2)
            watch.ended()
        timers.pass_by(4)
        kernel.kill.assert_not_called()
        watch.began(nbformat.v4.new_code_cell("2"))
        timers.pass_by(3)
    kernel.kill.assert_called_once_with("cell timed out")
    timers.pass_by(100)
    assert kernel.kill.call_count == 1


def test_what_a_kernel_started_ends_with_it_even_where_it_died_by_itself(
    notebooks, run, results_folder
):
    """As torchrun's ranks, in sessions of their own, which would hold the GPU that the next lab
    measures.
    """
    assert "ended by itself with exit code 3" in run(notebooks("deserts"))[1]
    pids = read_runs(results_folder)["deserts", "ranks"].samples["pids"]
    assert len(pids) == 2
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert [process.status() for process in alive] == [psutil.STATUS_ZOMBIE] * len(alive)


def test_a_limit_that_strikes_before_there_is_a_process_counts(notebooks, run, results_folder):
    code, said = run(notebooks("fine"), timeout=1e-6)
    assert code == 1
    assert "Lab fine was ended after 1e-06 s, its limit" in said
    assert not read_runs(results_folder)


# Side by side


def test_labs_run_at_once_say_so_and_what_sums_up_comes_last(
    notebooks, run, results_folder, monkeypatch
):
    monkeypatch.setattr(planning, "SUMMING_UP", ("sums",))
    monkeypatch.setattr(planning, "visible_gpus", lambda: ["3", "7"])
    monkeypatch.setattr("labutils.tools.run.batch.usable_cores", lambda: 8)
    folder = Path(notebooks("meets")).parent
    others = [
        str(troubled_notebooks.write(folder, name, trouble))
        for name, trouble in (("sums", "fine"), ("also", "meets"))
    ]
    code, said = run(*others, notebooks("meets"), notebooks("raises"), jobs=2)
    assert code == 1
    assert "Up to 2 labs run at once, each on a GPU of its own" in said
    assert "verdicts on time and memory come out as inconclusive" in said
    assert "Lab raises failed in cell [4]" in said
    ends = [
        line.split()[1] for line in said.splitlines() if line.startswith(("[", "Lab raises failed"))
    ]
    assert ends[-2:] == ["sums:", "sums:"] and "sums:" not in ends[:-2]
    met = {lab: run for (lab, name), run in read_runs(results_folder).items() if name == "met"}
    assert {run.beside for run in met.values()} == {1}
    assert {run.metrics["CUDA_VISIBLE_DEVICES"] for run in met.values()} == {"3", "7"}
    assert {run.metrics["OMP_NUM_THREADS"] for run in met.values()} <= {
        "4",
        os.environ.get("OMP_NUM_THREADS"),
    }
    assert read_records(results_folder)[-1]["lab"] == "sums"


labs = st.lists(st.sampled_from([f"{number:02}" for number in range(13)]), unique=True).map(
    lambda numbers: [runner.Lab(number, Path(number), {}) for number in numbers]
)


@given(labs, st.integers(1, 20), st.integers(0, 9))
def test_every_lab_runs_once_and_lab_11_after_all_others_ended(labs, jobs, gpus):
    waves = planning.waves(labs, jobs, gpus)
    order = [lab.number for wave in waves for lab in wave]
    assert sorted(order) == sorted(lab.number for lab in labs)
    assert all(waves)
    if "11" in order:
        assert [lab.number for lab in waves[-1]] == ["11"]
    if jobs > 1 and gpus > 1 and "10" in order:
        assert ["10"] in [[lab.number for lab in wave] for wave in waves]
    if jobs == 1:
        assert [number for number in order if number != "11"] == [
            lab.number for lab in labs if lab.number != "11"
        ]


@given(
    st.integers(0, 9), st.lists(st.text("0123456789", min_size=1), unique=True), st.integers(1, 64)
)
def test_jobs_get_their_share_and_gpus_of_their_own(beside, gpus, cores):
    lab = runner.Lab("03", Path("03"), {})
    with patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        given = [planning.variables(job, beside, gpus, cores, lab) for job in range(beside + 1)]
        assert "CUDA_VISIBLE_DEVICES" not in planning.variables(
            0, beside, gpus, cores, runner.Lab("10", Path(), {})
        )
        os.environ["OMP_NUM_THREADS"] = "5"
        assert "OMP_NUM_THREADS" not in planning.variables(0, beside, gpus, cores, lab)
    if not beside:
        assert given == [{}]
        return
    assert {one["LABUTILS_BESIDE"] for one in given} == {str(beside)}
    assert all(1 <= int(one["OMP_NUM_THREADS"]) <= max(1, cores // (beside + 1)) for one in given)
    shown = [one.get("CUDA_VISIBLE_DEVICES") for one in given]
    assert set(shown) <= set(gpus) if len(gpus) > 1 else set(shown) == {None}
    if len(gpus) > 1 and beside < len(gpus):
        assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(
    ("shown", "found"), [("", ["0", "1"]), ("5,2", ["5", "2"]), ("5,2,9", ["5", "2"])]
)
def test_gpus_are_called_as_this_process_was_told(monkeypatch, shown, found):
    monkeypatch.setattr("labutils.training.launcher.gpu_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert planning.visible_gpus() == found


# What has changed


def test_what_has_changed_runs_again_and_prose_is_no_change(notebooks, run):
    path = Path(notebooks("fine"))
    assert run(str(path), only_changed=True)[0] == 0

    def edited(kind: str, more: str) -> str:
        notebook = nbformat.read(path, as_version=4)
        next(cell for cell in reversed(notebook.cells) if cell.cell_type == kind).source += more
        nbformat.write(notebook, path)
        return run(str(path), only_changed=True)[1]

    assert "unchanged since it ran" in edited("markdown", "\nMore words.")
    assert "fine: running (changed: notebook)" in edited("code", "  # mind this")
    assert "unchanged since it ran" in edited("code", "")
    path.write_text(path.read_text().replace("mind this", "mind that"))
    assert (
        "done before" in (said := run(str(path))[1])
        and "since then changed: notebook (--only changed)" in said
    )


@pytest.mark.parametrize(
    ("last", "changed"),
    [
        ({"sources": {"notebook": "a", "labutils": "b"}, "parameters": {"steps": 3}}, []),
        ({"sources": {"notebook": "a", "labutils": "x"}, "parameters": {"steps": 3}}, ["labutils"]),
        (
            {"sources": {"notebook": "a", "labutils": "b"}, "parameters": {"steps": 4}},
            ["parameters"],
        ),
        ({"sources": {}, "parameters": {"steps": 4}}, ["notebook", "labutils", "parameters"]),
        ({"sources": "a", "parameters": {"steps": 3}}, ["unknown"]),
        ({"parameters": {"steps": 3}}, ["unknown"]),
    ],
)
def test_the_last_run_on_record_tells_what_changed(last, changed):
    """Not an earlier one: what lies in the folder is of the last."""
    sources = {"notebook": "a", "labutils": "b"}
    first = {"sources": sources, "parameters": {"steps": 3}}
    assert planning.what_changed([first, last], {"steps": 3}, sources) == changed


def test_every_source_of_the_package_counts(monkeypatch, tmp_path):
    package = tmp_path / "labutils"
    (package / "data").mkdir(parents=True)
    (package / "data" / "files.py").write_text("x = 1")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    seen = [results.code()]
    for change in (
        lambda: (package / "data" / "files.py").write_text("x = 2  # longer"),
        lambda: (package / "course.mplstyle").write_text("lines.linewidth: 2"),
        lambda: (package / "data" / "files.py").rename(package / "files.py"),
    ):
        change()
        seen.append(results.code())
    (package / "notes.txt").write_text("nothing that runs")
    assert len(set(seen)) == len(seen)
    assert results.code() == seen[-1]


def test_how_long_it_took_is_looked_up_at_the_same_scale(tmp_path):
    lab = runner.Lab("03", Path("03"), {})
    for name, scale, seconds in (
        ("a", "full", 400.0),
        ("b", "tiny", 60.0),
        ("b", "tiny", 50.0),
        ("c", "tiny", 70.0),
    ):
        Results(tmp_path / name).done("03", parameters={"scale": scale}, seconds=seconds)
    (tmp_path / "odd" / "results.jsonl").mkdir(parents=True)
    folders = [tmp_path / name for name in ("none", "odd", "a", "b", "c")]
    assert planning.seconds_before(lab, {"scale": "tiny"}, folders) == 50.0
    assert planning.seconds_before(lab, {"scale": "small"}, folders) is None


# What is shown meanwhile


@given(st.text(), st.text(), st.integers(40, 200))
def test_a_running_lab_has_one_line_whatever_its_words(title, section, width):
    file = io.StringIO()
    live = telling._live_lines(Console(file=file, width=width, force_terminal=True, _environ={}))
    words = {"section": telling.one_line(section), "before": "last time 0:01:35"}
    live.add_task(telling.one_line(title)[:27], total=9, completed=3, **words)
    live.console.print(live.get_renderable())
    assert file.getvalue().count("\n") == 1
    assert "last time 0:01:35" in file.getvalue() or width < 70


def test_lines_of_running_labs_make_room_for_what_is_said(notebooks, monkeypatch):
    lab = runner.find([notebooks("fine")])[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr(telling, "_live_lines", partial(telling._live_lines, console))
    with telling.Telling(lambda text: file.write(f"{text}\n")) as voice:
        voice.began("[1/1]", lab, "", 95.0)
        voice.cell(lab, 2, "1 · What happens")
        voice.say("a line of its own")
        voice.ended("[1/1]", runner.Outcome(lab, "done", 3.2))
    shown = file.getvalue()
    assert re.search(r"fine +cell 2 of 3 +1 · What happens .*0:00:00.* +last time 0:01:35", shown)
    for said in (
        "a line of its own",
        r"\[1/1\] fine: done in 3 s",
    ):  # after what was on the line is wiped off
        assert re.search(rf"\x1b\[2K(\x1b\[\?25h)?\r?{said}\n", shown)
    assert "\x1b[?25h" in shown.rpartition("\x1b[?25l")[2]  # and the cursor is back


def test_where_nobody_watches_there_are_plain_lines_only(notebooks, capsys):
    lab = runner.find([notebooks("fine")])[0]
    with telling.Telling(print) as voice:
        voice.began("[1/1]", lab, "", None)
        voice.cell(lab, 2, "")
        voice.ended("[1/1]", runner.Outcome(lab, "failed", 3.2, "It failed."))
    assert capsys.readouterr() == ("[1/1] fine: running\nIt failed.\n", "")


@pytest.mark.parametrize(
    ("asked", "said"),
    [("auto", "the largest that fits"), ("tiny", "Scale tiny."), ("full", "fits tiny")],
)
def test_the_scale_is_explained(notebooks, run, monkeypatch, asked, said):
    monkeypatch.setattr("labutils.tools.run.asking.machine_facts", dict)
    assert said in run(notebooks("fine"), scale=asked)[1].splitlines()[0]


@pytest.mark.parametrize(
    ("number", "times", "jobs"),
    [(signal.SIGINT, 1, 2), (signal.SIGTERM, 1, 1), (signal.SIGINT, 2, 2)],
)
def test_a_stop_ends_the_kernels_keeps_results_and_says_how_to_go_on(
    notebooks, results_folder, number, times, jobs
):
    other = troubled_notebooks.write(
        Path(notebooks("fine")).parent, "other", "sleeps" if jobs > 1 else "fine"
    )
    command = [
        sys.executable,
        "-m",
        "labutils.cli",
        "run",
        str(other),
        notebooks("sleeps"),
        notebooks("raises"),
    ]
    command += [
        "--scale",
        "tiny",
        "--results",
        str(results_folder),
        "-p",
        "steps",
        "5",
        "--jobs",
        str(jobs),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for(
            lambda: {("sleeps", "first"), ("other", "first")} <= set(read_runs(results_folder))
        )
        kernels = psutil.Process(process.pid).children(recursive=True)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.05)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    assert "raises  not run" in said
    assert "-p steps 5" in said.splitlines()[-1]
    assert f"--results {results_folder}" in said.splitlines()[-1]
    assert f"sleeps  {'stopped':11}" in said and (jobs == 1 or f"other   {'stopped':11}" in said)
    assert ("--jobs 2" in said.splitlines()[-1]) == (jobs == 2)
    _, alive = psutil.wait_procs(kernels, timeout=10)
    assert kernels
    assert not alive


def test_all_that_is_left_of_the_labs_has_one_deadline(monkeypatch):
    now = 0.0

    class Stuck:
        start = Mock()

        def join(self, seconds: float) -> None:
            nonlocal now
            now += seconds

    monkeypatch.setattr(batch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(batch, "signal", Mock())
    with pytest.raises(KeyboardInterrupt), batch._joined([Stuck() for _ in range(8)]):
        raise KeyboardInterrupt
    assert now == batch.PATIENCE_S


def wait_for(condition, seconds: float = 30.0) -> None:
    """Until `condition()` holds; an error after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_messages_name_paths_as_typed_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert asking.short(tmp_path / "results") == "results"
    assert asking.short(Path("/elsewhere")) == "/elsewhere"


def test_each_lab_runs_at_the_scale_that_fits_it(monkeypatch):
    monkeypatch.setattr(
        "labutils.tools.run.asking.machine_facts",
        lambda: {"gpu": "RTX 6000 Ada", "gpu_memory_gb": 51.0},
    )
    labs = runner.find(["03", "06", "07", "10"])
    scales, said = asking.scales_of("auto", labs)
    assert scales == {"03": "full", "06": "small", "07": "small", "10": "tiny"}
    assert said == "small, full for 03, tiny for 10 (the largest that fits this machine)"
    scales, said = asking.scales_of("full", labs)
    assert set(scales.values()) == {"full"}
    assert said == "full (this machine fits small, tiny for 10: expect long waits or failures)"
    assert asking.scales_of("tiny", labs)[1] == "tiny"
