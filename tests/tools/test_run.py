"""`labutils run`: usage is checked first, failures are told apart, and nothing measured is lost."""

import fcntl
import json
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
import troubled_notebooks
from hypothesis import given
from hypothesis import strategies as st

from labutils.course import parameters
from labutils.results.records import Run, read_runs
from labutils.tools import run as runner
from labutils.tools.run import Options, UsageError, batch, kernel, validation


@pytest.fixture
def notebook(tmp_path):
    """Name -> path of a freshly written troubled notebook."""
    return lambda name, trouble=None: troubled_notebooks.write(tmp_path, name, trouble)


@pytest.fixture
def run(results_folder):
    """Run notebooks at tiny: (exit code, everything said)."""

    def call(*labs: str, **options) -> tuple[int, str]:
        said: list[str] = []
        asked = {"scale": "tiny", "results": results_folder, **options}
        return runner.run(labs, Options(**asked), said.append), "\n".join(said)

    return call


def kept_run(folder: Path, lab: str, name: str) -> Run:
    (run,) = [run for run in read_runs(folder, lab) if run.run == name]
    return run


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"given": {"stepz": "3"}}, "steps"),
        ({"given": {"steps": "many"}}, "many"),
        ({"given": {"steps": "2.5"}}, "whole"),
        ({"given": {"loud": "0"}}, "true"),
        ({"given": {"scale": "tiny"}}, "--scale"),
        ({"scale": "huge"}, "small"),
        ({"results": Path("/proc/results")}, "--results"),
        ({"results": Path("~nosuchuser/x")}, "--results"),
        ({"results": Path("x" * 300)}, "--results"),
    ],
)
def test_wrong_usage_is_refused_and_leaves_nothing_behind(
    notebook, run, results_folder, options, word
):
    with pytest.raises(UsageError, match=word):
        run(notebook("fine"), **options)
    assert not results_folder.exists()


def test_a_lab_is_called_by_number_name_or_path(tmp_path, notebook):
    path = notebook("03_sleepy_workers", "fine")
    notebook("04_other", "fine")
    for name in ("03", "3", "03_sleepy_workers", path):
        assert [lab.number for lab in runner.find([name, name], tmp_path)] == ["03"]
    assert [lab.number for lab in runner.find([], tmp_path)] == ["03", "04"]
    (tmp_path / "05_torn.ipynb").write_text('{"cells": [')
    (tmp_path / "copies").mkdir()
    copy = troubled_notebooks.write(tmp_path / "copies", "03_sleepy_workers", "fine")
    for names, word in ((["6"], "sleepy"), (["05"], "torn"), (["03", copy], "both")):
        with pytest.raises(UsageError, match=word):
            runner.find(names, tmp_path)


def test_executed_notebooks_never_replace_the_labs(run, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    path = Path(troubled_notebooks.write(tmp_path / "notebooks", "fine"))
    before = path.read_bytes()
    for place in (tmp_path, tmp_path / "link", Path(validation.records.REPOSITORY)):
        with pytest.raises(UsageError, match="replace"):
            run(str(path), results=place)
    assert path.read_bytes() == before


def test_two_runs_do_not_share_a_folder(notebook, run, results_folder):
    assert run(notebook("fine"))[0] == 0
    with (results_folder / "notebooks" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another"):
            run(notebook("fine"))


@given(st.text(), st.sampled_from(sorted(parameters.KINDS)))
def test_a_word_becomes_a_value_of_the_declared_type_or_is_refused(word, kind):
    try:
        value = parameters.read("knob", word, kind)
    except ValueError:
        assert kind != "str"
    else:
        assert type(value) is parameters.KINDS[kind]


def test_a_lab_gets_its_parameters_and_this_interpreter(notebook, run, results_folder, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # figures would vanish
    code, said = run(notebook("fine"), given={"steps": "5", "loud": "true"})
    assert code == 0, said
    metrics = kept_run(results_folder, "fine", "first").metrics
    assert (metrics["steps"], metrics["loud"], metrics["python"]) == (5, True, sys.executable)
    assert "inline" in metrics["MPLBACKEND"]
    executed = nbformat.read(results_folder / "notebooks" / "fine.ipynb", as_version=4)
    assert executed.metadata.labutils["status"] == "done"
    assert str(results_folder.parent) not in repr(executed.metadata.papermill)
    assert "fine" in (results_folder / "index.html").read_text()


def test_failures_are_told_apart_and_the_other_labs_still_run(notebook, run, results_folder):
    names = ["raises", "exits", "killed", "bus", "quits", "fine"]
    code, said = run(*map(notebook, names))
    assert code == 1
    begun = ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"]
    for word in ["3 x 4", "exit code 3", "memory", "--shm-size", *begun]:
        assert word in said
    assert {kept.lab for kept in read_runs(results_folder)} == set(names)
    for name in names:
        executed = nbformat.read(results_folder / "notebooks" / f"{name}.ipynb", as_version=4)
        status = {"fine": "done", "raises": "failed", "quits": "failed"}.get(name, "died")
        assert executed.metadata.labutils["status"] == status
    # What a kernel started ends with it, in a session of its own, too.
    pids = kept_run(results_folder, "exits", "ranks").samples["pids"]
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_a_lab_is_done_until_its_code_or_its_parameters_change(notebook, run):
    path = Path(notebook("fine"))
    assert run(str(path))[0] == 0
    assert "done before" in run(str(path))[1]
    assert "done before" not in run(str(path), force=True)[1]
    assert "done before" not in run(str(path), given={"steps": "4"})[1]
    written = nbformat.read(path, as_version=4)
    written.cells[1].source += "\nMore prose."
    nbformat.write(written, path)
    assert "done before" in run(str(path), given={"steps": "4"})[1]
    written.cells[-1].source += " + 1"
    nbformat.write(written, path)
    assert "done before" not in run(str(path), given={"steps": "4"})[1]


@pytest.mark.parametrize(("trouble", "code"), [("killed", 1), ("stops", 130)])
def test_a_forced_lab_that_did_not_end_is_not_done(notebook, run, trouble, code):
    assert run(notebook("fine"))[0] == 0
    assert run(notebook("fine", trouble), notebook("raises"), force=True)[0] == code
    assert "done before" not in run(notebook("fine"))[1]


def test_a_run_that_was_cut_off_is_not_done(notebook, run, results_folder):
    assert run(notebook("fine"))[0] == 0
    kernel.part_of(results_folder / "notebooks" / "fine.ipynb").touch()
    assert "done before" not in run(notebook("fine"))[1]


def test_a_disk_that_refuses_leaves_the_earlier_notebook_whole(notebook, run, results_folder):
    assert run(notebook("fine"))[0] == 0
    output = results_folder / "notebooks" / "fine.ipynb"
    before = output.read_bytes()
    kernel.part_of(output).mkdir()  # it can't be written, as on a full disk
    code, said = run(notebook("fine"), force=True)
    assert code == 1 and "could not be run" in said
    assert output.read_bytes() == before


def test_a_lab_that_takes_too_long_is_ended(notebook, run, results_folder):
    code, said = run(notebook("sleeps"), timeout=4)
    assert code == 1 and "--timeout 8" in said
    stamp = json.loads((results_folder / "notebooks" / "sleeps.ipynb").read_text())["metadata"]
    assert stamp["labutils"]["status"] == "timed out"


def test_labs_run_at_once_and_say_so(notebook, run, results_folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code, said = run(notebook("meets"), notebook("also", "meets"), jobs=2)
    assert code == 0, said
    runs = list(read_runs(results_folder))
    assert [run.beside for run in runs] == [1, 1]
    assert all(int(run.metrics["OMP_NUM_THREADS"]) >= 1 for run in runs)


@given(st.sets(st.integers(0, 12)), st.integers(1, 20), st.integers(0, 9))
def test_every_lab_runs_once_and_lab_11_after_all_others(numbers, jobs, gpus):
    labs = [runner.Lab(f"{number:02}", Path()) for number in numbers]
    order = [lab.number for group in batch.groups(labs, jobs, gpus) for lab in group]
    assert sorted(order) == sorted(lab.number for lab in labs)
    assert "11" not in order or order[-1] == "11"


def test_a_kernel_ended_before_it_started_starts_nothing(notebook, run, results_folder):
    code, said = run(notebook("fine"), timeout=1e-6)
    assert code == 1 and "limit" in said
    assert not read_runs(results_folder)
