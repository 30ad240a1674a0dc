"""What a notebook calls: `open_lab` checks the parameters and gives the `Lab` that keeps what is
learnt.

    from labutils.course import open_lab
    lab = open_lab("03", globals())

Everything a lab learns goes through it to results.jsonl at once, so that a lab that stops halfway
loses nothing. What fails on this machine is caught by `lab.attempt`, explained, and shown from the
reference runs instead.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import logging
import os
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from labutils.course import parameters, tables
from labutils.profiling import cuda
from labutils.profiling.machine import default_device, machine_facts, meant_for, scale_for
from labutils.recipe import Recipe, is_finite
from labutils.results import records
from labutils.results.records import Run
from labutils.results.schema1 import Tag, tags_of
from labutils.workloads.lazy_imports import import_unseen

_YES_OR_NO = ("failed", "warned")
"""Metrics of what was provoked: 1 where it happened, else 0."""
_FOR_MACHINES = ("wall_ms", "build_s", "flops_per_step", "examples_per_s", "tflops")
"""Metrics from which others are computed; in a table that stands in for a measurement they only get
in the way.
"""


class LabError(Exception):
    """A mistake in how a lab was called; its message, shown without a traceback, says what to
    write.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython prints instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def _hush() -> None:
    """Silence what libraries say into every notebook and nobody who reads one can act on."""
    warnings.filterwarnings(
        "ignore", message="IProgress not found"
    )  # plain progress bars survive batch runs
    warnings.filterwarnings(
        "ignore", message="Detected a Jax installation"
    )  # Transformer Engine, of no use here
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # an optional CPU kernel that it would fetch
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # the profiler's two lines each time that it starts and stops


def open_lab(number: str, namespace: dict[str, Any]) -> Lab:
    """Check the notebook's parameters and open lab `number` ("03") with them.

    `namespace` is the notebook's `globals()`: its parameters are the annotated names of the
    parameters cell. A cell that opens the lab once more, with the same parameters, gets the same
    `lab`: its results and predictions go on. Raises `LabError` where a parameter has the wrong
    type, an unknown choice or a name that the parameters cell does not declare.
    """
    _hush()
    import_unseen("torch")
    number = str(number).zfill(2)
    if not isinstance(namespace, Mapping):
        raise LabError(
            f"The second argument of open_lab is a {type(namespace).__name__}, where the "
            "notebook's own names belong. "
            f'Write: lab = open_lab("{number}", globals())'
        )
    try:
        values = _parameters(namespace)
    except ValueError as error:
        raise LabError(
            f"{error} Change it in the parameters cell, or with -p or an option of `labutils run`."
        ) from None
    asked = values.pop("results_dir", "") or os.environ.get("LABUTILS_RESULTS", "")
    before = namespace.get("lab")
    if (
        isinstance(before, Lab)
        and before.opened_with == (number, values, asked)
        and before.results_dir.is_dir()
    ):
        before.show(before.banner())
        return before
    folder = asked or _new_results_folder()
    try:
        kept = records.Results(Path(folder).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # nobody's home, a null byte
        raise LabError(
            f"Results can't be kept in {folder!r}: {error}. Set results_dir to a folder you may "
            "write to."
        ) from None
    lab = Lab(number, values, kept, in_batch=bool(_injected(namespace)))
    lab.opened_with = (number, values, asked)
    lab.show(lab.banner())
    return lab


def _parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of the annotated names in `namespace`, each checked against its annotation.

    What is annotated as anything but a parameter's kind belongs to a later cell, which ran before
    this one ran again.
    """
    kinds = {name: _kind(note) for name, note in namespace.get("__annotations__", {}).items()}
    declared = {name: kind for name, kind in kinds.items() if kind in parameters.KINDS}
    unknown = _injected(namespace) - set(declared)
    if unknown:
        raise ValueError(
            f"This lab has no parameter {', '.join(sorted(unknown))}. Its parameters: "
            f"{', '.join(declared)}."
        )
    return {
        name: parameters.check(name, namespace.get(name), kind) for name, kind in declared.items()
    }


def _kind(annotation: Any) -> str:
    """A type's name as it is written; "list[int]" and "float | None" are not "list" or "float"."""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if type(annotation) is type else str(annotation)


def _injected(namespace: Mapping[str, Any]) -> set[str]:
    """Names that papermill assigned: it puts them in a cell of its own, and only warns where
    nothing declares them.

    Of a cell that was changed and run again, what was run last counts.
    """
    cells = [cell for cell in namespace.get("In", []) if cell.startswith("# Parameters\n")]
    try:
        statements = [statement for cell in cells[-1:] for statement in ast.parse(cell).body]
    except SyntaxError:  # then it assigned nothing
        return set()
    return {
        target.id
        for s in statements
        if isinstance(s, ast.Assign)
        for target in s.targets
        if isinstance(target, ast.Name)
    }


def _new_results_folder() -> Path:
    return records.REPOSITORY / "results" / datetime.now().strftime("%Y%m%d-%H%M%S")


class Lab:
    """One lab on this machine: its parameters, and where everything it learns is kept.

    `number` ("03"), `scale` ("tiny", "small", "full"; "auto" is resolved), `weights`, `data`,
    `parameters` (all, the lab's own included), `device` ("cuda" or "cpu"), `machine` (facts),
    `results_dir`, `cache_dir`.
    """

    def __init__(
        self, number: str, values: dict[str, Any], kept: records.Results, in_batch: bool = False
    ) -> None:
        self.number = number
        self._in_batch = in_batch
        self.opened_with: tuple[str, dict[str, Any], Any] | None = None
        self.machine = machine_facts()
        self.device = default_device()
        self.fitting_scale = scale_for(self.machine, number)
        if values.get("scale", "auto") == "auto":
            values = values | {"scale": self.fitting_scale}
        self.parameters = values
        self._made_of = _made_of(values)
        self._notebook = _notebook(number)
        self.scale: str = values["scale"]
        self.weights: str = values.get("weights", "random")
        self.data: str = values.get("data", "generated")
        self.results_dir = kept.path.parent.resolve()
        self.cache_dir = Path(os.environ.get("LABUTILS_CACHE") or "~/.cache/labutils").expanduser()
        self._results = kept
        self._measured: set[str] = set()
        self._predictions: dict[str, tuple[float, str]] = {}
        self._opened = time.perf_counter()

    def banner(self) -> str:
        """One paragraph: the lab, the scale, the machine, and where results go."""
        name = self.machine.get("gpu") or self.machine.get("cpu") or "this machine"
        lines = [
            f"**Lab {self.number}** at scale **{self.scale}** on {name}. Results: "
            f"`{_short(self.results_dir)}`."
        ]
        if self.weights == "random":
            lines.append(
                "Weights are random: speed and memory are those of the real model, loss values are "
                "not."
            )
        if parameters.SCALES.index(self.scale) > parameters.SCALES.index(self.fitting_scale):
            lines.append(
                f"The scale {self.scale} is meant for "
                f"{meant_for(self.scale, self.number)}; "
                f"{self.fitting_scale} fits this machine, so expect long waits or failures."
            )
        if beside := records.told(records.BESIDE):
            lines.append(
                f"Up to {beside} other lab{'s' * (beside != 1)} may run on this machine meanwhile: "
                "times are "
                "disturbed, and verdicts about them come out as inconclusive."
            )
        return " ".join(lines)

    def workload(self, name: str) -> Any:
        """The workload `name` at this lab's scale, weights and data, on this machine's device."""
        from labutils.workloads import open_workload

        return open_workload(
            name, scale=self.scale, weights=self.weights, data=self.data, device=self.device
        )

    def keep(self, runs: Run | Mapping[str, Run] | Iterable[Run], lane: str | None = None) -> Any:
        """Stamp `runs` with lab, machine, versions, commit and time, append them to results.jsonl,
        and return them.

        A mapping's key names a run that has no name of its own. `lane` overrides the runs' lane;
        raises `LabError` where there is no such lane.
        """
        if lane is not None and lane not in records.LANES:
            raise LabError(f"There is no lane {lane!r}. The lanes: {', '.join(records.LANES)}.")
        named = (
            runs.items()
            if isinstance(runs, Mapping)
            else [("", run) for run in ([runs] if isinstance(runs, Run) else runs)]
        )
        named = list(named)
        for name, run in named:
            self._keep(run, name, lane)
        return runs if isinstance(runs, Run | Mapping) else [run for _, run in named]

    def _keep(self, run: Run, name: str, lane: str | None) -> None:
        run.lab, run.run, run.lane = self.number, run.run or name, lane or run.lane
        if not run.tags.keys() - {"again"}:  # a bridge, until every lab writes tags
            run.tags = tags_of(run.lab, run.run.removesuffix(" again")) | run.tags
        if not run.workload:  # not a training run, which knows what it ran on
            run.scale, run.weights, run.data = self.scale, self.weights, self.data
        run.machine, run.versions, run.commit, run.at = (
            self.machine,
            records.versions(),
            records.commit(),
            records.now(),
        )
        run.beside, run.made_of = records.told(records.BESIDE), self._made_of
        run.notebook = self._notebook
        self._results.append(run)
        if run.ok:
            self._measured.add(run.run)

    def measured(self, name: str, recipe: Recipe | None, measure: Callable[[], Run]) -> Run:
        """The run `name` of `recipe` (None: of none, or whichever `measure` takes), as an
        interrupted lab left it in the results folder, or measured now and kept.

        What was left is taken only if it was made of the same (code, parameters, recipe, machine,
        versions), and once: a cell that is run again measures again.
        """
        return self.measured_together({name: recipe}, lambda: {name: measure()})[name]

    def measured_together(
        self, recipes: Mapping[str, Recipe | None], measure: Callable[[], Mapping[str, Run]]
    ) -> dict[str, Run]:
        """Name -> run, as `measured`, of recipes that are measured in one go: all are as they were
        left, or none.
        """
        left = self._left(recipes)
        if left.keys() == recipes.keys():
            self._measured.update(left)
            return left
        runs = dict(measure())
        for name, run in runs.items():
            run.run = name
        self.keep(runs)
        return runs

    def take_left(self, recipes: Mapping[str, Recipe | None]) -> dict[str, Run]:
        """Name -> run, as `measured`, of those of `recipes` that an interrupted lab left; the
        others are left out.
        """
        left = self._left(recipes)
        self._measured.update(left)
        return left

    def _left(self, recipes: Mapping[str, Recipe | None]) -> dict[str, Run]:
        """Name -> run, of those of `recipes` that `measured` would take as an interrupted lab left
        them.
        """
        there = self._left_behind()
        return {
            name: there[name]
            for name, recipe in recipes.items()
            if name in there and name not in self._measured and _is_of(there[name], recipe)
        }

    def _left_behind(self) -> dict[str, Run]:
        """Name -> run that this lab's last start left here, if it did not get to its end and all
        else is alike.

        Running out of memory is what was found out of a recipe; of anything else it is a failure,
        and tried again.
        """
        mine = [r for r in records.read_records(self._results.path) if r.get("lab") == self.number]
        ends = [place for place, record in enumerate(mine) if record.get("status") == "done"]
        unfinished = mine[ends[-1] + 1 :] if ends else mine
        here = (_lasting(self.machine), records.versions(), self._made_of)
        return {
            name: run
            for (_, name), run in records.runs_of(unfinished).items()
            if (run.ok or (run.status == "oom" and run.recipe))
            and (_lasting(run.machine), run.versions, run.made_of) == here
            and (
                not run.beside or records.told(records.BESIDE)
            )  # what others disturbed is measured again without them
        }

    def predict(self, topic: str, value: float | None, unit: str = "") -> None:
        """Keep the learner's prediction for `done` to score; None: not answered. Raises `LabError`
        for other types.
        """
        if value is None:
            self.show(
                f"No prediction of *{topic}* yet. Put a number in place of `None` and run the cell "
                "again, or go on."
            )
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LabError(
                f"The prediction of {topic} is {value!r}; it takes a "
                f"number{f' of {unit}' if unit else ''}, or None."
            )
        if not is_finite(value):
            raise LabError(
                f"The prediction of {topic} is {value!r}, which can't be compared with a "
                "measurement. Write a finite "
                "number, or None for no prediction."
            )
        self._predictions[topic] = (float(value), unit)
        self._record(status="prediction", topic=topic, value=value, unit=unit)
        self.show(f"Kept: you predict {value:g} {unit} for *{topic}*.")

    def reference(self, run: str = "", **tags: Tag) -> Run | None:
        """Our H200's run of these tags in this lab, or None where there is none. A name stands for
        the tags that it has in schema 1."""
        runs = records.read_runs(records.REFERENCE, self.number)
        return runs.one(self.number, **(tags or tags_of(self.number, run)))

    def references(self, *patterns: str, **tags: Tag) -> Any:
        """Our H200's runs of this lab that have these tags, as `Runs`. With patterns of names, a
        bridge, those that fit one, by name."""
        runs = records.read_runs(records.REFERENCE, self.number)
        if tags:
            return runs.select(**tags)
        return {r.run: r for r in runs if any(fnmatchcase(r.run, each) for each in patterns)}

    def on_reference(
        self, head: Sequence[str], rows_of: Callable[[dict[str, Run]], Iterable], *patterns: str
    ) -> None:
        """Show the table that `rows_of` makes of our H200's runs (`references`), or say that there
        is none yet.

        Nothing is shown where the results kept here are themselves the reference.
        """
        if self._results.path.resolve() == Path(records.REFERENCE).resolve():
            return
        runs = self.references(*patterns)
        if text := tables.as_table(head, *rows_of(runs)):
            some = next(iter(runs.values()))
            self.show(
                f"**The same on our {_card(some)}**, scale {some.scale}, "
                f"{_days(runs.values())}:\n\n{text}"
            )
        else:
            self.show(
                "*Nothing of this is on record from our H200 yet, so there is no table of it to "
                "compare with.*"
            )

    def runs_table(
        self,
        runs: Iterable[Run],
        columns: Mapping[str, str] | Callable[[list[Run]], Any],
        **tags: Tag,
    ) -> None:
        """Show `runs` as a table, and below it the same of our H200's runs that have these `tags`.

        columns: metric or tag -> its heading; or what makes a DataFrame of runs that went well.
        """
        self.show(tables.as_table(tables.columns_of(runs, columns)))
        if not tags or self._results.path.resolve() == Path(records.REFERENCE).resolve():
            return
        those = list(self.references(**tags))
        if text := tables.as_table(tables.columns_of(those, columns)):
            some = those[0]
            self.show(
                f"**The same on our {_card(some)}**, scale {some.scale}, {_days(those)}:\n\n{text}"
            )

    def verdict(self, *claims: str) -> list[Any]:
        """Show published | H200 | here | verdict for the claim ids, and return the judgements."""
        from labutils.results.judges import as_markdown, judge_all

        judgements = judge_all(
            claims, records.read_runs(self.results_dir), records.read_runs(records.REFERENCE)
        )
        self.show(as_markdown(judgements))
        return judgements

    @contextlib.contextmanager
    def attempt(
        self, what: str, reference: str | None = None, instead: Callable[[], Any] | None = None
    ) -> Iterator[None]:
        """Try what may not work on this machine: a failure is explained, kept as a run, and the lab
        goes on. What the machine lacks is raised inside as `Unavailable`.

        `what` says it in a few words. `reference` is the run's name: our H200's run of that name is
        shown instead, and the failure kept under it (under `what` where there is none). `instead()`
        shows what the H200 found in a better way than as that run's numbers. Ctrl-C is no failure
        and passes through.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            _let_go(error)
            failure = error
        if failure is None:
            return
        status = records.status_of(failure)
        failure = None
        gc.collect()
        with contextlib.suppress(
            RuntimeError
        ):  # a GPU that broke fails at this, too, and not all of a lab needs it
            cuda.empty_cache()
        self._keep_failure(reference or what, status)
        self.show(f"**{what}: not on this machine.** {explain(status)}")
        if instead:
            instead()
        elif reference:
            self.show(_as_markdown(self.reference(reference), reference))

    def _keep_failure(self, name: str, status: str) -> None:
        """A failure after the measurement (a plot, say) must not hide what was measured."""
        if name not in self._measured:
            self._keep(Run(self.number, name, status=status), name, None)

    def explore(self, draw: Callable[[float], Any], values: Sequence[float], label: str) -> None:
        """A slider over `values` that redraws `draw(value)`, where somebody is there to move it;
        else nothing.

        It needs ipywidgets. A batch run has nobody, so what the slider would show must be told by a
        figure as well.
        """
        if not self._somebody_is_there("A slider"):
            return
        from ipywidgets import SelectionSlider, interact

        middle = values[len(values) // 2]
        wide = {"width": "32em"}  # of 23 values on the usual 300 pixels, a hand can't choose one
        slider = SelectionSlider(
            options=values, value=middle, description=label, continuous_update=False, layout=wide
        )
        interact(lambda value: draw(value), value=slider)  # it matches its arguments by name

    def choose(self, draw: Callable[..., Any], choices: Mapping[str, Sequence[str]]) -> bool:
        """A drop-down list a name, and `draw(name=what is chosen, ...)` at every choice; the first
        value at first.

        False, and nothing is drawn, where nobody is there to choose: in a batch run, as with
        `explore`.
        """
        if not self._somebody_is_there("Drop-down lists"):
            return False
        from ipywidgets import Dropdown, interact

        def redraw(**chosen: str) -> None:  # whatever `draw` returns is not displayed once more
            draw(**chosen)

        interact(
            redraw,
            **{
                name: Dropdown(options=values, description=name) for name, values in choices.items()
            },
        )
        return True

    def _somebody_is_there(self, what: str) -> bool:
        """Whether somebody can use a widget here; where the package for it lacks, that is said."""
        if not _in_kernel() or self._in_batch:
            return False
        try:
            import ipywidgets  # noqa: F401
        except ImportError:
            self.show(
                f"{what} would be here: install it with `pip install -c constraints.txt "
                "ipywidgets`."
            )
            return False
        return True

    def done(self, truths: Mapping[str, float | None] | None = None) -> None:
        """Score the predictions against `truths` (topic -> measured value), and mark the lab as run
        to its end.
        """
        scored = [
            (topic, truth)
            for topic, truth in (truths or {}).items()
            if truth is not None and is_finite(truth) and topic in self._predictions
        ]
        self.table(
            ("prediction", "you", "measured", "off by"), *(self._score(*pair) for pair in scored)
        )
        seconds = round(time.perf_counter() - self._opened, 1)
        made_of = {"beside": records.told(records.BESIDE), "sources": records.told(records.SOURCES)}
        known = {name: value for name, value in made_of.items() if value is not None}
        stamp = {"parameters": self.parameters, "seconds": seconds, "commit": records.commit()}
        self._results.done(self.number, **stamp, **known)
        verdicts = f"labutils report --results {shlex.quote(_short(self.results_dir))}"
        self.show(f"Lab {self.number} is done, after {seconds:.0f} s. All verdicts: `{verdicts}`")

    def _score(self, topic: str, truth: float) -> tuple[str, ...]:
        """One row of the table of predictions; also kept as a record."""
        guess, unit = self._predictions[topic]
        self._record(status="score", topic=topic, value=guess, measured=truth, unit=unit)
        return topic, f"{guess:g} {unit}", f"{truth:.3g} {unit}", _off_by(guess, truth)

    def _record(self, **fields: Any) -> None:
        self._results.append({"lab": self.number} | fields | {"at": records.now()})

    def table(self, *rows: Sequence[Any], otherwise: str = "") -> None:
        """Show `rows` of words and numbers as a table, the first as its head; `otherwise` where
        none says anything.

        A row's first cell names it. `None` means that a value does not apply here; rows and columns
        of nothing else are left out.
        """
        if text := tables.as_table(*rows) or otherwise:
            self.show(text)

    @staticmethod
    def show(text: str) -> None:
        """Markdown in a notebook, plain text elsewhere."""
        if _in_kernel():
            from IPython.display import Markdown, display

            display(Markdown(text))
        else:
            print(text)


def _let_go(error: BaseException) -> None:
    """Clear the local variables of the calls that `error` came out of: they hold the tensors that
    filled the memory.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__


LONGEST_TOLD = 300
"""Characters of an error that a person is told; all of it is on record."""


def explain(status: str) -> str:
    """What a run's `status` means to a person, and what to try."""
    if status == "oom":
        return "Out of memory: this needs more than there is. Close what else uses memory, or choose a smaller scale."
    kind, _, why = status.partition(": ")
    if kind == "skipped":
        missing = why.startswith(("ImportError", "ModuleNotFoundError"))
        return f"It was left out: {why}." + " `labutils doctor` says how to change that." * missing
    return f"It failed with {why[:LONGEST_TOLD].rstrip('.')}. `labutils doctor` checks the usual causes."


def _off_by(guess: float, truth: float) -> str:
    """How far a prediction is from the measurement: a factor where both are positive, else a
    difference.
    """
    if guess > 0 and truth > 0:
        return f"{max(guess, truth) / min(guess, truth):.2f}x"
    return f"{abs(guess - truth):.3g}"


def _as_markdown(run: Run | None, name: str) -> str:
    """The reference run's numbers as a table, or a sentence where there is no such run."""
    if run is None:
        return f"There is no reference run *{name}* to show instead."
    if not run.ok:
        return f"Our reference machine has no numbers for *{name}* either ({run.status})."
    found = [
        (metric, run.metric(metric))
        for metric in run.metrics
        if metric not in (*_FOR_MACHINES, "message")
    ]
    rows = [(metric, value) for metric, value in found if isinstance(value, int | float | str)]
    rows = [
        (metric, ("no", "yes")[value] if metric in _YES_OR_NO else value) for metric, value in rows
    ]
    message = run.metrics.get("message")
    rows += [("message", f"`{message}`")] if message else []
    machine = run.machine.get("gpu", "the reference machine")
    return f"On {machine}, *{name}* (scale {run.scale}) gave:\n\n" + tables.as_table(
        ("metric", "value"), *rows
    )


def _card(run: Run) -> str:
    """The GPU that a run was made on, in a few words."""
    return str(run.machine.get("gpu", "reference machine")).removeprefix("NVIDIA ")


def _days(runs: Iterable[Run]) -> str:
    """The day on which runs were made, or the first and the last of several."""
    days = sorted({run.at.partition("T")[0] for run in runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _notebook(number: str) -> str:
    """The notebook that is at work: as Jupyter names it, else the lab's own; "" where none is."""
    if path := os.environ.get("JPY_SESSION_NAME"):
        return Path(path).name
    files = sorted((records.REPOSITORY / "notebooks").glob(f"{number}_*.ipynb"))
    return files[0].name if files else ""


def _made_of(values: Mapping[str, Any]) -> str:
    """Digest of what decides a lab's results beside the machine: its code, of the notebook as far
    as `labutils run` tells it, and its parameters."""
    sources = records.told(records.SOURCES) or {"labutils": records.code()}
    return records.digest(json.dumps(part, sort_keys=True).encode() for part in (sources, values))


def _lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine's facts is the same each time one looks: some virtual machines are given
    their memory only as it is used."""
    return {name: value for name, value in machine.items() if name != "ram_gb"}


def _is_of(run: Run, recipe: Recipe | None) -> bool:
    """Whether a run was made of `recipe`, as fitted to a GPU or to a CPU; of None any run is."""
    return recipe is None or run.recipe in [
        recipe.fitted_to(device).as_dict() for device in ("cuda", "cpu")
    ]


def _short(path: Path) -> str:
    """A path as a person would type it from the checkout; in full where it, or where we are, is
    outside of that.
    """
    try:
        inside = all(one.is_relative_to(records.REPOSITORY) for one in (path, Path.cwd()))
    except FileNotFoundError:  # the current folder was deleted
        inside = False
    return str(path.relative_to(records.REPOSITORY)) if inside else str(path)


def _in_kernel() -> bool:
    """Whether a Jupyter kernel shows what this process displays."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
