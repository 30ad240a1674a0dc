"""What a profiler trace says, as numbers: where each millisecond went, and which line made the host
wait for the GPU.

`torch.profiler` writes a list of slices of time: on host threads (Python functions, PyTorch
operators, CUDA calls) and on GPU streams (kernels, copies). A viewer such as Perfetto shows them;
this module reads them. `profile(trainer)` records a trace with the schedule of article A1.
`Trace.read(path)` reads any trace file.

Three definitions carry everything. A GPU is *busy* while at least one kernel runs: the union of
kernel intervals, over the wall time of the recorded steps. Each moment of wall time belongs to
exactly one *share*, the first that applies of: a kernel runs; a copy runs; the host waits for data;
the host waits in a synchronisation; the host is inside a launch call; the host does anything else.
A *synchronisation* is a CUDA call that returns only when the GPU has caught up.

Times are milliseconds from the trace's first event. Only `profile` needs torch or a GPU.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from labutils.profiling.call_stacks import Slice, blamed_operator, enclosing, own_time
from labutils.profiling.intervals import Interval, Lookup, difference, overlap, total, union
from labutils.profiling.kernel_categories import category_of, is_thin
from labutils.profiling.utilization_and_power import gpu_busy

PHASES = ("data", "to_device", "encode", "forward", "backward", "clip", "optimizer", "log")
"""Ranges that the training loop marks with `record_function`, in the order in which they run."""

SHARES = ("kernels", "copies", "data", "sync", "launch", "host")
"""Where wall time can go, in order of precedence (see above). From "data" on, the GPU is idle."""

COMPUTES_NOTHING = ("views and allocation", "other")
"""Categories of operators that launch no known work."""

_DATALOADER = "enumerate(DataLoader)"  # PyTorch's own mark of the time spent on the next batch
_OPTIMIZER = "Optimizer.step#"  # and of an optimizer's step
_HAS_SHAPES = re.compile("mm$|convolution|_scaled_dot_product|masked_fill|::where$|::add_?$")
"""Operators whose input shapes are kept; those of all others would only take memory."""
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LAUNCH, _ANY_LAUNCH = re.compile("cu(da)?Launch"), re.compile("cu(da)?(Graph)?Launch")
_CALLS = {
    "launches": _LAUNCH,
    "graph_launches": re.compile("cu(da)?GraphLaunch"),
    "copy_calls": re.compile("cu(da)?Mem(cpy|set)"),
}
_ON_HOST = ("user_annotation", "cpu_op", "cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_SHOWN = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp")
"""What `cut_to_micro_step` keeps: categories of events, and fields of an event."""
_CROSSES = re.compile("HtoD|DtoH|HtoH|PtoP")
_SYNC = re.compile(
    r"^(cu(da)?(Stream|Device|Ctx|Event)Synchronize|cudaMemcpy([23]D)?|cuMemcpy\w*_v2|"
    r"cudaFree(Host)?)$"
)


Work = tuple[Slice, str, float]
"""A kernel, copy or operator, its category, and its milliseconds (an operator's own ones)."""


class Wait(NamedTuple):
    """One time that the host waited for the GPU, or, from `host_reads`, read a tensor's value.

    `call` is the CUDA call that waited and `cause` the PyTorch operator that made it.
    """

    start: float
    end: float
    call: str
    cause: str
    phase: str

    @property
    def ms(self) -> float:
        return self.end - self.start


class Trace:
    """A trace in memory: `Trace.read(path)` reads a file, `Trace(events)` a list of Chrome events.

    `kernels` and `copies` are the GPU's, `calls` the host's calls of CUDA, `annotations` the marks
    of `record_function`. `ops` are PyTorch's operators, thread by thread. All are in order of time.
    Raises `ValueError` where no event has a duration.
    """

    def __init__(self, events: Iterable[dict[str, Any]], path: Path | None = None) -> None:
        self.path = path
        self.kernels: list[Slice] = []
        self.copies: list[Slice] = []
        self.calls: list[Slice] = []
        self.annotations: list[Slice] = []
        self.ops: dict[Any, list[Slice]] = defaultdict(list)
        kinds = {"kernel": self.kernels, "gpu_memcpy": self.copies, "gpu_memset": self.copies}
        kinds |= {"cuda_runtime": self.calls, "cuda_driver": self.calls}
        kinds |= {"user_annotation": self.annotations}
        timed = [event for event in events if event.get("ph") == "X" and "ts" in event]
        if not timed:
            raise ValueError(
                f"{path or 'The list of events'} holds no event with a duration: nothing was "
                "recorded. Record at least one step after the schedule's wait and warmup."
            )
        for event in timed:
            kind = event.get("cat")
            series = self.ops[event.get("tid")] if kind == "cpu_op" else kinds.get(kind)
            slice_ = _slice(event, timed[0]["ts"])
            if series is not None and slice_.ms >= 0:  # a damaged event lasts less than nothing
                series.append(slice_)
        for series in (*kinds.values(), *self.ops.values()):
            series.sort(key=lambda s: (s.start, -s.end))

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a *.pt.trace.json or *.pt.trace.json.gz.

        Raises `FileNotFoundError`, or `ValueError` where the file is no trace or breaks off.
        """
        path = Path(path)
        return cls(_events_of(path), path)

    # The recorded steps

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded. Without it, results say nothing about a GPU."""
        return bool(self.kernels or self.copies)

    @cached_property
    def wall(self) -> Interval:
        """From the start of the first recorded step to the end of the last one and of its GPU work.

        Without ProfilerStep marks (a trace taken without a schedule) this is the whole trace.
        """
        gpu_work = [*self.kernels, *self.copies]
        if self._step_marks:
            start, end = self._step_marks[0][0], self._step_marks[-1][1]
            launched = {c.correlation for c in self.calls if start <= c.start < end} - {None}
            return start, max([end, *(w.end for w in gpu_work if w.correlation in launched)])
        everything = [*gpu_work, *self.calls, *self.annotations, *chain(*self.ops.values())]
        return min(s.start for s in everything), max(s.end for s in everything)

    @property
    def wall_ms(self) -> float:
        return self.wall[1] - self.wall[0]

    @cached_property
    def _step_marks(self) -> list[Interval]:
        return [(a.start, a.end) for a in self.annotations if _STEP.fullmatch(a.name)]

    @property
    def steps(self) -> int:
        """Recorded steps: calls of `prof.step()` while recording; 1 without a schedule."""
        return len(self._step_marks) or 1

    @property
    def step_windows(self) -> list[Interval]:
        """When each recorded step began and ended on the host."""
        return self._step_marks or [self.wall]

    def recorded(self, items: Iterable[Slice]) -> list[Slice]:
        """Those of `items` that begin within the wall time."""
        start, end = self.wall
        return [item for item in items if start <= item.start < end]

    def time_of(self, items: Iterable[Slice]) -> list[Interval]:
        """The time that at least one of `items` covers, within the wall time."""
        return overlap(union((item.start, item.end) for item in items), [self.wall])

    # The GPU

    @cached_property
    def kernel_time(self) -> list[Interval]:
        """When at least one kernel ran."""
        return self.time_of(self.kernels)

    @cached_property
    def idle_time(self) -> list[Interval]:
        """When neither a kernel nor a copy ran."""
        return difference([self.wall], self.time_of([*self.kernels, *self.copies]))

    def categories(self) -> dict[str, dict[str, float]]:
        """Category -> {"ms", "count"} per step, the most time first: kernels; on a CPU, the
        operators' own time.

        Durations are summed, so kernels that overlap count twice. A matrix product that LoRA's rank
        makes thin counts as "thin GEMM" where input shapes were recorded.
        """
        table: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "count": 0.0})
        for _, category, ms in self._kernel_work() if self.on_gpu else self._operator_work():
            table[category]["ms"] += ms / self.steps
            table[category]["count"] += 1 / self.steps
        return dict(sorted(table.items(), key=lambda row: -row[1]["ms"]))

    def _kernel_work(self) -> Iterator[Work]:
        for kernel in self.recorded(self.kernels):
            category = category_of(kernel.name)
            if category == "GEMM" and kernel.correlation in self._thin_correlations:
                category = "thin GEMM"
            yield kernel, category, kernel.ms

    def _operator_work(self) -> Iterator[Work]:
        for slices in self.ops.values():
            for operator, own in own_time(self.recorded(slices)):
                yield operator, category_of(operator.name), own

    @cached_property
    def _thin_correlations(self) -> set[int | None]:
        """Correlations of launches from matrix products that LoRA's rank makes thin."""
        thin = set()
        for call, operators in self._within(c for c in self.calls if _LAUNCH.match(c.name)):
            product = next((op for op in reversed(operators) if op.name.endswith("mm")), None)
            if product and is_thin(product.name, product.dims):
                thin.add(call.correlation)
        return thin - {None}

    def calls_of(self, name: str) -> float:
        """How many operators or marks a step have a name that begins so."""
        named = self.recorded(chain(self.annotations, *self.ops.values()))
        return sum(item.name.startswith(name) for item in named) / self.steps

    def launched(self) -> list[tuple[Slice, list[Work], Wait | None]]:
        """What the host gave the GPU in the recorded steps, in order.

        Each entry: the CUDA call, the kernels and copies that it caused, and the last wait for the
        GPU before the next call (None: there was none). Without a GPU the calls are the operators
        that compute something, each with its own time as its work.
        """
        if not self.on_gpu:
            computing = (work for work in self._operator_work() if work[1] not in COMPUTES_NOTHING)
            in_order = sorted(computing, key=lambda work: work[0].start)
            return [(work[0], [work], None) for work in in_order]
        caused: dict[Any, list[Work]] = defaultdict(list)
        copies = ((c, category_of_copy(c.name), c.ms) for c in self.recorded(self.copies))
        for work in chain(self._kernel_work(), copies):
            caused[work[0].correlation].append(work)
        caused.pop(None, None)
        first: dict[Any, Slice] = {}
        for call in self.recorded(self.calls):
            if call.correlation in caused:
                first.setdefault(call.correlation, call)
        starts = [call.start for call in first.values()]
        waits = {bisect_right(starts, wait.start) - 1: wait for wait in self.waits}
        return [
            (call, caused[correlation], waits.get(place))
            for place, (correlation, call) in enumerate(first.items())
        ]

    # The host

    def _within(self, items: Iterable[Slice]) -> Iterator[tuple[Slice, tuple[Slice, ...]]]:
        """(item, operators that it begins in, the outermost first) of those of `items` that begin
        within the wall time, one thread after the other.
        """
        by_thread: dict[Any, list[Slice]] = defaultdict(list)
        for item in self.recorded(items):
            by_thread[item.thread].append(item)
        for thread, mine in by_thread.items():
            moments = [item.start for item in mine]
            yield from zip(mine, enclosing(self.ops.get(thread, ()), moments), strict=True)

    def launches(self) -> dict[str, float]:
        """Per step: kernels run; kernel launches, graph launches and copy calls made. {} without a
        GPU.

        There are more kernels than launches where one call launches a CUDA graph of many.
        """
        if not self.on_gpu:
            return {}
        counts = {"kernels": len(self.recorded(self.kernels)) / self.steps}
        for kind, pattern in _CALLS.items():
            calls = [call for call in self.recorded(self.calls) if pattern.match(call.name)]
            counts[kind] = len(calls) / self.steps
        return counts

    @cached_property
    def _marks(self) -> dict[str, list[Slice]]:
        """Phase -> its marks. Without marks "data" and "optimizer", PyTorch's own serve."""
        marks: dict[str, list[Slice]] = defaultdict(list)
        for mark in self.recorded(self.annotations):
            pytorchs = (_DATALOADER, _OPTIMIZER)
            name = next((own for own in pytorchs if mark.name.startswith(own)), mark.name)
            marks[name].append(mark)
        marks["data"] = marks["data"] or marks[_DATALOADER]
        marks["optimizer"] = marks["optimizer"] or [
            self._update_in(mark, marks["backward"]) for mark in marks[_OPTIMIZER]
        ]
        return {name: marks[name] for name in PHASES if marks[name]}

    def _update_in(self, mark: Slice, backward: list[Slice]) -> Slice:
        """The update in PyTorch's own mark of an optimizer's step.

        It begins after what a closure computes in there (PyTorch Lightning trains so). It ends with
        the recorded step, whose end may be called from inside of it.
        """
        starts = [other.end for other in backward if mark.start < other.end < mark.end]
        ends = [end for start, end in self.step_windows if start <= mark.start < end]
        return mark._replace(start=max([mark.start, *starts]), end=min([mark.end, *ends]))

    @cached_property
    def phase_time(self) -> dict[str, list[Interval]]:
        """Phase -> when it ran on the host."""
        return {name: self.time_of(marks) for name, marks in self._marks.items()}

    @cached_property
    def _phase_lookups(self) -> dict[str, Lookup]:
        return {name: Lookup(intervals) for name, intervals in self.phase_time.items()}

    def phase_at(self, moment: float) -> str:
        """The phase in which the host is then; "" outside any mark."""
        lookups = self._phase_lookups.items()
        return next((name for name, lookup in lookups if lookup.index(moment) is not None), "")

    def host_breakdown(self) -> dict[str, dict[str, float]]:
        """Phase -> {"ms", "count", "idle_ms"} per step: host time, how often, and the part of it
        with an idle GPU.

        The last row, "unmarked", is the rest, so that "ms" adds up to the wall time. No "idle_ms"
        without a GPU.
        """
        rows = {}
        for name, time in in_precedence([self.wall], self.phase_time, rest="unmarked").items():
            count = len(self._marks.get(name, ())) / self.steps
            rows[name] = {"ms": total(time) / self.steps, "count": count}
            if self.on_gpu:
                rows[name]["idle_ms"] = total(overlap(time, self.idle_time)) / self.steps
        return rows

    @cached_property
    def _host_states(self) -> dict[str, list[Interval]]:
        """When the host waits for data, stands in a synchronisation, is in a launch call."""
        launching = (call for call in self.calls if _ANY_LAUNCH.match(call.name))
        return {
            "data": self.phase_time.get("data", []),
            "sync": union((wait.start, wait.end) for wait in self.waits),
            "launch": union((call.start, call.end) for call in launching),
        }

    def partition(
        self, step_ms: float | None = None, data_ms: float | None = None
    ) -> dict[str, float]:
        """Share (see `SHARES`) -> milliseconds per step; they add up to the wall time.

        Without a GPU there are two: "data", and "host" for all the rest. The profiler's own work
        makes the host slower and leaves GPU work as it is. So give `step_ms` and `data_ms` (a step,
        and the wait for data in it, timed without the profiler) for an estimate of that step: GPU
        work as traced; of the wait as timed, the part in which the GPU idled in the trace; and what
        is left shared among the others as it was there. They add up to `step_ms`.
        """
        states = self._host_states
        if self.on_gpu:
            states = {"kernels": self.kernel_time, "copies": self.time_of(self.copies)} | states
        else:
            states = {"data": states["data"]}
        parts = in_precedence([self.wall], states, rest="host")
        traced = {name: total(time) / self.steps for name, time in parts.items()}
        if step_ms is None:
            return traced
        on_gpu = {name: traced[name] for name in ("kernels", "copies") if name in traced}
        known = _at_most(on_gpu, step_ms)
        waited = total(states["data"]) / self.steps
        # a host that runs ahead waits for data while the GPU has work
        idle = traced["data"] / waited if waited else 1.0
        known |= _at_most({"data": idle * (data_ms or 0.0)}, step_ms - sum(known.values()))
        others = {name: ms for name, ms in traced.items() if name not in known}
        factor = (step_ms - sum(known.values())) / (sum(others.values()) or 1.0)
        return known | {name: ms * factor for name, ms in others.items()}

    # Pictures

    def timeline(self, window: Interval | None = None) -> dict[str, list[tuple[float, float, str]]]:
        """Lane -> (start_ms, duration_ms, category) of what happened in `window` (default: the
        first recorded step), counted from the window's beginning.

        Lanes: "host" by phase; on a GPU also "host waits" (synchronisations), "launches" (calls)
        and "GPU" (kernels by category, copies), without one "operators" by category.
        """
        first, last = window or self.step_windows[0]
        blocks = [("host", *time, name) for name, ts in self.phase_time.items() for time in ts]
        if self.on_gpu:
            blocks += [("host waits", w.start, w.end, "synchronisation") for w in self.waits]
            blocks += [("launches", *at, "launch call") for at in self._host_states["launch"]]
            blocks += [("GPU", k.start, k.end, kind) for k, kind, _ in self._kernel_work()]
            blocks += [("GPU", copy.start, copy.end, "copy") for copy in self.copies]
        else:
            operators = chain(*map(_outermost_known, self.ops.values()))
            blocks += [("operators", *block) for block in operators]
        lanes: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for lane, begin, finish, kind in blocks:
            start, end = max(begin, first), min(finish, last)
            if start < end:
                lanes[lane].append((start - first, end - start, kind))
        return dict(lanes)

    def busy_over_time(self, bins: int = 150) -> tuple[list[float], list[float]]:
        """(milliseconds from the beginning, share of the time in which kernels ran) of `bins` parts
        of the first step. Two empty lists without a GPU.

        Thousands of kernels in one picture look busy; this tells how busy.
        """
        if not self.on_gpu:
            return [], []
        start, end = self.step_windows[0]
        width, kernels = (end - start) / bins, Lookup(self.kernel_time)
        at = [n * width for n in range(bins)]
        return at, [total(kernels.within((start + t, start + t + width))) / width for t in at]

    # Synchronisations

    @cached_property
    def waits(self) -> list[Wait]:
        """Every synchronisation that begins within the recorded steps, in order of time.

        What begins after the last step has ended is the profiler's own wait for the GPU.
        A copy between the GPU and pageable host memory, with the synchronisation that follows in
        the same operator, is one wait: the host may stand in either. Such a copy to the host waits
        even where no synchronisation follows.
        """
        steps_end = self.step_windows[-1][1]
        moved = {copy.correlation: copy.name for copy in self.copies}
        moved.pop(None, None)
        may_wait = (
            call
            for call in self.calls
            if call.start < steps_end
            and (_SYNC.match(call.name) or "Pageable" in moved.get(call.correlation, ""))
        )
        waits = []
        copy_start: float | None = None  # of a pageable copy whose operator synchronises next
        nothing = Slice(0.0, 0.0, ""), ()
        inside = [*self._within(may_wait), nothing]
        for (call, operators), (following, following_operators) in pairwise(inside):
            start = call.start if copy_start is None else copy_start
            copy_start = None
            if not _SYNC.match(call.name):
                if _SYNC.match(following.name) and operators and operators == following_operators:
                    copy_start = call.start
                    continue
                if "DtoH" not in moved[call.correlation]:
                    continue
            waits.append(self._wait(call, operators, start))
        return sorted(waits, key=lambda wait: wait.start)

    def host_reads(self) -> list[Wait]:
        """Every time a tensor's value was read into Python (`.item()` and kin), in order of time.

        On a GPU each read of a device tensor is a synchronisation; on a CPU these are candidates.
        """
        operators = chain(*self.ops.values())
        reading = (op for op in operators if op.name == "aten::_local_scalar_dense")
        reads = [self._wait(*inside, inside[0].start) for inside in self._within(reading)]
        return sorted(reads, key=lambda wait: wait.start)

    def _wait(self, item: Slice, operators: Sequence[Slice], start: float) -> Wait:
        """The wait from `start` to the end of `item`, and who is to blame for it."""
        cause, phase = blamed_operator(operators), self.phase_at(item.start)
        return Wait(start, item.end, item.name, cause, phase)

    def metrics(self, step_ms: float | None = None, data_ms: float | None = None) -> dict[str, Any]:
        """The numbers of a `Run`, per step; what does not apply to this trace is absent.

        `.._share` are those of `partition(step_ms, data_ms)` as parts of the step. `.._idle_ms` are
        those of `host_breakdown`, always as traced. `clip_sync` is 1 where a synchronisation began
        inside the mark "clip", or 0.

        GPU-busy comes in two figures: `traced_gpu_busy` of the traced step, and `kernels_share`:
        where `step_ms` is given, kernel time as traced over a step timed without the profiler.
        `gpu_busy` is the one to quote. For a step that the host launches it is the untraced one:
        the profiler makes the host slower. For a captured step it is the smaller of the two, mostly
        the traced one. There tracing adds some 0.3 us between two kernels of a graph and may
        stretch the kernels, so the traced figure is a lower bound and the untraced an upper one.
        """
        metrics: dict[str, Any] = {"traced_step_ms": self.wall_ms / self.steps}
        metrics["traced_steps"] = self.steps
        shares = self.partition(step_ms, data_ms)
        metrics |= {f"{name}_share": ms / sum(shares.values()) for name, ms in shares.items()}
        if not self.on_gpu:
            return metrics
        phases = self.host_breakdown().items()
        metrics |= {f"{phase}_idle_ms": row["idle_ms"] for phase, row in phases}
        busy, traced_busy = metrics["kernels_share"], gpu_busy(self.kernel_time, self.wall_ms)
        made = self.launches()
        captured = made["kernels"] >= 10 * (made["launches"] + made["graph_launches"])
        return metrics | {
            "gpu_busy": min(busy, traced_busy) if captured else busy,
            "traced_gpu_busy": traced_busy,
            "kernels_ms": total(self.kernel_time) / self.steps,
            "kernels_per_step": made["kernels"],
            "launches_per_step": made["launches"],
            "syncs_per_step": len(self.waits) / self.steps,
            "sync_ms": sum(wait.ms for wait in self.waits) / self.steps,
            "clip_sync": int(any(wait.phase == "clip" for wait in self.waits)),
        }


def _events_of(path: Path) -> list[dict[str, Any]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", errors="replace") as file:
            content = json.load(file, strict=False)
    except (EOFError, ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole profiler trace: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list):
        raise ValueError(f"{path} is no profiler trace: there is no list of traceEvents in it.")
    return events


def in_precedence(
    whole: list[Interval], states: Mapping[str, list[Interval]], rest: str
) -> dict[str, list[Interval]]:
    """State -> its own time of `whole`, earlier states first; what is left is `rest`."""
    parts = {}
    for name, time in states.items():
        parts[name] = overlap(whole, time)
        whole = difference(whole, time)
    return parts | {rest: whole}


def category_of_copy(name: str) -> str:
    """The category of a copy or fill. Within a GPU's own memory it is bounded as kernels are that
    do the same.
    """
    if _CROSSES.search(name):
        return "copy"
    return "elementwise" if name.startswith("Memset") else "casts and layout"


def _slice(event: dict[str, Any], origin: float) -> Slice:
    """An event of the file; `origin` is its time 0 in microseconds."""
    args, name = event.get("args") or {}, sys.intern(str(event.get("name", "")))
    start = (event["ts"] - origin) / 1e3
    keys = ("Input Dims", "Input type", "Input Strides") if _HAS_SHAPES.search(name) else ()
    return Slice(
        start,
        start + event.get("dur", 0.0) / 1e3,
        name,
        event.get("tid"),
        args.get("correlation"),
        args.get("blocks per SM"),
        *map(args.get, keys),
    )


def _outermost_known(slices: Iterable[Slice]) -> Iterator[tuple[float, float, str]]:
    """(start, end, category) of one thread's operators that compute something known, without those
    inside another.
    """
    covered = float("-inf")
    for item in slices:
        category = category_of(item.name)
        if item.start >= covered and category not in COMPUTES_NOTHING:
            covered = item.end
            yield item.start, item.end, category


def _at_most(parts: dict[str, float], most: float) -> dict[str, float]:
    """`parts`, scaled down where together they exceed `most`."""
    factor = min(1.0, most / (sum(parts.values()) or 1.0))
    return {name: part * factor for name, part in parts.items()}


def profile(
    trainer: Any,
    steps: int = 5,
    folder: str | Path = "profile",
    with_stack: bool = False,
    wait: int = 1,
    with_shapes: bool = False,
) -> Trace:
    """Record `steps` steps of `trainer` as article A1 does, and read the trace back.

    The schedule is the article's: one step passed over, one to warm the profiler up, `steps`
    recorded, once. `wait` is how many to pass over: more where workers have made batches ready, as
    steps that use them up wait for no data. `trainer` has `.step()`; each call is one recorded step
    (for a training trainer an optimizer step, accumulation included). The file `*.pt.trace.json` in
    `folder` opens in Perfetto. `with_stack` records Python functions as well, `with_shapes` the
    operators' input shapes; both slow the host down, so take times without them.
    """
    import torch
    from torch.profiler import ProfilerActivity, schedule, tensorboard_trace_handler

    folder = Path(folder)
    before = set(folder.glob("*.pt.trace.json"))
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=wait, warmup=1, active=steps, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(folder)),
        record_shapes=with_shapes,
        with_stack=with_stack,
    ) as profiler:
        for number in range(wait + 1 + steps):
            trainer.step()
            if on_gpu and number == wait:
                # so that work launched while warming up does not run into the record
                torch.cuda.synchronize()
            profiler.step()
    (written,) = set(folder.glob("*.pt.trace.json")) - before
    return Trace.read(written)


def cut_to_micro_step(path: Path, out: Path) -> Path:
    """Write the last micro-step of the first recorded step, with clipping and update, to `out`
    (*.json.gz): a trace small enough to give away, which a viewer opens like the whole one.

    Host events are those that begin in it, GPU work is what they launched. What a viewer shows of
    them stays; paths, shapes and the machine's description go.
    """
    events = _events_of(path)
    marks = sorted((e for e in events if e.get("cat") == "user_annotation"), key=itemgetter("ts"))
    step = next(mark for mark in marks if _STEP.fullmatch(mark["name"]))
    end = step["ts"] + step["dur"]
    within = [mark for mark in marks if step["ts"] <= mark["ts"] < end]
    start = [mark["ts"] for mark in within if mark["name"] == "data"][-1]
    kept = [e for e in events if e.get("cat") in _ON_HOST and start <= e["ts"] < end]
    caused = {_correlation(e) for e in kept} - {None}
    kept += [e for e in events if e.get("cat") in _ON_GPU and _correlation(e) in caused]
    arrows = [e for e in events if e.get("cat") == "ac2g" and e.get("id") in caused]
    slim = [{k: e[k] for k in _SHOWN if k in e} for e in [*kept, *arrows]]
    for new, old in zip(slim, [*kept, *arrows], strict=True):
        new["ts"] = round(old["ts"] - start, 3)
        if (correlation := _correlation(old)) is not None:
            new["args"] = {"correlation": correlation}
    names = [e for e in events if e.get("ph") == "M"]
    text = json.dumps({"traceEvents": names + sorted(slim, key=itemgetter("ts"))})
    out.write_bytes(gzip.compress(text.encode(), mtime=0))
    return out


def _correlation(event: dict[str, Any]) -> int | None:
    return (event.get("args") or {}).get("correlation")
