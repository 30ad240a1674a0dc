"""Goes through a script's optimizer steps: skips some, times, watches and profiles some.

    skipped       what is compiled, tuned or allocated once happens here
    timed         nothing but clocks: a step's time and its waits for data are these
    from idle     on a GPU: the host's time for a step that begins with an empty queue
    watched       each call is seen: which lines write, and which read a tensor's value
    profiled      torch.profiler, without Python stacks, after one step that warms it up

A step is what lies between two calls of the leading optimizer's `step`. The first optimizer that
steps leads. Backward passes in between tell how many micro-batches a step takes. Stages are counted
in steps and not in time, so that all ranks of a run over several GPUs end at the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from labutils_script_hooks import batches, calls
from labutils_script_hooks.process_note import ProcessNote

SKIPPED, TIMED, FROM_IDLE, WATCHED, WARMING, PROFILED, DONE = (
    "skipped",
    "timed",
    "from idle",
    "watched",
    "warming",
    "profiled",
    "done",
)
COUNTED = "_labutils_counts_its_calls"
"""Mark of a closure that is counted already."""
CAUGHT = 3
"""A script that catches `SystemExit` so often, and takes another step, would never end by it."""
OWN_PROFILER = "it runs a profiler of its own"
OTHERS_S = 10.0
"""How long other threads may go on when the one that trains has ended."""
SILENT = 20
"""Steps of other optimizers without one of the leader's, after which another leads."""


class Watch:
    """The watch of one process.

    given: `folder`, `keep_going`, and the steps of stages (`warmup`, `timed`, `profiled`).
    """

    def __init__(self, given: dict[str, Any], note: ProcessNote) -> None:
        self.given, self.note, self.pid = given, note, os.getpid()
        self.plan = [
            (SKIPPED, given["warmup"]),
            (TIMED, given["timed"]),
            (FROM_IDLE, 3),
            (WATCHED, 2),
            (WARMING, 1),
            (PROFILED, given["profiled"]),
        ]
        self.stage = SKIPPED
        self.steps = self.silent = self.caught = 0
        self.leader: Callable[[], Any] = lambda: None  # weak: the optimizer is the script's
        self.on_gpu = False
        self.marks: list[Any] = []
        self.step_ms: list[float] = []
        self.from_idle_ms: list[float] = []
        self.now = dict.fromkeys(
            ("data_ms", "fetch_cpu_ms", "backwards", "batches", "closures", "closure_backwards"), 0
        )
        self.counts: list[dict[str, float]] = []
        self.batches: list[dict[str, Any]] = []
        self.loaders: Any = weakref.WeakKeyDictionary()  # iterator -> its DataLoader
        self.profiler: Any = None
        self.profiler_is_ours = self.others_profile = False
        self.calls: calls.Calls | None = None
        self.sync_lines: dict[str, int] = {}
        self.update_mark: Any = None
        self.inside_data = self.inside_backward = self.inside_closure = 0
        self.undo: list[Callable[[], None]] = []

    # ----------------------------------------------------------------------------------- hooks

    def install(self) -> None:
        """Hook optimizer steps, backward passes and DataLoaders of the PyTorch just imported."""
        import torch
        import torch.utils.data.dataloader as dataloader
        from torch.optim import optimizer

        # These two stay to the end: PyTorch may be going through the list of hooks.
        optimizer.register_optimizer_step_pre_hook(self._before_update)
        optimizer.register_optimizer_step_post_hook(self._after_update)
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._after_fork)
        self._around(torch.autograd, "backward", self._backward)
        self._around(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        self._around(dataloader.DataLoader, "__iter__", self._new_epoch)
        # No part of PyTorch's interface: without it a script's own profiler isn't noticed.
        profile = torch.autograd.profiler.profile
        if hasattr(profile, "_prepare_trace"):
            self._around(profile, "_prepare_trace", self._profiler_begins)
            self._around(profile, "__exit__", self._profiler_ends)

    def _around(self, owner: ModuleType | type, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self.undo.append(lambda: setattr(owner, name, original))

    def _at_exit(self) -> None:
        """A running profiler, or calls still watched, would break Python's own end."""
        if os.getpid() == self.pid:
            self._stop_watching_calls()
            self._drop_profiler()

    def _after_fork(self) -> None:
        """A forked process watches by itself, unless its parent trains already."""
        if self.steps == 0 and self.stage == SKIPPED:
            self.pid = os.getpid()
            self.note.continue_in_child()
            return
        self._stop_watching_calls()
        self.profiler = self.calls = self.update_mark = None
        self.stage, self.given = DONE, self.given | {"keep_going": True}

    def _stop_watching_calls(self) -> None:
        if self.calls is not None:
            self.calls.pause()

    def _drop_profiler(self) -> None:
        if self.profiler is not None:
            self.profiler.on_trace_ready = None  # what there is of a trace explains nothing
            self.profiler.stop()
            self.profiler = None

    def _profiler_begins(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A process has one profiler: where the script starts its own, ours gives way."""
        if not self.profiler_is_ours:
            self.others_profile = True
            if self.profiler is not None:
                self._give_way()
        return original(*args, **kwargs)

    def _profiler_ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.others_profile = self.others_profile and self.profiler is not None
        return original(*args, **kwargs)

    def _give_way(self) -> None:
        self._drop_profiler()
        self.note.write(error=f"could not be profiled to the end: {OWN_PROFILER}")

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.inside_backward:
            return original(*args, **kwargs)
        from torch.profiler import record_function

        self.now["closure_backwards" if self.inside_closure else "backwards"] += 1
        self.inside_backward += 1
        try:
            with record_function("backward"):
                return original(*args, **kwargs)
        finally:
            self.inside_backward -= 1

    def _new_epoch(self, original: Callable[..., Any], loader: Any) -> Any:
        began = time.perf_counter()
        iterator = original(loader)
        self.now["data_ms"] += 1e3 * (time.perf_counter() - began)
        self.loaders[iterator] = loader
        return iterator

    def _next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        if self.inside_data:  # a dataset that reads from a loader of its own
            return original(iterator)
        self.inside_data += 1
        with self._calls_paused():
            wall, busy = time.perf_counter(), time.thread_time()
            try:
                batch = original(iterator)
            finally:
                self.inside_data -= 1
                self.now["data_ms"] += 1e3 * (time.perf_counter() - wall)
                self.now["fetch_cpu_ms"] += 1e3 * (time.thread_time() - busy)
            self.now["batches"] += 1
            if self.stage in (SKIPPED, WATCHED) and len(self.batches) < 64:
                self._look_at(iterator, batch)
        return batch

    def _calls_paused(self) -> contextlib.AbstractContextManager[None]:
        return self.calls.paused() if self.calls is not None else contextlib.nullcontext()

    def _look_at(self, iterator: Any, batch: Any) -> None:
        facts: dict[str, Any] = {}
        try:
            facts = batches.facts(batch)
        except Exception as error:  # a batch of another kind must not end the script
            self.note.write(batch_error=repr(error))
        loader = self.loaders.get(iterator)
        if loader is not None:
            names = ("num_workers", "pin_memory", "persistent_workers", "batch_size")
            facts |= {name: getattr(loader, name) for name in names}
        self.batches.append(facts)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._mark_update()
        if self.stage == DONE:
            return None
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._counted(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return None

    def _counted(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure by which an optimizer computes the loss anew, its calls counted once.

        Its passes are no update and no micro-batches.
        """
        if getattr(closure, COUNTED, False):
            return closure

        @functools.wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now["closures"] += 1
            self._end_update_mark()
            self.inside_closure += 1
            try:
                return closure(*args, **kwargs)
            finally:
                self.inside_closure -= 1
                self._mark_update()

        setattr(counted, COUNTED, True)
        return counted

    def _mark_update(self) -> None:
        if self.stage == PROFILED:
            from torch.profiler import record_function

            self.update_mark = record_function("optimizer")
            self.update_mark.__enter__()

    def _end_update_mark(self) -> None:
        if self.update_mark is not None:
            self.update_mark.__exit__(None, None, None)
            self.update_mark = None

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._end_update_mark()
        if self.stage == DONE and not self.given["keep_going"]:
            self._end_again()
        if self.stage == DONE or os.getpid() != self.pid:
            return
        self._stop_watching_calls()  # what follows is no call of the script's
        if self._is_leader(optimizer):
            self._step_ends()
        if self.calls is not None and self.stage == WATCHED:
            self.calls.resume()

    def _is_leader(self, optimizer: Any) -> bool:
        """Whether this optimizer's steps count.

        The first that stepped leads as long as it exists. Before anything is timed, another one
        leads if it steps while the first doesn't.
        """
        self.silent = 0 if optimizer is self.leader() else self.silent + 1
        if self.leader() is None or (self.silent > SILENT and self.stage == SKIPPED):
            self.silent = 0
            self.leader = weakref.ref(optimizer)
            first = next(p for group in optimizer.param_groups for p in group["params"])
            self.on_gpu = first.device.type == "cuda"
            self.note.add(on_gpu=self.on_gpu)
            if not self.on_gpu:
                self.plan = [(stage, count) for stage, count in self.plan if stage != FROM_IDLE]
        return optimizer is self.leader()

    # ---------------------------------------------------------------------------------- stages

    def _step_ends(self) -> None:
        self.steps += 1
        self.note.add(steps=self.steps)
        if self.stage == TIMED:
            self.counts.append(dict(self.now))
        elif self.stage == FROM_IDLE:
            self.from_idle_ms.append(1e3 * (time.perf_counter() - self.idle_from))
        self.now = dict.fromkeys(self.now, 0)
        stage = self._stage_after(self.steps)
        if stage != self.stage:
            self.note.write(stage=stage)
            self._leave(self.stage)
            self.stage = stage
            self._enter(stage)
        elif stage == TIMED:
            self._mark()
        if stage == FROM_IDLE:
            self._synchronise()
            self.idle_from = time.perf_counter()
        if self.profiler is not None:
            self._profiler_step()
        if stage == DONE:
            self._finish()

    def _stage_after(self, steps: int) -> str:
        for stage, count in self.plan:
            if steps < count:
                return stage
            steps -= count
        return DONE

    def _enter(self, stage: str) -> None:
        if stage == TIMED:
            self._synchronise()
            self._mark()
        elif stage == WATCHED:
            if self.on_gpu:
                self._watch_syncs()
            if sys.getprofile() is None:  # else the script is profiled already, by cProfile say
                self.calls = calls.Calls()
        elif stage == WARMING:
            self._start_profiler()

    def _leave(self, stage: str) -> None:
        if stage == TIMED:
            self._mark()
            self._synchronise()
            for a, b in zip(self.marks, self.marks[1:], strict=False):
                self.step_ms.append(a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a))
        elif stage == WATCHED and self.on_gpu:
            self._unwatch_syncs()

    def _mark(self) -> None:
        if not self.on_gpu:
            self.marks.append(time.perf_counter())
            return
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def _synchronise(self) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    def _watch_syncs(self) -> None:
        """Have PyTorch warn at each operator that waits for the GPU: its stack holds the line."""
        import torch

        show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()
        filters = warnings.filters[:]

        def note(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                show(message, category, filename, lineno, *more)
                return
            place = calls.place_of(sys._getframe(1))
            self.sync_lines[place] = self.sync_lines.get(place, 0) + 1

        def set_quietly(mode: int | str) -> None:
            with warnings.catch_warnings():  # it warns that it is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode(mode)

        def unwatch() -> None:
            set_quietly(mode)
            warnings.showwarning = show
            warnings.filters[:] = filters

        set_quietly("warn")
        warnings.simplefilter("always")
        warnings.showwarning = note
        self._unwatch_syncs = unwatch

    def _start_profiler(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity

        if self.others_profile:
            self._give_way()
            return
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        active = self.given["profiled"]
        self.profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=self._export,
            record_shapes=True,
        )
        try:
            with self._own_profiler():
                self.profiler.start()
        except (RuntimeError, AssertionError) as error:
            self.note.write(error=f"no profiler could be started: {error}")
            self.profiler = None

    @contextlib.contextmanager
    def _own_profiler(self) -> Iterator[None]:
        self.profiler_is_ours = True
        try:
            yield
        finally:
            self.profiler_is_ours = False

    def _profiler_step(self) -> None:
        if self.stage == WARMING:  # it has only just started
            return
        if self.profiler.step_num == 0:  # work of the warm-up must not run into the record
            self._synchronise()
        with self._own_profiler():
            self.profiler.step()

    def _export(self, profiler: Any) -> None:
        if _is_first_rank():
            name = f"trace-{self.pid}.json"
            profiler.export_chrome_trace(os.path.join(self.given["folder"], name))

    # --------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        if _is_first_rank():
            path = os.path.join(self.given["folder"], f"record-{self.pid}.json")
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(self.record(), file, default=str)
            os.replace(path + ".new", path)
        if self.given["keep_going"]:
            for undo in self.undo:
                undo()
            return
        training = threading.current_thread()
        threading.Thread(target=self._end_threads, args=[training], daemon=True).start()
        # As `sys.exit()` would: `finally` blocks run, and the exit code is 0.
        raise SystemExit(0)

    def _end_threads(self, training: threading.Thread) -> None:
        """End the process, even if threads wait for what no longer comes.

        The thread that trains runs its `finally` blocks to their end.
        """
        training.join()
        time.sleep(OTHERS_S)
        _exit_now()

    def _end_again(self) -> None:
        """The script caught the first `SystemExit`."""
        self.caught += 1
        if self.caught >= CAUGHT:
            _exit_now()
        raise SystemExit(0)

    def record(self) -> dict[str, Any]:
        """What was measured, but for the trace; times in milliseconds a step."""
        watched = dict(self.plan)[WATCHED]
        return {
            "device": "cuda" if self.on_gpu else "cpu",
            "step_ms": self.step_ms,
            "data_ms": [count["data_ms"] for count in self.counts],
            "host_step_ms": self.from_idle_ms,
            "backwards": self._micro_batches(),
            "closures": self._mean("closures"),
            "batches_per_step": self._mean("batches"),
            "fetch_cpu_ms": self._mean("fetch_cpu_ms"),
            "calls": self.calls.rows(watched) if self.calls else [],
            "sync_lines": {place: count / watched for place, count in self.sync_lines.items()},
            "batches": self.batches,
            "optimizer": _optimizer_facts(self.leader()),
            "config": _config(self.on_gpu),
        }

    def _mean(self, key: str) -> float:
        return sum(count[key] for count in self.counts) / max(1, len(self.counts))

    def _micro_batches(self) -> float:
        """Backward passes a step; those of a closure count once, however often it was called."""
        passes, calls = self._mean("closure_backwards"), self._mean("closures")
        return self._mean("backwards") + (passes / calls if calls else 0.0)


def _config(on_gpu: bool) -> dict[str, Any]:
    """The script's settings of PyTorch. TF32 has two settings, and reading the older one raises
    where the newer was used; earlier versions of PyTorch have only the older."""
    import torch

    backends = torch.backends
    facts = {
        "threads": torch.get_num_threads(),
        "cuda_available": torch.cuda.is_available(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("0", ""),
        "anomaly": torch.is_anomaly_enabled(),
    }
    try:
        facts["matmul_tf32"] = backends.cuda.matmul.allow_tf32
        facts["cudnn_tf32"] = backends.cudnn.allow_tf32
    except RuntimeError:
        facts["matmul_tf32"] = backends.cuda.matmul.fp32_precision == "tf32"
        facts["cudnn_tf32"] = backends.cudnn.conv.fp32_precision == "tf32"
    if on_gpu:
        facts["memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
        facts["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return facts


def _exit_now() -> None:
    """Without what Python does at its end, which waits for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _optimizer_facts(optimizer: Any) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.grad is not None or p.requires_grad]
    first = optimizer.param_groups[0]
    return {
        "name": type(optimizer).__name__,
        "tensors": len(trained),
        "bytes": sum(p.numel() * p.element_size() for p in trained),
        "fused": first.get("fused"),
        "foreach": first.get("foreach"),
        "takes_fused": "fused" in first,
    }
