"""Traces of a GPU's training steps, made up: a host and a device with a clock each, and what
PyTorch would record.

Times are microseconds. The host launches, copies, reads and waits as told; kernels run one after
the other.
"""

from __future__ import annotations

import traces


class Steps:
    """`step()` begins each optimizer step, `events` are a trace's."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.events: list[dict] = []
        self.correlation = 0
        self.marks: list[float] = []

    def step(self) -> None:
        self.marks.append(self.now)

    def launch(
        self,
        name="vectorized_elementwise_kernel",
        gpu=5.0,
        host=8.0,
        op="",
        dims=None,
        types=None,
        blocks=None,
    ):
        """One kernel, from inside the operator `op` where one is named."""
        began, self.now = self.now, self.now + host
        if op:
            shape = {"Input Dims": dims, "Input type": types} if dims else {}
            self.events.append(traces.op(op, began, self.now, **shape))
        self.correlation += 1
        self.events.append(
            traces.call("cudaLaunchKernel", self.now - 3, self.now - 1, self.correlation)
        )
        start = max(self.now, self.done)
        self.done = start + gpu
        kernel = traces.kernel(name, start, self.done, self.correlation)
        kernel["args"] |= {"blocks per SM": blocks} if blocks else {}
        self.events.append(kernel)

    def copy_in(self, gpu=100.0, pageable=True):
        """A batch to the device: from pageable memory the host waits, until everything before it is
        done, too.
        """
        began = self.now
        self.correlation += 1
        start = max(self.now + 5, self.done)
        self.done = start + gpu
        kind = "Pageable" if pageable else "Pinned"
        self.events.append(
            traces.copy(f"Memcpy HtoD ({kind} -> Device)", start, self.done, self.correlation)
        )
        self.events.append(traces.call("cudaMemcpyAsync", began + 2, began + 4, self.correlation))
        if pageable:
            self.events.append(traces.call("cudaStreamSynchronize", began + 4, self.done + 1, 0))
        self.now = self.done + 2 if pageable else began + 5
        for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
            self.events.append(traces.op(name, began, self.now))

    def item(self):
        """A value is read: the host waits for everything."""
        began = self.now
        self.correlation += 1
        start = max(self.now + 4, self.done)
        self.done = start + 2
        self.events.append(
            traces.copy("Memcpy DtoH (Device -> Pageable)", start, self.done, self.correlation)
        )
        self.events.append(traces.call("cudaMemcpyAsync", began + 1, began + 3, self.correlation))
        self.events.append(traces.call("cudaStreamSynchronize", began + 3, self.done + 1, 0))
        self.now = self.done + 3
        self.events.append(traces.python("train.py(40): train", began, self.now))
        for name in ("aten::item", "aten::_local_scalar_dense"):
            self.events.append(traces.op(name, began, self.now))

    def host(self, took: float, mark: str = "") -> None:
        """The host does something else, in a marked range where one is named."""
        if mark:
            self.events.append(traces.mark(mark, self.now, self.now + took))
        self.now += took

    def marked(self, name: str, began: float) -> None:
        self.events.append(traces.mark(name, began, self.now))

    def trace_events(self) -> list[dict]:
        ends = [*self.marks[1:], self.now]
        windows = [
            traces.mark(f"ProfilerStep#{n}", start, end)
            for n, (start, end) in enumerate(zip(self.marks, ends, strict=True))
        ]
        return [*windows, *self.events]
