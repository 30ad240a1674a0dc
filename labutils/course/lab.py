"""What a notebook calls: `open_lab` checks the parameters and gives the `Lab` that keeps what is
learnt.

    from labutils.course import open_lab
    lab = open_lab("03", globals())

Everything a lab learns goes through it to results.jsonl at once, so that a lab that stops halfway
loses nothing. What fails on this machine is caught by `lab.attempt`, explained, and shown from the
reference runs instead.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from labutils.course import parameters, recorded, tables
from labutils.data.file_cache import cache_folder
from labutils.profiling import cuda
from labutils.profiling.machine import default_device, machine_facts, meant_for, scale_for
from labutils.recipe import Recipe, is_finite, is_number
from labutils.results import records
from labutils.results.records import Run
from labutils.results.schema1_migration import Tag
from labutils.workloads.lazy_imports import import_unseen

_FOR_MACHINES = ("wall_ms", "build_s", "flops_per_step", "examples_per_s", "tflops")
"""Metrics from which others are computed: left out where a reference run's are shown."""


class LabError(Exception):
    """A mistake in how a lab was called; its message, shown without a traceback, says what to
    write.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def _hush() -> None:
    """Silence what libraries say into every notebook and nobody who reads one can act on."""
    # Plain progress bars survive batch runs, and Jax, which Transformer Engine finds, is of no use.
    warnings.filterwarnings("ignore", message="IProgress not found")
    warnings.filterwarnings("ignore", message="Detected a Jax installation")
    # The profiler of one cycle has none before it; gradients meet a captured step's other stream.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
    # Whether float32 products may round to TF32 is the recipe's choice.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    # bitsandbytes would fetch an optional CPU kernel; the profiler tells each start and stop.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def open_lab(number: str, namespace: dict[str, Any]) -> Lab:
    """Check the notebook's parameters and open lab `number` ("03") with them.

    `namespace` is the notebook's `globals()`: its parameters are the annotated names of the
    parameters cell. A cell that runs again with the same parameters gets the same `lab` back, with
    the results and predictions that it has. Raises `LabError` where a parameter has the wrong type,
    an unknown choice or a name that the parameters cell does not declare.
    """
    _hush()
    import_unseen("torch")
    number = str(number).zfill(2)
    try:
        values = _parameters(namespace)
    except ValueError as error:
        raise LabError(
            f"{error} Change it in the parameters cell, or with -p (papermill: words with -r)."
        ) from None
    asked = values.pop("results_dir", "") or os.environ.get("LABUTILS_RESULTS", "")
    opened_with = (number, values, asked)
    lab = namespace.get("lab")
    if not isinstance(lab, Lab) or lab.opened_with != opened_with or not lab.results_dir.is_dir():
        new = records.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")
        try:
            kept = records.Results(Path(asked or new).expanduser())
        except (OSError, RuntimeError, ValueError) as error:  # nobody's home, a null byte
            raise LabError(
                f"Results can't be kept in {asked!r}: {error}. Set results_dir to a folder you may "
                "write to."
            ) from None
        lab = Lab(number, values, kept)
        lab.opened_with = opened_with
    lab.show(lab.banner())
    return lab


def _parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of the annotated names in `namespace`, each checked against its annotation.

    A name with any other annotation belongs to a later cell that has already run.
    """
    notes = namespace.get("__annotations__", {}).items()
    kinds = {name: note if isinstance(note, str) else str(note) for name, note in notes}
    kinds |= {name: note.__name__ for name, note in notes if type(note) is type}
    declared = {name: kind for name, kind in kinds.items() if kind in parameters.KINDS}
    if unknown := _injected(namespace) - set(declared):
        raise ValueError(
            f"This lab has no parameter {', '.join(sorted(unknown))}. Its parameters: "
            f"{', '.join(declared)}."
        )
    return {
        name: parameters.check(name, namespace.get(name), kind) for name, kind in declared.items()
    }


def _injected(namespace: Mapping[str, Any]) -> set[str]:
    """Names that papermill assigned: it puts them in a cell of its own, and only warns where
    nothing declares them.

    It writes one parameter a line. Of a cell that was changed and run again, what was run last
    counts.
    """
    cells = [cell for cell in namespace.get("In", []) if cell.startswith("# Parameters\n")]
    return set(re.findall(r"^(\w+) =", cells[-1], re.MULTILINE)) if cells else set()


class Lab:
    """One lab on this machine: its parameters, and where everything it learns is kept.

    `number` ("03"), `scale` ("tiny", "small", "full"; "auto" is resolved), `weights`, `data`,
    `parameters` (all, the lab's own included), `device` ("cuda" or "cpu"), `machine` (facts),
    `results_dir`, `cache_dir`.
    """

    def __init__(self, number: str, values: dict[str, Any], kept: records.Results) -> None:
        self.number = number
        self.opened_with: tuple[str, dict[str, Any], Any] | None = None
        self.machine = machine_facts()
        self.device = default_device()
        self.fitting_scale = scale_for(self.machine, number)
        if values.get("scale", "auto") == "auto":
            values = values | {"scale": self.fitting_scale}
        self.parameters = values
        sources = records.told_sources() or {"labutils": records.code()}
        parts = (json.dumps(part, sort_keys=True).encode() for part in (sources, values))
        self._made_of = records.digest(parts)
        self.scale: str = values["scale"]
        self.weights: str = values.get("weights", "random")
        self.data: str = values.get("data", "generated")
        self.results_dir = kept.path.parent.resolve()
        self.cache_dir = cache_folder()
        self._results = kept
        self._measured: set[tuple] = set()  # identities of runs
        self._predictions: dict[str, tuple[float | None, str]] = {}
        self._opened = time.perf_counter()

    def banner(self) -> str:
        """One paragraph: the lab, the scale, the machine, and where results go."""
        name = self.machine.get("gpu") or self.machine.get("cpu") or "this machine"
        text = f"**Lab {self.number}** at scale **{self.scale}** on {name}. "
        text += f"Results: `{_short(self.results_dir)}`."
        if self.weights == "random":
            text += " Weights are random: speed and memory are those of the real model, loss "
            text += "values are not."
        if parameters.SCALES.index(self.scale) > parameters.SCALES.index(self.fitting_scale):
            text += f" The scale {self.scale} is meant for {meant_for(self.scale, self.number)}; "
            text += f"{self.fitting_scale} fits this machine, so expect long waits or failures."
        return text

    def workload(self, name: str) -> Any:
        """The workload `name` at this lab's scale, weights and data, on this machine's device."""
        from labutils.workloads import open_workload

        return open_workload(
            name, scale=self.scale, weights=self.weights, data=self.data, device=self.device
        )

    # ------------------------------------------------------------------------------- what is kept

    def keep(self, runs: Run | Mapping[str, Run] | Iterable[Run], lane: str | None = None) -> Any:
        """Stamp `runs` with lab, machine, versions, commit and time, append them to results.jsonl,
        and return them.

        A mapping's key names a run that has no name of its own. `lane` overrides the runs' lane.
        Raises `LabError`, before anything is written, where there is no such lane.
        """
        if lane is not None and lane not in records.LANES:
            raise LabError(f"There is no lane {lane!r}. The lanes: {', '.join(records.LANES)}.")
        if isinstance(runs, Mapping):
            for name, run in runs.items():
                run.run = run.run or name
            each = list(runs.values())
        else:
            each = [runs] if isinstance(runs, Run) else list(runs)
        for run in each:
            self._keep(run, lane or run.lane)
        return runs if isinstance(runs, Run | Mapping) else each

    def _keep(self, run: Run, lane: str) -> None:
        run.lab, run.lane = self.number, lane
        if not run.tags.keys() - {"again"}:  # a learner's own run
            run.tags = {"experiment": run.run.removesuffix(" again")} | run.tags
        if not run.workload:  # not a training run, which knows what it ran on
            run.scale, run.weights, run.data = self.scale, self.weights, self.data
        run.machine, run.versions = self.machine, records.versions()
        run.commit, run.at, run.notebook = records.commit(), records.now(), _notebook(self.number)
        run.made_of = self._made_of
        self._results.append(run)
        if run.ok:
            self._measured.add(run.identity)

    def measured(self, name: str, recipe: Recipe | None, measure: Callable[[], Run]) -> Run:
        """The run `name`: the one that an interrupted start of this lab left in the results folder,
        else measured now and kept.

        A run that was left is taken only if code, parameters, `recipe`, machine and versions are
        the same, and only once: a cell that runs again measures again. `recipe` is None for a run
        without a recipe, and where `measure` chooses it.
        """
        return self.measured_together({name: recipe}, lambda: {name: measure()})[name]

    def measured_together(
        self, recipes: Mapping[str, Recipe | None], measure: Callable[[], Mapping[str, Run]]
    ) -> dict[str, Run]:
        """Name -> run of recipes that are measured in one go: all of them are taken from an
        interrupted start, see `measured`, or none.
        """
        left = self.take_left(recipes)
        if left.keys() == recipes.keys():
            return left
        runs = dict(measure())
        for name, run in runs.items():
            run.run = name
        return self.keep(runs)

    def take_left(self, recipes: Mapping[str, Recipe | None]) -> dict[str, Run]:
        """Name -> run of those `recipes` that an interrupted start of this lab left, see
        `measured`.

        A recipe that ran out of memory counts as measured. Any other failure is tried again.
        """
        mine = [r for r in records.read_records(self._results.path) if r.get("lab") == self.number]
        ends = [place for place, record in enumerate(mine) if record.get("status") == "done"]
        unfinished = records.runs_of(mine[ends[-1] + 1 :] if ends else mine)
        there = {run.run: run for run in unfinished if self._is_left(run)}
        left = {
            name: there[name]
            for name, recipe in recipes.items()
            if name in there and _is_of(there[name], recipe)
            if there[name].identity not in self._measured
        }
        self._measured.update(run.identity for run in left.values())
        return left

    def _is_left(self, run: Run) -> bool:
        """Whether a run of an earlier start has a result, and would be made the same way now."""
        settled = run.ok or (run.status == "oom" and run.recipe)
        now = (_lasting(self.machine), records.versions(), self._made_of)
        alike = (_lasting(run.machine), run.versions, run.made_of) == now
        return bool(settled and alike)

    # -------------------------------------------------------------------------------- predictions

    def predict(self, topic: str, value: float | None, unit: str = "") -> None:
        """Keep the learner's prediction for `done` to score; None: not answered. Raises `LabError`
        for what is no finite number.
        """
        if value is None:
            self._predictions[topic] = None, unit
            self.show(
                f"No prediction of *{topic}* yet. Put a number in place of `None` and run the cell "
                "again, or go on."
            )
            return
        if not is_number(value):
            of = f" of {unit}" if unit else ""
            raise LabError(
                f"The prediction of {topic} is {value!r}; it takes a finite number{of}, or None."
            )
        self._predictions[topic] = (float(value), unit)
        self._record(status="prediction", topic=topic, value=value, unit=unit)
        self.show(f"Kept: you predict {value:g} {unit}".rstrip() + f" for *{topic}*.")

    def done(
        self,
        truths: Mapping[str, float | None] | None = None,
        ours: Mapping[str, float | None] | None = None,
    ) -> None:
        """Score the predictions against `truths` (topic -> measured value), show what wasn't
        predicted, and mark the lab as done. A topic that this machine couldn't measure is scored
        against our GPU's value, `ours`.
        """
        rows = [("prediction", "you", "measured", "off by")]
        here, there = (
            {topic: truth for topic, truth in (known or {}).items() if truth is not None}
            for known in (truths, ours)
        )
        card = _card(self.references()) if there else ""
        for topic, truth in (there | here).items():
            if not is_finite(truth) or topic not in self._predictions:
                continue
            (guess, unit), on = self._predictions[topic], {} if topic in here else {"on": card}
            measured = f"{tables.cell(float(truth))} {unit}".rstrip()
            measured += f", on our {card}" * bool(on)
            if guess is None:
                rows.append((topic, None, measured, None))
                continue
            known = {"topic": topic, "value": guess, "measured": truth, "unit": unit}
            self._record(status="score", **known, **on)
            off = f"{abs(guess - truth):.3g}"
            if guess > 0 and truth > 0:
                off = f"{max(guess, truth) / min(guess, truth):.2f}x"
            off += " too high" if guess > truth else " too low" if guess < truth else ""
            rows.append((topic, f"{guess:g} {unit}", measured, off))
        self.table(*rows)
        seconds = round(time.perf_counter() - self._opened, 1)
        sources = records.told_sources()
        known = {"sources": sources} if sources else {}
        stamp = {"parameters": self.parameters, "seconds": seconds, "commit": records.commit()}
        self._record(status="done", **stamp, **known)
        verdicts = f"labutils report --results {shlex.quote(_short(self.results_dir))}"
        self.show(f"Lab {self.number} is done, after {seconds:.0f} s. All verdicts: `{verdicts}`")

    def _record(self, **fields: Any) -> None:
        self._results.append({"lab": self.number} | fields | {"at": records.now()})

    def solution(self, exercise: str) -> None:
        """Show a solution of `exercise` ("04.2"). Raises `LabError` where there is none."""
        from labutils.course.solutions import solutions_of

        number, _, place = str(exercise).partition(".")
        known = solutions_of(number)
        if not place.isdecimal() or not 1 <= int(place) <= len(known):
            raise LabError(
                f"There is no solution {exercise!r}. Lab {self.number}'s are called "
                f'"{self.number}.1" to "{self.number}.{len(solutions_of(self.number))}".'
            )
        self.show(f"```python\n{known[int(place) - 1]}\n```")

    # ------------------------------------------------------------------------------- the reference

    def reference(self, **tags: Tag) -> Run | None:
        """Our own run of these tags in this lab, or None where there is none."""
        return self.references().one(**tags)

    def references(self, **tags: records.Wanted) -> records.Runs:
        """Our own runs of this lab that have these tags: those that its recorded page shows."""
        return recorded.shown_runs(self.number).select(**tags)

    def verdict(self, *claims: str) -> None:
        """Show published | ours | here | verdict for the claim ids, and which lines of the results
        can't be used. It returns nothing: a notebook would print what its cell ends with."""
        from labutils.results.judges import judge_all

        reading = records.read_file(self._results.path)
        here, ours = records.runs_of(reading.records), records.reference_runs()
        self.show(tables.verdict_table(judge_all(claims, here, ours)))
        if reading.passed_over:
            self.show(reading.complaint())

    @contextlib.contextmanager
    def attempt(
        self, what: str, instead: Callable[[], Any] | None = None, **tags: Tag
    ) -> Iterator[None]:
        """Try what may not work on this machine: a failure is explained, kept as a run, and the lab
        goes on. What the machine lacks is raised inside as `Unavailable`.

        `what` says it in a few words. `tags` are those of the run: the failure is kept as that run.
        What the same cell printed on our GPU is shown instead, or, where that isn't on record, the
        numbers of our run, and nothing where our GPU skipped it as well; or `instead()` shows
        something better. Ctrl-C is no failure and passes through.
        """
        try:
            yield
            return
        except Exception as error:
            _clear_frames(error)
            status = records.status_of(error)
        gc.collect()
        with contextlib.suppress(RuntimeError):  # a GPU that broke fails at this, too
            cuda.empty_cache()
        run = Run(self.number, what, status=status, tags=tags or {"experiment": what})
        if run.identity not in self._measured:  # a plot's failure hides no measurement
            self.keep(run)
        self.show(f"**{what}: not on this machine.** {explain(status)}")
        if instead:
            instead()
        elif not (theirs := self.reference(**run.tags)) or theirs.ok:  # else skipped there, too
            if printed := recorded.outputs_of(self.number, recorded.source_of_this_cell()):
                self.show(f"**On our {_card(self.references())} this cell printed:**")
                recorded.replay(printed)
            elif theirs:
                self.show(_as_markdown(theirs))

    # ------------------------------------------------------------------------------ what it shows

    def choose(self, draw: Callable[..., Any], choices: Mapping[str, Sequence[Any]]) -> bool:
        """Show a drop-down list for each name, or a slider if its values are numbers, and call
        `draw(name=value, ...)` at every choice.

        Where nobody can choose, nothing is drawn, and the result is False.
        """
        if not _somebody_answers():
            return False
        from ipywidgets import Dropdown, SelectionSlider, interact

        def redraw(**chosen: Any) -> None:  # else the result of `draw` would be displayed, too
            draw(**chosen)

        widgets = {}
        for name, values in choices.items():
            kind = Dropdown if isinstance(values[0], str) else SelectionSlider
            widgets[name] = kind(options=values, description=name)
        interact(redraw, **widgets)
        return True

    def table(self, *rows: Any, otherwise: str = "") -> None:
        """Show a table of `rows`, of which the first is the head, or of a pandas DataFrame.

        A row's first cell names it. `None` means that a value does not apply here. Rows and columns
        that hold nothing but None are left out. Where no row is left, `otherwise` is shown.
        """
        if text := tables.as_table(*rows) or otherwise:
            self.show(text)

    def show(
        self,
        what: str | Mapping[str, Run] | Iterable[Run],
        columns: Sequence[str] | Mapping[str, str] | Callable[[list[Run]], Any] = (),
        **tags: records.Wanted,
    ) -> None:
        """Show a text, Markdown in a notebook; or runs as a table with these `columns`, and below
        it the same of our own runs that have these `tags`.

        columns: names of metrics, or "speed-up" (`tables.speed_up`); or metric or tag -> its
        heading; or what makes a DataFrame of runs that went well.
        """
        if isinstance(what, str):
            return self._show(what)
        runs = what.values() if isinstance(what, Mapping) else what
        if text := tables.as_table(tables.columns_of(runs, columns)):
            self._show(text)
        ours = records.REFERENCE.parents[1].resolve()
        if not tags or ours in self._results.path.resolve().parents:
            return  # what is kept here may itself be the reference
        theirs = list(self.references(**tags))
        if text := tables.as_table(tables.columns_of(theirs, columns)):
            days = sorted({run.at.partition("T")[0] for run in theirs})
            when = " to ".join(dict.fromkeys((days[0], days[-1])))
            where = f"{_card(theirs)}**, scale {theirs[0].scale}, {when}"
            self._show(f"**The same on our {where}:\n\n{text}")

    @staticmethod
    def _show(text: str) -> None:
        if _in_kernel():
            from IPython.display import Markdown, display

            display(Markdown(text))
        else:
            print(text)


def _clear_frames(error: BaseException) -> None:
    """Clear the local variables of the calls that raised `error`: they hold the tensors that filled
    the memory.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


def explain(status: str) -> str:
    """What a run's `status` means to a person, and what to try."""
    kind, _, why = status.partition(": ")
    if kind == "oom":
        return "Out of memory. Close what else uses memory, or choose a smaller scale."
    said = f"It was left out: {why}." if kind == "skipped" else f"It failed with {why[:300]}."
    is_known = kind == "skipped" and not why.startswith(("ImportError", "ModuleNotFoundError"))
    return said if is_known else f"{said} `labutils doctor` checks the usual causes."


def _card(runs: Iterable[Run]) -> str:
    """The GPU that runs of our own are of: "H200"."""
    name = next((run.machine.get("gpu") for run in runs), None) or "GPU"
    return str(name).removeprefix("NVIDIA ").partition(" ")[0]


def _as_markdown(run: Run) -> str:
    """A run's numbers as a table."""
    values = {metric: run.metric(metric) for metric in run.metrics if metric not in _FOR_MACHINES}
    rows = [pair for pair in values.items() if isinstance(pair[1], int | float | str)]
    table = tables.as_table(("metric", "value"), *rows)
    return f"On {run.machine.get('gpu')}, *{run.label}* (scale {run.scale}) gave:\n\n{table}"


def _notebook(number: str) -> str:
    """File name of the running notebook, as Jupyter tells it, else of the lab's; "" for none."""
    if path := os.environ.get("JPY_SESSION_NAME"):
        return Path(path).name
    files = sorted((records.REPOSITORY / "notebooks").glob(f"{number}_*.ipynb"))
    return files[0].name if files else ""


def _lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a machine that never change. Its memory does: some virtual machines get more
    while they use it."""
    return {name: value for name, value in machine.items() if name != "ram_gb"}


def _is_of(run: Run, recipe: Recipe | None) -> bool:
    """Whether a run was made of `recipe`, fitted to a GPU or to a CPU. None fits any run."""
    fitted = [recipe.fitted_to(device).as_dict() for device in ("cuda", "cpu") if recipe]
    return recipe is None or run.recipe in fitted


def _short(path: Path) -> str:
    """A path relative to the checkout, in full where the path or this process is outside of it."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # we are in a folder that was deleted
        Path.cwd().relative_to(records.REPOSITORY)
        return str(path.relative_to(records.REPOSITORY))
    return str(path)


def _in_kernel() -> bool:
    """Whether a Jupyter kernel shows what this process displays."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def _somebody_answers() -> bool:
    """Whether a person runs this cell: for papermill and nbconvert a widget can wait for ever."""
    from IPython import get_ipython

    return _in_kernel() and get_ipython().kernel.get_parent()["content"].get("allow_stdin", False)
