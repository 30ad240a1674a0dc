"""What a notebook calls: parameters checked, results kept at once, failures survived, predictions
scored.
"""

from __future__ import annotations

import gc
import weakref

import nbformat
import pytest
from nbclient import NotebookClient

from labutils.course import lab as course
from labutils.course import parameters
from labutils.course.lab import LabError, open_lab
from labutils.course.predictions import scores_of
from labutils.profiling.machine import machine_facts
from labutils.recipe import STOCK, Unavailable
from labutils.results import records as results
from labutils.results.records import Results, Run, read_records, read_runs

PARAMETERS = {"scale": "tiny", "weights": "random", "data": "generated", "results_dir": ""}


def notebook(own: dict | None = None, cells: tuple[str, ...] = (), **values) -> dict:
    """The globals of a notebook whose parameters cell declares the usual four and `own` (name ->
    type).
    """
    kinds = dict.fromkeys(PARAMETERS, str) | (own or {})
    return PARAMETERS | values | {"__annotations__": kinds, "In": ["", *cells]}


@pytest.fixture
def lab():
    return open_lab("03", notebook())


@pytest.fixture
def reference(tmp_path, monkeypatch):
    """A reference of one good run, on two days."""
    kept = Results(tmp_path / "reference" / "h200")
    for day, workers in (("2026-01-03", 3), ("2026-01-02", 4)):
        run = Run("03", f"{workers} workers", scale="full", machine={"gpu": "NVIDIA H"}, at=day)
        run.tags = {"experiment": "workers", "workers": workers}
        run.metrics = {"step_ms": {"median": 625.0}, "note": "x", "wall_ms": 5000}
        kept.append(run)
    monkeypatch.setattr(results, "REFERENCE", kept.path)


# Parameters


@pytest.mark.parametrize(
    ("name", "value", "kind", "takes"),
    [
        ("scale", "huge", str, "auto, tiny, small, full"),
        ("weights", True, str, "words"),
        ("loud", "false", bool, "true or false"),
        ("steps", "3", int, "whole number"),
        ("rate", float("nan"), float, "finite"),
        ("steps", -1, int, "0 or more"),
        ("batches", "0 4", str, "whole numbers"),
        ("batches", "9" * 5000, str, "whole numbers"),
    ],
)
def test_a_parameter_that_is_not_what_it_should_be_is_refused(name, value, kind, takes):
    with pytest.raises(LabError, match=f"{name} is .* but it takes .*{takes}"):
        open_lab("06", notebook({name: kind}, **{name: value}))


def test_a_name_that_no_parameters_cell_declares_is_refused(results_folder):
    with pytest.raises(LabError, match="no parameter stepz. Its parameters: scale"):
        open_lab("03", notebook(cells=("# Parameters\nstepz = 5\n",)))
    assert not results_folder.exists()
    for last in ("# Parameters\nscale = 'tiny'\n", "# Parameters\nscale = \n"):  # since corrected
        assert open_lab("03", notebook(cells=("# Parameters\nstepz = 5\n", "", last)))


def test_parameters_reach_the_lab(capsys):
    own = {"steps": int, "rate": "float", "my_guess": float | None, "xs": list[int]}
    cells = ("# Parameters\nsteps = 5\n",)
    lab = open_lab(3, notebook(own, cells, steps=5, rate=2, my_guess=None, xs=[]))
    common = {"scale": "tiny", "weights": "random", "data": "generated"}
    assert lab.parameters == common | {"steps": 5, "rate": 2.0}
    assert (lab.number, lab.scale) == ("03", "tiny")
    assert "Lab 03" in capsys.readouterr().out


def test_whole_numbers_are_sorted_and_each_is_there_once():
    assert parameters.whole_numbers("batches", "24 1,4  4") == [1, 4, 24]


def test_auto_is_the_scale_that_fits_and_a_larger_one_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(course, "machine_facts", lambda: {"gpu": "Small", "gpu_memory_gb": 12.0})
    assert open_lab("03", notebook(scale="auto")).scale == "small"
    assert "expect long waits" not in capsys.readouterr().out
    open_lab("03", notebook(scale="full"))
    assert "expect long waits" in capsys.readouterr().out


def test_opening_a_lab_again_goes_on_with_it(tmp_path):
    """The first cells run twice: only other parameters, or another lab, begin anew."""
    space = notebook({"steps": int}, steps=3)
    lab = space["lab"] = open_lab("03", space)
    assert open_lab("03", space) is lab
    elsewhere = space | {"results_dir": str(tmp_path / "own")}
    for number, other in (("04", space), ("03", space | {"steps": 5}), ("03", elsewhere)):
        assert open_lab(number, other) is not lab


def test_where_results_go(tmp_path, monkeypatch, results_folder):
    asked = tmp_path / "my results"
    assert open_lab("03", notebook(results_dir=str(asked))).results_dir == asked
    assert open_lab("03", notebook()).results_dir == results_folder
    monkeypatch.delenv("LABUTILS_RESULTS")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    assert open_lab("03", notebook()).results_dir.parent == tmp_path / "results"
    with pytest.raises(LabError, match="Set results_dir"):
        open_lab("03", notebook(results_dir="/proc/nowhere"))


# What is kept


def test_a_kept_run_is_stamped_and_on_disk_at_once(lab):
    tags = {"experiment": "workers", "workers": 3}
    run = Run("", "", workload="sd15-lora", scale="small", tags=tags)
    lab.keep({"3 workers": run, "my own again": Run("", "")}, lane="same work")
    kept, own = read_runs(lab.results_dir)
    assert (kept.lab, kept.run, kept.scale, kept.lane) == ("03", "3 workers", "small", "same work")
    assert kept.tags == tags and own.scale == "tiny" and own.tags == {"experiment": "my own"}
    assert kept.machine == machine_facts()
    assert kept.versions["torch"] and kept.commit and kept.at
    assert kept.notebook.startswith("03_")
    with pytest.raises(LabError, match="same work"):
        lab.keep([run], lane="same works")
    assert len(read_runs(lab.results_dir)) == 2


@pytest.fixture
def measure():
    """Makes a run of `STOCK`, and counts how often it was asked to."""

    def call() -> Run:
        call.times += 1
        recipe = STOCK.fitted_to("cpu").as_dict()
        return Run("", "", workload="sd15-lora", recipe=recipe, metrics={"n": call.times})

    call.times = 0
    return call


def test_an_interrupted_lab_goes_on_with_what_it_measured(measure):
    assert open_lab("03", notebook()).measured("a", STOCK, measure).metrics == {"n": 1}
    again = open_lab("03", notebook())
    assert again.measured("a", STOCK, measure).metrics == {"n": 1}
    assert again.measured("a", STOCK, measure).metrics == {"n": 2}  # the cell was run once more
    together = open_lab("03", notebook()).measured_together(
        {"a": STOCK, "b": STOCK}, lambda: {name: measure() for name in "ab"}
    )
    assert [together[name].metrics["n"] for name in "ab"] == [3, 4]  # all as they were left or none


CHANGES = ["recipe", "scale", "code", "machine", "status", "done", "lab", "notebook"]


@pytest.mark.parametrize("change", [*CHANGES, ""])
def test_what_was_left_is_taken_only_if_nothing_changed(change, measure, monkeypatch):
    first = open_lab("03", notebook())
    run = first.measured("a", STOCK, measure)
    facts = machine_facts() | ({"cpu": "another"} if change == "machine" else {"ram_gb": 31.0})
    monkeypatch.setattr(course, "machine_facts", lambda: facts)
    if change == "status":
        run.status = "error: ValueError: by chance"
        first.keep(run)
    elif change == "done":
        first.done({})
    elif change == "code":
        monkeypatch.setattr(results, "code", lambda: "another")
    elif change == "notebook":
        monkeypatch.setenv(results.SOURCES, '{"notebook": "2", "labutils": "1"}')
    scale, number = "small" if change == "scale" else "tiny", "04" if change == "lab" else "03"
    again = open_lab(number, notebook(scale=scale))
    recipe = STOCK.but(rank=8) if change == "recipe" else STOCK
    assert again.measured("a", recipe, measure).metrics == {"n": 2 if change else 1}


def test_out_of_memory_is_a_result_of_a_recipe_only(lab, measure):
    lab.keep(Run("03", "a", status="oom", recipe=STOCK.fitted_to("cuda").as_dict()))
    lab.keep(Run("03", "b", status="oom"))
    again = open_lab("03", notebook())
    assert again.measured("a", STOCK, measure).status == "oom"
    assert again.measured("b", None, measure).metrics == {"n": 1}


def test_predictions_are_kept_and_scored(lab, capsys):
    lab.predict("best number of workers", 4)
    lab.predict("step at 0 workers", None, "ms")
    lab.predict("step at 3 workers", 100.0, "ms")
    here = {"best number of workers": 2, "step at 0 workers": 3.0, "step at 3 workers": None}
    lab.done(here, ours={"step at 3 workers": 50.0, "best number of workers": 3})
    kept = read_records(lab.results_dir)
    assert [r["status"] for r in kept] == [*2 * ["prediction"], *2 * ["score"], "done"]
    told = scores_of(kept)[["topic", "measured", "on"]].to_numpy().tolist()
    assert told == [["best number of workers", 2, ""], ["step at 3 workers", 50, "H200"]]
    said = capsys.readouterr().out
    assert "No prediction of *step at 0 workers*" in said and "2.00x too high" in said
    assert "| step at 0 workers | – | 3 ms | – |" in said
    for value in ("three", True, [3], float("nan"), 10**400):
        with pytest.raises(LabError, match="finite number of ms, or None"):
            lab.predict("step", value, "ms")


# What fails here

THREE = {"experiment": "workers", "workers": 3}


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", "Out of memory"),
        (Unavailable("it needs a GPU"), "skipped: it needs a GPU", "left out"),
        (ImportError("No module named 'x'"), "skipped: ImportError", "labutils doctor"),
        (ValueError("bad\nsecond line"), "error: ValueError: bad second", "labutils doctor"),
    ],
)
def test_a_failure_is_kept_told_and_survived(lab, reference, capsys, error, status, told):
    with lab.attempt("3 workers", **THREE):
        raise error
    assert read_runs(lab.results_dir).one("03", **THREE).status.startswith(status)
    said = capsys.readouterr().out
    assert told in said
    assert "| step_ms | 625 |" in said and "wall_ms" not in said


def test_a_cell_that_cannot_run_shows_what_it_printed_on_our_gpu(tmp_path, monkeypatch):
    """In a kernel, as a learner meets it; a cell that was edited since, or that our GPU skipped as
    well, shows nothing recorded."""
    start = (
        "from pathlib import Path\n"
        "from labutils.course.lab import Lab\n"
        "from labutils.recipe import Unavailable\n"
        "from labutils.results import records\n"
        f"records.REFERENCE = Path({str(tmp_path / 'h200' / 'results.jsonl')!r})\n"
        "lab = Lab('03', {'scale': 'tiny'}, records.Results(Path('kept')))"
    )
    cell = "with lab.attempt('it'):\n    raise Unavailable('no GPU')"
    printed = nbformat.v4.new_output("stream", text="7 ms\n")
    drawn = nbformat.v4.new_output("display_data", data={"image/png": "iVBORw0KGgo="})
    codes = (cell, cell.replace("'it'", "'skipped'"))
    done = [nbformat.v4.new_code_cell(code, outputs=[printed, drawn]) for code in codes]
    there, card = Results(tmp_path / "h100"), {"gpu": "NVIDIA H100 80GB HBM3"}
    for run, status in (("it", "ok"), ("skipped", "skipped: no GPU")):
        there.append(Run("03", run, status=status, tags={"experiment": run}, machine=card))
    nbformat.write(nbformat.v4.new_notebook(cells=done), tmp_path / "h100" / "03_sweep.ipynb")
    cells = [nbformat.v4.new_code_cell(code) for code in (start, *codes, cell + "  # edited")]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    ran = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    outputs = [[o.get("text") or dict(o["data"]) for o in c.outputs] for c in ran.cells[1:]]
    assert outputs[0][-2:] == ["7 ms\n", {"image/png": "iVBORw0KGgo="}]
    assert "On our H100 this cell printed" in str(outputs[0])
    assert "7 ms" not in (told := str(outputs[1:])) and told.count("not on this machine") == 2


def test_what_worked_is_not_recorded_as_failed(lab):
    with lab.attempt("sweep", **THREE):
        lab.keep(Run("", "3 workers", metrics={"step_ms": 5.0}, tags=THREE))
        raise ValueError("the plot failed")
    with lab.attempt("fine"):
        pass
    assert [run.status for run in read_runs(lab.results_dir)] == ["ok"]


def test_what_filled_the_memory_is_let_go(lab):
    class Tensor:
        pass

    alive = []

    def fill():
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        try:
            raise KeyError("first")
        except KeyError:
            raise MemoryError from None

    with lab.attempt("fill"):
        fill()
    gc.collect()
    assert alive[0]() is None


def test_ctrl_c_is_not_a_failure(lab):
    with pytest.raises(KeyboardInterrupt), lab.attempt("long"):
        raise KeyboardInterrupt
    assert not read_runs(lab.results_dir)


# What it shows


def test_tables_of_the_reference_stand_beside_ours(lab, reference, capsys, monkeypatch):
    def shown(**tags):
        lab.show([], {"workers": "workers", "step_ms": "ms"}, **tags)
        return capsys.readouterr().out

    capsys.readouterr()
    assert lab.reference(**THREE).at == "2026-01-03" and lab.reference(workers=99) is None
    assert "H**, scale full, 2026-01-02 to 2026-01-03:" in shown(experiment="workers")
    assert "our" not in shown(experiment="never run")
    own = lab.keep(Run("", "3", metrics={"step_ms": 5.0}, tags=THREE))
    capsys.readouterr()
    lab.show([own], {"workers": "workers", "step_ms": "ms"}, **THREE)
    said = capsys.readouterr().out
    assert "| 3 | 5 |" in said and "| 3 | 625 |" in said
    monkeypatch.setattr(results, "REFERENCE", lab.results_dir / "results.jsonl")
    assert "H**" not in shown(**THREE)  # what becomes the reference is not shown beside itself


def test_a_solution_is_shown_on_request(lab, capsys):
    lab.solution("06.1")
    assert 'print(check("06.1"' in capsys.readouterr().out
    for wrong in ("06.9", "6", "06.", "x.1", "06.0"):
        with pytest.raises(LabError, match="There is no solution"):
            lab.solution(wrong)


def test_choices_are_offered_where_somebody_can_choose(monkeypatch):
    """With the real widgets: each begins with its first value, and everything is drawn once."""
    drawn = []

    def draw(article, power):
        drawn.append((article, power))

    choices = {"article": ["all", "A1"], "power": range(-2, 3)}
    assert not open_lab("12", notebook()).choose(draw, choices)  # a script
    cell = nbformat.v4.new_code_cell("from labutils.course import lab; lab._somebody_answers()")
    done = NotebookClient(nbformat.v4.new_notebook(cells=[cell]), kernel_name="python3").execute()
    assert done.cells[0].outputs[0]["data"]["text/plain"] == "False"  # a widget made it wait
    monkeypatch.setattr(course, "_somebody_answers", lambda: True)
    assert open_lab("12", notebook()).choose(draw, choices)
    assert drawn == [("all", -2)]
