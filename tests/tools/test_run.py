"""`labutils run`: usage is checked first, failures are told apart, and nothing measured is lost."""

import dataclasses
import fcntl
import signal
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
import troubled_notebooks

from labutils.results.records import REPOSITORY, Run, read_runs
from labutils.tools import run as runner
from labutils.tools.run import Options, UsageError, execute_lab, labs_in_order


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


def status_of(results: Path, name: str) -> str:
    """What the executed notebook says about its run."""
    executed = nbformat.read(results / "notebooks" / f"{name}.ipynb", as_version=4)
    return executed.metadata.labutils["status"]


def kept_run(folder: Path, lab: str, name: str) -> Run:
    (run,) = [run for run in read_runs(folder, lab) if run.run == name]
    return run


def test_a_lab_is_called_by_number_name_or_path(tmp_path, notebook):
    path = notebook("03_sleepy_workers", "fine")
    notebook("00_other", "fine")
    for name in ("03", "3", "03_sleepy_workers", path):
        assert [lab.number for lab in runner.find([name, name], tmp_path)] == ["03"]
    assert [lab.number for lab in runner.find([], tmp_path)] == ["00", "03"]
    (tmp_path / "05_torn.ipynb").write_text('{"cells": [')
    (tmp_path / "copies").mkdir()
    copy = troubled_notebooks.write(tmp_path / "copies", "03_sleepy_workers", "fine")
    for names, word in (([""], "03"), (["6"], "sleepy"), (["05"], "torn"), (["03", copy], "both")):
        with pytest.raises(UsageError, match=word):
            runner.find(names, tmp_path)


def test_executed_notebooks_never_replace_the_labs(run, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    path = Path(troubled_notebooks.write(tmp_path / "notebooks", "fine"))
    before = path.read_bytes()
    for place in (tmp_path, tmp_path / "link", REPOSITORY):
        with pytest.raises(UsageError, match="replace"):
            run(str(path), results=place)
    assert path.read_bytes() == before


def test_a_lab_gets_its_parameters_and_this_interpreter(notebook, run, results_folder, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # figures would vanish
    asked = {"given": {"steps": "5", "loud": "true"}}
    code, said = run(notebook("fine"), **asked)
    assert code == 0, said
    metrics = kept_run(results_folder, "fine", "first").metrics
    assert (metrics["steps"], metrics["loud"], metrics["python"]) == (5, True, sys.executable)
    assert "inline" in metrics["backend"]
    assert metrics["transport"] == "ipc"  # a port can be taken before the kernel binds it
    output = results_folder / "notebooks" / "fine.ipynb"
    assert str(results_folder.parent) not in repr(nbformat.read(output, 4).metadata.papermill)
    assert "[A] lab &lt;meta&gt;" in (results_folder / "index.html").read_text()

    assert "done before" in run(notebook("fine"), **asked)[1]
    with (results_folder / "notebooks" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another"):
            run(notebook("fine"))

    # A disk that refuses leaves the earlier notebook whole.
    before = output.read_bytes()
    execute_lab.part_of(output).mkdir()
    code, said = run(notebook("fine"), force=True)
    assert code == 1 and "could not be run" in said
    assert output.read_bytes() == before


def test_a_lab_is_done_until_its_code_or_its_parameters_change(notebook, tmp_path):
    path = Path(notebook("fine"))
    (lab,) = runner.find([str(path)])
    output = tmp_path / "executed.ipynb"

    def stamped(status: str) -> Path:
        executed = nbformat.read(path, as_version=4)
        stamp = {"status": status, "code": lab.code, "parameters": {"steps": 4}}
        executed.metadata["labutils"] = stamp
        nbformat.write(executed, output)
        return output

    assert not labs_in_order.is_done(lab, {"steps": 4}, output)
    assert labs_in_order.is_done(lab, {"steps": 4}, stamped("done"))
    assert not labs_in_order.is_done(lab, {"steps": 5}, output)
    assert not labs_in_order.is_done(dataclasses.replace(lab, number="12"), {"steps": 4}, output)
    written = nbformat.read(path, as_version=4)
    for cell, same in ((1, True), (-1, False)):  # prose, then code
        written.cells[cell].source += "\n# more"
        nbformat.write(written, path)
        assert labs_in_order.is_done(*runner.find([str(path)]), {"steps": 4}, output) == same
    execute_lab.part_of(output).touch()  # a later run was cut off
    assert not labs_in_order.is_done(lab, {"steps": 4}, output)
    execute_lab.part_of(output).unlink()
    assert not labs_in_order.is_done(lab, {"steps": 4}, stamped("stopped"))


def test_failures_are_told_apart_and_the_other_labs_still_run(notebook, run, results_folder):
    names = ["raises", "exits", "killed", "bus", "quits", "fine"]
    code, said = run(*map(notebook, names))
    assert code == 1
    begun = ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"]
    for word in ["3 x 4", "exit code 3", "memory", "--shm-size", *begun]:
        assert word in said
    assert "\x1b" not in said  # a terminal would obey it
    for page in ("index.html", "notebooks/raises.html"):
        assert "3 x 4" in (results_folder / page).read_text()
    assert {kept.lab for kept in read_runs(results_folder)} == set(names)
    for name in names:
        status = {"fine": "done", "raises": "failed", "quits": "failed"}.get(name, "died")
        assert status_of(results_folder, name) == status
    # What a kernel started ends with it, in a session of its own, too.
    pids = kept_run(results_folder, "exits", "ranks").samples["pids"]
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_ctrl_c_ends_the_lab_that_runs_and_starts_no_other(notebook, run, results_folder):
    code, said = run(notebook("stops"), notebook("fine"))
    assert code == runner.STOPPED
    assert status_of(results_folder, "stops") == "stopped"
    assert [kept.lab for kept in read_runs(results_folder)] == ["stops"]
    assert str(results_folder) in said.splitlines()[-1]
    assert not list(results_folder.parent.glob("results-*"))  # what it had put into /tmp


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with labs_in_order._Stop(print) as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("limit", [3, 1e-6])
def test_a_lab_that_takes_too_long_is_ended(notebook, run, results_folder, limit, monkeypatch):
    """Also one whose kernel is not there yet."""
    monkeypatch.setattr(execute_lab, "GRACE_S", 1)
    code, said = run(notebook("sleeps"), timeout=limit)
    assert code == 1 and f"--timeout {2 * limit:g}" in said
    assert status_of(results_folder, "sleeps") == "timed out"
