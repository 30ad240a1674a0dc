"""What a notebook calls: parameters checked, results kept at once, failures survived, predictions
scored.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest

from labutils.course import lab as course
from labutils.course.lab import LabError, open_lab
from labutils.profiling import cuda
from labutils.profiling.machine import default_device, machine_facts
from labutils.recipe import STOCK, Unavailable
from labutils.results import records as results
from labutils.results.records import Results, Run, read_records, read_runs
from labutils.tools import run as runner

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
    """A reference of one good run and one that ran out of memory."""
    kept = Results(tmp_path / "reference")
    kept.append(
        Run(
            "03",
            "workers=3",
            scale="full",
            metrics={"step_ms": {"median": 625.0}, "note": "x"},
            machine={"gpu": "H"},
        )
    )
    kept.append(Run("03", "too big", status="oom"))
    monkeypatch.setattr(results, "REFERENCE", kept.path)


# Parameters


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        (notebook(scale="huge"), "scale is 'huge', but it takes one of: auto, tiny, small, full"),
        (notebook(weights=True), "weights is True, a bool, but it takes words"),
        (
            notebook(own={"loud": bool}, loud="false"),
            "loud is 'false', a text, but it takes true or false",
        ),
        (
            notebook(own={"steps": int}, steps=True),
            "steps is True, a bool, but it takes a whole number",
        ),
        (notebook(own={"steps": int}, steps="3"), "steps is '3', a text"),
        (notebook(own={"rate": float}, rate=float("nan")), "rate is nan"),
        (
            notebook(cells=("# Parameters\nstepz = 5\n",)),
            "no parameter stepz. Its parameters: scale, weights, data",
        ),
    ],
)
def test_a_parameter_that_is_not_what_it_should_be_is_refused(namespace, message, results_folder):
    with pytest.raises(LabError, match=message):
        open_lab("03", namespace)
    assert not results_folder.exists()


def test_parameters_reach_the_lab(capsys):
    lab = open_lab(
        "03",
        notebook({"steps": int, "rate": "float"}, ("# Parameters\nsteps = 5\n",), steps=5, rate=2),
    )
    assert lab.parameters == {
        "scale": "tiny",
        "weights": "random",
        "data": "generated",
        "steps": 5,
        "rate": 2.0,
    }
    assert (lab.number, lab.scale, lab.weights, lab.data) == ("03", "tiny", "random", "generated")
    assert "Lab 03" in capsys.readouterr().out


def test_auto_is_the_scale_that_fits_and_a_larger_one_is_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(
        "labutils.course.lab.machine_facts", lambda: {"gpu": "Small", "gpu_memory_gb": 12.0}
    )
    assert open_lab("03", notebook(scale="auto")).scale == "small"
    assert "expect long waits" not in capsys.readouterr().out
    open_lab("03", notebook(scale="full"))
    assert "full is meant for a GPU of 40 GB; small fits this machine" in capsys.readouterr().out


def test_a_parameter_that_was_corrected_is_forgotten():
    """A cell of papermill's that was changed and run again; one that is no Python assigned nothing."""
    for last in ("# Parameters\nscale = 'tiny'\n", "# Parameters\nscale = \n"):
        assert (
            open_lab("03", notebook(cells=("# Parameters\nstepz = 5\n", "", last))).scale == "tiny"
        )


def test_opening_a_lab_again_goes_on_with_it(tmp_path, monkeypatch):
    """The first cells run twice: only other parameters, or another lab, begin anew."""
    monkeypatch.delenv("LABUTILS_RESULTS")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    space = notebook({"steps": int}, steps=3)
    lab = space["lab"] = open_lab("03", space)
    lab.predict("steps", 4.0)
    assert open_lab("03", space) is lab
    for other in (
        ("04", space),
        ("03", space | {"steps": 5}),
        ("03", space | {"results_dir": str(tmp_path / "own")}),
    ):
        assert open_lab(*other) is not lab
    monkeypatch.setenv("LABUTILS_RESULTS", str(tmp_path / "elsewhere"))
    assert open_lab("03", space).results_dir == tmp_path / "elsewhere"


def test_where_results_go(tmp_path, monkeypatch, results_folder):
    assert (
        open_lab("03", notebook(results_dir=str(tmp_path / "asked"))).results_dir
        == tmp_path / "asked"
    )
    assert open_lab("03", notebook()).results_dir == results_folder
    monkeypatch.delenv("LABUTILS_RESULTS")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    assert open_lab("03", notebook()).results_dir.parent == tmp_path / "results"
    with pytest.raises(LabError, match="Results can't be kept in .* Set results_dir"):
        open_lab("03", notebook(results_dir="/proc/nowhere"))


# What is kept


def test_a_kept_run_is_stamped_and_on_disk_at_once(lab):
    run = Run("", "workers=3", lane="same work", workload="sd15-lora", scale="small")
    assert lab.keep(run) is run
    kept = read_runs(lab.results_dir)["03", "workers=3"]
    assert (kept.lab, kept.scale, kept.lane) == ("03", "small", "same work")
    assert kept.machine == machine_facts()
    assert kept.versions["torch"]
    assert kept.commit
    assert kept.at


def test_runs_of_a_comparison_get_their_names_and_lane(lab):
    runs = {"workers=0": Run("", ""), "workers=3": Run("", "")}
    assert lab.keep(runs, lane="same mathematics") is runs
    kept = read_runs(lab.results_dir)
    assert list(kept) == [("03", "workers=0"), ("03", "workers=3")]
    assert {run.lane for run in kept.values()} == {"same mathematics"}
    with pytest.raises(LabError, match="no lane 'fast'"):
        lab.keep(runs, lane="fast")


def test_several_runs_can_be_kept_at_once(lab):
    lab.keep(Run("", name) for name in ["a", "b"])
    assert [name for _, name in read_runs(lab.results_dir)] == ["a", "b"]


def test_what_is_no_training_run_has_the_labs_scale(monkeypatch):
    monkeypatch.setattr("labutils.course.lab.scale_for", lambda machine, lab: "full")
    lab = open_lab("00", notebook(scale="full", weights="hub"))
    kept = lab.keep(Run("", "machine"))
    assert (kept.scale, kept.weights) == ("full", "hub")


@pytest.fixture
def measure():
    """Makes a run of `STOCK`, and counts how often it was asked to."""

    def call() -> Run:
        call.times += 1
        return Run(
            "",
            "",
            workload="sd15-lora",
            recipe=STOCK.fitted_to("cpu").as_dict(),
            metrics={"n": call.times},
        )

    call.times = 0
    return call


def test_an_interrupted_lab_goes_on_with_what_it_measured(measure, tmp_path):
    first = open_lab("03", notebook(results_dir=str(tmp_path)))
    assert first.measured("a", STOCK, measure).metrics == {"n": 1}
    again = open_lab("03", notebook(results_dir=str(tmp_path)))
    assert again.measured("a", STOCK, measure).metrics == {"n": 1}
    assert len(read_records(tmp_path)) == 1
    assert again.measured("a", STOCK, measure).metrics == {"n": 2}  # the cell was run once more
    assert again.measured("b", STOCK, measure).metrics == {"n": 3}


def test_what_is_measured_together_is_taken_together(measure, tmp_path):
    pair = {"a": STOCK, "b": STOCK}
    first = open_lab("03", notebook(results_dir=str(tmp_path)))
    first.measured_together(pair, lambda: {name: measure() for name in pair})
    again = open_lab("03", notebook(results_dir=str(tmp_path)))
    left = again.measured_together(pair, lambda: {name: measure() for name in pair})
    assert [left[name].metrics["n"] for name in pair] == [1, 2]
    third = open_lab("03", notebook(results_dir=str(tmp_path)))
    three = third.measured_together(
        pair | {"c": STOCK}, lambda: {name: measure() for name in "abc"}
    )
    assert [three[name].metrics["n"] for name in "abc"] == [3, 4, 5]


@pytest.mark.parametrize("change", ["recipe", "scale", "code", "machine", "status", "done", "lab"])
def test_what_was_left_is_taken_only_if_nothing_changed(change, measure, tmp_path, monkeypatch):
    first = open_lab("03", notebook(results_dir=str(tmp_path)))
    run = first.measured("a", STOCK, measure)
    if change == "status":
        run.status = "error: ValueError: by chance"
        first.keep(run)
    elif change == "done":
        first.done({})
    elif change == "code":
        monkeypatch.setattr(results, "code", lambda: "another")
    elif change == "machine":
        monkeypatch.setattr("labutils.course.lab.machine_facts", lambda: {"cpu": "another"})
    scale, number = "small" if change == "scale" else "tiny", "04" if change == "lab" else "03"
    again = open_lab(number, notebook(results_dir=str(tmp_path), scale=scale))
    recipe = STOCK.but(rank=8) if change == "recipe" else STOCK
    assert again.measured("a", recipe, measure).metrics == {"n": 2}


def test_a_machine_that_was_given_more_memory_is_the_same(measure, tmp_path, monkeypatch):
    facts = machine_facts()
    for more in (31.0, 255.0):
        monkeypatch.setattr(
            "labutils.course.lab.machine_facts", lambda more=more: facts | {"ram_gb": more}
        )
        lab = open_lab("03", notebook(results_dir=str(tmp_path)))
        assert lab.measured("a", STOCK, measure).metrics == {"n": 1}


@pytest.fixture
def interrupted(tmp_path):
    """`interrupted(run, **parameters)`: the run as a lab left it that had those parameters and was
    then interrupted.
    """

    def leave(run, **own):
        first = open_lab("03", notebook(dict.fromkeys(own, int), results_dir=str(tmp_path), **own))
        first.keep(run)
        return lambda **again: open_lab(
            "03", notebook(dict.fromkeys(again, int), results_dir=str(tmp_path), **again)
        )

    return leave


def test_what_was_left_is_of_the_same_parameters_and_code(interrupted, measure, monkeypatch):
    again = interrupted(Run("03", "a", metrics={"n": 0}), steps=1)
    assert again(steps=1).measured("a", None, measure).metrics == {"n": 0}
    assert again(steps=20).measured("a", None, measure).metrics == {"n": 1}
    monkeypatch.setattr(results, "code", lambda: "edited, and not committed")
    assert again(steps=1).measured("a", None, measure).metrics == {"n": 2}


def test_batches_tell_their_notebooks_code_as_well(interrupted, measure, monkeypatch):
    monkeypatch.setenv(results.SOURCES, '{"notebook": "1", "labutils": "1"}')
    again = interrupted(Run("03", "a", metrics={"n": 0}))
    assert again().measured("a", None, measure).metrics == {"n": 0}
    monkeypatch.setenv(results.SOURCES, '{"notebook": "2", "labutils": "1"}')
    assert again().measured("a", None, measure).metrics == {"n": 1}


def test_out_of_memory_is_a_result_of_a_recipe_only(interrupted, measure):
    of_a_recipe = Run("03", "a", status="oom", recipe=STOCK.fitted_to("cpu").as_dict())
    assert interrupted(of_a_recipe)().measured("a", STOCK, measure).status == "oom"
    assert interrupted(Run("03", "b", status="oom"))().measured("b", None, measure).metrics == {
        "n": 1
    }


def test_what_ranks_on_a_cpu_left_is_taken_where_there_is_a_gpu(interrupted, measure, monkeypatch):
    """Also what was measured at another scale than the lab's."""
    left = Run(
        "03", "a", workload="sd15-lora", scale="small", recipe=STOCK.fitted_to("cpu").as_dict()
    )
    monkeypatch.setattr("labutils.course.lab.default_device", lambda: "cuda")
    assert interrupted(left)().measured("a", STOCK, measure).scale == "small"


def test_predictions_are_kept_and_scored(lab, capsys):
    lab.predict("best number of workers", 4)
    lab.predict("step at 0 workers", None, "ms")
    lab.predict("step at 3 workers", 100.0, "ms")
    lab.done({"best number of workers": 2, "step at 0 workers": 300.0, "step at 3 workers": None})
    records = read_records(lab.results_dir)
    assert [r["topic"] for r in records if r["status"] == "prediction"] == [
        "best number of workers",
        "step at 3 workers",
    ]
    scores = [r for r in records if r["status"] == "score"]
    assert [(r["value"], r["measured"]) for r in scores] == [(4.0, 2)]
    said = capsys.readouterr().out
    assert "No prediction of *step at 0 workers*" in said
    assert "| best number of workers | 4  | 2  | 2.00x |" in said
    assert read_records(lab.results_dir)[-1]["status"] == "done"


@pytest.mark.parametrize("value", ["three", True, [3]])
def test_a_prediction_is_a_number(lab, value):
    with pytest.raises(LabError, match="takes a number of ms, or None"):
        lab.predict("step", value, "ms")


def test_done_says_with_which_parameters(lab):
    lab.done()
    record = read_records(lab.results_dir)[-1]
    assert (record["lab"], record["status"]) == ("03", "done")
    assert record["parameters"] == {"scale": "tiny", "weights": "random", "data": "generated"}
    assert record["seconds"] >= 0
    assert "beside" not in record and "sources" not in record  # nobody told it


def test_what_the_runner_told_stands_in_every_record(monkeypatch, results_folder, capsys):
    monkeypatch.setenv(results.BESIDE, "2")
    monkeypatch.setenv(results.SOURCES, '{"notebook": "a", "labutils": "b"}')
    lab = open_lab("03", notebook())
    assert (
        "Up to 2 other labs may run on this machine meanwhile: times are disturbed"
        in capsys.readouterr().out
    )
    lab.keep(Run("", "one"))
    lab.done()
    run, done = read_records(results_folder)
    assert run["beside"] == done["beside"] == 2
    assert done["sources"] == {"notebook": "a", "labutils": "b"}


def test_what_others_disturbed_is_measured_again_alone(measure, tmp_path, monkeypatch):
    monkeypatch.setenv(results.BESIDE, "1")
    for times in (1, 1):  # interrupted and gone on with, still beside others
        assert open_lab("03", notebook(results_dir=str(tmp_path))).measured(
            "a", STOCK, measure
        ).metrics == {"n": times}
    monkeypatch.delenv(results.BESIDE)
    alone = open_lab("03", notebook(results_dir=str(tmp_path))).measured("a", STOCK, measure)
    assert (alone.metrics, alone.beside) == ({"n": 2}, None)
    monkeypatch.setenv(results.BESIDE, "1")  # what was measured alone is good enough
    assert open_lab("03", notebook(results_dir=str(tmp_path))).measured(
        "a", STOCK, measure
    ).metrics == {"n": 2}


# What fails here


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (MemoryError(), "oom", "Out of memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
            "oom",
            "Out of memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
            "oom",
            "Out of memory",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "oom", "Out of memory"),
        (
            Unavailable("needs a GPU of compute capability 8.9"),
            "skipped: needs a GPU of compute capability 8.9",
            "left out",
        ),
        (
            ImportError("No module named 'unsloth'"),
            "skipped: ImportError: No module named 'unsloth'",
            "labutils doctor",
        ),
        (
            ValueError("bad\nsecond line"),
            "error: ValueError: bad second line",
            "It failed with ValueError: bad",
        ),
    ],
)
def test_a_failure_is_kept_told_and_survived(lab, reference, capsys, error, status, told):
    with lab.attempt("3 workers", reference="workers=3"):
        raise error
    assert read_runs(lab.results_dir)["03", "workers=3"].status == status
    said = capsys.readouterr().out
    assert told in said
    assert "| step_ms | 625 |" in said


def test_a_reference_is_told_in_words(lab, reference, capsys):
    metrics = {"failed": 1, "message": "CUDA error 209", "flops_per_step": 11377482371072}
    Results(results.REFERENCE.parent).append(Run("03", "provoked", scale="full", metrics=metrics))
    with lab.attempt("it", reference="provoked"):
        raise ValueError("no")
    said = capsys.readouterr().out
    assert "| failed | yes |" in said
    assert "| message | `CUDA error 209` |" in said
    assert "flops_per_step" not in said


def test_something_better_than_the_references_numbers_can_be_shown(lab, reference, capsys):
    with lab.attempt(
        "3 workers", reference="workers=3", instead=lambda: print("four runs, as a picture")
    ):
        raise Unavailable("a GPU is needed")
    assert read_runs(lab.results_dir)["03", "workers=3"].status == "skipped: a GPU is needed"
    said = capsys.readouterr().out
    assert "four runs, as a picture" in said
    assert "step_ms" not in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("too big", "has no numbers for *too big* either (oom)"),
        ("never run", "There is no reference run *never run*"),
    ],
)
def test_a_reference_that_can_not_help_says_so(lab, reference, capsys, name, told):
    with lab.attempt("it", reference=name):
        raise ValueError("no")
    assert told in capsys.readouterr().out


def test_what_worked_is_not_recorded_as_failed(lab):
    with lab.attempt("sweep", reference="workers=3"):
        lab.keep(Run("", "workers=3", metrics={"step_ms": 5.0}))
        raise ValueError("the plot failed")
    assert read_runs(lab.results_dir)["03", "workers=3"].ok
    with lab.attempt("fine"):
        pass
    assert ("03", "fine") not in read_runs(lab.results_dir)


def test_a_gpu_that_broke_for_good_ends_no_lab(lab, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda, "empty_cache", broken)
    with lab.attempt("capture"):
        broken()
    assert "illegal memory access" in read_runs(lab.results_dir)["03", "capture"].status


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
    assert read_runs(lab.results_dir) == {}


def test_a_mistake_of_the_caller_is_shown_in_one_line():
    assert LabError("say this")._render_traceback_() == ["LabError: say this"]


def test_only_a_missing_package_is_the_doctors():
    assert "labutils doctor" in course.explain("skipped: ImportError: No module named 'unsloth'")
    assert (
        course.explain("skipped: a CPU has no such copy")
        == "It was left out: a CPU has no such copy."
    )


# What it shows


def test_a_table_or_what_to_say_instead(lab, capsys):
    lab.table(("what", "here", "H200"), ("busy", 0.5, None))
    assert capsys.readouterr().out == "| what | here |\n| --- | --- |\n| busy | 0.5 |\n"
    lab.table(("what", "here"), ("busy", None), otherwise="Nothing was measured.")
    assert capsys.readouterr().out == "Nothing was measured.\n"
    lab.table(("what", "here"))
    assert capsys.readouterr().out == ""


def test_the_reference_is_that_of_this_lab(lab, reference):
    assert lab.reference("workers=3").metric("step_ms") == 625.0
    assert lab.reference("workers=99") is None


def test_tables_of_the_reference_stand_beside_ours(lab, reference, capsys):
    def times(runs):
        return [(name, run.metric("step_ms")) for name, run in runs.items()]

    assert list(lab.references("workers=*")) == ["workers=3"]
    lab.on_reference(("run", "ms"), times, "workers=*", "too big")
    said = capsys.readouterr().out
    assert said.startswith("**The same on our H**, scale full, ")
    assert "| workers=3 | 625 |" in said and "too big" not in said


@pytest.mark.parametrize("patterns", [("never run",), ("too big",), ()])
def test_that_there_is_no_reference_yet_is_said(lab, reference, capsys, patterns):
    lab.on_reference(
        ("run", "ms"),
        lambda runs: [(name, run.metric("step_ms")) for name, run in runs.items()],
        *patterns,
    )
    assert capsys.readouterr().out.startswith("*Nothing of this is on record from our H200 yet")


def test_what_becomes_the_reference_is_not_shown_beside_itself(lab, reference, capsys, monkeypatch):
    """The notebooks on record would else show the tables of the records that they replace."""
    monkeypatch.setattr(results, "REFERENCE", lab.results_dir / "results.jsonl")
    lab.keep(Run("03", "workers=3", metrics={"step_ms": {"median": 1.0}}))
    lab.on_reference(
        ("run", "ms"),
        lambda runs: [(run.run, 1) for run in runs.values()],
        "workers=*",
        "never run",
    )
    assert capsys.readouterr().out == ""


def test_a_table_of_several_days_says_so(lab, reference, capsys):
    kept = Results(results.REFERENCE.parent)
    for day, name in (("2026-01-03", "a1"), ("2026-01-02", "a2")):
        kept.append(
            Run(
                "03",
                name,
                scale="full",
                metrics={"x": 1},
                machine={"gpu": "H"},
                at=f"{day}T10:00:00",
            )
        )
    lab.on_reference(("run", "x"), lambda runs: [(run.run, 1) for run in runs.values()], "a?")
    assert "scale full, 2026-01-02 to 2026-01-03:" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["06", "07", "08", "09", "10"])
def test_labs_about_gpus_show_the_reference_beside_what_they_measure(number):
    (path,) = runner.NOTEBOOKS.glob(f"{number}_*.ipynb")
    assert path.read_text("utf-8").count("lab.on_reference(") >= 3


def test_a_verdict_is_shown_and_returned(lab, capsys):
    from labutils.results import claims

    claim = next(claim for claim in claims.claims().values() if claim.lab == "03")
    (judgement,) = lab.verdict(claim.id)
    assert judgement.claim.id == claim.id
    assert judgement.verdict in capsys.readouterr().out


def test_a_workload_has_the_labs_scale_and_device(lab, monkeypatch):
    import labutils.workloads

    asked = {}
    monkeypatch.setattr(
        labutils.workloads,
        "open_workload",
        lambda name, **how: asked.update(how, name=name) or "it",
    )
    assert lab.workload("sd15-lora") == "it"
    assert asked == {
        "name": "sd15-lora",
        "scale": "tiny",
        "weights": "random",
        "data": "generated",
        "device": default_device(),
    }


def test_paths_are_shown_as_typed_in_the_checkout(tmp_path, monkeypatch):
    path = results.REPOSITORY / "results" / "x"
    monkeypatch.chdir(results.REPOSITORY / "notebooks")
    assert course._short(path) == "results/x"
    monkeypatch.chdir(tmp_path)  # as papermill does it, called from anywhere
    assert course._short(path) == str(path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert course._short(path) == str(path)


# Sliders


@pytest.fixture
def drawn(monkeypatch):
    """A stand-in for ipywidgets that moves the slider to its last place; what was drawn."""
    drawn = []
    widgets = types.ModuleType("ipywidgets")
    widgets.SelectionSlider = lambda options, **_: options
    widgets.interact = lambda draw, **sliders: drawn.append(
        draw(**{name: all[-1] for name, all in sliders.items()})
    )
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    return drawn


def test_a_slider_is_shown_where_somebody_can_move_it(drawn, monkeypatch):
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *_: None)
    open_lab("05", notebook()).explore(lambda power: 10 * power, [1.0, 2.0, 3.0], "x")
    assert drawn == [30]


def test_a_batch_run_and_a_script_have_no_slider(drawn, monkeypatch):
    open_lab("05", notebook()).explore(lambda value: value, [1.0], "x")
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *_: None)
    open_lab("05", notebook(cells=("# Parameters\nscale = 'tiny'\n",))).explore(
        lambda value: value, [1.0], "x"
    )
    assert drawn == []


def test_without_ipywidgets_a_slider_says_how_to_get_it(monkeypatch):
    said = []
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *text: said.append(text[-1]))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    open_lab("05", notebook()).explore(lambda value: value, [1.0], "x")
    assert "pip install -c constraints.txt ipywidgets" in said[-1]


# Drop-down lists

CHOICES = {"article": ["all", "A1"], "verdict": ["all", "refuted"]}


def test_lists_are_shown_where_somebody_can_choose(monkeypatch, capsys):
    """With the real widgets: each list begins with its first value, and everything is drawn once."""
    drawn = []
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *_: None)
    assert open_lab("11", notebook()).choose(
        lambda article, verdict: drawn.append((article, verdict)), CHOICES
    )
    assert drawn == [("all", "all")]


def test_a_batch_run_and_a_script_have_no_lists(monkeypatch):
    drawn = []
    assert not open_lab("11", notebook()).choose(lambda **chosen: drawn.append(chosen), CHOICES)
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *_: None)
    batch = notebook(cells=("# Parameters\nscale = 'tiny'\n",))
    assert not open_lab("11", batch).choose(lambda **chosen: drawn.append(chosen), CHOICES)
    assert drawn == []


def test_without_ipywidgets_everything_is_shown_and_the_lists_are_told_of(monkeypatch):
    said = []
    monkeypatch.setattr(course, "_in_kernel", lambda: True)
    monkeypatch.setattr(course.Lab, "show", lambda *text: said.append(text[-1]))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert not open_lab("11", notebook()).choose(lambda **chosen: None, CHOICES)
    assert said[-1].startswith("Drop-down lists would be here: install it")
