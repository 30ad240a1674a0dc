"""What a profiler trace says, as numbers: where each millisecond went, and which line made the host
wait for the GPU.

`torch.profiler` writes a list of slices of time: on host threads (Python functions, PyTorch
operators, CUDA calls) and on GPU streams (kernels, copies). A viewer such as Perfetto shows it;
this module reads it. `profile(trainer, ...)` records one with the schedule of article A1,
`Trace.read(path)` reads any.

Three definitions carry everything. A GPU is *busy* while at least one kernel runs: the union of
kernel intervals, over the wall time of the recorded steps. Each moment of wall time belongs to
exactly one *share*, the first that applies of: a kernel runs; a copy runs; the host waits for data;
the host waits in a synchronisation; the host is inside a launch call; the host does anything else.
A *synchronisation* is a CUDA call that returns only when the GPU has caught up.

Times are milliseconds from the trace's first event. Nothing here needs a GPU, nor torch except
`profile`.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from labutils.profiling.call_stacks import (
    Frame,
    Slice,
    blamed_operator,
    enclosing,
    innermost_own,
    own_time,
    python_stack,
)
from labutils.profiling.chrome_trace import read_events
from labutils.profiling.intervals import Interval, Lookup, difference, overlap, total, union
from labutils.profiling.kernel_categories import category_of, is_thin

PHASES = ("data", "to_device", "encode", "forward", "backward", "clip", "optimizer", "log")
"""Names of the ranges that the training loop marks with `record_function`, in the order in which
they run.
"""

SHARES = ("kernels", "copies", "data", "sync", "launch", "host")
"""Where wall time can go, in order of precedence (see above). From "data" on, the GPU is idle."""

_NO_WORK = ("views and allocation", "other")  # operators that compute nothing, or nothing known
_DATALOADER = "enumerate(DataLoader)"  # PyTorch's own mark of the time spent on the next batch
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LAUNCH = re.compile(r"^(cudaLaunch|cuLaunch)")
_GRAPH_LAUNCH = re.compile(r"^(cudaGraphLaunch|cuGraphLaunch)")
_COPY_CALL = re.compile(r"^cu(da)?Mem(cpy|set)")
_CROSSES = re.compile("HtoD|DtoH|HtoH|PtoP")
_SYNC = re.compile(
    r"^(cu(da)?(Stream|Device|Ctx|Event)Synchronize|cudaMemcpy([23]D)?|cuMemcpy\w*_v2|cudaFree(Host)?)$"
)


class Call(NamedTuple):
    """A CUDA runtime or driver call on a host thread; `correlation` ties it to the GPU work that it
    caused.
    """

    start: float
    end: float
    name: str
    thread: Any
    correlation: int | None


class Work(NamedTuple):
    """A kernel, copy or fill on a GPU stream."""

    start: float
    end: float
    name: str
    stream: Any
    correlation: int | None


class Given(NamedTuple):
    """One thing that the host gave the GPU to do: a kernel's launch, a graph's launch or a copy.

    `phase` is the marked range in which it was given ("" for none), `work` what it caused, as
    (category, milliseconds, count) with "copy" for what crosses a link to the host or another GPU,
    and `waits` whether the host then waited until the GPU had caught up.
    """

    phase: str
    work: tuple[tuple[str, float, int], ...]
    waits: bool


@dataclass(frozen=True)
class Gap:
    """A stretch of wall time in which no kernel and no copy ran.

    `cause` is what the host did for most of it ("data", "sync", "launch" or "host"), `phase` the
    marked range that covers most of it ("" for none). `after_sync`: it began while the host stood
    in a synchronisation, so that the queue of launched work had run empty.
    """

    start: float
    end: float
    cause: str
    phase: str
    after_sync: bool

    @property
    def ms(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Wait:
    """One time that the host waited for the GPU (or, from `host_reads`, read a tensor's value).

    `call` is the CUDA call that waited, `cause` the PyTorch operator that made it, `frames` the
    Python stack from the outermost frame in, `builtin` the C function called last ("Tensor.item"),
    `phase` the marked range ("" for none), and `idle_after` how long the GPU then had no work, in
    milliseconds.
    """

    start: float
    end: float
    call: str
    cause: str
    phase: str
    frames: tuple[Frame, ...] = ()
    builtin: str = ""
    idle_after: float = 0.0

    @property
    def ms(self) -> float:
        return self.end - self.start

    @property
    def where(self) -> Frame | None:
        """Innermost frame of one's own code; without any, the innermost; None where no stack was
        recorded.
        """
        return innermost_own(self.frames)

    @property
    def library(self) -> Frame | None:
        """The library function that waited, where it was not one's own code."""
        return self.frames[-1] if self.frames and not self.frames[-1].own else None


class Trace:
    """A trace read into memory: `Trace.read(path)` for a file, `Trace(events)` for a list of Chrome
    trace events.

    Raises `ValueError` where no event has a duration.
    """

    def __init__(self, events: Iterable[dict[str, Any]], path: Path | None = None) -> None:
        self.path = path
        self.kernels: list[Work] = []
        self.copies: list[Work] = []
        self.calls: list[Call] = []
        self.annotations: list[Slice] = []
        self.ops: dict[Any, list[Slice]] = defaultdict(list)
        self.python: dict[Any, list[Slice]] = defaultdict(list)
        self._windows: list[tuple[int, float, float]] = []
        self._load(events)

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a *.pt.trace.json or *.pt.trace.json.gz; one that breaks off is read up to there."""
        return cls(read_events(path), Path(path))

    def _load(self, events: Iterable[dict[str, Any]]) -> None:
        origin: float | None = None
        for event in events:
            if event.get("ph") != "X" or "ts" not in event:
                continue
            origin = event["ts"] if origin is None else origin
            start = (event["ts"] - origin) / 1e3
            self._keep(event, start, start + event.get("dur", 0.0) / 1e3)
        if origin is None:
            raise ValueError(
                f"{self.path or 'The list of events'} holds no event with a duration: nothing was "
                "recorded. "
                "Record at least one step after the schedule's wait and warmup."
            )
        for slices in (*self.ops.values(), *self.python.values()):
            slices.sort(key=lambda s: (s.start, -s.end))
        for series in (self.kernels, self.copies, self.calls, self.annotations, self._windows):
            series.sort(key=lambda item: item[:2])

    def _keep(self, event: dict[str, Any], start: float, end: float) -> None:
        """File an event under its kind; kinds that nothing here asks for are let go."""
        kind, thread, args = event.get("cat", ""), event.get("tid"), event.get("args") or {}
        name = sys.intern(str(event.get("name", "")))
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            series = self.kernels if kind == "kernel" else self.copies
            series.append(
                Work(start, end, name, args.get("stream", thread), args.get("correlation"))
            )
        elif kind in ("cuda_runtime", "cuda_driver"):
            self.calls.append(Call(start, end, name, thread, args.get("correlation")))
        elif kind == "user_annotation":
            if step := _STEP.fullmatch(name):
                self._windows.append((int(step[1]), start, end))
            self.annotations.append(Slice(start, end, name))
        elif kind == "cpu_op":
            self.ops[thread].append(
                Slice(start, end, name, args.get("Input Dims") if name.endswith("mm") else None)
            )
        elif kind == "python_function":
            self.python[thread].append(Slice(start, end, name))

    # The recorded steps

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded. Without it, what speaks of the GPU is absent from every
        result.
        """
        return bool(self.kernels or self.copies)

    @cached_property
    def wall(self) -> Interval:
        """From the beginning of the first recorded step to the end of the last, with the GPU work
        that they launched.

        Without ProfilerStep marks (a trace taken without a schedule) this is the whole trace.
        """
        if self._windows:
            start, end = self._windows[0][1], self._windows[-1][2]
            launched = {
                c.correlation
                for c in self.calls
                if start <= c.start < end and c.correlation is not None
            }
            return start, max(
                [end, *(w.end for w in (*self.kernels, *self.copies) if w.correlation in launched)]
            )
        per_thread = (s for slices in (*self.ops.values(), *self.python.values()) for s in slices)
        everything = [*self.kernels, *self.copies, *self.calls, *self.annotations, *per_thread]
        return min(s.start for s in everything), max(s.end for s in everything)

    @property
    def wall_ms(self) -> float:
        return self.wall[1] - self.wall[0]

    @property
    def steps(self) -> int:
        """Recorded steps: calls of `prof.step()` while recording; 1 for a trace without a schedule."""
        return len(self._windows) or 1

    @property
    def step_ms(self) -> list[float]:
        """Host time of each recorded step, from one `prof.step()` to the next."""
        return [end - start for _, start, end in self._windows] or [self.wall_ms]

    def _inside(self, items: Iterable[Any]) -> list[Any]:
        """Those of `items` that begin within the wall time."""
        start, end = self.wall
        return [item for item in items if start <= item.start < end]

    # The GPU

    @cached_property
    def kernel_time(self) -> list[Interval]:
        """When at least one kernel ran, within the wall time."""
        return overlap(union((k.start, k.end) for k in self.kernels), [self.wall])

    @cached_property
    def copy_time(self) -> list[Interval]:
        """When at least one copy or fill ran, within the wall time, whether or not a kernel did
        too.
        """
        return overlap(union((c.start, c.end) for c in self.copies), [self.wall])

    @cached_property
    def idle_time(self) -> list[Interval]:
        """When neither a kernel nor a copy ran, within the wall time."""
        return difference([self.wall], union([*self.kernel_time, *self.copy_time]))

    @property
    def gpu_busy(self) -> float | None:
        """Union of kernel intervals over wall time, in 0..1; None without a GPU."""
        return total(self.kernel_time) / self.wall_ms if self.on_gpu else None

    def categories(self) -> dict[str, dict[str, float]]:
        """Category -> {"ms", "count"} per step, the most time first: kernels; on a CPU, the
        operators' own time.

        Durations are summed, so kernels that overlap count twice. A matrix product that LoRA's rank
        makes thin counts as "thin GEMM" where input shapes were recorded.
        """
        items = self._sorted_kernels() if self.on_gpu else self._sorted_operators()
        table = self._table((category, ms) for _, category, ms in items)
        return dict(sorted(table.items(), key=lambda row: -row[1]["ms"]))

    def _table(self, items: Iterable[tuple[str, float]]) -> dict[str, dict[str, float]]:
        """(key, ms) pairs gathered as key -> {"ms", "count"} per step."""
        durations: dict[str, list[float]] = defaultdict(list)
        for key, ms in items:
            durations[key].append(ms)
        return {
            key: {"ms": sum(ms) / self.steps, "count": len(ms) / self.steps}
            for key, ms in durations.items()
        }

    def _sorted_kernels(self) -> Iterator[tuple[Work, str, float]]:
        """(kernel, its category, its duration) of each kernel."""
        thin = self._thin_correlations()
        for kernel in self._inside(self.kernels):
            category = category_of(kernel.name)
            if category == "GEMM" and kernel.correlation in thin:
                category = "thin GEMM"
            yield kernel, category, kernel.end - kernel.start

    def _sorted_operators(self) -> Iterator[tuple[Slice, str, float]]:
        """(operator, its category, its own time) of each operator."""
        for slices in self.ops.values():
            for operator, own in own_time(self._inside(slices)):
                yield operator, category_of(operator.name), own

    def _thin_correlations(self) -> set[int | None]:
        """Correlations of the launches from inside matrix products with a dimension as small as a
        LoRA rank.
        """
        found = set()
        for thread, calls in self._by_thread(lambda call: bool(_LAUNCH.match(call.name))).items():
            products = [op for op in self.ops.get(thread, ()) if op.dims]
            stacks = enclosing(products, [call.start for call in calls])
            found |= {
                c.correlation
                for c, stack in zip(calls, stacks, strict=True)
                if stack and is_thin(stack[-1].name, stack[-1].dims)
            }
        return found - {None}

    @property
    def captured(self) -> bool:
        """Whether nearly all kernels came out of CUDA graphs: at least ten for each launch that the
        host made.
        """
        found = self.launches()
        return self.on_gpu and found["kernels"] >= 10 * (
            found["launches"] + found["graph_launches"]
        )

    def calls_of(self, name: str) -> float:
        """How many operators or marks a step have a name that begins so."""
        named = [
            *self.annotations,
            *(operator for operators in self.ops.values() for operator in operators),
        ]
        return sum(item.name.startswith(name) for item in self._inside(named)) / self.steps

    def queue(self) -> list[Given]:
        """What the host gave the GPU in the recorded steps, in that order.

        Without a GPU these are the operators that compute something, with their own time. There the
        host does the work itself, so that each of them waits.
        """
        if not self.on_gpu:
            computing = (
                (op.start, c, ms) for op, c, ms in self._sorted_operators() if c not in _NO_WORK
            )
            return [
                Given(self._phase_at(at), ((c, ms, 1),), True) for at, c, ms in sorted(computing)
            ]
        caused = self._work_by_correlation()
        once = {
            call.correlation: call
            for call in reversed(self._inside(self.calls))
            if call.correlation in caused
        }
        calls = sorted(once.values(), key=lambda call: call.start)
        starts = [call.start for call in calls]
        waited_after = {bisect_right(starts, wait.start) - 1 for wait in self.waits}
        return [
            Given(self._phase_at(call.start), caused[call.correlation], place in waited_after)
            for place, call in enumerate(calls)
        ]

    def _work_by_correlation(self) -> dict[int | None, tuple[tuple[str, float, int], ...]]:
        """Correlation -> (category, milliseconds, count) of the kernels and copies that it ties to
        a call.
        """
        found: dict[int | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for kernel, category, ms in self._sorted_kernels():
            found[kernel.correlation][category].append(ms)
        for copy in self._inside(self.copies):
            found[copy.correlation][_kind_of_copy(copy.name)].append(copy.end - copy.start)
        return {
            correlation: tuple(
                (category, sum(times), len(times)) for category, times in kinds.items()
            )
            for correlation, kinds in found.items()
            if correlation is not None
        }

    def kernels_by_phase(self) -> dict[str, dict[str, float]]:
        """Phase -> {"ms", "count"} of kernels per step, by the marked range in which each was
        launched.
        """
        launched_at = {
            call.correlation: call.start for call in self.calls if call.correlation is not None
        }
        return self._table(
            (
                self._phase_at(launched_at.get(kernel.correlation, kernel.start)),
                kernel.end - kernel.start,
            )
            for kernel in self._inside(self.kernels)
        )

    # The host

    def _by_thread(self, wanted: Callable[[Call], bool]) -> dict[Any, list[Call]]:
        chosen: dict[Any, list[Call]] = defaultdict(list)
        for call in self._inside(self.calls):
            if wanted(call):
                chosen[call.thread].append(call)
        return chosen

    def launches(self) -> dict[str, float]:
        """Per step: kernels run; kernel launches, graph launches and copy calls made, with host
        time in them (`.._ms`).

        {} without a GPU. There are more kernels than launches where one call launches a CUDA graph
        of many.
        """
        if not self.on_gpu:
            return {}
        found = {"kernels": len(self._inside(self.kernels)) / self.steps}
        for key, pattern in (
            ("launches", _LAUNCH),
            ("graph_launches", _GRAPH_LAUNCH),
            ("copy_calls", _COPY_CALL),
        ):
            calls = [call for call in self._inside(self.calls) if pattern.match(call.name)]
            found[key] = len(calls) / self.steps
            found[f"{key}_ms"] = sum(call.end - call.start for call in calls) / self.steps
        return found

    @cached_property
    def _marks(self) -> dict[str, list[Slice]]:
        """Phase -> its marks within the wall time. Without a "data" mark, PyTorch's own DataLoader
        mark serves.
        """
        marks: dict[str, list[Slice]] = defaultdict(list)
        own_data = any(mark.name == "data" for mark in self.annotations)
        for mark in self._inside(self.annotations):
            name = "data" if mark.name.startswith(_DATALOADER) and not own_data else mark.name
            if name in PHASES:
                marks[name].append(mark)
        return {name: marks[name] for name in PHASES if name in marks}

    @cached_property
    def phase_time(self) -> dict[str, list[Interval]]:
        """Phase -> when it ran on the host, within the wall time."""
        return {
            name: overlap(union((mark.start, mark.end) for mark in marks), [self.wall])
            for name, marks in self._marks.items()
        }

    @cached_property
    def _phase_lookups(self) -> list[tuple[str, Lookup]]:
        return [(name, Lookup(intervals)) for name, intervals in self.phase_time.items()]

    def _phase_at(self, moment: float) -> str:
        return next(
            (name for name, lookup in self._phase_lookups if lookup.index(moment) is not None), ""
        )

    def host_breakdown(self) -> dict[str, dict[str, float]]:
        """Phase -> {"ms", "count", "idle_ms"} per step: host time, how often, and the part of it
        with an idle GPU.

        The last row, "unmarked", is the rest, so that "ms" adds up to the wall time. No "idle_ms"
        without a GPU.
        """
        rest, rows = [self.wall], {}
        for name, time in self.phase_time.items():
            rows[name] = overlap(rest, time)
            rest = difference(rest, time)
        return {
            name: {
                "ms": total(time) / self.steps,
                "count": len(self._marks.get(name, ())) / self.steps,
            }
            | ({"idle_ms": self.idle_ms_in(time)} if self.on_gpu else {})
            for name, time in (rows | {"unmarked": rest}).items()
        }

    @cached_property
    def _host_states(self) -> dict[str, list[Interval]]:
        """What the host does, as sets of time: waiting for data, in a synchronisation, in a launch
        call.
        """
        launching = (c for c in self.calls if _LAUNCH.match(c.name) or _GRAPH_LAUNCH.match(c.name))
        return {
            "data": self.phase_time.get("data", []),
            "sync": union((wait.start, wait.end) for wait in self.waits),
            "launch": union((call.start, call.end) for call in launching),
        }

    def python_time(self, file: str, function: str) -> list[Interval]:
        """When the Python function of that name in a file whose path ends in `file` ran; [] without
        recorded stacks.
        """
        pattern = re.compile(rf"(^|.*/){re.escape(file)}\(\d+\): {re.escape(function)}")
        calls = (s for slices in self.python.values() for s in slices if pattern.fullmatch(s.name))
        return overlap(union((call.start, call.end) for call in calls), [self.wall])

    def idle_ms_in(self, time: Sequence[Interval]) -> float | None:
        """Milliseconds per step of a set of time (such as `python_time`) in which the GPU idled;
        None without one.
        """
        return total(overlap(time, self.idle_time)) / self.steps if self.on_gpu else None

    def partition(
        self, step_ms: float | None = None, data_ms: float | None = None
    ) -> dict[str, float]:
        """Share (see `SHARES`) -> milliseconds per step; they add up to the wall time.

        Without a GPU there are but two: "data", and "host" for all the rest. The profiler's own
        work makes the host slower and leaves GPU work as it is. So give `step_ms` and `data_ms` (a
        step, and the wait for data in it, timed without the profiler) for an estimate of that step:
        GPU work as traced; of the wait as timed, the part in which the GPU idled in the trace; and
        what is left shared among the others as it was there. They add up to `step_ms`.
        """
        traced = self._traced_partition()
        if step_ms is None:
            return traced
        known = _fitted(
            {name: traced[name] for name in ("kernels", "copies") if name in traced}, step_ms
        )
        waited = total(self._host_states["data"]) / self.steps
        idle = (
            traced["data"] / waited if waited else 1.0
        )  # a host that runs ahead waits while the GPU has work
        known |= _fitted({"data": idle * (data_ms or 0.0)}, step_ms - sum(known.values()))
        others = {name: ms for name, ms in traced.items() if name not in known}
        left = (step_ms - sum(known.values())) / (sum(others.values()) or 1.0)
        return known | {name: ms * left for name, ms in others.items()}

    def _traced_partition(self) -> dict[str, float]:
        states = self._host_states
        on_gpu = {"kernels": self.kernel_time, "copies": self.copy_time} | states
        rest, shares = [self.wall], {}
        for share, time in (on_gpu if self.on_gpu else {"data": states["data"]}).items():
            left = difference(rest, time)
            shares[share] = (total(rest) - total(left)) / self.steps
            rest = left
        return shares | {"host": total(rest) / self.steps}

    def gaps(self, at_least_ms: float = 0.0) -> list[Gap]:
        """Stretches without GPU work of `at_least_ms`, in order of time; [] without a GPU."""
        if not self.on_gpu:
            return []
        states = {name: Lookup(time) for name, time in self._host_states.items()}
        found = []
        for gap in (g for g in self.idle_time if g[1] - g[0] >= at_least_ms):
            rest, causes = [gap], {}
            for name, lookup in states.items():
                left = difference(rest, lookup.within(gap))
                causes[name] = total(rest) - total(left)
                rest = left
            causes["host"] = total(rest)
            phases = {name: total(lookup.within(gap)) for name, lookup in self._phase_lookups}
            phase = max(phases, key=phases.__getitem__) if any(phases.values()) else ""
            after_sync = states["sync"].index(gap[0]) is not None
            found.append(Gap(*gap, max(causes, key=causes.__getitem__), phase, after_sync))
        return found

    def timeline(self, window: Interval | None = None) -> dict[str, list[tuple[float, float, str]]]:
        """Lane -> (start_ms, duration_ms, category) of what happened in `window` (default: the
        first recorded step).

        Times count from the window's beginning. Lanes: "host" by phase; on a GPU also "host waits"
        (synchronisations), "launches" (calls) and "GPU" (kernels by category, copies), without one
        "operators" by category. Empty lanes are left out.
        """
        window = window or self.first_step
        lanes: dict[str, Iterable[tuple[float, float, str]]] = {
            "host": (
                (start, end, name) for name, time in self.phase_time.items() for start, end in time
            )
        }
        if self.on_gpu:
            lanes["host waits"] = ((wait.start, wait.end, "synchronisation") for wait in self.waits)
            lanes["launches"] = (
                (start, end, "launch call") for start, end in self._host_states["launch"]
            )
            kernels = [
                (kernel.start, kernel.end, category)
                for kernel, category, _ in self._sorted_kernels()
            ]
            lanes["GPU"] = [*kernels, *((copy.start, copy.end, "copy") for copy in self.copies)]
        else:
            lanes["operators"] = [
                block for slices in self.ops.values() for block in _outermost_known(slices)
            ]
        found = {lane: _clipped(blocks, window) for lane, blocks in lanes.items()}
        return {lane: blocks for lane, blocks in found.items() if blocks}

    @property
    def step_windows(self) -> list[Interval]:
        """When each recorded step began and ended on the host."""
        return [window[1:] for window in self._windows] or [self.wall]

    @property
    def first_step(self) -> Interval:
        return self.step_windows[0]

    def busy_over_time(self, bins: int = 150) -> tuple[list[float], list[float]]:
        """(milliseconds from the beginning, share of the time in which kernels ran) of `bins` parts
        of the first step.

        Thousands of kernels in one picture look busy; this tells how busy. Two empty lists without
        a GPU.
        """
        if not self.on_gpu:
            return [], []
        start, end = self.first_step
        width, kernels = (end - start) / bins, Lookup(self.kernel_time)
        edges = [start + n * width for n in range(bins)]
        return [edge - start for edge in edges], [
            total(kernels.within((e, e + width))) / width for e in edges
        ]

    # Synchronisations

    @cached_property
    def waits(self) -> list[Wait]:
        """Every synchronisation that begins within the wall time, in order of time.

        A copy between the GPU and pageable host memory, with the synchronisation that follows in
        the same operator, is one wait: the host may stand in either. Such a copy to the host waits
        even where no synchronisation follows.
        """
        moved = {
            copy.correlation: copy.name for copy in self.copies if copy.correlation is not None
        }
        may_wait = self._by_thread(
            lambda c: bool(_SYNC.match(c.name)) or "Pageable" in moved.get(c.correlation, "")
        )
        found: list[Wait] = []
        for thread, calls in may_wait.items():
            found += self._waits_on(thread, calls, moved)
        return sorted(found, key=lambda wait: wait.start)

    def _waits_on(
        self, thread: Any, calls: Sequence[Call], moved: dict[int | None, str]
    ) -> Iterator[Wait]:
        """The waits of one thread, out of its synchronisations and pageable copies in order of
        time.
        """
        moments = [call.start for call in calls]
        operators = enclosing(self.ops.get(thread, ()), moments)
        stacks = enclosing(self.python.get(thread, ()), moments)
        copy_start: float | None = None  # of a pageable copy whose operator synchronises next
        for i, call in enumerate(calls):
            if _SYNC.match(call.name):
                start = call.start if copy_start is None else copy_start
                yield self._wait(start, call, operators[i], stacks[i])
                copy_start = None
                continue
            next_syncs = i + 1 < len(calls) and bool(_SYNC.match(calls[i + 1].name))
            copy_start = (
                call.start
                if next_syncs and operators[i] and operators[i + 1] == operators[i]
                else None
            )
            if copy_start is None and "DtoH" in moved.get(call.correlation, ""):
                yield self._wait(call.start, call, operators[i], stacks[i])

    def _wait(
        self, start: float, call: Call, ops: tuple[Slice, ...], stack: tuple[Slice, ...]
    ) -> Wait:
        frames, builtin = python_stack(stack)
        gap = self._idle_lookup.index(call.end)
        idle_after = 0.0 if gap is None else self.idle_time[gap][1] - call.end
        phase = self._phase_at(call.start)
        return Wait(
            start, call.end, call.name, blamed_operator(ops), phase, frames, builtin, idle_after
        )

    @cached_property
    def _idle_lookup(self) -> Lookup:
        return Lookup(self.idle_time)

    def host_reads(self) -> list[Wait]:
        """Every time a tensor's value was read into Python (`.item()` and kin), in order of time,
        on any machine.

        On a GPU, each read of a device tensor is a synchronisation; on a CPU this is the list of
        candidates.
        """
        found = []
        for thread, slices in self.ops.items():
            reads = [op for op in self._inside(slices) if op.name == "aten::_local_scalar_dense"]
            moments = [read.start for read in reads]
            operators, stacks = (
                enclosing(slices, moments),
                enclosing(self.python.get(thread, ()), moments),
            )
            for read, ops, stack in zip(reads, operators, stacks, strict=True):
                where = self._phase_at(read.start), *python_stack(stack)
                found.append(Wait(read.start, read.end, read.name, blamed_operator(ops), *where))
        return sorted(found, key=lambda wait: wait.start)

    def syncs_in(self, phase: str) -> int:
        """How many synchronisations began inside the marked range `phase`, over all recorded steps."""
        return sum(wait.phase == phase for wait in self.waits)

    def sync_table(self, waits: Sequence[Wait] | None = None) -> list[dict[str, Any]]:
        """`waits` (default: every synchronisation) gathered by place and cause, the most time
        first.

        Each row: `where` (file: function of one's own code), `line` (where that function begins),
        `library` (the library function in between), `builtin`, `cause` (operator), `call`, `phase`
        (each absent where there is none), and `per_step`, `ms_per_step`, `idle_ms_per_step` (GPU
        idle after it).
        """
        groups: dict[tuple[Any, ...], list[Wait]] = defaultdict(list)
        for wait in self.waits if waits is None else waits:
            groups[
                wait.where, wait.library, wait.builtin, wait.cause, wait.call, wait.phase
            ].append(wait)
        rows = [self._sync_row(*key, group) for key, group in groups.items()]
        return sorted(rows, key=lambda row: -row["ms_per_step"])

    def _sync_row(
        self,
        where: Frame | None,
        library: Frame | None,
        builtin: str,
        cause: str,
        call: str,
        phase: str,
        group: list[Wait],
    ) -> dict[str, Any]:
        texts = {
            "library": str(library or ""),
            "builtin": builtin,
            "cause": cause,
            "call": call,
            "phase": phase,
        }
        return (
            {"where": str(where or "no Python stack was recorded")}
            | ({"line": where.line} if where else {})
            | {name: text for name, text in texts.items() if text}
            | {
                "per_step": len(group) / self.steps,
                "ms_per_step": sum(wait.ms for wait in group) / self.steps,
                "idle_ms_per_step": sum(wait.idle_after for wait in group) / self.steps,
            }
        )

    def metrics(self, step_ms: float | None = None, data_ms: float | None = None) -> dict[str, Any]:
        """The numbers of a `Run`, per step; what does not apply to this trace is absent.

        `.._share` are those of `partition(step_ms, data_ms)` as parts of the step. `.._idle_ms` are
        those of `host_breakdown`, always as traced. `clip_sync` is 1 where a synchronisation began
        inside the mark "clip", or 0.

        GPU-busy comes in two figures: `traced_gpu_busy` of the traced step, and, where `step_ms` is
        given, `untraced_gpu_busy`: kernel time as traced over a step timed without the profiler.
        `gpu_busy` is the one to quote. Of a step that the host launches it is the untraced: the
        profiler makes the host slower. Of a captured one it is the less of the two, mostly the
        traced. There tracing adds some 0.3 us between two kernels of a graph and may stretch the
        kernels, so the traced figure is a lower bound and the untraced an upper one.
        """
        found: dict[str, Any] = {
            "traced_step_ms": self.wall_ms / self.steps,
            "traced_steps": self.steps,
        }
        shares = self.partition(step_ms, data_ms)
        found |= {f"{name}_share": ms / sum(shares.values()) for name, ms in shares.items()}
        if not self.on_gpu:
            return found
        found |= {
            f"{phase}_idle_ms": row["idle_ms"] for phase, row in self.host_breakdown().items()
        }
        found |= {} if step_ms is None else {"untraced_gpu_busy": found["kernels_share"]}
        launches = self.launches()
        return found | {
            "gpu_busy": min(found["kernels_share"], self.gpu_busy)
            if self.captured
            else found["kernels_share"],
            "traced_gpu_busy": self.gpu_busy,
            "kernels_ms": total(self.kernel_time) / self.steps,
            "kernels_per_step": launches["kernels"],
            "launches_per_step": launches["launches"],
            "graph_launches_per_step": launches["graph_launches"],
            "launch_ms": launches["launches_ms"] + launches["graph_launches_ms"],
            "syncs_per_step": len(self.waits) / self.steps,
            "sync_ms": sum(wait.ms for wait in self.waits) / self.steps,
            "clip_sync": int(self.syncs_in("clip") > 0),
        }


def _kind_of_copy(name: str) -> str:
    """The category of a copy or fill: those within a GPU's own memory are bounded as the kernels
    that do the same.
    """
    if _CROSSES.search(name):
        return "copy"
    return "elementwise" if name.startswith("Memset") else "casts and layout"


def _outermost_known(slices: Iterable[Slice]) -> Iterator[tuple[float, float, str]]:
    """(start, end, category) of one thread's operators that compute something known, those inside
    another left out.
    """
    covered = float("-inf")
    for item in slices:
        category = category_of(item.name)
        if item.start >= covered and category not in ("other", "views and allocation"):
            covered = item.end
            yield item.start, item.end, category


def _fitted(parts: dict[str, float], most: float) -> dict[str, float]:
    """`parts`, scaled down where together they exceed `most`."""
    factor = min(1.0, most / (sum(parts.values()) or 1.0))
    return {name: part * factor for name, part in parts.items()}


def _clipped(
    blocks: Iterable[tuple[float, float, str]], window: Interval
) -> list[tuple[float, float, str]]:
    """(start, end, category) as (start from the window's beginning, duration, category), what lies
    outside cut off.
    """
    cut = (
        (max(start, window[0]), min(end, window[1]), category) for start, end, category in blocks
    )
    return [
        (start - window[0], end - start, category) for start, end, category in cut if start < end
    ]


def profile(
    trainer: Any,
    steps: int = 5,
    folder: str | Path = "profile",
    with_stack: bool = True,
    wait: int = 1,
    with_shapes: bool | None = None,
    kind: type[Trace] = Trace,
) -> Trace:
    """Record `steps` steps of `trainer` as article A1 does, and read the trace back.

    The schedule is the article's: one step passed over, one to warm the profiler up, `steps`
    recorded, once. `wait` is how many to pass over: more where workers have made batches ready, as
    steps that use them up wait for no data. `trainer` has `.step()`; each call is one recorded step
    (for a training trainer an optimizer step, accumulation included). The file `*.pt.trace.json` in
    `folder` opens in Perfetto. `with_stack` records Python functions as well, `with_shapes` (None:
    with the stacks) the operators' input shapes; both slow the host down, so take times without
    them. It is read back as a trace of that `kind`.
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
        record_shapes=with_stack if with_shapes is None else with_shapes,
        with_stack=with_stack,
    ) as profiler:
        for number in range(wait + 1 + steps):
            trainer.step()
            if on_gpu and number == wait:
                # so that work launched while warming up does not run into the record
                torch.cuda.synchronize()
            profiler.step()
    (written,) = set(folder.glob("*.pt.trace.json")) - before
    return kind.read(written)
