"""Traces of a GPU's training steps, made up: a host and a device with a clock each.

Times are microseconds. The host launches, copies, reads and waits as told; kernels run one after
the other. Only what PyTorch would record is written down.
"""

from __future__ import annotations

from traces import slice_


class Steps:
    """`step()` begins each optimizer step, `events` are a trace's."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.events: list[dict] = []
        self.correlation = 0
        self.marks: list[float] = []

    def step(self) -> None:
        self.marks.append(self.now)

    def op(self, name, start, end, **args):
        self.events.append(slice_("cpu_op", name, start, end, **args))

    def _call(self, name, start, end, correlation):
        self.events.append(slice_("cuda_runtime", name, start, end, correlation=correlation))

    def _work(self, kind, name, gpu, earliest, **args):
        """One piece of the device's work, 1.5 us after everything before it."""
        self.correlation += 1
        start = max(earliest, self.done + 1.5)
        self.done = start + gpu
        args |= {"stream": 7, "device": 0, "correlation": self.correlation}
        self.events.append(slice_(kind, name, start, self.done, 7, **args) | {"pid": 0})
        return self.correlation

    def launch(self, name="vectorized_elementwise_kernel", gpu=5.0, host=8.0, op="", **more):
        """One kernel, from inside the operator `op` where one is named."""
        began, self.now = self.now, self.now + host
        blocks = {"blocks per SM": more.pop("blocks")} if "blocks" in more else {}
        if op:
            names = {"dims": "Input Dims", "types": "Input type"}
            self.op(op, began, self.now, **{names[key]: value for key, value in more.items()})
        number = self._work("kernel", name, gpu, self.now, **blocks)
        self._call("cudaLaunchKernel", self.now - 3, self.now - 1, number)

    def copy_in(self, gpu=100.0, pageable=True):
        """A batch to the device: from pageable memory the host waits until everything is done."""
        began, kind = self.now, "Pageable" if pageable else "Pinned"
        number = self._work("gpu_memcpy", f"Memcpy HtoD ({kind} -> Device)", gpu, began + 5)
        self._call("cudaMemcpyAsync", began + 2, began + 4, number)
        if pageable:
            self._call("cudaStreamSynchronize", began + 4, self.done + 1, 0)
        self.now = self.done + 2 if pageable else began + 5
        for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
            self.op(name, began, self.now)

    def item(self):
        """A value is read: the host waits for everything."""
        began = self.now
        number = self._work("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 2, began + 4)
        self._call("cudaMemcpyAsync", began + 1, began + 3, number)
        self._call("cudaStreamSynchronize", began + 3, self.done + 1, 0)
        self.now = self.done + 3
        for name in ("aten::item", "aten::_local_scalar_dense"):
            self.op(name, began, self.now)

    def host(self, took: float, mark: str = "") -> None:
        """The host does something else, in a marked range where one is named."""
        began, self.now = self.now, self.now + took
        if mark:
            self.marked(mark, began)

    def marked(self, name: str, began: float) -> None:
        self.events.append(slice_("user_annotation", name, began, self.now))

    @property
    def lasts_ms(self) -> float:
        """Until host and device are done."""
        return max(self.now, self.done) / 1e3

    def trace_events(self) -> list[dict]:
        spans = enumerate(zip(self.marks, [*self.marks[1:], self.now], strict=True))
        windows = [slice_("user_annotation", f"ProfilerStep#{n}", *span) for n, span in spans]
        return [*windows, *self.events]
