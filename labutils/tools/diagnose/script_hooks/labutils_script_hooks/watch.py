"""Goes through a script's optimizer steps: skips some, times, watches and profiles some.

    SKIPPED       what is compiled, tuned or allocated once happens here
    TIMED         nothing but clocks: a step's time and its waits for data are these
    FROM_IDLE     on a GPU: the host's time for a step that begins with an empty queue
    WATCHED       each call is seen: which lines write, and which read a tensor's value
    WARMING       the profiler runs, and what it records is dropped
    PROFILED      torch.profiler, without Python stacks
    DONE          the record is written, and the script ended, unless it may keep going

A step is what lies between two calls of the leading optimizer's `step`. Where no optimizer is
PyTorch's, it begins with the first backward pass after a parameter or its gradient was changed.
Backward passes in between tell how many micro-batches a step takes. Stages are counted in steps and
not in time, so that all ranks of a run over several GPUs end at the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from labutils_script_hooks import calls, compat, facts
from labutils_script_hooks.process_note import ProcessNote, save

Stage = Enum("Stage", "SKIPPED TIMED FROM_IDLE WATCHED WARMING PROFILED DONE")
WATCHED_STEPS = 2


class Watch:
    """The watch of one process.

    given: `folder`, `keep_going`, and the steps of stages (`warmup`, `timed`, `profiled`). A trial
    of fixes (`try`) has no stages but the first two.
    """

    def __init__(self, given: dict[str, Any], note: ProcessNote) -> None:
        self.given, self.note = given, note
        counts = (given["warmup"], given["timed"], 3, WATCHED_STEPS, 1, given["profiled"])
        self.plan = dict(zip([*Stage][: 2 if "try" in given else None], counts, strict=False))
        self.stage = Stage.SKIPPED
        self.steps = 0
        self.leader: Callable[[], Any] = lambda: None  # weak: the optimizer is the script's
        self.own = compat.OwnOptimizer()
        self.on_gpu = False
        self.marks: list[Any] = []
        self.from_idle_ms: list[float] = []
        self.now: Counter[str] = Counter()
        """Of this step so far: `data_ms`, `fetch_cpu_ms`, `batches`, `backwards`."""
        self.counts: list[Counter[str]] = []
        self.batches: deque[dict[str, Any]] = deque(maxlen=64)  # what came before training goes
        self.loaders: Any = weakref.WeakKeyDictionary()  # iterator -> its DataLoader
        self.loader: dict[str, Any] = {}
        self.profiler: Any = None
        self.calls = calls.Calls()
        self.sync_lines: Counter[str] = Counter()
        self.syncs_watched = contextlib.ExitStack()
        self.inside_data = self.inside_backward = False

    # ----------------------------------------------------------------------------------- hooks

    def install(self) -> None:
        """Hook optimizer steps, backward passes and DataLoaders of the PyTorch just imported."""
        import torch
        import torch.profiler
        from torch.optim import optimizer

        self.torch = torch
        compat.around_pytorch(self)
        optimizer.register_optimizer_step_pre_hook(self._before_update)
        optimizer.register_optimizer_step_post_hook(self._after_update)
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._after_fork)

    def _stop(self) -> None:
        """A running profiler, or calls still watched, would break Python's own end."""
        self.calls.pause()
        if self.profiler is not None:
            self.profiler.on_trace_ready = None  # what there is of a trace explains nothing
            self.profiler.stop()
            self.profiler = None

    def _after_fork(self) -> None:
        """A forked process watches by itself, unless its parent trains already."""
        if self.steps:
            self.calls.pause()
            self.profiler = None
            self.stage, self.given = Stage.DONE, self.given | {"keep_going": True}

    def profiler_begins(self, original: Callable[..., Any], profile: Any) -> Any:
        """A process has one profiler: where the script starts its own, ours gives way."""
        if self.profiler is None or profile is not self.profiler.profiler:
            self.note.write(error="it runs a profiler of its own. Turn that off for the diagnosis")
            if self.profiler is not None:
                self._stop()
        return original(profile)

    def backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.inside_backward:  # an activation checkpoint, which has a backward pass inside
            return original(*args, **kwargs)
        if not self._pytorch_leads() and self.own.has_stepped():
            self._after_update(self.own)
        self.now["backwards"] += 1
        self.inside_backward = True
        try:
            with self.torch.profiler.record_function("backward"):
                return original(*args, **kwargs)
        finally:
            self.inside_backward = False
            if not self._pytorch_leads():
                self.own.after_backward(args[0] if args else kwargs["tensors"])

    def new_epoch(self, original: Callable[..., Any], loader: Any) -> Any:
        began = time.perf_counter()
        iterator = original(loader)
        self.now["data_ms"] += 1e3 * (time.perf_counter() - began)
        self.loaders[iterator] = loader
        return iterator

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        if self.inside_data:  # a dataset that reads from a loader of its own
            return original(iterator)
        self.inside_data = True
        watching = self.calls.pause()
        wall, busy = time.perf_counter(), time.thread_time()
        try:
            batch = original(iterator)
        finally:
            self.inside_data = False
            self.now["data_ms"] += 1e3 * (time.perf_counter() - wall)
            self.now["fetch_cpu_ms"] += 1e3 * (time.thread_time() - busy)
        self.now["batches"] += 1
        if self.stage in (Stage.SKIPPED, Stage.WATCHED):
            with contextlib.suppress(Exception):  # another kind of batch must not end the script
                self.batches.append(facts.of_batch(batch))
        if (loader := self.loaders.get(iterator)) is not None:
            self.loader = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
        if watching:
            self.calls.resume()
        return batch

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._is_leader(optimizer):
            self.backwards_before_update = self.now["backwards"]

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if self.stage is Stage.DONE:
            if not self.given["keep_going"]:  # the script has caught its end
                raise SystemExit(0)
            return
        self.calls.pause()  # what follows is no call of the script's
        if self._is_leader(optimizer):
            if self._pytorch_leads():  # a closure is one micro-batch, however often LBFGS calls it
                within = self.now["backwards"] - self.backwards_before_update
                self.now["backwards"] -= max(0, within - 1)
            self._step_ends()
        if self.stage is Stage.WATCHED and sys.getprofile() is None:
            self.calls.resume()

    def _is_leader(self, optimizer: Any) -> bool:
        """Whether this optimizer's steps count: the first that stepped leads while it exists. One
        of PyTorch's may take over: a GradScaler passes over some of its first steps."""
        early = self.stage in (Stage.SKIPPED, Stage.TIMED)
        if early and self.leader() is self.own is not optimizer:
            self.leader, self.steps, self.stage = lambda: None, 0, Stage.SKIPPED
            self.marks, self.counts = [], []
        if self.leader() is None:
            self.leader = weakref.ref(optimizer)
            self.on_gpu = any(p.is_cuda for g in optimizer.param_groups for p in g["params"])
            self.note.write(steps=1, on_gpu=self.on_gpu)
            if not self.on_gpu:
                self.plan[Stage.FROM_IDLE] = 0
        return optimizer is self.leader()

    def _pytorch_leads(self) -> bool:
        return self.leader() not in (None, self.own)

    # ---------------------------------------------------------------------------------- stages

    def _step_ends(self) -> None:
        self.steps += 1
        self.note.facts["steps"] = self.steps
        if self.stage is Stage.TIMED:
            self.counts.append(self.now)
        elif self.stage is Stage.FROM_IDLE:
            self.from_idle_ms.append(1e3 * (time.perf_counter() - self.idle_from))
        self.now = Counter()
        before, self.stage = self.stage, self._stage_after(self.steps)
        begins = self.stage is not before
        if begins:
            self.syncs_watched.close()
            self.note.write()
        if self.stage is Stage.TIMED and begins:
            self._synchronise()
        if Stage.TIMED in (self.stage, before):
            self._mark()
        if self.stage is Stage.FROM_IDLE:
            self._synchronise()
            self.idle_from = time.perf_counter()
        if self.stage is Stage.WATCHED and begins and self.on_gpu:
            self.syncs_watched.enter_context(self._noting_syncs())
        if self.stage is Stage.WARMING and begins and "error" not in self.note.facts:
            self._start_profiler()
        if self.profiler is not None and self.stage is not Stage.WARMING:
            if self.profiler.step_num == 0:  # work of the warm-up must not run into the record
                self._synchronise()
            self.profiler.step()
        if self.stage is Stage.DONE:
            self._finish()

    def _stage_after(self, steps: int) -> Stage:
        for stage, count in self.plan.items():
            if steps < count:
                return stage
            steps -= count
        return Stage.DONE

    def _mark(self) -> None:
        if self.on_gpu:
            self.marks.append(self.torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def _step_ms(self) -> list[float]:
        """Milliseconds of each timed step."""
        self._synchronise()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in pairs]

    def _synchronise(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    @contextlib.contextmanager
    def _noting_syncs(self) -> Iterator[None]:
        """PyTorch warns at each operator that waits for the GPU; the stack then holds the line."""
        show, cuda = warnings.showwarning, self.torch.cuda
        mode = cuda.get_sync_debug_mode()

        def note(message: Any, *others: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.sync_lines[calls.place_of(sys._getframe(1))] += 1
            else:
                show(message, *others)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*prototype feature")  # of the mode itself
            warnings.filterwarnings("always", ".*synchronizing CUDA operation")
            warnings.showwarning = note
            cuda.set_sync_debug_mode("warn")
            yield
            cuda.set_sync_debug_mode(mode)

    def _start_profiler(self) -> None:
        profiler, active = self.torch.profiler, self.given["profiled"]
        cpu, gpu = profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA
        self.profiler = profiler.profile(
            activities=[cpu, gpu] if self.on_gpu else [cpu],
            schedule=profiler.schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=self._export if _is_first_rank() else None,
            record_shapes=True,
        )
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # of one cycle
        try:
            self.profiler.start()
        except (RuntimeError, AssertionError) as error:
            self.note.write(error=f"no profiler could be started: {error}")
            self.profiler = None

    def _export(self, profiler: Any) -> None:
        profiler.export_chrome_trace(self._file("trace"))

    # --------------------------------------------------------------------------------- the end

    def _finish(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        if _is_first_rank():
            save(self._file("record"), self.record())
        if not self.given["keep_going"]:
            # As `sys.exit()` would: `finally` blocks run, and the exit code is 0.
            raise SystemExit(0)

    def _file(self, kind: str) -> str:
        return os.path.join(self.given["folder"], f"{kind}-{os.getpid()}.json")

    def record(self) -> dict[str, Any]:
        """What was measured, but for the trace; times in milliseconds a step."""
        total, steps = sum(self.counts, Counter()), max(1, len(self.counts))
        return {mean: total[mean] / steps for mean in ("backwards", "batches", "fetch_cpu_ms")} | {
            "device": "cuda" if self.on_gpu else "cpu",
            "step_ms": self._step_ms(),
            "data_ms": [count["data_ms"] for count in self.counts],
            "host_step_ms": self.from_idle_ms,
            "calls": self.calls.rows(WATCHED_STEPS),
            "sync_lines": {at: count / WATCHED_STEPS for at, count in self.sync_lines.items()},
            "loader": self.loader,
            "batch_facts": list(self.batches),
            "optimizer": facts.of_optimizer(self.leader()),
            "config": facts.of_settings(self.on_gpu),
        }


def prepare(settings: str) -> None:
    """Write a note that a Python process is here, and watch PyTorch's steps once it is imported.

    settings: JSON, see `Watch`.
    """
    given = json.loads(settings)
    note = ProcessNote(given["folder"])

    def start_watch() -> None:
        note.write(torch=True)
        try:
            if "try" in given:
                from labutils_script_hooks.fixes_in_place import Fixes

                Fixes(given["try"], given["folder"]).put()
            Watch(given, note).install()
        except Exception as error:  # the script must run all the same
            note.write(error=f"this PyTorch can't be watched ({error!r})")

    compat.WhenImported("torch", start_watch)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"
