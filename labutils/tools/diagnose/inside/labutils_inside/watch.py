"""Goes through a script's optimizer steps: passes some over, times, watches and profiles some, and
writes it down.

    passed over   what is compiled, tuned or allocated once happens here
    timed         nothing but clocks: a step's time and its waits for data are these
    from idle     on a GPU: the host's time for a step that begins with an empty queue
    watched       each call is seen: which lines write, and which read a tensor's value
    profiled      torch.profiler, without Python stacks

A step is what lies between two calls of the leading optimizer's `step`, the first that was seen to
step. Backward passes in between tell how many micro-batches it takes. Stages are counted in steps
and not in time, so that all ranks of a run over several GPUs leave off at the same one.
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

from labutils_inside import batches, calls
from labutils_inside.arrival import Word

PASSED_OVER, TIMED, FROM_IDLE, WATCHED, WARMING = (
    "passed over",
    "timed",
    "from idle",
    "watched",
    "warming",
)
PROFILED, DONE = "profiled", "done"
_SYNC = "synchronizing CUDA operation"
COUNTED = "_labutils_counts_its_calls"
"""Mark of a closure that is counted already."""


Finished = SystemExit
"""Ends the script after the last profiled step, as `sys.exit()` would: `finally` blocks run, exit
code 0. (A type of our own would end a thread with a traceback.)"""
CAUGHT = 3
"""A script that catches its end so often, and takes another step, would never end by it."""
OWN_PROFILER = "it runs a profiler of its own"
OTHERS_S = 10.0
"""How long other threads may go on when the one that trains has ended."""
SILENT = 20
"""Steps of other optimizers without one of the leader's, after which another leads."""


class Watch:
    """One process's watch. given: `folder`, `keep_going`, and the steps of stages (`warmup`,
    `timed`, `profiled`).
    """

    def __init__(self, given: dict[str, Any], word: Word) -> None:
        self.given, self.word, self.pid = given, word, os.getpid()
        on_gpu_only = 3
        self.plan = [
            (PASSED_OVER, given["warmup"]),
            (TIMED, given["timed"]),
            (FROM_IDLE, on_gpu_only),
            (WATCHED, 2),
            (WARMING, 1),
            (PROFILED, given["profiled"]),
        ]
        self.stage = PASSED_OVER
        self.steps = 0
        self.leader: Callable[[], Any] = lambda: None  # weak: it and its state are the script's
        self.silent = self.caught = 0
        self.on_gpu = False
        self.marks: list[Any] = []
        self.clock: dict[str, list[float]] = {
            "step_ms": [],
            "data_ms": [],
            "optimizer_ms": [],
            "host_step_ms": [],
        }
        self.now = {
            "data_ms": 0.0,
            "optimizer_ms": 0.0,
            "fetch_cpu_ms": 0.0,
            "backwards": 0,
            "batches": 0,
            "epochs": 0,
        }
        self.now |= {"closures": 0, "closure_backwards": 0}
        self.counts: list[dict[str, float]] = []
        self.batches: list[dict[str, Any]] = []
        self.loaders: Any = weakref.WeakKeyDictionary()  # iterator -> its DataLoader
        self.profiler: Any = None
        self.profiler_is_ours = self.others_profile = False
        self.calls: calls.Calls | None = None
        self.sync_lines: dict[str, int] = {}
        self.update_began = 0.0
        self.update_mark: Any = None
        self.inside_data = self.inside_backward = self.inside_closure = 0
        self.undo: list[Callable[[], None]] = []

    # ----------------------------------------------------------------------------------- hooks

    def install(self) -> None:
        """Hook the optimizers' steps, backward passes and DataLoaders of the PyTorch that was just
        imported.
        """
        import torch
        import torch.utils.data.dataloader as dataloader
        from torch.optim import optimizer

        # These two stay to the end: they can't be taken out of a list that PyTorch is going
        # through.
        optimizer.register_optimizer_step_pre_hook(self._before_update)
        optimizer.register_optimizer_step_post_hook(self._after_update)
        atexit.register(self._let_go)
        os.register_at_fork(after_in_child=self._left_behind)
        self._around(torch.autograd, "backward", self._backward)
        if hasattr(
            torch.autograd.profiler.profile, "_prepare_trace"
        ):  # no part of PyTorch's interface
            self._around(torch.autograd.profiler.profile, "_prepare_trace", self._profiler_begins)
            self._around(torch.autograd.profiler.profile, "__exit__", self._profiler_ends)
        self._around(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        self._around(dataloader.DataLoader, "__iter__", self._new_epoch)

    def _let_go(self) -> None:
        """Where the script ends in the midst: a profiler, or calls still told of, would break
        Python's own end.
        """
        if os.getpid() != self.pid:
            return
        if self.calls is not None:
            self.calls.pause()
        if self.profiler is not None:
            self.profiler.on_trace_ready = None  # what there is of a trace explains nothing
            self.profiler.stop()

    def _left_behind(self) -> None:
        """In a process that the script forked: what is being timed and profiled is its parent's."""
        if self.calls is not None:
            self.calls.pause()
        self.profiler = self.calls = self.update_mark = None
        self.stage, self.given = DONE, self.given | {"keep_going": True}

    def _profiler_begins(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """There is one profiler in a process: where the script starts its own, ours gives way."""
        if not self.profiler_is_ours:
            self.others_profile = True
            if self.profiler is not None:
                self._give_way(OWN_PROFILER)
        return original(*args, **kwargs)

    def _profiler_ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.others_profile = self.others_profile and self.profiler is not None
        return original(*args, **kwargs)

    def _give_way(self, why: str) -> None:
        if self.profiler is not None:
            self.profiler.on_trace_ready = None
            self.profiler.stop()
            self.profiler = None
        self.word.say(error=f"could not be profiled to the end: {why}")

    def _around(self, owner: ModuleType | type, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self.undo.append(lambda: setattr(owner, name, original))

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
        self.now["epochs"] += 1
        self.loaders[iterator] = loader
        return iterator

    def _next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        if self.inside_data:  # a dataset that reads from a loader of its own
            return original(iterator)
        self.inside_data += 1
        telling = sys.getprofile()
        sys.setprofile(None)
        wall, busy = time.perf_counter(), time.thread_time()
        try:
            batch = original(iterator)
        except StopIteration:
            self._note_if_empty(iterator)
            raise
        finally:
            self.inside_data -= 1
            sys.setprofile(telling)
            self.now["data_ms"] += 1e3 * (time.perf_counter() - wall)
            self.now["fetch_cpu_ms"] += 1e3 * (time.thread_time() - busy)
        self.now["batches"] += 1
        if self.stage in (PASSED_OVER, WATCHED) and len(self.batches) < 64:
            self._look_at(iterator, batch)
        return batch

    def _note_if_empty(self, iterator: Any) -> None:
        """Leave word of the first DataLoader that ended without having given a batch. The script's
        loop is just ending: whatever its dataset answers, that goes on."""
        loader = self.loaders.get(iterator)
        if loader is None or iterator._num_yielded or "empty" in self.word.said:
            return
        settings = {name: getattr(loader, name, None) for name in ("batch_size", "drop_last")}
        with contextlib.suppress(
            Exception
        ):  # a stream has no length, and other datasets may have worse
            settings["examples"] = len(loader.dataset)
        place = calls.place_of(sys._getframe())
        self.word.note(empty=settings | {"dataset": type(loader.dataset).__name__, "place": place})

    def _look_at(self, iterator: Any, batch: Any) -> None:
        telling, found = sys.getprofile(), {}
        sys.setprofile(None)
        try:
            found = batches.facts(batch)
        except (
            Exception
        ) as error:  # a batch of an unheard-of kind tells nothing, and must not end the script
            self.word.say(batch_error=repr(error))
        finally:
            sys.setprofile(telling)
        loader = self.loaders.get(iterator)
        self.batches.append(found | (_settings_of(loader) if loader is not None else {}))

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._update_goes_on()
        if self.stage == DONE:
            return None
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._counted(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._counted(args[1]), *args[2:]), kwargs
        return None

    def _counted(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure by which an optimizer computes the loss anew: its calls are counted, and are
        no update. They are counted once where an optimizer hands it on to one that it wraps."""
        if getattr(closure, COUNTED, False):
            return closure

        @functools.wraps(closure)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.now["closures"] += 1
            self._update_pauses()
            self.inside_closure += 1
            try:
                return closure(*args, **kwargs)
            finally:
                self.inside_closure -= 1
                self._update_goes_on()

        setattr(counted, COUNTED, True)
        return counted

    def _update_goes_on(self) -> None:
        self.update_began = time.perf_counter()
        if self.stage == PROFILED:
            from torch.profiler import record_function

            self.update_mark = record_function("optimizer")
            self.update_mark.__enter__()

    def _update_pauses(self) -> None:
        self.now["optimizer_ms"] += 1e3 * (time.perf_counter() - self.update_began)
        if self.update_mark is not None:
            self.update_mark.__exit__(None, None, None)
            self.update_mark = None

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._update_pauses()
        if self.stage == DONE and not self.given["keep_going"]:
            self._end_again()
        if self.stage == DONE or os.getpid() != self.pid:
            return
        if self.calls is not None:
            self.calls.pause()  # what follows is no call of the script's
        if self._is_leader(optimizer):
            self._step_ends()
        if self.calls is not None and self.stage == WATCHED:
            self.calls.resume()

    def _is_leader(self, optimizer: Any) -> bool:
        """Whether its steps are those that count: those of the first that stepped, as long as there
        is one; before anything is timed, those of another that steps while the first doesn't."""
        self.silent = 0 if optimizer is self.leader() else self.silent + 1
        if self.leader() is None or (self.silent > SILENT and self.stage == PASSED_OVER):
            self.silent = 0
            self._lead(optimizer)
        return optimizer is self.leader()

    def _lead(self, optimizer: Any) -> None:
        self.leader = weakref.ref(optimizer)
        first = next(p for group in optimizer.param_groups for p in group["params"])
        self.on_gpu = first.device.type == "cuda"
        self.word.note(on_gpu=self.on_gpu)
        if not self.on_gpu:
            self.plan = [(stage, count) for stage, count in self.plan if stage != FROM_IDLE]

    # ---------------------------------------------------------------------------------- stages

    def _step_ends(self) -> None:
        self.steps += 1
        self.word.note(steps=self.steps)
        self._count(self.stage)
        self.now = dict.fromkeys(self.now, 0)
        stage = self._stage_after(self.steps)
        if stage != self.stage:
            self.word.say(stage=stage)
            self._leave(self.stage)
            self.stage = stage
            self._enter(stage)
        elif stage == TIMED:
            self._mark()
        if stage == FROM_IDLE:
            self._begin_from_idle()
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

    def _count(self, stage: str) -> None:
        if stage == TIMED:
            self.counts.append(dict(self.now))
        elif stage == FROM_IDLE:
            self.clock["host_step_ms"].append(1e3 * (time.perf_counter() - self.idle_from))

    def _enter(self, stage: str) -> None:
        if stage == TIMED:
            self._synchronise()
            self._mark()
        elif stage == WATCHED:
            self._watch_calls()
        elif stage == WARMING:
            self._start_profiler()

    def _leave(self, stage: str) -> None:
        if stage == TIMED:
            self._mark()
            self._synchronise()
            pairs = list(zip(self.marks, self.marks[1:], strict=False))
            self.clock["step_ms"] = [
                a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in pairs
            ]
        elif stage == WATCHED:
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

    def _begin_from_idle(self) -> None:
        self._synchronise()
        self.idle_from = time.perf_counter()

    def _watch_calls(self) -> None:
        if self.on_gpu:
            self._watch_syncs()
        if sys.getprofile() is None:
            self.calls = calls.Calls()
        else:
            self.word.say(profiled_by_itself=True)

    def _watch_syncs(self) -> None:
        """Have PyTorch warn at each operator that waits for the GPU: the warning's stack holds the
        line at fault.
        """
        import torch

        before, mode, filters = (
            warnings.showwarning,
            torch.cuda.get_sync_debug_mode(),
            warnings.filters[:],
        )

        def note(
            message: Any,
            category: Any,
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            if _SYNC not in str(message):
                before(message, category, filename, lineno, file, line)
                return
            place = calls.place_of(sys._getframe(1))
            self.sync_lines[place] = self.sync_lines.get(place, 0) + 1

        def set_quietly(mode: int | str) -> None:
            with warnings.catch_warnings():  # it warns that it is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode(mode)

        def unwatch() -> None:
            set_quietly(mode)
            warnings.showwarning = before
            warnings.filters[:] = filters

        set_quietly("warn")
        warnings.simplefilter("always")
        warnings.showwarning = note
        self._unwatch = unwatch

    def _unwatch_syncs(self) -> None:
        if self.on_gpu:
            self._unwatch()

    def _start_profiler(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity

        if self.others_profile:
            return self._give_way(OWN_PROFILER)
        self.profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])],
            schedule=torch.profiler.schedule(
                wait=0, warmup=1, active=self.given["profiled"], repeat=1
            ),
            on_trace_ready=self._export,
            record_shapes=True,
        )
        try:
            with self._of_ours():
                self.profiler.start()
        except (RuntimeError, AssertionError) as error:
            self.word.say(
                error=f"no profiler could be started: {error}. The script runs one of its own, perhaps"
            )
            self.profiler = None

    @contextlib.contextmanager
    def _of_ours(self) -> Iterator[None]:
        """While our own profiler prepares to trace."""
        self.profiler_is_ours = True
        try:
            yield
        finally:
            self.profiler_is_ours = False

    def _profiler_step(self) -> None:
        if self.stage == WARMING:  # it has only just started
            return
        if self.profiler.step_num == 0:
            # so that work launched while warming up does not run into the record
            self._synchronise()
        with self._of_ours():
            self.profiler.step()

    def _export(self, profiler: Any) -> None:
        if _is_first_rank():
            profiler.export_chrome_trace(
                os.path.join(self.given["folder"], f"trace-{self.pid}.json")
            )

    # ----------------------------------------------------------------------------------- record

    def _finish(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        for undo in self.undo if self.given["keep_going"] else []:
            undo()
        if _is_first_rank():
            path = os.path.join(self.given["folder"], f"record-{self.pid}.json")
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(self.record(), file, default=str)
            os.replace(path + ".new", path)
        if not self.given["keep_going"]:
            threading.Thread(
                target=self._see_to_the_end, args=[threading.current_thread()], daemon=True
            ).start()
            raise Finished(0)

    def _see_to_the_end(self, training: threading.Thread) -> None:
        """The record is written: threads that wait for what no longer comes must not keep the
        process. The one that trains has its `finally` blocks run to their end."""
        training.join()
        until = time.monotonic() + OTHERS_S
        while time.monotonic() < until:
            time.sleep(0.1)
        _exit_now()

    def _end_again(self) -> None:
        """The first end was caught."""
        self.caught += 1
        if self.caught >= CAUGHT:
            _exit_now()
        raise Finished(0)

    def record(self) -> dict[str, Any]:
        """What was found, but for the trace; times in milliseconds a step."""
        import torch

        for key in ("data_ms", "optimizer_ms"):
            self.clock[key] = [count[key] for count in self.counts]
        rows = (
            [(kind, place, what, *row) for (kind, place, what), row in self.calls.found.items()]
            if self.calls
            else []
        )
        watched = dict(self.plan)[WATCHED]
        return {
            "device": "cuda" if self.on_gpu else "cpu",
            "torch": torch.__version__,
            **self.clock,
            "backwards": self._micro_batches(),
            "closures": _mean(self.counts, "closures"),
            "batches_per_step": _mean(self.counts, "batches"),
            "fetch_cpu_ms": _mean(self.counts, "fetch_cpu_ms"),
            "epochs": sum(count["epochs"] for count in self.counts),
            "calls": [
                {
                    "kind": kind,
                    "place": place,
                    "what": what,
                    "per_step": times / watched,
                    "ms": ms / watched,
                }
                for kind, place, what, times, ms in rows
            ],
            "sync_lines": {place: count / watched for place, count in self.sync_lines.items()},
            "batches": self.batches,
            "optimizer": _optimizer_facts(self.leader()),
            "config": self._config(torch),
        }

    def _micro_batches(self) -> float:
        """Backward passes a step; those of a closure count once, however often it was called."""
        calls = _mean(self.counts, "closures")
        return _mean(self.counts, "backwards") + (
            _mean(self.counts, "closure_backwards") / calls if calls else 0.0
        )

    def _config(self, torch: Any) -> dict[str, Any]:
        found = {
            "threads": torch.get_num_threads(),
            "cuda_available": torch.cuda.is_available(),
            "world_size": int(os.environ.get("WORLD_SIZE", "1")),
            "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("0", ""),
            "anomaly": torch.is_anomaly_enabled(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
        try:
            found["matmul_tf32"] = torch.backends.cuda.matmul.allow_tf32
            found["cudnn_tf32"] = torch.backends.cudnn.allow_tf32
        except (
            RuntimeError
        ):  # the script used the newer of two settings, that earlier versions don't have
            found["matmul_tf32"] = torch.backends.cuda.matmul.fp32_precision == "tf32"
            found["cudnn_tf32"] = torch.backends.cudnn.conv.fp32_precision == "tf32"
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            peak = torch.cuda.max_memory_allocated() / 1e9
            found |= {"memory_gb": total / 1e9, "free_gb": free / 1e9, "peak_gb": peak}
        return found


def _exit_now() -> None:
    """Without what Python does at its end, which waits for threads."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _mean(counts: list[dict[str, float]], key: str) -> float:
    return sum(count[key] for count in counts) / max(1, len(counts))


def _settings_of(loader: Any) -> dict[str, Any]:
    try:
        length = len(loader)
    except TypeError:  # a stream
        length = None
    return {
        "num_workers": loader.num_workers,
        "pin_memory": bool(loader.pin_memory),
        "persistent_workers": bool(loader.persistent_workers),
        "prefetch_factor": loader.prefetch_factor,
        "batch_size": loader.batch_size,
        "length": length,
    }


def _optimizer_facts(optimizer: Any) -> dict[str, Any]:
    parameters = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None or p.requires_grad
    ]
    first = optimizer.param_groups[0]
    return {
        "name": type(optimizer).__name__,
        "tensors": len(parameters),
        "numbers": sum(p.numel() for p in parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch.") if parameters else "",
        **{name: first.get(name) for name in ("fused", "foreach", "capturable")},
        "takes_fused": "fused" in first,
    }
