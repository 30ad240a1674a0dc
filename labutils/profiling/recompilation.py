"""What torch.compile did: graphs compiled, graph breaks and recompilations, each with the reason it
gave.

    with Compilation() as compiled:
        trainer.run(10)
    print(compiled.graphs, compiled.breaks, compiled.recompilations)

A recompilation compiles code that was compiled before, because a guard of it failed: a size
changed, say.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from typing import Any

from labutils.profiling.compat import dynamo_records

DYNAMO = dynamo_records()


class Compilation:
    """Counts while it is open; what was compiled before isn't counted, but compiling it again is a
    recompilation.

    graphs: how many graphs the compiler took. compilations: how often it set to work on a piece of
    code. recompilations: how often on one that it had compiled before, and `reasons` (reason -> how
    often) the guards that failed; one recompilation names one for each version there was. breaks:
    reason -> graph breaks. given_up: functions that needed so many versions that the compiler left
    them uncompiled. seconds: wall-clock time spent compiling, the backward pass's included. The
    compiler's own warnings, of what is being counted anyway, stay off the page.
    """

    def __init__(self) -> None:
        self.graphs = self.compilations = self.recompilations = 0
        self.reasons: Counter[str] = Counter()
        self.breaks: Counter[str] = Counter()
        self.given_up: list[str] = []
        self.seconds = 0.0
        self._began: list[float] = []

    def metrics(self) -> dict[str, Any]:
        """The counts as a run's metrics."""
        return {
            "graphs": self.graphs,
            "graph_breaks": self.breaks.total(),
            "recompilations": self.recompilations,
            "given_up": len(self.given_up),
            "compile_s": self.seconds,
        }

    def __enter__(self) -> Compilation:
        self._graphs = graphs_compiled()
        self._breaks = len(DYNAMO.graph_break_reasons)
        self._failures = {code: len(reasons) for code, reasons in DYNAMO.guard_failures.items()}
        self._listener = _GivenUp(self.given_up)
        DYNAMO.logger.addHandler(self._listener)
        handlers = logging.getLogger("torch._dynamo").handlers
        self._levels = {handler: handler.level for handler in handlers}
        for handler in handlers:
            handler.setLevel(logging.ERROR)
        DYNAMO.callback_handler.register_start_callback(self._start)
        DYNAMO.callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *exception: object) -> None:
        DYNAMO.logger.removeHandler(self._listener)
        for handler, level in self._levels.items():
            handler.setLevel(level)
        DYNAMO.callback_handler.remove_start_callback(self._start)
        DYNAMO.callback_handler.remove_end_callback(self._end)
        self.graphs = graphs_compiled() - self._graphs
        self.breaks.update(
            _first_line(one.reason) for one in DYNAMO.graph_break_reasons[self._breaks :]
        )
        for code, reasons in DYNAMO.guard_failures.items():
            self.reasons.update(_guard(reason) for reason in reasons[self._failures.get(code, 0) :])

    def _start(self, args: Any) -> None:
        self._began.append(time.perf_counter())
        if args.callback_trigger == DYNAMO.CallbackTrigger.DYNAMO:
            self.compilations += 1
            # "3/2": the third version of the fourth piece of code.
            self.recompilations += not str(args.compile_id).endswith("/0")

    def _end(self, args: Any) -> None:
        began = self._began.pop() if self._began else time.perf_counter()
        if not self._began:  # an inner compilation's time is in the outer one's
            self.seconds += time.perf_counter() - began


def graphs_compiled() -> int:
    """Graphs that the compiler has taken in this process so far."""
    return DYNAMO.counters["stats"]["unique_graphs"]


class _GivenUp(logging.Handler):
    """Notes the functions that the compiler's warning names; it says so nowhere else."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.names = names

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "recompile_limit" in message and (name := re.search(r"function: '([^']+)'", message)):
            self.names.append(name[1])


def _guard(reason: str) -> str:
    """The guard that failed, without the version's number and the code's place."""
    return re.sub(r"^\[?\d+/\d+\S*:\s*", "", _first_line(reason)).partition("  #")[0].strip()


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
