"""What torch.compile did: graphs compiled, graph breaks and recompilations.

    with Compilation() as compiled:
        trainer.run(10)
    print(compiled.graphs, compiled.graph_breaks, compiled.recompilations)

A recompilation compiles code that was compiled before, because a guard of it failed: a size
changed, say. `TORCH_LOGS=recompiles,graph_breaks` has PyTorch say why.
"""

from __future__ import annotations

import logging
from typing import Any

from labutils.profiling.compat import dynamo

DYNAMO = dynamo()


class Compilation:
    """Counts while it is open; what was compiled before isn't counted, but compiling it again is a
    recompilation.

    graphs: how many graphs the compiler took. graph_breaks: how often it had to end one early.
    recompilations: how often it set to work on a piece of code that it had compiled before.
    given_up: how often it left code uncompiled, as it needed too many versions. The compiler's own
    warnings, of what is being counted anyway, stay off the page.
    """

    def __init__(self) -> None:
        self.graphs = self.graph_breaks = self.recompilations = self.given_up = 0

    def metrics(self) -> dict[str, int]:
        """The counts as a run's metrics."""
        names = ("graphs", "graph_breaks", "recompilations", "given_up")
        return {name: getattr(self, name) for name in names}

    def __enter__(self) -> Compilation:
        self._before = graphs_compiled(), len(DYNAMO.utils.graph_break_reasons)
        handlers = logging.getLogger("torch._dynamo").handlers
        self._levels = {handler: handler.level for handler in handlers}
        for handler in handlers:
            handler.setLevel(logging.ERROR)
        DYNAMO.gives_up.addFilter(self._notes)
        DYNAMO.callback.callback_handler.register_start_callback(self._start)
        return self

    def __exit__(self, *exception: object) -> None:
        for handler, level in self._levels.items():
            handler.setLevel(level)
        DYNAMO.gives_up.removeFilter(self._notes)
        DYNAMO.callback.callback_handler.remove_start_callback(self._start)
        self.graphs = graphs_compiled() - self._before[0]
        self.graph_breaks = len(DYNAMO.utils.graph_break_reasons) - self._before[1]

    def _notes(self, record: logging.LogRecord) -> bool:
        self.given_up += "recompile_limit" in record.getMessage()
        return True

    def _start(self, args: Any) -> None:
        # "3/2": the third version of the fourth piece of code.
        by_dynamo = args.callback_trigger == DYNAMO.callback.CallbackTrigger.DYNAMO
        self.recompilations += by_dynamo and not str(args.compile_id).endswith("/0")


def graphs_compiled() -> int:
    """Graphs that the compiler has taken in this process so far."""
    return DYNAMO.utils.counters["stats"]["unique_graphs"]
